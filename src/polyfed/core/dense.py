"""One order of numbers in memory for all that travels and is kept.

A transposed tensor and its copy in row-major order hold the same numbers, but what is computed from them may be rounded
otherwise: matrix products take another path. A message that went through another process, or a state that was read from a
checkpoint, is in row-major order. So it is everywhere.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from polyfed.core.algorithm import Message
from polyfed.core.tree import Nested, Tree, tensors_of


def dense(nested: Nested) -> Nested:
    """The same dicts, lists and scalars with each tensor in row-major order; the same object where all are.

    >>> import torch
    >>> dense({"w": torch.ones(2, 3).T})["w"].stride()
    (2, 1)
    """
    if all(tensor.is_contiguous() for tensor in tensors_of(nested)):
        return nested
    if isinstance(nested, Tensor):
        return nested.contiguous()
    if isinstance(nested, Mapping):
        return {key: dense(item) for key, item in nested.items()}
    return [dense(item) for item in nested]


def dense_message(message: Message) -> Message:
    """A message as it arrives: each tensor in row-major order; the same object where all are.

    >>> import torch
    >>> dense_message(Message({"model": {"w": torch.ones(2, 3).T}})).tensors["model"]["w"].stride()
    (2, 1)
    """
    tensors: Mapping[str, Tree] = dense(message.tensors)
    return message if tensors is message.tensors else replace(message, tensors=tensors)
