"""Makes of a reply to an earlier version of the server state a reply to the newest version."""

from collections.abc import Collection

import torch
from torch import Tensor

from polyfed.core.algorithm import Message

_BUFFER_SUFFIXES = ("running_mean", "running_var", "num_batches_tracked")


def rebase_update(
    reply: Message, start: Message, newest: Message, scale: float, buffer_names: Collection[str] = ()
) -> Message:
    """Returns a reply to `newest` that has the scaled change of a reply to `start`.

    A weight of the result is newest + scale·(reply − start). BatchNorm's statistics and other buffers are mixed instead,
    (1 − scale)·newest + scale·reply with a scale of at most 1, since adding changes could make a variance negative. Where
    nothing is stale or scaled, tensors are returned as they are, bit for bit.

    Args:
        reply: of the client.
        start: the message that the client had received.
        newest: the message that it would receive now.
        scale: how much the change counts.
        buffer_names: names of tensors that are buffers of the network.

    Raises:
        ValueError: a tensor of the reply is in no message, so that it has no change; the message is half a sentence.

    >>> w = lambda value: Message({"model": {"w": torch.tensor([value])}})
    >>> rebase_update(w(3.0), w(1.0), w(10.0), 0.5).tensors["model"]["w"]
    tensor([11.])
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    for group, state_dict in reply.tensors.items():
        tensors[group] = {}
        for name, tensor in state_dict.items():
            before, base = (_find_tensor(message, group, name, tensor) for message in (start, newest))
            if before is None or base is None:
                raise ValueError(
                    f"tensor {name!r} of group {group!r} was not in the server's message, so that its change is not known"
                )
            if not tensor.is_floating_point() or name in buffer_names or name.endswith(_BUFFER_SUFFIXES):
                tensors[group][name] = _mix_tensors(base, tensor, min(1.0, scale))
            elif scale == 1 and torch.equal(before, base):
                tensors[group][name] = tensor
            else:
                change = tensor.to(torch.float64) - before.to(torch.float64)
                tensors[group][name] = (base.to(torch.float64) + scale * change).to(tensor.dtype)
    return Message(tensors, reply.scalars)


def mix_model(reply: Message, newest: Message, share: float) -> Message:
    """Returns (1 − share)·newest + share·reply, tensor by tensor; the reply itself for a share of 1.

    Raises:
        ValueError: a tensor of the reply is not in `newest`; the message is half a sentence.

    >>> w = lambda value: Message({"model": {"w": torch.tensor([value])}})
    >>> mix_model(w(3.0), w(1.0), 0.25).tensors["model"]["w"]
    tensor([1.5000])
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    for group, state_dict in reply.tensors.items():
        tensors[group] = {}
        for name, tensor in state_dict.items():
            base = _find_tensor(newest, group, name, tensor)
            if base is None:
                raise ValueError(f"tensor {name!r} of group {group!r} is not in the server's message")
            tensors[group][name] = _mix_tensors(base, tensor, share)
    return Message(tensors, reply.scalars)


def _mix_tensors(base: Tensor, tensor: Tensor, share: float) -> Tensor:
    if share == 1:
        return tensor
    mixed = (1.0 - share) * base.to(torch.float64) + share * tensor.to(torch.float64)
    return (mixed if tensor.is_floating_point() else mixed.round()).to(tensor.dtype)


def _find_tensor(message: Message, group: str, name: str, like: Tensor) -> Tensor | None:
    """Returns the tensor of a message that a reply's tensor has changed; None if there is none.

    It has the same name, in the same group or another: FedRep first sends the whole network, and gets the body.
    """
    groups = [message.tensors.get(group, {}), *message.tensors.values()]
    candidates = (tensors[name] for tensors in groups if name in tensors)
    return next((tensor for tensor in candidates if tensor.shape == like.shape and tensor.dtype == like.dtype), None)
