"""Updates in fewer numbers, by singular value decomposition: each matrix as a product of two thin ones (FedKD)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from polyfed.core.tree import Spec, Tree, spec

_LEFT, _RIGHT = ":left", ":right"


def compressed(update: Tree, energy: float) -> dict[str, Tensor]:
    """Each matrix P×Q (a convolution's kernel as one of its output channels) as U·Σ, (P, K), and V, (K, Q), with the least K
    whose singular values have more than this share of all their squares; whole, if that is not fewer numbers.

    >>> u = compressed({"w": torch.outer(torch.arange(4.0), torch.ones(5)), "b": torch.ones(3)}, 0.95)
    >>> {name: tuple(tensor.shape) for name, tensor in u.items()}
    {'w:left': (4, 1), 'w:right': (1, 5), 'b': (3,)}
    """
    found: dict[str, Tensor] = {}
    for name, tensor in update.items():
        flat = tensor.reshape(len(tensor), -1) if tensor.dim() > 1 else tensor
        if tensor.dim() < 2 or not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            found[name] = tensor
            continue
        u, s, v = torch.linalg.svd(flat.double(), full_matrices=False)
        shares = s.square().cumsum(0) / s.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
        k = min(int((shares <= energy).sum()) + 1, len(s))
        if k * sum(flat.shape) >= flat.numel():
            found[name] = tensor
        else:
            found |= {name + _LEFT: (u[:, :k] * s[:k]).to(tensor.dtype), name + _RIGHT: v[:k].to(tensor.dtype)}
    return found


def expanded(tree: Tree, like: Tree) -> dict[str, Tensor]:
    """The update that `compressed` made this of, with the names and shapes of `like`.

    >>> w = torch.outer(torch.arange(4.0), torch.ones(5))
    >>> torch.allclose(expanded(compressed({"w": w}, 0.95), {"w": w})["w"], w, atol=1e-6)
    True
    """
    return {
        name: tree[name] if name in tree else (tree[name + _LEFT] @ tree[name + _RIGHT]).reshape(tensor.shape)
        for name, tensor in like.items()
    }


def spec_of_compressed(tree: Tree, like: Tree) -> Spec:
    """For `Algorithm.reply_spec`: each tensor whole, or as two factors where the reply has them so.

    Raises:
        ValueError: factors that do not fit each other.
    """
    wanted: dict[str, tuple[tuple[int | None, ...], torch.dtype]] = {}
    for name, (shape, dtype) in spec(like).items():
        left, right = tree.get(name + _LEFT), tree.get(name + _RIGHT)
        if left is None or len(shape) < 2:
            wanted[name] = (shape, dtype)
            continue
        rank = left.shape[1] if left.dim() == 2 else 0
        if right is None or right.dim() != 2 or not 1 <= rank == right.shape[0]:
            raise ValueError(f"the factors of {name!r} do not fit each other")
        wanted[name + _LEFT] = ((shape[0], rank), dtype)
        wanted[name + _RIGHT] = ((rank, like[name].numel() // max(shape[0] or 1, 1)), dtype)
    return wanted


def difference(after: Tree, before: Tree) -> dict[str, Tensor]:
    """What has changed, tensor by tensor; of booleans, which are others.

    >>> difference({"seen": torch.tensor([True, False])}, {"seen": torch.tensor([False, False])})
    {'seen': tensor([ True, False])}
    """
    return {n: t ^ before[n] if t.dtype == torch.bool else t - before[n] for n, t in after.items()}


def moved(model: Tree, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model after an update, compressed or not."""
    change = expanded(update, model)
    return {n: t ^ change[n] if t.dtype == torch.bool else t + change[n] for n, t in model.items()}
