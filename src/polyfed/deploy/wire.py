"""What travels between server and sites: a head of plain values, and a message."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import safetensors.torch
import torch

from polyfed.algorithm import Message
from polyfed.errors import UserError
from polyfed.tree import Tree

CONSENT = frozenset({"weights", "architecture"})  # of `Algorithm.discloses`, what server and sites must both allow
PROTOCOL = 2  # changes when a site and a server of different versions could misunderstand one another


@final
@dataclass(frozen=True)
class Letter:
    """One message in either direction: `head` (for JSON) says what it is about, `body` is what the method sends.

    Heads from the server have `kind` "introduce" or "task", `protocol`, `run` (an identifier of the run, the same after it
    was resumed) and `algorithm` (name and fields). To "introduce" they add `architecture`, that of the federation where
    there is one, and `told`, what the server must know: of "architecture", "form". To "task" they add `phase`, `round`,
    `client`, `seed`, `run_seed`, `state` (the round after which the client's private state is as the server knows it, None
    before the first), `keep` (the round to which the server may still go back) and `metrics` (names of those to compute at
    evaluation; none are the task's own).

    Heads from a site have `client`, and `refused`, a sentence, if it does nothing. To "introduce" they add `task` and what
    the server asked for; to "task" `run`, `round`, `phase`, `seconds`, `metrics`, and `failure`, a sentence or None.
    """

    head: Mapping[str, Any]
    body: Message = field(default_factory=Message)


def pack_tree(tree: Tree) -> bytes:
    """A group of tensors as one safetensors file, which carries every type of torch's, with the order of the names.

    >>> list(unpack_tree(pack_tree({"w": torch.ones(2, dtype=torch.bfloat16), "b": torch.zeros(())})))
    ['w', 'b']
    """
    # Copies, since safetensors refuses tensors that share memory.
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tree.items()}
    names = sorted(own)
    place = {name: position for position, name in enumerate(names)}
    order = [place[name] for name in own]
    return bytes(safetensors.torch.save(own, metadata={"order": json.dumps(order, separators=(",", ":"))}))


def unpack_tree(data: bytes) -> dict[str, torch.Tensor]:
    """The group that `pack_tree` wrote.

    Raises:
        UserError: `data` is damaged, or something else.
    """
    try:
        tensors = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        order = json.loads(json.loads(data[8 : 8 + length]).get("__metadata__", {}).get("order", "null"))
        names = sorted(tensors)
        if sorted(order) != list(range(len(names))):
            raise ValueError("the order of its tensors does not fit")
    except (ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError) as error:
        raise UserError(f"a group of tensors of {len(data)} bytes cannot be read: {error}") from error
    return {names[position]: tensors[names[position]] for position in order}


def plain_head(text: str) -> dict[str, Any]:
    """A head from its JSON.

    Raises:
        UserError: it is no mapping.

    >>> plain_head('{"kind": "task"}')
    {'kind': 'task'}
    """
    try:
        head = json.loads(text)
    except ValueError as error:
        raise UserError(f"the head of a message is not JSON: {error}") from error
    if not isinstance(head, dict):
        raise UserError(f"the head of a message must be a mapping, got {type(head).__name__}")
    return head
