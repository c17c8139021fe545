"""What tests of recipes share. Of each recipe and scale one choice is tried in `make test`, and all in `make test-slow`."""

import functools

import pytest

from polyfed.cli.commands.options import configuration_parser, recipes
from polyfed.cli.main import main
from polyfed.simulation.experiment import build_experiment


@pytest.hookimpl(tryfirst=True)  # before -m decides
def pytest_collection_modifyitems(items):
    seen = set()
    for item in items:
        if getattr(item, "originalname", "") == "test_every_choice_is_a_whole_configuration":
            choice = (item.path.name, item.callspec.params["name"], item.callspec.params["scale"])
            if choice in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(choice)


def _once(parse):
    """A pure function of a configuration's part, computed once for all recipes that have that part."""
    known = {}

    def parsed(entry, program):
        key = (parse.__name__, repr(entry))
        if key not in known:
            known[key] = parse(entry, program)
        return known[key]

    return parsed


@pytest.fixture(scope="module")
def experiment():
    """The experiment of a recipe, at the paper's scale and its first variant unless said otherwise."""
    read = functools.cache(recipes.read_recipe)

    @functools.cache
    def experiment(name, scale="paper", variant=None):
        return build_experiment(
            configuration_parser.parse_configuration([], read(name).configuration(scale, variant), "polyfed run")
        )

    with pytest.MonkeyPatch.context() as patch:  # networks and baselines of many variants are alike
        patch.setattr(configuration_parser, "_complete_model", _once(configuration_parser._complete_model))
        patch.setattr(configuration_parser, "_complete_baseline", _once(configuration_parser._complete_baseline))
        patch.setattr(
            configuration_parser,
            "options_of",
            functools.cache(configuration_parser.options_of),
        )
        yield experiment


@pytest.fixture
def polyfed(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder and returns its standard output; the folder is `polyfed.here`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def play(*arguments):
        capsys.readouterr()
        status = main(arguments)
        out, err = capsys.readouterr()
        assert status == 0, err
        return out

    play.here = tmp_path
    return play
