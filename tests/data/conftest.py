"""Small data sets in the published formats, written for each test."""

import gzip
import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image


@pytest.fixture
def encode() -> Callable[..., bytes]:
    """An image (array of grey or RGB) as the bytes of a file."""

    def encode(array: np.ndarray[Any, Any], form: str = "PNG", mode: str | None = None) -> bytes:
        file = io.BytesIO()
        picture = Image.fromarray(array)
        (picture if mode is None else picture.convert(mode)).save(file, form)
        return file.getvalue()

    return encode


@pytest.fixture
def write_idx() -> Callable[[Path, np.ndarray[Any, Any]], None]:
    def write(file: Path, array: np.ndarray[Any, Any]) -> None:
        content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
        file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)

    return write


@pytest.fixture
def write_images_parquet(encode: Callable[..., bytes]) -> Callable[..., None]:
    """A Parquet file as the hub writes it: images as structs of bytes and path."""

    def write(
        file: Path, x: np.ndarray[Any, Any], labels: Any, image: str = "image", label: str = "label", **more: Any
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        structs = [{"bytes": encode(picture), "path": None} for picture in x]
        pyarrow.parquet.write_table(pyarrow.table({image: structs, label: labels, **more}), file)

    return write
