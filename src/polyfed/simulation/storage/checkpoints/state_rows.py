"""Reads and writes the rows of the SQLite file in which the states of clients are stored."""

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

from polyfed.core.errors import UserError
from polyfed.core.machine.memory_limit import total_memory_bytes
from polyfed.core.serialization import serialize_state
from polyfed.core.state_dict import PyTree

PRIVATE_PART = ""  # the private states of clients; other parts are groups of the server's state
_PIECE_BYTES = 2**28  # SQLite stores no value above 10^9 bytes
_HASH_RANGE = 2**256
_PRAGMAS = (
    "trusted_schema = OFF",  # the file may come from somebody else
    "cell_size_check = ON",
    "page_size = 16384",
    "locking_mode = EXCLUSIVE",  # no shared memory, which network file systems lack
    "journal_mode = WAL",
    "synchronous = FULL",
)
_SCHEMA = (
    "CREATE TABLE states (part TEXT NOT NULL, client BLOB NOT NULL, round INTEGER NOT NULL, until INTEGER, "
    "hash BLOB NOT NULL, first INTEGER NOT NULL, pieces INTEGER NOT NULL, PRIMARY KEY (part, client, round)) WITHOUT ROWID",
    "CREATE INDEX replaced ON states (until, round) WHERE until IS NOT NULL",
    "CREATE INDEX written ON states (round)",
    "CREATE TABLE pieces (id INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    "CREATE TABLE sums (round INTEGER PRIMARY KEY, rows INTEGER NOT NULL, hash BLOB NOT NULL)",
)
VALID_AFTER_ROUND = "round <= :round AND (until IS NULL OR until > :round)"


class StateRow(NamedTuple):
    """Describes where the bytes of a state are: the id of their first piece, and the number of pieces."""

    part: str
    client: str
    round: int
    hash: bytes
    first: int
    pieces: int


@final
class RowHashSum:
    """Counts rows and adds up their hashes, whatever their order."""

    def __init__(self, rows: int = 0, total: int = 0) -> None:
        self.rows, self.total = rows, total

    def add(self, row_hash: bytes, sign: int = 1) -> None:
        """Adds a row, or with sign −1 takes it away."""
        self.rows += sign
        self.total = (self.total + sign * int.from_bytes(row_hash)) % _HASH_RANGE

    def as_text(self) -> dict[str, str]:
        """Returns the number of rows and the sum of their hashes, for `complete.json`."""
        return {"rows": str(self.rows), "sum": f"{self.total:064x}"}


def insert_state(
    connection: sqlite3.Connection, key: tuple[str, str, int], state: PyTree, first: int, total: RowHashSum
) -> StateRow:
    """Replaces a client's state, and updates the sum of hashes; `first` is the id of its first piece."""
    part, client, round_number = key
    data = serialize_state(state)
    pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]
    row = StateRow(*key, _hash_row(key, data), first, len(pieces))
    where = (part, encode_client_id(client))
    last = connection.execute(
        "SELECT hash FROM states WHERE part = ? AND client = ? AND until IS NULL", where
    ).fetchone()
    if last is not None:
        total.add(last[0], -1)
        connection.execute(
            "UPDATE states SET until = ? WHERE part = ? AND client = ? AND until IS NULL", (round_number, *where)
        )
    connection.executemany("INSERT INTO pieces VALUES (?, ?)", enumerate(pieces, first))
    connection.execute(
        "INSERT INTO states VALUES (?, ?, ?, NULL, ?, ?, ?)", (*where, round_number, row.hash, first, row.pieces)
    )
    total.add(row.hash)
    return row


def remove_rows_after(connection: sqlite3.Connection, round_number: int) -> bool:
    """Removes rows after a round, and puts back those that they replaced; returns whether there were any."""
    later = {"round": round_number}
    any_removed = _remove_rows(connection, "round > :round", later)
    connection.execute("UPDATE states SET until = NULL WHERE until > :round", later)
    connection.execute("DELETE FROM sums WHERE round > :round", later)
    return any_removed


def remove_unneeded_rows(connection: sqlite3.Connection, needed_rounds: list[int]) -> None:
    """Removes the rows that are in no checkpoint of the given rounds, in ascending order."""
    for before, after in zip([-1, *needed_rounds], needed_rounds, strict=False):
        gap = {"before": before, "after": after}  # rows that came after the one and went until the other
        _remove_rows(connection, "until > :before AND until <= :after AND round > :before", gap)
    connection.execute(f"DELETE FROM sums WHERE round NOT IN ({', '.join('?' * len(needed_rounds))})", needed_rounds)


def _remove_rows(connection: sqlite3.Connection, condition: str, values: Mapping[str, int]) -> bool:
    """Removes the rows that fulfil a condition, with their pieces; returns whether there were any."""
    rows = connection.execute(f"SELECT first, first + pieces FROM states WHERE {condition}", values).fetchall()
    connection.executemany("DELETE FROM pieces WHERE id >= ? AND id < ?", rows)
    connection.execute(f"DELETE FROM states WHERE {condition}", values)
    return bool(rows)


def sum_of_rows(connection: sqlite3.Connection, round_number: int) -> RowHashSum:
    """Returns the sum of the hashes of the rows after a round, the last that was written."""
    stored = connection.execute("SELECT rows, hash FROM sums WHERE round = ?", (round_number,)).fetchone()
    if stored is not None:
        return RowHashSum(stored[0], int.from_bytes(stored[1]))
    total = RowHashSum()
    for (row_hash,) in connection.execute("SELECT hash FROM states WHERE until IS NULL"):
        total.add(row_hash)
    return total


def check_round_is_stored(connection: sqlite3.Connection, round_number: int) -> None:
    """Raises a `UserError` if the rows of a round's checkpoint may have been removed, because it is not kept any more."""
    if connection.execute("SELECT 1 FROM sums WHERE round = ?", (round_number,)).fetchone() is None:
        raise UserError(
            f"the clients' states after round {round_number} are not stored any more, since the run went on; read them "
            "from a run that ends there"
        )


def find_row(connection: sqlite3.Connection, part: str, client: str, round_number: int) -> tuple[StateRow, bool] | None:
    """Returns a client's row after a round (None if it had no state), and whether it is the newest.

    Raises:
        UserError: the round's states are not stored any more.
    """
    columns = "round, hash, first, pieces, until"
    query = f"SELECT {columns} FROM states WHERE part = :part AND client = :client AND {VALID_AFTER_ROUND}"
    values = {"part": part, "client": encode_client_id(client), "round": round_number}
    row = connection.execute(query, values).fetchone()
    if row is None:
        check_round_is_stored(connection, round_number)
        return None
    return StateRow(part, client, *row[:4]), row[4] is None


def read_state_bytes(connection: sqlite3.Connection, row: StateRow) -> bytes:
    """Returns the bytes of a state; raises a `UserError` if they are not those that were written."""
    where, limits = (row.first, row.first + row.pieces), "id >= ? AND id < ?"
    size = connection.execute(f"SELECT sum(length(data)) FROM pieces WHERE {limits}", where).fetchone()[0]
    if (size or 0) > total_memory_bytes():
        raise UserError(f"{_describe_row(row)} has {size} bytes, more than the memory of this machine")
    pieces = connection.execute(f"SELECT data FROM pieces WHERE {limits} ORDER BY id", where).fetchall()
    data = b"".join(piece for (piece,) in pieces)
    if _hash_row((row.part, row.client, row.round), data) != row.hash:
        raise UserError(f"{_describe_row(row)} does not match its checksum")
    return data


def connect_to_store(path: Path) -> sqlite3.Connection:
    """Opens the file, and creates its tables if it is empty; raises an `sqlite3.DatabaseError` if it has others."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        # Compared before anything else is asked: views and triggers of a file from outside would run.
        query = "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY rowid"
        statements: list[Any] = [sql for (sql,) in connection.execute(query)]
        if not statements:
            for statement in ("BEGIN", *_SCHEMA, "COMMIT"):
                connection.execute(statement)
        elif statements != list(_SCHEMA):
            raise sqlite3.DatabaseError("it has other tables than the states of clients")
    except BaseException:
        connection.close()
        raise
    return connection


def _hash_row(key: tuple[str, str, int], data: bytes) -> bytes:
    return hashlib.sha256(json.dumps(key).encode() + data).digest()


def _describe_row(row: StateRow) -> str:
    place = "" if row.part == PRIVATE_PART else f" in {row.part!r} of the server's state"
    return f"the state of client {row.client!r}{place}"


def encode_client_id(client: str) -> bytes:
    """Returns a client id as the bytes by which its rows are found; their order is that of the ids."""
    return client.encode(errors="surrogatepass")


def decode_client_id(key: bytes) -> str:
    """Returns the client id of `encode_client_id`'s bytes; raises a `UnicodeDecodeError` for other bytes."""
    return key.decode(errors="surrogatepass")
