"""Chooses the layers that a client of HeurpFedLA keeps, and takes them out of the mixture (Ma et al., CVPR 2022, eq. 12)."""

from collections.abc import Sequence

import torch
from torch import Tensor


def retained_layer_mask(weights: Tensor, client_positions: Sequence[int], k: int) -> Tensor:
    """Returns for each client a mask of the layers that it retains, bool (clients, layers): the k layers in which its
    model has the largest mixing weights (eq. 12).

    Of layers with equal weights, the earlier ones are retained.
    """
    own_weights = weights[torch.arange(len(client_positions)), :, torch.tensor(list(client_positions))]
    largest = own_weights.argsort(dim=1, descending=True, stable=True)[:, :k]
    return torch.zeros(own_weights.shape, dtype=torch.bool).scatter_(1, largest, True)


def set_own_weight_in_retained_layers(
    weights: Tensor, client_positions: Sequence[int], retained_mask: Tensor
) -> Tensor:
    """Returns the weights with which θ̄_i is computed: the mixing weights, but in the layers that a client retains 1 for
    the client's model and 0 for all others."""
    own_only = torch.nn.functional.one_hot(torch.tensor(list(client_positions)), weights.shape[2]).to(weights.dtype)
    return torch.where(retained_mask[:, :, None], own_only[:, None, :], weights)
