"""Clipping and Gaussian noise on what a site sends, and what they guarantee.

What a site sends is its change of what it received: U = reply − received, over all tensors together (a group that did not
come down counts as a change from zero). It sends received + U·min(1, C/‖U‖) + N(0, (zC)²) instead. (McMahan et al. 2018,
"Learning Differentially Private Recurrent Language Models", with the noise added at the site, so that the server need not
be trusted.) Exchanging the whole data set of a site moves the clipped U by at most 2C, so that each message is a Gaussian
mechanism of noise multiplier z/2, and messages compose by Rényi differential privacy (dp-accounting).

The noise is drawn from a stream with a key of 128 bits from the operating system. Of a seed for torch's own generator 32
bits count, which a server could try one by one.
"""

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from polyfed.algorithm import Message
from polyfed.errors import UserError
from polyfed.runs.directory import replace_file


@final
@dataclass(frozen=True)
class Protection:
    """How a site changes what it sends.

    Args:
        clip_norm: C, the largest Euclidean norm of the change that is sent; None does not clip.
        noise_multiplier: z, standard deviation of the noise in each number, in units of C; 0 adds none.
        delta: δ of the guarantee that is told.
        max_epsilon: nothing more is sent that would cost more than this ε in all; None sets no end.

    Raises:
        UserError: a value outside its range, or noise without clipping, which guarantees nothing.
    """

    clip_norm: float | None = None
    noise_multiplier: float = 0.0
    delta: float = 1e-5
    max_epsilon: float | None = None

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not 0 < self.clip_norm < float("inf"):
            raise UserError(f"clip-norm must be positive, got {self.clip_norm!r}")
        if not 0 <= self.noise_multiplier < float("inf"):
            raise UserError(f"noise-multiplier must be at least 0, got {self.noise_multiplier!r}")
        if not 0 < self.delta < 1:
            raise UserError(f"delta must be between 0 and 1, got {self.delta!r}")
        if self.noise_multiplier and self.clip_norm is None:
            raise UserError("noise-multiplier needs clip-norm, without which noise guarantees nothing")
        if self.max_epsilon is not None and not (self.noise_multiplier and 0 < self.max_epsilon < float("inf")):
            raise UserError(f"max-epsilon must be positive, and needs noise-multiplier, got {self.max_epsilon!r}")


def protect(up: Message, down: Message, protection: Protection) -> Message:
    """What is sent instead of the reply `up` to `down`.

    Raises:
        UserError: the change is not finite; or, with noise, the reply holds whole numbers in a tensor that did not come
            down, or complex ones, which noise does not cover.

    >>> down, up = Message({"model": {"w": torch.zeros(2)}}), Message({"model": {"w": torch.tensor([3.0, 4.0])}})
    >>> protect(up, down, Protection(clip_norm=1.0)).arrays["model"]["w"]
    tensor([0.6000, 0.8000])
    """
    if protection.clip_norm is None:
        return up
    received = {(g, n): t for g, tree in down.arrays.items() for n, t in tree.items()}
    changes: dict[tuple[str, str], Tensor] = {}
    for group, tree in up.arrays.items():
        for name, tensor in tree.items():
            if tensor.is_complex() and protection.noise_multiplier:
                raise UserError(f"group {group!r}: tensor {name!r} is complex, which noise does not cover here")
            if tensor.is_floating_point():
                changes[group, name] = tensor.double() - _before(received.get((group, name)), tensor).double()
            elif protection.noise_multiplier and (group, name) not in received:
                raise UserError(
                    f"group {group!r}: tensor {name!r} holds whole numbers, which noise cannot cover; this method cannot "
                    "run with noise-multiplier above 0 here"
                )
    norm = math.sqrt(sum(float((change**2).sum()) for change in changes.values()))
    if not math.isfinite(norm):
        raise UserError("the change is not finite, so that it cannot be clipped, and nothing is sent")
    share = min(1.0, protection.clip_norm / norm) if norm else 1.0
    deviation = protection.noise_multiplier * protection.clip_norm
    generator = np.random.Generator(np.random.Philox(key=secrets.randbits(128)))
    arrays: dict[str, Mapping[str, Tensor]] = {}
    for group, tree in up.arrays.items():
        sent = dict(tree)
        for name, tensor in tree.items():
            if (
                group,
                name,
            ) not in changes:  # counters of BatchNorm, say, stay as they were: noise would not cover them
                sent[name] = received[group, name] if protection.noise_multiplier else tensor
                continue
            change = changes[group, name] * share
            if deviation:
                change += deviation * torch.from_numpy(np.asarray(generator.standard_normal(tuple(change.shape))))
            sent[name] = (_before(received.get((group, name)), tensor).double() + change).to(tensor.dtype)
        arrays[group] = sent
    return Message(arrays, up.scalars)


def _before(received: Tensor | None, tensor: Tensor) -> Tensor:
    alike = received is not None and received.shape == tensor.shape and received.dtype == tensor.dtype
    return received if received is not None and alike else torch.zeros_like(tensor)


def epsilon(messages: Mapping[float, int], delta: float) -> float:
    """ε of (ε, δ)-differential privacy of all that a site has sent, with respect to the exchange of its whole data set.

    Args:
        messages: noise multiplier z of `Protection` -> how many replies with tensors were sent with it.
        delta: δ.

    >>> epsilon({2.0: 1}, 1e-5) < epsilon({2.0: 1, 4.0: 3}, 1e-5) < epsilon({2.0: 4}, 1e-5)
    True
    """
    from dp_accounting import GaussianDpEvent  # an extra, and takes a second
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    for multiplier, number in sorted(messages.items()):
        accountant.compose(GaussianDpEvent(multiplier / 2), number)
    return float(accountant.get_epsilon(delta)) if messages else 0.0


def spend(book: Path, data: str, protection: Protection) -> float:
    """Enters one message into a site's book, which is the same for all runs and methods, since the server names the runs;
    returns the ε that all messages of these data have cost. The caller sees to it that nobody else writes.

    Args:
        book: a JSON file, made with the first message.
        data: the fingerprint of the data that the message is of.
        protection: with noise.

    Raises:
        UserError: the message would cost more than `max_epsilon`; it is not entered.
    """
    pages = json.loads(book.read_text()) if book.exists() else {}
    page = dict(pages.get(data, {}))
    page[str(protection.noise_multiplier)] = page.get(str(protection.noise_multiplier), 0) + 1
    spent = epsilon({float(multiplier): number for multiplier, number in page.items()}, protection.delta)
    if protection.max_epsilon is not None and spent > protection.max_epsilon:
        raise UserError(
            f"epsilon would be {spent:.3g}, above max-epsilon = {protection.max_epsilon:g}; nothing more is sent"
        )
    replace_file(book, json.dumps({**pages, data: page}).encode())
    return spent
