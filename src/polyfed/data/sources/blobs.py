"""Builds a segmentation data set for use offline: made images with blobs, of sites whose scanners differ."""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.data.formats.images import measure_normalisation
from polyfed.data.pooled_dataset import PooledDataset, Source
from polyfed.tasks import Segmentation

SITES = ("east", "north", "south", "west")
# Each site's scanner: brightness of tissue, contrast of a blob, radius of the blur in pixels, spread of the noise.
_SCANNERS = ((0.35, 0.35, 0, 0.10), (0.50, 0.25, 1, 0.05), (0.20, 0.50, 1, 0.15), (0.60, -0.30, 0, 0.10))
_TISSUE_SPREAD = 0.15  # standard deviation of the tissue's grey level


@final
@dataclass(frozen=True)
class Blobs(Source):
    """Builds grey images with up to three blobs each, and the blobs' masks (task `segmentation`, two classes).

    An image has smooth tissue, blobs (ellipses) that are brighter than it, and noise. Four sites have scanners of other
    brightness, contrast, blur and noise; at the last one blobs are darker than the tissue. One image in eight has no blob.
    The set is a stand-in, made by polyfed, and the same at every call. The column "site" has the sites' names.

    Args:
        images: numbers of images of the four sites (polyfed's choice).
        image_size: pixels a side.
        volumes: builds volumes of image_size voxels a side instead, with ellipsoids.

    Raises:
        UserError: not four numbers of at least 2, or a size below 16.
    """

    images: tuple[int, int, int, int] = (16, 24, 32, 40)
    image_size: int = 32
    volumes: bool = False

    def __post_init__(self) -> None:
        if len(self.images) != len(SITES) or min(self.images) < 2:
            raise UserError(f"images must be four numbers of at least 2, one for each site, got {self.images}")
        if self.image_size < 16:
            raise UserError(f"image_size must be at least 16 pixels, got {self.image_size}")

    def load(self) -> PooledDataset:
        """Builds the images and masks of all sites."""
        dimensions = 3 if self.volumes else 2
        parts = [
            build_images_and_masks(number, self.image_size, dimensions, scanner, seed=derive_seed(0, "blobs", site))
            for number, site, scanner in zip(self.images, SITES, _SCANNERS, strict=True)
        ]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return PooledDataset(
            Examples(x, y, transform=measure_normalisation(x)),
            None,
            ("background", "blob"),
            Segmentation(),
            {"site": np.repeat(SITES, self.images)},
        )


def build_images_and_masks(
    number: int, side: int, dimensions: int, scanner: tuple[float, float, int, float], *, seed: int
) -> tuple[Tensor, Tensor]:
    """Builds images of one scanner, and their masks.

    Args:
        number: of images.
        side: pixels a side.
        dimensions: 2 for images, 3 for volumes.
        scanner: brightness of the tissue and contrast of a blob, of grey levels from 0 to 1; radius of the blur in pixels;
            standard deviation of the noise.
        seed: of all draws.

    Returns:
        uint8 (number, 1, side, side), and masks of 0 and 1, uint8 (number, side, side); with one more side for volumes.

    >>> x, y = build_images_and_masks(3, 16, 2, (0.4, 0.3, 1, 0.1), seed=0)
    >>> x.shape, x.dtype, y.shape, y.unique().tolist()
    (torch.Size([3, 1, 16, 16]), torch.uint8, torch.Size([3, 16, 16]), [0, 1])
    """
    brightness, contrast, blur, noise = scanner
    generator = torch_generator(seed)
    shape = (side,) * dimensions
    grid = torch.stack(torch.meshgrid(*[torch.arange(side, dtype=torch.float32)] * dimensions, indexing="ij"))
    masks = torch.zeros((number, *shape), dtype=torch.bool)
    for image in range(number):
        for _ in range(0 if image % 8 == 7 else int(torch.randint(1, 4, (), generator=generator))):
            centre = side * (0.2 + 0.6 * torch.rand(dimensions, generator=generator))
            radii = side * (0.08 + 0.1 * torch.rand(dimensions, generator=generator))
            placed = (grid - centre.view(-1, *[1] * dimensions)) / radii.view(-1, *[1] * dimensions)
            masks[image] |= placed.square().sum(0) < 1
    coarse = torch.randn((number, 1, *[4] * dimensions), generator=generator)
    tissue = F.interpolate(coarse, shape, mode="bilinear" if dimensions == 2 else "trilinear", align_corners=False)
    grey = brightness + _TISSUE_SPREAD * tissue + contrast * masks.unsqueeze(1)
    if blur:
        smooth = F.avg_pool2d if dimensions == 2 else F.avg_pool3d
        grey = smooth(grey, 2 * blur + 1, stride=1, padding=blur, count_include_pad=False)
    grey = grey + noise * torch.randn(grey.shape, generator=generator)
    return (255 * grey.clamp(0, 1)).round().to(torch.uint8), masks.to(torch.uint8)
