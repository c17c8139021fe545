"""Computes hashes of the values that transforms, augmentations and losses hold, such as the means that one subtracts.

The data fingerprint of a run has the names of functions and classes, and what a dataclass prints. A resumed run compares
these hashes as well, and warns if one has changed.
"""

import functools
import hashlib
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

from polyfed.core.algorithm import Client
from polyfed.core.examples.examples import PartwiseTransform
from polyfed.simulation.checks.requirements import examples_by_split
from polyfed.simulation.checks.value_descriptions import describe_values


def hash_values_by_name(clients: Iterable[Client]) -> dict[str, str]:
    """Returns `{name: hash}` of the values that transforms, augmentations and losses of all clients hold."""
    hashes, descriptions = dict[str, Any](), dict[int, Any]()  # many clients may share an object
    for client in sorted(clients, key=lambda client: client.id):
        for place, thing in _holders_of_values(client):
            is_function = isinstance(thing, FunctionType)
            if not is_function or thing.__closure__ or thing.__defaults__ or thing.__kwdefaults__:
                named = thing.func if isinstance(thing, functools.partial) else thing
                name = getattr(named, "__qualname__", type(named).__qualname__)
                if id(thing) not in descriptions:
                    descriptions[id(thing)] = describe_values(thing)
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
