"""No recipe is refused by its own seed: the partition of each scale and variant can be divided with any seed."""

import numpy as np
import pytest

from polyfed.cli.commands.options import configuration_parser
from polyfed.cli.commands.options.recipes import read_recipe, shipped_recipe_files
from polyfed.core.seeds import derive_seed
from polyfed.data.partitioning.split import split_rows_by_client
from polyfed.data.sources.published.vision import Digits
from polyfed.simulation.experiment import build_experiment

SEEDS = range(8)
# As many labels as the data set has; the images are not needed to divide them.
LABELS = {
    "MNIST": np.repeat(np.arange(10), 6000),
    "FashionMNIST": np.repeat(np.arange(10), 6000),
    "EMNIST": np.repeat(np.arange(10), 24000),
    "CIFAR10": np.repeat(np.arange(10), 5000),
    "CIFAR100": np.repeat(np.arange(100), 500),
    "FashionMosaics": np.repeat(np.arange(10), 2000),
}


def divided(name):
    """What each scale and variant of a recipe divides, each different one once."""
    recipe, seen = read_recipe(name), {}
    for scale in recipe.scales or [None]:
        for variant in recipe.variants or [None]:
            parsed = configuration_parser.parse_configuration([], recipe.configuration(scale, variant), "polyfed run")
            made = build_experiment(parsed)
            kind = type(made.source).__name__
            if kind == "Digits" or kind in LABELS:
                seen.setdefault(repr((made.source, made.partition, made.split)), (scale, variant, made))
    return seen.values()


def check(name, seeds):
    for scale, variant, experiment in divided(name):
        source = experiment.source
        labels = source.load().train.labels.numpy() if isinstance(source, Digits) else LABELS[type(source).__name__]
        for seed in seeds:
            rows, _ = split_rows_by_client(
                labels, experiment.split, experiment.partition, derive_seed(seed, "partition")
            )
            assert all(len(client.train) and len(client.test) for client in rows), (scale, variant, seed)


def test_the_digits_run_with_every_seed():
    check("digits", range(40))


@pytest.mark.thorough
@pytest.mark.parametrize("name", shipped_recipe_files())
def test_every_recipe_can_be_dealt_with_every_seed(name):
    check(name, SEEDS)
