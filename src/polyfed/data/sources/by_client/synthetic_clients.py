"""Makes the clients of a synthetic federation from their ids, for measurements of scale."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from polyfed.core.algorithm import Architecture, Client
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.seeds import derive_seed, numpy_generator, torch_generator
from polyfed.data.sources.client_source import SourceManifest

_PREFIX = "client-"


@final
@dataclass(frozen=True, eq=False)
class SyntheticClients:
    """Makes `n` clients with synthetic examples: class centres that all clients share, a shift of each client's own, and
    noise.

    A client is made from the seed and its id alone, so that a million clients need no memory until they are drawn.

    Args:
        n: number of clients.
        shape: of an input: (features,), or (channels, height, width) of images.
        classes: number of classes; a client has all of them if it has as many examples.
        examples: smallest and largest number of training examples of a client; drawn from the seed.
        test_examples: of each client.
        shift: standard deviation of a client's own shift; 0 makes all clients alike.
        noise: standard deviation of the noise of each number; centres have a standard deviation of 1.
        model: builds the network of every client; None for a linear layer. For several networks a list, assigned to the
            clients in turn. Methods that bring their own network ignore it.
        seed: of all draws.

    Raises:
        UserError: a number outside its range.

    >>> source = SyntheticClients(1_000_000, examples=(20, 20))
    >>> source.ids[41], len(source.client("client-0000041").train)
    ('client-0000041', 20)
    """

    n: int
    shape: tuple[int, ...] = (16,)
    classes: int = 4
    examples: tuple[int, int] = (16, 64)
    test_examples: int = 16
    shift: float = 0.5
    noise: float = 1.0
    model: Architecture | Sequence[Architecture] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        least, most = self.examples
        if self.n < 1 or self.classes < 2 or not 1 <= least <= most or self.test_examples < 1 or not self.shape:
            raise UserError(
                "a synthetic source needs n, test_examples >= 1, classes >= 2, a shape and 1 <= examples[0] <= "
                f"examples[1], got n={self.n}, test_examples={self.test_examples}, classes={self.classes}, "
                f"shape={self.shape}, examples={self.examples}"
            )

    @cached_property
    def ids(self) -> Sequence[str]:
        """Returns the ids of all clients: "client-0000000" and so on."""
        digits = max(7, len(str(self.n - 1)))
        return [f"{_PREFIX}{place:0{digits}}" for place in range(self.n)]

    @cached_property
    def _models(self) -> tuple[Architecture, ...]:
        if self.model is None:
            return (partial(_build_linear, int(np.prod(self.shape)), self.classes),)
        return (self.model,) if callable(self.model) else tuple(self.model)

    @cached_property
    def _sizes(self) -> NDArray[np.int64]:
        least, most = self.examples
        return numpy_generator(derive_seed(self.seed, "sizes")).integers(least, most + 1, self.n)

    @cached_property
    def _centres(self) -> torch.Tensor:
        return torch.randn((self.classes, *self.shape), generator=torch_generator(derive_seed(self.seed, "centres")))

    def manifest(self) -> SourceManifest:
        """Returns the numbers of training examples and the networks of all clients."""
        several = len(self._models) > 1
        model_of = np.arange(self.n) % len(self._models) if several else None
        facts = (self.n, self.shape, self.classes, self.examples, self.test_examples, self.shift, self.noise, self.seed)
        return SourceManifest(self._sizes, self._models, model_of, f"synthetic {facts}")

    def client(self, id: str) -> Client:
        """Makes the client with this id; raises a `KeyError` for an unknown one."""
        place = int(id.removeprefix(_PREFIX)) if id.removeprefix(_PREFIX).isdecimal() else self.n
        if place >= self.n or self.ids[place] != id:
            raise KeyError(id)
        generator = torch_generator(derive_seed(self.seed, id))
        total = int(self._sizes[place]) + self.test_examples
        y = torch.arange(total) % self.classes
        y = y[torch.randperm(total, generator=generator)]
        offset = self.shift * torch.randn(self.shape, generator=generator)
        x = self._centres[y] + offset + self.noise * torch.randn((total, *self.shape), generator=generator)
        train, test = (
            Examples(x[rows], y[rows]) for rows in (slice(self.test_examples, None), slice(self.test_examples))
        )
        return Client(id, self._models[place % len(self._models)], train, test)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields alone, so that the source is small when it is sent to another process."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def _build_linear(features: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes))
