"""From options and YAML to a configuration: the parts that the command line's tests do not reach."""

from collections.abc import Mapping
from typing import Any, Literal

import pytest

from polyfed.algorithms import REGISTRY, FedAvgFT
from polyfed.cli.commands.options import configuration_parser
from polyfed.cli.commands.options.option_types import describe_type
from polyfed.cli.commands.options.recipes import load_recipe_configuration, shipped_recipe_files
from polyfed.core.errors import UserError
from polyfed.data import PARTITIONS, SOURCES
from polyfed.models import MODELS
from polyfed.simulation.experiment import build_experiment, build_method_like


@pytest.mark.parametrize(
    ("section", "name", "choice"),
    [
        (section, name, choice)
        for section, registry in {
            "data": SOURCES, "data.partition": PARTITIONS, "model": MODELS, "algorithm": REGISTRY,
        }.items()
        for name, choice in registry.items()
    ],
)  # fmt: skip
def test_every_option_has_a_help_text(section, name, choice):
    """`--help` is made from docstrings, so a field without an entry there would have none."""
    assert [option.key for option in configuration_parser.options_of(choice, section) if not option.help.strip()] == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int, "a whole number"), (float, "a number"), (bool, "true or false"), (str, "text"),
        (int | float, "a number"), (float | None, "a number or null"), (int | Literal["auto"], "a whole number or auto"),
        (Literal["a", "b", "c"], "a, b or c"), (tuple[int, ...], "a list such as [1, 2]"),
        (list[dict[str, float]], "a list such as [{rotation: 90}]"), (tuple[str, ...], "a list such as [fc1, fc2]"),
        (str | Mapping[str, Any], "text or a mapping such as {name: mlp, hidden: [32]}"),
        (tuple[tuple[int, ...], ...], "a list such as [[0, 1], [2, 3]]"), (bytes, "a value of another type"),
    ],
)  # fmt: skip
def test_types_in_words(kind, words):
    assert describe_type(kind) == words


def test_a_value_that_looks_like_yaml_stays_what_the_option_says():
    config = configuration_parser.parse_configuration(["--data", "mnist", "--data.path", "1e3"], {}, "polyfed run")
    assert config["data"]["path"] == "1e3"
    assert (
        configuration_parser.parse_configuration(["--algorithm.lr", "1e-3"], {}, "polyfed run")["algorithm"]["lr"]
        == 0.001
    )


def test_the_last_of_an_option_given_twice_holds():
    assert configuration_parser.parse_configuration(["--rounds", "3", "--rounds=4"], {}, "polyfed run")["rounds"] == 4
    words = ["--algorithm", "fedprox", "--algorithm=local"]
    assert configuration_parser.parse_configuration(words, {}, "polyfed run")["algorithm"]["name"] == "local"


FEW = {"local", "fedopt", "scaffold", "fedavg_kd", "flha_ghn", "fedhenn", "fedpnas"}


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.thorough) for n in REGISTRY])
def test_a_configuration_gives_the_same_method_again(name):
    config = configuration_parser.parse_configuration(["--algorithm", name, "--algorithm.lr", "0.3"], {}, "polyfed run")
    method = build_experiment(config).algorithm
    assert type(method) is REGISTRY[name]
    assert method == REGISTRY[name](lr=0.3)


@pytest.mark.thorough
@pytest.mark.parametrize("name", shipped_recipe_files())
def test_recipes_are_complete(name):
    recipe = load_recipe_configuration(name)
    assert recipe.pop("description")
    build_experiment(configuration_parser.parse_configuration([], recipe, "polyfed run"))


def test_baselines_share_the_local_training_and_keep_their_own_policy():
    method = FedAvgFT(lr=0.7, local_epochs=3, batch_size=5, buffers="recompute", finetune_epochs=9)
    local, fedprox = build_method_like("local", method), build_method_like("fedprox", method)
    assert (local.lr, local.local_epochs, local.batch_size, local.buffers) == (0.7, 3, 5, "local")
    assert (fedprox.lr, fedprox.buffers, fedprox.mu) == (0.7, "average", 0.01)


def test_incomplete_configurations():
    config = configuration_parser.parse_configuration([], {}, "polyfed run")
    with pytest.raises(UserError, match=r"the configuration lacks 'algorithm'; `polyfed run --print-config` shows"):
        build_experiment({key: value for key, value in config.items() if key != "algorithm"})
    with pytest.raises(UserError, match="algorithm has no field 'gone'"):
        build_experiment(config | {"algorithm": {"name": "fedavg", "gone": 1}})


def test_defaults_are_the_callers_own():
    """Options that nobody gives have the default itself, which is not checked again: a list in it is copied."""
    (one, other) = (configuration_parser.parse_configuration([], {}, "polyfed run") for _ in range(2))
    assert one == other
    for section in (one["model"], one["data"], one["algorithm"]):
        for key, value in section.items():
            if isinstance(value, list | dict):
                assert all(value is not there.get(key) for there in (other["model"], other["data"], other["algorithm"]))
