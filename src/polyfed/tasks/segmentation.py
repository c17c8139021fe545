"""Defines the task of saying of each pixel of an image, or voxel of a volume, what it belongs to."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from polyfed.core.errors import UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.io.text.number_format import format_batch_shape
from polyfed.core.tasks.task import Loss, Task
from polyfed.tasks.classification import fixed_class_weights, softened_divergence
from polyfed.tasks.scores.segmentation_scores import IGNORED, METRICS, ignored_pixels, score_table
from polyfed.tasks.sliding_windows import SlidingWindows

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_MOST_CLASSES = 2**15  # more are a mistake, and would take gigabytes
_SMOOTH = 1.0  # added above and below the fraction of the soft Dice, so that it is defined for empty masks


@final
@dataclass(frozen=True)
class Segmentation(Task):
    """Says what each pixel of an image (n, channels, H, W), or voxel of a volume (n, channels, D, H, W), belongs to.

    Targets are the class of each pixel, integers of shape (n, H, W) or (n, D, H, W) with 0 for the background; with
    `masks`, 0 or 1 of shape (n, K, H, W) or (n, K, D, H, W) for K classes that may overlap. They are stored in the integer
    type that is given. The target −100 marks pixels that are neither trained on nor scored. Outputs are logits (n, K, ...).

    The loss is dice_weight·(1 − soft Dice) + cross_entropy_weight·cross-entropy. The soft Dice of a class is
    (2·Σ p·y + 1) / (Σ p + Σ y + 1), where p are probabilities and y targets; it is averaged over all classes but the
    background (Milletari et al. 2016; both terms as in nnU-Net, Isensee et al. 2021).

    Scores are one value an image: Dice and intersection over union, which are 1 if prediction and truth are both empty, and
    the 95 % Hausdorff distance in pixels (`polyfed.tasks.scores.segmentation_scores.hausdorff_95`).

    Args:
        masks: whether targets are one mask a class; False for one class a pixel.
        dice_weight: of the soft Dice in the loss.
        cross_entropy_weight: of the cross-entropy in the loss, which is binary with `masks`.
        batch_dice: whether the sums of the soft Dice run over all images of a minibatch; False sums over each image.
        window: side of the square (cubic) windows in which a network is applied at evaluation and prediction; None for whole
            images. Outputs of windows that overlap are averaged.
        overlap: share of a window that it has in common with the next, from 0 to below 1.

    >>> Segmentation().default_metric.name, Segmentation(masks=True).spec
    ('dice', {'name': 'segmentation', 'masks': True})
    """

    name: ClassVar[str] = "segmentation"
    outputs_are_classes: ClassVar[bool] = True
    has_output_at_each_place: ClassVar[bool] = True
    target_word: ClassVar[str] = "class"
    counts_title: ClassVar[str] = "in which each class occurs"
    outputs_meaning: ClassVar[str] = "logits of each class at each pixel."
    no_curves_reason: ClassVar[str] = (
        "ROC curves and counts are of classes of examples; these networks say what each pixel belongs to."
    )

    page_sections: ClassVar[tuple[str, ...]] = ("segmentation_images",)

    masks: bool = False
    dice_weight: float = 1.0
    cross_entropy_weight: float = 1.0
    batch_dice: bool = False
    window: int | None = None
    overlap: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = (self.dice_weight, self.cross_entropy_weight)
        if min(weights) < 0 or not max(weights) > 0:
            raise UserError(f"dice_weight and cross_entropy_weight must be at least 0, and one above, got {weights}")
        if self.window is not None and self.window < 1:
            raise UserError(f"window must be a number of pixels of at least 1, or None, got {self.window}")
        if not 0 <= self.overlap < 1:
            raise UserError(f"overlap must be a share from 0 to below 1, got {self.overlap}")

    # -- targets --------------------------------------------------------------------------------------------------

    def prepare_targets(self, targets: Tensor) -> Tensor:
        """Returns integers unchanged, other whole numbers (bool, float) as uint8, or int64 if too large."""
        if targets.dtype in _INTEGERS or not targets.numel():
            return targets
        if targets.dtype == torch.bool:
            return targets.to(torch.uint8)
        integers = targets.to(torch.int64)
        if not torch.equal(integers.to(targets.dtype), targets):
            return targets  # which `check_targets` refuses
        return integers.to(torch.uint8) if 0 <= int(integers.min()) <= int(integers.max()) < 256 else integers

    def check_targets(self, targets: Tensor, name: str, num_outputs: int | None = None) -> None:
        """Checks that targets are classes of pixels, or masks of 0 and 1, of images or volumes."""
        form = "(n, classes, height, width)" if self.masks else "(n, height, width)"
        volume = form.replace("height", "depth, height")
        if targets.dim() not in ((4, 5) if self.masks else (3, 4)):
            other = (
                "" if self.masks or targets.dim() != 5 else "; masks of several classes need Segmentation(masks=True)"
            )
            raise UserError(
                f"{name} targets have shape {tuple(targets.shape)}; segmentation needs {form} or {volume}{other}"
            )
        if targets.is_floating_point():
            row, value = _first_row(targets != targets.round(), targets)
            raise UserError(
                f"{name} targets are {targets.dtype}, and row {row} has {value:g}; give whole numbers, the class of each "
                "pixel (probabilities become masks by (y > 0.5).astype('uint8'))"
            )
        if self.masks:
            is_wrong, most = ~((targets == 0) | (targets == 1)), 1
            if num_outputs is not None and targets.shape[1] != num_outputs:
                raise UserError(
                    f"{name} targets have {targets.shape[1]} masks an image, the data {num_outputs} classes"
                )
        else:
            most = _MOST_CLASSES - 1 if num_outputs is None else num_outputs - 1
            # torch would convert a number that the integer type does not hold, and compare with another.
            is_wrong = (targets < 0) | (targets > min(most, torch.iinfo(targets.dtype).max))
        ignored = ignored_pixels(targets)
        if bool((is_empty := ignored.flatten(1).all(1)).any()):
            raise UserError(
                f"{name} targets: all pixels of row {int(is_empty.nonzero()[0, 0])} are ignored ({IGNORED}); leave the row "
                "out, or give a pixel of it a class"
            )
        is_wrong &= ~ignored
        if bool(is_wrong.any()):
            row, value = _first_row(is_wrong, targets)
            hint = " (masks of 0 and 255: y // 255)" if value == 255 else ""
            raise UserError(
                f"{name} targets: row {row} has the value {value:g}; {'masks' if self.masks else 'classes of pixels'} are "
                f"{'0 or 1' if self.masks else f'whole numbers from 0 to {most}'}, or {IGNORED} for pixels to "
                f"ignore{hint}"
            )

    def num_outputs(self, targets: Tensor, names: Sequence[str] = ()) -> int:
        """Returns the number of classes: of names, or of masks, or one more than the largest class, at least 2."""
        return len(names) or (targets.shape[1] if self.masks else max(2, int(targets.max()) + 1))

    def check_outputs(self, shape: tuple[int, ...], targets: Tensor, name: str) -> None:
        """Checks that a network has a logit for each class at each pixel of the targets."""
        image = tuple(targets.shape[2 if self.masks else 1 :])
        if len(shape) != len(image) + 1:
            if not self.masks and image[0] == 1 and shape[1:] == image[1:]:
                raise UserError(
                    f"{name}: targets have an axis of one channel, {format_batch_shape(image)}, and are the class of each "
                    f"pixel, {format_batch_shape(image[1:])}; leave it out, y.squeeze(1)"
                )
            raise UserError(
                f"{name}: the network's outputs have shape {format_batch_shape(shape)}; segmentation of "
                f"{_join_sides(image)} pixels needs {format_batch_shape(('classes', *image))}, as of the "
                f"model unet{'3d' if len(image) == 3 else ''}"
            )
        if shape[1:] != image:
            raise UserError(
                f"{name}: the masks have {_join_sides(image)} pixels and the network's outputs "
                f"{_join_sides(shape[1:])}; masks must have the size of the images, and a network must keep it"
            )
        needed = targets.shape[1] if self.masks else self.num_outputs(targets)
        if shape[0] != needed if self.masks else shape[0] < needed:
            row = "" if self.masks else f" (row {_first_row(targets == needed - 1, targets)[0]} has {needed - 1})"
            raise UserError(
                f"{name}: the network has {shape[0]} outputs a pixel, the targets have {needed} classes{row}"
            )

    # -- loss -----------------------------------------------------------------------------------------------------

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns Dice loss and cross-entropy with their weights, over the pixels that are not ignored."""
        return self._loss(outputs, targets)

    def _loss(
        self, outputs: Tensor, targets: Tensor, class_weights: Tensor | None = None, label_smoothing: float = 0.0
    ) -> Tensor:
        valid = ~ignored_pixels(targets)
        classes = torch.where(valid, targets, 0).long()
        if self.masks:
            truth = classes.to(outputs.dtype)
            weights = None if class_weights is None else class_weights.view(-1, *[1] * (outputs.dim() - 2))
            pixel_losses = F.binary_cross_entropy_with_logits(outputs, truth, pos_weight=weights, reduction="none")
            entropy = (pixel_losses * valid).sum() / valid.sum().clamp_min(1)
            probabilities = outputs.sigmoid()
        else:
            pixel_losses = F.cross_entropy(
                outputs, classes, class_weights, reduction="none", label_smoothing=label_smoothing
            )
            counts = valid if class_weights is None else valid * class_weights[classes]
            entropy = (pixel_losses * valid).sum() / counts.sum().clamp_min(1e-6)
            probabilities = outputs.softmax(1)[:, 1:]
            truth = F.one_hot(classes, outputs.shape[1]).movedim(-1, 1)[:, 1:].to(outputs.dtype)
            valid = valid.unsqueeze(1)
        dice = _soft_dice(probabilities * valid, truth * valid, over_batch=self.batch_dice)
        return self.dice_weight * (1 - dice) + self.cross_entropy_weight * entropy

    def training_loss(self, targets: Tensor, class_weights: Any = None, label_smoothing: float = 0.0) -> Loss:
        """Returns the loss, with weights of classes and label smoothing in its cross-entropy alone.

        With `masks`, the weights are those of pixels inside a class's mask, and there is no label smoothing. "balanced"
        gives class c the weight n/(K·n_c) for n_c of n pixels, and a mask (n − n_c)/n_c.
        """
        if class_weights is None:
            return partial(self._loss, label_smoothing=label_smoothing)

        def weighted_loss(outputs: Tensor, minibatch: Tensor) -> Tensor:
            number = outputs.shape[1]
            balanced = class_weights == "balanced"
            weights = (
                self._balanced_weights(targets, number) if balanced else fixed_class_weights(class_weights, number)
            )
            return self._loss(outputs, minibatch, weights.to(outputs.device, outputs.dtype), label_smoothing)

        return weighted_loss

    def _balanced_weights(self, targets: Tensor, num_outputs: int) -> Tensor:
        if self.masks:
            sums = (0, *range(2, targets.dim()))
            positive, valid = (targets == 1).sum(sums).double(), (~ignored_pixels(targets)).sum(sums).double()
            return torch.where((positive > 0) & (positive < valid), (valid - positive) / positive, 1.0)
        counts = torch.bincount(targets[~ignored_pixels(targets)].long(), minlength=num_outputs)[:num_outputs].double()
        return torch.where(counts > 0, counts.sum() / ((counts > 0).sum() * counts), 1.0)

    def output_distance(self, teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
        """Returns the divergence of each pixel's probabilities at a temperature, averaged over pixels (and masks)."""
        if self.masks:  # each mask is a binary choice with logits z and 0
            teacher, student = (F.pad(z.unsqueeze(-1), (0, 1)) for z in (teacher, student))
        else:
            teacher, student = teacher.movedim(1, -1), student.movedim(1, -1)
        return softened_divergence(teacher, student, temperature)

    # -- what outputs mean ----------------------------------------------------------------------------------------

    def prediction_network(self, network: nn.Module) -> nn.Module:
        """Returns the network, or with `window` one that applies it to windows."""
        return network if self.window is None else SlidingWindows(network, self.window, self.overlap)

    def to_predictions(self, outputs: Tensor) -> NDArray[np.float64]:
        """Returns the probability of each class at each pixel, in the shape of the outputs."""
        outputs = outputs.double()
        return np.asarray((outputs.sigmoid() if self.masks else outputs.softmax(1)).numpy())

    def prediction_columns(self, outputs: Tensor, names: Sequence[str]) -> dict[str, list[Any]]:
        """Returns for each image the number of pixels of each class."""
        likely = outputs > 0 if self.masks else F.one_hot(outputs.argmax(1), outputs.shape[1]).movedim(-1, 1)
        counts = likely.flatten(2).sum(2)
        return {f"pixels of {name}": counts[:, i].tolist() for i, name in enumerate(names)}

    def stored_outputs(self, outputs: Tensor, targets: Tensor, metrics: Sequence[Metric]) -> Tensor:
        """Returns the scores of each image, shape (n, 3); the outputs if a metric is not one of this task."""
        if not all(self.find_metric(metric.name) == metric for metric in metrics):
            return outputs
        names = frozenset(metric.name for metric in metrics or METRICS[:1])
        return score_table(outputs, targets, names)

    def stored_targets(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Returns, where scores are kept, the number of pixels of each image that are not background; else the targets."""
        return targets if outputs.dim() > 2 else (targets > 0).flatten(1).sum(1)

    # -- scores, splits and counts --------------------------------------------------------------------------------

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Returns Dice, the default, intersection over union, and the 95 % Hausdorff distance."""
        return METRICS

    def strata(self, targets: Tensor) -> NDArray[Any]:
        """Returns whether an image has anything but background (1) or not (0)."""
        return np.asarray((targets > 0).flatten(1).any(1).long().cpu().numpy())

    def class_counts(self, targets: Tensor, num_classes: int) -> tuple[int, ...]:
        """Returns the number of images in which each class occurs."""
        if self.masks:
            return tuple((targets == 1).flatten(2).any(2).sum(0).tolist())
        return tuple(int((targets == k).flatten(1).any(1).sum()) for k in range(num_classes))


def _soft_dice(probabilities: Tensor, truth: Tensor, *, over_batch: bool) -> Tensor:
    sums = (0, *range(2, truth.dim())) if over_batch else tuple(range(2, truth.dim()))
    both = (probabilities * truth).sum(sums)
    return ((2 * both + _SMOOTH) / (probabilities.sum(sums) + truth.sum(sums) + _SMOOTH)).mean()


def _first_row(is_wrong: Tensor, targets: Tensor) -> tuple[int, float]:
    """Returns the first row with a wrong value, and this value."""
    place = tuple(is_wrong.nonzero()[0].tolist()) if bool(is_wrong.any()) else (0,) * is_wrong.dim()
    return place[0], float(targets[place])


def _join_sides(sides: Sequence[int]) -> str:
    return "×".join(map(str, sides))
