"""Computes the alignment term η·d that FedHeNN adds to a client's loss (eq. 5, 6), for one network or a stack of
networks."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyfed.alignment.alignment_target import AlignmentTarget, Distance, mean_rbf_kernel
from polyfed.alignment.representations import (
    compute_representations,
    differentiable_representations,
    representation_batch_size,
)
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import named_leaves
from polyfed.core.nn.deep_copy import deep_copy
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.core.vectorized.deferred_calls import PerClientTerm
from polyfed.core.vectorized.stacked_module import StackedNetworks


@final
class NetworkKernelTarget:
    """Describes one network's kernel matrix on the public examples as a target, computed when first needed.

    Clients that share the target and are trained together compute it once.

    Args:
        network: the network, which is copied.
        sigma: None for a linear kernel; otherwise the RBF kernel's width, see `rbf_kernel`.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    >>> examples = Examples(torch.randn(5, 4), torch.zeros(5))
    >>> NetworkKernelTarget(net).compute_target(examples, torch.arange(5), "1").matrix.shape
    torch.Size([5, 8])
    """

    def __init__(self, network: nn.Module, sigma: float | None = None) -> None:
        self._network, self._sigma = deep_copy(network), sigma

    def compute_target(self, pool: Examples, rows: Tensor, module: str) -> AlignmentTarget:
        """Returns the network's kernel matrix on the public examples at `rows`, as an `AlignmentTarget`."""
        a = compute_representations(self._network, pool.select(rows), module=module, batch_statistics=True)
        if self._sigma is None:
            return AlignmentTarget(a)
        return AlignmentTarget(mean_rbf_kernel([a], [1.0], self._sigma), self._sigma)

    def has_same_kernel_given_same_architecture(self, other_target: "NetworkKernelTarget | AlignmentTarget") -> bool:
        """Returns whether a target of a network of the same architecture has the same kernel matrix."""
        if not isinstance(other_target, NetworkKernelTarget) or self._sigma != other_target._sigma:
            return False
        weights, other_weights = _kernel_weights(self._network), _kernel_weights(other_target._network)
        return len(weights) == len(other_weights) and all(
            _tensors_equal(a, b) for a, b in zip(weights, other_weights, strict=True)
        )


def _kernel_weights(network: nn.Module) -> list[Tensor]:
    """Returns the tensors on which a representation depends, without BatchNorm's buffers."""
    unused = {id(buffer) for part in network.modules() if isinstance(part, _BatchNorm) for buffer in part.buffers()}
    return [t for t in (*network.parameters(), *network.buffers()) if id(t) not in unused]


def _tensors_equal(first: Tensor, second: Tensor) -> bool:
    return first is second or (first.dtype == second.dtype and torch.equal(first, second))


@final
@dataclass(frozen=True, eq=False)
class AlignmentTerm:
    """Computes the penalty that keeps a client's kernel near the target, on new public examples at each call.

    It is η·d(K_i, K̄) for the current parameters, on `num_rows` examples. A call takes the network and the state of the
    random generator that draws the client's rows, and advances the state; or a stack of k networks and k states, for k
    terms. Two terms are equal if they compute the same function: clients with equal terms can be trained as one stack.

    Attributes:
        pool: the public examples.
        rows: positions of X in the pool.
        module: name of the module whose input is the representation.
        target: the kernel K̄, or a network that has it.
        distance: d.
        eta: η.
        num_rows: number of rows of X per call.
        method_name: the method's name, with which warnings begin.
    """

    pool: Examples
    rows: Tensor
    module: str
    target: AlignmentTarget | NetworkKernelTarget
    distance: Distance
    eta: float
    num_rows: int
    method_name: str

    def __call__(self, network: nn.Module, states: Sequence[Tensor]) -> Tensor:
        """Returns the penalty of the loss: shape () for one network, (k,) for a stack of k networks."""
        many, (state,) = isinstance(network, StackedNetworks), states
        row_positions = torch.stack([self._draw_rows(mine) for mine in state]) if many else self._draw_rows(state)
        row_positions = row_positions.to(self.rows.device, non_blocking=True)
        a = differentiable_representations(network, self.pool, self.rows[row_positions], self.module)
        a = a if a.dtype == torch.float64 else a.float()
        if not a.requires_grad:
            warnings.warn(
                f"{self.method_name}: nothing before {self.module!r} is trained in a client's network, so that its "
                "representation cannot be aligned; name another module",
                RuntimeWarning,
                stacklevel=2,
            )
        if not many:
            return self.eta * self._distance(a, row_positions)
        if self._resolved_target.sigma is None and self.distance == "cka":
            return self.eta * torch.vmap(self._distance)(a, row_positions)
        # The RBF kernel branches on values and Procrustes has its own backward pass, which vmap cannot take.
        return self.eta * torch.stack([self._distance(*mine) for mine in zip(a, row_positions, strict=True)])

    def _draw_rows(self, state: Tensor) -> Tensor:
        generator = torch.Generator()
        generator.set_state(state.clone())  # torch crashes on a row of a stack
        row_positions = torch.randperm(len(self.rows), generator=generator)[: self.num_rows]
        state.copy_(generator.get_state())
        return row_positions

    def _distance(self, a: Tensor, row_positions: Tensor) -> Tensor:
        target = self._float64_target if a.dtype == torch.float64 else self._resolved_target
        if self.num_rows == len(self.rows):
            # All rows are drawn, so the draw only decides which examples BatchNorm sees together. The client's own
            # representation is put back into the order of X, since copying K̄ in the drawn order would cost more.
            return target.distance(a[row_positions.argsort()])
        return target.distance(a, row_positions)

    @cached_property
    def _resolved_target(self) -> AlignmentTarget:
        target = (
            self.target
            if isinstance(self.target, AlignmentTarget)
            else self.target.compute_target(self.pool, self.rows, self.module)
        )
        return replace(target, matrix=target.matrix.to(self.rows.device), distance_measure=self.distance)

    @cached_property
    def _float64_target(self) -> AlignmentTarget:
        """Returns the alignment target for networks in float64."""
        return replace(self._resolved_target, matrix=self._resolved_target.matrix.double())

    def build_penalty_for_client(self, seed: int) -> PerClientTerm:
        """Returns the penalty for one client, which draws its public examples with this seed."""
        state = torch_generator(derive_seed(seed, "rad")).get_state()
        return PerClientTerm(self, [state], takes_network=True, num_rows=representation_batch_size(self.num_rows))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AlignmentTerm):
            return NotImplemented
        plain = [
            (term.module, term.distance, term.eta, term.num_rows, term.method_name, term.pool.transform)
            for term in (self, other)
        ]
        return plain[0] == plain[1] and self._has_same_examples(other) and self._has_same_target(other)

    __hash__ = None  # type: ignore[assignment]

    def _has_same_examples(self, other_term: "AlignmentTerm") -> bool:
        inputs, other_inputs = dict(named_leaves(self.pool.x)), dict(named_leaves(other_term.pool.x))
        same = inputs.keys() == other_inputs.keys() and all(
            _tensors_equal(part, other_inputs[name]) for name, part in inputs.items()
        )
        return (
            same
            and self.pool.index is None
            and other_term.pool.index is None
            and _tensors_equal(self.rows, other_term.rows)
        )

    def _has_same_target(self, other_term: "AlignmentTerm") -> bool:
        if isinstance(self.target, NetworkKernelTarget):
            return self.target.has_same_kernel_given_same_architecture(other_term.target)
        if isinstance(other_term.target, NetworkKernelTarget):
            return False
        return self.target.sigma == other_term.target.sigma and _tensors_equal(
            self.target.matrix, other_term.target.matrix
        )
