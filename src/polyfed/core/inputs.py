"""Inputs of any structure. A batch is a tensor, or a tuple or dict of tensors that have one row an example, nested at will.

How a network is called, and what of its answer counts, is decided here and nowhere else:

- a tensor x: `network(x)`; a tuple: `network(*x)`; a dict: `network(**x)`. Only the outermost level is spread out: a dict in
  a tuple arrives as a dict.
- The answer is a tensor of logits, or a mapping with "logits", or an object with `.logits` (as the models of Hugging Face's
  `transformers` give); what else is in it is not looked at.

The tensors of a structure are its parts. Each has a name: its key or its position, joined by "/" where it is nested. Dicts
are kept in the order of their keys, so that it does not matter in which order they were written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from polyfed.core.errors import UserError

Inputs = Tensor | tuple["Inputs", ...] | dict[str, "Inputs"]


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments with which a network is called.

    >>> arguments({"image": 1, "age": 2}), arguments((1, 2))
    (((), {'image': 1, 'age': 2}), ((1, 2), {}))
    """
    if isinstance(x, tuple):
        return x, {}
    return ((), x) if isinstance(x, dict) else ((x,), {})


def call(network: Callable[..., Any], x: Any) -> Any:
    """What a network answers to a batch, see above.

    >>> call(lambda image, age: image + age, {"age": torch.ones(1), "image": torch.zeros(1)})
    tensor([1.])
    """
    if isinstance(x, Tensor):
        return network(x)
    args, named = arguments(x)
    return network(*args, **named)


def answer(output: Any) -> Any:
    """The logits of a network's answer where it names them; else all of it.

    >>> answer({"logits": 1, "loss": 2}), answer((1, 2))
    (1, (1, 2))
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("logits", output)
    # Not hasattr: symbols, with which networks are traced, have every attribute.
    named = "logits" in getattr(output, "__dict__", ()) or hasattr(type(output), "logits")
    return output.logits if named else output


def logits_of(output: Any) -> Tensor:
    """The tensor of logits of a network's answer, see above.

    Raises:
        UserError: there is none.

    >>> logits_of({"logits": torch.zeros(1)})
    tensor([0.])
    """
    if isinstance(output, Tensor):
        return output
    found = answer(output)
    if isinstance(found, Tensor):
        return found
    raise UserError(
        f"a network must return a tensor of logits, a dict with a tensor 'logits' or an object with .logits, got "
        f"{type(output).__name__}"
    )


def leaves(x: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each part; the name of a lone tensor is empty.

    >>> [name for name, _ in leaves({"image": torch.zeros(1), "rest": (torch.zeros(1), torch.zeros(1))})]
    ['image', 'rest/0', 'rest/1']
    """
    if isinstance(x, Tensor):
        yield name, x
        return
    for key, part in x.items() if isinstance(x, dict) else enumerate(x):
        yield from leaves(part, f"{name}/{key}" if name else str(key))


def mapped(function: Callable[..., Any], x: Any, *others: Any) -> Any:
    """A function of each tensor (and of those at the same place in other structures of this form), in the same structure.

    >>> mapped(lambda a, b: int(a + b), (torch.ones(1), {"x": torch.ones(1)}), (torch.ones(1), {"x": torch.zeros(1)}))
    (2, {'x': 1})
    """
    if isinstance(x, tuple):
        return tuple(mapped(function, *parts) for parts in zip(x, *others, strict=True))
    if isinstance(x, dict):
        return {key: mapped(function, part, *(other[key] for other in others)) for key, part in x.items()}
    return function(x, *others)


def first(x: Any) -> Tensor:
    """The first part, for what all have in common: rows and device."""
    return x if isinstance(x, Tensor) else next(leaves(x))[1]


def concatenated(batches: Sequence[Any]) -> Any:
    """Batches of one form, one after another.

    >>> concatenated([(torch.ones(1),), (torch.zeros(2),)])
    (tensor([1., 0., 0.]),)
    """
    return mapped(lambda *parts: torch.cat(parts), *batches)


def why_not_dense(tensor: Tensor) -> str:
    """What keeps a tensor from being read row by row, and what to do, as half a sentence; empty if nothing does.

    >>> why_not_dense(torch.zeros(2).to_sparse())
    'a sparse tensor (torch.sparse_coo); give tensor.to_dense()'
    """
    if tensor.is_nested:
        return "a nested tensor, whose rows may differ in shape; give tensor.to_padded_tensor(0)"
    if tensor.layout != torch.strided:
        return f"a sparse tensor ({tensor.layout}); give tensor.to_dense()"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values; make it on the CPU"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype}); give tensor.dequantize()"
    return ""


def structured(x: Any, name: str = "inputs") -> Inputs:
    """Tensors in tuples, lists and mappings as tuples and dicts, with keys in order.

    Raises:
        UserError: something else, no tensor at all, a key that is no text or has a "/", or parts of different length.

    >>> structured([torch.zeros(2), {"b": torch.zeros(2), "a": torch.zeros(2)}])
    (tensor([0., 0.]), {'a': tensor([0., 0.]), 'b': tensor([0., 0.])})
    """
    found = _plain(x, name)
    rows = {part: len(tensor) if tensor.dim() else None for part, tensor in leaves(found)}
    if not rows:
        raise UserError(f"{name}: the {type(x).__name__} holds no tensor; inputs need at least one")
    one = next(iter(rows))
    for part, number in rows.items():
        if number is None or number != rows[one]:
            raise UserError(
                f"{name} must have one row per example in each part, but {part!r} has {_rows(number)} and {one!r} "
                f"{_rows(rows[one])}"
            )
    return found


def _rows(number: int | None) -> str:
    return "no axis of rows" if number is None else f"{number} rows"


def _plain(x: Any, name: str) -> Inputs:
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Mapping):
        for key in x:
            if not isinstance(key, str) or not key or "/" in key:
                raise UserError(f"{name}: the key {key!r} of a dict of inputs must be a text without '/': the network gets "
                                "it as the name of an argument")  # fmt: skip
        return {key: _plain(x[key], name) for key in sorted(x)}
    if isinstance(x, tuple | list):
        return tuple(_plain(part, name) for part in x)
    raise UserError(f"{name} must be tensors, or tuples or dicts of tensors, got {type(x).__name__}")


@final
@dataclass(frozen=True)
class Form:
    """Structure, shapes (without the batch) and types of inputs, as a value.

    Attributes: `shape` and `dtype` of a tensor; `parts`, names and forms of what is in a tuple (`spread` is "tuple") or a
    dict ("dict").

    >>> form = form_of({"age": torch.zeros(5, 1), "image": torch.zeros(5, 1, 8, 8)})
    >>> str(form)
    'age: torch.float32 of shape (1,), image: torch.float32 of shape (1, 8, 8)'
    >>> form == form_of({"image": torch.ones(2, 1, 8, 8), "age": torch.ones(2, 1)})
    True
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    spread: str = ""
    parts: tuple[tuple[str, "Form"], ...] = ()

    def __str__(self) -> str:
        if not self.spread:
            return f"{self.dtype} of shape {self.shape}"
        return ", ".join(f"{name}: ({form})" if form.spread else f"{name}: {form}" for name, form in self.parts)

    def make(self, tensor: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> Inputs:
        """Inputs of this form; `tensor` makes each part of its shape and type.

        >>> form_of((torch.zeros(3, 2),)).make(lambda shape, dtype: torch.ones(1, *shape, dtype=dtype))
        (tensor([[1., 1.]]),)
        """
        if not self.spread:
            assert self.dtype is not None
            return tensor(self.shape, self.dtype)
        made = {name: form.make(tensor) for name, form in self.parts}
        return made if self.spread == "dict" else tuple(made.values())


def form_of(x: Any) -> Form:
    """The form of a batch. Dicts are of one form whatever the order of their keys."""
    if isinstance(x, Tensor):
        return Form(tuple(x.shape[1:]), x.dtype)
    if isinstance(x, dict):
        return Form(spread="dict", parts=tuple((key, form_of(x[key])) for key in sorted(x)))
    return Form(spread="tuple", parts=tuple((str(i), form_of(part)) for i, part in enumerate(x)))


def flat(x: Any, name: str = "x") -> dict[str, Tensor]:
    """The parts as named tensors, which can be sent and saved; `unflat` is the inverse.

    >>> list(flat(torch.zeros(1))), list(flat({"a": torch.zeros(1), "b": (torch.zeros(1),)}))
    (['x'], ['x/a', 'x/b/0'])
    """
    return dict(leaves(x, name))


def unflat(named: Mapping[str, Tensor], form: Form, name: str = "x") -> Any:
    """Inputs of the structure of `form` from the tensors of `flat`, whatever their shapes.

    Raises:
        UserError: other parts than the form has.

    >>> unflat({"x/0": torch.zeros(1), "x/1": torch.ones(1)}, form_of((torch.zeros(1), torch.zeros(1))))
    (tensor([0.]), tensor([1.]))
    """
    wanted = [part for part, _ in leaves(form.make(lambda shape, dtype: torch.empty(0)), name)]
    if sorted(wanted) != sorted(named):
        raise UserError(f"these are inputs of the parts {sorted(named)}, expected {sorted(wanted)}")
    left = iter(wanted)
    return form.make(lambda shape, dtype: named[next(left)])
