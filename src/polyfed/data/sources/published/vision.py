"""Reads published image data sets: scikit-learn's digits, the MNIST family, CIFAR."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, final

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Normalise
from polyfed.core.io.values.validation import check_field_types
from polyfed.data.formats.files import (
    Table,
    class_names_from_hub_metadata,
    column_to_numpy,
    find_idx_file,
    first_existing_column_name,
    read_idx_file,
    read_image_bytes,
    read_parquet_splits,
    resolve_existing_path,
    select_discrete_columns_without_missing,
)
from polyfed.data.formats.hub import load_hub_tables
from polyfed.data.formats.images import Mode, decode_images
from polyfed.data.partitioning.allocation import draw_stratified_rows
from polyfed.data.pooled_dataset import Columns, PooledDataset, Source, build_pooled_dataset, move_test_set_to_train

_FASHION = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_DIGITS = tuple(map(str, range(10)))
_LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_EMNIST = {
    "byclass": (*_DIGITS, *_LETTERS, *map(str.lower, _LETTERS)),
    "bymerge": (*_DIGITS, *_LETTERS, *"abdefghnqrt"),
    "balanced": (*_DIGITS, *_LETTERS, *"abdefghnqrt"),
    "letters": _LETTERS,
    "digits": _DIGITS,
    "mnist": _DIGITS,
}
_CIFAR_ADVICE = (
    "give path=... (--data.path) with the folder of the hub's Parquet files (train-*.parquet, test-*.parquet)"
)


@final
@dataclass(frozen=True)
class Digits(Source):
    """Reads 1,797 images of handwritten digits, 8×8 pixels, which are part of scikit-learn.

    They are shipped with scikit-learn (UCI optdigits). The 17 grey levels are spread over 0 to 255. The set has no test set
    of its own.

    Args:
        common_test: share of the digits that becomes the common test set, stratified and the same in every run.

    >>> pool = Digits().load()
    >>> len(pool.train), pool.input_shape, pool.num_outputs
    (1797, (1, 8, 8), 10)
    """

    common_test: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.common_test < 1:
            raise UserError(f"common_test must be at least 0 and below 1, got {self.common_test}")

    def load(self) -> PooledDataset:
        """Reads the images and labels of the digits from scikit-learn."""
        # Read the file itself: importing scikit-learn takes two seconds.
        package = importlib.util.find_spec("sklearn")
        folders = [] if package is None else package.submodule_search_locations or []
        file = next((f for folder in folders if (f := Path(folder) / "datasets/data/digits.csv.gz").exists()), None)
        if file is None:
            raise UserError("the digits come with scikit-learn, which is not installed; pip install scikit-learn")
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
        x = torch.from_numpy((table[:, :64].astype(np.uint16) * 255 // 16).astype(np.uint8).reshape(-1, 1, 8, 8))
        y = torch.from_numpy(table[:, 64].astype(np.int64))
        test = draw_stratified_rows(y.numpy(), round(self.common_test * len(y)), seed=0)
        train = np.delete(np.arange(len(y)), test)
        held_out = (x[test], y[test]) if len(test) else None
        return build_pooled_dataset((x[train], y[train]), held_out, _DIGITS, Normalise((0.3045,), (0.3760,)))


@dataclass(frozen=True)
class _MNISTFormat(Source):
    """Reads a data set that is published in the files of MNIST."""

    path: str | None = None
    deal_test: bool = False
    _repo: ClassVar[str]
    _class_names: ClassVar[tuple[str, ...]]
    _mean_and_deviation: ClassVar[tuple[float, float]]
    _where_else: ClassVar[str] = ""

    def load(self) -> PooledDataset:
        """Reads images and labels from the Hugging Face hub, or from `path` if it is given."""
        advice = _idx_advice("train", "t10k", self._where_else)
        data = _load_images(self.path, self._repo, "L", advice, ("train", "t10k"))
        mean, deviation = self._mean_and_deviation
        return _build_dataset(data, self._class_names, Normalise((mean,), (deviation,)), self.deal_test)


@final
@dataclass(frozen=True)
class FashionMNIST(_MNISTFormat):
    """Reads 60,000 training and 10,000 test images of clothes in grey, 28×28 pixels (Xiao et al. 2017).

    Args:
        path: folder with the four IDX files or with Parquet files; None for the Hugging Face hub.
        deal_test: the published test examples go to clients too; there is then no common test set.
    """

    _repo, _class_names, _mean_and_deviation = "zalando-datasets/fashion_mnist", _FASHION, (0.2860, 0.3530)
    _where_else = " (Debian: apt-get install dataset-fashion-mnist)"


@final
@dataclass(frozen=True)
class MNIST(_MNISTFormat):
    """Reads 60,000 training and 10,000 test images of handwritten digits, 28×28 pixels (LeCun et al. 1998).

    Args:
        path: folder with the four IDX files or with Parquet files; None for the Hugging Face hub.
        deal_test: the published test examples go to clients too; there is then no common test set.
    """

    _repo, _class_names, _mean_and_deviation = "ylecun/mnist", _DIGITS, (0.1307, 0.3081)


@final
@dataclass(frozen=True)
class EMNIST(Source):
    """Reads images of handwritten letters and digits, 28×28 pixels (Cohen et al. 2017), and turns them upright.

    Args:
        path: folder with the files emnist-SUBSET-train-images-idx3-ubyte.gz and so on, or with Parquet files; None for the
            Hugging Face hub, which has the subsets letters and mnist.
        subset: byclass (62 classes), bymerge and balanced (47), letters (26), digits and mnist (10).
        deal_test: the published test examples go to clients too; there is then no common test set.
    """

    path: str | None = None
    subset: Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"] = "letters"
    deal_test: bool = False

    def __post_init__(self) -> None:
        check_field_types(self)

    def load(self) -> PooledDataset:
        """Reads images and labels from the hub or `path`, and turns the images upright."""
        prefixes = f"emnist-{self.subset}-train", f"emnist-{self.subset}-test"
        advice = _idx_advice(*prefixes)
        if self.path is None and self.subset not in ("letters", "mnist"):
            raise UserError(f"the Hugging Face hub has no EMNIST subset {self.subset!r} as a table; {advice}")
        data = _load_images(self.path, f"tanganke/emnist_{self.subset}", "L", advice, prefixes)
        train = _turn_upright(data.train, self.subset)
        test = None if data.test is None else _turn_upright(data.test, self.subset)
        return _build_dataset(
            replace(data, train=train, test=test), _EMNIST[self.subset], Normalise((0.1736,), (0.3317,)), self.deal_test
        )


@final
@dataclass(frozen=True)
class CIFAR10(Source):
    """Reads 50,000 training and 10,000 test images in colour, of 10 classes, 32×32 pixels (Krizhevsky 2009).

    Args:
        path: folder with Parquet files; None for the Hugging Face hub.
        deal_test: the published test examples go to clients too; there is then no common test set.
    """

    path: str | None = None
    deal_test: bool = False

    def load(self) -> PooledDataset:
        """Reads images and labels from the Hugging Face hub, or from `path` if it is given."""
        data = _load_images(self.path, "uoft-cs/cifar10", "RGB", _CIFAR_ADVICE)
        return _build_dataset(
            data, _CIFAR10, Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)), self.deal_test
        )


@final
@dataclass(frozen=True)
class CIFAR100(Source):
    """Reads 50,000 training and 10,000 test images in colour, of 100 classes, 32×32 pixels (Krizhevsky 2009), with a
    column "coarse_label" for the partition `Natural`.

    Args:
        path: folder with Parquet files; None for the Hugging Face hub.
        deal_test: the published test examples go to clients too; there is then no common test set.
    """

    path: str | None = None
    deal_test: bool = False

    def load(self) -> PooledDataset:
        """Reads images and labels from the Hugging Face hub, or from `path` if it is given."""
        data = _load_images(self.path, "uoft-cs/cifar100", "RGB", _CIFAR_ADVICE)
        names = data.names or tuple(map(str, range(100)))
        return _build_dataset(
            data, names, Normalise((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)), self.deal_test
        )


@dataclass(frozen=True, eq=False)
class _ImageSplits:
    """Holds the training and test images of a data set, with labels, class names and further columns."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor] | None
    names: tuple[str, ...] | None = None
    columns: Columns = field(default_factory=dict)
    test_columns: Columns = field(default_factory=dict)


def _load_images(
    path: str | None, repo: str, mode: Mode, advice: str, idx: tuple[str, str] | None = None
) -> _ImageSplits:
    """Loads images from the hub or `path`: from Parquet files, or else IDX files with prefixes `idx`."""
    if path is None:
        return _from_tables(load_hub_tables(repo, advice), mode)
    folder = resolve_existing_path(path, advice)
    tables = read_parquet_splits(folder) if folder.is_dir() or folder.suffix == ".parquet" else {}
    if "train" in tables:
        return _from_tables(tables, mode)
    parts = [_from_idx(folder, prefix) for prefix in idx or ()]
    if not parts or parts[0] is None:
        raise UserError(f"{path!r} holds no training images; {advice}")
    return _ImageSplits(parts[0], parts[1])


def _from_tables(tables: Mapping[str, Table], mode: Mode) -> _ImageSplits:
    def read(table: Table) -> tuple[Tensor, Tensor]:
        image, label = _image_columns(table)
        return decode_images(read_image_bytes(table, image), mode), torch.from_numpy(
            column_to_numpy(table, label).astype(np.int64)
        )

    train = tables["train"]
    image, label = _image_columns(train)
    test, test_columns = None, {}
    if "test" in tables:
        test, test_columns = (
            read(tables["test"]),
            select_discrete_columns_without_missing(tables["test"], _image_columns(tables["test"])),
        )
    return _ImageSplits(
        read(train),
        test,
        class_names_from_hub_metadata(train, label),
        select_discrete_columns_without_missing(train, (image, label)),
        test_columns,
    )


def _image_columns(table: Table) -> tuple[str, str]:
    return first_existing_column_name(table, ("image", "img"), "image"), first_existing_column_name(
        table, ("label", "fine_label"), "label"
    )


def _from_idx(folder: Path, prefix: str) -> tuple[Tensor, Tensor] | None:
    images, labels = find_idx_file(folder, prefix, "images"), find_idx_file(folder, prefix, "labels")
    if images is None or labels is None:
        return None
    x, y = read_idx_file(images), read_idx_file(labels)
    if x.ndim != 3 or y.shape != x.shape[:1]:
        raise UserError(f"{images.name} has shape {x.shape} and {labels.name} {y.shape}: they do not belong together")
    return torch.from_numpy(x.copy()).unsqueeze(1), torch.from_numpy(y.astype(np.int64))


def _turn_upright(images: tuple[Tensor, Tensor], subset: str) -> tuple[Tensor, Tensor]:
    """Transposes EMNIST's images, published with rows and columns exchanged; letters' labels begin at 0."""
    x, y = images
    return x.transpose(2, 3).contiguous(), y - 1 if subset == "letters" and int(y.max()) == 26 else y


def _build_dataset(data: _ImageSplits, names: tuple[str, ...], normalise: Normalise, deal_test: bool) -> PooledDataset:
    pool = build_pooled_dataset(data.train, data.test, names, normalise, data.columns)
    return move_test_set_to_train(pool, data.test_columns) if deal_test else pool


def _idx_advice(train: str, test: str, more: str = "") -> str:
    return (
        f"give path=... (--data.path) with the folder of {train}-images-idx3-ubyte.gz, {train}-labels-idx1-ubyte.gz, "
        f"{test}-images-idx3-ubyte.gz and {test}-labels-idx1-ubyte.gz{more}, or of the hub's Parquet files"
    )
