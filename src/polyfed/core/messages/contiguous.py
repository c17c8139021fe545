"""Puts the tensors of messages and states in row-major order, so that results do not depend on how they were stored.

A transposed tensor and its copy in row-major order hold the same numbers, but what is computed from them may be rounded
otherwise: matrix products take another path. A message that went through another process, or a state that was read from a
checkpoint, is in row-major order. So it is everywhere.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyfed.core.algorithm import Message
from polyfed.core.serialization import serialize_state
from polyfed.core.state_dict import PyTree, StateDict, iter_tensors


def as_contiguous(state: PyTree) -> PyTree:
    """Returns nested state with every tensor in row-major order; the state itself if they are.

    >>> import torch
    >>> as_contiguous({"w": torch.ones(2, 3).T})["w"].stride()
    (2, 1)
    """
    if all(tensor.is_contiguous() for tensor in iter_tensors(state)):
        return state
    if isinstance(state, Tensor):
        return state.contiguous()
    if isinstance(state, Mapping):
        return {key: as_contiguous(item) for key, item in state.items()}
    return [as_contiguous(item) for item in state]


def contiguous_message(message: Message) -> Message:
    """Returns a message with every tensor in row-major order; the message itself if they are.

    >>> import torch
    >>> contiguous_message(Message({"model": {"w": torch.ones(2, 3).T}})).tensors["model"]["w"].stride()
    (2, 1)
    """
    tensors: Mapping[str, StateDict] = as_contiguous(message.tensors)
    return message if tensors is message.tensors else replace(message, tensors=tensors)


def message_error(reply: Any) -> str | None:
    """Returns why `reply` is not a valid message, as half a sentence; None if it is one.

    A message has tensors in this machine's memory, in groups with names, and a mapping of numbers.

    >>> message_error(Message({"model": {"w": [1.0]}}))
    "group 'model': 'w' is a list, not a tensor"
    """
    if not isinstance(reply, Message):
        return f"the reply is a {type(reply).__name__}, not a Message"
    value: Any  # nothing keeps a method to the types that are declared
    for description, value in (("tensors", reply.tensors), ("scalars", reply.scalars)):
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            return f"its {description} are a {type(value).__name__}, not a mapping from names"
    for group, value in reply.tensors.items():
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            return f"group {group!r} is a {type(value).__name__}, not a mapping from names to tensors"
        for name, tensor in value.items():
            if not isinstance(tensor, Tensor):
                return f"group {group!r}: {name!r} is a {type(tensor).__name__}, not a tensor"
            if tensor.requires_grad:
                return f"group {group!r}: tensor {name!r} requires gradients; send it detached"
            strange = tensor.layout != torch.strided or tensor.device.type != "cpu"
            if strange or tensor.is_quantized or tensor.is_complex():
                description = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
                return f"group {group!r}: tensor {name!r} is not made of plain numbers in memory, but {description}"
    return None


def path_of_first_difference(before: PyTree, after: PyTree, path: str = "") -> str | None:
    """Returns the path to the first difference between two nested states; None if the states are equal.

    Tensors are compared bit for bit, scalars and lists by value.
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        if before.keys() != after.keys():
            return path
        parts = [(before[key], after[key], f"{path}/{key}") for key in before]
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple):
        if len(before) != len(after):
            return path
        parts = [(a, b, f"{path}/{k}") for k, (a, b) in enumerate(zip(before, after, strict=True))]
    else:  # as bytes, in which NaN equals NaN, 0.0 is not -0.0 and 1 is not 1.0
        return None if serialize_state([before]) == serialize_state([after]) else path
    return next((difference for part in parts if (difference := path_of_first_difference(*part)) is not None), None)
