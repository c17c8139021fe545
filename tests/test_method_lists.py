"""Every list of methods is made from what the methods' own files declare."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import yaml

from polyfed.algorithms import REGISTRY
from polyfed.cli import static_registry
from polyfed.core.methods.method_card import MethodCard

pytestmark = pytest.mark.lists
ROOT = Path(__file__).parent.parent
FAMILIES = [
    "adapters", "alignment", "distillation", "global_model", "hypernetworks", "nas", "partial_sharing", "personalised",
    "prototypes", "submodels",
]  # fmt: skip


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lists():
    path = list(sys.path)
    yield load_tool("update_lists")
    sys.path[:] = path


def test_lists_are_up_to_date(lists):
    """README, the pages, the navigation, the reference, the registry and the recipe."""
    assert lists.update(check=True) == [], "out of date: run python tools/update_lists.py"


def test_every_method_of_the_registry_declares_itself(lists):
    found = lists.find_methods()
    assert [method.name for method in found] == list(REGISTRY), "run python tools/update_lists.py"
    for method in found:
        kind = REGISTRY[method.name]
        place = f"src/polyfed/algorithms/{method.import_path.replace('.', '/')}.py"
        assert kind.__module__ == f"polyfed.algorithms.{method.import_path}"
        assert kind.card.name == method.name, f"{place}: the card's name is {kind.card.name!r}"
        assert kind.card.evaluated, f"{place}: say in the card which network is evaluated"
        known = kind.__dataclass_fields__
        fields = [kind.card.small, *(kind.card.leaderboard or {}).values()]
        assert [name for values in fields for name in values if name not in known] == [], f"{place}: no such fields"
        kind(**kind.card.small)


def test_the_command_line_reads_the_same_cards_without_importing_the_methods():
    for name, method in REGISTRY.items():
        read = static_registry.ALGORITHMS[name].card
        for field in MethodCard.__dataclass_fields__:
            assert getattr(read, field) == getattr(method.card, field), (name, field)


def test_families_are_the_same_everywhere_and_in_one_order(lists):
    assert list(dict.fromkeys(method.family for method in lists.find_methods())) == FAMILIES
    titles = [lists.family_title(family) for family in FAMILIES]
    assert (
        re.findall(r"^### (.*)$", (ROOT / "docs/methods.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[:10]
        == titles
    )
    assert [
        family for family in FAMILIES if not (ROOT / "src/polyfed/algorithms" / family / "__init__.py").exists()
    ] == []


def test_what_is_said_to_be_missing_is_missing():
    text = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
    (missing,) = re.findall(r"^\| \*\*not in polyfed\*\* \| (.*?) \|$", text, flags=re.MULTILINE)
    names = {re.sub(r"\W", "", name).lower() for name in re.split(r",|\band\b", missing)}
    there = names & {name.replace("_", "") for name in REGISTRY}
    assert not there, f"docs/coming_from.md says that {sorted(there)} is not in polyfed: move it to the methods in both"


def test_a_new_method_is_put_into_every_list(lists):
    """With one method more, written into the texts that are there."""
    more = [*lists.find_methods(), lists.Declared("zeta", "submodels", "submodels.zeta", "Zeta")]
    written = {name: lists.STATIC[name]((ROOT / name).read_text(encoding="utf-8"), more) for name in lists.STATIC}
    registry = written["src/polyfed/algorithms/__init__.py"]
    assert "from polyfed.algorithms.submodels.zeta import Zeta\n" in registry
    assert '    "zeta": Zeta,\n' in registry
    assert ' "Zeta",' in registry
    assert "- zeta: methods/zeta.md" in written["mkdocs.yml"]
    assert "::: polyfed.algorithms.Zeta\n" in written["docs/api/algorithms.md"]
    assert yaml.safe_load(written["mkdocs.yml"])["nav"]


def test_a_card_says_what_is_wrong_with_it():
    for words in ({"name": "FedX"}, {"name": "fed-x"}, {"name": ""}):
        with pytest.raises(ValueError, match="name must be of small letters"):
            MethodCard(summary="Does", evaluated="it", **words)
    for summary in ("", "Ends.", "x" * 61, "two\nlines"):
        with pytest.raises(
            ValueError, match="fedx: summary must be one line of 1 to 60 characters without a full stop"
        ):
            MethodCard(name="fedx", summary=summary, evaluated="it")


def test_two_methods_of_one_name_are_refused(lists, tmp_path):
    for module in ("one", "other"):
        file = tmp_path / "family" / f"{module}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text('class Some:\n    card: int = MethodCard(name="some")\n', encoding="utf-8")
    with pytest.raises(SystemExit, match="two methods are called 'some'"):
        lists.find_methods(tmp_path)
