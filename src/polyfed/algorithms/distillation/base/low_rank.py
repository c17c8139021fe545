"""Compresses weight updates by singular value decomposition: each matrix becomes a product of two thin ones (FedKD)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from polyfed.core.state_dict import StateDict, StateDictSpec, state_dict_spec

_LEFT, _RIGHT = ":left", ":right"


def compress_update(update: StateDict, kept_energy: float) -> dict[str, Tensor]:
    """Compresses each matrix of a weight update to the product of two thin matrices, by singular value decomposition.

    A P×Q matrix becomes U·Σ, (P, K), and V, (K, Q), by its K largest singular values.

    K is the least number whose singular values have more than the share `kept_energy` of the sum of squares. A
    convolution's kernel is a matrix with one row per output channel. A matrix stays whole if its factors would not be
    smaller.

    >>> u = compress_update({"w": torch.outer(torch.arange(4.0), torch.ones(5)), "b": torch.ones(3)}, 0.95)
    >>> {name: tuple(tensor.shape) for name, tensor in u.items()}
    {'w:left': (4, 1), 'w:right': (1, 5), 'b': (3,)}
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in update.items():
        flat = tensor.reshape(len(tensor), -1) if tensor.dim() > 1 else tensor
        if tensor.dim() < 2 or not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            tensors[name] = tensor
            continue
        u, s, v = torch.linalg.svd(flat.double(), full_matrices=False)
        energy_by_rank = s.square().cumsum(0) / s.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
        k = min(int((energy_by_rank <= kept_energy).sum()) + 1, len(s))
        if k * sum(flat.shape) >= flat.numel():
            tensors[name] = tensor
        else:
            tensors |= {name + _LEFT: (u[:, :k] * s[:k]).to(tensor.dtype), name + _RIGHT: v[:k].to(tensor.dtype)}
    return tensors


def expand_update(factors: StateDict, like: StateDict) -> dict[str, Tensor]:
    """Rebuilds a weight update of `compress_update`, with names and shapes of `like`.

    >>> w = torch.outer(torch.arange(4.0), torch.ones(5))
    >>> torch.allclose(expand_update(compress_update({"w": w}, 0.95), {"w": w})["w"], w, atol=1e-6)
    True
    """
    return {
        name: factors[name]
        if name in factors
        else (factors[name + _LEFT] @ factors[name + _RIGHT]).reshape(tensor.shape)
        for name, tensor in like.items()
    }


def compressed_update_spec(tensors: StateDict, like: StateDict) -> StateDictSpec:
    """Returns shapes and dtypes of a compressed update: tensors whole, or as two factors.

    Raises:
        ValueError: two factors do not fit each other.
    """
    specs: dict[str, tuple[tuple[int | None, ...], torch.dtype]] = {}
    for name, (shape, dtype) in state_dict_spec(like).items():
        left_factor, right_factor = tensors.get(name + _LEFT), tensors.get(name + _RIGHT)
        if left_factor is None or len(shape) < 2:
            specs[name] = (shape, dtype)
            continue
        rank = left_factor.shape[1] if left_factor.dim() == 2 else 0
        if right_factor is None or right_factor.dim() != 2 or not 1 <= rank == right_factor.shape[0]:
            raise ValueError(f"the factors of {name!r} do not fit each other")
        specs[name + _LEFT] = ((shape[0], rank), dtype)
        specs[name + _RIGHT] = ((rank, like[name].numel() // max(shape[0] or 1, 1)), dtype)
    return specs


def subtract_state(new_state: StateDict, old_state: StateDict) -> dict[str, Tensor]:
    """Returns each tensor's change from old to new; for booleans, which entries differ.

    >>> subtract_state({"seen": torch.tensor([True, False])}, {"seen": torch.tensor([False, False])})
    {'seen': tensor([ True, False])}
    """
    return {n: t ^ old_state[n] if t.dtype == torch.bool else t - old_state[n] for n, t in new_state.items()}


def apply_update(model: StateDict, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns new weights: those of the model plus an update, which may be compressed or not."""
    change = expand_update(update, model)
    return {n: t ^ change[n] if t.dtype == torch.bool else t + change[n] for n, t in model.items()}
