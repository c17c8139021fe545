"""From options and YAML to a configuration: the parts that the command line's tests do not reach."""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from polyfed.algorithms import REGISTRY, FedAvgFT
from polyfed.cli.commands.argv import CommandParser
from polyfed.cli.commands.options import configuration_parser
from polyfed.cli.commands.options.option_types import describe_type
from polyfed.cli.commands.options.recipes import load_recipe_configuration, shipped_recipe_files
from polyfed.cli.main import main
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


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--lr 0.1", "unknown option --lr; did you mean --algorithm.lr?"),
        ("--epochs 2", "unknown option --epochs; did you mean --algorithm.local-epochs?"),
        ("--batch-size 8", "unknown option --batch-size; did you mean --algorithm.batch-size?"),
        ("--clients 4", "unknown option --clients; did you mean --data.clients?"),
        ("--alpha 1", "unknown option --alpha; did you mean --data.partition.alpha?"),
        ("--target ill", "image_table, table have it: --data table --data.target VALUE"),
        ("--mu 1", "unknown option --mu; fedprox, moon, gpfl have it: --algorithm fedprox --algorithm.mu VALUE"),
    ],
)
def test_a_field_without_its_section_gets_the_right_hint(words, hint):
    with pytest.raises(UserError) as refused:
        configuration_parser.parse_configuration(words.split(), {}, "polyfed run")
    assert hint in str(refused.value)


def test_a_baseline_of_a_recipe_can_be_the_method_of_the_run():
    recipe = load_recipe_configuration("digits")
    recipe.pop("description")
    recipe["baselines"] = ["local", {"name": "flha_ghn", "batch_size": 8}]
    config = configuration_parser.parse_configuration(["--algorithm", "flha_ghn"], recipe, "polyfed run")
    assert (config["algorithm"]["name"], config["algorithm"]["batch_size"]) == ("flha_ghn", 8)
    assert build_experiment(config).baselines.keys() == {"local"}


def test_short_names_of_out_and_quiet():
    parser = CommandParser("polyfed run", "")
    parser.add_option("--out", "DIR", "where")
    parser.add_flag("--quiet", "silent")
    assert vars(parser.parse_declared_options(["-o", "x", "-q"])[0]) == {"out": "x", "quiet": True}
    with pytest.raises(UserError, match=r"^--out needs a value"):
        parser.parse_declared_options(["-o"])


def test_a_reader_that_stops_reading_is_no_failure():
    command = [sys.executable, "-c", "from polyfed.cli.main import entry; entry()", "list", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_short_help_is_short_and_the_long_one_has_groups(capsys):
    for command in ("run", "compare"):
        assert main([command, "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 26
        assert max(map(len, lines)) <= 120
        assert main([command, "--help-all"]) == 0
        long = capsys.readouterr().out
        for title in ("data:", "method:", "messages:", "engine and failures:", "rounds and evaluation:"):
            assert f"\n{title}\n" in long
        assert main([command, "--algorithm", "fedprox", "--help"]) == 0
        assert "--algorithm.mu" in capsys.readouterr().out


def test_a_field_of_a_method_that_is_not_compared_is_refused(capsys):
    words = ["compare", "heart", "--algorithms", "fedavg,local", "--algorithm", "fedprox", "--algorithm.mu", "0.1"]
    assert main(words) == 2
    assert "--algorithm.mu is of fedprox, which --algorithms does not name; name the method" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (
            "xyz",
            "it is an option of no data, and no data are named (digits is the default): name them first, as a file",
        ),
        ("targt", "did you mean --data.target, an option of a table? No data are named (digits is the default)"),
        ("event", "it is an option of table, and no data are named (digits is the default)"),
        ("hospital", "did you mean --data.site, an option of a table?"),
        ("cleints", "did you mean --data.clients?"),
    ],
)
def test_an_option_of_data_without_data_says_whose_it_is(option, sentence, capsys):
    assert main(["compare", f"--data.{option}", "3"]) == 2
    assert capsys.readouterr().err.startswith(f"polyfed: unknown option --data.{option}; {sentence}")
