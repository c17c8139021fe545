"""Chooses the memory format of images: channels-last for networks that support it, because they train faster in it."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from polyfed.core.examples.pytree import call_network, first_leaf, logits_or_output, named_leaves, tree_map
from polyfed.core.nn.deep_copy import deep_copy
from polyfed.core.seeds import temporary_rng_seed

_USES_CHANNELS_LAST: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_ONEDNN_BLOCK = 16
"""Channels that oneDNN's kernels take at once: 16 with AVX-512, 8 with AVX2."""


def to_preferred_memory_format(module: nn.Module, inputs: Any) -> Any:
    """Returns a batch of inputs in the memory format (channels-last or not) in which the network computes faster.

    At the first batch of a module with 2-d convolutions the format is tried out, and the module is converted to it. Networks
    that reshape by `x.view` after a convolution cannot take channels-last activations; they keep the default. So do, except
    with CUDA, networks with a 1×1 convolution of stride 2 or more and fewer than 16 input channels: in channels-last oneDNN
    computes its gradient outside of its memory (oneDNN, issue 6035), which crashes, or gives wrong gradients.

    Args:
        module: the network; its weights keep their values.
        inputs: inputs of any structure; only parts of shape (batch, channels, height, width) are rearranged.


    >>> strict = nn.Conv2d(3, 4, 3)
    >>> to_preferred_memory_format(strict, torch.zeros(2, 3, 8, 8)).is_contiguous(memory_format=torch.channels_last)
    True
    """
    if not (
        inputs.dim() == 4 if isinstance(inputs, Tensor) else any(part.dim() == 4 for _, part in named_leaves(inputs))
    ):
        return inputs
    if module not in _USES_CHANNELS_LAST:
        unsafe = first_leaf(inputs).device.type != "cuda" and any(
            _gradient_overflows(part) for part in module.modules()
        )
        _USES_CHANNELS_LAST[module] = not unsafe and _takes_channels_last(module, inputs)
        if _USES_CHANNELS_LAST[module]:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return tree_map(_channels_last, inputs) if _USES_CHANNELS_LAST[module] else inputs


def _channels_last(part: Tensor) -> Tensor:
    return part.contiguous(memory_format=torch.channels_last) if part.dim() == 4 else part


def _gradient_overflows(part: nn.Module) -> bool:
    """Returns whether oneDNN would write outside its memory for this layer's weight gradient in channels-last."""
    return (
        isinstance(part, nn.Conv2d)
        and set(part.kernel_size) == {1}
        and max(part.stride) > 1
        and part.in_channels // part.groups < _ONEDNN_BLOCK
    )


def _takes_channels_last(module: nn.Module, x: Any) -> bool:
    """Returns whether a forward and backward pass on two examples works in channels-last."""
    if not any(isinstance(part, nn.Conv2d) for part in module.modules()):
        return False
    with temporary_rng_seed(0, first_leaf(x).device), torch.enable_grad():
        try:
            trial = deep_copy(module).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
            output = logits_or_output(call_network(trial, tree_map(lambda part: _channels_last(part[:2]), x)))
            if isinstance(output, Tensor) and output.requires_grad:
                torch.autograd.backward(output.float().sum())
        except Exception:  # an error that the default format has too is reported when the network is used
            return False
    return True
