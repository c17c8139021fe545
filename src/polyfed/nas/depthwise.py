"""Defines depthwise convolutions whose gradients are fast on a CPU.

oneDNN has fast kernels for the gradient of a depthwise kernel with at most three columns, and for the gradient of the
input without dilation; other gradients take 5 to 30 times as long as the convolution itself. Here they are composed of
fast ones if there are enough pixels to be worth several calls.
"""

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_COLUMNS = 3
_FEW, _FEW_DILATED = 4000, 400  # pixels of a batch up to which torch's own gradients are as fast


@final
class DepthwiseConv2d(nn.Conv2d):
    """Computes a depthwise convolution without bias, with a square kernel of odd size and zero padding.

    The result is that of `nn.Conv2d`, and so are the gradients except for the order in which they are summed.

    >>> DepthwiseConv2d(4, 5, stride=2)(torch.zeros(1, 4, 7, 7)).shape
    torch.Size([1, 4, 4, 4])
    """

    def __init__(self, channels: int, size: int, stride: int = 1, dilation: int = 1) -> None:
        padding = dilation * (size // 2)
        super().__init__(channels, channels, size, stride, padding, dilation, groups=channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the convolved images; their height and width are ⌈height / stride⌉ and ⌈width / stride⌉."""
        stride, dilation = self.stride[0], self.dilation[0]
        if stride > 1 and dilation % stride == 0:  # it reads no pixel that the stride skips: convolve the others alone
            x, stride, dilation = _subsample_pixels(x, stride), 1, dilation // stride
        size, pixels = self.kernel_size[0], x.shape[0] * x.shape[2] * x.shape[3]
        if (dilation == 1 and size <= _COLUMNS) or pixels <= (_FEW if dilation == 1 else _FEW_DILATED):
            return F.conv2d(x, self.weight, None, stride, dilation * (size // 2), dilation, len(self.weight))
        return _Depthwise.apply(x, self.weight, stride, dilation)  # type: ignore[no-untyped-call, no-any-return]


def _subsample_pixels(x: Tensor, step: int) -> Tensor:
    """Returns every `step`-th pixel of images in both directions, in the memory format of `x`."""
    last = x.is_contiguous(memory_format=torch.channels_last)
    return x[:, :, ::step, ::step].contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


@final
class _Depthwise(torch.autograd.Function):
    """Computes a depthwise convolution by torch, and its gradients by operations that can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, dilation: int) -> Tensor:
        """Convolves images x (batch, channels, height, width) with the kernels weight (channels, 1, size, size)."""
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.dilation = stride, dilation
        return F.conv2d(x, weight, None, stride, dilation * (weight.shape[-1] // 2), dilation, len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Returns the gradients of the images and of the kernels; None for one that is not needed."""
        x, weight = ctx.saved_tensors
        image, kernel = x.to(gradient.dtype), weight.to(gradient.dtype)  # under autocast the output has another type
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = _image_gradient(gradient, image, kernel, ctx.stride, ctx.dilation).to(x.dtype)
        if ctx.needs_input_grad[1]:
            to_weight = _kernel_gradient(gradient, image, kernel.shape[-1], ctx.stride, ctx.dilation).to(weight.dtype)
        return to_x, to_weight, None, None


def _image_gradient(gradient: Tensor, x: Tensor, kernel: Tensor, stride: int, dilation: int) -> Tensor:
    padding = dilation * (kernel.shape[-1] // 2)
    if dilation > 1 and stride == 1:  # a convolution with the kernel rotated by 180 degrees
        return F.conv2d(gradient, kernel.flip(2, 3), None, 1, padding, dilation, len(kernel))
    return _torch_gradients(gradient, x, kernel, stride, (padding, padding), dilation)[0]


def _kernel_gradient(gradient: Tensor, x: Tensor, size: int, stride: int, dilation: int) -> Tensor:
    """Computes the gradient of the convolution's kernel, a few columns of the image at a time.

    With dilation d, the d² sets of every d-th pixel are images of their own for a kernel without dilation.
    """
    if dilation > 1 and stride == 1:
        gradient, x, dilation = _stack_subsamples(gradient, dilation), _stack_subsamples(x, dilation), 1
    rows, step = size // 2, _COLUMNS if dilation == 1 and x.device.type == "cpu" else size
    parts = []
    for first in range(0, size, step):
        columns = min(step, size - first)
        kernel = x.new_empty(x.shape[1], 1, size, columns)
        if columns == size:
            padding = dilation * rows
            return _torch_gradients(gradient, x, kernel, stride, (padding, padding), dilation, to_kernel=True)[1]
        strip = _slice_columns(x, first - rows, stride * (gradient.shape[-1] - 1) + columns)
        parts.append(_torch_gradients(gradient, strip, kernel, stride, (rows, 0), to_kernel=True)[1])
    return torch.cat(parts, 3)


def _stack_subsamples(x: Tensor, step: int) -> Tensor:
    """Stacks an image's step² subsamples along the batch.

    From (batch, channels, height, width) to (step² · batch, channels, ⌈height / step⌉, ⌈width / step⌉).

    Missing pixels at the ends are zeros.
    """
    padded = F.pad(x, (0, -x.shape[3] % step, 0, -x.shape[2] % step))
    return torch.cat([padded[:, :, i::step, j::step] for i in range(step) for j in range(step)])


def _slice_columns(x: Tensor, first: int, number: int) -> Tensor:
    """Returns `number` columns of images from column `first` on, with zeros for columns outside the images."""
    left = min(max(-first, 0), number)
    inner = x[..., max(first, 0) : max(first + number, 0)]
    return F.pad(inner, (left, number - left - inner.shape[-1]))


def _torch_gradients(
    gradient: Tensor, x: Tensor, kernel: Tensor, stride: int, padding: tuple[int, int], dilation: int = 1, *,
    to_kernel: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes by torch the gradient of a convolution with respect to its image, or (`to_kernel`) its kernel."""
    gradients = torch.ops.aten.convolution_backward(
        gradient, x, kernel, None, [stride, stride], list(padding), [dilation, dilation], False, [0, 0], len(kernel),
        [not to_kernel, to_kernel, False],
    )  # fmt: skip
    return gradients[0], gradients[1]
