"""docs/results.md and docs/leaderboard.md are what their scripts make of the measurements."""

import json
import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from polyfed.cli.commands.options.recipes import load_recipe_configuration

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])


@pytest.fixture
def page():
    import papers_page

    return papers_page


@pytest.fixture
def board():
    import leaderboard_page

    return leaderboard_page


def both(name, folder):
    return tuple((place / name).read_text(encoding="utf-8") for place in (ROOT / "docs", folder))


def pages(name, docs):
    """The page of this name and those of its folder, by their path."""
    files = [docs / f"{name}.md", *sorted((docs / name).glob("*.md"))]
    return {file.relative_to(docs).as_posix(): file.read_text(encoding="utf-8") for file in files}


def test_the_page_of_results_is_made_of_the_measurements(page, tmp_path):
    page.write(ROOT / "benchmarks" / "results" / "papers", tmp_path)
    made = pages("results", tmp_path)
    assert len(made) == 9
    assert pages("results", ROOT / "docs") == made, "run python benchmarks/papers.py page"


@pytest.mark.lists
@pytest.mark.parametrize("name", ["results", "leaderboard"])
def test_a_page_of_results_begins_with_one_picture_and_one_table(name):
    """Its details are on pages of their own."""
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    before, _, after = text.partition("\n![")
    assert len(before.split()) < 100
    assert after.split("\n\n")[1].startswith("| method |")
    assert len(text.split()) < 2000


@pytest.mark.lists
@pytest.mark.parametrize("name", ["pfedla", "fedhenn", "flha_ghn", "fedpnas"])
def test_the_page_of_a_paper_begins_with_an_answer_and_one_table(name):
    _, answer, table, *_ = (ROOT / "docs" / "results" / f"{name}.md").read_text(encoding="utf-8").split("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    counted = [f"in {number} of {row[2]}" for row in rows for number in (row[3], row[5]) if number != "0"]
    assert counted
    assert [words for words in counted if words not in answer] == []


def test_a_table_takes_only_variants_of_the_data_that_it_was_given(page):
    """A pattern that takes another data set's variant ends a measurement of hours by an error at its end."""
    import papers

    for key, table in papers.TABLES.items():
        cells = papers.find_table(*key.split("/")).cells
        for data, pattern in table.variants.items():
            taken = {(c.recipe, c.variant) for c in cells if c.variant and fnmatchcase(c.variant, pattern or "*")}
            names = {load_recipe_configuration(recipe, "cpu", variant)["data"]["name"] for recipe, variant in taken}
            names = {name.replace("fashion_mosaics", "fashion_mnist") for name in names}  # which are made of it
            assert names <= {data} or table.options[:2] == ("--data.name", data), (key, pattern)


def test_a_table_was_timed_as_a_whole():
    """One whose timing was stopped would be printed as faster than it is."""
    from papers_minutes import calls_of
    from papers_page import TIMED

    timed = json.loads((ROOT / "benchmarks" / "results" / "papers" / TIMED).read_text(encoding="utf-8"))["tables"]
    assert timed
    for key, calls in timed.items():
        assert sorted(calls) == sorted(calls_of(key)), key


def test_no_table_that_was_timed_takes_longer_than_forty_minutes(page):
    assert max(page.minutes(ROOT / "benchmarks" / "results" / "papers").values()) <= 40


def test_minutes_are_of_three_seeds_and_of_all_data_sets(page, tmp_path):
    calls = {
        "fashion_mnist": {"seconds": 100, "seeds": "0"},
        "cifar10": {"seconds": 420, "seeds": "0,1,2"},
    }
    machine = {"cpu": "a processor", "instructions": "AVX", "cores": 4}
    for file, tables in (page.TIMED, {"pfedla/table2": calls}), (page.ONE_BY_ONE, {"flha/fig4": calls}):
        (tmp_path / file).write_text(json.dumps({**machine, "tables": tables}), encoding="utf-8")
    assert page.minutes(tmp_path) == {"pfedla/table2": 12}
    assert "on 4 idle cores (a processor, AVX)" in page.how_long(tmp_path)
    *_, new, old, _ = page.how_long(tmp_path).split("\n")
    assert new == "| pFedLA, Table 2 | Fashion-MNIST 5, CIFAR-10 7 | 12 |  |"
    assert old == "| FLHA-GHN, Fig. 4 |  |  | 12: Fashion-MNIST 5, CIFAR-10 7 |"


def test_only_what_a_method_of_the_comparison_has_is_searched():
    """FedHeNN's η_0 is not a field of the two that stand for one network in its curve."""
    import papers

    curve = papers.CURVES["fedhenn"]
    assert papers.searched(curve, curve.methods) == curve.rates
    assert papers.searched(curve, papers.HOMOGENEOUS) == "lr=0.01,0.02,0.05,0.1,..."


def test_more_bytes_are_not_called_ahead(page):
    gain = {"own": "k = 0", "over": "k = 1", "at": "megabytes", "gain": 9.0, "low": 8.0, "high": 10.0}
    assert page.sentence([gain], "k = 0", "megabytes") == "megabytes: **k = 0** is ahead of k = 1."
    assert page.sentence([{**gain, "unit": "MB"}], "k = 0", "megabytes") == "megabytes: **k = 0** is more than k = 1."


def test_a_difference_that_is_printed_as_0_is_none(page):
    gain = {"own": "a", "over": "b", "at": "x", "unit": "fraction", "gain": 0.0003, "low": 0.0002, "high": 0.0004}
    assert page.kind_of(gain) == page.kind_of({**gain, "low": -0.0004, "high": -0.0002}) == "not decided against"
    assert page.kind_of({**gain, "unit": "%", "low": 0.465, "high": 0.466}) == "not decided against"
    assert page.kind_of({**gain, "unit": "MB", "low": 246.11, "high": 246.11}) == "ahead of"  # whatever the seed
    assert page.kind_of({**gain, "low": 0.0006}) == "ahead of"
    assert page.kind_of({**gain, "unit": "%", "low": -0.3, "high": -0.06}) == "behind"


@pytest.mark.thorough
def test_the_leaderboard_is_made_of_the_measurements(board, tmp_path):
    board.write(ROOT / "benchmarks" / "results" / "leaderboard", tmp_path)
    made = pages("leaderboard", tmp_path)
    assert pages("leaderboard", ROOT / "docs") == made, "run python benchmarks/leaderboard.py page"


@pytest.mark.parametrize(
    ("sentence", "federations"),
    [("of all methods only ", ("digits-0.1", "fashion-0.1")), ("Measured with four architectures: ", ("architectures",)),
     ("With four classes of CIFAR-10 a site ", ("cifar10",)), ("On tweets with an LSTM ", ("tweets",))],
)  # fmt: skip
def test_the_guide_names_the_methods_that_the_leaderboard_has_ahead_of_training_alone(board, sentence, federations):
    guide = " ".join((ROOT / "docs" / "choose.md").read_text(encoding="utf-8").split())
    names = guide.partition(sentence)[2].partition(" are better than training alone")[0]
    found = board.read(ROOT / "benchmarks" / "results" / "leaderboard", federations)
    gains = {(name, label): board.over(one, label, "local") for name, one in found.items() for label in one["methods"]}
    ahead = {label for (_, label), gain in gains.items() if gain and board.kind_of(gain) == "better"}
    assert set(re.findall(r"`(\w+)`", names)) == ahead


def test_every_interval_of_the_guide_is_of_a_page_of_measurements():
    files = [
        "docs/leaderboard.md",
        "docs/leaderboard/federations.md",
        "docs/multicentre.md",
        "benchmarks/notes/flha_ghn.md",
    ]
    measured = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    guide = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")
    intervals = re.findall(r"[+−][\d.]+ \([+−][\d.]+ to [+−][\d.]+\)", guide)
    assert len(intervals) > 20
    fractions = {
        interval: re.sub(r"[\d.]+", lambda found: f"{float(found[0]) / 100:.3f}", interval) for interval in intervals
    }  # of AUC, which the pages of real sites have from 0 to 1
    assert [points for points, auc in fractions.items() if points not in measured and auc not in measured] == []


def test_a_sentence_that_its_intervals_do_not_carry_is_not_written(board, monkeypatch):
    gain = {"gain": 0.01, "low": -0.01, "high": 0.03}
    found = {"groups": {"unit": "%", "methods": {"local": {}, "ifca": {"against": {"local": gain}}}}}
    for kind in ("better", "not decided"):
        monkeypatch.setattr(board, "CONCLUSIONS", (("IFCA helps: {}.", (("groups", "ifca", "local", kind),)),))
        if kind == "better":
            with pytest.raises(SystemExit, match="is not carried: ifca over local in 'groups'"):
                board.conclusions(found, board.CONCLUSIONS)
        else:
            assert "- IFCA helps: +1.0 (−1.0 to +3.0)." in board.conclusions(found, board.CONCLUSIONS)


def test_federations_that_were_searched_by_another_rule_are_refused(board, tmp_path):
    found = board.read(ROOT / "benchmarks" / "results" / "leaderboard", ["groups"])["groups"]
    other = found | {"tuning": "chosen by the best mean validation score"}
    (tmp_path / "groups.json").write_text(json.dumps(other), "utf-8")
    with pytest.raises(SystemExit, match="groups: searched by another rule"):
        board.read(tmp_path, ["groups"])


def test_a_further_form_of_a_method_has_a_comparison_of_its_own(page, tmp_path):
    from papers_curves import of_curve

    def gain(value):
        return {"gain": value, "low": value - 0.01, "high": value + 0.01, "by_seed": [value, value]}

    scores = {"mean": 0.5, "interval": None, "rounds": [5, 5], "seconds": 12.5}
    point = {"seeds": "0,1", "tuned": "lr=0.1,0.3", "rounds": 40, "chosen": {}, "methods": dict.fromkeys("abc", scores),
             "forms": {"b": {"normalise": False, "clip_norm": None}}, "against": {"b": gain(-0.1), "c": gain(0.2)},
             "of_forms": {"b": {"c": gain(0.3)}},
             "after_all": {"means": {"a": 0.625, "b": 0.5, "c": 0.25},
                           "against": {"a": {"c": gain(0.375)}, "b": {"c": gain(0.25)}}}}  # fmt: skip
    found = {"own": "a", "recipe": "r", "variant": "v", "points": {"20": point}}
    text = of_curve("x", "A", found, tmp_path, "")
    text, last = text.split("after all rounds, whatever")
    assert "| **`a`** | 62.5 |" in last
    assert "| `c` | +37.5 (+36.5 to +38.5) |\n\n- against `c`: ahead with 20 examples" in last
    assert "| `b` is ahead of it after all rounds by | 20 |" in last
    assert "| **`a`** | 12 |" in last.split("Cost: ")[1]
    assert "`b` is `a` with `normalise: false, clip_norm: null`" in last
    own, form = text.split("| `b` is ahead of it by")
    assert "| `b` | −10.0 (−11.0 to −9.0) |" in own
    assert "| `c` | +20.0 (+19.0 to +21.0) |" in own
    assert "| `c` | +30.0 (+29.0 to +31.0) |" in form
    assert "**`a`**" not in form


def test_a_curve_says_where_means_cross():
    from papers_curves import crossing

    def points(*gains):
        some = {str(10 * 2**k): {"gain": g, "low": g - 2, "high": g + 2, "by_seed": [g]} for k, g in enumerate(gains)}
        return {"own": "a", "points": {size: {"against": {"b": gain}} for size, gain in some.items()}}

    for gains, said in (
        ((-3.0, -1.0, 1.0, 3.0), "the means cross between 20 and 40"),
        ((-1.0, 1.0, -1.0), "the means cross between 10 and 20 and between 20 and 40"),
        ((1.0, 3.0), "the means do not cross"),
    ):
        found = points(*gains)
        assert crossing(found, [int(size) for size in found["points"]], "a", "b").endswith(f"; {said}.")
    assert "cross" not in crossing(points(1.0), [10], "a", "b")  # at one size nothing can


def test_scores_by_round_are_those_of_the_runs(page, tmp_path):
    import papers

    for seed, accuracy in (("0", 0.5), ("1", 0.7)):
        for method, more in (("", 0.0), ("local", -0.25)):
            folder = tmp_path / f"run{seed}" / (f"baselines/{method}" if method else "")
            folder.mkdir(parents=True)
            rows = [
                {"a": {"accuracy": accuracy + more + 0.1 * r}, "b": {"accuracy": accuracy + more}} for r in range(3)
            ]
            lines = [{"round": r, "clients": row if r else {"a": {}}} for r, row in enumerate(rows)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cells = {m: {"method": m, "seeds": {"0": 0, "1": 0}, "runs": ["run0", "run1"]} for m in ("", "local")}
    found = {f"digits, {m or 'own'}": papers.over_rounds(cell, tmp_path) for m, cell in cells.items()}
    assert found["digits, own"] == {
        "1": pytest.approx({"0": 0.55, "1": 0.75}),
        "2": pytest.approx({"0": 0.6, "1": 0.8}),
    }
    assert page.by_round(found, ["own"]) == [
        "| digits, % after round | 1 | 2 |", "|---|---|---|", "| **own** | 65.0 | 70.0 |", "| local | 40.0 | 45.0 |",
        "| own − local | +25.0 (+25.0 to +25.0) | +25.0 (+25.0 to +25.0) |", "",
    ]  # fmt: skip


def test_one_setting_under_two_names_is_not_compared():
    import papers
    from papers_cells import gains

    def cell(row, variant, run):
        same = {"column": "x", "unit": "%", "method": "", "metric": "score", "seeds": {"0": 3.0}}
        return {"row": row, "variant": variant, "runs": [run], **same}

    cells = [
        cell("a", "base", "run1"),
        cell("b", "eta-1", "run1"),
        cell("c", "eta-2", "run2"),
        cell("d", "base", "run1"),
    ]
    assert [gain["over"] for gain in gains(cells, papers.Table({}, ("a",)))] == [
        "c",
        "d",
    ]  # d is another part of the run


def test_differences_after_all_rounds_are_those_of_the_means():
    checked = 0
    for file in (ROOT / "benchmarks" / "results" / "papers").glob("*-examples.json"):
        for point in json.loads(file.read_text("utf-8"))["points"].values():
            last = point.get("after_all", {"means": {}, "against": {}})
            for form, others in last["against"].items():
                for name, gain in others.items():
                    assert gain["gain"] == pytest.approx(last["means"][form] - last["means"][name], abs=1e-9)
                    assert gain["gain"] == pytest.approx(sum(gain["by_seed"]) / len(gain["by_seed"]), abs=1e-9)
                    checked += 1
    assert checked > 50


def test_rates_at_the_edge_of_what_was_tried_are_told(page):
    from papers_curves import besides, edges, unfinished

    rates = {"local": {"lr": 0.2}, "fedavg": {"lr": 0.02}, "pfedla": {"lr": 0.05}, "fedmd": {}}
    wider = {"tuned": "lr=0.02,0.05,0.2,0.4", "chosen": {"pfedla": {"lr": 0.05}, "local": {"lr": 0.2}}}
    found = {"points": {"20": wider, "40": {"tuned": "lr=0.02,0.05,0.2", "chosen": rates}}}
    smallest, largest = "took the smallest rate", "took the largest rate"
    told = f"- with 40 examples `fedavg` {smallest}\n- with 40 examples `local` {largest}"
    assert edges(found, [20, 40]) == f"At the edge of what was tried:\n\n{told}"
    assert edges(found, [20]) == "At the edge of what was tried: none."
    found = {
        "points": {"20": {"rounds": 60, "methods": {"pfedla": {"rounds": [55, 55]}, "local": {"rounds": [50, 50]}}}}
    }
    assert unfinished(found, [20]).endswith(":\n\n- `pfedla` with 20 examples (55 of 60)")
    chosen = {"fedhenn": {"lr": 0.1, "eta0": 0.1}, "local": {"lr": 0.4}}
    tried = {"fedhenn": [0.1, 0.1, 0.2, 0.2], "local": [0.1, 0.2, 0.4]}
    found = {"points": {"20": {"tuned": "lr=0.1,0.2,...;eta0=0.1,1", "chosen": chosen, "tried": tried}}}
    told = f"- with 20 examples `fedhenn` {smallest}\n- with 20 examples `local` {largest}"
    assert edges(found, [20]) == f"At the edge of what was tried:\n\n{told}"
    assert besides(found, [20])[0].startswith(
        "Of 0.1, 1 for `eta0` of `fedhenn`, in all combinations with the rates: 0.1 with 20"
    )


def test_a_difference_is_decided_where_its_interval_leaves_out_0(page):
    told = [page.kind_of({"low": low, "high": high}) for low, high in ((0.1, 2), (-1, 0.1), (-2, -1), (None, None))]
    assert told == ["ahead of", "not decided against", "behind", "one seed only, against"]


def test_what_one_data_set_adds_leaves_the_rest_of_a_table():
    import papers_cells

    def cell(row, ours):
        return {"row": row, "column": "FedRep", "ours": ours}

    before = [cell("images", 66.4), cell("tweets", 70.0), cell("a row that the paper no longer has", 1.0)]
    cells, kept = papers_cells.completed([cell("images", None), cell("tweets", 73.3), cell("digits", None)], before)
    assert cells == [cell("images", 66.4), cell("tweets", 73.3)]
    assert kept == {("images", "FedRep")}


def test_every_difference_is_made_of_the_cells_that_were_measured():
    """What a table compares may have changed since it was measured; some tables have not been."""
    import papers
    import papers_cells

    for key, table in papers.TABLES.items():
        file = papers.RESULTS / f"{key.replace('/', '-')}.json"
        if file.exists():
            content = json.loads(file.read_text(encoding="utf-8"))
            made = json.loads(json.dumps(papers_cells.gains(content["cells"], table)))
            assert made == content["gains"], key


def test_methods_are_not_compared_where_a_place_is_no_score():
    import papers
    import papers_cells

    cell = {"unit": "fraction", "variant": "", "seeds": {"0": 0.5, "1": 0.6}}
    cells = [
        {**cell, "row": row, "column": column} for row in ("turned", "turned, deviation") for column in ("own", "other")
    ]
    plan = papers.Table({}, ("own",), by="column", but=("*deviation*",))
    assert [gain["at"] for gain in papers_cells.gains(cells, plan)] == ["turned"]


def test_further_seeds_join_those_of_a_table():
    import papers_cells

    def cell(row, **seeds):
        ours = sum(seeds.values()) / len(seeds) if seeds else None
        return {"row": row, "column": "FedRep", "ours": ours, "paper": 50.0, "seeds": seeds, "runs": [*seeds]}

    before = [cell("images", s0=40.0, s1=44.0), cell("tweets", s0=70.0)]
    now = [cell("images", s2=48.0), cell("tweets"), cell("digits", s2=1.0)]
    (images, tweets, digits), kept = papers_cells.completed(now, before, add=True)
    assert images["seeds"] == {"s0": 40.0, "s1": 44.0, "s2": 48.0}
    assert images["runs"] == ["s0", "s1", "s2"]
    assert (images["ours"], images["ours_spread"], images["difference"]) == (44.0, 4.0, -6.0)
    assert (tweets, digits) == (before[1], now[2])
    assert kept == {("images", "FedRep"), ("tweets", "FedRep")}
    with pytest.raises(SystemExit, match="seeds s1 are in the results already"):
        papers_cells.completed([cell("images", s1=44.0)], before, add=True)
