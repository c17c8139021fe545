"""Builds a multi-label data set: mosaics of up to four images from Fashion-MNIST."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.data.formats.images import measure_normalisation
from polyfed.data.pooled_dataset import PooledDataset, Source, build_pooled_dataset
from polyfed.data.sources.published.vision import FashionMNIST

_PLACES = 4


@final
@dataclass(frozen=True)
class FashionMosaics(Source):
    """Builds a data set of multi-label images, each a mosaic of up to four images of Fashion-MNIST.

    An image has 28×28 pixels and four places of 14×14; a place holds a half-sized image of Fashion-MNIST, or nothing. A
    label says whether an image of the class is in it; all are zero if every place is empty. The set is a stand-in, made by
    polyfed, for multi-label images that cannot be had offline (chest X-rays). Training mosaics are made of training images
    and test mosaics of test images, the same ones at every call.

    Args:
        path: folder with Fashion-MNIST's four IDX files or Parquet files; None for the Hugging Face hub.
        filled: probability that a place has an image. At 0.3 a label is 1 in 11 % of the mosaics, and 24 % have none.
        num_train, num_test: numbers of mosaics.

    Raises:
        UserError: `filled` is not a probability above 0, or a number is below 1.
    """

    path: str | None = None
    filled: float = 0.3
    num_train: int = 20_000
    num_test: int = 5_000

    def __post_init__(self) -> None:
        if not 0 < self.filled <= 1:
            raise UserError(f"filled must be above 0 and at most 1, got {self.filled}")
        if self.num_train < 1 or self.num_test < 1:
            raise UserError(f"num_train and num_test must be at least 1, got {self.num_train} and {self.num_test}")

    def load(self) -> PooledDataset:
        """Loads Fashion-MNIST, and builds the data set of mosaics from it."""
        pictures = FashionMNIST(path=self.path).load()
        assert pictures.test is not None
        parts = (("train", pictures.train, self.num_train), ("test", pictures.test, self.num_test))
        train, test = (
            build_mosaics(
                part.input_tensor, part.labels, number, filled=self.filled, seed=derive_seed(0, "mosaics", name)
            )
            for name, part, number in parts
        )
        return build_pooled_dataset(train, test, pictures.class_names, measure_normalisation(train[0]))


def build_mosaics(
    x: Tensor, y: Tensor, num_mosaics: int, *, filled: float, seed: int, classes: int = 10
) -> tuple[Tensor, Tensor]:
    """Builds images from up to four of `x` each, and multi-label targets of the classes in them.

    Args:
        x: images, uint8 (num, 1, h, w) with even h and w.
        y: their classes, int64 (num,).
        num_mosaics: number of mosaics.
        filled: probability that a place has an image, drawn with replacement.
        seed: of the draws.
        classes: number of labels.

    Returns:
        uint8 (num_mosaics, 1, h, w), and float 0 or 1 (num_mosaics, classes).

    >>> x, y = build_mosaics(torch.full((1, 1, 4, 4), 8, dtype=torch.uint8), torch.tensor([2]), 3, filled=1, seed=0,
    ...                      classes=3)
    >>> x.unique().tolist(), y.tolist()
    ([8], [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    """
    generator = torch_generator(seed)
    positions = torch.randint(len(x), (num_mosaics, _PLACES), generator=generator)
    is_filled = torch.rand(num_mosaics, _PLACES, generator=generator) < filled
    small = torch.nn.functional.avg_pool2d(x.float(), 2).round().to(torch.uint8)
    tiles = small[positions, 0] * is_filled[:, :, None, None]  # (number, place, h/2, w/2)
    rows = [torch.cat([tiles[:, k], tiles[:, k + 1]], dim=2) for k in (0, 2)]
    labels = torch.zeros(num_mosaics, classes).scatter_reduce(1, y[positions], is_filled.float(), "amax")
    return torch.cat(rows, dim=1)[:, None], labels
