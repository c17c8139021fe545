"""Keeps images encoded until a batch needs them, for data sets that do not fit into memory when decoded.

The store has 8 bytes per image: a hash of its encoded bytes. So equal images are found in training and test sets, and a
resumed run detects changed images, as with images in memory. The bytes are read from their files, or from a memory-mapped
Arrow file. The cost is that each image is decoded again whenever it is used: see `benchmarks/notes/speed.md`.
"""

import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Normalise
from polyfed.core.io.atomic_files import (
    UNLIMITED_BYTES,
    check_regular_file,
    create_private_folder_if_missing,
    open_atomic_file,
    read_file,
)
from polyfed.data.formats.files import read_image_bytes
from polyfed.data.formats.images import Mode, decode_image, measure_normalisation, stack_images

_MEASURED = 500  # images on which mean and standard deviation are measured
_ROWS = 256  # images per batch of an Arrow file


class EncodedImages(ABC):
    """Gives access to the encoded bytes of images by their row number."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of images."""

    @abstractmethod
    def read_bytes(self, row: int) -> bytes:
        """Returns the encoded bytes of one image.

        Raises:
            UserError: the bytes cannot be read.
        """

    @abstractmethod
    def image_name(self, row: int) -> str:
        """Returns the name of an image for error messages."""


@final
@dataclass(frozen=True)
class EncodedImageFiles(EncodedImages):
    """Gives access to encoded images, each stored in a file."""

    files: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.files)

    def read_bytes(self, row: int) -> bytes:
        """Returns the content of the image's file."""
        try:
            return read_file(Path(self.files[row]))
        except OSError as error:
            raise UserError(f"cannot read the image {self.files[row]!r}: {error.strerror}") from error

    def image_name(self, row: int) -> str:
        """Returns the path of the image's file."""
        return repr(self.files[row])


@final
@dataclass(frozen=True)
class EncodedArrowImages(EncodedImages):
    """Gives access to encoded images in the column "image" of a memory-mapped Arrow file.

    The system loads and drops the file's pages as needed.
    """

    path: str

    @cached_property
    def _column(self) -> Any:
        import pyarrow

        try:
            with pyarrow.memory_map(str(check_regular_file(Path(self.path), UNLIMITED_BYTES))) as mapped:
                return pyarrow.ipc.open_file(mapped).read_all().column("image")
        except (OSError, KeyError, pyarrow.ArrowException) as error:
            raise UserError(f"{self.path!r} cannot be read as an Arrow file of images ({error}); delete it") from error

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __len__(self) -> int:
        return len(self._column)

    def read_bytes(self, row: int) -> bytes:
        """Returns the encoded bytes of one image."""
        return bytes(self._column[row].as_buffer())

    def image_name(self, row: int) -> str:
        """Returns the image's row and the file's path, as its name for error messages."""
        return f"image {row} of {self.path!r}"


def copy_parquet_images_to_arrow_file(files: Sequence[Path], column: str, path: Path) -> None:
    """Copies the encoded images from a column of Parquet files to the Arrow file `path`.

    Raises:
        UserError: a file cannot be read or has no such column, or a row holds no encoded image.
    """
    import pyarrow
    import pyarrow.parquet

    create_private_folder_if_missing(path.parent, parents=True)
    kind = pyarrow.schema([("image", pyarrow.large_binary())])
    with open_atomic_file(path) as file, pyarrow.ipc.new_file(file, kind) as writer:
        for source in files:
            try:
                with pyarrow.parquet.ParquetFile(check_regular_file(source, UNLIMITED_BYTES)) as opened:
                    for batch in opened.iter_batches(_ROWS, columns=[column]):
                        encoded = read_image_bytes(pyarrow.table(batch), column)
                        part = pyarrow.array(encoded, pyarrow.large_binary())
                        writer.write_batch(pyarrow.record_batch([part], schema=kind))
            except (OSError, pyarrow.ArrowException) as error:
                raise UserError(f"{str(source)!r} cannot be read as Parquet ({error})") from error


@final
@dataclass(frozen=True)
class LazyImageDecoder:
    """Reads, decodes, resizes and normalises the images of a batch; the batch holds a key for each image, a hash of its
    bytes.

    Args:
        mode: "L" for one grey channel, "RGB" for three.
        size: images are resized to this many pixels a side.
        normalise: applied to the decoded images.
        digest: a hash of all keys, which identifies the set of images.
        images: the encoded images.
        keys: the key of each image, a hash of its bytes, in the order of `images`.
    """

    mode: Mode
    size: int
    normalise: Normalise
    digest: str
    images: EncodedImages = field(repr=False, compare=False)
    keys: NDArray[np.int64] = field(repr=False, compare=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Returns the shape of one image: channels, height, width."""
        return (1 if self.mode == "L" else 3, self.size, self.size)

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        return np.argsort(self.keys, kind="stable")

    def decode_pixels(self, keys: Tensor) -> Tensor:
        """Decodes the images with these keys, (batch, 1), to uint8 of shape (batch, channels, size, size).

        Raises:
            UserError: a key is not that of one of the images.
        """
        image_keys = keys.cpu().numpy()[:, 0]
        positions = np.searchsorted(self.keys, image_keys, sorter=self._order).clip(max=len(self.keys) - 1)
        rows = self._order[positions]
        if not np.array_equal(self.keys[rows], image_keys):
            raise UserError("these examples are of other images than their transform decodes")
        return self._decode_rows(rows).to(keys.device)

    def _decode_rows(self, rows: NDArray[np.int64]) -> Tensor:
        def picture(row: int) -> NDArray[np.uint8]:
            return decode_image(
                io.BytesIO(self.images.read_bytes(row)), self.mode, self.size, self.images.image_name(row)
            )

        return stack_images(map(picture, rows.tolist()), len(rows))

    def __call__(self, x: Tensor) -> Tensor:
        """Returns normalised float32 images for their keys; decoded images (uint8) are only normalised."""
        return self.normalise(x if x.dim() == 4 else self.decode_pixels(x))


@final
@dataclass(frozen=True)
class DecodeAndAugment:
    """Decodes training images, given their keys (see `LazyImageDecoder`), then augments them."""

    decoder: LazyImageDecoder
    augmentation: Callable[[Tensor, torch.Generator], Tensor]

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Returns augmented uint8 images, given their keys."""
        return self.augmentation(self.decoder.decode_pixels(x), generator)


def build_image_keys_and_decoder(
    images: EncodedImages, mode: Mode, size: int, num_train: int
) -> tuple[Tensor, LazyImageDecoder]:
    """Returns a key for each encoded image, int64, (num, 1), and the transform that decodes them.

    All bytes are read once; mean and standard deviation are measured on some of the first `num_train` images.

    Raises:
        UserError: there are no images, or one cannot be read; or one of those measured cannot be decoded.
    """
    if not len(images):
        raise UserError("the data has no images")

    def key(row: int) -> int:
        return int.from_bytes(hashlib.blake2b(images.read_bytes(row), digest_size=8).digest(), "little", signed=True)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        keys = np.fromiter(threads.map(key, range(len(images))), np.int64, len(images))
    identity = Normalise((0.0,) * (1 if mode == "L" else 3), (1.0,) * (1 if mode == "L" else 3))
    measured_rows = np.unique(np.linspace(0, num_train - 1, min(_MEASURED, num_train)).astype(np.int64))
    digest = hashlib.blake2b(keys.tobytes(), digest_size=8).hexdigest()
    normalise = measure_normalisation(
        LazyImageDecoder(mode, size, identity, digest, images, keys)._decode_rows(measured_rows)
    )
    return torch.from_numpy(keys).view(-1, 1), LazyImageDecoder(mode, size, normalise, digest, images, keys)


def open_image_files_lazily(files: Sequence[Path]) -> EncodedImageFiles:
    """Returns an object that reads each of these image files only when it is needed."""
    return EncodedImageFiles(tuple(str(file.absolute()) for file in files))
