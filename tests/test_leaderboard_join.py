"""One more method joins the committed results of a federation; the other methods are not run again."""

import argparse
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
COMMITTED = BENCHMARKS / "results" / "leaderboard"


@pytest.fixture
def leaderboard(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import leaderboard

    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "architectures.json").write_text(
        (COMMITTED / "architectures.json").read_text(encoding="utf-8")
    )
    monkeypatch.setattr(leaderboard, "RESULTS", tmp_path / "results")
    return leaderboard


def results_of(leaderboard, name="architectures"):
    return json.loads((leaderboard.RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def settings(what="join", **changes):
    words = {
        "what": what,
        "seeds": "7,8",
        "runs": "unused",
        "data": [],
        "only": "fedavg_kd",
        "parallel": 1,
        "quiet": True,
    }
    return argparse.Namespace(**{**words, "more": "", **changes})


@pytest.fixture
def comparison(leaderboard, monkeypatch):
    """What a comparison of `local` and FedAvg with distillation finds, without its runs."""
    there = results_of(leaderboard)
    found = {
        "seeds": there["seeds"], "rounds": there["rounds"], "clients": [None] * there["clients"],
        "mean_answer": {"test_examples": there["test_examples"]},
        "tuning": {"sentence": there["tuning"], "edge": ["lr=0.02 of fedavg_kd", "lr=2 of local"]},
        "methods": {"local": {"statistics": {"mean": there["methods"]["local"]["mean"] + 0.0123}}, "fedavg_kd": {}},
    }  # fmt: skip
    asked = []
    monkeypatch.setattr(
        leaderboard, "compare_by_score", lambda words, out, only, compared: asked.append(words) or found
    )
    monkeypatch.setattr(leaderboard, "of", lambda found, label, out: {"mean": 0.9, "of": label})
    monkeypatch.setattr(leaderboard, "at_equal", lambda method, out, kind, limit: None if limit is None else 0.8)
    return found, asked


def test_a_row_is_added_and_the_others_stay(leaderboard, comparison, tmp_path, capsys):
    before = results_of(leaderboard)
    leaderboard.run("architectures", settings(runs=str(tmp_path)))
    after = results_of(leaderboard)
    assert after["methods"].pop("fedavg_kd") == {"mean": 0.9, "of": "fedavg_kd"}
    before["methods"].pop("fedavg_kd")
    assert after["methods"] == before["methods"]
    assert {kind: one["means"]["fedavg_kd"] for kind, one in after["equal"].items()} == {
        "bytes": 0.8, "seconds": 0.8, "best": None
    }  # fmt: skip
    assert after["edge"] == [*before["edge"], "lr=0.02 of fedavg_kd"]
    (words,) = comparison[1]
    assert words[words.index("--seeds") + 1] == "0,1,2", "those of the results"
    assert json.loads(words[words.index("--baselines") + 1]) == ["fedavg_kd"], "nothing else is run"
    local = after["joined"]["fedavg_kd"]["local"]
    assert local["difference"] == pytest.approx(0.0123)
    assert local["here"] == pytest.approx(local["committed"] + 0.0123)
    assert "local is at 0.77725 here, and at 0.76495 in the results (+0.01230)" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["seeds", "rounds", "clients"])
def test_another_federation_is_refused(leaderboard, comparison, tmp_path, key):
    comparison[0][key] = {"seeds": [0], "rounds": 3, "clients": [None]}[key]
    before = results_of(leaderboard)
    with pytest.raises(SystemExit, match=f"not the federation of the results: .*{key}"):
        leaderboard.run("architectures", settings(runs=str(tmp_path)))
    assert results_of(leaderboard) == before


def test_renewing_still_asks_for_the_same_local(leaderboard, comparison, tmp_path, monkeypatch):
    monkeypatch.setattr(leaderboard, "compared", lambda words, out: comparison[0])
    with pytest.raises(SystemExit, match="not the same runs; `join` takes them"):
        leaderboard.run("architectures", settings("run", runs=str(tmp_path)))


def test_without_results_or_methods_there_is_nothing_to_join(leaderboard, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="is missing: a method joins results that are there"):
        leaderboard.run("groups", settings(runs=str(tmp_path)))
    monkeypatch.setattr(sys, "argv", ["leaderboard.py", "join", "architectures"])
    with pytest.raises(SystemExit, match="which methods join"):
        leaderboard.main()


def test_the_page_says_which_rows_joined(leaderboard, comparison):
    import leaderboard_page

    one = {key: value for key, value in results_of(leaderboard).items() if key != "joined"}
    plain = leaderboard_page.federation(one)
    one["joined"] = {
        "fml": {"with": ["local", "fml"], "local": {"committed": 0.76495, "here": 0.77, "difference": 0.00505}}
    }
    page = leaderboard_page.federation(one)
    assert "The row of `fml` joined later" in page
    assert "`local` is at 77.0 instead of 76.5" in page
    assert "joined later" not in plain


def write_search(folder, rates):
    """Runs of a search, of 12 rounds each, with the validation scores and losses of two clients in rounds 3, 6, 9 and 12."""
    for lr, (scores, losses) in rates.items():
        run = folder / f"lr={lr}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(f"algorithm: {{name: fedper, lr: {lr}}}\n", encoding="utf-8")
        lines = []
        for number in range(1, 13):
            rows = {"a": {"accuracy": 0.1}, "b": {"accuracy": 0.1}, "none": {"accuracy": 0.1}}
            if number % 3 == 0 and number // 3 <= len(scores):
                for client, shift in (("a", 0.1), ("b", -0.1)):
                    rows[client] |= {
                        "val_accuracy": scores[number // 3 - 1] + shift,
                        "val_loss": losses[number // 3 - 1],
                    }
            lines.append(json.dumps({"round": number, "clients": rows}))
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def comparison_that_writes(write_tuning, *methods):
    """Returns a stand-in for a comparison, which writes a search at its first call, and the words of each call."""
    asked = []

    def compared(words, out):
        asked.append(words)
        if not asked[1:]:
            out.mkdir()
            (out / "comparison.yaml").write_text("metrics: [{name: accuracy}]\n", encoding="utf-8")
            write_tuning(out / "tuning")
        return {"methods": {label: {} for label in methods}, "rounds": 12, "tuning": {"sentence": "by loss"}}

    return compared, asked


def test_the_rate_of_the_committed_rule_is_that_of_the_last_three_scores(leaderboard, tmp_path):
    from leaderboard_rule import choose_values

    write_search(
        tmp_path,
        {
            0.02: ((0.9, 0.5, 0.5, 0.5), (1.0,) * 4),  # good in round 3 alone
            0.2: ((0.1, 0.6, 0.6, 0.6), (2.0,) * 4),
            0.6: ((0.1, 0.5, 0.6, 0.7), (1.5,) * 4),  # as good, and of a lower loss
            2.0: ((0.1, 0.5, 0.5, 0.7), (0.5,) * 4),  # best in the last round, and of the lowest loss
            4.0: ((0.1, 0.6, 0.6, 0.6), (None,) * 4),  # of a loss that is not finite
        },
    )
    assert choose_values(tmp_path, "accuracy", 12) == ({"lr": 0.6}, [0.02, 0.2, 0.6, 2.0, 4.0])
    diverged = tmp_path / "in_round_1"
    diverged.mkdir()
    (diverged / "config.yaml").write_text("algorithm: {lr: 6.0}\n", encoding="utf-8")
    assert choose_values(tmp_path, "accuracy", 12) == ({"lr": 0.6}, [0.02, 0.2, 0.6, 2.0, 4.0, 6.0])
    with pytest.raises(SystemExit, match="no run of the search reached round 30"):
        choose_values(tmp_path, "accuracy", 30)


def test_a_search_by_score_fixes_the_rates_of_the_final_runs(leaderboard, tmp_path):
    from leaderboard_rule import compare_by_score

    def write_tuning(folder):
        write_search(folder / "local", {0.02: ((0.5,) * 4, (1.0,) * 4), 0.2: ((0.4,) * 4, (0.1,) * 4)})
        write_search(folder / "fedper", {0.02: ((0.4,) * 4, (0.1,) * 4), 0.2: ((0.5,) * 4, (1.0,) * 4)})

    compared, asked = comparison_that_writes(write_tuning, "local", "fedavg", "fedper")
    words = ["compare", "leaderboard", "--seeds", "0,1,2", "--tune", "grid", "--out", "x", "--baselines", '["fedper"]']
    found = compare_by_score(words, tmp_path, ["fedper"], compared)
    search, final = asked
    assert (search[search.index("--seeds") + 1], search[search.index("--tune") + 1]) == ("0", "grid")
    assert (final[final.index("--seeds") + 1], final[final.index("--tune") + 1]) == ("0,1,2", "none")
    assert final[final.index("--algorithm.lr") + 1] == "0.02"
    assert json.loads(final[final.index("--baselines") + 1]) == [{"name": "fedper", "lr": 0.2}]
    assert found["tuning"]["methods"]["fedper"] == {"chosen": {"lr": 0.2}, "tried": [0.02, 0.2]}
    assert found["tuning"]["edge"] == ["lr of local", "lr of fedper"]


def test_a_search_of_several_fields_leaves_out_those_that_no_method_has(leaderboard, tmp_path):
    from leaderboard_rule import compare_by_score, keep_known_fields

    tune = "lr=grid;lam=0.1,1;clip_norm=null,10"
    assert keep_known_fields(tune, ["local", "fedgh"]) == "lr=grid;clip_norm=null,10"
    assert keep_known_fields(tune, ["local", "fedproto"]) == tune
    assert keep_known_fields("grid", ["local"]) == "grid"

    def write_tuning(folder):
        for label in ("local", "fedgh"):
            write_search(folder / label, {0.2: ((0.5,) * 4, (1.0,) * 4), 0.6: ((0.4,) * 4, (1.0,) * 4)})
            for run in (folder / label).iterdir():
                clip, lr = "10" if label == "local" else "null", run.name.removeprefix("lr=")
                (run / "config.yaml").write_text(
                    f"algorithm: {{lr: {lr}, clip_norm: {clip}, mu: 3}}\n", encoding="utf-8"
                )

    compared, asked = comparison_that_writes(write_tuning, "local", "fedgh")
    words = ["compare", "rivals", "--seeds", "0,1", "--tune", tune, "--trials", "12", "--out", "x", "--baselines"]
    found = compare_by_score([*words, '["fedgh"]'], tmp_path, ["fedgh"], compared)
    search, final = asked
    assert search[search.index("--tune") + 1] == "lr=grid;clip_norm=null,10"
    assert ("--trials" in search, "--trials" in final) == (True, False), (
        "which `polyfed compare` refuses without a search"
    )
    assert final[final.index("--algorithm.clip_norm") + 1] == "10"
    assert json.loads(final[final.index("--baselines") + 1]) == [{"name": "fedgh", "lr": 0.2, "clip_norm": None}]
    assert found["tuning"]["methods"]["fedgh"] == {"chosen": {"lr": 0.2, "clip_norm": None}, "tried": [0.2, 0.6]}


def test_rows_that_joined_after_the_first_head_are_not_called_older(leaderboard):
    import leaderboard_page

    one = results_of(leaderboard)
    assert {"lg_fedavg", "fedgh"} <= one["joined"].keys()
    assert "before all clients began with one head" not in leaderboard_page.federation(one)
    one["joined"].pop("fedgh")
    assert "Rows of `fedgh` were measured before all clients began with one head" in leaderboard_page.federation(one)


@pytest.mark.slow
def test_a_method_joins_a_federation_that_was_really_run(leaderboard, tmp_path, monkeypatch):
    """With tiny settings: the row is that of a comparison, and `local` of the same machine is the same to the bit."""
    tiny = "--rounds 2 --evaluate-every 1 --data.clients 3 --data.examples_per_client 60 --workers 0"
    monkeypatch.setitem(leaderboard.federations.__globals__, "baselines", lambda config, only: only)
    first = settings("run", runs=str(tmp_path / "first"), seeds="0,1", only="", more=f'{tiny} --baselines ["fedavg"]')
    leaderboard.run("digits-1", first)
    before = results_of(leaderboard, "digits-1")
    leaderboard.run("digits-1", settings(runs=str(tmp_path / "second"), only="moon", more=tiny))
    after = results_of(leaderboard, "digits-1")
    assert set(after["methods"]) == {"local", "fedavg", "fedavg_ft", "moon"}
    assert {label: row for label, row in after["methods"].items() if label != "moon"} == before["methods"]
    assert after["joined"]["moon"]["local"]["difference"] == 0
    assert after["methods"]["moon"]["against"].keys() == {"local", "fedavg", "fedavg_ft"}
    assert after["methods"]["moon"]["mean"] > 0
