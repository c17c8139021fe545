"""Builds an index of which rows of a table are whose, without reading more than one column, and keeps it in a file."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, final
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import read_file, write_file_atomically


@final
@dataclass(frozen=True, eq=False)
class RowIndex:
    """Holds the rows of each client of a table.

    Attributes:
        ids: of the clients, sorted.
        starts: where the rows of each client begin in `rows`, and last their number, shape (clients + 1,).
        rows: numbers of rows, those of each client ascending.
    """

    ids: tuple[str, ...]
    starts: NDArray[np.int64]
    rows: NDArray[np.int64]

    def rows_at(self, place: int | np.signedinteger[Any]) -> NDArray[np.int64]:
        """Returns the rows of the client at a place of `ids`."""
        return self.rows[self.starts[place] : self.starts[place + 1]]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Returns the number of rows of each client."""
        return np.diff(self.starts)

    def without_small_clients(self, least: int) -> "RowIndex":
        """Returns the index of the clients that have at least this many rows."""
        large_places = np.flatnonzero(self.counts >= least)
        if len(large_places) == len(self.ids):
            return self
        parts = [self.rows_at(place) for place in large_places]
        starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        rows = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return RowIndex(tuple(self.ids[place] for place in large_places), starts, rows)


def index_rows(columns: Iterable[Any], name: str) -> RowIndex:
    """Builds the index from the column that names the client of each row; the column comes in parts.

    Args:
        columns: Arrow arrays or chunked arrays.
        name: of the column, for error messages.

    Raises:
        UserError: a row without a client.

    >>> import pyarrow
    >>> index = index_rows([pyarrow.array(["b", "a"]), pyarrow.array(["b"])], "user")
    >>> index.ids, index.rows_at(1).tolist()
    (('a', 'b'), [0, 2])
    """
    code_by_id: dict[str, int] = {}
    parts: list[NDArray[np.int32]] = []
    for column in columns:
        encoded = column.combine_chunks() if hasattr(column, "combine_chunks") else column
        if any(word in str(encoded.type) for word in ("list", "struct", "map")):
            raise UserError(f"column {name!r} is of {encoded.type}, and clients have texts or numbers as names")
        encoded = encoded.dictionary_encode() if not hasattr(encoded, "dictionary") else encoded
        values = encoded.dictionary.to_pylist()
        # Empty, or NaN.
        empty_codes = [code for code, value in enumerate(values) if value is None or value == "" or value != value]
        places = encoded.indices.to_numpy(zero_copy_only=False)
        if encoded.null_count or (empty_codes and bool(np.isin(places, empty_codes).any())):
            raise UserError(f"column {name!r} has rows without a client; fill them, or leave these rows out")
        codes = [code_by_id.setdefault(str(value), len(code_by_id)) for value in values]
        parts.append(np.asarray(codes, dtype=np.int32)[places] if len(places) else np.zeros(0, dtype=np.int32))
    if not code_by_id:
        raise UserError(f"column {name!r} has no rows")
    ids = sorted(code_by_id)
    place_of_code = np.empty(len(ids), dtype=np.int32)
    place_of_code[[code_by_id[i] for i in ids]] = np.arange(len(ids), dtype=np.int32)
    places = place_of_code[np.concatenate(parts)]
    rows = np.argsort(places, kind="stable").astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(np.bincount(places, minlength=len(ids)))]).astype(np.int64)
    used = np.flatnonzero(np.diff(starts))  # a dictionary may have values that no row has
    if len(used) < len(ids):
        ids, starts = [ids[place] for place in used], np.concatenate([starts[used], starts[-1:]])
    return RowIndex(tuple(ids), starts, rows)


def load_index(file: Path, key: str) -> RowIndex | None:
    """Reads an index that `save_index` has written; None if there is none, or it is of another table or damaged."""
    try:
        with np.load(BytesIO(read_file(file, None)), allow_pickle=False) as stored:
            if str(stored["key"]) != key:
                return None
            text, ends = stored["ids"].tobytes(), stored["ends"]
            starts, rows = stored["starts"].astype(np.int64), stored["rows"].astype(np.int64)
        bounds = np.concatenate([[0], ends])
        ids = tuple(text[a:b].decode() for a, b in pairwise(bounds))
    except (OSError, ValueError, KeyError, EOFError, UnicodeDecodeError, BadZipFile):
        return None
    whole = len(starts) == len(ids) + 1 and len(rows) == starts[-1] and list(ids) == sorted(ids)
    return RowIndex(ids, starts, rows) if whole else None


def save_index(file: Path, index: RowIndex, key: str) -> None:
    """Writes an index to a file for `load_index`; `key` identifies the table."""
    encoded = [client.encode() for client in index.ids]
    content = BytesIO()
    ids, ends = np.frombuffer(b"".join(encoded), dtype=np.uint8), np.cumsum([len(i) for i in encoded])
    np.savez(content, key=np.array(key), ids=ids, ends=ends, starts=index.starts, rows=index.rows)
    if os.access(file.parent, os.W_OK):
        write_file_atomically(file, content.getvalue())
