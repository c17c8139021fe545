"""Renders a segmentation's images with truth and prediction: each client's best, middle and worst by Dice.

They are images of the clients' test examples, so that a page has them only if the user asks for it.
"""

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import NDArray
from torch import Tensor, nn

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.evaluation.evaluate import predict
from polyfed.report.page.elements import html_paragraph
from polyfed.tasks.scores.segmentation_scores import dice_per_image, predicted_and_true_masks

SECTION = "segmentation_images"  # in `Task.page_sections`
IMAGES_HEADING = "Images, truth and prediction"
WARNING = "This page holds images of the sites' test examples: treat it as their data."
# Of classes, in turn.
_COLOURS = np.array([(0, 158, 115), (230, 159, 0), (204, 121, 167), (86, 180, 233), (213, 94, 0)])
_SAME_DICE = 0.01  # largest difference between two computations of one score
_SIDE = 112  # pixels of an image on the page
_MOST_SIDE = 256  # pixels of an image in the file


def html_best_middle_and_worst_images(client: Client, network: nn.Module, stored_dice: float | None = None) -> Markup:
    """Renders three test images of a client, each beside its true and its predicted masks, with the Dice of each.

    A volume is shown by the slice that has most of the true masks.

    Args:
        client: whose test images they are.
        network: its trained network.
        stored_dice: the score that the run has of the same network and images; None if it has none.

    Raises:
        UserError: the network's score is another, so that these are other images than those of the run.
    """
    outputs = predict(client.task.prediction_network(network), client.test)
    scores = dice_per_image(outputs, client.test.labels.cpu())
    if stored_dice is not None and not abs(float(np.nanmean(scores)) - stored_dice) < _SAME_DICE:
        raise UserError(
            f"the test images of {client.id} have a Dice of {np.nanmean(scores):.3f}, and those of the run had "
            f"{stored_dice:.3f}; give the clients that were trained"
        )
    order = np.argsort(-np.nan_to_num(scores, nan=-1.0), kind="stable")
    places = dict.fromkeys((0, (len(order) - 1) // 2, len(order) - 1))
    words = {0: "best", len(order) - 1: "worst"} | ({} if len(order) < 3 else {(len(order) - 1) // 2: "middle"})
    rows = [(words.get(place, "middle"), int(order[place])) for place in places]
    images, _ = client.test.batch(torch.tensor([row for _, row in rows], device=client.test.device))
    positions = [row for _, row in rows]
    predicted, true = predicted_and_true_masks(outputs[positions], client.test.labels.cpu()[positions])
    cells = [
        Markup('<figure style="display:inline-block;vertical-align:top;width:min(340px,100%);margin:0 .8em 1em 0">'
               '<img alt="{}" width="{}" src="{}">'
               "<figcaption>{}: image, truth, prediction; Dice {:.2f}</figcaption></figure>").format(
            f"{word} of {client.id}", 3 * _SIDE, _encode_png(_join_masks(images[k].cpu(), true[k], predicted[k])), word,
            scores[row],
        )
        for k, (word, row) in enumerate(rows)
    ]  # fmt: skip
    return html_paragraph(client.id) + Markup("").join(cells)


def _join_masks(image: Tensor, true: NDArray[np.bool_], predicted: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Joins an image and its true and predicted masks side by side, uint8, (height, 3 × width + 2, 3)."""
    if image.dim() == 4:
        depth = int(true.sum(axis=(0, 2, 3)).argmax())
        image, true, predicted = image[:, depth], true[:, depth], predicted[:, depth]
    grey = image.float().mean(0).numpy()
    low, high = np.percentile(grey, (1, 99))
    grey = np.clip((grey - low) / max(high - low, 1e-9), 0, 1)
    step = max(1, -(-max(grey.shape) // _MOST_SIDE))
    panels = [_colour_masks(grey[::step, ::step], masks[:, ::step, ::step]) for masks in (true[:0], true, predicted)]
    line = np.full((len(panels[0]), 1, 3), 255, np.uint8)
    return np.concatenate([panels[0], line, panels[1], line, panels[2]], axis=1)


def _colour_masks(grey: NDArray[Any], masks: NDArray[np.bool_]) -> NDArray[np.uint8]:
    panel = np.repeat(255 * grey[:, :, None], 3, axis=2)
    for k, mask in enumerate(masks):
        panel[mask] = 0.5 * panel[mask] + 0.5 * _COLOURS[k % len(_COLOURS)]
    return panel.round().astype(np.uint8)


def _encode_png(pixels: NDArray[np.uint8]) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def html_images_of_clients(
    clients: Sequence[Client], networks: Sequence[nn.Module], stored_dice: Sequence[float | None]
) -> Markup:
    """Renders the images of several clients, under a warning that they are their data."""
    parts = [
        html_best_middle_and_worst_images(*of_client) for of_client in zip(clients, networks, stored_dice, strict=True)
    ]
    return html_paragraph(WARNING) + Markup("").join(parts)
