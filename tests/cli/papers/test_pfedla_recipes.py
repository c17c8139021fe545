"""The recipes of pFedLA: who has how many images of what, and what the sweeps and the toy example vary."""

import functools

import numpy as np
import pytest

from polyfed.cli.commands.options import configuration_parser
from polyfed.cli.commands.options import recipes as shipped
from polyfed.data.partitioning.split import split_rows_by_client
from polyfed.simulation.experiment import build_experiment

read = functools.cache(shipped.read_recipe)
LABELS = {"fashion_mnist": (60_000, 10), "emnist": (240_000, 10), "cifar10": (50_000, 10), "cifar100": (50_000, 100)}
SIZES = {"fashion_mnist": 100, "emnist": 100, "cifar10": 250, "cifar100": 150}


@functools.cache
def experiment(name, scale="paper", variant=None):
    return build_experiment(
        configuration_parser.parse_configuration([], read(name).configuration(scale, variant), "polyfed run")
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ["pfedla_table1", "pfedla_table2"])
def test_the_data_sets_suffice(name, seed):
    """Also where a class serves by chance half of 100 clients; of as many labels as the training sets have."""
    for variant in read(name).variants:
        for scale in ("paper", "cpu"):
            found = experiment(name, scale, variant)
            data = found.config["data"]["name"]
            number, classes = LABELS[data]
            rows, _ = split_rows_by_client(np.arange(number) % classes, found.split, found.partition, seed)
            size = SIZES[data] if scale == "paper" else 40
            assert {len(r.train) for r in rows} == {size}, (variant, scale)
            k = 12 if data == "cifar100" else 4
            if name == "pfedla_table1":
                of = [np.bincount(np.concatenate([r.train, r.test]) % classes, minlength=classes) for r in rows]
                assert {int((counts > 0).sum()) for counts in of} == {k}
                assert all(np.ptp(counts[counts > 0]) <= 1 for counts in of)  # "the same amount of data on each class"


def test_classes_are_drawn_at_random_and_dominance_fits_the_papers_local_training():
    for name in ("pfedla_table1", "pfedla_table3", "pfedla_fig7", "pfedla_hn_lr", "pfedla_layer"):
        for variant in read(name).variants:
            partition = read(name).configuration("cpu", variant)["data"]["partition"]
            assert (partition["name"], partition["balanced"], partition.get("equal", True)) == (
                "classes_per_client", "balanced" in variant, True
            ), (name, variant)  # fmt: skip
    for variant in read("pfedla_table2").variants:
        share = read("pfedla_table2").configuration("paper", variant)["data"]["partition"]["share"]
        assert share == (0.8 if "share0.8" in variant else 0.4), variant


def test_the_cpu_scale_is_where_aggregation_has_something_to_give():
    for name in (n for n in shipped.shipped_recipe_files() if n.startswith("pfedla_")):
        for variant in read(name).variants:
            found = read(name).configuration("cpu", variant)
            data, method = found["data"], found["algorithm"]
            assert (data["examples_per_client"], data["test_fraction"]) == (40, 0.8), (name, variant)
            assert (method["lr"], method["local_epochs"]) == (0.05, 5)
            assert (found["rounds"], 60 % found["evaluate_every"]) == (60, 0), (name, variant)


def test_what_the_toy_example_and_the_sweeps_vary():
    def varied(name, *fields):
        methods = [read(name).configuration("paper", variant)["algorithm"] for variant in read(name).variants]
        return [tuple(method.get(field) for field in fields) for method in methods]

    assert varied("pfedla_fig1", "weights", "layer") == [
        ("similarity", "module"), ("similarity", "model"), (None, "module"), (None, "model")
    ]  # fmt: skip
    assert varied("pfedla_layer", "weights", "layer") == [
        *((None, layer) for layer in ("module", "tensor", "model")),
        *(("similarity", layer) for layer in ("module", "model")),
    ]
    assert varied("pfedla_hn_lr", "hn_lr") == [(0.005,), (0.05,), (0.5,), (1.0,), (2.0,), (10.0,)]
    kept = dict(zip(read("pfedla_table3").variants, varied("pfedla_table3", "k"), strict=True))
    assert [k for v, (k,) in kept.items() if "fashion" in v] == list(range(6))  # conv1, conv2, fc1, fc2, fc3
    assert [k for v, (k,) in kept.items() if "cifar" in v] == list(range(8))  # and two BatchNorms
