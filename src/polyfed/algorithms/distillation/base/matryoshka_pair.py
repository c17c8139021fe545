"""Joins a client's network and a small shared one into one network with a common representation, for FedMRL."""

from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from polyfed.core.examples.pytree import call_network_on_copy_if_it_changes_inputs, logits_of
from polyfed.core.nn.module_cache import build_module


@final
class MatryoshkaPair(nn.Module):
    """Runs a client's network and a shared one with one representation h before both last layers.

    Returns the output of the client's network, and stores that of the shared one in `outputs`.

    g is the input of the last linear layer of the shared network, of width d₁, and f that of the client's, of width d₂ ≥
    d₁. The projector P, a linear layer, makes h = P([g, f]) of width d₂. The client's last layer takes h, and the shared
    one the first d₁ numbers of h.

    Args:
        own, shared: the networks.
        form: whole numbers from which `FedMRL.wrap_network` builds the pair again: the places of the last layers among
            the modules of `own` and of `shared`, and others, which the pair keeps.
        seed: of the projector's initial weights.

    >>> pair = MatryoshkaPair(nn.Linear(4, 3), nn.Linear(4, 3), [0, 0], seed=0)
    >>> pair(torch.zeros(2, 4)).shape, pair.outputs.shape, tuple(pair.projector.weight.shape)
    (torch.Size([2, 3]), torch.Size([2, 3]), (4, 8))
    """

    client_network = "own"  # the submodule whose parameter names `lr_by_name` uses
    outputs: Tensor
    form: Tensor

    def __init__(self, personal: nn.Module, shared: nn.Module, form: list[int], *, seed: int) -> None:
        super().__init__()
        self.own, self.shared = personal, shared
        d1, d2 = (last_layer(net, place).in_features for net, place in ((shared, form[1]), (personal, form[0])))
        self.projector = build_module(partial(nn.Linear, d1 + d2, d2), seed)
        self.register_buffer("form", torch.tensor(form))
        self._places = form[:2]

    def forward(self, *args: Any, **named: Any) -> Tensor:
        """Returns the output of the client's network, with h as the input of its last layer."""
        own_last, shared_last = (
            last_layer(network, place) for network, place in zip((self.own, self.shared), self._places, strict=True)
        )
        inputs: list[Tensor] = []  # g, then h

        def keep(_: nn.Module, layer_inputs: tuple[Tensor, ...]) -> None:
            inputs.append(layer_inputs[0])

        def fuse(_: nn.Module, layer_inputs: tuple[Tensor, ...]) -> Tensor:
            fused: Tensor = self.projector(torch.cat([inputs[0], layer_inputs[0]], -1))  # h = P([g, f])
            inputs.append(fused)
            return fused

        for network, layer, hook in ((self.shared, shared_last, keep), (self.own, own_last, fuse)):
            handle = layer.register_forward_pre_hook(hook)
            try:
                own_outputs = logits_of(call_network_on_copy_if_it_changes_inputs(network, named or args))
            finally:
                handle.remove()
        self.outputs = shared_last(inputs[1][..., : shared_last.in_features])
        return own_outputs


def last_layer(network: nn.Module, place: int) -> nn.Linear:
    """Returns the linear layer at a place among the modules of a network, in the order of `modules()`."""
    layer = list(network.modules())[place]
    assert isinstance(layer, nn.Linear)
    return layer
