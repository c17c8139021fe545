"""`polyfed reproduce`: ours are what the runs have, finished runs are not repeated, stopped ones are gone on with."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from polyfed.algorithms import FedRep
from polyfed.cli.commands.options.recipes import read_recipe
from polyfed.cli.commands.papers import job_runner
from polyfed.cli.commands.papers.cell_metrics import RecipeRun, measure_cell
from polyfed.cli.commands.papers.cell_results import CellResult, measure_cell_over_seeds
from polyfed.cli.commands.papers.paper_tables import PaperCell, find_table, load_papers
from polyfed.cli.main import main
from polyfed.models import MODELS
from polyfed.simulation.experiment import build_experiment
from polyfed.simulation.storage.directory import read_config, read_metrics
from polyfed.testing.algorithm_contract import _InterruptAfter

TABLES = [table for paper in load_papers().values() for table in paper.tables.values()]
RUNNABLE = [(table.paper, table.name) for table in TABLES if table.cells]
FEW = [
    "fedhenn", "table3", "--scale", "smoke", "--variant", "cifar10-linear", "--workers", "0", "--quiet", "--out",
    "here",
]  # fmt: skip


@pytest.fixture
def polyfed(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder and returns its status, standard output and error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def polyfed(*arguments):
        capsys.readouterr()
        status = main(arguments)
        return status, *capsys.readouterr()

    polyfed.here = tmp_path
    return polyfed


def cells(path):
    return {(c["row"], c["column"]): c for c in json.loads((path / "reproduce.json").read_text())["cells"]}


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["fedhen", "1"],
            "there is no paper 'fedhen'; did you mean fedhenn or fedpnas? Choices: fedhenn, fedpnas, flha",
        ),
        (["fedhenn", "tabel2"], "fedhenn has no table or figure 'tabel2'; did you mean table2"),
        (["fedhenn", "9"], "fedhenn has no table or figure '9'; choices: effects, fig1, fig3, table1, table2, table3"),
        (["fedhenn", "1", "--scale", "smok"], "unknown scale 'smok'; did you mean smoke? Choices: cpu, paper, smoke"),
        (["fedhenn", "1", "--variant", "cifar10-100-3"], "has no variant 'cifar10-100-3'; did you mean cifar10-100-"),
        (["fedhenn", "1", "--seeds", "0,x"], "--seeds must be different whole numbers with commas between, e.g."),
        (["fedhenn", "1", "--seeds", "2,2"], "--seeds must be different whole numbers with commas between, e.g."),
        (["fedhenn", "1", "--scale", "smoke", "--roundz", "2"], "unknown option --roundz"),
        (["fedhenn", "Table", "1", "2"], "fedhenn has no table or figure 'Table 1 2'; "),
        (["--scale", "smoke"], "polyfed reproduce takes a paper and a table before its options"),
        (["fedhenn", "1", "--scale", "smoke", "--seed", "2"], "polyfed reproduce takes --seeds, one or several"),
        (["fedpnas", "3", "--variant", "x"], "fedpnas table3 has no variants; leave --variant x out"),
        (["flha", "Table 4"], "states no figure; `polyfed data flha_table5 --variant alpha1` prints and draws it"),
        (["flha", "1", "--variant", "cifar10-25", "--data.path", "nowhere"], "nowhere"),
        (
            ["pfedla", "1", "--variant", "emnist-10,cifar10-10", "--data.path", "nowhere"],
            "is of several data sets (cifar10, emnist), and --data.path says where one lies; choose with --variant",
        ),
        (["pfedla", "1", "--data", "fashion_mnist", "--data.path", "nowhere"], "nowhere"),
        (["flha", "3", "--data.cache", "nowhere.npy"], "unknown option --data.cache; fashion_mosaics has no"),
        (["fedpnas", "fig3", "--data.path=nowhere"], "is of several data sets (cifar10, digits, fashion_mnist, mnist)"),
    ],
)
def test_refused(polyfed, words, sentence):
    status, out, err = polyfed("reproduce", *words)
    assert (status, out) == (2, "")
    assert sentence in err.splitlines()[-1]
    assert not [path for path in polyfed.here.rglob("*") if path.name == "config.yaml"]


@pytest.mark.parametrize("words", [["--data.path", "nowhere"], ["--data.path=nowhere"]])
def test_where_data_lie_is_no_option_of_other_data_in_the_same_folder(polyfed, words):
    """The folder has a run of digits, which have no path."""
    (polyfed.here / "here" / "fedpnas_fig3-digits-seed0").mkdir(parents=True)
    asked = ["fedpnas", "fig3", "--variant", "fashion-mnist", "--seeds", "0", "--out", "here"]
    status, _, err = polyfed("reproduce", *asked, *words)
    assert status == 2
    assert "unknown option" not in err
    assert "nowhere" in err
    status, _, err = polyfed("reproduce", *asked, "--data.paht", "nowhere")
    assert (status, "unknown option --data.paht" in err) == (2, True)


def test_a_missing_source_is_found_before_the_first_run(polyfed, monkeypatch):
    """Digits are there, the other recipe's files are not."""
    monkeypatch.setattr(job_runner, "run_paper_jobs_and_list_failures", lambda *_, **__: pytest.fail("something ran"))
    words = ["flha", "1", "--scale", "smoke", "--variant", "cifar10-25", "--out", "here"]
    config = read_recipe("flha_upper_bound").configuration
    lost = {"name": "mnist", "path": "nowhere"}
    monkeypatch.setattr(
        "polyfed.cli.commands.options.recipes.Recipe.configuration",
        lambda r, s=None, v=None: {**config.__func__(r, s, v), **({"data": lost} if r.name == "flha_table1" else {})},
    )
    status, out, err = polyfed("reproduce", *words)
    assert (status, out) == (2, "")
    assert "nowhere" in err


def test_without_arguments_it_lists_papers_and_tables(polyfed):
    status, out, err = polyfed("reproduce")
    assert (status, err) == (0, "")
    for table in TABLES:
        assert re.search(rf"^{table.name}\b.*{re.escape(table.title[:30])}", out, re.MULTILINE)
    status, alone, _ = polyfed("reproduce", "pfedla")
    assert status == 0
    assert "pFedLA (Ma et al." in alone
    assert "FedHeNN" not in alone


# -- a run ------------------------------------------------------------------------------------------------------------


def test_a_table_that_needs_no_run_is_the_papers(polyfed):
    """FedPNAS, Table 3: numbers of parameters are not a matter of scale."""
    status, out, err = polyfed("reproduce", "fedpnas", "Table 3", "--out", "here")
    assert (status, err) == (0, "")
    found = cells(polyfed.here / "here")
    assert len(found) == 20
    assert {cell["difference"] for cell in found.values()} == {0}
    assert "FedPNAS (Hoang and Kingsford), Table 3" in out


@pytest.mark.thorough
def test_cells_are_what_the_runs_have_and_finished_runs_are_not_repeated(polyfed, monkeypatch):
    status, out, err = polyfed("reproduce", *FEW)
    assert (status, err) == (0, "")
    found = cells(polyfed.here / "here")
    run = polyfed.here / "here" / "fedhenn_table3-cifar10-linear-seed0"
    rows = read_metrics(run / "metrics.jsonl")[-1]["clients"].values()
    ours = 100 * sum(row["accuracy"] for row in rows) / len(rows)
    cell = found["CIFAR-10", "linear CKA"]
    assert cell["ours"] == pytest.approx(ours)
    assert cell["difference"] == pytest.approx(ours - 94.47)
    assert (cell["runs"], cell["seeds"]) == ([run.name], {"0": cell["ours"]})
    assert re.search(rf"CIFAR-10 +│ linear CKA +│ +{ours:.1f} +│ +94.47 +│\n", out)
    assert re.search(r"│ RBF CKA +│ +not run +│ +93.03 +│\n", out)
    assert "difference" not in out
    assert re.search(r"CIFAR-10 with 5 classes \(not in the paper\) +│ linear CKA +│ +not run +│ +not stated", out)
    assert f"reduced against the paper: {read_recipe('fedhenn_table3').reduction_note('smoke')}" in out
    assert found["CIFAR-10", "RBF CKA"]["ours"] is None
    # at this scale Sentiment140 is the same run
    assert found["Sentiment140", "linear CKA"]["runs"] == [run.name]

    with monkeypatch.context() as patch:
        patch.setattr("polyfed.simulation.federate.federate", lambda *_, **__: pytest.fail("ran again"))
        patch.setattr("polyfed.simulation.federate.resume", lambda *_, **__: pytest.fail("went on"))
        assert polyfed("reproduce", *FEW) == (0, out, "")
    status, _, err = polyfed("reproduce", *FEW, "--rounds", "2")
    assert status == 2
    assert "is a run with other settings (rounds was 3 and is now 2); choose another --out" in err
    # another variant later: both are in the table, but not with other settings
    rbf = [word.replace("linear", "rbf") for word in FEW]
    status, _, err = polyfed("reproduce", *rbf, "--rounds", "1")
    assert status == 2
    assert "is a run with other settings (rounds was 3 and is now 1); choose another --out" in err
    status, out, _ = polyfed("reproduce", *rbf)
    assert (status, out.count("not run")) == (0, 4)
    assert "changed besides: --workers 0" in out


@pytest.mark.thorough
def test_a_method_that_diverges_costs_its_own_cell_only(polyfed, monkeypatch):
    """A baseline in round 2; the others and the next seed are run, the status is 1, and the next call says so again."""
    words = ["pfedla", "table1", "--scale", "smoke", "--variant", "fashion_mnist-10", "--workers", "0", "--quiet"]
    words += ["--out", "here"]
    update = FedRep.local_update

    def broken(self, down, own, client, seed):
        message, kept = update(self, down, own, client, seed)
        if down.scalars.get("lr") and "draw" not in down.tensors:
            message.tensors["model"] = {n: t * float("nan") for n, t in message.tensors["model"].items()}
        return message, kept

    monkeypatch.setattr(FedRep, "local_update", broken)
    for _ in range(2):
        status, out, err = polyfed("reproduce", *words, "--seeds", "0,1")
        assert status == 1
        assert err.count("fedrep could not be finished: round 2") == 2
        assert out.count("not run") > 0
        found = {
            row: c["seeds"] for (row, column), c in cells(polyfed.here / "here").items() if column == "FashionMNIST, 10"
        }
        assert set(found.pop("FedRep")) == set()
        assert len(found) == 9
        assert all(set(seeds) == {"0", "1"} for seeds in found.values())


@pytest.mark.slow
def test_a_stopped_run_is_gone_on_with(polyfed, monkeypatch):
    assert polyfed("reproduce", *FEW)[0] == 0
    whole = cells(polyfed.here / "here")

    words = [*FEW[:-1], "again"]
    with monkeypatch.context() as patch:
        patch.setattr("polyfed.simulation.monitoring.progress.build_terminal_progress", lambda **_: _InterruptAfter(2))
        assert polyfed("reproduce", *words)[0] == 130
    run = polyfed.here / "again" / "fedhenn_table3-cifar10-linear-seed0"
    assert len(read_metrics(run / "metrics.jsonl")) == 2
    assert polyfed("reproduce", *words)[0] == 0
    assert len(read_metrics(run / "metrics.jsonl")) == 3
    assert cells(polyfed.here / "again") == whole


@pytest.mark.thorough
def test_runs_side_by_side_are_those_of_one_after_another(polyfed, monkeypatch):
    """Methods that are stopped go on, those that cannot go on are told, and a baseline of other settings is refused."""
    words = ["pfedla", "table1", "--scale", "smoke", "--variant", "fashion_mnist-10", "--rounds", "2", "--seeds", "0,1"]
    words += ["--baselines", "[local,fedavg]"]
    assert polyfed("reproduce", *words, "--workers", "0", "--out", "one")[0] == 0
    monkeypatch.setattr("polyfed.comparison.execution.process_pool.num_usable_cores", lambda: 2)
    status, _, err = polyfed("reproduce", *words, "--out", "two")
    assert status == 0
    assert err.count(": done") == 6
    one, two = (cells(polyfed.here / out) for out in ("one", "two"))
    assert one == two

    run = polyfed.here / "two" / "pfedla_table1-fashion_mnist-10-seed1"
    assert read_config(run)["engine"] == "inprocess"
    shutil.rmtree(run / "baselines" / "local")
    assert polyfed("reproduce", *words, "--out", "two", "--quiet")[0] == 0
    assert cells(polyfed.here / "two") == two
    for name in [path.name for path in run.iterdir() if path.name != "baselines"]:  # as if it had been stopped at once
        remove = shutil.rmtree if (run / name).is_dir() else Path.unlink
        remove(run / name)
    status, _, err = polyfed("run", "pfedla_table1", "--scale", "smoke", "--baselines", "[local]", "--out", str(run))
    assert status == 2
    assert "local is not empty; its run is finished (polyfed show" in err
    assert polyfed("reproduce", *words, "--out", "two", "--quiet")[0] == 0
    assert cells(polyfed.here / "two") == two
    (run / "config.yaml").unlink()
    changed = [{"2": "3", "0,1": "1,"}.get(word, word) for word in words]
    status, _, err = polyfed("reproduce", *changed, "--out", "two")
    assert status == 2
    assert "local is a run with other settings (rounds was 2 and is now 3); choose another --out" in err


def test_few_runs_go_one_after_another(monkeypatch):
    monkeypatch.setattr("polyfed.comparison.execution.process_pool.num_usable_cores", lambda: 2)
    experiment = build_experiment(read_recipe("pfedla_table1").configuration("smoke", "fashion_mnist-10"))
    job = job_runner.PaperJob("a run", experiment, Path("here"))
    assert [job_runner._process_count(job, runs) for runs in (1, 2, 3, 6, 15)] == [1, 1, 1, 2, 2]
    asked = replace(experiment, settings=replace(experiment.settings, workers=2))
    assert job_runner._process_count(replace(job, experiment=asked), 15) == 1


def test_seeds(polyfed):
    cell = PaperCell("r", "c", 3.0, None, "3.0", "x", None, "", "score", "%")
    found = CellResult(cell, {0: 1.0, 1: 3.0}, ("a", "b"))
    assert (found.mean_value, found.standard_deviation, found.difference_to_paper) == (
        2.0,
        pytest.approx(math.sqrt(2)),
        -1.0,
    )
    assert CellResult(cell, {0: 1.0}, ("a",)).standard_deviation is None
    assert CellResult(cell, {}, ()).difference_to_paper is None


# -- measures, on runs whose numbers are known ------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """A run directory with a configuration and the records given."""

    def run(method, *records):
        (tmp_path / "config.yaml").write_text(f"algorithm: {{name: {method}}}\nrounds: {len(records)}\n")
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return RecipeRun(tmp_path, "smoke")

    return run


def cell_of(paper, table, row, column):
    return next(c for c in find_table(paper, table).cells if (c.row, c.column) == (row, column))


def test_scores_of_the_clients_of_an_architecture(run):
    rows = {f"client-{k:03d}": {"accuracy": 0, "global_accuracy": k / 10} for k in reversed(range(8))}
    done = run("flha_ghn", {"round": 1, "clients": {}}, {"round": 2, "clients": rows})
    for arch in range(4):
        cell = cell_of("flha", "table1", "12.5 %, FLHA-GHN", f"CIFAR-10, Arch {arch}")
        assert measure_cell(cell, done) == pytest.approx(100 * (arch + arch + 4) / 20)
    upper = cell_of("flha", "table1", "12.5 %, upper bound", "CIFAR-10, Arch 0")
    assert measure_cell(upper, done) == pytest.approx(35)
    assert measure_cell(cell_of("flha", "table1", "12.5 %, local training", "CIFAR-10, Arch 0"), done) is None


def test_auc_where_the_task_has_it(run):
    rows = {"client-000": {"global_auc": 0.75}, "client-001": {"global_auc": None}}
    done = run("flha_ghn", {"round": 1, "clients": rows})
    assert measure_cell(cell_of("flha", "table3", "25 %, FLHA-GHN", "Arch 0"), done) == 75
    assert measure_cell(cell_of("flha", "table3", "25 %, FLHA-GHN", "Arch 1"), done) is None


@pytest.mark.parametrize(("data", "shape"), [("EMNIST", (1, 28, 28)), ("CIFAR10", (3, 32, 32))])
def test_megabytes_of_the_papers_network_are_the_papers(run, data, shape):
    """pFedLA moves a client's network down and up in each round."""
    size = 4 * sum(p.numel() for p in MODELS["cnn_pfedla"](shape, 10, batch_norm=data == "CIFAR10").parameters())
    rows = {f"client-{k:03d}": {"bytes_up": size, "accuracy": 0.5} for k in range(10)}
    history = [
        {"round": r, "bytes_down_total": 10 * r * size, "bytes_up_total": 10 * r * size, "clients": rows}
        for r in (1, 2)
    ]
    cell = cell_of("pfedla", "table3", "megabytes", f"{data}, k = 0")
    assert measure_cell(cell, run("heur_pfedla", *history)) == pytest.approx(cell.paper, abs=0.03)


def test_the_drop_is_of_the_clients_that_keep_their_network(tmp_path):
    """With the figures of the paper's Table 7 as scores it is what section 5.4 says, 2.2 ± 1.4."""
    folder, table = tmp_path / "out", find_table("flha", "table7")
    networks = ["resnet18", "flha_arch1", "flha_arch2", "flha_arch3"]
    drop, spread = find_table("flha", "drop").cells
    assert drop.recipe_variants_to_run == spread.recipe_variants_to_run == ("none", "arch3", "arch2", "arch1", "arch0")
    runs = []
    for variant in drop.recipe_variants_to_run:
        models = ["flha_small" if variant == f"arch{k}" else name for k, name in enumerate(networks)]
        scores = [cell.paper / 100 for cell in table.cells if cell.variant == variant]
        rows = {f"client-{k}": {"accuracy": 0, "global_accuracy": score} for k, score in enumerate(scores)}
        place = folder / f"flha_table7-{variant}-seed0"
        place.mkdir(parents=True)
        (place / "config.yaml").write_text(
            json.dumps({"algorithm": {"name": "flha_ghn"}, "model": models, "rounds": 1})
        )
        (place / "metrics.jsonl").write_text(json.dumps({"round": 1, "clients": rows}) + "\n")
        runs.append(RecipeRun(place, "smoke"))
    done = replace(runs[0], compared_runs=tuple(runs[1:]))
    assert measure_cell(drop, done) == pytest.approx(27 / 12)
    assert measure_cell(spread, done) == pytest.approx(spread.paper, abs=0.05)

    recipes = {"flha_table7": read_recipe("flha_table7")}
    assert measure_cell_over_seeds(drop, recipes, "cpu", [0, 1], folder).value_by_seed == {0: pytest.approx(27 / 12)}
    shutil.rmtree(runs[-1].folder)  # one of the five is not there
    assert measure_cell_over_seeds(drop, recipes, "cpu", [0], folder).value_by_seed == {}


def test_seconds_are_of_clients_and_server_over_all_rounds(run):
    """FedPNAS's Fig. 3c; as a ratio against another method of the run."""
    row = {"clients": {}, "seconds": 99.0}
    done = run("ca_fedpnas", {**row, "round": 1, "seconds_clients": 4.0, "seconds_server": 1.0},
               {**row, "round": 2, "seconds_clients": 6.0, "seconds_server": 1.0})  # fmt: skip
    other = done.folder / "baselines" / "feddsnas"
    other.mkdir(parents=True)
    (other / "config.yaml").write_text("algorithm: {name: feddsnas}")
    (other / "metrics.jsonl").write_text(json.dumps({**row, "round": 1, "seconds_clients": 7.0, "seconds_server": 1.0}))
    assert measure_cell(cell_of("fedpnas", "fig3c", "CIFAR-10, seconds", "CA-FedPNAS"), done) == 12.0
    assert measure_cell(cell_of("fedpnas", "fig3c", "CIFAR-10, times FedDSNAS", "CA-FedPNAS"), done) == 1.5
    assert measure_cell(cell_of("fedpnas", "fig3c", "CIFAR-10, times FedDSNAS", "FedDSNAS"), done) == 1.0
    assert measure_cell(cell_of("fedpnas", "fig3c", "CIFAR-10, seconds", "CA-FedDSNAS"), done) is None


# -- all of it --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("paper", "name"), RUNNABLE)
def test_every_table_at_smoke_scale(polyfed, paper, name):
    status, out, err = polyfed(
        "reproduce", paper, name, "--scale", "smoke", "--workers", "0", "--quiet", "--out", "here"
    )
    assert (status, err) == (0, "")
    found = cells(polyfed.here / "here")
    assert len(found) == len(find_table(paper, name).cells)
    lacking = {key for key, cell in found.items() if cell["ours"] is None}
    # the small network of this scale has four layers
    by_layer = {row for row, _ in found if row.startswith("layer-wise")}
    rows = by_layer if name == "fig1b" else {"EMNIST", "CIFAR10", "FashionMNIST"}
    assert lacking == (
        {(row, "fc3, the classifier") for row in rows} if name in ("fig1b", "fig7") and paper == "pfedla" else set()
    )
    for cell in found.values():
        most = {"%": 100, "fraction": math.inf if name == "fig6" else 1}.get(
            cell["unit"], math.inf
        )  # one spread over another
        assert cell["ours"] is None or 0 <= cell["ours"] <= most
        if cell["paper"] is not None:
            assert cell["difference"] == pytest.approx(cell["ours"] - cell["paper"])
    assert "not run" not in out
