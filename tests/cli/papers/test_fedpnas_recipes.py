"""The recipes of FedPNAS (Hoang and Kingsford): each is a whole configuration, has the paper's numbers, which are
written here from the paper by hand, and runs at scale `smoke`."""

import dataclasses
import functools
import json
import re

import numpy as np
import pytest

from polyfed.algorithms import CAFedDSNAS, CAFedPNAS, FedAvg, FedAvgFT, FedDSNAS, FedPNAS
from polyfed.algorithms.nas.supernet_method import SupernetMethod
from polyfed.cli.commands.options import recipes as shipped
from polyfed.cli.commands.options.recipes import SCALES, shipped_recipe_files
from polyfed.cli.commands.papers.cell_metrics import RecipeRun, measure_cell
from polyfed.cli.commands.papers.paper_tables import find_table
from polyfed.core.training.config import LocalTraining
from polyfed.data import IID
from polyfed.data.partitioning.split import split_rows_by_client
from polyfed.models import ModelSpec
from polyfed.nas import count_edge_operation_parameters
from polyfed.simulation import federate
from polyfed.simulation.experiment import build_experiment, load_participants
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.results.gradient_conflicts import measure_gradient_conflicts
from polyfed.simulation.storage.directory import read_config, read_metrics
from tests.few_cases import few

read = functools.cache(shipped.read_recipe)
FEDPNAS = [name for name in shipped_recipe_files() if name.startswith("fedpnas_")]
FEDERATIONS = [(name, variant) for name in FEDPNAS for variant in read(name).variants or [None]]
CHOICES = [(name, scale, variant) for name, variant in FEDERATIONS for scale in SCALES]
SETTINGS = {  # data, images of a client in the published training set, channels of Table 3
    ("fedpnas_fig3", "mnist"): ("mnist", 12_000, 16),
    ("fedpnas_fig3", "fashion-mnist"): ("fashion_mnist", 12_000, 16),
    ("fedpnas_fig3", "cifar10"): ("cifar10", 10_000, 32),
    ("fedpnas_fig3", "digits"): ("digits", 359, 16),  # all that there are
    ("fedpnas_fig3", "mnist-table3"): ("mnist", 12_000, 16),
    ("fedpnas_fig3", "fashion-mnist-table3"): ("fashion_mnist", 12_000, 16),
    ("fedpnas_fig3", "cifar10-table3"): ("cifar10", 10_000, 32),
    ("fedpnas_table1", "low"): ("mnist", 12_000, 16),
    ("fedpnas_table1", "high"): ("cifar10", 10_000, 32),
    ("fedpnas_table1", "low-fashion-mnist"): ("fashion_mnist", 12_000, 16),
    ("fedpnas_table1", "high-fashion-mnist"): ("fashion_mnist", 12_000, 16),
    ("fedpnas_table2", "cifar10"): ("cifar10", 10_000, 32),
    ("fedpnas_effects", "fashion-mnist"): ("fashion_mnist", 12_000, 16),
    ("fedpnas_effects", "digits"): ("digits", 359, 16),  # all that there are
    ("fedpnas_proposition1", "fashion-mnist"): ("fashion_mnist", 12_000, 16),
    ("fedpnas_proposition1", "fashion-mnist-early"): ("fashion_mnist", 12_000, 16),
    ("fedpnas_proposition1", "digits"): ("digits", 359, 16),
    ("fedpnas_proposition1", "digits-early"): ("digits", 359, 16),
}
SHAPES = {"mnist": (1, 28, 28), "fashion_mnist": (1, 28, 28), "cifar10": (3, 32, 32), "digits": (1, 8, 8)}
SETTINGS |= {
    ("fedpnas_eta", variant): ("fashion_mnist", 12_000, 16)
    for variant in (
        "sgd-0",
        "sgd-0.01",
        "sgd-0.1",
        "sgd-0.3",
        "sgd-0.1-first-order",
        "sgd-0.3-first-order",
        "adam-0.002",
        "adam-0.01",
    )
}
ROTATIONS = [-30, -15, 0, 15, 30]


def shifts(experiment):
    """(rotation, hue) of each client."""
    return [(shift.rotation, shift.hue) for shift in experiment.shifts]


# -- what they hold ---------------------------------------------------------------------------------------------------


def test_every_table_and_figure_has_a_recipe():
    assert [f"fedpnas_{name}" for name in ("effects", "eta", "fig3", "proposition1", "table1", "table2")] == FEDPNAS
    assert set(FEDERATIONS) == set(SETTINGS)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "scale", "variant"), CHOICES)
def test_every_choice_is_a_whole_configuration(name, scale, variant, experiment):
    """With a network that can be built for the data, and all methods in the same search space and local training."""
    found = experiment(name, scale, variant)
    data = found.config["data"]["name"]
    assert data == ("digits" if scale == "smoke" else SETTINGS[name, variant][0])
    (model,) = found.models
    assert model["name"] == "cnn_fedpnas"
    ModelSpec(model["name"], {k: v for k, v in model.items() if k != "name"}, SHAPES[data], 10)()
    assert isinstance(found.algorithm, CAFedPNAS)
    assert (found.split.clients, len(found.shifts), type(found.partition)) == (5, 5, IID)
    assert found.split.test_fraction > 0
    shared = {field.name for field in dataclasses.fields(LocalTraining)} - {"buffers"}
    space = {"channels", "base_cells", "personal_cells", "base_nodes", "personal_nodes", "operations",
             "personal_operations", "join", "stem_stride"}  # fmt: skip
    for baseline in found.baselines.values():
        fields = shared | (space if isinstance(baseline, SupernetMethod) else set())
        assert [f for f in sorted(fields) if getattr(baseline, f) != getattr(found.algorithm, f)] == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", FEDPNAS)
@pytest.mark.parametrize("scale", SCALES)
def test_methods_that_are_compared(name, scale, experiment):
    four = {"fedavg": FedAvg, "feddsnas": FedDSNAS, "ca_feddsnas": CAFedDSNAS, "fedpnas": FedPNAS}
    for variant in read(name).variants or [None]:
        found = experiment(name, scale, variant)
        parts = {"fedavg": FedAvg, "fedavg_ft": FedAvgFT, "feddsnas": FedDSNAS, "ca_feddsnas": CAFedDSNAS}
        methods = {"fedpnas_fig3": four, "fedpnas_effects": parts, "fedpnas_eta": {}, "fedpnas_proposition1": {}}
        wanted = methods.get(name, {"feddsnas": FedDSNAS})
        assert {baseline: type(method) for baseline, method in found.baselines.items()} == wanted
        assert found.algorithm.finetune_epochs == 1
        tuned = {n: m.finetune_epochs for n, m in found.baselines.items() if isinstance(m, SupernetMethod)}
        assert tuned == {n: int(n == "fedpnas") for n in tuned}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "variant"), FEDERATIONS)
def test_the_papers_protocol(name, variant, experiment):
    found = experiment(name, "paper", variant)
    method, settings = found.algorithm, found.settings
    _, images, channels = SETTINGS[name, variant]
    assert found.split.examples_per_client is None
    assert round(found.split.test_fraction * images) == (2000 if images > 359 else 180)
    assert (found.split.global_test, found.split.public_fraction, found.augment) == (0, 0, False)
    assert (settings.rounds, settings.clients_per_round) == (100 if "early" in (variant or "") else 1000, 1.0)
    assert (method.batch_size, method.optimizer, method.lr, method.local_steps) == (48, "adam", 0.002, 10)
    whole = "table3" in (variant or "")
    cells = (4, 4) if whole else (3, 1)
    assert (method.channels, method.base_cells, method.personal_cells, method.stem_stride) == (channels, *cells, 1)
    assert (len(method.operations), len(method.personal_operations)) == (9, 9 if whole else 5)
    assert (method.weighted, method.join, method.per) == (False, "sum", "example")
    searching = [m for m in (method, *found.baselines.values()) if isinstance(m, SupernetMethod)]
    assert {m.sampler_lr for m in searching} == {None}  # eq. 5: one rate for weights and samplers


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "variant"), FEDERATIONS)
def test_the_form_of_the_search_space(name, variant, experiment):
    """Section 3.1's, of which `reduced` says how many edges it has, or that of Table 3: "total of 32 edges"."""
    for scale in ("paper", "cpu"):
        found = experiment(name, scale, variant)
        for method in (found.algorithm, *found.baselines.values()):
            if isinstance(method, SupernetMethod):
                plan = method.supernet_plan(3, 10)
                edges = sum(len(cell.edges) for cell in plan.base + plan.personal)
                if "table3" in (variant or ""):
                    master = {32: 948_224, 16: 293_888}[method.channels]
                    assert (edges, count_edge_operation_parameters(plan)) == (32, master)
                else:
                    assert f"{edges} edges instead of 32" in read(name).reduction_note(scale)


@pytest.mark.thorough
def test_the_sweep_of_the_inner_step(experiment):
    for scale in SCALES:
        methods = [experiment("fedpnas_eta", scale, variant).algorithm for variant in read("fedpnas_eta").variants]
        with_outer_product, without = (
            [(m.inner, m.eta) for m in methods if m.second_order == kind] for kind in ("outer_product", "none")
        )
        assert with_outer_product == [
            ("sgd", 0.0), ("sgd", 0.01), ("sgd", 0.1), ("sgd", 0.3), ("adam", 0.002), ("adam", 0.01)
        ]  # fmt: skip
        assert without == [("sgd", 0.1), ("sgd", 0.3)]
    figure, sweep = (
        experiment(name, "paper", v) for name, v in (("fedpnas_fig3", "fashion-mnist"), ("fedpnas_eta", "sgd-0.01"))
    )
    for part in ("source", "split", "partition", "shifts", "models", "algorithm", "settings"):
        assert getattr(figure, part) == getattr(sweep, part), part


def test_the_partition_gives_the_papers_sizes(experiment):
    """Of as many labels as MNIST and CIFAR-10 have for training."""
    for variant, labels, train in (("mnist", 60_000, 10_000), ("cifar10", 50_000, 8_000)):
        found = experiment("fedpnas_fig3", "paper", variant)
        rows, public = split_rows_by_client(np.arange(labels) % 10, found.split, found.partition, seed=0)
        assert [(len(r.train), len(r.test)) for r in rows] == [(train, 2000)] * 5
        assert len(public) == 0


@pytest.mark.parametrize("scale", few(list(SCALES), ["smoke"]))
def test_shifts(scale, experiment):
    slight = [(rotation, 0) for rotation in ROTATIONS]
    for name, variant in FEDERATIONS:
        if "high" not in (variant or "") and name not in ("fedpnas_effects", "fedpnas_proposition1"):
            assert shifts(experiment(name, scale, variant)) == slight
    hues = [0, 0] if scale == "smoke" else [-0.5, 0.5]  # digits are grey
    strong = [*((0, hue) for hue in hues), (0, 0), (-90, 0), (90, 0)]
    assert shifts(experiment("fedpnas_table1", scale, "high")) == strong
    grey = [(0, 0), (0, 0), (0, 0), (-90, 0), (90, 0)]
    for name, variant in (("table1", "high-fashion-mnist"), ("effects", "fashion-mnist"), ("effects", "digits"),
                          *(("proposition1", v) for v in read("fedpnas_proposition1").variants)):  # fmt: skip
        assert shifts(experiment(f"fedpnas_{name}", scale, variant)) == grey


@pytest.mark.thorough
def test_hue_has_colours_to_change(experiment):
    """On MNIST, which the paper names, it would change nothing, and is refused."""
    for name, scale, variant in CHOICES:
        found = experiment(name, scale, variant)
        if any(shift.hue for shift in found.shifts):
            assert SHAPES[found.config["data"]["name"]][0] == 3


def test_table_2_is_the_federation_of_figure_3(experiment):
    for scale in SCALES:
        table, figure = experiment("fedpnas_table2", scale), experiment("fedpnas_fig3", scale, "cifar10")
        for part in ("source", "split", "partition", "shifts", "models", "algorithm", "settings"):
            assert getattr(table, part) == getattr(figure, part), part
        assert table.baselines["feddsnas"] == figure.baselines["feddsnas"]


@pytest.mark.parametrize(("name", "variant"), FEDERATIONS)
def test_the_cpu_scale(name, variant, experiment):
    found = experiment(name, "cpu", variant)
    method, settings = found.algorithm, found.settings
    digits = (variant or "").startswith("digits")
    images = (200, 0.4, 333) if name == "fedpnas_eta" else (None, 0.5, None) if digits else (400, 0.4, 667)
    assert (found.split.examples_per_client, found.split.test_fraction, found.split.examples_drawn_per_client) == images
    assert (method.channels, method.stem_stride) == (16, 1 if digits else 2)
    assert (method.local_epochs, method.local_steps) == (2, None)
    assert (method.batch_size, method.lr) == (48, 0.01)
    rounds = {"fedpnas_eta": 12, "fedpnas_table1": 30, "fedpnas_effects": 30}.get(
        name, 12 if "table3" in (variant or "") else 20
    )
    if name == "fedpnas_proposition1":
        rounds = 1 if variant.endswith("early") else 10
    assert (settings.rounds, settings.checkpoint_every) == (rounds, 10)
    assert rounds % settings.evaluate_every == 0
    minibatches = rounds * method.local_epochs * -(-(found.split.examples_per_client or 179) // method.batch_size)
    assert f"{minibatches} minibatches" in read(name).reduction_note("cpu")
    samplers = {n: m.sampler_lr for n, m in found.baselines.items() if isinstance(m, SupernetMethod)}
    assert {**samplers, "ca_fedpnas": method.sampler_lr} == {
        n: 0.05 if n.startswith("ca_") else 0.2 for n in (*samplers, "ca_fedpnas")
    }


@pytest.mark.parametrize("name", FEDPNAS)
def test_scales_say_what_they_reduce(name):
    recipe = read(name)
    assert tuple(recipe.scales) == SCALES
    assert recipe.resolve_scale_name() == "cpu"
    assert re.search(r"2,000 of each client's .* training images are its test set", recipe.reduction_note("paper"))
    assert re.search(
        r"00 training and \d+ test images .* \d+ rounds of 2 epochs .* stem that halves", recipe.reduction_note("cpu")
    )
    assert re.search(r"digits of scikit-learn instead of .* 2 rounds", recipe.reduction_note("smoke"))
    hue = name == "fedpnas_table1"
    for scale in ("paper", "cpu"):
        assert ("; high on CIFAR-10 instead of MNIST" in recipe.reduction_note(scale)) == hue
    assert "per" not in recipe.configuration("cpu")["algorithm"]  # the default: one architecture for each image
    assert ("without changes of hue" in recipe.reduction_note("smoke")) == hue


def test_sizes_of_a_smoke_run(experiment):
    clients = load_participants(experiment("fedpnas_table1", "smoke", "high")).clients
    assert [len(c.train) for c in clients] == [20] * 5
    assert [len(c.test) for c in clients] == [13] * 5


# -- runs -------------------------------------------------------------------------------------------------------------


def check_run(polyfed, name, variant, *words):
    """Runs a recipe and checks that each of its methods has scored every client, those that adapt also what came from
    the server, and that the networks which were found are kept."""
    chosen, folder = ((), name) if variant is None else (("--variant", variant), variant)
    out = polyfed("run", name, *chosen, "--scale", "smoke", *words, "--quiet", "--out", folder)
    config = read_config(folder)
    method = config["algorithm"]["name"]
    baselines = [entry if isinstance(entry, str) else entry["name"] for entry in config["baselines"]]
    assert {line.split(":")[0] for line in out.splitlines() if "B down, " in line} == {method, *baselines}
    for path in (folder, *(f"{folder}/baselines/{baseline}" for baseline in baselines)):
        history = read_metrics(polyfed.here / path / "metrics.jsonl")
        assert len(history) == config["rounds"]
        rows = history[-1]["clients"].values()
        assert len(rows) == 5
        assert all(0 <= row["accuracy"] <= 1 for row in rows)
        adapts = read_config(path)["algorithm"]["name"] in ("fedpnas", "ca_fedpnas")
        assert all(("server_accuracy" in row) == adapts for row in rows)
        assert len(list((polyfed.here / path / "models").glob("*.safetensors"))) == 5


@pytest.mark.slow
def test_a_run_of_one_round(polyfed):
    check_run(polyfed, "fedpnas_table1", "high", "--rounds", "1", "--workers", "0")


@pytest.mark.slow
def test_the_figures_smoke_run(polyfed):
    check_run(polyfed, "fedpnas_fig3", "mnist", "--workers", "0")


@pytest.mark.thorough
def test_cells_of_proposition_1_are_the_analysis_of_the_run(polyfed):
    """Means over the cell's clients of what `conflicts` says of the run that is resumed; computed once."""
    polyfed("run", "fedpnas_proposition1", "--variant", "digits-early", "--scale", "smoke", "--workers", "0", "--quiet",
            "--out", "run")  # fmt: skip
    folder = polyfed.here / "run"
    cells = [c for c in find_table("fedpnas", "Proposition 1").cells if c.row == "digits, a tenth of the rounds"]
    ours = [measure_cell(cell, RecipeRun(folder, "smoke")) for cell in cells]
    clients = load_participants(build_experiment(read_config(folder))).clients
    run = federate.resume(folder, clients=clients, progress=SilentProgress())
    ids, weights = measure_gradient_conflicts(run, draws=8)
    assert len(ids) == 5
    assert ours == [
        pytest.approx(getattr(weights, name).mean().item()) for name in ("cosine", "federated_cosine", "cosine_gap")
    ]
    (one,) = (
        c for c in find_table("fedpnas", "proposition1").cells if c.row.endswith("rotate 90") and c.column == "gap"
    )
    assert measure_cell(one, RecipeRun(folder, "smoke")) == pytest.approx(weights.cosine_gap[4].item())
    assert len(json.loads((folder / "measured.json").read_text())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), FEDERATIONS)
def test_smoke_runs_with_all_baselines(polyfed, name, variant):
    check_run(polyfed, name, variant)
