"""`polyfed compare`: tables on standard output, one sentence for what can be fixed, and going on in a directory."""

import json
import os
import re

import pytest

from polyfed.cli.commands.compare import compare_command
from polyfed.cli.commands.compare.compare_options import parse_compare_options
from polyfed.cli.main import main
from polyfed.core.errors import UserError
from polyfed.simulation.experiment import load_participants

SMALL = [
    "--data.clients", "3", "--data.examples_per_client", "20", "--rounds", "2", "--model", "mlp",
    "--parallel", "1", "--workers", "0", "--quiet",
]  # fmt: skip
PLAIN = ["--tune", "none", "--no-references"]


@pytest.fixture
def polyfed(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder: status, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def polyfed(*words):
        capsys.readouterr()
        status = main(words)
        return status, *capsys.readouterr()

    polyfed.here = tmp_path
    return polyfed


@pytest.mark.slow
def test_a_comparison_from_a_recipe(polyfed):
    """Tables; hyper-parameters from a file; the same command again repeats nothing; other readings of a directory."""
    (polyfed.here / "hyper.yaml").write_text("strong: {name: fedprox, mu: 5.0}\npfedla: {hn_lr: 2e-3}\n")
    words = [
        "fedavg_digits",
        *SMALL,
        *PLAIN,
        "--seeds",
        "0,1",
        "--algorithms",
        "strong,pfedla",
        "--method_config",
        "hyper.yaml",
        "--out",
        "a",
    ]
    status, out, err = polyfed("compare", *words, "--tables")
    assert status == 0, err
    for told in (
        "95 % interval",
        "worst client",
        "points gained over local",
        "of 3 clients, 2 seeds",
        "strong",
        "fedavg_ft",
    ):
        assert told in out
    content = json.loads((polyfed.here / "a" / "comparison.json").read_text())
    assert list(content["methods"]) == ["local", "fedavg", "fedavg_ft", "strong", "pfedla"]
    fields = {label: method["fields"] for label, method in content["methods"].items()}
    assert (fields["strong"]["mu"], fields["pfedla"]["hn_lr"]) == (5.0, 0.002)
    assert {(f["local_epochs"], f["batch_size"]) for f in fields.values()} == {(2, 16)}  # the recipe's
    assert content["same_clients"] is False  # each seed divides the data
    assert any("2 seeds partitions the data again" in sentence for sentence in content["covers"])
    before = sorted((p, p.stat().st_mtime_ns) for p in polyfed.here.rglob("metrics.jsonl"))
    assert len(before) == 10
    assert polyfed("compare", *words, "--tables")[1] == out
    short = polyfed("compare", *words)[1]
    assert out.endswith(short)
    assert short.splitlines()[-1] == "Page: polyfed report a   Tables: polyfed show a"
    status, again, _ = polyfed("compare", "a", "--budget", "bytes", "--target", "0.05", "--quiet", "--tables")
    assert status == 0
    assert "what the cheapest run spends in all" in again
    assert "2 of 2" in again
    assert sorted((p, p.stat().st_mtime_ns) for p in polyfed.here.rglob("metrics.jsonl")) == before
    status, _, err = polyfed("resume", "a")
    assert (status, err) == (0, "This comparison was finished, and nothing was left to run.\n")
    assert polyfed("resume", "a/local/seed-1", "--quiet")[0] == 0  # a run is described by its own config.yaml
    status, _, err = polyfed("resume", "a/local/seed-1", "--rounds", "9")
    assert status == 2
    assert "a/local/seed-1 is a run of a comparison, whose runs all have the same rounds" in err
    assert "compare again with --rounds 9 and another --out than " in err
    assert "a is a comparison, whose runs all have the same rounds" in polyfed("resume", "a", "--rounds", "9")[2]
    status, _, err = polyfed("compare", "a", "--seeds", "5")
    assert (status, "decides what is compared, so --seeds cannot be given" in err) == (2, True)


def test_a_method_that_fails_is_told_and_the_status_is_1(polyfed):
    (polyfed.here / "hyper.yaml").write_text("wild: {name: fedprox, lr: 1.0e+38}\n")
    words = [
        "fedavg_digits",
        *SMALL,
        *PLAIN,
        "--algorithms",
        "wild",
        "--method_config",
        "hyper.yaml",
        "--seeds",
        "0",
        "--out",
        "a",
    ]
    status, out, err = polyfed("compare", *words)
    assert status == 1
    assert "failed wild: round 1" in out
    assert "lower lr or set clip_norm (method wild, seed 0)" in out
    assert "no results of wild, for the reason printed above" in err
    content = json.loads((polyfed.here / "a" / "comparison.json").read_text())
    assert list(content["methods"]) == ["local", "fedavg", "fedavg_ft"]
    assert content["failed"].keys() == {"wild"}
    status, out, _ = polyfed("report", "a", "--out", "report.html")
    assert status == 0
    assert "wild failed and is not in the table: round 1" in (polyfed.here / "report.html").read_text()


@pytest.mark.slow
def test_a_search_by_optuna_goes_on_from_the_directory(polyfed):
    words = ["fedavg_digits", *SMALL, "--data.val_fraction", "0.3", "--tune", "lr=0.01..0.3", "--trials", "2"]
    status, out, err = polyfed("compare", *words, "--algorithms", "fedavg", "--seeds", "0", "--out", "a", "--tables")
    assert status == 0, err
    assert "searched lr, by Optuna: up to 2 runs of 2 rounds with seed 0 for each method that has the fields" in out
    before = sorted((p, p.stat().st_mtime_ns) for p in polyfed.here.rglob("metrics.jsonl"))
    assert len(before) == 9
    assert polyfed("compare", "a", "--quiet", "--tables")[1] == out
    assert sorted((p, p.stat().st_mtime_ns) for p in polyfed.here.rglob("metrics.jsonl")) == before
    status, _, err = polyfed("compare", "a", "--tune", "lr=0.01..0.3", "--trials", "3")
    assert (status, "decides what is compared" in err) == (2, True), err
    whole = (polyfed.here / "a" / "comparison.yaml").read_text()
    (polyfed.here / "a" / "comparison.yaml").write_text(whole.replace("same_data:", "same_dater:"))
    status, _, err = polyfed("compare", "a")
    assert (status, "comparison.yaml is damaged: experiment has no same_data" in err) == (2, True)


@pytest.mark.thorough
def test_one_dealing_for_all_seeds(polyfed):
    status, out, err = polyfed(
        "compare",
        "fedavg_digits",
        *SMALL,
        *PLAIN,
        "--seeds",
        "0,1",
        "--algorithms",
        "fedavg",
        "--same_data",
        "--budget",
        "steps",
        "--out",
        "a",
    )
    assert status == 0, err
    content = json.loads((polyfed.here / "a" / "comparison.json").read_text())
    assert content["same_clients"] is True
    assert content["data"]["0"] == content["data"]["1"]
    (other,) = (polyfed.here / "a").glob("fedavg/seed-1/config.yaml")
    status, _, err = polyfed("run", str(other))
    assert (status, "divided by another seed of a comparison" in err) == (2, True)
    assert {row["verdict"] for row in content["methods"]["fedavg"]["statistics"]["clients"].values()} <= {
        "gains", "loses", "undecided",
    }  # fmt: skip
    assert re.search(r"not decided +mean over clients +90 test examples cannot answer", out)


def test_folds_read_and_deal_the_data_once(polyfed, monkeypatch):
    loaded = []

    def load(experiment):
        loaded.append(experiment)
        return load_participants(experiment)

    monkeypatch.setattr(compare_command, "load_participants", load)
    words = ["fedavg_digits", *SMALL, *PLAIN, "--rounds", "1", "--folds", "2", "--out", "a"]
    assert polyfed("compare", *words)[0] == 0
    assert len(loaded) == 1


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::UserWarning")  # about data of a few rows
def test_a_site_that_is_too_small_for_folds_leaves_the_others_their_answers(polyfed, tmp_path):
    sites = ["north"] * 30 + ["south"] * 30 + ["tiny"] * 3
    rows = [f"{37 * k % 63}.5,{k % 2},{site}" for k, site in enumerate(sites)]
    (tmp_path / "table.csv").write_text("\n".join(["age,ill,site", *rows]))
    words = ["--data.target", "ill", "--data.site", "site", "--rounds", "1", "--tune", "none", "--no-references", "-q"]
    status, out, err = polyfed("compare", "table.csv", "--algorithms", "fedavg", *words, "--parallel", "1")
    assert status == 0
    assert "no folds" not in err
    for told in ("mean over 2 of 3 sites", "north", "south", "not decided +tiny +3 examples, too few for 5 folds"):
        assert re.search(told, out)
    status, out, _ = polyfed("compare", "table.csv", "--algorithms", "fedavg", *words, "--folds", "5", "--plan")
    assert status == 0
    assert "tiny (3 examples) is too small for folds: it trains and is not tested; means are over 2 other" in out


@pytest.mark.filterwarnings("ignore::UserWarning")  # about data of a few rows
def test_data_that_nothing_can_be_done_with_are_refused_in_one_sentence(polyfed, tmp_path):
    rows = [f"{37 * k % 63}.5,{k % 2},{'north' if k % 3 else 'south'}" for k in range(60)] + ["1.5,0,single"]
    (tmp_path / "table.csv").write_text("\n".join(["age,ill,site", *rows]))
    status, _, err = polyfed("compare", "table.csv", "--data.target", "ill", "--data.site", "site", "-q")
    assert (status, err.count("single has 1 example, too few to test on")) == (2, 1)


@pytest.mark.thorough
def test_folds_from_the_command_line(polyfed):
    """A plan writes nothing; a comparison of folds goes on in its directory, with the repeats that it began with."""
    words = ["fedavg_digits", *SMALL, *PLAIN, "--rounds", "1", "--folds", "2", "--fold-repeats", "2", "--out", "a"]
    status, out, err = polyfed("compare", *words, "--plan")
    assert status == 0, err
    assert "12 runs" in out
    assert not (polyfed.here / "a" / "comparison.yaml").exists()
    status, out, err = polyfed("compare", *words)
    assert status == 0, err
    content = json.loads((polyfed.here / "a" / "comparison.json").read_text())
    assert (content["folds"], content["fold_repeats"], content["seeds"]) == (2, 2, [0, 1, 2, 3])
    assert [row["basis"] for row in content["answers"]] == ["50 test examples"] * 3
    stored = polyfed.here / "a" / "comparison.json"
    before = stored.stat().st_mtime_ns
    assert polyfed("compare", "a")[:2] == (0, out)
    assert stored.stat().st_mtime_ns == before  # read, and not made again
    description = polyfed.here / "a" / "comparison.yaml"
    description.write_text(description.read_text() + "# changed\n")
    os.utime(description, (0, 0))  # by a machine whose clock is wrong
    assert polyfed("compare", "a", "--quiet")[:2] == (0, out)
    assert stored.stat().st_mtime_ns > before
    manifest, before = next((polyfed.here / "a").glob("*/seed-0/manifest.json")), stored.stat().st_mtime_ns
    manifest.write_text(manifest.read_text().replace('"polyfed": "', '"polyfed": "0.0.9 of '))
    assert polyfed("compare", "a", "--quiet")[:2] == (0, out)
    assert stored.stat().st_mtime_ns > before  # another version may compute answers otherwise
    (polyfed.here / "a" / "comparison.json").unlink()
    status, out, err = polyfed("compare", "a", "--quiet")
    assert status == 0, err
    again = json.loads((polyfed.here / "a" / "comparison.json").read_text())
    assert again["answers"] == content["answers"]
    status, out, err = polyfed("compare", *words[:-1], "b", "--resplit", "2")
    assert status == 2
    assert "give one of them" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fedavg_digits", "--algorithms", "fedavgg"], "did you mean fedavg"),
        (["fedavg_digits", "--algorithms", "fedavg,fedavg"], "--algorithms has 'fedavg' twice"),
        (["fedavg_digits", "--seeds", "0,one"], "--seeds must be whole numbers"),
        (
            ["fedavg_digits", "--seeds", "x"],
            "--seeds must be whole numbers with commas between, such as 0,1,2, or how many",
        ),
        (["fedavg_digits", "--tune", "lr"], "--tune takes 'grid', or each field with its values"),
        (["fedavg_digits", "--tune", "lr=0.1;lr=0.2"], "--tune takes 'grid', or each field with its values"),
        (["fedavg_digits", "--tune", "lr=0.1..0.2"], "needs a number of runs a method"),
        (["fedavg_digits", "--trials", "few"], "--trials must be a whole number"),
        (["fedavg_digits", "--trials", "3"], "--trials 3 searches nothing"),
        (["fedavg_digits", "--seed", "3"], "polyfed compare takes no --seed; give --seeds"),
        (["fedavg_digits", "--logger", "mlfow"], "cannot track with 'mlfow'; did you mean mlflow?"),
        (["fedavg_digits", "--tune", "none", "--trials", "3"], "--trials 3 searches nothing"),
        (["fedavg_digits", "--target", "nan"], "a number such as 0.8, got nan"),
        (["fedavg_digits", "--target", "80"], "a share such as 0.8 and not 80, got 80"),
        (["fedavg_digits", "--method_config", "hyper.yaml"], "fedavg has no field 'mu'"),
        (["fedavg_digits", "--method_config", "nothing.yaml"], "cannot read nothing.yaml"),
        (["nothing"], "there is no recipe or file 'nothing'"),
    ],
)
def test_what_is_refused(polyfed, words, sentence):
    (polyfed.here / "hyper.yaml").write_text("fedavg: {mu: 1}\n")
    status, out, err = polyfed("compare", *words, *SMALL, "--out", "a")
    assert (status, out) == (2, "")
    assert sentence in err
    assert not (polyfed.here / "a").exists()


def test_help_and_words(polyfed):
    status, out, _ = polyfed("compare", "--help-all")
    assert status == 0
    assert "--algorithms NAMES" in out
    words = ["--seeds=3", "--same-data", "--rounds", "2", "--parallel", "2"]
    options, _, rest = parse_compare_options(words)
    assert (options.seeds, options.same_data, options.parallel, rest) == ((0, 1, 2), True, 2, ["--rounds", "2"])
    with pytest.raises(UserError, match="--target must be a number, got 'high'"):
        parse_compare_options(["--target", "high"])
