"""Decodes images from bytes and files to one uint8 tensor with the channels before height and width."""

import importlib
import io
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError, warn_of_data
from polyfed.core.examples.examples import Normalise
from polyfed.core.io.atomic_files import open_file

Mode = Literal["L", "RGB"]
MAX_PIXELS = 178_956_970  # per image; PIL takes a larger one for a decompression bomb


def decode_images(blobs: Sequence[bytes], mode: Mode, size: int | None = None) -> Tensor:
    """Decodes images (PNG, JPEG, any format of PIL) to uint8, shape (num, channels, height, width).

    Args:
        blobs: one encoded image each.
        mode: "L" for one grey channel, "RGB" for three.
        size: resize to `size` × `size` (bilinear); None demands that all images have the shape of the first.

    Raises:
        UserError: no image, or images of different shapes without `size`.

    >>> from PIL import Image
    >>> file = io.BytesIO()
    >>> Image.new("L", (5, 4), 7).save(file, "PNG")
    >>> decode_images([file.getvalue()], "RGB").shape
    torch.Size([1, 3, 4, 5])
    """
    turbo = _load_turbo_jpeg_decoder() if mode == "RGB" and size is None else None

    def decode(blob: bytes) -> NDArray[np.uint8]:
        if turbo is not None and 0 < _jpeg_pixel_count(blob) <= MAX_PIXELS:
            try:
                return np.asarray(turbo(blob, "rgb"), np.uint8)
            except Exception:  # kornia_rs raises nothing narrower (CMYK images, for example); PIL decides
                pass
        return decode_image(io.BytesIO(blob), mode, size, "an image of the data")

    return stack_images(map(decode, blobs), len(blobs))


def read_images(files: Sequence[Path], mode: Mode, size: int) -> Tensor:
    """Reads image files and resizes them to `size` × `size` pixels: uint8, shape (num, channels, size, size).

    Files are decoded in threads, since PIL releases the interpreter's lock while it decodes.
    """

    def decode(file: Path) -> NDArray[np.uint8]:
        with open_file(file) as stream:
            return decode_image(stream, mode, size, str(file))

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return stack_images(threads.map(decode, files), len(files))


def measure_normalisation(images: Tensor) -> Normalise:
    """Returns a `Normalise` to mean 0 and deviation 1 by channel, measured on at most 10,000 images.

    >>> measure_normalisation(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1))
    Normalise(mean=(0.5,), std=(0.5,))
    """
    sample = images[:: max(1, len(images) // 10_000)]
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in range(images.shape[1]):
        weights = torch.bincount(sample[:, channel].flatten(), minlength=256).to(torch.float64)
        mean = float((weights * levels).sum() / weights.sum())
        means.append(round(mean, 4))
        variance = float((weights * (levels - mean) ** 2).sum() / weights.sum())
        stds.append(max(round(variance**0.5, 4), 1 / 255))  # a constant image has no spread to divide by
    return Normalise(tuple(means), tuple(stds))


def decode_image(file: Any, mode: Mode, size: int | None, name: str) -> NDArray[np.uint8]:
    """Decodes one image to a uint8 array of shape (height, width, channels), the right way up as its EXIF tag says.

    Raises:
        UserError: the bytes cannot be decoded, or 8 bits cannot hold them; the message mentions `name`.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(file) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(
                    f"it would have {image.width}×{image.height} pixels, and at most {MAX_PIXELS} are read"
                )
            if getattr(image, "is_animated", False) and image.format != "MPO":  # a camera's preview of the same picture
                warn_of_data("of pictures with several pages or frames, only the first is read; save each as a file")
            if image.mode[0] in "IF":  # 16 or 32 bits, which PIL would cut off at 255
                pixels = np.asarray(image)
                if image.mode == "F" or pixels.min() < 0 or pixels.max() > 255:
                    raise ValueError(f"its mode {image.mode} has more than 8 bits: scale its values to 0 to 255")
            if size is not None:
                image.draft(mode, (size, size))  # a JPEG decodes at a fraction of its size; nothing for other formats
            picture = image if image.mode == mode else image.convert(mode)
            ImageOps.exif_transpose(picture, in_place=True)
            if size is not None and picture.size != (size, size):
                picture = picture.resize((size, size), Image.Resampling.BILINEAR)
            return np.frombuffer(picture.tobytes(), np.uint8).reshape(picture.height, picture.width, -1)
    except Image.DecompressionBombError as error:
        raise UserError(f"{name} would have more than {MAX_PIXELS} pixels, and is not read; make it smaller") from error
    except UnidentifiedImageError as error:
        raise UserError(f"{name} cannot be decoded (it is no picture); take it out, or save it again") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{name} cannot be decoded ({error}); take it out, or save it again") from error


def stack_images(pictures: Iterable[NDArray[np.uint8]], num: int) -> Tensor:
    """Stacks images of shape (height, width, channels) to one tensor (num, channels, height, width).

    Raises:
        UserError: there are no images, or they differ in size.
    """
    store: NDArray[np.uint8] | None = None
    for i, picture in enumerate(pictures):
        if store is None:
            store = np.empty((num, picture.shape[2], *picture.shape[:2]), np.uint8)
        if picture.shape[:2] != store.shape[2:]:
            raise UserError(
                f"images differ in size: {store.shape[3]}×{store.shape[2]} and {picture.shape[1]}×{picture.shape[0]}; "
                "set image_size to resize them"
            )
        store[i] = picture.transpose(2, 0, 1)
    if store is None:
        raise UserError("the data has no images")
    return torch.from_numpy(store)


def _load_turbo_jpeg_decoder() -> Callable[[bytes, str], Any] | None:
    """Returns kornia's JPEG decoder; None if kornia (the extra `augment`) is not installed.

    It gives the same pixels as PIL's, six times as fast on small images.
    """
    try:
        return getattr(importlib.import_module("kornia_rs.io"), "decode_image_jpegturbo", None)
    except ImportError:  # no kornia, or an older one that has no such module
        return None


def _jpeg_pixel_count(blob: bytes) -> int:
    r"""Returns the number of pixels in a JPEG's header; 0 for other bytes, an unusual header, or one with an EXIF tag.

    >>> _jpeg_pixel_count(b"\xff\xd8\xff\xc0\x00\x11\x08\x00\x02\x00\x03\x03")
    6
    """
    at = 2 if blob[:2] == b"\xff\xd8" else len(blob)
    while at + 9 <= len(blob) and blob[at] == 0xFF:
        marker = blob[at + 1]
        if marker == 0xE1:  # EXIF, which may turn the picture
            return 0
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # the header of a frame
            return int.from_bytes(blob[at + 5 : at + 7]) * int.from_bytes(blob[at + 7 : at + 9])
        at += 2 + int.from_bytes(blob[at + 2 : at + 4])
    return 0
