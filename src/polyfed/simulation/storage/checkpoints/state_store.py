"""Stores the states of clients in one SQLite file, a row per state, so that a checkpoint writes only the states that
changed, and reading the states of a round's clients costs those alone.

A row has the round whose checkpoint first held it (`round`) and the round in which another took its place (`until`, null
until then): the states of a checkpoint are the rows with `round` up to its own and `until` after it. So the rows of all
kept checkpoints lie side by side, and a row that was written for a checkpoint which never came to be changes none of
them. Each row has the SHA-256 of its part, client, round and bytes; the sum of these hashes stands in the checkpoint's
`complete.json`, so that a damaged, exchanged or missing row is found.
"""

import errno
import os
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple, final

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import PRIVATE_FILE_MODE, flush_folder_to_disk
from polyfed.core.serialization import deserialize_state
from polyfed.core.state_dict import PyTree, iter_tensors
from polyfed.simulation.storage.checkpoints.state_rows import (
    VALID_AFTER_ROUND,
    RowHashSum,
    StateRow,
    check_round_is_stored,
    connect_to_store,
    decode_client_id,
    find_row,
    insert_state,
    read_state_bytes,
    remove_rows_after,
    remove_unneeded_rows,
    sum_of_rows,
)

STORE_FILE = "states.sqlite"  # in the folder of the checkpoints
_SIDE_FILES = ("-wal", "-shm", "-journal")
_CACHED_BYTES = 2**30  # of states that stay in memory too, so that runs with small states read nothing back
_ENTRY_BYTES = 500  # of a cached state, and of each of its tensors, besides the tensors' values
_TRIAL_BYTES = 2**16  # written to find out why a write failed
_DAMAGED = (sqlite3.Error, OverflowError, TypeError, UnicodeDecodeError)  # what reading a damaged file raises


class _CachedState(NamedTuple):
    """Holds the newest state of a client in memory, with the round of its row."""

    round: int
    state: PyTree
    nbytes: int


@final
class StateStore:
    """Reads and writes the SQLite file with the states of clients; holds the newest states in memory up to a size.

    The first write opens the file and keeps it open until `close`; at other times each call opens and closes it, so that
    several results of one run can be read side by side.

    Args:
        path: the file; it is created when the first state is written.
        keeps_open: the first read keeps it open as well.
    """

    def __init__(self, path: Path, *, keeps_open: bool = False) -> None:
        self.path, self._keeps_open = path, keeps_open
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.RLock()  # methods read the states of several clients in threads
        self._cache: dict[tuple[str, str], _CachedState] = {}
        self._cached_bytes = 0

    def close(self) -> None:
        """Closes the file; later calls open and close it."""
        with self._lock:
            connection, self._connection, self._keeps_open = self._connection, None, False
            if connection is not None:
                connection.close()

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self, part: str, client: str, round_number: int) -> PyTree:
        """Returns a client's state as it was after a round, whose checkpoint must be kept.

        Args:
            part: `PRIVATE_PART`, or a group of the server's state.
            client: its id.
            round_number: that of the checkpoint.

        Raises:
            KeyError: the client had no state.
            UserError: the state is damaged.
        """
        with self._lock:
            cached = self._cache.get((part, client))
            if cached is not None and cached.round <= round_number:
                return cached.state
            with self._reading() as connection:
                row_and_age = find_row(connection, part, client, round_number)
                if row_and_age is None:
                    raise KeyError(client)
                row, is_newest = row_and_age
                state = deserialize_state(read_state_bytes(connection, row))
            if is_newest:
                self._keep_in_memory(row, state)
            return state

    def contains(self, part: str, client: str, round_number: int) -> bool:
        """Returns whether a client had a state after a round."""
        with self._lock, self._reading() as connection:
            return find_row(connection, part, client, round_number) is not None

    def client_ids(self, part: str, round_number: int) -> list[str]:
        """Returns the sorted ids of the clients that had a state after a round."""
        with self._lock, self._reading() as connection:
            check_round_is_stored(connection, round_number)
            query = f"SELECT client FROM states WHERE part = :part AND {VALID_AFTER_ROUND} ORDER BY client"
            return [
                decode_client_id(key) for (key,) in connection.execute(query, {"part": part, "round": round_number})
            ]

    def count(self, part: str, round_number: int) -> int:
        """Returns the number of clients that had a state after a round."""
        with self._lock, self._reading() as connection:
            check_round_is_stored(connection, round_number)
            query = f"SELECT count(*) FROM states WHERE part = :part AND {VALID_AFTER_ROUND}"
            return int(connection.execute(query, {"part": part, "round": round_number}).fetchone()[0])

    def check(self, round_number: int, expected: Mapping[str, str]) -> None:
        """Raises a `UserError` unless all states of a round have the bytes written, one in memory at a time.

        Args:
            round_number: that of the checkpoint.
            expected: the number of rows and the sum of their hashes, from `complete.json`.

        Raises:
            UserError: a state is damaged or missing; the message names it, or says which file lacks it.
        """
        total = RowHashSum()
        with self._lock, self._reading() as connection:
            query = (
                f"SELECT part, client, round, hash, first, pieces FROM states WHERE {VALID_AFTER_ROUND} ORDER BY first"
            )
            # Closed whatever happens: a cursor that is not at its end keeps the file locked.
            with closing(connection.execute(query, {"round": round_number})) as rows:
                for part, key, *others in rows:
                    row = StateRow(part, decode_client_id(key), *others)
                    read_state_bytes(connection, row)
                    total.add(row.hash)
        if total.as_text() != expected:
            raise UserError(f"{self.path.name} does not hold the states of clients that were saved with it")

    # -- writing --------------------------------------------------------------------------------------------------

    def write(
        self,
        round_number: int,
        previous_round: int,
        changes: Mapping[str, Iterable[tuple[str, PyTree]]],
        replaced_parts: Collection[str],
        needed_rounds: Collection[int],
    ) -> dict[str, str]:
        """Writes and flushes a checkpoint's changed states, all or none, and removes rows of no use.

        Args:
            round_number: that of the checkpoint.
            previous_round: that of the checkpoint before, whose other states stay; later rows are removed. 0 removes all.
            changes: part -> (client, new state).
            replaced_parts: parts whose states are all in `changes`: clients that are not there have none any more.
            needed_rounds: the rounds of the checkpoints that are on disk.

        Returns:
            The number of rows of the checkpoint and the sum of their hashes, for `complete.json`.

        Raises:
            OSError: the file cannot be written.
        """
        with self._lock, self._writing() as connection:
            if remove_rows_after(connection, previous_round):
                self._clear_cache()
            remove_unneeded_rows(connection, sorted({*needed_rounds, previous_round}))
            total = sum_of_rows(connection, previous_round)
            for part in replaced_parts:
                query = "SELECT hash FROM states WHERE part = ? AND until IS NULL"
                for (row_hash,) in connection.execute(query, (part,)):
                    total.add(row_hash, -1)
                connection.execute("UPDATE states SET until = ? WHERE part = ? AND until IS NULL", (round_number, part))
                for key in [key for key in self._cache if key[0] == part]:
                    self._forget(key)
            next_piece = 1 + int(connection.execute("SELECT coalesce(max(id), 0) FROM pieces").fetchone()[0])
            for part, states in changes.items():
                for client, state in states:
                    row = insert_state(connection, (part, client, round_number), state, next_piece, total)
                    next_piece += row.pieces
                    self._keep_in_memory(row, state)
            connection.execute(
                "INSERT INTO sums VALUES (?, ?, ?)", (round_number, total.rows, total.total.to_bytes(32))
            )
        return total.as_text()

    def roll_back(self, round_number: int) -> None:
        """Removes all rows of later rounds, so that the states are those after a round; round 0 removes the file.

        Raises:
            OSError: the file cannot be written.
        """
        with self._lock:
            self._clear_cache()
            if round_number == 0:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                for path in (self.path, *(Path(f"{self.path}{end}") for end in _SIDE_FILES)):
                    path.unlink(missing_ok=True)
            elif self.path.exists():
                with self._writing() as connection:
                    remove_rows_after(connection, round_number)

    # -- the file -------------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Yields a connection for reading; errors of SQLite become a `UserError` that names the file."""
        try:
            if self._connection is None:
                self._check_is_file()
            connection = self._connection or connect_to_store(self.path)
            if self._keeps_open:
                self._connection = connection
            try:
                yield connection
            finally:
                if connection is not self._connection:
                    connection.close()
        except _DAMAGED as error:
            raise UserError(f"{self.path.name} cannot be read ({error})") from error

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Yields a connection for one transaction; SQLite's errors become an `OSError` with the file's name."""
        try:
            if self._connection is None:
                self._connection = self._open_or_create()
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                self._clear_cache()  # it may hold states of this transaction
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            reason = OSError(errno.ENOSPC, str(error)) if is_full else self._error_of_writing(error)
            raise OSError(reason.errno, reason.strerror, str(self.path)) from error

    def _error_of_writing(self, error: sqlite3.Error) -> OSError:
        """Returns the system's error behind SQLite's "disk I/O error", by trying to write such a file."""
        with suppress(OSError):  # a database that is not there has no size
            size = self.path.stat().st_size
            try:
                with TemporaryFile(dir=self.path.parent, buffering=0) as trial:
                    trial.seek(size)
                    trial.write(bytes(_TRIAL_BYTES))
                    trial.write(b"0")  # the first write of too much may have been partial
            except OSError as reason:
                return reason
        return OSError(errno.EIO, str(error))

    def _check_is_file(self) -> None:
        if self.path.is_symlink() or not self.path.is_file():
            problem = (
                "is missing" if not os.path.lexists(self.path) else "is a link or no file; put a regular file there"
            )
            raise UserError(f"{self.path} {problem}")

    def _open_or_create(self) -> sqlite3.Connection:
        is_new = not os.path.lexists(self.path)
        if is_new:
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)
            os.close(os.open(self.path, flags, PRIVATE_FILE_MODE))  # SQLite gives its other files the same mode
        self._check_is_file()
        connection = connect_to_store(self.path)
        if is_new:
            try:
                flush_folder_to_disk(self.path.parent)
            except OSError:
                connection.close()  # left open, it would lock the file, and the next error would hide this one
                raise
        return connection

    # -- states in memory -----------------------------------------------------------------------------------------

    def _keep_in_memory(self, row: StateRow, state: PyTree) -> None:
        """Keeps a client's newest state in memory, unless that would be too much."""
        key = row.part, row.client
        self._forget(key)
        nbytes = _ENTRY_BYTES + sum(_ENTRY_BYTES + tensor.nbytes for tensor in iter_tensors(state))
        if self._cached_bytes + nbytes <= _CACHED_BYTES:
            self._cache[key] = _CachedState(row.round, state, nbytes)
            self._cached_bytes += nbytes

    def _forget(self, key: tuple[str, str]) -> None:
        cached = self._cache.pop(key, None)
        self._cached_bytes -= 0 if cached is None else cached.nbytes

    def _clear_cache(self) -> None:
        self._cache.clear()
        self._cached_bytes = 0
