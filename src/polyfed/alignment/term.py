"""The term η·d of a client's loss (FedHeNN, eq. 5, 6), of one network or of many at once."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyfed.alignment.representations import at_once, differentiable, representations
from polyfed.alignment.target import Distance, Target, mean_rbf_kernel
from polyfed.core.copies import deep_copy
from polyfed.core.examples import Examples
from polyfed.core.gathered import OfClient
from polyfed.core.inputs import leaves
from polyfed.core.seeds import derive, torch_generator
from polyfed.core.stacked import Stacked


@final
class OfNetwork:
    """The kernel of one network on the RAD, such as the global model's, as a target: found when it is first needed, so that
    clients whose target it is find it once where they are trained together.

    Args:
        network: it is copied as it is.
        sigma: None for a linear kernel; else the RBF kernel's width, see `rbf_kernel`.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    >>> OfNetwork(net).target(Examples(torch.randn(5, 4), torch.zeros(5)), torch.arange(5), "1").matrix.shape
    torch.Size([5, 8])
    """

    def __init__(self, network: nn.Module, sigma: float | None = None) -> None:
        self._network, self._sigma = deep_copy(network), sigma

    def target(self, pool: Examples, rows: Tensor, module: str) -> Target:
        """Its kernel on these rows of the pool."""
        a = representations(self._network, pool.select(rows), module=module, batch_statistics=True)
        return Target(a) if self._sigma is None else Target(mean_rbf_kernel([a], [1.0], self._sigma), self._sigma)

    def same(self, other: "OfNetwork | Target") -> bool:
        """Whether the other's kernel is the same, for clients with one architecture."""
        if not isinstance(other, OfNetwork) or self._sigma != other._sigma:
            return False
        mine, others = _weights(self._network), _weights(other._network)
        return len(mine) == len(others) and all(_equal(a, b) for a, b in zip(mine, others, strict=True))


def _weights(network: nn.Module) -> list[Tensor]:
    """What a representation hangs on. BatchNorm normalises by the batch, whatever its buffers hold."""
    unused = {id(buffer) for part in network.modules() if isinstance(part, _BatchNorm) for buffer in part.buffers()}
    return [t for t in (*network.parameters(), *network.buffers()) if id(t) not in unused]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.dtype == other.dtype and torch.equal(one, other))


@final
@dataclass(frozen=True, eq=False)
class Alignment:
    """η·d(K_i, K̄) at the present parameters, on `number` rows of X that are drawn at each call.

    It is called with the network, and with the state of the generator that draws the client's rows, which it moves on; or
    with a stack of k networks and k states, for k terms. Two are equal if they are the same function.

    Attributes: `pool`, the public examples; `rows`, those of them that are X; `module`, whose input is the representation;
    `to`, whose kernel K̄ is; `distance`, d; `eta`, η; `number`; `method`, whose name warnings begin with.
    """

    pool: Examples
    rows: Tensor
    module: str
    to: Target | OfNetwork
    distance: Distance
    eta: float
    number: int
    method: str

    def __call__(self, network: nn.Module, states: Sequence[Tensor]) -> Tensor:
        """Shape () of one network, (k,) of a stack."""
        many, (state,) = isinstance(network, Stacked), states
        drawn = torch.stack([self._drawn(mine) for mine in state]) if many else self._drawn(state)
        drawn = drawn.to(self.rows.device, non_blocking=True)
        a = differentiable(network, self.pool, self.rows[drawn], self.module)
        a = a if a.dtype == torch.float64 else a.float()
        if not a.requires_grad:
            warnings.warn(
                f"{self.method}: nothing before {self.module!r} is trained in a client's network, so that its "
                "representation cannot be aligned; name another module",
                RuntimeWarning,
                stacklevel=2,
            )
        if not many:
            return self.eta * self._distance(a, drawn)
        if self._target.sigma is None and self.distance == "cka":
            return self.eta * torch.vmap(self._distance)(a, drawn)
        # The others look at numbers, or have a backward pass by hand.
        return self.eta * torch.stack([self._distance(*mine) for mine in zip(a, drawn, strict=True)])

    def _drawn(self, state: Tensor) -> Tensor:
        generator = torch.Generator()
        generator.set_state(state.clone())  # torch crashes on a row of a stack
        drawn = torch.randperm(len(self.rows), generator=generator)[: self.number]
        state.copy_(generator.get_state())
        return drawn

    def _distance(self, a: Tensor, drawn: Tensor) -> Tensor:
        target = self._exact if a.dtype == torch.float64 else self._target
        if self.number == len(self.rows):
            # Order decides which examples BatchNorm sees together, and nothing else: the client's own representation is
            # put back into the order of X, since K̄ is the larger one to copy.
            return target.distance(a[drawn.argsort()])
        return target.distance(a, drawn)

    @cached_property
    def _target(self) -> Target:
        found = self.to if isinstance(self.to, Target) else self.to.target(self.pool, self.rows, self.module)
        return replace(found, matrix=found.matrix.to(self.rows.device), measure=self.distance)

    @cached_property
    def _exact(self) -> Target:
        """For networks in float64."""
        return replace(self._target, matrix=self._target.matrix.double())

    def of_client(self, seed: int) -> OfClient:
        """The term of the client whose rows are drawn with this seed."""
        state = torch_generator(derive(seed, "rad")).get_state()
        return OfClient(self, [state], network=True, rows=at_once(self.number))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Alignment):
            return NotImplemented
        plain = [
            (term.module, term.distance, term.eta, term.number, term.method, term.pool.transform)
            for term in (self, other)
        ]
        return plain[0] == plain[1] and self._same_examples(other) and self._same_target(other)

    __hash__ = None  # type: ignore[assignment]

    def _same_examples(self, other: "Alignment") -> bool:
        mine, others = dict(leaves(self.pool.x)), dict(leaves(other.pool.x))
        same = mine.keys() == others.keys() and all(_equal(part, others[name]) for name, part in mine.items())
        return same and self.pool.index is None and other.pool.index is None and _equal(self.rows, other.rows)

    def _same_target(self, other: "Alignment") -> bool:
        if isinstance(self.to, OfNetwork):
            return self.to.same(other.to)
        if isinstance(other.to, OfNetwork):
            return False
        return self.to.sigma == other.to.sigma and _equal(self.to.matrix, other.to.matrix)
