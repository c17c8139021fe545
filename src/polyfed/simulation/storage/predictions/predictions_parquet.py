"""Reads and writes the Parquet file with a client's predictions: a row for each example and round.

Columns: `round` (int32), `split` ("test" or "val"), `example` (int32, its position in that set), `target` (a number,
or a list of them), `output` (list of float32), `group` (int32, an anonymous number, where examples have groups), then the
columns of the examples. Shapes, and names of columns that had to be changed, are in the schema's metadata.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.io.atomic_files import create_private_folder_if_missing, open_atomic_file, open_file
from polyfed.core.io.values.validation import DAMAGED_FILE_ERRORS, parse_json, validation_error
from polyfed.data.partitioning.group_split import group_numbers

if TYPE_CHECKING:
    import pyarrow

SPLITS = ("test", "val")
_RESERVED = ("round", "split", "example", "target", "output", "group")
_KEY = b"polyfed"
MOST_BYTES = 2 * 256 * 2**20  # most bytes of predictions that a run keeps: two large rounds
MOST_ROWS = 20_000_000  # a larger file takes minutes to read


def write_outputs_of_client(path: Path, client: Client, outputs_by_round: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Writes a client's outputs by round to Parquet, atomically; `flush_files_to_disk` syncs later.

    Args:
        path: of the file.
        client: its targets and columns are written too.
        outputs_by_round: round -> "test" or "val" -> outputs, float32, shape (n, ...); written in ascending order of
            rounds.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    sets: dict[str, Examples | None] = {"test": client.test, "val": client.val}
    parts = [
        (n, s, outputs_by_round[n][s], sets[s])
        for n in sorted(outputs_by_round)
        for s in SPLITS
        if s in outputs_by_round[n]
    ]
    rows = [(n, s, outputs, data) for n, s, outputs, data in parts if data is not None]
    number = np.concatenate([np.full(len(outputs), n, np.int32) for n, _, outputs, _ in rows])
    example = np.concatenate([np.arange(len(outputs), dtype=np.int32) for _, _, outputs, _ in rows])
    split = pa.concat_arrays([pa.repeat(pa.scalar(s), len(outputs)) for _, s, outputs, _ in rows])
    targets = torch.cat([client.task.stored_targets(data.labels.cpu(), outputs) for _, _, outputs, data in rows])
    outputs = torch.cat([outputs for _, _, outputs, _ in rows])
    arrays = {
        "round": pa.array(number), "split": split, "example": pa.array(example),
        "target": _number_column(targets) if math.prod(targets.shape[1:]) == 1 else _list_column(targets),
        "output": _list_column(outputs),
    }  # fmt: skip
    groups = {id(data): group_numbers(data) for _, _, _, data in rows}
    if all(numbers is not None for numbers in groups.values()):
        arrays["group"] = pa.array(np.concatenate([groups[id(data)] for _, _, _, data in rows]).astype(np.int32))
    names = sorted({name for _, _, _, data in rows for name in data.columns_for_subgroup_scores})
    stored_names = {name: f"{name}_" if name in _RESERVED else name for name in names}
    arrays |= {stored_names[name]: _join_column(name, [data for _, _, _, data in rows]) for name in names}
    header = {
        "client": client.id, "output": list(outputs.shape[1:]), "target": list(targets.shape[1:]),
        "columns": {short: name for name, short in stored_names.items()},
    }  # fmt: skip
    table = pa.table(arrays).replace_schema_metadata({_KEY: json.dumps(header).encode()})
    create_private_folder_if_missing(path.parent)
    with open_atomic_file(path, sync=False) as file:
        pq.write_table(table, file)


def list_rounds_in_file(path: Path, split: str) -> list[int]:
    """Returns, in ascending order, the rounds for which the file holds predictions of a split.

    Raises:
        UserError: the file is damaged, or there is no such split.
    """
    table = _read_table(path, split, None, ["round", "split"])
    numbers = table.column("round").unique().to_pylist()
    if error_text := validation_error(numbers, list[int], "round"):
        raise UserError(_damage_sentence(path, ValueError(error_text)))
    return sorted(set(numbers))


@final
class StoredOutputs(NamedTuple):
    """Holds a client's outputs, targets and columns for one split, "test" or "val"."""

    outputs: Tensor
    targets: Tensor
    columns: dict[str, NDArray[Any]]
    groups: NDArray[np.int64] | None
    """Anonymous numbers of the examples' groups; None if the file has none."""


def read_outputs_and_targets(path: Path, split: str, round: int) -> StoredOutputs:
    """Reads the outputs of one split ("test", "val") after a round, with targets, columns and groups.

    Raises:
        UserError: the file is damaged, or there is no such split.
    """
    import pyarrow as pa

    table = _read_table(path, split, round, None)
    header = _read_header(path, table)
    try:  # only NumPy and Arrow read here
        outputs = _tensor_of_column(table.column("output"), header["output"])
        targets = _tensor_of_column(table.column("target"), header["target"])
        columns = {name: np.asarray(table.column(short)) for short, name in header["columns"].items()}
        # An older file has such a column.
        has_groups = "group" in table.column_names and "group" not in header["columns"]
        groups = np.asarray(table.column("group"), dtype=np.int64) if has_groups else None
        if len(targets) != len(outputs) or outputs.dim() < 2 or not outputs.is_floating_point():
            raise ValueError("outputs and targets do not fit")
    except (*DAMAGED_FILE_ERRORS, pa.ArrowException) as error:
        raise UserError(_damage_sentence(path, error)) from error
    return StoredOutputs(outputs, targets, columns, groups)


def _read_table(path: Path, split: str, round: int | None, columns: list[str] | None) -> "pyarrow.Table":
    if split not in SPLITS:
        raise UserError(f"split must be 'test' or 'val', got {split!r}")
    import pyarrow as pa
    import pyarrow.parquet as pq

    filters = [("split", "=", split)] + ([] if round is None else [("round", "=", round)])
    try:  # only Arrow reads here
        with open_file(path, MOST_BYTES) as file:
            _check_size(pq.ParquetFile(file).metadata)
            return pq.read_table(file, columns=columns, filters=filters)
    except (OSError, MemoryError, *DAMAGED_FILE_ERRORS, pa.ArrowException) as error:
        raise UserError(_damage_sentence(path, error)) from error


def _check_size(metadata: "pyarrow.parquet.FileMetaData") -> None:
    """Checks before reading that a file holds no more than a run can store.

    Equal values take no space in the file, but do in memory.

    Raises:
        ValueError: there is more.
    """
    groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
    outputs = [
        g.column(c) for g in groups for c in range(g.num_columns) if g.column(c).path_in_schema.startswith("output.")
    ]
    numbers = sum(column.num_values for column in outputs)
    if metadata.num_rows > MOST_ROWS or 4 * numbers > MOST_BYTES:
        raise ValueError(f"it claims {metadata.num_rows} rows with {numbers} outputs, more than a run keeps")


class _ParquetHeader(TypedDict):
    """Describes the metadata of the Parquet file: shapes of outputs and targets, and names of columns.

    Attributes:
        output: shape of an example's outputs.
        target: shape of an example's targets.
        columns: name of a column in the file -> its name in the examples.
    """

    output: list[int]
    target: list[int]
    columns: dict[str, str]


def _read_header(path: Path, table: "pyarrow.Table") -> _ParquetHeader:
    try:
        header: _ParquetHeader = parse_json((table.schema.metadata or {}).get(_KEY, b"null"))
        if error_text := validation_error(header, _ParquetHeader):
            raise ValueError(error_text)
    except ValueError as error:
        raise UserError(_damage_sentence(path, error)) from error
    return header


def _damage_sentence(path: Path, error: Exception) -> str:
    reason = " ".join(str(error).split())[:200]
    return f"{path} holds no predictions that can be read ({reason}); put back a copy of it, or make the run again"


def _number_column(values: Tensor) -> "pyarrow.Array":
    import pyarrow as pa

    return pa.array(values.reshape(-1).numpy())


def _list_column(values: Tensor) -> "pyarrow.Array":
    import pyarrow as pa

    width = math.prod(values.shape[1:])
    offsets = np.arange(len(values) + 1, dtype=np.int64) * width
    wide = offsets[-1] >= 2**31
    kind = pa.LargeListArray if wide else pa.ListArray
    return kind.from_arrays(pa.array(offsets if wide else offsets.astype(np.int32)), _number_column(values))


def _tensor_of_column(column: "pyarrow.ChunkedArray", shape: Sequence[int]) -> Tensor:
    import pyarrow.types as kinds

    joined = column.combine_chunks()
    nested = kinds.is_list(joined.type) or kinds.is_large_list(joined.type)
    values = np.array(joined.flatten() if nested else joined)  # a writable copy
    return torch.from_numpy(values).reshape(len(column), *shape)


def _join_column(name: str, sets: Sequence[Examples]) -> "pyarrow.Array":
    """Concatenates a column of the examples over all sets; a set without the column gets nulls."""
    import pyarrow as pa

    values_by_set = {id(data): data.column(name) for data in sets if name in (data.columns or {})}
    text = any(values.dtype.kind in "UO" for values in values_by_set.values())
    plain = {
        key: pa.array([None if value is None else str(value) for value in values.tolist()] if text else values)
        for key, values in values_by_set.items()
    }
    kind = pa.string() if text else pa.concat_arrays(_to_common_type(list(values_by_set.values()))).type
    parts = [plain[id(data)].cast(kind) if id(data) in plain else pa.nulls(len(data), kind) for data in sets]
    return pa.concat_arrays(parts)


def _to_common_type(columns: Sequence[NDArray[Any]]) -> "list[pyarrow.Array]":
    """Converts arrays of numbers to one common type."""
    import pyarrow as pa

    kind = np.result_type(*columns)
    return [pa.array(values.astype(kind)) for values in columns]
