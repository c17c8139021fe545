"""Compressed messages: what `polyfed.core.compression` makes of the tensors of a message, and back.

A reply is compressed against the message that it answers. A tensor has a counterpart there if group, name, shape and type
are the same: then its change travels, otherwise the tensor itself. What goes down has no counterparts, since the server does
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
from polyfed.core.compression import Compression, Form
from polyfed.core.seeds import derive
from polyfed.core.tree import Spec, Tree, spec

INPUTS = frozenset({"public", "rad"})
"""Groups of inputs, which go down as they are: a client checks that the public examples stay the same."""
_EXACT = ""
_NOTHING = Message()


def compress(message: Message, known: Message, how: Compression, seed: int) -> Message:
    """A message as it travels.

    Args:
        message: with tensors in this machine's memory.
        known: what the receiver has already; nothing of it is changed.
        how: as agreed with the receiver.
        seed: of all that is drawn; each tensor has a stream of its own.

    >>> from polyfed.core.compression import TopK
    >>> down = Message({"model": {"w": torch.zeros(10, 10), "n": torch.tensor(3)}})
    >>> up = Message({"model": {"w": torch.arange(100.0).reshape(10, 10), "n": torch.tensor(4)}}, {"num_examples": 20})
    >>> sent = compress(up, down, TopK(0.02), seed=0)
    >>> dict(sent.tensors["model"])
    {'w:topk': tensor([98, 99], dtype=torch.uint8), 'n:': tensor(4), ':values': tensor([98., 99.])}
    >>> decompress(sent, down, TopK(0.02)).tensors["model"]["w"].sum()
    tensor(197.)
    """
    tensors = {group: _packed(group, tree, known, how, seed) for group, tree in message.tensors.items()}
    return Message(tensors, message.scalars)


def _packed(group: str, tree: Tree, known: Message, how: Compression, seed: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    rest: list[Tensor] = []
    for name, tensor in tree.items():
        before = _counterpart(known, group, name)
        alike = before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype
        packed = how.pack(tensor, before if alike else None, derive(seed, group, name))
        if packed is None:
            found[f"{name}:{_EXACT}"] = tensor
        else:
            kind, entry, part = packed
            found[f"{name}:{kind}"] = entry
            rest.append(part)
    if rest:
        found[how.rest] = torch.cat(rest)  # in a type that holds all
    return found


def _counterpart(known: Message, group: str, name: str) -> Tensor | None:
    return known.tensors.get(group, {}).get(name)


def forms_after(forms: Mapping[str, Spec], known: Message, how: Compression) -> dict[str, dict[str, Form]]:
    """The forms of the tensors that a compressed message stands for, by its own forms alone: nothing is read, and nothing is
    made.

    Raises:
        ValueError: no compressed message has these forms; half a sentence.

    >>> from polyfed.core.compression import Int8
    >>> forms_after({"model": {"w:float32": ((4, 5), torch.int8), ":scales": ((1,), torch.float32)}}, Message(), Int8())
    {'model': {'w': ((4, 5), torch.float32)}}
    """
    return {g: {e.name: e.form for e in _entries(g, form, known, how)} for g, form in forms.items()}


def as_they_are(tree: Tree) -> dict[str, Tensor]:
    """Of a compressed group the tensors that travel as they are.

    >>> as_they_are({"n:": torch.tensor(3), ":scales": torch.ones(1)})
    {'n': tensor(3)}
    """
    return {name[:-1]: tensor for name, tensor in tree.items() if name.endswith(":")}


@final
@dataclass(frozen=True)
class _Entry:
    """One tensor of a group: its name, how it travels, its form, and where its part of the group's entry begins and ends."""

    name: str
    kind: str
    form: Form
    begin: int
    end: int


def _entries(group: str, forms: Spec, known: Message, how: Compression) -> list[_Entry]:
    found: dict[str, _Entry] = {}
    types: list[torch.dtype] = []
    end = 0
    for key, (shape, dtype) in forms.items():
        name, colon, kind = key.rpartition(":")
        if key == how.rest:
            continue
        if not colon:
            raise ValueError(
                f"group {group[:80]!r}: tensor {key[:80]!r} does not say how it travels; this run has compress={how}"
            )
        if name in found:
            raise ValueError(f"group {group[:80]!r}: tensor {name[:80]!r} comes twice")
        form, begin = _plain((shape, dtype)), end
        if kind != _EXACT:
            tensor = _counterpart(known, group, name)
            try:
                before = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
                form, number, needed = how.form(kind, form, before)
            except ValueError as error:
                raise ValueError(f"group {group[:80]!r}: tensor {name[:80]!r} {error} with compress={how}") from error
            types.append(needed)
            end += number
        found[name] = _Entry(name, kind, form, begin, end)
    own, wanted = forms.get(how.rest), ((end,), _common(types)) if types else None
    if own != wanted:
        raise ValueError(f"group {group[:80]!r}: {how.rest!r} is {own or 'missing'}, expected {wanted or 'none'}")
    return list(found.values())


def _plain(form: tuple[tuple[int | None, ...], torch.dtype]) -> Form:
    return tuple(int(size or 0) for size in form[0]), form[1]


def _common(types: Iterable[torch.dtype]) -> torch.dtype:
    """The type in which `torch.cat` puts tensors of these types together."""
    first, *others = dict.fromkeys(types)
    for other in others:
        first = torch.promote_types(first, other)
    return first


def decompress(message: Message, known: Message, how: Compression) -> Message:
    """The message that `compress` was given, as far as it travelled. The arguments are not changed; what travelled as it is
    is not copied.

    Raises:
        ValueError: it is none of `compress` with these arguments; half a sentence.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    plan = {
        g: _entries(g, spec(tree), known, how) for g, tree in message.tensors.items()
    }  # all forms before any number
    for group, entries in plan.items():
        tree, found = message.tensors[group], dict[str, Tensor]()
        for e in entries:
            body, before = tree[f"{e.name}:{e.kind}"], _counterpart(known, group, e.name)
            if e.kind == _EXACT:
                found[e.name] = body
                continue
            alike = before is not None and (tuple(before.shape), before.dtype) == e.form
            try:
                found[e.name] = how.unpack(e.kind, body, tree[how.rest][e.begin : e.end], before if alike else None)
            except ValueError as error:
                raise ValueError(f"group {group[:80]!r}: tensor {e.name[:80]!r} {error}") from error
        tensors[group] = found
    return Message(tensors, message.scalars)


@final
class Broadcast:
    """Compresses what goes down, where nothing is known that the clients have: the values themselves. What several clients
    get, as one global model, is compressed once and stays shared. Draws depend on the seed alone, not on who receives it.

    Args:
        how: None sends messages as they are.
        seed: of this state of the server.
    """

    def __init__(self, how: Compression | None, seed: int) -> None:
        self._how, self._seed = how, seed
        # The trees themselves are kept too: an id is only its own as long as they live.
        self._made: dict[Any, tuple[Tree, Tree, Tree]] = {}

    def __call__(self, message: Message) -> tuple[Message, Message]:
        """The message as it travels, and as it arrives."""
        if self._how is None:
            return message, message
        sent, arrived = {}, {}
        for group, tree in message.tensors.items():
            key = group, tuple((name, id(tensor)) for name, tensor in tree.items())
            if key not in self._made:
                packed = {f"{name}:{_EXACT}": tensor for name, tensor in tree.items()}
                if group not in INPUTS:
                    packed = _packed(group, tree, _NOTHING, self._how, self._seed)
                plain = decompress(Message({group: packed}), _NOTHING, self._how).tensors[group]
                self._made[key] = tree, packed, plain
            _, sent[group], arrived[group] = self._made[key]
        return Message(sent, message.scalars), Message(arrived, message.scalars)

    def forget(self) -> None:
        """Lets go of what was made."""
        self._made.clear()
