"""Compresses the tensors of a message with a compressor from `polyfed.core.messages.compressors`, and restores them.

A reply is compressed against the message that it answers. A tensor has a counterpart there if group, name, shape and type
are the same: then its change travels, otherwise the tensor itself. Messages to clients have no counterparts: the server does
not know what a client has kept.

A compressed message is a `Message` too, so its `nbytes` are those that travel. Each tensor of a group has one entry. What
stands after the last colon of its name says how it travels:

- `w:`: as it is.
- `w:float32`: whole numbers from -127 to 127 (int8, in the shape of w), to be multiplied by a scale; w is of type float32.
- `w:topk`: positions, ascending, in the flat w.

A group has at most one entry more: `:scales`, of its quantised tensors in their order, or `:values`, the new values at all
positions.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from polyfed.core.algorithm import Message
from polyfed.core.messages.compressors import Compressor, ShapeAndDtype
from polyfed.core.seeds import derive_seed
from polyfed.core.state_dict import StateDict, StateDictSpec, state_dict_spec

UNCOMPRESSED_GROUPS = frozenset({"public", "rad"})
"""Groups of inputs, which go down as they are: a client checks that the public examples stay the same."""
_UNCOMPRESSED = ""
_EMPTY_MESSAGE = Message()


def compress_message(message: Message, reference: Message, compressor: Compressor, seed: int) -> Message:
    """Compresses a message's tensors as changes from those of `reference`, which the receiver has.

    Args:
        message: with tensors in this machine's memory.
        reference: what the receiver has already; nothing of it is changed.
        compressor: as agreed with the receiver.
        seed: of all that is drawn; each tensor has a stream of its own.

    >>> from polyfed.core.messages.compressors import TopK
    >>> received = Message({"model": {"w": torch.zeros(10, 10), "n": torch.tensor(3)}})
    >>> up = Message({"model": {"w": torch.arange(100.0).reshape(10, 10), "n": torch.tensor(4)}}, {"num_examples": 20})
    >>> compressed = compress_message(up, received, TopK(0.02), seed=0)
    >>> dict(compressed.tensors["model"])
    {'w:topk': tensor([98, 99], dtype=torch.uint8), 'n:': tensor(4), ':values': tensor([98., 99.])}
    >>> decompress_message(compressed, received, TopK(0.02)).tensors["model"]["w"].sum()
    tensor(197.)
    """
    tensors = {
        group: _compress_group(group, state_dict, reference, compressor, seed)
        for group, state_dict in message.tensors.items()
    }
    return Message(tensors, message.scalars)


def _compress_group(
    group: str, tensors: StateDict, reference: Message, compressor: Compressor, seed: int
) -> dict[str, Tensor]:
    entries: dict[str, Tensor] = {}
    shared_parts: list[Tensor] = []
    for name, tensor in tensors.items():
        before = _reference_tensor(reference, group, name)
        matches = before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype
        packed = compressor.compress_tensor_if_worthwhile(
            tensor, before if matches else None, derive_seed(seed, group, name)
        )
        if packed is None:
            entries[f"{name}:{_UNCOMPRESSED}"] = tensor
        else:
            kind, entry, part = packed
            entries[f"{name}:{kind}"] = entry
            shared_parts.append(part)
    if shared_parts:
        entries[compressor.shared_entry] = torch.cat(shared_parts)  # in a type that holds all
    return entries


def _reference_tensor(reference: Message, group: str, name: str) -> Tensor | None:
    return reference.tensors.get(group, {}).get(name)


def decompressed_specs(
    specs: Mapping[str, StateDictSpec], reference: Message, compressor: Compressor
) -> dict[str, dict[str, ShapeAndDtype]]:
    """Returns `{group: {name: shape and dtype}}` after decompression, from compressed shapes alone.

    No tensor is read or made.

    Raises:
        ValueError: no compressed message has these forms; the message is half a sentence.

    >>> from polyfed.core.messages.compressors import Int8
    >>> decompressed_specs({"model": {"w:float32": ((4, 5), torch.int8), ":scales": ((1,), torch.float32)}},
    ...                    Message(), Int8())
    {'model': {'w': ((4, 5), torch.float32)}}
    """
    return {g: {e.name: e.spec for e in _parse_entries(g, form, reference, compressor)} for g, form in specs.items()}


def select_uncompressed_tensors(entries: StateDict) -> dict[str, Tensor]:
    """Returns `{name: tensor}` for those tensors of a group that `compress_message` left uncompressed.

    >>> select_uncompressed_tensors({"n:": torch.tensor(3), ":scales": torch.ones(1)})
    {'n': tensor(3)}
    """
    return {name[:-1]: tensor for name, tensor in entries.items() if name.endswith(":")}


@final
@dataclass(frozen=True)
class _CompressedEntry:
    """Describes a compressed tensor: name, encoding, form, and the ends of its part of the shared entry."""

    name: str
    kind: str
    spec: ShapeAndDtype
    begin: int
    end: int


def _parse_entries(
    group: str, specs: StateDictSpec, reference: Message, compressor: Compressor
) -> list[_CompressedEntry]:
    entries: dict[str, _CompressedEntry] = {}
    dtypes: list[torch.dtype] = []
    end = 0
    for key, (shape, dtype) in specs.items():
        name, colon, kind = key.rpartition(":")
        if key == compressor.shared_entry:
            continue
        if not colon:
            raise ValueError(
                f"group {group[:80]!r}: tensor {key[:80]!r} does not say how it travels; this run has compress={compressor}"
            )
        if name in entries:
            raise ValueError(f"group {group[:80]!r}: tensor {name[:80]!r} comes twice")
        form, begin = (tuple(int(size or 0) for size in shape), dtype), end
        if kind != _UNCOMPRESSED:
            tensor = _reference_tensor(reference, group, name)
            try:
                before = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
                form, number, needed = compressor.checked_decompressed_form(kind, form, before)
            except ValueError as error:
                raise ValueError(
                    f"group {group[:80]!r}: tensor {name[:80]!r} {error} with compress={compressor}"
                ) from error
            dtypes.append(needed)
            end += number
        entries[name] = _CompressedEntry(name, kind, form, begin, end)
    actual, expected = specs.get(compressor.shared_entry), ((end,), _promoted_dtype(dtypes)) if dtypes else None
    if actual != expected:
        raise ValueError(
            f"group {group[:80]!r}: {compressor.shared_entry!r} is {actual or 'missing'}, expected {expected or 'none'}"
        )
    return list(entries.values())


def _promoted_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Returns the type to which `torch.cat` converts tensors of these types."""
    first, *remaining = dict.fromkeys(dtypes)
    for dtype in remaining:
        first = torch.promote_types(first, dtype)
    return first


def decompress_message(message: Message, reference: Message, compressor: Compressor) -> Message:
    """Restores a message from the result of `compress_message`, up to the precision lost in compression.

    The arguments are not changed; tensors that travelled uncompressed are not copied.

    Raises:
        ValueError: `compress_message` makes no such message with these arguments; the error's text is half a sentence.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    # All forms before any number.
    entries_by_group = {
        g: _parse_entries(g, state_dict_spec(state_dict), reference, compressor)
        for g, state_dict in message.tensors.items()
    }
    for group, entries in entries_by_group.items():
        state_dict, group_tensors = message.tensors[group], dict[str, Tensor]()
        for e in entries:
            body, before = state_dict[f"{e.name}:{e.kind}"], _reference_tensor(reference, group, e.name)
            if e.kind == _UNCOMPRESSED:
                group_tensors[e.name] = body
                continue
            matches = before is not None and (tuple(before.shape), before.dtype) == e.spec
            try:
                group_tensors[e.name] = compressor.decompress_tensor(
                    e.kind, body, state_dict[compressor.shared_entry][e.begin : e.end], before if matches else None
                )
            except ValueError as error:
                raise ValueError(f"group {group[:80]!r}: tensor {e.name[:80]!r} {error}") from error
        tensors[group] = group_tensors
    return Message(tensors, message.scalars)


@final
class BroadcastCompressor:
    """Compresses messages to clients; a tensor that several receive is compressed once and shared.

    Since the server does not know what clients have, values and not changes are compressed. Draws depend on the seed
    alone, not on who receives the message.

    Args:
        compressor: None sends messages as they are.
        seed: of this state of the server.
    """

    def __init__(self, compressor: Compressor | None, seed: int) -> None:
        self._compressor, self._seed = compressor, seed
        # The tensors themselves are kept too: an id is only its own as long as they live.
        self._groups: dict[Any, tuple[StateDict, StateDict, StateDict]] = {}

    def __call__(self, message: Message) -> tuple[Message, Message]:
        """Returns the compressed message to send, and the message as the client will restore it."""
        if self._compressor is None:
            return message, message
        sent, arrived = {}, {}
        for group, tensors in message.tensors.items():
            key = group, tuple((name, id(tensor)) for name, tensor in tensors.items())
            if key not in self._groups:
                packed = {f"{name}:{_UNCOMPRESSED}": tensor for name, tensor in tensors.items()}
                if group not in UNCOMPRESSED_GROUPS:
                    packed = _compress_group(group, tensors, _EMPTY_MESSAGE, self._compressor, self._seed)
                plain = decompress_message(Message({group: packed}), _EMPTY_MESSAGE, self._compressor).tensors[group]
                self._groups[key] = tensors, packed, plain
            _, sent[group], arrived[group] = self._groups[key]
        return Message(sent, message.scalars), Message(arrived, message.scalars)

    def clear_cache(self) -> None:
        """Drops the compressed tensors that were kept for further clients."""
        self._groups.clear()
