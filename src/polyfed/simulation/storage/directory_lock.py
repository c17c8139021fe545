"""Locks the directory of a run or comparison, so that it has one writer at a time."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import IO
from weakref import WeakValueDictionary

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import open_lock_file

_HELD_LOCKS: WeakValueDictionary[tuple[int, int], IO[str]] = WeakValueDictionary()  # files that this process has locked
_STALE_SECONDS = (
    3600  # age from which on a partial file is of a process that was killed, and not of a reader that reports
)


def lock_directory(folder: Path) -> IO[str]:
    """Locks a directory of polyfed against other writers, until the returned file is closed.

    Partial files of processes that were killed an hour ago or before are removed.

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
    _remove_stale_partial_files(folder)
    return file


def check_lock_in_place(folder: Path, file: IO[str]) -> None:
    """Raises a UserError if the directory that `lock_directory` locked is no longer at this path."""
    with suppress(FileNotFoundError):
        if _file_identity((folder / ".lock").stat()) == _file_identity(os.fstat(file.fileno())):
            return
    raise UserError(
        f"the directory {folder} was deleted or moved while polyfed wrote to it; if it was moved, resume it where it is now"
    )


def _remove_stale_partial_files(folder: Path) -> None:
    oldest = time.time() - _STALE_SECONDS
    for partial in (*folder.glob(".partial-*"), *folder.glob("*/.partial-*")):
        with suppress(OSError):  # another process may have finished or removed it
            if partial.is_file() and partial.stat().st_mtime < oldest:
                partial.unlink()


def _file_identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
