"""Computes scores of segmentations, one value an image: Dice, intersection over union, and the 95 % Hausdorff distance.

A function takes a network's outputs (n, K, ...) and the targets, or the table of scores (n, 3) that a run keeps in place of
outputs (`score_table`). It averages over classes: over 1 to K − 1 of class targets (n, ...), whose class 0 is the
background, and over all K of masks (n, K, ...). Pixels with the target `IGNORED` belong to no mask, and masks of them alone
are left out of an image's average.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.evaluation.metric import Metric
from polyfed.tasks.scores.score_functions import mean_over_examples

IGNORED = -100
"""The target of pixels that are neither trained on nor scored."""
_NOT_COMPUTED = -1.0
Scores = NDArray[np.float64]
Masks = NDArray[np.bool_]


def dice_per_image(outputs: Tensor, targets: Tensor) -> Scores:
    """Returns the Dice coefficient 2·|A∩B| / (|A| + |B|) of each image, averaged over classes; 1 for two empty masks.

    >>> truth = torch.tensor([[[0, 0], [1, 1]]])
    >>> dice_per_image(torch.tensor([[[[1.0, 1.0], [0.0, 1.0]], [[0.0, 0.0], [2.0, 0.0]]]]), truth)
    array([0.666...])
    """
    return _mean_over_classes(outputs, targets, 0, lambda a, b: _ratio_or_one(2 * (a & b).sum(), a.sum() + b.sum()))


def iou_per_image(outputs: Tensor, targets: Tensor) -> Scores:
    """Returns the intersection over union |A∩B| / |A∪B| of each image, averaged over classes; 1 for two empty masks."""
    return _mean_over_classes(outputs, targets, 1, lambda a, b: _ratio_or_one((a & b).sum(), (a | b).sum()))


def hd95_per_image(outputs: Tensor, targets: Tensor) -> Scores:
    """Returns the 95 % Hausdorff distance of each image in pixels, averaged over classes (`hausdorff_95`)."""
    return _mean_over_classes(outputs, targets, 2, hausdorff_95)


def hausdorff_95(first: Masks, second: Masks) -> float:
    """Returns the 95 % Hausdorff distance of two masks of one shape, in pixels.

    From each boundary pixel of one mask the distance to the nearest boundary pixel of the other is taken; the result is the
    larger of the 95th percentiles in the two directions. 0 if both masks are empty; if one is, the longest distance in the
    image, between the centres of opposite corners.

    >>> a, b = np.zeros((8, 8), bool), np.zeros((8, 8), bool)
    >>> a[2, 2] = b[2, 5] = True
    >>> hausdorff_95(a, b), hausdorff_95(a, a), round(hausdorff_95(a, a & b), 2)
    (3.0, 0.0, 9.9)
    """
    if not first.any() and not second.any():
        return 0.0
    if not first.any() or not second.any():
        return math.sqrt(sum((side - 1) ** 2 for side in first.shape))
    from scipy.ndimage import binary_erosion, distance_transform_edt

    edges = [mask & ~binary_erosion(mask) for mask in (first, second)]
    distances = (distance_transform_edt(~edges[1])[edges[0]], distance_transform_edt(~edges[0])[edges[1]])
    return max(float(np.percentile(values, 95)) for values in distances)


METRICS = tuple(
    Metric(
        name, mean_over_examples(function), higher_is_better=name != "hd95", label=label,
        tasks=frozenset({"segmentation"}), per_example=function,
    )
    for name, label, function in (
        ("dice", "Dice", dice_per_image),
        ("iou", "intersection over union", iou_per_image),
        ("hd95", "95 % Hausdorff distance", hd95_per_image),
    )
)  # fmt: skip
"""The metrics of segmentation, in the order of the columns of `score_table`."""


def score_table(outputs: Tensor, targets: Tensor, names: frozenset[str]) -> Tensor:
    """Returns the scores of each image, float32 of shape (n, 3), from which `METRICS` of these names are computed again.

    It takes 12 bytes an image, the outputs of two classes on 64×64 pixels 32,768.
    """
    columns = [
        metric.per_example(outputs, targets)
        if metric.name in names and metric.per_example is not None
        else np.full(len(outputs), _NOT_COMPUTED)
        for metric in METRICS
    ]
    return torch.from_numpy(np.stack(columns, axis=1)).float()


def ignored_pixels(targets: Tensor) -> Tensor:
    """Returns which pixels are neither trained on nor scored, bool in the shape of the targets."""
    if not targets.dtype.is_signed:  # torch would compare with 156, since −100 is not a uint8
        return torch.zeros_like(targets, dtype=torch.bool)
    return targets == IGNORED


def predicted_and_true_masks(outputs: Tensor, targets: Tensor) -> tuple[Masks, Masks]:
    """Returns the predicted and the true masks of all classes but the background, each of shape (n, classes, ...).

    A pixel is predicted as its most probable class; of masks, as each class whose probability is above one half.
    """
    if targets.dim() == outputs.dim():
        predicted, true, valid = outputs > 0, targets == 1, ~ignored_pixels(targets)
    else:
        classes = torch.arange(1, outputs.shape[1]).view(1, -1, *[1] * (targets.dim() - 1))
        predicted = outputs.argmax(1, keepdim=True) == classes
        true, valid = targets.unsqueeze(1) == classes, ~ignored_pixels(targets).unsqueeze(1)
    return (predicted & valid).numpy(), (true & valid).numpy()


def _mean_over_classes(outputs: Tensor, targets: Tensor, column: int, score: Callable[[Masks, Masks], float]) -> Scores:
    """Returns the mean of a score over classes for each image; NaN for an image with outputs that are not finite."""
    if outputs.dim() == 2:
        stored = outputs[:, column].double().numpy()
        return np.where(stored == _NOT_COMPUTED, np.nan, stored)
    finite = torch.isfinite(outputs).flatten(1).all(1).tolist()
    predicted, true = predicted_and_true_masks(outputs, targets)
    is_scored = np.ones(true.shape[:2], dtype=np.bool_)
    if targets.dim() == outputs.dim():
        is_scored = ~np.asarray(ignored_pixels(targets).flatten(2).all(2).numpy())
    return np.array(
        [
            np.mean([score(predicted[i, k], true[i, k]) for k in np.flatnonzero(is_scored[i])]) if is_finite else np.nan
            for i, is_finite in enumerate(finite)
        ]
    )


def _ratio_or_one(numerator: int, denominator: int) -> float:
    return float(numerator / denominator) if denominator else 1.0
