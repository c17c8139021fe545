"""The recipes of FedHeNN (Makhija et al. 2022): each is a whole configuration, has the paper's numbers, which are
written here from the paper by hand, and runs at scale `smoke`."""

import functools
import re
from dataclasses import replace

import pytest

from polyfed.algorithms import FedAvg, FedHeNN, FedHeNNHomo
from polyfed.alignment import draw_public_rows
from polyfed.cli.commands.options import recipes as shipped
from polyfed.cli.commands.options.recipes import SCALES, shipped_recipe_files
from polyfed.data import ClassesPerClient, Dirichlet
from polyfed.models import ModelSpec
from polyfed.simulation.experiment import load_participants
from polyfed.simulation.storage.directory import read_config, read_metrics

read = functools.cache(shipped.read_recipe)
FEDHENN = [name for name in shipped_recipe_files() if name.startswith("fedhenn_")]
CHOICES = [(name, scale, variant) for name in FEDHENN for scale in SCALES for variant in read(name).variants]
SETTINGS = {  # data, clients, classes a client
    "cifar10-100-2": ("cifar10", 100, 2),
    "cifar10-100-5": ("cifar10", 100, 5),
    "cifar10-500-2": ("cifar10", 500, 2),
    "cifar10-500-5": ("cifar10", 500, 5),
    "cifar100-100-20": ("cifar100", 100, 20),
    "sentiment140-100": ("sentiment140", 100, 2),
}
TRAINING = {"cifar10": 50_000, "cifar100": 50_000, "digits": 1_797, "fashion_mnist": 60_000, "sentiment140": 1_600_000}
TEST = {"cifar10": 10_000, "cifar100": 10_000, "sentiment140": 359}  # tweets that are not neutral
SHAPES = {
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "digits": ((1, 8, 8), 10),
    "fashion_mnist": ((1, 28, 28), 10),
    "sentiment140": ((25,), 2),
}
FRACTIONS = ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]


def variants(name):
    return list(read(name).variants)


def networks(experiment):
    """Name of each network, of the five CNNs with the level."""
    return [f"{m['name']}{m['level']}" if m["name"] == "cnn_fedhenn" else m["name"] for m in experiment.models]


# -- what they hold ---------------------------------------------------------------------------------------------------


def test_every_table_and_figure_has_a_recipe():
    assert [f"fedhenn_{name}" for name in ("effects", "fig1", "fig3", "table1", "table2", "table3")] == FEDHENN


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "scale", "variant"), CHOICES)
def test_every_choice_is_a_whole_configuration(name, scale, variant, experiment):
    """With networks that can be built for the data, and a public pool that is large enough for the RAD."""
    found = experiment(name, scale, variant)
    data = found.config["data"]["name"]
    assert data == ("digits" if scale == "smoke" else data)
    assert data in SHAPES
    assert found.split.clients - found.split.unseen >= (len(found.models) if found.split.unseen == 0 else 1)
    shape, classes = SHAPES[data]
    for model in found.models:
        ModelSpec(model["name"], {k: v for k, v in model.items() if k != "name"}, shape, classes)()
    if isinstance(found.algorithm, FedHeNN | FedHeNNHomo):
        held_out = round(
            found.split.public_fraction * TRAINING[data]
        )  # or more, where the test examples are divided, too
        wanted = {"paper": 5000, "cpu": 500, "smoke": 64}[scale]
        if "-rad-" in variant:
            wanted = int(wanted * float(variant.rpartition("-")[2]))
        assert (found.algorithm.rad_size, held_out >= wanted) == (wanted, True)
        assert found.algorithm.rad_batch == {"paper": 0, "cpu": 64, "smoke": 32}[scale]
        assert found.algorithm.term == ("minibatch" if scale == "cpu" else "epoch")
        if scale == "cpu":
            assert held_out >= (600 if variant.startswith("fashion") else 1000)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "variant"), [(name, variant) for name in FEDHENN for variant in variants(name)])
def test_the_papers_protocol(name, variant, experiment):
    found = experiment(name, "paper", variant)
    method, settings = found.algorithm, found.settings
    assert (settings.rounds, settings.clients_per_round) == (200, 0.1)
    epochs = 20 * (float(variant.rpartition("-")[2]) if "-epochs-" in variant else 1)
    assert (method.local_epochs, method.momentum, method.lr) == (epochs, 0.5, 0.01)
    assert isinstance(found.partition, ClassesPerClient)
    text = found.config["data"]["name"] == "sentiment140"
    if not isinstance(method, FedAvg):
        asked = float(variant.rpartition("-")[2]) if "-eta-" in variant else 0.01 if text else 0.001
        assert (method.eta0, method.growth, method.term, method.rad_batch) == (asked, "sqrt", "epoch", 0)
        assert method.distance == ("procrustes" if variant.endswith("procrustes") else "cka")
        assert method.normalise is False if isinstance(method, FedHeNN) else True
    assert {baseline.local_epochs for baseline in found.baselines.values()} <= {epochs}


@pytest.mark.parametrize("name", FEDHENN)
def test_the_rad_of_each_round_is_another_one_at_scale_paper(name):
    """Section 3.3: "at each communication round, we randomly select only a sample"."""
    for variant in variants(name):
        config = read(name).configuration("paper", variant)
        data, method = config["data"], config["algorithm"]
        if not method["name"].startswith("fedhenn"):
            continue
        divided = TRAINING[data["name"]] + (TEST[data["name"]] if data.get("deal_test") else 0)
        assert data["name"] == "fashion_mnist" or data.get("deal_test", False) == (name != "fedhenn_fig1")
        pool, size = round(data["public_fraction"] * divided), method["rad_size"]
        assert pool == (20_004 if data["name"] == "sentiment140" else 10_000)
        assert pool >= 2 * size
        assert not (data.get("deal_test") and data.get("global_test"))
    one, other = (set(draw_public_rows(0, t, pool, size).tolist()) for t in (1, 2))
    assert len(one & other) / size == pytest.approx(size / pool, abs=0.03)
    seen = set().union(*(draw_public_rows(0, t, pool, size).tolist() for t in range(1, 41)))
    assert len(seen) > 0.99 * pool


@pytest.mark.parametrize("name", FEDHENN)
def test_scales_say_what_they_reduce(name):
    recipe = read(name)
    assert tuple(recipe.scales) == SCALES
    assert recipe.resolve_scale_name() == "cpu"
    several = any("rank" in v.get("algorithm", {}) for v in recipe.variants.values())
    assert "two rounds share half of it" in recipe.reduction_note("paper").replace("\n", " ")
    assert ("reduced to 128 columns" in recipe.reduction_note("paper")) == several
    assert re.search(
        r"20 clients of 100 .* 50 rounds of 4 epochs .* RAD of 500 .* η_0 (0\.)?1 ", recipe.reduction_note("cpu")
    )
    assert "digits of scikit-learn instead of" in recipe.reduction_note("smoke")


def test_the_cpu_scale(experiment):
    for name, variant, eta0 in (
        ("fedhenn_table1", "cifar10-100-2", 1.0),
        ("fedhenn_table2", "cifar10-100-2-homo", 1.0),
        ("fedhenn_table2", "cifar10-100-2-hetero", 0.1),
        ("fedhenn_fig1", "fedhenn-20", 0.1),
        ("fedhenn_fig3", "hetero-0.2", 0.1),
        ("fedhenn_effects", "hetero-rad-0.1", 0.1),
    ):
        found = experiment(name, "cpu", variant)
        split, method, settings = found.split, found.algorithm, found.settings
        assert (split.clients, split.examples_per_client, split.test_fraction) == (20, 100, 0.3)
        assert (settings.rounds, settings.clients_per_round, settings.evaluate_every) == (50, 0.2, 10)
        assert (method.local_epochs, method.batch_size, method.lr, method.eta0) == (4, 32, 0.02, eta0)
        if eta0 < 1:
            assert (method.normalise, method.rank) == (True, 64)
    for name, variant in (("fedhenn_table1", "sentiment140-100"), ("fedhenn_table2", "sentiment140-100-hetero")):
        found = experiment(name, "cpu", variant)  # those of benchmarks/alignment.py
        assert (found.split.clients, found.split.examples_per_client, found.partition) == (20, 200, Dirichlet(1.0))
        assert (found.settings.rounds, found.settings.clients_per_round, found.algorithm.optimizer) == (25, 0.5, "adam")
    for variant in ("cifar10-500-2", "cifar10-500-5"):
        split = experiment("fedhenn_table1", "cpu", variant).split
        assert (split.clients, split.examples_per_client) == (40, 50)


@pytest.mark.thorough
def test_table_1_compares_global_models(experiment):
    assert variants("fedhenn_table1") == list(SETTINGS)
    for variant, (data, clients, classes) in SETTINGS.items():
        found = experiment("fedhenn_table1", "paper", variant)
        assert (found.config["data"]["name"], found.split.clients, found.partition.k) == (data, clients, classes)
        for scale in SCALES:
            found = experiment("fedhenn_table1", scale, variant)
            assert isinstance(found.algorithm, FedHeNNHomo)
            assert list(found.baselines) == ["fedavg", "fedprox"]
            assert {method.averaged_over for method in (found.algorithm, *found.baselines.values())} == {"all"}
            assert len(found.models) == 1
    wide = experiment("fedhenn_table1", "paper", "cifar100-100-20").models[0]
    assert (wide["channels"], wide["hidden"]) == ((64, 128), (256, 128))


@pytest.mark.thorough
def test_table_2_has_one_architecture_and_several(experiment):
    both = [f"{setting}-{form}" for setting in SETTINGS for form in ("homo", "hetero")]
    few = {"fashion-100-5": ("fashion_mnist", 100, 5)}
    both += [f"fashion-100-5-{form}" for form in ("homo", "hetero")]
    assert variants("fedhenn_table2") == [*both, "cifar10-100-2-vit"]
    levels = [f"cnn_fedhenn{i}" for i in range(1, 6)]
    for variant in variants("fedhenn_table2"):
        setting, _, form = variant.rpartition("-")
        data, clients, classes = {**SETTINGS, **few}[setting]
        found = experiment("fedhenn_table2", "paper", variant)
        assert (found.config["data"]["name"], found.split.clients, found.partition.k) == (data, clients, classes)
        if form == "homo" and setting not in few:
            one = experiment("fedhenn_table1", "paper", setting)
            assert (found.models, found.algorithm, found.split) == (one.models, one.algorithm, one.split)
        elif form == "homo":
            assert (networks(found), found.split.examples_per_client) == (["cnn_fedhenn_homo"], 40)
        elif data == "sentiment140":
            assert [(m["name"], m["num_layers"]) for m in found.models] == [("lstm", 1), ("lstm", 2)]
        else:
            assert networks(found) == [*levels, *(["vit"] if form == "vit" else [])]
        for scale in SCALES:
            found = experiment("fedhenn_table2", scale, variant)
            wanted = (FedHeNNHomo, ["local", "fedrep"]) if form == "homo" else (FedHeNN, ["local"])
            assert (type(found.algorithm), list(found.baselines)) == wanted
            if form != "homo":
                assert found.algorithm.rank == {"paper": 128, "cpu": 64, "smoke": 16}[scale]
                assert found.algorithm.normalise == (scale != "paper")


@pytest.mark.thorough
def test_table_3_compares_kernels(experiment):
    rows = ["cifar10", "cifar10-5", "cifar100", "sentiment140"]
    assert variants("fedhenn_table3") == [f"{row}-{kernel}" for row in rows for kernel in ("linear", "rbf")]
    settings = dict(zip(rows, ("cifar10-100-2", "cifar10-100-5", "cifar100-100-20", "sentiment140-100"), strict=True))
    for variant in variants("fedhenn_table3"):
        row, _, kernel = variant.rpartition("-")
        for scale in SCALES:
            assert experiment("fedhenn_table3", scale, variant).algorithm.kernel == kernel
        for scale in ("paper", "cpu"):
            found = experiment("fedhenn_table3", scale, variant)
            one = experiment("fedhenn_table1", scale, settings[row])
            assert (found.split, found.partition, found.models) == (one.split, one.partition, one.models)


@pytest.mark.thorough
def test_figure_1_drops_clients_or_gives_them_small_networks(experiment):
    shares = {"20": 0.2, "50": 0.5, "80": 0.8, "full": 0.0}
    for side in ("dropped", "fedhenn"):
        assert {v for v in variants("fedhenn_fig1") if v.startswith(side)} == {f"{side}-{share}" for share in shares}
    for scale in SCALES:
        for name, share in shares.items():
            dropped = experiment("fedhenn_fig1", scale, f"dropped-{name}")
            kept = experiment("fedhenn_fig1", scale, f"fedhenn-{name}")
            number = dropped.split.clients
            assert (dropped.split.unseen, kept.split.unseen) == (round(share * number), 0)
            assert (kept.split.clients, kept.partition) == (number, dropped.partition)
            full = "cnn_small" if scale == "smoke" else "cnn_fedhenn_homo"
            assert (type(dropped.algorithm), list(dropped.baselines)) == (FedAvg, ["fedprox"])
            assert (type(kept.algorithm), list(kept.baselines)) == (FedHeNN, ["local"])
            assert networks(dropped) == [full]
            used = [networks(kept)[i % len(kept.models)] for i in range(number)]
            assert set(used) <= {full, "cnn_fedhenn1"}
            assert used.count("cnn_fedhenn1") == round(share * number)
    there = load_participants(experiment("fedhenn_fig1", "smoke", "dropped-50"))
    assert (len(there.clients), len(there.unseen)) == (3, 3)


@pytest.mark.thorough
def test_figure_3_halves_the_data_of_some_clients(experiment):
    wanted = [f"{form}-{fraction}" for form in ("homo", "hetero") for fraction in FRACTIONS]
    assert variants("fedhenn_fig3") == wanted
    for variant in wanted:
        form, fraction = variant.split("-")
        for scale in SCALES:
            found = experiment("fedhenn_fig3", scale, variant)
            assert found.split.shrink_fraction == float(fraction)
            assert isinstance(found.algorithm, FedHeNNHomo if form == "homo" else FedHeNN)
            others = ["local", "fedavg", "fedprox", "fedrep"] if form == "homo" else ["local"]
            assert list(found.baselines) == others
            assert {found.baselines[name].averaged_over for name in others if name in ("fedavg", "fedprox")} <= {"all"}
            table = experiment("fedhenn_table2", scale, f"cifar10-100-2-{form}")
            assert (found.models, found.algorithm, found.settings) == (table.models, table.algorithm, table.settings)
    for fraction, halved in (("0.4", 2), ("1.0", 5)):
        sizes = [
            len(c.train) for c in load_participants(experiment("fedhenn_fig3", "smoke", f"homo-{fraction}")).clients
        ]
        assert (sizes.count(15), sizes.count(30)) == (halved, 5 - halved)


@pytest.mark.slow
def test_effects_vary_one_thing(experiment):
    """Everything but the named field is that of the base, which is Table 2's first row."""
    for scale in SCALES:
        for form in ("homo", "hetero"):
            base = experiment("fedhenn_effects", scale, f"{form}-base")
            table = experiment("fedhenn_table2", scale, f"cifar10-100-2-{form}")
            assert (base.models, base.algorithm, base.split) == (table.models, table.algorithm, table.split)
            for variant in (v for v in variants("fedhenn_effects") if v.startswith(form)):
                found, effect = experiment("fedhenn_effects", scale, variant), variant.removeprefix(f"{form}-")
                kind, _, factor = effect.partition("-")
                value = float(factor or 1)
                changed = {
                    "base": {},
                    "procrustes": {"distance": "procrustes"},
                    "sigma": {"kernel": "rbf", "sigma": value},
                    "eta": {"eta0": value},
                    "rad": {"rad_size": int(value * base.algorithm.rad_size)},
                    "epochs": {"local_epochs": max(1, int(value * base.algorithm.local_epochs))},
                }[kind]
                assert found.algorithm == replace(base.algorithm, **changed)
                assert (found.models, found.split, found.partition) == (base.models, base.split, base.partition)
                assert list(found.baselines) == (["fedavg"] if variant.startswith("homo-epochs") else [])


# -- runs -------------------------------------------------------------------------------------------------------------


def check_run(polyfed, name, variant, *words):
    """Runs a recipe and checks that each of its methods has scored every client, FedHeNN with the global model, too."""
    out = polyfed("run", name, "--variant", variant, "--scale", "smoke", *words, "--quiet", "--out", variant)
    config = read_config(variant)
    method = config["algorithm"]["name"]
    baselines = [entry if isinstance(entry, str) else entry["name"] for entry in config["baselines"]]
    assert {line.split(":")[0] for line in out.splitlines() if "B down, " in line} == {method, *baselines}
    for path in (variant, *(f"{variant}/baselines/{baseline}" for baseline in baselines)):
        history = read_metrics(polyfed.here / path / "metrics.jsonl")
        assert len(history) == config["rounds"]
        rows = history[-1]["clients"].values()
        assert len(rows) == config["data"]["clients"] - config["data"]["unseen"]
        assert all(0 <= row["accuracy"] <= 1 for row in rows)
        if read_config(path)["algorithm"]["name"] == "fedhenn_homo":
            assert all("server_accuracy" in row for row in rows)


@pytest.mark.thorough
def test_a_run_of_one_round(polyfed):
    check_run(polyfed, "fedhenn_table2", "cifar10-100-2-hetero", "--rounds", "1", "--workers", "0")


@pytest.mark.slow
@pytest.mark.parametrize("name", FEDHENN)
def test_smoke_runs_with_all_baselines(polyfed, name):
    """The first and the last variant, one of the middle, and a text recipe: all forms, kernels and networks."""
    names = variants(name)
    text = [variant for variant in names if variant.startswith("sentiment140")]
    for variant in dict.fromkeys((names[0], names[1], names[-1], *text)):
        check_run(polyfed, name, variant)
