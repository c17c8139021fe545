"""torch's gradient mode: what polyfed trains, it trains whatever mode the caller is in."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def grad_enabled() -> Iterator[None]:
    """Inside the block gradients are recorded, also where the caller has switched them off (`torch.no_grad`,
    `torch.inference_mode`), and tensors are made that can be trained later; after it, the caller's mode holds again.

    Do not yield from a generator inside the block: the mode would reach the caller.

    >>> with torch.inference_mode(), grad_enabled():
    ...     weight = torch.zeros(2, requires_grad=True)
    ...     weight.sum().backward()
    >>> weight.grad, weight.is_inference()
    (tensor([1., 1.]), False)
    """
    with torch.inference_mode(False), torch.enable_grad():
        yield
