"""Segmentation: scores against brute force and published code's numbers, the loss, targets, and windows."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from polyfed import Client, Metric, UserError, tasks
from polyfed.core.evaluation.evaluate import evaluate_client_with_outputs
from polyfed.core.evaluation.metrics import METRICS
from polyfed.tasks.scores.segmentation_scores import (
    IGNORED,
    dice_per_image,
    hausdorff_95,
    hd95_per_image,
    iou_per_image,
    predicted_and_true_masks,
)
from polyfed.tasks.sliding_windows import SlidingWindows

SEGMENTATION, MASKS = tasks.Segmentation(), tasks.Segmentation(masks=True)


def logits_of_classes(classes, number):
    return nn.functional.one_hot(classes, number).movedim(-1, 1).float()


def random_classes(seed, shape=(3, 9, 7), number=3):
    return torch.randint(number, shape, generator=torch.Generator().manual_seed(seed))


# -- scores ----------------------------------------------------------------------------------------------------------------


def edge_pixels(mask):
    """The pixels of a mask with a neighbour (in a straight line) outside it, or at the border of the image."""
    padded = np.pad(mask, 1)
    steps = [
        s
        for axis in range(mask.ndim)
        for s in (np.eye(mask.ndim, dtype=int)[axis], -np.eye(mask.ndim, dtype=int)[axis])
    ]
    return [p for p in np.argwhere(mask) if not all(padded[tuple(p + 1 + step)] for step in steps)]


def brute_force_hausdorff(a, b):
    directions = []
    for ours, theirs in ((edge_pixels(a), edge_pixels(b)), (edge_pixels(b), edge_pixels(a))):
        nearest = sorted(min(math.dist(p, q) for q in theirs) for p in ours)
        place = 0.95 * (len(nearest) - 1)  # linear interpolation between the ranks around it
        low = math.floor(place)
        directions.append(nearest[low] + (place - low) * (nearest[min(low + 1, len(nearest) - 1)] - nearest[low]))
    return max(directions)


@pytest.mark.parametrize("shape", [(12, 9), (5, 6, 4)])
def test_hausdorff_distance_is_that_of_all_pairs_of_boundary_pixels(shape):
    generator = np.random.default_rng(0)
    for _ in range(5):
        a, b = (np.zeros(shape, bool) for _ in range(2))
        for mask in (a, b):  # a box each, with a few pixels more
            low = [generator.integers(0, side // 2) for side in shape]
            mask[tuple(slice(k, k + generator.integers(2, 5)) for k in low)] = True
            mask |= generator.random(shape) > 0.97
        assert hausdorff_95(a, b) == pytest.approx(brute_force_hausdorff(a, b))


def test_scores_are_those_of_counts_by_hand():
    predicted, true = random_classes(1), random_classes(2)
    outputs = logits_of_classes(predicted, 3)
    for image in range(3):
        dices, ratios = [], []
        for k in (1, 2):  # not the background
            both = sum(
                int(p == k and t == k) for p, t in zip(predicted[image].flatten(), true[image].flatten(), strict=True)
            )
            of_p, of_t = int((predicted[image] == k).sum()), int((true[image] == k).sum())
            dices.append(2 * both / (of_p + of_t))
            ratios.append(both / (of_p + of_t - both))
        assert dice_per_image(outputs, true)[image] == pytest.approx(np.mean(dices))
        assert iou_per_image(outputs, true)[image] == pytest.approx(np.mean(ratios))


def test_scores_are_those_of_published_code():
    # monai 1.6 (DiceMetric, MeanIoU, HausdorffDistanceMetric(percentile=95); include_background=False) on these masks.
    y, x = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    true = ((y - 12) ** 2 + (x - 14) ** 2 < 49).long() + ((y - 24) ** 2 + (x - 22) ** 2 < 16).long() * 2
    predicted = ((y - 13) ** 2 + (x - 16) ** 2 < 36).long() + ((y - 23) ** 2 + (x - 25) ** 2 < 25).long() * 2
    outputs = logits_of_classes(predicted[None], 3)
    assert dice_per_image(outputs, true[None])[0] == pytest.approx((0.7638 + 0.5263) / 2, abs=1e-4)
    assert iou_per_image(outputs, true[None])[0] == pytest.approx((0.6178 + 0.3571) / 2, abs=1e-4)
    assert hd95_per_image(outputs, true[None])[0] == 3.5


def test_losses_are_those_of_published_code():
    # monai 1.6.1: DiceLoss and DiceCELoss(include_background=False, softmax=True, smooth_nr=1,
    # smooth_dr=1), and DiceLoss of all classes with sigmoid.
    y, x = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    true = ((y - 12) ** 2 + (x - 14) ** 2 < 49).long() + ((y - 24) ** 2 + (x - 22) ** 2 < 16).long() * 2
    other = ((y - 13) ** 2 + (x - 16) ** 2 < 36).long() + ((y - 23) ** 2 + (x - 25) ** 2 < 25).long() * 2
    outputs = torch.stack([torch.sin(x * 0.3 + y * 0.1), torch.cos(x * 0.2), torch.sin(y * 0.4)])[None]
    dice = tasks.Segmentation(cross_entropy_weight=0.0)
    assert float(dice.loss(outputs, true[None])) == pytest.approx(0.8891898393630981)
    assert float(SEGMENTATION.loss(outputs, true[None])) == pytest.approx(2.210232734680176)
    of_two = tasks.Segmentation(batch_dice=True).loss(torch.cat([outputs, 2 * outputs]), torch.stack([true, other]))
    assert float(of_two) == pytest.approx(2.4272639751434326)
    dice = tasks.Segmentation(masks=True, cross_entropy_weight=0.0)
    assert float(dice.loss(outputs, logits_of_classes(true[None], 3))) == pytest.approx(0.7135787010192871)


def test_empty_masks_have_defined_scores():
    empty, full = torch.zeros(1, 4, 5, dtype=torch.int64), torch.ones(1, 4, 5, dtype=torch.int64)
    pairs = {
        (p, t): (p_mask, t_mask)
        for (p, p_mask), (t, t_mask) in itertools.product((("e", empty), ("f", full)), repeat=2)
    }
    scores = {key: [f(logits_of_classes(p, 2), t)[0] for f in (dice_per_image, iou_per_image, hd95_per_image)]
              for key, (p, t) in pairs.items()}  # fmt: skip
    assert scores["e", "e"] == scores["f", "f"] == [1, 1, 0]
    assert scores["e", "f"] == scores["f", "e"] == [0, 0, 5]  # the diagonal of 3 by 4 steps


def test_ignored_pixels_change_neither_scores_nor_loss():
    true = random_classes(3)
    ignored = true.clone()
    ignored[:, 4:] = IGNORED
    first, second = (torch.randn(3, 3, 9, 7, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    second[:, :, 4:] = torch.randn(3, 3, 5, 7)
    for task, targets in (
        (SEGMENTATION, ignored),
        (MASKS, torch.where(ignored[:, None] < 0, ignored[:, None], 1).expand(3, 3, 9, 7)),
    ):
        assert torch.allclose(task.loss(first, targets), task.loss(second, targets))
        assert all(metric(first, targets) == metric(second, targets) for metric in task.metrics)
    everything = torch.full((2, 4, 4), IGNORED)
    assert torch.isfinite(SEGMENTATION.loss(torch.randn(2, 3, 4, 4), everything))


def test_a_mask_that_an_image_does_not_have_counts_in_no_average():
    outputs = torch.randn(2, 3, 9, 7, generator=torch.Generator().manual_seed(0))
    masks = (torch.rand(2, 3, 9, 7, generator=torch.Generator().manual_seed(1)) < 0.3).long()
    partly = masks.clone()
    partly[0, 1] = IGNORED
    for metric in MASKS.metrics:
        scores = metric.per_example(outputs, partly)
        assert scores[1] == metric.per_example(outputs, masks)[1]
        assert scores[0] == metric.per_example(outputs[:1, [0, 2]], masks[:1, [0, 2]])[0]


def test_classes_and_their_masks_have_the_same_scores_and_balanced_weights_count_pixels():
    predicted, true = random_classes(1), random_classes(2)
    classes = predicted_and_true_masks(logits_of_classes(predicted, 3), true)
    masks = predicted_and_true_masks(
        2 * logits_of_classes(predicted, 3)[:, 1:] - 1, logits_of_classes(true, 3)[:, 1:].to(torch.uint8)
    )
    assert all(np.array_equal(a, b) for a, b in zip(classes, masks, strict=True))
    targets = torch.tensor([[[0, 0], [0, 2]]])
    assert SEGMENTATION._balanced_weights(targets, 3).tolist() == pytest.approx([4 / 6, 1, 2])
    loss = SEGMENTATION.training_loss(targets, "balanced")
    outputs = torch.randn(1, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    dice_part = tasks.Segmentation(cross_entropy_weight=0).loss(outputs, targets)
    expected = nn.functional.cross_entropy(outputs, targets, torch.tensor([2 / 3, 1, 2]))
    assert float(loss(outputs, targets)) == pytest.approx(float(dice_part + expected))


def test_soft_dice_of_hard_predictions_is_the_dice_of_pixels_and_batches_are_one_image():
    predicted, true = random_classes(1, (2, 6, 6), 2), random_classes(2, (2, 6, 6), 2)
    outputs = 100.0 * logits_of_classes(predicted, 2)
    only = tasks.Segmentation(cross_entropy_weight=0.0)
    sums = [(int((p & t).sum()), int(p.sum() + t.sum())) for p, t in zip(predicted, true, strict=True)]
    assert float(only.loss(outputs, true)) == pytest.approx(1 - np.mean([(2 * b + 1) / (s + 1) for b, s in sums]))
    batch = tasks.Segmentation(cross_entropy_weight=0.0, batch_dice=True)
    both, size = map(sum, zip(*sums, strict=True))
    assert float(batch.loss(outputs, true)) == pytest.approx(1 - (2 * both + 1) / (size + 1))


# -- targets and networks --------------------------------------------------------------------------------------------------


def test_targets_keep_their_integer_type_and_floats_become_small():
    for dtype in (torch.uint8, torch.int16, torch.int64):
        y = torch.ones(2, 4, 4, dtype=dtype)
        assert SEGMENTATION.prepare_targets(y) is y
    assert SEGMENTATION.prepare_targets(torch.ones(2, 4, 4)).dtype == torch.uint8
    assert SEGMENTATION.prepare_targets(torch.ones(2, 4, 4, dtype=torch.bool)).dtype == torch.uint8


@pytest.mark.parametrize(
    ("task", "targets", "words"),
    [
        (SEGMENTATION, torch.full((2, 4, 4), 0.25), "row 0 has 0.25"),
        (SEGMENTATION, torch.zeros(2, 3, 1, 4, 4, dtype=torch.uint8), r"shape \(2, 3, 1, 4, 4\).*masks=True"),
        (SEGMENTATION, torch.tensor([[[0, 1]], [[0, -3]]]), "row 1 has the value -3"),
        (MASKS, torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1), "row 1 has the value 255.*y // 255"),
        (MASKS, torch.tensor([0, 156], dtype=torch.uint8).view(2, 1, 1, 1), "row 1 has the value 156"),
        (MASKS, torch.zeros(2, 4, 4), "classes, height, width"),
        (SEGMENTATION, torch.tensor([0, IGNORED]).view(2, 1, 1), "all pixels of row 1 are ignored"),
        (MASKS, torch.tensor([0, 1, IGNORED, IGNORED]).view(2, 2, 1, 1), "all pixels of row 1 are ignored"),
    ],
)
def test_wrong_targets_are_refused_with_client_and_row(task, targets, words):
    x = torch.zeros(2, 1, 4, 4)
    good = torch.zeros((2, 1, 4, 4) if task.masks else (2, 4, 4), dtype=torch.uint8)
    with pytest.raises(UserError, match=f"client 'north': test .*{words}"):
        Client("north", None, (x, good), (x, targets), task=task)


def test_networks_of_another_size_or_with_too_few_classes_are_refused():
    targets = torch.zeros(3, 8, 8, dtype=torch.uint8)
    targets[2, 1, 1] = 4
    with pytest.raises(UserError, match="masks have 8×8 pixels and the network's outputs 4×4"):
        SEGMENTATION.check_outputs((5, 4, 4), targets, "client 'north': train")
    with pytest.raises(UserError, match=r"3 outputs a pixel, the targets have 5 classes \(row 2 has 4\)"):
        SEGMENTATION.check_outputs((3, 8, 8), targets, "client 'north': train")
    with pytest.raises(UserError, match="as of the model unet"):
        SEGMENTATION.check_outputs((5,), targets, "client 'north': train")
    SEGMENTATION.check_outputs((7, 8, 8), targets, "client 'north': train")


def test_options_out_of_range_are_refused():
    for options in ({"dice_weight": 0.0, "cross_entropy_weight": 0.0}, {"window": 0}, {"overlap": 1.0}):
        with pytest.raises(UserError):
            tasks.Segmentation(**options)


# -- what a run keeps ------------------------------------------------------------------------------------------------------


def conv_client(task=SEGMENTATION):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 1, 16, 16, generator=generator), random_classes(0, (4, 16, 16), 2)
    return Client("north", lambda: nn.Conv2d(1, 2, 3, padding=1), (x, y), (x, y), task=task)


def test_scores_are_kept_in_place_of_outputs_and_give_the_same_metrics():
    client = conv_client()
    network = client.model()
    chosen = [METRICS["dice"], METRICS["hd95"]]
    row, kept = evaluate_client_with_outputs(network, client, chosen)
    targets = SEGMENTATION.stored_targets(client.test.labels, kept["test"])
    assert kept["test"].shape == (4, 3)
    assert targets.shape == (4,)
    assert [metric(kept["test"], targets) for metric in chosen] == pytest.approx([row["dice"], row["hd95"]])
    assert math.isnan(METRICS["iou"](kept["test"], targets))  # not asked for
    own = Metric("pixels", lambda outputs, targets: float((outputs.argmax(1) == targets).float().mean()))
    assert evaluate_client_with_outputs(network, client, [own])[1]["test"].shape == (4, 2, 16, 16)


def test_outputs_that_are_not_finite_have_no_score():
    outputs = torch.randn(2, 2, 4, 4)
    outputs[1, 0, 2, 2] = math.nan
    assert np.isnan(dice_per_image(outputs, torch.ones(2, 4, 4, dtype=torch.uint8))).tolist() == [False, True]


def test_windows_give_what_the_whole_image_gives_where_no_pixel_looks_further():
    torch.manual_seed(0)
    for dimensions, conv in ((2, nn.Conv2d(1, 2, 1)), (3, nn.Conv3d(1, 2, 1))):
        x = torch.randn(2, 1, *(11, 7, 5)[:dimensions])
        assert torch.allclose(SlidingWindows(conv, 4, 0.5)(x), conv(x), atol=1e-6)
    sizes = []
    network = nn.Conv2d(1, 1, 1)
    network.register_forward_hook(lambda module, inputs, output: sizes.append(tuple(inputs[0].shape[2:])))
    SlidingWindows(network, 8, 0.0)(torch.zeros(1, 1, 20, 6))
    assert sizes == [(8, 6)] * 3
    windows = tasks.Segmentation(window=4)
    client, plain = conv_client(windows), conv_client()
    network = nn.Conv2d(1, 2, 1)
    rows = [evaluate_client_with_outputs(network, c)[0]["dice"] for c in (client, plain)]
    assert rows[0] == rows[1]
