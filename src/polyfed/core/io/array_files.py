"""Reads arrays and tensors from files, and refuses a file whose actual size is not the size that its header states."""

import json
import math
import struct
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors
import safetensors.torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import open_file, read_file
from polyfed.core.io.values.validation import DAMAGED_FILE_ERRORS
from polyfed.core.machine.memory_limit import total_memory_bytes

_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors' own reader


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Returns `{name: tensor}` from a safetensors file.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: the file is not a regular one, or is too large.
        ValueError: it is damaged; the message is half a sentence.
    """
    with open_file(path) as file:
        _check_safetensors_header(file)
    try:
        return safetensors.torch.load(read_file(path))
    except (safetensors.SafetensorError, *DAMAGED_FILE_ERRORS) as error:
        raise error if isinstance(error, UserError) else ValueError(str(error)) from error
    except MemoryError as error:
        raise UserError(f"there is not enough memory for the tensors in {path}; close other programs") from error


def _check_safetensors_header(file: IO[bytes]) -> None:
    """Checks that the header of a safetensors file claims the file's actual size.

    Raises:
        ValueError: the sizes differ, or the header is damaged.
    """
    size = file.seek(0, 2)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"its header would have {length} bytes, and the file has {size}")
    try:
        header = json.loads(file.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except DAMAGED_FILE_ERRORS as error:
        raise ValueError("its header is damaged") from error
    if end != size - 8 - length:
        raise ValueError(f"its header claims {end} bytes of tensors, and there are {size - 8 - length}")


def _check_npy_header(file: IO[bytes], size: int, name: str) -> None:
    """Checks that the header of a NumPy array claims `size` bytes, the actual size of the file or archive member.

    Raises:
        ValueError: the sizes differ, or the file holds no array.
    """
    file.seek(0)
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, kind = read_header(file)
    expected, available = math.prod(shape) * kind.itemsize, size - file.tell()
    if not kind.hasobject and expected != available:
        raise ValueError(f"the header of {name} claims {expected} bytes, and there are {available}")


def read_npz(path: Path, names: Collection[str] | None = None, max_bytes: int | None = None) -> dict[str, NDArray[Any]]:
    """Returns `{name: array}` from a NumPy archive (.npz).

    Args:
        path: the archive.
        names: the arrays to read, as far as the archive has them; None for all.
        max_bytes: largest size of all arrays together; None for the size of this machine's memory.

    Raises:
        FileNotFoundError: there is no such file.
        UserError: the file is not a regular one, is too large, or unpacks to more than `max_bytes`.
        ValueError: it is not an archive, is damaged, or holds pickled objects; the message is half a sentence.
    """
    limit = total_memory_bytes() if max_bytes is None else max_bytes
    with open_file(path, limit) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = [m for m in archive.infolist() if names is None or m.filename.removesuffix(".npy") in names]
                total = sum(member.file_size for member in members)
                if total > limit:
                    raise UserError(
                        f"{path} would unpack to {total / 2**20:.0f} MiB, and at most {limit / 2**20:.0f} MiB are read of "
                        "it; is it the right file?"
                    )
                for member in members:
                    with archive.open(member) as stream:
                        _check_npy_header(stream, member.file_size, f"array {member.filename.removesuffix('.npy')!r}")
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files if names is None or name in names}
        except (OSError, EOFError, zipfile.BadZipFile, zlib.error, struct.error, *DAMAGED_FILE_ERRORS) as error:
            raise error if isinstance(error, UserError) else ValueError(str(error)) from error
        except MemoryError as error:
            raise UserError(f"there is not enough memory for the arrays in {path}; close other programs") from error


def read_npy(path: Path) -> NDArray[Any]:
    """Returns the array in a NumPy file (.npy); raises the errors of `read_npz`."""
    with open_file(path) as file:
        try:
            _check_npy_header(file, file.seek(0, 2), "the array")
            file.seek(0)
            array: NDArray[Any] = np.load(file, allow_pickle=False)
        except (OSError, EOFError, *DAMAGED_FILE_ERRORS) as error:
            raise error if isinstance(error, UserError) else ValueError(str(error)) from error
        except MemoryError as error:
            raise UserError(f"there is not enough memory for the array in {path}; close other programs") from error
    return array
