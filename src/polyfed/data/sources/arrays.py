"""Reads data sets from a user's Parquet files or NumPy archive."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.examples.nan_checks import raise_if_nonfinite
from polyfed.core.io.array_files import read_npz
from polyfed.core.io.atomic_files import expand_user_path
from polyfed.data.formats.files import (
    Table,
    class_names_from_hub_metadata,
    column_to_numpy,
    find_parquet_files_by_split,
    first_existing_column_name,
    read_image_bytes,
    read_parquet_splits,
    resolve_existing_path,
    select_discrete_columns_without_missing,
)
from polyfed.data.formats.images import decode_images, measure_normalisation
from polyfed.data.formats.lazy_images import (
    EncodedArrowImages,
    build_image_keys_and_decoder,
    copy_parquet_images_to_arrow_file,
)
from polyfed.data.pooled_dataset import PooledDataset, Source, build_pooled_dataset, encode_labels


@final
@dataclass(frozen=True)
class Parquet(Source):
    """Reads a data set from a Parquet file, or from a folder with train-*.parquet and, for a test set common to all
    clients, test-*.parquet.

    Every further column of whole numbers or strings can be used by `Natural`.

    Args:
        path: file or folder.
        x: column of inputs: encoded images, or lists of numbers of one length.
        label: column of labels: whole numbers, names, or lists of 0 and 1 (multi-label).
        user: column of natural users; if given, a missing one is an error at once.
        image_size: images are resized to this many pixels a side; None keeps their common size.
        grey: read images with one grey channel instead of three colours.
        lazy: images stay encoded and are decoded whenever a batch needs them, for sets that do not fit into memory; needs
            `image_size` and `cache`.
        cache: Arrow file (.arrow) of the encoded images, written if it does not exist, as large as they are together.
    """

    path: str = ""
    x: str = "image"
    label: str = "label"
    user: str | None = None
    image_size: int | None = None
    grey: bool = False
    lazy: bool = False
    cache: str | None = None

    def __post_init__(self) -> None:
        if self.lazy and (self.image_size is None or not (self.cache or "").endswith(".arrow")):
            raise UserError(
                "lazy images need image_size=... (--data.image-size), and cache=... (--data.cache) with a file that ends in "
                f".arrow, got image_size={self.image_size} and cache={self.cache!r}"
            )

    def load(self) -> PooledDataset:
        """Reads the data set from the Parquet files; raises a `UserError` if they cannot be read."""
        if not self.path:
            raise UserError("give path=... (--data.path) with a Parquet file or a folder of them")
        path = resolve_existing_path(self.path, "give path=... (--data.path) with a Parquet file or a folder of them")
        if "train" not in find_parquet_files_by_split(path):
            raise UserError(f"{self.path!r} holds no Parquet file of training data (train-*.parquet)")
        if self.lazy:
            return self._load_lazily(path)
        tables = read_parquet_splits(path)
        train, test = tables["train"], tables.get("test")
        names = class_names_from_hub_metadata(train, first_existing_column_name(train, (self.label,), "label"))
        if self.user is not None:
            first_existing_column_name(train, (self.user,), "user")
        inputs = [self._read_inputs(tables[split], split) for split in ("train", "test") if split in tables]
        labels = [
            column_to_numpy(table, first_existing_column_name(table, (self.label,), "label"))
            for table in (train, test)
            if table is not None
        ]
        return _build_dataset(
            inputs, labels, names, select_discrete_columns_without_missing(train, (self.x, self.label))
        )

    def _load_lazily(self, path: Path) -> PooledDataset:
        files = find_parquet_files_by_split(path)
        tables = read_parquet_splits(path, skipped_column=self.x)
        parts = [split for split in ("train", "test") if split in tables]
        cache = expand_user_path(str(self.cache), "--data.cache")
        if not cache.exists():
            copy_parquet_images_to_arrow_file([file for split in parts for file in files[split]], self.x, cache)
        images, sizes = EncodedArrowImages(str(cache.resolve())), [tables[split].num_rows for split in parts]
        if len(images) != sum(sizes):
            raise UserError(
                f"the cache {self.cache!r} holds {len(images)} images, and the data {sum(sizes)}; delete it"
            )
        x, decoded = build_image_keys_and_decoder(
            images, "L" if self.grey else "RGB", int(self.image_size or 0), sizes[0]
        )
        labels = [
            column_to_numpy(tables[split], first_existing_column_name(tables[split], (self.label,), "label"))
            for split in parts
        ]
        names = class_names_from_hub_metadata(tables["train"], self.label)
        pool = _build_dataset(
            list(torch.split(x, sizes)),
            labels,
            names,
            select_discrete_columns_without_missing(tables["train"], (self.label,)),
        )
        test = None if pool.test is None else replace(pool.test, transform=decoded)
        return replace(pool, train=replace(pool.train, transform=decoded), test=test)

    def _read_inputs(self, table: Table, split: str) -> Tensor:
        import pyarrow.types as kinds

        kind = table.schema.field(first_existing_column_name(table, (self.x,), "input")).type
        if kinds.is_struct(kind) or kinds.is_binary(kind) or kinds.is_large_binary(kind):
            return decode_images(read_image_bytes(table, self.x), "L" if self.grey else "RGB", self.image_size)
        values = column_to_numpy(table, self.x)
        inputs = _as_input_tensor(values, f"column {self.x!r} of the {split} split")
        return inputs[:, None] if inputs.dim() == 1 else inputs


@final
@dataclass(frozen=True)
class Npz(Source):
    """Reads a data set from a NumPy archive with the arrays x_train and y_train, and optionally x_test and y_test;
    further arrays become columns.

    Images are uint8 with channels first, shape (num, channels, height, width); other inputs are kept as float32, whole
    numbers (tokens) as int64. Labels are whole numbers, or 0 and 1 in shape (num, num_labels) for a multi-label task.

    Args:
        path: the .npz file; archives with pickled objects are refused.
    """

    path: str = ""

    def load(self) -> PooledDataset:
        """Reads the data set from the archive; raises a `UserError` if it cannot be read or lacks an array."""
        advice = "give path=... (--data.path) with an .npz file that holds x_train and y_train"
        if not self.path:
            raise UserError(advice)
        try:
            # np.load alone would allocate the memory that a header claims.
            arrays = read_npz(resolve_existing_path(self.path, advice))
        except UserError:
            raise
        except (OSError, ValueError) as error:
            is_other_format = any(words in str(error) for words in ("not a zip file", "magic string"))
            reason = "it is not an .npz file, or holds pickled objects" if is_other_format else str(error)
            raise UserError(f"cannot read {self.path!r} ({reason}); {advice}") from error
        if not {"x_train", "y_train"} <= arrays.keys():
            raise UserError(f"{self.path!r} holds {', '.join(sorted(arrays)) or 'nothing'}; {advice}")
        splits = ["train", "test"] if {"x_test", "y_test"} <= arrays.keys() else ["train"]
        inputs = [_as_input_tensor(arrays[f"x_{split}"], f"x_{split}") for split in splits]
        used = {f"{kind}_{split}" for kind in "xy" for split in ("train", "test")}
        columns = {name: values for name, values in arrays.items() if name not in used}
        return _build_dataset(inputs, [arrays[f"y_{split}"] for split in splits], None, columns)


def _as_input_tensor(values: NDArray[Any], name: str) -> Tensor:
    if values.dtype == np.uint8:
        return torch.from_numpy(np.ascontiguousarray(values))
    if np.issubdtype(values.dtype, np.integer):
        return torch.from_numpy(values.astype(np.int64))
    if np.issubdtype(values.dtype, np.floating):
        inputs = torch.from_numpy(values.astype(np.float32))
        raise_if_nonfinite([(0, inputs)], name, axis_name="position")
        return inputs
    raise UserError(f"{name} has type {values.dtype}; inputs must be numbers or encoded images")


def _build_dataset(
    inputs: list[Tensor], labels: list[NDArray[Any]], names: tuple[str, ...] | None, columns: dict[str, NDArray[Any]]
) -> PooledDataset:
    """Builds a data set of a training and perhaps a test split; the first one's statistics normalise images."""
    if labels[0].ndim == 2:
        targets = [torch.from_numpy(values.astype(np.float32)) for values in labels]
        names = names or tuple(map(str, range(labels[0].shape[1])))
    else:
        # Both splits are encoded together, so that a name is the same class in both.
        numbers, names = encode_labels(np.concatenate(labels), names)
        targets = [torch.from_numpy(part) for part in np.split(numbers, [len(labels[0])])][: len(labels)]
    image = inputs[0].dtype == torch.uint8 and inputs[0].dim() == 4
    splits = list(zip(inputs, targets, strict=True))
    transform = measure_normalisation(inputs[0]) if image else None
    return build_pooled_dataset(splits[0], splits[1] if len(splits) > 1 else None, names, transform, columns)
