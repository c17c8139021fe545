"""Reads and damages the SQLite file with the states of clients, as a disk or somebody else would."""

import sqlite3
from contextlib import closing


def change_rows(path, statement, *values):
    """Runs a statement on the file; returns the rows that it selects."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return connection.execute(statement, values).fetchall()


def damage_states(path, client, round_number=None):
    """Changes the last byte of a client's states, of one round or of all."""
    rows = change_rows(path, "SELECT first + pieces - 1, round FROM states WHERE client = ?", client.encode())
    for piece, number in rows:
        if round_number in (None, number):
            ((data,),) = change_rows(path, "SELECT data FROM pieces WHERE id = ?", piece)
            change_rows(path, "UPDATE pieces SET data = ? WHERE id = ?", data[:-1] + bytes([data[-1] ^ 1]), piece)
