"""Reads IDX files, and Parquet tables in the folder layout of the Hugging Face hub."""

import gzip
import math
import re
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import UserError
from polyfed.core.examples.text_columns import error_in_one_line
from polyfed.core.io.atomic_files import UNLIMITED_BYTES, check_regular_file, expand_user_path, open_file
from polyfed.core.io.values.validation import parse_json
from polyfed.core.machine.memory_limit import check_fits_in_memory

Table = Any
"""A `pyarrow.Table`; pyarrow is imported only where it is used."""

SPLIT_NAMES: Mapping[str, str] = {
    "train": "train",
    "test": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
}
"""Names of splits in published data sets -> polyfed's names."""


def resolve_existing_path(path: str, advice: str) -> Path:
    """Returns the path of a file or folder with "~" expanded.

    Raises:
        UserError: nothing exists at this path; the message ends with `advice`.

    >>> resolve_existing_path("/no/such/folder", "give --data.path DIR")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: '/no/such/folder' does not exist; give --data.path DIR
    """
    resolved = expand_user_path(path, f"a path of the data ({advice})")
    if not resolved.exists():
        raise UserError(f"{path!r} {'leads nowhere' if resolved.is_symlink() else 'does not exist'}; {advice}")
    return resolved if resolved.is_dir() else check_regular_file(resolved, UNLIMITED_BYTES)


def read_idx_file(file: Path) -> NDArray[np.uint8]:
    """Reads an IDX file of unsigned bytes (the format of MNIST), plain or gzip.

    Returns:
        The array, in the shape that the file states: (num, 28, 28) for images, (num,) for labels.

    Raises:
        UserError: the file is damaged or of another format.
    """
    try:
        with open_file(file) as raw, gzip.open(raw) if file.suffix == ".gz" else raw as stream:
            zeros, kind, dims = struct.unpack(">HBB", stream.read(4))
            shape = struct.unpack(f">{dims}I", stream.read(4 * dims))
            check_fits_in_memory(f"the array in {str(file)!r}", size := math.prod(shape))
            content = stream.read(size + 1)  # one byte more, to notice a file that is longer than its header says
        if zeros != 0 or kind != 8 or len(content) != size:
            raise ValueError(f"it begins with {zeros, kind, dims}, and has {len(content)} values for shape {shape}")
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise UserError(f"{str(file)!r} is not a complete IDX file of bytes ({error}); download it again") from error
    return np.frombuffer(content, np.uint8).reshape(shape)


def find_idx_file(folder: Path, prefix: str, content: Literal["images", "labels"]) -> Path | None:
    """Returns the path of an IDX file (MNIST's format) with this prefix and content in a folder; None if there is none.

    The name is `PREFIX-images-idx3-ubyte.gz`, or `PREFIX-labels-idx1-ubyte.gz`; also unpacked, or with a dot before
    "idx".
    """
    pattern = re.compile(rf"{re.escape(prefix)}-{content}[-.]idx\d-ubyte(\.gz)?")
    return next((file for file in sorted(folder.rglob("*ubyte*")) if pattern.fullmatch(file.name)), None)


def read_parquet_splits(path: Path, skipped_column: str | None = None) -> dict[str, Table]:
    """Reads a Parquet file or folder, and returns `{split: table}` with the splits "train", "test", "validation".

    A folder has the hub's layout: `train-00000-of-00001.parquet` or `train/0000.parquet`, at any depth. A single file is the
    training split; a folder without Parquet files gives an empty dict.

    Args:
        path: file or folder.
        skipped_column: a column that is not read.

    Raises:
        UserError: several configurations in one folder, or a file that is not Parquet.
    """
    import pyarrow
    import pyarrow.parquet

    def read(file: Path) -> Table:
        check_regular_file(file, UNLIMITED_BYTES)
        names = pyarrow.parquet.read_schema(file).names
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(f"{str(file)!r} has two columns {twice[0]!r}; rename one")
        table = pyarrow.parquet.read_table(file, columns=[name for name in names if name != skipped_column])
        table.validate(full=True)  # bytes of a damaged file that are no texts
        return table

    try:
        return {
            split: pyarrow.concat_tables([read(file) for file in files])
            for split, files in find_parquet_files_by_split(path).items()
        }
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{str(path)!r} cannot be read as Parquet ({error_in_one_line(error)})") from error


def find_parquet_files_by_split(path: Path) -> dict[str, list[Path]]:
    """Returns `{split: files}` for the Parquet files in a folder, with the splits "train", "test", "validation".

    Raises:
        UserError: several configurations in one folder.
    """
    groups: dict[str, list[Path]] = {}
    for file in [path] if path.is_file() else sorted(path.rglob("*.parquet")):
        name = re.split(r"[-_.]", file.name)[0].lower()
        split = SPLIT_NAMES.get(name, SPLIT_NAMES.get(file.parent.name.lower(), "train"))
        groups.setdefault(split, []).append(file)
    for split, files in groups.items():
        folders = sorted({str(file.parent) for file in files})
        if len(folders) > 1:
            raise UserError(f"{str(path)!r} has {split} files in several folders; give one of {', '.join(folders)}")
    return groups


def first_existing_column_name(table: Table, candidate_names: Iterable[str], role: str) -> str:
    """Returns the first of the candidate names that is a column of the table.

    Raises:
        UserError: the table has none of them.
    """
    candidate_names = list(candidate_names)
    for name in candidate_names:
        if name in table.column_names:
            return name
    raise UserError(
        f"the table has no {role} column {' or '.join(map(repr, candidate_names))}; its columns: {table.column_names}"
    )


def read_image_bytes(table: Table, name: str) -> list[bytes]:
    """Returns the encoded image of each row from a column of bytes, or of the hub's structs of bytes and path.

    Raises:
        UserError: a row holds no encoded image.
    """
    encoded = []
    for row, value in enumerate(table.column(name).to_pylist()):
        content = value.get("bytes") if isinstance(value, Mapping) else value
        if not isinstance(content, bytes):
            raise UserError(f"column {name!r} holds no encoded image in row {row}, but {type(content).__name__}")
        encoded.append(content)
    return encoded


def column_to_numpy(table: Table, name: str) -> NDArray[Any]:
    """Converts a table's column to a NumPy array, two-dimensional for lists of equal length.

    Raises:
        UserError: empty cells, or lists of different lengths.
    """
    values = table.column(name)
    if values.null_count:
        raise UserError(f"column {name!r} has {values.null_count} empty cells; fill or drop them")
    cells = values.to_numpy()
    if cells.dtype != object or not len(cells) or not isinstance(cells[0], np.ndarray | list):
        return np.asarray(cells)
    if len({len(row) for row in cells}) > 1:
        raise UserError(f"column {name!r} holds lists of different lengths")
    return np.stack([np.asarray(row) for row in cells])


def select_discrete_columns_without_missing(table: Table, skipped: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Returns the complete columns of integers, truth values and strings as `{name: array}`, without `skipped`."""
    import pyarrow.types as kinds

    usable = (kinds.is_integer, kinds.is_string, kinds.is_large_string, kinds.is_boolean)
    names = [field.name for field in table.schema if any(kind(field.type) for kind in usable)]
    names = [name for name in names if name not in set(skipped) and table.column(name).null_count == 0]
    return {name: column_to_numpy(table, name) for name in names}


def class_names_from_hub_metadata(table: Table, label_column: str) -> tuple[str, ...] | None:
    """Returns a label column's class names from the hub's metadata of Parquet files; None if there are none."""
    metadata = (table.schema.metadata or {}).get(b"huggingface")
    if metadata is None:
        return None
    try:
        node = parse_json(metadata)
    except ValueError:
        return None
    for key in ("info", "features", label_column, "names"):
        node = node.get(key) if isinstance(node, dict) else None
    return tuple(map(str, node)) if isinstance(node, list) and node else None
