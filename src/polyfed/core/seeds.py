"""Derives the seed of each random number from the seed of the run, the round, the client's id and the purpose.

Nothing else in polyfed seeds a generator, and no derived seed depends on the order in which clients run. So a result is the
same on every engine and with any number of workers.
"""

import hashlib
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import numpy as np
import torch
from torch import Tensor


def derive_seed(seed: int, *parts: int | str) -> int:
    """Returns a 63-bit seed computed from a seed and parts, such as the round and the client's id.

    The type and the order of the parts count; NumPy's numbers and strings give the seeds that Python's give.


    >>> derive_seed(0, 3, "north", "local") == derive_seed(0, 3, "north", "local")
    True
    >>> derive_seed(0, "a", "bc") == derive_seed(0, "ab", "c")
    False
    """
    text = repr(tuple(map(_plain_part, (seed, *parts)))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def _plain_part(part: int | str) -> int | str:
    if isinstance(part, str):
        return str.__str__(part)
    return part if isinstance(part, int) else operator.index(part)


def torch_generator(seed: int) -> torch.Generator:
    """Builds a torch random number generator on the CPU, seeded with `seed`."""
    return torch.Generator().manual_seed(seed)


def numpy_generator(seed: int) -> np.random.Generator:
    """Builds a NumPy random number generator, seeded with `seed`."""
    return np.random.default_rng(seed)


@contextmanager
def temporary_rng_seed(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seeds torch's default generator inside the `with` block, and restores its state afterwards.

    That generator draws dropout and initial weights.


    >>> before = torch.random.get_rng_state()
    >>> with temporary_rng_seed(1): _ = torch.rand(2)
    >>> bool((torch.random.get_rng_state() == before).all())
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if device is None or device.type == "cpu":
            yield
            return
        before = get_rng_state(device)
        _seed_device(device, seed)
        try:
            yield
        finally:
            set_rng_state(device, before)


def get_rng_state(device: torch.device) -> Tensor:
    """Returns the state of torch's default random number generator on `device`."""
    if device.type == "cpu":
        return torch.random.get_rng_state()
    module = torch.get_device_module(device.type)
    state: Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


def set_rng_state(device: torch.device, state: Tensor) -> None:
    """Sets torch's default random number generator on `device` to a state from `get_rng_state`."""
    if device.type == "cpu":
        torch.random.set_rng_state(state)
    elif device.type == "mps":
        torch.mps.set_rng_state(state)
    else:
        torch.get_device_module(device.type).set_rng_state(state, device)


def _seed_device(device: torch.device, seed: int) -> None:
    if device.type == "cuda":  # torch's module-level function would seed the current device only
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.get_device_module(device.type).manual_seed(seed)


@final
class DropoutMaskGenerator:
    """Draws a client's dropout masks in a cohort, the same as if it were trained by itself.

    >>> chance, with_scale = DropoutMaskGenerator(3, torch.device("cpu")), torch.nn.Dropout(0.5)
    >>> with temporary_rng_seed(3): alone = with_scale(torch.ones(9))
    >>> torch.equal(chance.dropout_mask(torch.empty(9), 0.5), alone)
    True
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device, self._generator = device, torch_generator(seed)
        if device.type != "cpu":  # a CPU generator does not work there, and dropout may draw in another way
            with temporary_rng_seed(seed, device):
                self._state = get_rng_state(device)

    def dropout_mask(self, like: Tensor, p: float) -> Tensor:
        """Returns a random mask of the shape and type of `like`: each entry is 0 with probability `p`, else 1/(1 − p)."""
        if self._device.type == "cpu":
            return torch.empty_like(like).bernoulli_(1 - p, generator=self._generator).div_(1 - p)
        before = get_rng_state(self._device)
        set_rng_state(self._device, self._state)
        try:
            return torch.nn.functional.dropout(torch.ones_like(like), p)
        finally:
            self._state = get_rng_state(self._device)
            set_rng_state(self._device, before)

    @property
    def state(self) -> Tensor:
        """Returns the state of the random number generator; assigning an earlier state continues the draws from there."""
        return self._generator.get_state() if self._device.type == "cpu" else self._state

    @state.setter
    def state(self, state: Tensor) -> None:
        if self._device.type == "cpu":
            self._generator.set_state(state)
        else:
            self._state = state
