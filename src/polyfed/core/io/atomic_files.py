"""Reads and writes all files of polyfed, so that crashes, symbolic links and hostile files do no harm.

At any moment a file is the old one or the new one, and it is on the disk when the function returns. No symbolic link
redirects a write: a run directory that somebody else made, or may write to, cannot make polyfed overwrite other files. Files
of a run hold what was learnt from data, so only their owner can read them: files have mode 0600, folders 0700.

Only a regular file of plausible size is read. Anything else (a pipe that nobody writes to, a device that never ends, a
sparse file of a terabyte, a link to nothing) raises an error before a byte of it is read.
"""

import errno
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from polyfed.core.errors import UserError

PRIVATE_FILE_MODE, PRIVATE_FOLDER_MODE = 0o600, 0o700
_SHARED_FILE_MODE, _SHARED_FOLDER_MODE = 0o666, 0o777  # for files that a user asked for by name; the umask applies
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_BLOCK = 2**16  # bytes per read while searching backwards for the last line
_DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, a quota, a limit on a file's size
MAX_TEXT_BYTES = 256 * 2**20  # bytes of a file of settings, results or descriptions
MAX_ROUNDS_BYTES = 2**30  # bytes of `metrics.jsonl`, which has a record per round
UNLIMITED_BYTES = 2**63  # for a file that is read in pieces
_READ_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
# Windows flushes only what it may write.
_FLUSH_FLAGS = _READ_FLAGS | (os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
_KINDS = {
    stat.S_IFIFO: "it is a named pipe", stat.S_IFSOCK: "it is a socket", stat.S_IFDIR: os.strerror(errno.EISDIR),
    stat.S_IFCHR: "it is a device", stat.S_IFBLK: "it is a device",
}  # fmt: skip


def create_private_folder_if_missing(path: Path, *, parents: bool = False) -> Path:
    """Creates a folder that only the user can enter, or leaves an existing one unchanged; returns its path.

    Args:
        path: the folder.
        parents: whether missing folders above it are created too; with the umask's mode, or private inside a private folder.

    Raises:
        UserError: `path` is a symbolic link, which would redirect what is written.
        OSError: the folder cannot be created; the exception names it.
    """
    for missing in reversed([above for above in path.parents if parents and not above.exists()]):
        is_private = not stat.S_IMODE(missing.parent.stat().st_mode) & 0o077
        missing.mkdir(mode=PRIVATE_FOLDER_MODE if is_private else _SHARED_FOLDER_MODE, exist_ok=True)
    if path.is_symlink():
        raise UserError(
            f"{path} is a symbolic link to {os.readlink(path)!r}, where polyfed does not write; remove the link"
        )
    path.mkdir(mode=PRIVATE_FOLDER_MODE, exist_ok=True)
    return path


def remove_file_or_folder(path: Path) -> None:
    """Removes a folder with all that is in it, or a file; of a symbolic link the link, not what it leads to.

    Raises:
        OSError: it cannot be removed; the exception names it.
    """
    if path.is_dir() and not path.is_symlink():
        try:
            shutil.rmtree(path)
        except OSError as error:  # which names a file without its folder
            raise OSError(error.errno, error.strerror, str(path)) from error
    else:
        path.unlink(missing_ok=True)


@contextmanager
def open_file_for_overwrite(path: Path, *, private: bool = True, sync: bool = True) -> Iterator[IO[bytes]]:
    """Yields a new file in place of any at `path`, flushed to the disk at the end of the `with` block.

    If writing fails, no file is left.

    Args:
        path: the file; a link of this name is removed, not followed.
        private: whether only its owner can read it.
        sync: False if the caller flushes it to the disk later, together with other files.

    Raises:
        OSError: it cannot be written; the exception names it.
    """
    with _file_named_in_errors(path):
        path.unlink(missing_ok=True)
        mode = PRIVATE_FILE_MODE if private else _SHARED_FILE_MODE
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _NO_LINK | getattr(os, "O_BINARY", 0), mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                if sync:
                    os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):  # a partial file occupies disk space that is needed
                path.unlink()
            raise


@contextmanager
def open_atomic_file(path: Path, *, private: bool = True, sync: bool = True) -> Iterator[IO[bytes]]:
    """Yields a temporary file that replaces `path` at the end of the `with` block, unless it raised.

    A link of this name is replaced, not followed. Several processes may do this at once: the file is then that of one of
    them, whole. Arguments and errors are those of `open_file_for_overwrite`.
    """
    partial = path.with_name(f".partial-{secrets.token_hex(8)}")
    with _file_named_in_errors(path, partial):
        try:
            with open_file_for_overwrite(partial, private=private, sync=sync) as file:
                yield file
            partial.replace(path)  # which Windows does also where the file exists
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        if sync:
            flush_folder_to_disk(path.parent)


def write_file_atomically(path: Path, data: bytes, *, private: bool = True) -> None:
    """Writes and flushes a file that has its old or all of its new content after a crash.

    Args:
        path: the file; a link of this name is replaced, not followed.
        data: its content.
        private: whether only its owner can read it; False for a file that the user asked for by name, such as a page to
            share.

    Raises:
        OSError: it cannot be written; the exception names it.
    """
    with open_atomic_file(path, private=private) as file:
        file.write(data)


def append_line_and_flush(path: Path, line: str) -> None:
    """Appends a line to a file, and flushes it to the disk.

    A partial line at the end, from a full disk or a killed process, is removed first. If the new line cannot be written
    whole, none of it stays.

    Raises:
        UserError: `path` is a link, or no file.
        OSError: it cannot be written; the exception names it.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(f"{path} is a link or no file, where polyfed does not write; remove it")
    new = not path.exists()
    with _file_named_in_errors(path):
        descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR | _NO_LINK, PRIVATE_FILE_MODE)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            size = _end_of_last_line(file)
            if size < file.seek(0, os.SEEK_END):
                file.truncate(size)
            try:
                remaining = memoryview(f"{line}\n".encode())
                while remaining:  # a disk that becomes full takes a part of the line, and raises at the next call
                    remaining = remaining[file.write(remaining) :]
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    file.truncate(size)
                raise
        if new:
            flush_folder_to_disk(path.parent)


def _end_of_last_line(file: IO[bytes]) -> int:
    """Returns the byte position just after the last complete line of a file."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - _BLOCK)
        file.seek(begin)
        if (place := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + place + 1
        end = begin
    return 0


def open_lock_file(path: Path) -> IO[str]:
    """Returns an empty open file, which the caller can lock.

    Raises:
        UserError: `path` is a pipe, at which opening would wait.
        OSError: it cannot be opened, or it is a link; the exception names it.
    """
    if path.is_fifo():
        raise UserError(f"cannot lock {path}: it is a named pipe; remove it")
    with _file_named_in_errors(path):
        return os.fdopen(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | _NO_LINK, PRIVATE_FILE_MODE), "a")


def flush_files_to_disk(paths: Sequence[Path]) -> None:
    """Flushes the files at these paths to the disk, so that they survive a loss of power.

    For many files this is faster once all are written than after each.
    """
    for path in paths:
        _flush_to_disk(path)
    for folder in {path.parent for path in paths}:
        flush_folder_to_disk(folder)


def flush_folder_to_disk(folder: Path) -> None:
    """Flushes a folder, so that its new and renamed files survive a loss of power; not on Windows."""
    if sys.platform != "win32":
        _flush_to_disk(folder)


def _flush_to_disk(path: Path) -> None:
    with _file_named_in_errors(path):
        descriptor = os.open(path, _FLUSH_FLAGS)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def add_resume_hint_if_disk_full(next_step: str) -> Iterator[None]:
    """Adds to an error "no space left" inside the `with` block: make room, then do `next_step`.

    >>> with add_resume_hint_if_disk_full("`polyfed resume runs/a`"):
    ...     raise OSError(errno.ENOSPC, "No space left on device", "runs/a/metrics.jsonl")
    Traceback (most recent call last):
    OSError: [Errno 28] No space left on device: runs/a/metrics.jsonl; what was saved before is whole: make room, then go on
    with `polyfed resume runs/a`
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL_ERRORS:
            raise
        reason = str(error.strerror).partition("; what was saved")[0]  # a run inside a comparison has added its own
        where = f": {error.filename}" if error.filename else ""
        sentence = f"{reason}{where}; what was saved before is whole: make room, then go on with {next_step}"
        raise OSError(error.errno, sentence) from error


@contextmanager
def _file_named_in_errors(path: Path, partial: Path | None = None) -> Iterator[None]:
    """Adds the file's name to errors of writing that are raised in the block, in place of that of its `partial` file."""
    try:
        yield
    except OSError as error:
        if error.errno is None or str(error.filename) not in ("None", str(partial)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


# -- reading ----------------------------------------------------------------------------------------------------------


def expand_user_path(path: str | Path, label: str = "the path") -> Path:
    """Returns the user's path with "~" replaced by the home folder (a relative path stays relative).

    Args:
        path: the user's text or path.
        label: its name in errors.

    Raises:
        UserError: the path is empty, or no path.

    >>> expand_user_path("~/runs") == Path.home() / "runs", expand_user_path("runs/a").as_posix()
    (True, 'runs/a')
    >>> expand_user_path("", "out")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: out is empty; give the path of a file or folder
    """
    if not isinstance(path, str | Path):
        raise UserError(f"{label} must be a path, got a {type(path).__name__}"
                        f"{'; give its directory, .out' if hasattr(path, 'out') else ''}")  # fmt: skip
    text = str(path)
    if not text.strip():
        raise UserError(f"{label} is empty; give the path of a file or folder")
    if "\0" in text:
        raise UserError(f"{label} {text!r} holds a character that no path can have; give another")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"{label} {text!r} is below a home folder that is not known; write it out") from error


def check_regular_file(path: Path, max_bytes: int | None = None) -> Path:
    """Raises a `UserError` unless `path` is a readable regular file of at most `max_bytes`; returns it.

    Args:
        path: the file.
        max_bytes: largest size; None for the size of this machine's memory.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: the file is not a regular one, is too large, or cannot be read.
    """
    with open_file(path, max_bytes):
        return path


def open_file(path: Path, max_bytes: int | None = None) -> IO[bytes]:
    """Opens a regular file for reading.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: the file is not a regular one, is too large, or cannot be read.
    """
    try:
        _check_kind(path, path.stat())
        descriptor = os.open(path, os.O_RDONLY | _READ_FLAGS)
    except FileNotFoundError:
        if not path.is_symlink():
            raise
        where = os.readlink(path)
        raise UserError(
            f"cannot read {path}: it is a symbolic link to {where!r}, which does not exist; correct the link"
        ) from None
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(f"{str(path)!r} is not a path ({error})") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; give a file that can be read") from error
    try:
        status = os.fstat(descriptor)
        _check_kind(path, status)  # the file may have been exchanged since the first check
        _check_size(path, status.st_size, max_bytes)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path, max_bytes: int | None = MAX_TEXT_BYTES) -> bytes:
    """Returns the bytes of a regular file.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: the file is not a regular one, is too large, or cannot be read.
    """
    with open_file(path, max_bytes) as file:
        try:
            return file.read()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}; give a file that can be read") from error
        except MemoryError as error:
            raise UserError(f"there is not enough memory to read {path}; close other programs") from error


def read_text_file(path: Path, max_bytes: int | None = MAX_TEXT_BYTES, errors: str = "strict") -> str:
    r"""Returns the UTF-8 text of a regular file, with "\\n" as line ends.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: the file is not a regular one, is too large, or cannot be read.
        UnicodeDecodeError: it is not UTF-8 text.
    """
    return read_file(path, max_bytes).decode("utf-8", errors).replace("\r\n", "\n").replace("\r", "\n")


def _check_kind(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "it is something else than a file")
        raise UserError(f"cannot read {path}: {kind}; put a regular file there")


def _check_size(path: Path, size: int, max_bytes: int | None) -> None:
    if max_bytes is None:
        from polyfed.core.machine.memory_limit import total_memory_bytes  # which imports torch

        max_bytes = total_memory_bytes()
    if size > max_bytes:
        raise UserError(
            f"cannot read {path}: it has {size / 2**20:.0f} MiB, and at most {max_bytes / 2**20:.0f} MiB are read of such a "
            "file; put the right one there"
        )
