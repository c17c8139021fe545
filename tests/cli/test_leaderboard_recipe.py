"""The recipes of the leaderboard: every method that suits a federation is in it, and all take as many steps."""

import pytest

from polyfed.algorithms import REGISTRY
from polyfed.cli.commands.options import configuration_parser
from polyfed.cli.commands.options.recipes import read_recipe
from polyfed.simulation.experiment import build_experiment

RECIPE, RIVALS = read_recipe("leaderboard"), read_recipe("rivals")


def experiment(variant, recipe=RECIPE):
    path = {"data": {"path": "x"}}
    config = recipe.configuration(variant=variant)
    config["data"] = {**config["data"], **(path["data"] if config["data"]["name"] != "digits" else {})}
    return build_experiment(configuration_parser.parse_configuration([], config, "polyfed run"))


@pytest.mark.lists
@pytest.mark.parametrize("variant", ["digits-0.1", "architectures", "tweets", "cifar10"])
@pytest.mark.one_case
def test_every_method_that_suits_is_compared(variant):
    suiting = {
        name for name, method in REGISTRY.items() if method.card.fields_of_leaderboard_variant(variant) is not None
    }
    if variant == "architectures":
        suiting = {name for name in suiting if "one_architecture" not in REGISTRY[name].requires}
    assert set(experiment(variant).baselines) == suiting, (
        "src/polyfed/cli/recipes/leaderboard.yaml is out of date: run python tools/update_lists.py"
    )


@pytest.mark.lists
def test_the_methods_that_are_left_out_have_a_reason():
    """Local training is the recipe's method; FedBN is FedAvg on networks without norm layers, and HeteroFL nearly so
    with one width; the searches bring a network of their own; three methods need low-rank adapters."""
    left_out = {
        name for name, method in REGISTRY.items() if method.card.fields_of_leaderboard_variant("digits-0.1") is None
    }
    searches = {name for name, method in REGISTRY.items() if "images" in method.requires}
    adapters = {
        name for name, method in REGISTRY.items() if method.__module__.startswith("polyfed.algorithms.adapters")
    }
    assert left_out == {"local", "fedbn", "heterofl", "fedrolex", "depthfl"} | searches | adapters


@pytest.mark.thorough
@pytest.mark.parametrize("variant", RECIPE.variants)
def test_all_take_the_same_number_of_steps(variant):
    found = experiment(variant)
    for method in (found.algorithm, *found.baselines.values()):
        assert (method.local_epochs, method.local_steps, method.batch_size) == (2, None, 16)


@pytest.mark.parametrize("variant", RIVALS.variants)
def test_methods_searched_once_more_take_the_same_number_of_steps(variant):
    found = experiment(variant, RIVALS)
    methods = (found.algorithm, *found.baselines.values())
    assert len({(method.local_epochs, method.local_steps, method.batch_size) for method in methods}) == 1
    assert not set(found.baselines) - set(REGISTRY)
