"""Handles nested inputs: one tensor, or tuples and dicts of tensors, each with one row per example.

All code calls networks, and reads their outputs, by these rules:

- a tensor x: `network(x)`; a tuple: `network(*x)`; a dict: `network(**x)`. Only the outermost level is unpacked: a dict in a
  tuple arrives as a dict.
- The output is a tensor of logits, or a mapping with "logits", or an object with `.logits` (as the models of Hugging Face's
  `transformers` return); the rest of it is ignored.

The tensors of a structure are its parts. Each has a name: its key or its position, joined by "/" where it is nested. Dicts
are kept in the order of their keys, so that the order in which they were written does not matter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from polyfed.core.errors import UserError

Inputs = Tensor | tuple["Inputs", ...] | dict[str, "Inputs"]


class CallArguments(NamedTuple):
    """Holds the positional and the keyword arguments for one call of a network."""

    positional: tuple[Any, ...]
    named: dict[str, Any]


def split_into_call_arguments(inputs: Any) -> CallArguments:
    """Splits a batch of inputs into the positional and keyword arguments with which a network is called.

    >>> split_into_call_arguments({"image": 1, "age": 2})
    CallArguments(positional=(), named={'image': 1, 'age': 2})
    """
    if isinstance(inputs, tuple):
        return CallArguments(inputs, {})
    return CallArguments((), inputs) if isinstance(inputs, dict) else CallArguments((inputs,), {})


def call_network(network: Callable[..., Any], inputs: Any) -> Any:
    """Calls a network on a batch of inputs, which may be nested, and returns its output.

    >>> call_network(lambda image, age: image + age, {"age": torch.ones(1), "image": torch.zeros(1)})
    tensor([1.])
    """
    if isinstance(inputs, Tensor):
        return network(inputs)
    args, named = split_into_call_arguments(inputs)
    return network(*args, **named)


def call_network_on_copy_if_it_changes_inputs(network: nn.Module, inputs: Any) -> Any:
    """Calls a network like `call_network`, and leaves the inputs as they are for another step or network.

    The first call of a network in training and in evaluation is on copies, and shows whether it does so.

    >>> x = torch.zeros(1)
    >>> call_network_on_copy_if_it_changes_inputs(nn.Hardtanh(1.0, 2.0, inplace=True), x), x
    (tensor([1.]), tensor([0.]))
    """
    changes_inputs_by_mode, mode = _CHANGES_INPUTS.setdefault(network, {}), network.training
    if changes_inputs_by_mode.get(mode) is False:
        return call_network(network, inputs)
    copies = tree_map(Tensor.clone, inputs)
    parts = [part for _, part in named_leaves(copies) if not part.is_inference()]  # whose versions torch counts
    versions = [part._version for part in parts]
    output = call_network(network, copies)
    changes_inputs_by_mode[mode] = versions != [part._version for part in parts]
    return output


_CHANGES_INPUTS: WeakKeyDictionary[nn.Module, dict[bool, bool]] = WeakKeyDictionary()


def logits_or_output(output: Any) -> Any:
    """Returns the logits in an output that is a mapping or object with logits; else the whole output.

    >>> logits_or_output({"logits": 1, "loss": 2}), logits_or_output((1, 2))
    (1, (1, 2))
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("logits", output)
    # Not hasattr: symbolic proxies, with which torch traces networks, have every attribute.
    named = "logits" in getattr(output, "__dict__", ()) or hasattr(type(output), "logits")
    return output.logits if named else output


def logits_of(output: Any) -> Tensor:
    """Returns the tensor of logits from a network's output, which may be a tensor, a mapping or an object.

    Raises:
        UserError: the output has no logits.

    >>> logits_of({"logits": torch.zeros(1)})
    tensor([0.])
    """
    if isinstance(output, Tensor):
        return output
    logits = logits_or_output(output)
    if isinstance(logits, Tensor):
        return logits
    raise UserError(
        f"a network must return a tensor of logits, a dict with a tensor 'logits' or an object with .logits, got "
        f"{type(output).__name__}"
    )


def named_leaves(inputs: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of nested inputs, such as "rest/0"; a single tensor's name is `prefix`.

    >>> [name for name, _ in named_leaves({"image": torch.zeros(1), "rest": (torch.zeros(1), torch.zeros(1))})]
    ['image', 'rest/0', 'rest/1']
    """
    if isinstance(inputs, Tensor):
        yield prefix, inputs
        return
    for key, part in inputs.items() if isinstance(inputs, dict) else enumerate(inputs):
        yield from named_leaves(part, f"{prefix}/{key}" if prefix else str(key))


def tree_map(function: Callable[..., Any], x: Any, *other_trees: Any) -> Any:
    """Applies a function to each tensor of nested inputs, and returns the results in the same structure.

    Tensors at the same place in `other_trees` are further arguments of the function.

    >>> tree_map(lambda a, b: int(a + b), (torch.ones(1), {"x": torch.ones(1)}), (torch.ones(1), {"x": torch.zeros(1)}))
    (2, {'x': 1})
    """
    if isinstance(x, tuple):
        return tuple(tree_map(function, *parts) for parts in zip(x, *other_trees, strict=True))
    if isinstance(x, dict):
        return {key: tree_map(function, part, *(tree[key] for tree in other_trees)) for key, part in x.items()}
    return function(x, *other_trees)


def iterate_tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors inside nested tuples, lists and mappings.

    >>> [t.item() for t in iterate_tensors({"a": [torch.tensor(1), None], "b": torch.tensor(2)})]
    [1, 2]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from iterate_tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from iterate_tensors(item)


def first_leaf(inputs: Any) -> Tensor:
    """Returns the first tensor of nested inputs, whose number of rows and device all others share."""
    return inputs if isinstance(inputs, Tensor) else next(named_leaves(inputs))[1]


def concatenate_batches(batches: Sequence[Any]) -> Any:
    """Concatenates batches of inputs, all of the same nested structure, along the axis of examples.

    >>> concatenate_batches([(torch.ones(1),), (torch.zeros(2),)])
    (tensor([1., 0., 0.]),)
    """
    return tree_map(lambda *parts: torch.cat(parts), *batches)


def explain_unreadable_rows(tensor: Tensor) -> str | None:
    """Returns half a sentence on why a tensor's rows cannot be read one by one, and the cure; or None.

    >>> explain_unreadable_rows(torch.zeros(2).to_sparse())
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
    return None


def check_and_convert_inputs(x: Any, name: str = "inputs") -> Inputs:
    """Returns nested inputs with lists as tuples and mappings as dicts with sorted keys.

    Raises:
        UserError: something else than tensors, no tensor at all, a key that is not text or has a "/", or parts of
            different lengths.

    >>> check_and_convert_inputs([torch.zeros(2), {"b": torch.zeros(2), "a": torch.zeros(2)}])
    (tensor([0., 0.]), {'a': tensor([0., 0.]), 'b': tensor([0., 0.])})
    """
    inputs = _plain_structure(x, name)
    rows = {part: len(tensor) if tensor.dim() else None for part, tensor in named_leaves(inputs)}
    if not rows:
        raise UserError(f"{name}: the {type(x).__name__} holds no tensor; inputs need at least one")
    first_part = next(iter(rows))
    for part, number in rows.items():
        if number is None or number != rows[first_part]:
            are_sequences = (
                isinstance(inputs, tuple) and len({tensor.shape[1:] for _, tensor in named_leaves(inputs)}) == 1
            )
            padding = "; sequences of several lengths are padded: torch.nn.utils.rnn.pad_sequence(x, batch_first=True)"
            raise UserError(
                f"{name} must have one row per example in each part, but {part!r} has {_describe_rows(number)} and "
                f"{first_part!r} {_describe_rows(rows[first_part])}{padding if are_sequences else ''}"
            )
    return inputs


def _describe_rows(number: int | None) -> str:
    return "no axis of rows" if number is None else f"{number} rows"


def _plain_structure(x: Any, name: str) -> Inputs:
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Mapping):
        for key in x:
            if not isinstance(key, str) or not key or "/" in key:
                raise UserError(f"{name}: the key {key!r} of a dict of inputs must be a text without '/': the network gets "
                                "it as the name of an argument")  # fmt: skip
        return {key: _plain_structure(x[key], name) for key in sorted(x)}
    if isinstance(x, tuple | list):
        return tuple(_plain_structure(part, name) for part in x)
    raise UserError(f"{name} must be tensors, or tuples or dicts of tensors, got {type(x).__name__}")


@final
@dataclass(frozen=True)
class InputSpec:
    """Describes inputs by structure, types and shapes without the batch axis, comparable with `==`.

    Attributes: `shape` and `dtype` of a tensor; `parts`, the names and specs of the members of a tuple (`container` is
    "tuple") or of a dict ("dict").

    >>> form = input_spec_of({"age": torch.zeros(5, 1), "image": torch.zeros(5, 1, 8, 8)})
    >>> str(form)
    'age: torch.float32 of shape (1,), image: torch.float32 of shape (1, 8, 8)'
    >>> form == input_spec_of({"image": torch.ones(2, 1, 8, 8), "age": torch.ones(2, 1)})
    True
    """

    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    container: str = ""
    parts: tuple[tuple[str, "InputSpec"], ...] = ()

    def __str__(self) -> str:
        if not self.container:
            return f"{self.dtype} of shape {self.shape}"
        return ", ".join(f"{name}: ({form})" if form.container else f"{name}: {form}" for name, form in self.parts)

    def build_inputs(self, make_tensor: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> Inputs:
        """Builds nested inputs of this structure, by calling `make_tensor(shape, dtype)` for each tensor.

        >>> input_spec_of((torch.zeros(3, 2),)).build_inputs(lambda shape, dtype: torch.ones(1, *shape, dtype=dtype))
        (tensor([[1., 1.]]),)
        """
        if not self.container:
            assert self.dtype is not None
            return make_tensor(self.shape, self.dtype)
        built_parts = {name: form.build_inputs(make_tensor) for name, form in self.parts}
        return built_parts if self.container == "dict" else tuple(built_parts.values())


def input_spec_of(inputs: Any) -> InputSpec:
    """Returns the structure, shapes and types of a batch of inputs, whatever the order of a dict's keys."""
    if isinstance(inputs, Tensor):
        return InputSpec(tuple(inputs.shape[1:]), inputs.dtype)
    if isinstance(inputs, dict):
        return InputSpec(container="dict", parts=tuple((key, input_spec_of(inputs[key])) for key in sorted(inputs)))
    return InputSpec(container="tuple", parts=tuple((str(i), input_spec_of(part)) for i, part in enumerate(inputs)))


def flatten_inputs(inputs: Any) -> dict[str, Tensor]:
    """Returns `{name: tensor}` of nested inputs, to send or save; `unflatten_inputs` is the inverse.

    >>> list(flatten_inputs(torch.zeros(1))), list(flatten_inputs({"a": torch.zeros(1), "b": (torch.zeros(1),)}))
    (['x'], ['x/a', 'x/b/0'])
    """
    return dict(named_leaves(inputs, "x"))


def unflatten_inputs(tensors: Mapping[str, Tensor], input_spec: InputSpec) -> Any:
    """Rebuilds nested inputs from the result of `flatten_inputs`, in the structure of `input_spec`.

    Raises:
        UserError: the parts are not those of `input_spec`.

    >>> unflatten_inputs({"x/0": torch.zeros(1), "x/1": torch.ones(1)}, input_spec_of((torch.zeros(1), torch.zeros(1))))
    (tensor([0.]), tensor([1.]))
    """
    part_names = [part for part, _ in named_leaves(input_spec.build_inputs(lambda shape, dtype: torch.empty(0)), "x")]
    if sorted(part_names) != sorted(tensors):
        raise UserError(f"these are inputs of the parts {sorted(tensors)}, expected {sorted(part_names)}")
    remaining_names = iter(part_names)
    return input_spec.build_inputs(lambda shape, dtype: tensors[next(remaining_names)])
