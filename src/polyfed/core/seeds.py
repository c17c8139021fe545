"""Where every random number comes from: a seed derived from (run seed, round, client id, purpose).

Nothing else in polyfed seeds a generator, and no derived seed depends on the order in which clients run, so that a
result is the same on any engine and with any number of workers.
"""

import hashlib
import operator
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, *parts: int | str) -> int:
    """A 63-bit seed that depends on `seed` and on each of `parts` (their type and order count; numpy's numbers and strings
    are as Python's).

    >>> derive(0, 3, "north", "local") == derive(0, 3, "north", "local")
    True
    >>> derive(0, "a", "bc") == derive(0, "ab", "c")
    False
    """
    text = repr(tuple(map(_plain, (seed, *parts)))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def _plain(part: int | str) -> int | str:
    if isinstance(part, str):
        return str.__str__(part)
    return part if isinstance(part, int) else operator.index(part)


def torch_generator(seed: int) -> torch.Generator:
    """A CPU torch generator that starts at `seed`."""
    return torch.Generator().manual_seed(seed)


def numpy_generator(seed: int) -> np.random.Generator:
    """A numpy generator that starts at `seed`."""
    return np.random.default_rng(seed)


@contextmanager
def local_rng(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Inside the block torch's default generator (dropout, weight initialisation) starts at `seed`; after it, the
    caller's random state is as before.

    >>> before = torch.random.get_rng_state()
    >>> with local_rng(1): _ = torch.rand(2)
    >>> bool((torch.random.get_rng_state() == before).all())
    True
    """
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.default_generators[torch.device(devices[0]).index or 0].manual_seed(seed)
        yield
