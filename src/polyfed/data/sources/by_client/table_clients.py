"""Defines sources of clients whose rows lie in Arrow tables, Parquet files and Hugging Face datasets."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import create_private_folder_if_missing, open_file, open_file_for_overwrite
from polyfed.data.formats.files import resolve_existing_path
from polyfed.data.sources.by_client.grouped_clients import GroupedClients
from polyfed.data.sources.by_client.row_index import RowIndex, load_index, save_index

_ROWS_OF_BATCH = 65_536


@final
@dataclass(frozen=True, eq=False, repr=False)
class ArrowClients(GroupedClients):
    """Makes clients from the rows of an Arrow table, grouped by a column; the table may be memory-mapped.

    Args:
        table: a `pyarrow.Table`; its rows may be in any order.

    >>> import pyarrow
    >>> table = pyarrow.table({"user": ["b", "a", "b", "a"], "x": [0.5, 1.0, 2.0, 4.0], "label": [0, 1, 1, 0]})
    >>> source = ArrowClients(table, client_column="user", inputs=["x"], target="label")
    >>> source.ids, sorted(source.client("a").train.x.flatten().tolist() + source.client("a").test.x.flatten().tolist())
    (('a', 'b'), [1.0, 4.0])
    """

    table: Any

    def _column_names(self) -> Sequence[str]:
        return list(self.table.column_names)

    def _read_column(self, name: str) -> Iterator[Any]:
        yield from self.table[name].chunks

    @cached_property
    def _batches(self) -> tuple[list[Any], NDArray[np.int64]]:
        batches = self.table.select([*self._input_columns, self.target]).to_batches(_ROWS_OF_BATCH)
        return batches, _starts_of([batch.num_rows for batch in batches])

    def _read_rows(self, rows: NDArray[np.int64], columns: Sequence[str]) -> Any:
        batches, starts = self._batches
        return _take_rows(batches.__getitem__, starts, rows, columns)

    def _fingerprint(self) -> str:
        return f"arrow {self.table.num_rows} {self.table.schema.remove_metadata()}"


@final
@dataclass(frozen=True, eq=False, repr=False)
class DatasetClients(GroupedClients):
    """Makes clients from the rows of a dataset of the package `datasets` (Hugging Face), grouped by a column.

    Args:
        dataset: a `datasets.Dataset`, as `load_dataset(..., split="train")` returns it; it stays on the disk.
    """

    dataset: Any

    def _column_names(self) -> Sequence[str]:
        return list(self.dataset.column_names)

    def _read_column(self, name: str) -> Iterator[Any]:
        for batch in self.dataset.select_columns([name]).with_format("arrow").iter(_ROWS_OF_BATCH):
            yield batch[name]

    @cached_property
    def _arrow_dataset(self) -> Any:
        return self.dataset.select_columns([*self._input_columns, self.target]).with_format("arrow")

    def _read_rows(self, rows: NDArray[np.int64], columns: Sequence[str]) -> Any:
        return self._arrow_dataset[rows.tolist()]

    def _fingerprint(self) -> str:
        return f"dataset {len(self.dataset)} {getattr(self.dataset, '_fingerprint', '')}"


@final
@dataclass(frozen=True, eq=False, repr=False)
class ParquetClients(GroupedClients):
    """Makes clients from the rows of a Parquet file, or of the Parquet files of a folder, grouped by a column.

    Rows may be in any order. When the source is first used, the columns that it needs are copied once, batch by batch, to an
    uncompressed Arrow file that is memory-mapped, with an index of the rows of each client: so a client is read without
    decoding others' rows, and neither file is held in memory. Both files lie beside the data, and are made again if it
    changes.

    Args:
        path: a Parquet file, or a folder with several.
        cache_dir: where the two files go; None for beside the data.

    Raises:
        UserError: there is no such file or column, or the folder of the two files cannot be written.
    """

    path: str | Path
    cache_dir: str | Path | None = None

    @cached_property
    def _files(self) -> list[Path]:
        location = resolve_existing_path(str(self.path), "give the path of a Parquet file, or of a folder with some")
        files = sorted(location.glob("*.parquet")) if location.is_dir() else [location]
        if not files:
            raise UserError(f"{location} has no *.parquet; give the path of a Parquet file, or of a folder with some")
        return files

    @cached_property
    def _cache(self) -> Path:
        """Returns the path of the two files without their endings; its name changes with the data and the columns."""
        folder = self._files[0].parent if self.cache_dir is None else Path(self.cache_dir).expanduser()
        try:
            create_private_folder_if_missing(folder, parents=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {folder}: {error.strerror}; give another cache_dir") from error
        return folder / f"{Path(self._files[0]).stem}.clients-{hashlib.sha256(self._key.encode()).hexdigest()[:12]}"

    @cached_property
    def _key(self) -> str:
        files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in self._files]
        return repr((files, self.client_column, self._input_columns, self.target))

    def _column_names(self) -> Sequence[str]:
        import pyarrow.parquet

        try:
            with open_file(self._files[0], sys.maxsize) as file:
                return list(pyarrow.parquet.ParquetFile(file).schema_arrow.names)
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError(f"{self._files[0]} cannot be read as Parquet: {error}") from error

    def _iterate_batches(self, columns: Sequence[str]) -> Iterator[Any]:
        import pyarrow.parquet

        for path in self._files:
            with open_file(path, sys.maxsize) as file:
                yield from pyarrow.parquet.ParquetFile(file).iter_batches(_ROWS_OF_BATCH, columns=list(columns))

    def _read_column(self, name: str) -> Iterator[Any]:
        for batch in self._iterate_batches([name]):
            yield batch.column(name)

    def _build_index(self) -> RowIndex:
        file = self._cache.with_name(f"{self._cache.name}.npz")
        index = load_index(file, self._key)
        if index is None:
            index = super()._build_index()
            save_index(file, index, self._key)
        return index

    @cached_property
    def _batch_reader_and_starts(self) -> tuple[Callable[[int], Any], NDArray[np.int64]]:
        """Opens the columns' memory-mapped copy, made if missing; returns a batch reader and batches' first rows."""
        import pyarrow

        file = self._cache.with_name(f"{self._cache.name}.arrow")
        if not file.is_file():
            self._write_copy(file)
        reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(file)))
        sizes = [reader.get_batch(place).num_rows for place in range(reader.num_record_batches)]
        return reader.get_batch, _starts_of(sizes)

    def _write_copy(self, file: Path) -> None:
        import pyarrow

        # Named by the process, since several may make the copy at once.
        partial = file.with_name(f".partial-{os.getpid()}-{file.name}")
        columns = list(dict.fromkeys([*self._input_columns, self.target]))
        try:
            with open_file_for_overwrite(partial) as sink:
                writer = None
                for batch in self._iterate_batches(columns):
                    writer = pyarrow.ipc.new_file(sink, batch.schema) if writer is None else writer
                    writer.write_batch(batch)
                if writer is not None:
                    writer.close()
            os.replace(partial, file)
        except OSError as error:
            raise UserError(f"cannot write {file}: {error}; give a folder with room, cache_dir=...") from error

    def _read_rows(self, rows: NDArray[np.int64], columns: Sequence[str]) -> Any:
        get_batch, starts = self._batch_reader_and_starts
        return _take_rows(get_batch, starts, rows, columns)

    def _fingerprint(self) -> str:
        return f"parquet {[(file.name, file.stat().st_size) for file in self._files]}"


def _starts_of(sizes: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _take_rows(
    get_batch: Callable[[int], Any], starts: NDArray[np.int64], rows: NDArray[np.int64], columns: Sequence[str]
) -> Any:
    """Returns rows of a table in batches as an Arrow table; reads the batches alone that have some of them.

    Args:
        get_batch: returns the batch at a place.
        starts: number of the first row of each batch, and last the number of all rows.
        rows: ascending.
        columns: the names of the columns.
    """
    import pyarrow

    names = list(dict.fromkeys(columns))
    places = np.searchsorted(starts, rows, side="right") - 1
    parts = []
    for place in np.unique(places):
        batch = get_batch(int(place)).select(names)
        parts.append(batch.take(pyarrow.array(rows[places == place] - starts[place])))
    return pyarrow.Table.from_batches(parts)
