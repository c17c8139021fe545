"""Computes hashes of the values that transforms, augmentations and losses hold, such as the means that one subtracts.

The data fingerprint of a run has the names of functions and classes, and what a dataclass prints. A resumed run compares
these hashes as well, and warns if one has changed.
"""

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.core.algorithm import Client
from polyfed.core.examples.examples import PartwiseTransform
from polyfed.core.nn.module_cache import hash_tensors
from polyfed.simulation.checks.requirements import examples_by_split

_MAX_DEPTH = 12
_OF_TORCH = frozenset(nn.Module().__dict__)


def hash_values_by_name(clients: Iterable[Client]) -> dict[str, str]:
    """Returns {name: short hash} of the values that each function or class of transforms, augmentations and losses holds,
    over all clients. Functions without values of their own are left out.
    """
    hashes, descriptions = dict[str, Any](), dict[int, Any]()  # many clients may share an object
    for client in sorted(clients, key=lambda client: client.id):
        for place, thing in _holders_of_values(client):
            is_function = isinstance(thing, FunctionType)
            if not is_function or thing.__closure__ or thing.__defaults__ or thing.__kwdefaults__:
                named = thing.func if isinstance(thing, functools.partial) else thing
                name = getattr(named, "__qualname__", type(named).__qualname__)
                if id(thing) not in descriptions:
                    descriptions[id(thing)] = _describe(thing, ())
                text = repr((client.id, place, descriptions[id(thing)]))
                hashes.setdefault(name, hashlib.sha256()).update(text.encode(errors="surrogatepass"))
    return {name: content.hexdigest()[:16] for name, content in sorted(hashes.items())}


def _holders_of_values(client: Client) -> Iterator[tuple[str, Any]]:
    """Yields (place, object) for what may hold values that the data fingerprint does not have."""
    holders: dict[str, Any] = {"loss": client.loss}
    for split, examples in examples_by_split(client).items():
        transform = examples.transform
        parts = transform.transforms if isinstance(transform, PartwiseTransform) else {"": transform}
        holders |= {f"{split} transform {part}": part_transform for part, part_transform in parts.items()}
        yield from [] if examples.augment is None else [(f"{split} augment", examples.augment)]
    for place, thing in holders.items():
        if thing is not None and not type(thing).__module__.startswith("polyfed."):  # which prints its values
            yield place, thing


def _describe(value: Any, holders: tuple[int, ...]) -> Any:
    """Describes a value, and what it holds, by nested tuples of texts and numbers without addresses; `holders` are the
    ids of the objects around it."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic | torch.dtype):
        return repr(value)
    if isinstance(value, Tensor):
        return hash_tensors({"": value})
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcmMSU":
        return value.dtype.str, value.shape, hashlib.blake2b(value.tobytes()).hexdigest()
    if id(value) in holders or len(holders) > _MAX_DEPTH:
        return "..."
    describe = functools.partial(_describe, holders=(*holders, id(value)))
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, Mapping):
        return name, tuple(sorted((repr(describe(key)), describe(entry)) for key, entry in value.items()))
    if isinstance(value, list | tuple):
        return name, tuple(describe(entry) for entry in value)
    if isinstance(value, set | frozenset):
        return name, tuple(sorted(repr(describe(entry)) for entry in value))
    if isinstance(value, nn.Module):
        names = vars(value).keys() - _OF_TORCH
        attributes = {key: vars(value)[key] for key in names} | {"modules": value._modules}
        return name, hash_tensors(value.state_dict()), describe(attributes)
    return name, tuple(describe(part) for part in _parts_of(value))


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
