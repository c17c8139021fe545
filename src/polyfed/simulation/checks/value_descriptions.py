"""Describes the values of any objects, so that they can be compared between two runs."""

import functools
import hashlib
from collections.abc import Mapping
from operator import itemgetter
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.core.nn.module_cache import hash_tensors

_MOST_OBJECTS = 10_000
_OF_TORCH = frozenset(nn.Module().__dict__)


def describe_values(value: Any) -> Any:
    """Describes a value by nested texts and numbers without addresses, equal for equal values.

    It looks at up to 10,000 objects.

    >>> describe_values({"scale": 2.0}) == describe_values({"scale": 2.0}), describe_values([1]) == describe_values([2])
    (True, False)
    """
    try:
        return _describe_part(value, {})
    except Exception as error:  # whatever a user's object raises when it is looked at
        return type(value).__qualname__, type(error).__qualname__


def _describe_part(value: Any, described: dict[int, tuple[int, Any]]) -> Any:
    """Describes a value; `described` has the objects that were described before, by id, and their numbers."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic | torch.dtype):
        return repr(value)
    if isinstance(value, Tensor):
        return hash_tensors({"": value})
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcmMSU":
        return value.dtype.str, value.shape, hashlib.blake2b(value.tobytes()).hexdigest()
    if id(value) in described:
        return "as", described[id(value)][0]
    if len(described) >= _MOST_OBJECTS:
        return "..."
    described[id(value)] = len(described), value  # which stays alive, so that no other gets its id
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, Mapping):
        entries = [(repr(_describe_part(key, described)), key) for key in value]
        return name, tuple(
            (text, _describe_part(value[key], described)) for text, key in sorted(entries, key=itemgetter(0))
        )
    if isinstance(value, list | tuple):
        return name, tuple(_describe_part(entry, described) for entry in value)
    if isinstance(value, set | frozenset):
        return name, tuple(sorted(repr(_describe_part(entry, described)) for entry in value))
    parts = (
        [value.state_dict(), own_attributes(value), value._modules]
        if isinstance(value, nn.Module)
        else _parts_of(value)
    )
    return name, tuple(_describe_part(part, described) for part in parts)


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a module that are not those of every module.

    >>> sorted(own_attributes(nn.Linear(2, 3)))
    ['in_features', 'out_features']
    """
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


def _parts_of(value: Any) -> list[Any]:
    """Returns what an object or a function holds."""
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [cells, value.__defaults__, value.__kwdefaults__]
    slots = [name for kind in type(value).__mro__ for name in np.atleast_1d(getattr(kind, "__slots__", ())).tolist()]
    if isinstance(value, type):
        return []
    return [getattr(value, "__dict__", {}), {name: getattr(value, name) for name in slots if hasattr(value, name)}]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # it has no value yet
        return False
    return True
