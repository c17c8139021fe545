"""Chooses the layers that a client of HeurpFedLA keeps, and takes them out of the mixture (Ma et al., CVPR 2022, eq. 12)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def retained_layer_mask(weights: Tensor, client_positions: Sequence[int], k: int) -> Tensor:
    """Returns a mask (clients, layers) of the k layers of largest mixing weight (eq. 12).

    Of layers with equal weights, the earlier ones are retained.
    """
    own_weights = weights[torch.arange(len(client_positions)), :, torch.tensor(list(client_positions))]
    largest = own_weights.argsort(dim=1, descending=True, stable=True)[:, :k]
    return torch.zeros(own_weights.shape, dtype=torch.bool).scatter_(1, largest, True)


def set_own_weight_in_retained_layers(
    weights: Tensor, client_positions: Sequence[int], retained_mask: Tensor
) -> Tensor:
    """Returns the weights of θ̄_i, with 1 for the client's model and 0 for others in retained layers."""
    own_only = torch.nn.functional.one_hot(torch.tensor(list(client_positions)), weights.shape[2]).to(weights.dtype)
    return torch.where(retained_mask[:, :, None], own_only[:, None, :], weights)


def leave_out_retained_layers(
    model: Mapping[str, Tensor], layers: Mapping[str, Sequence[str]], retained_row: Sequence[bool]
) -> dict[str, Tensor]:
    """Returns the tensors of the layers that a client does not retain: what the server sends it.

    Args:
        model: all tensors by name.
        layers: layer -> names of its tensors.
        retained_row: for each layer, whether the client retains it.
    """
    sent_layers = (names for names, is_retained in zip(layers.values(), retained_row, strict=True) if not is_retained)
    return {name: model[name] for names in sent_layers for name in names}
