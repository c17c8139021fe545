"""Locks the directory of a run or comparison, so that it has one writer at a time."""

import os
from contextlib import suppress
from pathlib import Path
from typing import IO
from weakref import WeakValueDictionary

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import open_lock_file

_HELD_LOCKS: WeakValueDictionary[tuple[int, int], IO[str]] = WeakValueDictionary()  # files that this process has locked


def lock_directory(folder: Path) -> IO[str]:
    """Locks a directory of polyfed against other writers, until the returned file is closed.

    Raises:
        UserError: another process, or another part of this one, holds the lock.
        OSError: the lock file cannot be opened; the exception names it.
    """
    path = folder / ".lock"
    error = UserError(f"another process is writing to the directory {folder}; wait for it or stop it")
    # The system's lock is that of the process, and opening the file again here would release it.
    if path.exists() and not getattr(_HELD_LOCKS.get(_file_identity(path.stat())), "closed", True):
        raise error
    file = open_lock_file(path)
    with suppress(ImportError):  # Windows has no advisory locks; there the user must avoid two processes
        import fcntl

        try:
            # Released when the process ends; forked workers do not inherit it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as reason:
            file.close()
            raise error from reason
    _HELD_LOCKS[_file_identity(os.fstat(file.fileno()))] = file
    return file


def _file_identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
