"""Reads ChestX-ray14, 112,120 chest X-rays with up to 14 findings each, from a folder or from the Hugging Face hub."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.io.array_files import read_npy
from polyfed.core.io.atomic_files import check_regular_file, expand_user_path, read_text_file
from polyfed.data.formats.files import (
    Table,
    column_to_numpy,
    first_existing_column_name,
    read_image_bytes,
    resolve_existing_path,
)
from polyfed.data.formats.hub import load_hub_tables
from polyfed.data.formats.images import decode_images, measure_normalisation, read_images
from polyfed.data.pooled_dataset import PooledDataset, Source, build_pooled_dataset

FINDINGS = (
    "Atelectasis",
    "Cardiomegaly",
    "Effusion",
    "Infiltration",
    "Mass",
    "Nodule",
    "Pneumonia",
    "Pneumothorax",
    "Consolidation",
    "Edema",
    "Emphysema",
    "Fibrosis",
    "Pleural_Thickening",
    "Hernia",
)
_ADVICE = "give path=... (--data.path) with the folder of Data_Entry_2017.csv and the images, as the NIH publishes them"


@final
@dataclass(frozen=True)
class ChestXray14(Source):
    """Reads chest X-rays with 14 findings as multi-label targets (Wang et al. 2017), with a column "patient" of
    patients' ids.

    An X-ray without a finding has only zeros.

    Inputs are grey images, uint8, shape (num, 1, image_size, image_size). If the folder has the published test_list.txt, its
    images are the test set, and no patient is in both.

    Args:
        path: folder with Data_Entry_2017.csv and the images in it or in folders below it; images of the table that are
            missing are left out. None for the Hugging Face hub (45 GB).
        image_size: images are resized to this many pixels a side; the 112,120 take 0.5 GB at 64.
        cache: .npy file for the resized images, written if it does not exist; decoding all images takes half an hour.
    """

    path: str | None = None
    image_size: int = 64
    cache: str | None = None

    def __post_init__(self) -> None:
        if not 8 <= self.image_size <= 1024:
            raise UserError(f"image_size must be between 8 and 1024 pixels, got {self.image_size}")
        if self.cache is not None and not self.cache.endswith(".npy"):
            raise UserError(f"cache must be a file that ends in .npy, got {self.cache!r}")

    def load(self) -> PooledDataset:
        """Reads the X-rays and their findings; raises a `UserError` if they cannot be read."""
        if self.path is None:
            return self._from_hub()
        folder = resolve_existing_path(self.path, _ADVICE)
        table = _read_entries(folder)
        images = _image_files(folder)
        names = column_to_numpy(table, "Image Index").astype(str)
        rows = np.flatnonzero([name in images for name in names])
        if not len(rows):
            raise UserError(f"{self.path!r} has none of the {len(names)} images of its table; {_ADVICE}")
        y = _encode_findings([str(value).split("|") for value in column_to_numpy(table, "Finding Labels")[rows]])
        x = self._load_images([images[names[row]] for row in rows])
        patients = column_to_numpy(table, "Patient ID")[rows]
        is_test = np.isin(names[rows], list(_test_names(folder)))
        return _build_dataset(x, y, patients, is_test)

    def _load_images(self, files: list[Path]) -> Tensor:
        cache = None if self.cache is None else expand_user_path(self.cache, "--data.cache")
        shape = (len(files), 1, self.image_size, self.image_size)
        if cache is not None and cache.exists():
            try:
                stored = read_npy(cache)
            except (OSError, ValueError) as error:
                raise UserError(f"cannot read the cache {self.cache!r} ({error}); delete it") from error
            if stored.shape != shape or stored.dtype != np.uint8:
                raise UserError(f"the cache {self.cache!r} holds shape {stored.shape}, not {shape}; delete it")
            return torch.from_numpy(stored)
        x = read_images(files, "L", self.image_size)
        if cache is not None:
            try:
                np.save(cache, x.numpy())
            except OSError as error:
                raise UserError(
                    f"cannot write the cache {self.cache!r} ({error.strerror}); give another path, cache=... (--data.cache)"
                ) from error
        return x

    def _from_hub(self) -> PooledDataset:
        tables = load_hub_tables("timm/nih-chest-xray-14", _ADVICE)
        parts = [tables[split] for split in ("train", "test") if split in tables]
        x = torch.cat(
            [
                decode_images(
                    read_image_bytes(t, first_existing_column_name(t, ("image",), "image")), "L", self.image_size
                )
                for t in parts
            ]
        )
        y = torch.cat(
            [
                _encode_findings(t.column(first_existing_column_name(t, ("label_names",), "label")).to_pylist())
                for t in parts
            ]
        )
        patients = np.concatenate([column_to_numpy(table, "patient_id") for table in parts])
        return _build_dataset(x, y, patients, np.arange(len(x)) >= len(parts[0]))


def _read_entries(folder: Path) -> Table:
    import pyarrow
    import pyarrow.csv

    file = next(iter(sorted(folder.glob("Data_Entry_2017*.csv"))), None)
    if file is None:
        raise UserError(f"{str(folder)!r} has no Data_Entry_2017.csv; {_ADVICE}")
    column_names = ["Image Index", "Finding Labels", "Patient ID"]
    try:
        return pyarrow.csv.read_csv(
            check_regular_file(file), convert_options=pyarrow.csv.ConvertOptions(include_columns=column_names)
        )
    except (pyarrow.ArrowException, KeyError) as error:
        raise UserError(f"{str(file)!r} has not the published columns {', '.join(column_names)} ({error})") from error


def _image_files(folder: Path) -> dict[str, Path]:
    return {
        name: Path(place, name)
        for place, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith((".png", ".jpg", ".jpeg"))
    }


def _test_names(folder: Path) -> set[str]:
    file = folder / "test_list.txt"
    return set(read_text_file(file).split()) if file.exists() else set()


def _encode_findings(findings: list[list[str]]) -> Tensor:
    y = torch.zeros(len(findings), len(FINDINGS))
    number = {name: i for i, name in enumerate(FINDINGS)}
    for row, names in enumerate(findings):
        for name in names:
            if name != "No Finding":
                if name not in number:
                    raise UserError(f"unknown finding {name!r}; the file may name {', '.join(FINDINGS)}")
                y[row, number[name]] = 1
    return y


def _build_dataset(x: Tensor, y: Tensor, patients: NDArray[Any], is_test: NDArray[np.bool_]) -> PooledDataset:
    train, test = torch.from_numpy(np.flatnonzero(~is_test)), torch.from_numpy(np.flatnonzero(is_test))
    if not len(train):
        raise UserError(f"all {len(x)} images are in test_list.txt, none is left for training; {_ADVICE}")
    held_out = (x[test], y[test]) if len(test) else None
    columns = {"patient": patients[~is_test]}
    return build_pooled_dataset((x[train], y[train]), held_out, FINDINGS, measure_normalisation(x[train]), columns)
