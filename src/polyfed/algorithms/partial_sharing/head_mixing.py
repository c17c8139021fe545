"""Computes the weights with which FedPAC mixes clients' heads, and the statistics of representations that determine
them.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from polyfed.core.algorithm import Message
from polyfed.core.state_dict import StateDict, StateDictSpec

_RIDGE = 1e-9
"""Share of the mean diagonal value that is added to the diagonal, so that the minimum is one point."""


def minimize_quadratic_on_simplex(matrix: Tensor) -> Tensor:
    """Returns the α ≥ 0 with sum 1 that minimise αᵀPα, exactly and in float64.

    α = argmin αᵀPα over α ≥ 0 with Σα = 1.

    At the minimum Pα = μ + λ·1 with μ ≥ 0 and μᵀα = 0. So α is x/Σx for the x ≥ 0 that minimises ½·xᵀPx − 1ᵀx, and with
    P = LLᵀ that is the x ≥ 0 nearest to solving Lᵀx = L⁻¹1.

    Args:
        matrix: P, symmetric and positive semidefinite, (m, m).

    >>> minimize_quadratic_on_simplex(torch.diag(torch.tensor([1.0, 3.0])))
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    from scipy.optimize import nnls  # imported late: it takes time that other methods should not pay

    p = matrix.to(torch.float64).numpy()
    scale = float(np.trace(p)) / len(p) or 1.0
    lower = np.linalg.cholesky(p / scale + _RIDGE * np.eye(len(p)))
    x, _ = nnls(lower.T, np.linalg.solve(lower, np.ones(len(p))))
    return torch.from_numpy(x / x.sum())


def head_mixing_statistics(features: Tensor, labels: Tensor, num_classes: int) -> dict[str, Tensor]:
    """Returns the statistics of representations that weights for mixing heads need.

    They are h_c = p_c·μ_c, (C, d), the mean representation of each class times its share of the examples, and the
    variance V = (1/n)·[Σ_c p_c·E(‖f‖² | c) − Σ_c p_c²·‖μ_c‖²].

    >>> statistics = head_mixing_statistics(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0]), 2)
    >>> statistics["h"].flatten().tolist(), statistics["v"].item()
    ([2.0, 0.0], 0.5)
    """
    f, y = features.to(torch.float64), labels.cpu()
    h = torch.zeros(num_classes, f.shape[1], dtype=torch.float64).index_add_(0, y, f) / len(f)
    v = (f.square().sum() / len(f) - h.square().sum()) / len(f)
    return {"h": h.float(), "v": v.clamp(min=0).float()}


def head_mixing_statistics_spec(reply: Message, classes: StateDictSpec) -> StateDictSpec:
    """Returns shapes and dtypes of head-mixing statistics for a reply's class means.

    Raises:
        ValueError: V is negative.
    """
    v = reply.tensors.get("statistics", {}).get("v")
    if v is not None and not v.is_meta and not bool((v >= 0).all()):
        raise ValueError("its variance V is negative")
    return {"h": classes["sums"], "v": ((), torch.float32)}


def head_mixing_weights(statistics: Mapping[str, StateDict]) -> dict[str, dict[str, float]]:
    """Returns `{client: {client: weight}}` that minimises each mixed head's variance plus bias.

    Returns client id i -> client id j -> α_ij.

    Args:
        statistics: `head_mixing_statistics` by client.

    >>> none = torch.zeros(1, 1)
    >>> alpha = head_mixing_weights({"a": {"h": none, "v": torch.tensor(1.0)}, "b": {"h": none, "v": torch.tensor(3.0)}})
    >>> {i: round(share, 3) for i, share in alpha["b"].items()}
    {'a': 0.75, 'b': 0.25}
    """
    ids = list(statistics)
    h, v = (torch.stack([statistics[i][name] for i in ids]).to(torch.float64) for name in ("h", "v"))
    differences = {i: h_i - h.flatten(1) for i, h_i in zip(ids, h.flatten(1), strict=True)}
    rows = {i: minimize_quadratic_on_simplex(torch.diag(v) + differences[i] @ differences[i].T) for i in ids}
    return {i: dict(zip(ids, row.tolist(), strict=True)) for i, row in rows.items()}
