"""Enables gradients even inside the caller's `torch.no_grad` or `torch.inference_mode`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def grad_enabled() -> Iterator[None]:
    """Enables gradients inside the `with` block, even within `no_grad` or `inference_mode`.

    Tensors created in the block can be trained later. After it the caller's mode holds again. Do not yield from a generator
    inside the block: the mode would reach the caller.


    >>> with torch.inference_mode(), grad_enabled():
    ...     weight = torch.zeros(2, requires_grad=True)
    ...     weight.sum().backward()
    >>> weight.grad, weight.is_inference()
    (tensor([1., 1.]), False)
    """
    with torch.inference_mode(False), torch.enable_grad():
        yield
