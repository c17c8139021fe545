"""Converts tensors, arrays, torch and Hugging Face datasets, and pandas frames to tensors of inputs and labels."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from polyfed.core.errors import UserError, describe_exception
from polyfed.core.examples.pytree import Inputs, check_and_convert_inputs, explain_unreadable_rows, first_leaf
from polyfed.core.examples.text_labels import NumberedLabels, holds_texts, is_array_like, number_text_labels

Collate = Callable[[list[Any]], Any]
ExamplesParts = tuple[Inputs, NumberedLabels, dict[str, Any] | None]  # inputs, labels, and columns that no network gets

_LABELS = ("label", "labels", "fine_label", "y")
_TABLE = "pf.data.split_table makes clients of a frame with texts, dates or missing values"


def read_inputs_and_labels(source: Any, name: str, labelled: bool, collate: Collate | None) -> ExamplesParts:
    """Reads inputs, labels and further columns from any type of data that `as_examples` accepts.

    Raises:
        UserError: the source has another type, or cannot be read.
    """
    if isinstance(source, DataLoader):
        source, own_collate = _read_data_loader(source, name)
        collate = own_collate if collate is None else collate
    is_list = hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, Mapping | str)
    if isinstance(source, IterableDataset | Iterator):
        raise UserError(
            f"{name}: a {type(source).__name__} can only be read from its start to its end; give its items as a list, "
            "list(...)"
        )
    if collate is not None and is_list:
        return _read_collated(collate(_read_items(source, name)), name)
    if not labelled and (isinstance(source, Tensor | np.ndarray | Mapping) or hasattr(source, "iloc")):
        x = convert_inputs_to_tensors(source, f"{name} inputs")
        first_part = first_leaf(x)
        zeros = torch.zeros(first_part.shape[:1], dtype=torch.int64, device=first_part.device)
        return x, NumberedLabels(zeros, None), None
    if hasattr(source, "column_names") and hasattr(source, "with_format"):
        return _from_hugging_face(source, name)
    if hasattr(source, "iloc"):  # pandas, without an import of it
        raise UserError(
            f"{name}: a pandas {type(source).__name__} alone does not say what is to be predicted; give a pair, "
            f"(frame[inputs], frame[target]); {_TABLE}"
        )
    if isinstance(source, tuple | list) and len(source) == 2:
        return convert_inputs_to_tensors(source[0], f"{name} inputs"), _convert_labels(source[1], name), None
    if is_list:
        rows = _read_items(source, name)
        if rows and all(isinstance(row, tuple | list) and len(row) == 2 for row in rows):
            return _examples_of_rows([row[0] for row in rows], [row[1] for row in rows], name)
        if rows and all(isinstance(row, Mapping) for row in rows):
            parts = [_split_off_label(row, name) for row in rows]
            return _examples_of_rows([inputs for inputs, _ in parts], [label for _, label in parts], name)
    if hasattr(source, "dataset") and hasattr(source, "batch_size"):
        raise UserError(
            f"{name}: a {type(source).__name__} is read batch by batch, and the client draws its own batches; give its data "
            "set, loader.dataset (with a collate_fn of yours as_examples(loader.dataset, collate=...))"
        )
    if hasattr(source, "train_dataloader"):
        raise UserError(
            f"{name}: a {type(source).__name__} holds several sets; give one of them, such as "
            "module.train_dataloader().dataset"
        )
    raise UserError(
        f"{name}: cannot read examples from {type(source).__name__}; give {'' if labelled else 'a tensor of inputs, '}"
        "a pair (x, y) of tensors or arrays, a torch Dataset of (input, label) pairs, or a Hugging Face dataset with a "
        "column 'label'"
    )


def _read_data_loader(loader: DataLoader[Any], name: str) -> tuple[Any, Collate | None]:
    """Returns the data set and the collate_fn of a loader, and warns that its batches do not count.

    Args:
        loader: a torch `DataLoader`.
        name: whose it is, for errors.

    Raises:
        UserError: a sampler of the user's own, or one that draws some examples.
    """
    sampler, size = loader.sampler, getattr(loader.dataset, "__len__", lambda: None)()
    draws_all = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == size
    )
    if size is not None and (not draws_all or type(loader.batch_sampler) not in (BatchSampler, type(None))):
        kind = type(sampler if not draws_all else loader.batch_sampler).__name__
        raise UserError(
            f"{name}: the DataLoader chooses its examples by a {kind}, which a client does not have; give the examples "
            "themselves, such as torch.utils.data.Subset(loader.dataset, indices)"
        )
    warnings.warn(
        "of a DataLoader its data set is taken, and its collate_fn; its batches, order and workers are not: a method draws "
        "its own minibatches (batch_size=... of the method). Give loader.dataset to say so",
        UserWarning,
        stacklevel=7,
    )
    is_torchs = loader.collate_fn in (default_collate, default_convert)
    return loader.dataset, None if is_torchs else loader.collate_fn


def _read_items(source: Any, name: str) -> list[Any]:
    """Returns all items of a torch `Dataset` or list, in their order."""
    items: list[Any] = []
    number = len(source)
    if not number:
        raise UserError(
            f"{name}: the {type(source).__name__} has no examples; give at least one, or leave this client out"
        )
    for i in range(number):
        try:
            items.append(source[i])
        except Exception as error:  # whatever the user's data set raises
            raise UserError(
                f"{name}: item {i} of the {type(source).__name__} cannot be read: {describe_exception(error)}"
            ) from error
    return items


def convert_inputs_to_tensors(value: Any, name: str) -> Inputs:
    """Converts inputs of many examples, an array or tuples and mappings of arrays, to tensors.

    A tuple or list of arrays of numbers is a structure; of plain numbers and lists of them it is one array, and so is a list
    of NumPy arrays, its rows.

    Raises:
        UserError: the value is of another type.

    >>> convert_inputs_to_tensors(([[1, 2]], {"b": [[0.5]]}), "x")
    (tensor([[1, 2]]), {'b': tensor([[0.5000]])})
    """
    if _is_structure(value):
        return check_and_convert_inputs(_convert_parts(value, name), name)
    return to_number_tensor(value, name)


def _convert_parts(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _convert_parts(part, f"{name} {key!r}") for key, part in value.items()}
    if _is_structure(value):
        return tuple(_convert_parts(part, f"{name} {position}") for position, part in enumerate(value))
    return to_number_tensor(value, name)


def _is_structure(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    if not isinstance(value, tuple | list):
        return False
    is_tuple = isinstance(value, tuple)
    return any(
        (isinstance(part, Tensor) and part.dim() > 0)
        or (is_tuple and (isinstance(part, np.ndarray) or hasattr(part, "iloc")))
        or hasattr(part, "getbands")
        or _is_structure(part)
        for part in value
        if not isinstance(part, int | float)
    )


def _examples_of_rows(inputs: Sequence[Any], labels: Sequence[Any], name: str) -> ExamplesParts:
    if all(isinstance(label, Tensor) for label in labels) and len({label.shape for label in labels}) == 1:
        labels = torch.stack(list(labels))  # type: ignore[assignment]  # keeps their type
    return check_and_convert_inputs(_stack_structures(inputs, f"{name} inputs")), _convert_labels(labels, name), None


def _stack_structures(items: Sequence[Any], name: str) -> Any:
    """Stacks the nested inputs of single examples into one nested structure with a row per example."""
    first_item = items[0]
    if isinstance(first_item, Mapping):
        if (
            different := next(
                (item for item in items if not isinstance(item, Mapping) or item.keys() != first_item.keys()), None
            )
        ) is not None:
            raise UserError(
                f"{name} have the parts {sorted(first_item)} in an example, in another {_describe_item(different)}; "
                "give all the same"
            )
        return {key: _stack_structures([item[key] for item in items], f"{name} {key!r}") for key in first_item}
    if _is_structure(first_item):
        if (
            different := next((i for i in items if not isinstance(i, tuple | list) or len(i) != len(first_item)), None)
        ) is not None:
            raise UserError(
                f"{name} have {len(first_item)} parts in one example, in another {_describe_item(different)}; give all "
                "the same"
            )
        return tuple(_stack_structures([item[k] for item in items], f"{name} {k}") for k in range(len(first_item)))
    rows = [to_number_tensor(item, name) for item in items]
    if (different := next((row for row in rows if row.shape != rows[0].shape), None)) is not None:
        raise UserError(
            f"{name} differ in shape, {tuple(rows[0].shape)} and {tuple(different.shape)}; resize or pad them, or give "
            "as_examples(..., collate=...) a function that does"
        )
    return torch.stack(rows)


def _describe_item(item: Any) -> str:
    return str(sorted(item)) if isinstance(item, Mapping) else f"a {type(item).__name__}"


def _split_off_label(row: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Splits an example given as a mapping into its inputs and its label."""
    label = next((key for key in _LABELS if key in row), None)
    if label is None:
        raise UserError(f"{name}: an example has {sorted(row)}, and no label; call it 'label'")
    inputs = {key: value for key, value in row.items() if key != label}
    if not inputs:
        raise UserError(f"{name}: an example has a {label!r} and nothing else; it needs an input")
    return next(iter(inputs.values())) if len(inputs) == 1 else inputs, row[label]


def _read_collated(batch: Any, name: str) -> ExamplesParts:
    if isinstance(batch, Mapping):
        inputs, labels = _split_off_label(batch, name)
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, labels = batch
    else:
        raise UserError(
            f"{name}: collate must return (inputs, labels) or a mapping with labels, got {type(batch).__name__}"
        )
    return convert_inputs_to_tensors(inputs, f"{name} inputs"), _convert_labels(labels, name), None


def _from_hugging_face(source: Any, name: str) -> ExamplesParts:
    label = next((c for c in _LABELS if c in source.column_names), None)
    kinds = {c: source.features[c] for c in source.column_names if c != label}
    text_columns = [
        c
        for c, kind in kinds.items()
        if getattr(kind, "dtype", None) in ("string", "large_string") or _class_names(kind)
    ]
    inputs = [c for c in kinds if c not in text_columns]
    if label is None or not inputs:
        raise UserError(
            f"{name}: the Hugging Face dataset has columns {source.column_names}; it needs 'label' and columns of numbers "
            "or images as inputs (rename with .rename_column, keep with .select_columns)"
        )
    columns = source.select_columns([label, *inputs]).with_format("torch")[:]  # images come as uint8, channels first
    tensors = {c: _hub_column(columns[c], kinds[c], c, name) for c in inputs}
    x = tensors[inputs[0]] if len(inputs) == 1 else check_and_convert_inputs(tensors, f"{name} inputs")
    metadata = {c: _text_values(source.with_format(None)[c], kinds[c]) for c in text_columns}
    return x, _convert_labels(columns[label], name), metadata or None


def _hub_column(x: Any, kind: Any, column: str, name: str) -> Tensor:
    if isinstance(x, list):
        raise UserError(
            f"{name}: inputs in column {column!r} differ in shape; resize or pad them to one shape, or give "
            "as_examples(..., collate=...) a function that does"
        )
    if getattr(kind, "dtype", None) == "uint8":
        x = x.to(torch.uint8)  # the torch format makes int64 of an array of bytes
    return to_number_tensor(x, f"{name} inputs")


def _class_names(kind: Any) -> Any:
    """Returns the class names of a Hugging Face column of type `ClassLabel`; None for a column of another type."""
    return getattr(kind, "names", None) if hasattr(kind, "int2str") else None


def _text_values(values: Any, kind: Any) -> list[str]:
    names = _class_names(kind)
    return [
        ("" if v is None else str(v)) if names is None else names[v] if v in range(len(names)) else "" for v in values
    ]


def to_number_tensor(value: Any, name: str) -> Tensor:
    """Converts numbers in an array, list, PIL image, or pandas frame or series to one tensor.

    Raises:
        UserError: a value is not a number.
    """
    if isinstance(value, Tensor):
        if error_text := explain_unreadable_rows(value):
            raise UserError(f"{name}: {error_text}")
        return value.detach().resolve_conj().resolve_neg()
    if isinstance(value, Iterator):
        raise UserError(f"{name}: a {type(value).__name__} can be read only once; give its items as a list, list(...)")
    if hasattr(value, "toarray"):  # of SciPy, sparse
        raise UserError(f"{name}: a {type(value).__name__} is sparse; give all numbers, .toarray()")
    if hasattr(value, "getbands"):  # a PIL image: (height, width) or (height, width, channels)
        pixels = torch.from_numpy(np.array(value))
        return pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.movedim(-1, 0).contiguous()
    if hasattr(value, "iloc"):
        value = _numbers_of_frame(value, name)
    if is_array_like(value):
        value = _plain_array(value if isinstance(value, np.ndarray) else np.asarray(value), name)
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        remedy = (
            f"; they hold texts: make numbers of them before; {_TABLE}" if holds_texts(value) else _join_advice(value)
        )
        raise UserError(f"{name}: cannot be read as one tensor of numbers ({error}){remedy}") from error
    return tensor.to(torch.float32) if tensor.dtype == torch.float64 else tensor


def _join_advice(value: Any) -> str:
    """Returns the end of an error that says how to make one tensor of several, or numbers of an array of objects."""
    if isinstance(value, np.ndarray):
        return "; give an array of numbers, x.astype('float32')"
    shapes = {tuple(part.shape) for part in value if hasattr(part, "shape")} if isinstance(value, list | tuple) else {}
    if len(shapes) == 1:
        return f"; it is a {type(value).__name__} of {len(value)} tensors: make one, torch.stack(values, 1) for columns"
    return f"; its parts have the shapes {', '.join(map(str, sorted(shapes)))}: give one tensor" if shapes else ""


def _plain_array(value: NDArray[Any], name: str) -> NDArray[Any]:
    """Returns the array with a type and memory layout that torch can read.

    An array of Python objects becomes one of their numbers. It is a copy if the rows run backwards, the array is read-only,
    or its bytes have another machine's order.
    """
    if np.ma.is_masked(value):
        raise UserError(f"{name}: the array has masked values; give array.filled(...), or leave these rows out")
    if value.dtype.kind == "O" and all(isinstance(item, Number) for item in value.flat):
        value = np.array(value.tolist())
    if any(step < 0 for step in value.strides) or not value.flags.writeable:
        value = np.array(value)
    return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))


def _numbers_of_frame(value: Any, name: str) -> Any:
    kinds = {value.name: value.dtype} if hasattr(value, "name") else dict(value.dtypes.items())
    if nonnumeric := [column for column, kind in kinds.items() if getattr(kind, "kind", "O") not in "biuf"]:
        kind = kinds[nonnumeric[0]]
        column = "" if nonnumeric[0] is None else f"column {nonnumeric[0]!r} of "
        raise UserError(
            f"{name}: {column}the pandas {type(value).__name__} holds {kind}, not numbers; number its values, "
            f"once for all clients (names, numbers = numpy.unique(values, return_inverse=True)), or leave it out; {_TABLE}"
        )
    numbers = value.to_numpy()
    # a copy that can be written to; NaN where a nullable type has no value
    return value.to_numpy(np.float64, copy=True, na_value=np.nan) if numbers.dtype.kind == "O" else np.array(numbers)


def names_of_frame_columns(inputs: Any) -> tuple[str, ...] | None:
    """Returns the column names of a pandas frame (PART/COLUMN for a mapping of frames), or None without a frame."""
    if isinstance(inputs, Mapping):
        parts = {key: names_of_frame_columns(part) or () for key, part in inputs.items()}
        return tuple(f"{key}/{name}" for key in sorted(parts, key=str) for name in parts[key]) or None
    return tuple(map(str, inputs.columns)) if hasattr(inputs, "iloc") and hasattr(inputs, "columns") else None


def _convert_labels(value: Any, name: str) -> NumberedLabels:
    if holds_texts(value):
        return number_text_labels(value, name)
    tensor = to_number_tensor(value, f"{name} labels")
    if tensor.is_complex():
        raise UserError(f"{name} labels are complex numbers ({tensor.dtype}); give whole or real numbers")
    if tensor.is_floating_point():  # float64 if given as such a tensor
        return NumberedLabels(tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32), None)
    # several labels become floats when their task is known
    return NumberedLabels(tensor.to(torch.int64) if tensor.dim() == 1 else tensor, None)
