"""Attacks the first messages of a run's clients, and measures what was reconstructed."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.examples.examples import Examples
from polyfed.core.seeds import derive_seed
from polyfed.core.training.config import LocalTraining
from polyfed.report.audit.messages.image_distances import best_psnr_per_image
from polyfed.report.audit.messages.image_inversion import InversionTarget, compute_inputs_of_first_layer, search_images
from polyfed.report.audit.messages.label_counts import (
    InferredLabels,
    class_shares_overlap,
    find_counts_in_message,
    infer_shares_from_last_layer,
)
from polyfed.report.audit.messages.message_audit import MessageAudit
from polyfed.report.audit.messages.recorded_reply import RecordedReply, record_first_replies
from polyfed.simulation.rounds.federation import Federation

MOST_CLIENTS = 4
MOST_IMAGES = 16
MOST_STEPS = 4
_BestAndMean = tuple[float, float] | tuple[None, None]
_NO_PSNR: _BestAndMean = (None, None)


def attack_messages(
    federation: Federation, client_ids: Sequence[str], iterations: int, restarts: int
) -> tuple[MessageAudit, ...]:
    """Trains round 1 (or 2, if weights are unknown before) again, and attacks what the server sees.

    Up to 16 images are searched for, and up to 4 local steps imitated; beyond, the whole change is taken for a single
    gradient. The labels of the images count as known.

    Args:
        federation: the run, of classification.
        client_ids: whom to attack.
        iterations, restarts: effort of the search; 0 iterations leave out the images.

    Raises:
        ClientError: the training of a client failed.
    """
    replies = record_first_replies(federation, client_ids)
    return tuple(_attack_reply(federation, i, replies[i], iterations, restarts) for i in client_ids)


def choose_most_exposed(clients: Sequence[Client]) -> list[str]:
    """Returns the ids of the up to four clients with the fewest training examples, since their messages show most."""
    return [client.id for client in sorted(clients, key=lambda c: (len(c.train), c.id))[:MOST_CLIENTS]]


def _attack_reply(
    federation: Federation, client_id: str, recorded: RecordedReply, iterations: int, restarts: int
) -> MessageAudit:
    client, method = federation.clients[client_id], federation.algorithm
    steps = _count_local_steps(method, len(client.train))
    num_classes = 1 + max(
        int(part.labels.max()) for c in federation.clients.values() for part in (c.train, c.test) if len(part)
    )
    images = _images_of(client.train)
    inputs = client.train.batch(torch.arange(len(client.train)))[0]
    counts = torch.bincount(client.train.labels.cpu().long(), minlength=num_classes)
    labels = find_counts_in_message(recorded.reply, counts)
    if labels is None and recorded.weights is not None and isinstance(inputs, Tensor) and inputs.is_floating_point():
        labels = _infer_labels(recorded, num_classes, inputs, _sum_of_step_sizes(method, recorded, steps))
    candidates, note = torch.empty(0), ""
    if images is None:
        note = "inputs are not images"
    elif iterations == 0:
        note = "not attacked: 0 iterations"
    elif recorded.weights is None:
        note = "no weights that the server knew before"
    elif not float(images.min()) < float(images.max()):
        note = "all pixels are equal"
    elif not any(bool(part.any()) for part in recorded.weights.change.values()):
        note = "the weights that travel have not changed"
    else:
        target = _choose_target(federation, client, recorded, images, steps)
        candidates = _reconstruct_images(recorded, target, iterations, restarts)
        note = "" if len(candidates) else "no attack for these weights"
    own_psnr, other_psnr = _NO_PSNR, _NO_PSNR
    if images is not None and len(candidates):
        own_psnr = _best_and_mean(candidates, images, images)
        other_psnr = _best_and_mean(candidates, _images_of_others(federation, client, len(images)), images)
    uniform = torch.full((num_classes,), 1 / num_classes)
    return MessageAudit(
        client=client_id,
        round=recorded.round,
        senders=recorded.senders,
        images=0 if images is None else len(images),
        steps=steps,
        candidates=len(candidates),
        best_psnr=own_psnr[0],
        mean_psnr=own_psnr[1],
        other_best_psnr=other_psnr[0],
        other_mean_psnr=other_psnr[1],
        label_source="" if labels is None else labels.source,
        labels_right=None if labels is None else class_shares_overlap(labels.shares, counts),
        labels_right_by_guess=class_shares_overlap(uniform, counts),
        note=note,
    )


def _reconstruct_images(recorded: RecordedReply, target: InversionTarget, iterations: int, restarts: int) -> Tensor:
    assert recorded.weights is not None
    network, change = recorded.weights.network, recorded.weights.change
    computed = compute_inputs_of_first_layer(change, target)
    if network is None:
        return computed
    try:
        return torch.cat([computed, search_images(network, change, target, iterations, restarts)])
    except (RuntimeError, TypeError, ValueError, LookupError):
        return computed  # a network need not take images alone, nor be differentiable twice


def _choose_target(
    federation: Federation, client: Client, recorded: RecordedReply, images: Tensor, steps: int
) -> InversionTarget:
    """Returns what to search for: as many images as the update comes from, at most 16, with the client's labels."""
    num_senders_images = len(images) * recorded.senders
    labels = client.train.labels.cpu().long()
    positions = torch.linspace(0, len(labels) - 1, min(len(labels), MOST_IMAGES)).round().long()
    is_imitable = steps <= MOST_STEPS and num_senders_images <= MOST_IMAGES
    lr = float(getattr(federation.algorithm, "lr", 0.1))
    seed = derive_seed(federation.settings.seed, "attack of messages", client.id)
    low, high = float(images.min()), float(images.max())
    shape, batches = tuple(images.shape[1:]), _count_batches(federation.algorithm, len(images))
    if not is_imitable:
        steps = batches = 1
    return InversionTarget(shape, labels[positions], low, high, steps, batches, lr, seed)


def _infer_labels(
    recorded: RecordedReply, num_classes: int, inputs: Tensor, step_sizes: float | None
) -> InferredLabels | None:
    assert recorded.weights is not None
    try:
        return infer_shares_from_last_layer(
            recorded.weights, num_classes, inputs[0], float(inputs.min()), float(inputs.max()), step_sizes
        )
    except (RuntimeError, TypeError, ValueError, LookupError):
        return None  # the network does not take a batch of inputs and return logits


def _images_of(examples: Examples) -> Tensor | None:
    """Returns the examples as the network gets them, shape (n, channels, height, width); None if they are not images."""
    inputs = examples.batch(torch.arange(len(examples)))[0]
    is_image = isinstance(inputs, Tensor) and inputs.dim() == 4 and inputs.is_floating_point()
    return inputs.detach().cpu() if is_image else None


def _images_of_others(federation: Federation, client: Client, number: int) -> Tensor | None:
    """Returns up to `number` images that the client did not train on: its own test and validation images first."""
    parts: list[Examples | None] = [client.test, client.val]
    parts += [other.test for i, other in sorted(federation.clients.items()) if i != client.id]
    batches = [_images_of(part) for part in parts if part is not None]
    images = [batch for batch in batches if batch is not None]
    return torch.cat(images)[:number] if images else None


def _best_and_mean(candidates: Tensor, images: Tensor | None, range_images: Tensor) -> _BestAndMean:
    """Returns the PSNR of the best image and the mean over all; None without images of this form to compare with."""
    if images is None or images.shape[1:] != candidates.shape[1:]:
        return _NO_PSNR
    psnr = best_psnr_per_image(candidates, images, float(range_images.max() - range_images.min()))
    return round(float(psnr.max()), 2), round(float(psnr.mean()), 2)


def _count_local_steps(method: Algorithm[Any, Any], num_examples: int) -> int:
    """Returns the number of local steps of round 1, as far as its options say it."""
    if not isinstance(method, LocalTraining):
        return 1
    if method.local_steps is not None:
        return method.local_steps
    return method.local_epochs * _count_batches(method, num_examples)


def _count_batches(method: Algorithm[Any, Any], num_examples: int) -> int:
    """Returns the number of local steps in an epoch."""
    if not isinstance(method, LocalTraining) or method.batch_size == 0:
        return 1
    return max(1, math.ceil(num_examples / (method.batch_size * method.accumulate)))


def _sum_of_step_sizes(method: Algorithm[Any, Any], recorded: RecordedReply, steps: int) -> float | None:
    """Returns the sum of the learning rates of all steps, None if the change of the weights is not their sum."""
    is_sgd = isinstance(method, LocalTraining) and method.optimizer == "sgd" and method.schedule == "constant"
    if not is_sgd or recorded.weights is None or not recorded.weights.after:
        return None
    assert isinstance(method, LocalTraining)
    momentum = method.momentum  # a step goes on in the later ones
    factors = sum((1 - momentum ** (steps - k)) / (1 - momentum) for k in range(steps))
    return method.lr * factors
