"""Computes a layer of many clients' networks at once: each client's examples with that client's weights.

Examples of k clients lie in one batch, (k·rows, ...), client after client, and weights are stacked, (k, ...). Layers
without weights (activations, pooling, reshaping) work on that batch as on any other.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from polyfed.core.vectorized.stacked_lstm import run_stacked_lstm

Weights = Mapping[str, Tensor]  # of one layer, by its own names, each (k, ...)
Layer = Callable[[Any, Weights, Tensor], Any]


class _BatchedLinear(torch.autograd.Function):
    """Computes a linear layer, x·Wᵀ + b, of each client at once, from (k, rows, in) to (k, rows, out).

    Its gradients come in the layout of the weights, which saves a copy of all of them at every step.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        turned = weight.transpose(1, 2)
        return torch.bmm(x, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, turned)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        slope = slopes[0]
        return (
            torch.bmm(slope, weight) if ctx.needs_input_grad[0] else None,
            torch.bmm(slope.transpose(1, 2), x) if ctx.needs_input_grad[1] else None,
            slope.sum(1) if ctx.needs_input_grad[2] else None,
        )


def _compute_linear(part: nn.Linear, weights: Weights, x: Tensor) -> Tensor:
    weight = weights["weight"]
    rows = x.reshape(len(weight), -1, x.shape[-1])
    out: Tensor = _BatchedLinear.apply(rows, weight, weights.get("bias"))  # type: ignore[no-untyped-call]
    return out.reshape(*x.shape[:-1], weight.shape[1])


def _clients_to_channels(x: Tensor, clients: int) -> Tensor:
    """Rearranges a batch from (k·rows, channels, ...) to (rows, k·channels, ...): clients side by side as channels."""
    return x.reshape(clients, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


def _channels_to_clients(x: Tensor, clients: int) -> Tensor:
    """Rearranges a batch from (rows, k·channels, ...) back to (k·rows, channels, ...)."""
    return x.reshape(len(x), clients, -1, *x.shape[2:]).transpose(0, 1).flatten(0, 1)


def _compute_convolution(part: _ConvNd, weights: Weights, x: Tensor) -> Tensor:
    """Computes a convolution of all clients at once, as one convolution in which each client's channels are a group."""
    weight, bias = weights["weight"], weights.get("bias")
    clients = len(weight)
    convolve: Callable[..., Tensor] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[weight.dim() - 3]
    out = convolve(
        _clients_to_channels(x, clients), weight.flatten(0, 1), None if bias is None else bias.flatten(), part.stride,
        part.padding, part.dilation, clients * part.groups,
    )  # fmt: skip
    return _channels_to_clients(out, clients)


def _batch_norm(part: _BatchNorm, weights: Weights, x: Tensor, num_valid_rows: Tensor | None = None) -> Tensor:
    mean, variance = weights.get("running_mean"), weights.get("running_var")
    clients = next(len(tensor) for tensor in weights.values())
    weight, bias = weights.get("weight"), weights.get("bias")
    if part.training and part.track_running_stats and (counter := weights.get("num_batches_tracked")) is not None:
        counter.add_(1)
    keeps = mean is not None and variance is not None and (not part.training or part.track_running_stats)
    by_batch = part.training or mean is None
    if by_batch and num_valid_rows is not None:
        return _batch_norm_of_valid_rows(
            part, weights, x.reshape(clients, -1, *x.shape[1:]), num_valid_rows, keeps
        ).reshape(x.shape)
    out = F.batch_norm(
        _clients_to_channels(x, clients),
        mean.view(-1) if keeps and mean is not None else None,
        variance.view(-1) if keeps and variance is not None else None,
        None if weight is None else weight.flatten(),
        None if bias is None else bias.flatten(),
        by_batch,
        0.0 if part.momentum is None else part.momentum,
        part.eps,
    )
    return _channels_to_clients(out, clients)


def _batch_norm_of_valid_rows(
    part: _BatchNorm, weights: Weights, x: Tensor, num_valid_rows: Tensor, updates_running_statistics: bool
) -> Tensor:
    """Computes BatchNorm of each client by the statistics of the client's first `num_valid_rows` rows.

    Shapes: (k, rows, channels, ...); `num_valid_rows` is (k,).
    """
    each = (len(x), 1, -1, *(1 for _ in x.shape[3:]))  # a number of each client's channel
    over = (1, *range(3, x.dim()))
    counted = torch.arange(x.shape[1], device=x.device) < num_valid_rows.unsqueeze(1)
    mask = counted.view(*counted.shape, *(1 for _ in x.shape[2:])).to(x.dtype)
    number = (num_valid_rows * x[0, 0, 0].numel()).to(x.dtype).unsqueeze(1)
    mean = (x * mask).sum(over) / number
    centred = x - mean.view(each)
    variance = (centred.square() * mask).sum(over) / number
    if updates_running_statistics:
        momentum = 0.0 if part.momentum is None else part.momentum
        with torch.no_grad():
            weights["running_mean"].lerp_(mean, momentum)
            weights["running_var"].lerp_(variance * number / (number - 1), momentum)
    normed = centred * torch.rsqrt(variance + part.eps).view(each)
    weight, bias = weights.get("weight"), weights.get("bias")
    return normed if weight is None or bias is None else normed * weight.view(each) + bias.view(each)


def _apply_scale_and_bias(x: Tensor, weights: Weights, form: tuple[int, ...]) -> Tensor:
    """Computes x·w + b; each client's weights, shape `form`, match the trailing dimensions of x."""
    weight, bias = weights.get("weight"), weights.get("bias")
    if weight is None:
        return x
    clients = len(weight)
    rows = x.reshape(clients, -1, *form) * weight.reshape(clients, 1, *form)
    return (rows if bias is None else rows + bias.reshape(clients, 1, *form)).reshape(x.shape)


def _layer_norm(part: nn.LayerNorm, weights: Weights, x: Tensor) -> Tensor:
    form = tuple(part.normalized_shape)
    return _apply_scale_and_bias(F.layer_norm(x, form, None, None, part.eps), weights, form)


def _group_norm(part: nn.GroupNorm, weights: Weights, x: Tensor) -> Tensor:
    form = (part.num_channels, *(1 for _ in x.shape[2:]))
    normed = F.group_norm(x, part.num_groups, None, None, part.eps)
    weight, bias = weights.get("weight"), weights.get("bias")
    if weight is None or bias is None:
        return normed
    clients = len(weight)
    rows = normed.reshape(clients, -1, *x.shape[1:])
    return (rows * weight.view(clients, 1, *form) + bias.view(clients, 1, *form)).reshape(x.shape)


def _compute_embedding(part: nn.Embedding, weights: Weights, tokens: Tensor) -> Tensor:
    weight = weights["weight"]
    clients, words = weight.shape[:2]
    first = torch.arange(clients, device=tokens.device).view(-1, 1) * words
    vectors = F.embedding((tokens.reshape(clients, -1) + first).view(tokens.shape), weight.flatten(0, 1))
    if part.padding_idx is None:
        return vectors
    return torch.where((tokens == part.padding_idx).unsqueeze(-1), vectors.detach(), vectors)  # padding is not trained


def max_pool_channels_last(part: nn.MaxPool2d, x: Tensor) -> Any:
    """Computes max pooling of tensors whose channels are last in memory.

    Stacked channels are in that layout, for which torch's takes several times as long, more than the convolution before
    it.
    """
    return nn.MaxPool2d.forward(part, x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x)


def _is_plain_lstm(part: nn.LSTM) -> bool:
    return not (part.bidirectional or part.proj_size or (part.dropout and part.num_layers > 1))


def _pads_with_zeros(part: _ConvNd) -> bool:
    return part.padding_mode == "zeros"


def _is_plain_embedding(part: nn.Embedding) -> bool:
    return part.max_norm is None and not part.scale_grad_by_freq and not part.sparse


def _has_fixed_momentum(part: _BatchNorm) -> bool:
    return part.momentum is not None


def _is_always_supported(part: nn.Module) -> bool:
    return True


STACKED_LAYERS: Mapping[type[nn.Module], tuple[Layer, Callable[[Any], bool]]] = {
    nn.Linear: (_compute_linear, _is_always_supported),
    nn.Conv1d: (_compute_convolution, _pads_with_zeros),
    nn.Conv2d: (_compute_convolution, _pads_with_zeros),
    nn.Conv3d: (_compute_convolution, _pads_with_zeros),
    nn.BatchNorm1d: (_batch_norm, _has_fixed_momentum),
    nn.BatchNorm2d: (_batch_norm, _has_fixed_momentum),
    nn.BatchNorm3d: (_batch_norm, _has_fixed_momentum),
    nn.LayerNorm: (_layer_norm, _is_always_supported),
    nn.GroupNorm: (_group_norm, _is_always_supported),
    nn.Embedding: (_compute_embedding, _is_plain_embedding),
    nn.LSTM: (run_stacked_lstm, _is_plain_lstm),
}
"""Layers with weights of which many clients' can work at once, and whether this one can."""

USES_BATCH_STATISTICS = (_batch_norm,)
"""Lists the layers that compute statistics over a client's batch, and so also need its number of real rows."""
