"""The registry, networks of the user's own, and specs as values."""

import multiprocessing
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polyfed.core.errors import UserError
from polyfed.core.io.trusted_code import add_trusted_names, restore_trusted_names_afterwards, trust_code, trusted_names
from polyfed.core.seeds import temporary_rng_seed
from polyfed.models import FrozenMapping, ModelSpec, build

SOURCE = """
import torch
from torch import nn

NUMBER = 3

class Nets:
    @staticmethod
    def linear(num_classes):
        return nn.Linear(2, num_classes)

def both(input_shape, num_classes, *, hidden=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], hidden), nn.Linear(hidden, num_classes))

def neither():
    return nn.Linear(2, 2)

def anything(**given):
    assert set(given) == {"input_shape", "num_classes"}
    return nn.Identity()

def only_by_position(num_classes=7, /):
    return nn.Linear(1, num_classes)

def needs_more(num_classes, depth):
    return nn.Identity()

def nothing():
    nn.Linear(2, 2)

def broken():
    return nn.Linear(2)
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module in the current directory."""
    (tmp_path / "my_own_nets.py").write_text(SOURCE)
    (tmp_path / "needs_a_ghost.py").write_text("import ghost_module_that_is_not_there\n")
    (tmp_path / "is_no_python.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    with restore_trusted_names_afterwards():
        trust_code()
        yield "my_own_nets"
    sys.modules.pop("my_own_nets", None)


def test_a_users_factory_gets_the_names_it_has(nets: str) -> None:
    both: Any = build(f"{nets}:both", (6,), 3, hidden=5)
    assert (both[1].in_features, both[1].out_features, both[2].out_features) == (6, 5, 3)
    assert isinstance(build(f"{nets}:neither", (6,), 3), nn.Linear)
    assert isinstance(build(f"{nets}:anything", (6,), 3), nn.Identity)
    positional: Any = build(f"{nets}:only_by_position", (6,), 3)
    assert positional.out_features == 7
    nested: Any = build(f"{nets}:Nets.linear", (6,), 3)
    assert nested.out_features == 3


def test_a_factory_itself_and_a_class_do_too() -> None:
    given: Any = build(lambda num_classes: nn.Linear(2, num_classes), (6,), 3)
    assert given.out_features == 3
    linear: Any = build(nn.Linear, (6,), 3, in_features=1, out_features=2)
    assert linear.in_features == 1


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("resnet81", {}, "did you mean resnet18"),
        ("mlp", {"hiden": 3}, "unknown argument 'hiden'; did you mean hidden"),
        ("no_such_module_here:net", {}, "no module 'no_such_module_here', neither installed nor in"),
        ("torch.no_such_part:net", {}, "no module 'torch.no_such_part'"),
        ("needs_a_ghost:net", {}, "it needs the module 'ghost_module_that_is_not_there'"),
        ("is_no_python:net", {}, "SyntaxError"),
        ("my_own_nets:bth", {}, "no 'bth'; did you mean both"),
        ("my_own_nets:NUMBER", {}, "is int, not a function or class"),
        ("my_own_nets:", {}, "module:factory"),
        (":both", {}, "module:factory"),
        ("__import__('os'):system", {}, "module:factory"),
        ("my_own_nets:both", {"deph": 3}, "unknown argument 'deph'"),
        ("my_own_nets:needs_more", {}, "depth"),
        ("my_own_nets:nothing", {}, "gave NoneType instead of a torch.nn.Module"),
        ("builtins:dict", {}, "gave dict"),
    ],
)
def test_refusals(nets: str, name: str, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        build(name, (6,), 3, **arguments)


def test_a_mistake_inside_the_users_code_keeps_its_traceback(nets: str) -> None:
    with pytest.raises(TypeError, match="out_features"):
        build(f"{nets}:broken", (6,), 3)


def test_specs_are_values() -> None:
    spec = ModelSpec("mlp", {"hidden": [8, 4]}, (1, 8, 8), 10)
    same = ModelSpec("mlp", {"hidden": (8, 4)}, [1, 8, 8], 10)  # type: ignore[arg-type]
    assert spec == same
    assert hash(spec) == hash(same)
    assert len({spec, same, ModelSpec("mlp", {"hidden": (8,)}, (1, 8, 8), 10)}) == 2
    again = pickle.loads(pickle.dumps(spec))  # noqa: S301 (our own bytes)
    assert again == spec
    assert hash(again) == hash(spec)
    assert dict(again.arguments) == {"hidden": (8, 4)}
    with pytest.raises(AttributeError):
        spec.name = "vit"  # type: ignore[misc]


def test_a_spec_builds_the_same_network_from_the_same_seed() -> None:
    spec = ModelSpec("cnn_small", {}, (1, 8, 8), 10)
    with temporary_rng_seed(3):
        first = spec()
    with temporary_rng_seed(3):
        second = spec()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.slow
def test_a_spec_of_a_users_module_works_in_another_process(nets: str) -> None:
    spec = ModelSpec(f"{nets}:both", {"hidden": 2}, (6,), 3)
    spec()
    words = {"initializer": add_trusted_names, "initargs": (trusted_names(),)}  # as the pool of `federate` does
    with multiprocessing.get_context("spawn").Pool(1, **words) as pool:
        assert pool.apply(_num_parameters, (spec,)) == 7 * 2 + 3 * 3


def _num_parameters(spec: ModelSpec) -> int:
    return sum(p.numel() for p in spec().parameters())


def test_frozen_arguments_nest_and_do_not_alias() -> None:
    given = {"a": {"b": [1, 2]}, "c": None}
    frozen = FrozenMapping(given)
    given["a"]["b"].append(3)  # type: ignore[index]
    assert frozen == {"a": {"b": (1, 2)}, "c": None}
    assert hash(frozen) == hash(FrozenMapping({"c": None, "a": {"b": (1, 2)}}))


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("mpl", {}, "did you mean mlp"),
        ("mlp", {"hidden": {1, 2}}, "hidden={1, 2} is of type set"),
        ("mlp", {3: 4}, "text as names, got 3"),
        ("mlp", {"num_classes": 4}, "given by the recipe"),
    ],
)
def test_bad_specs(name: str, arguments: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        ModelSpec(name, arguments, (1, 8, 8), 10)
