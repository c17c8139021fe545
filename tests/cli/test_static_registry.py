"""Outlines say of every choice what the class or function itself says."""

import inspect
from importlib import import_module

import pytest

from polyfed.algorithms import REGISTRY
from polyfed.cli import static_registry
from polyfed.cli.commands.options.configuration_parser import options_of
from polyfed.cli.commands.options.early_checks import check_settings
from polyfed.cli.static_registry import StaticRegistry, read_value_or_outline_without_import
from polyfed.core.errors import UserError
from polyfed.data import PARTITIONS, SOURCES
from polyfed.models import MODELS

PAIRS = {
    "algorithm": (static_registry.ALGORITHMS, REGISTRY),
    "data": (static_registry.SOURCES, SOURCES),
    "data.partition": (static_registry.PARTITIONS, PARTITIONS),
    "model": (static_registry.MODELS, MODELS),
}
CHOICES = [(section, name) for section, (_, registry) in PAIRS.items() for name in registry]


@pytest.mark.parametrize("section", PAIRS)
def test_registries_have_the_same_names_in_the_same_order(section):
    read, real = PAIRS[section]
    assert list(read) == list(real)
    assert len(read) == len(real)


@pytest.mark.parametrize(("section", "name"), CHOICES)
def test_options_types_defaults_and_texts_are_the_same(section, name):
    read, real = (registry[name] for registry in PAIRS[section])
    assert options_of(read, section) == options_of(real, section)
    assert inspect.getdoc(read) == inspect.getdoc(real)
    assert (read.__name__, read.__module__) == (real.__name__, real.__module__)


@pytest.mark.parametrize("name", REGISTRY)
def test_what_a_method_requires_and_discloses_is_the_same(name):
    read, real = static_registry.ALGORITHMS[name], REGISTRY[name]
    assert (read.requires, read.discloses) == (real.requires, real.discloses)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("polyfed.core.training.config", "LocalTraining"),
        ("polyfed.data.partitioning.split", "Split"),
        ("polyfed.simulation.settings", "Settings"),
    ],
)
def test_classes_that_no_registry_names_are_the_same(module, name):
    assert options_of(read_value_or_outline_without_import(module, name), "") == options_of(
        getattr(import_module(module), name), ""
    )


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a module `polyfed.made`, which cannot be imported, only read."""
    monkeypatch.setattr(static_registry, "_PACKAGE", tmp_path)

    def write(text):
        static_registry._top_level_definitions.cache_clear()
        read_value_or_outline_without_import.cache_clear()
        (tmp_path / "made.py").write_text(text)

    yield write
    static_registry._top_level_definitions.cache_clear()
    read_value_or_outline_without_import.cache_clear()


def test_no_code_of_a_module_runs(package):
    package(
        "import no_such_package as none\n"
        "from no_such_package import Layer\n"
        "raise SystemExit\n"
        "STEP = 2**-1\n"
        "def net(input_shape, *, layer: Layer | None = none.LAYER, widths: 'tuple[int, ...]' = (1, 2), step=-STEP):\n"
        "    '''A network.'''\n"
        "    raise SystemExit\n"
        "NETS = {'net': net}\n"
    )
    net = StaticRegistry("polyfed.made", "NETS")["net"]
    assert [(o.key, o.default) for o in options_of(net, "model")][1:] == [
        ("model.widths", (1, 2)),
        ("model.step", -0.5),
    ]
    assert options_of(net, "model")[1].type == tuple[int, ...]
    with pytest.raises(TypeError, match=r"polyfed\.made\.net is an outline, which cannot be called"):
        net((1,), 2)


def test_a_registry_that_is_no_literal_dict_is_refused(package):
    package("NETS = dict(net=int)\n")
    with pytest.raises(TypeError, match=r"polyfed\.made\.NETS must be a literal dict, found dict\(net=int\)"):
        StaticRegistry("polyfed.made", "NETS")


def test_an_expression_that_only_running_the_module_could_tell_is_refused(package):
    package("def net(width: int = [n for n in range(3)][0]): pass\nNETS = {'net': net}\n")
    with pytest.raises(TypeError, match=r"polyfed\.made, line 1: .* cannot be read without importing the module"):
        StaticRegistry("polyfed.made", "NETS")["net"]


def test_numbers_that_a_method_refuses_are_refused_early_in_its_words():
    fields = {name: list(static_registry.list_least_values(static_registry.ALGORITHMS[name])) for name in REGISTRY}
    assert sum(map(len, fields.values())) > 90
    for name, field, least in ((name, *row) for name, rows in fields.items() for row in rows):
        value = 0 if least is None else least - 1
        with pytest.raises(UserError) as early:
            check_settings({"algorithm": {"name": name, field: value}})
        with pytest.raises(UserError) as late:
            REGISTRY[name](**{field: value})
        assert str(early.value) == str(late.value), (name, field)
