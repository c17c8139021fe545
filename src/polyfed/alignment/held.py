"""The term η·d of a client's loss as FedHeNN's algorithms 1 and 2 print it: computed once a local epoch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from polyfed.alignment.representations import at_once
from polyfed.alignment.term import Alignment
from polyfed.core.gathered import OfClient
from polyfed.core.stacked import per_client


@final
@dataclass(frozen=True)
class OncePerEpoch:
    """Holds the gradient g of a term, taken at the first step of each local epoch, for all steps of that epoch.

    It is called at every step, with the network and with the client's tensors: those of `term`, how many steps there were,
    and g by parameter, which it changes; or with a stack of networks and as many of each tensor. It returns ⟨g, θ⟩, whose
    gradient is g.

    Attributes: `term`, which is computed; `steps`, of an epoch; `names`, of the trained parameters.
    """

    term: Alignment
    steps: int
    names: tuple[str, ...]

    def __call__(self, network: nn.Module, tensors: Sequence[Tensor]) -> Tensor:
        """Shape () of one network, (k,) of a stack, whose networks have made equally many steps."""
        rows, past, *held = tensors
        by_name = dict(network.named_parameters())
        parameters = [by_name[name] for name in self.names]
        if int(past.flatten()[0]) % self.steps == 0:
            value = self.term(network, [rows])
            if value.requires_grad:
                slopes = torch.autograd.grad(value.sum(), parameters, allow_unused=True)
                for kept, new in zip(held, slopes, strict=True):
                    kept.zero_() if new is None else kept.copy_(new)
        past += 1
        products = [per_client(network, theta * kept) for theta, kept in zip(parameters, held, strict=True)]
        return sum(products[1:], products[0])

    @classmethod
    def of_client(cls, term: Alignment, network: nn.Module, steps: int, seed: int) -> OfClient:
        """Makes the term of the client with this network, whose epochs have so many steps."""
        trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        held = [torch.zeros_like(p, requires_grad=False) for p in trained.values()]
        tensors = [*term.of_client(seed).tensors, torch.zeros((), dtype=torch.int64), *held]
        return OfClient(cls(term, steps, tuple(trained)), tensors, network=True, rows=at_once(term.number))
