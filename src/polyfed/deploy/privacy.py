"""Clipping and Gaussian noise on what a site sends, and what they guarantee.

What a site sends is its change of what it received: U = reply − received, over all tensors together (a group that did not
come down counts as a change from zero). It sends received + U·min(1, C/‖U‖) + N(0, (zC)²) instead. (McMahan et al. 2018,
"Learning Differentially Private Recurrent Language Models", with the noise added at the site, so that the server need not
be trusted.) Exchanging the whole data set of a site moves the clipped U by at most 2C, so that each message is a Gaussian
mechanism of noise multiplier z/2, and rounds compose by Rényi differential privacy (dp-accounting).
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from polyfed.algorithm import Message
from polyfed.errors import UserError


@final
@dataclass(frozen=True)
class Protection:
    """How a site changes what it sends.

    Args:
        clip_norm: C, the largest Euclidean norm of the change that is sent; None does not clip.
        noise_multiplier: z, standard deviation of the noise in each number, in units of C; 0 adds none.
        delta: δ of the guarantee that is told.

    Raises:
        UserError: a value outside its range, or noise without clipping, which guarantees nothing.
    """

    clip_norm: float | None = None
    noise_multiplier: float = 0.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not 0 < self.clip_norm < float("inf"):
            raise UserError(f"clip-norm must be positive, got {self.clip_norm!r}")
        if not 0 <= self.noise_multiplier < float("inf"):
            raise UserError(f"noise-multiplier must be at least 0, got {self.noise_multiplier!r}")
        if not 0 < self.delta < 1:
            raise UserError(f"delta must be between 0 and 1, got {self.delta!r}")
        if self.noise_multiplier and self.clip_norm is None:
            raise UserError("noise-multiplier needs clip-norm, without which noise guarantees nothing")


def protect(up: Message, down: Message, protection: Protection, generator: torch.Generator | None = None) -> Message:
    """What is sent instead of the reply `up` to `down`.

    Args:
        generator: of the noise; None draws its seed from the operating system, since a seed that the server knew would
            let it take the noise away.

    Raises:
        UserError: with noise, the reply holds whole numbers in a tensor that did not come down; noise cannot cover them.

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
            if tensor.is_floating_point():
                changes[group, name] = tensor.double() - _before(received.get((group, name)), tensor).double()
            elif protection.noise_multiplier and (group, name) not in received:
                raise UserError(
                    f"group {group!r}: tensor {name!r} holds whole numbers, which noise cannot cover; this method cannot "
                    "run with noise-multiplier above 0 here"
                )
    norm = math.sqrt(sum(float((change**2).sum()) for change in changes.values()))
    if not math.isfinite(norm):
        return up  # the server refuses it, and says why
    share = min(1.0, protection.clip_norm / norm) if norm else 1.0
    deviation = protection.noise_multiplier * protection.clip_norm
    if generator is None:
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
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
                change += deviation * torch.randn(change.shape, generator=generator, dtype=torch.float64)
            sent[name] = (_before(received.get((group, name)), tensor).double() + change).to(tensor.dtype)
        arrays[group] = sent
    return Message(arrays, up.scalars)


def _before(received: Tensor | None, tensor: Tensor) -> Tensor:
    alike = received is not None and received.shape == tensor.shape and received.dtype == tensor.dtype
    return received if received is not None and alike else torch.zeros_like(tensor)


def epsilon(noise_multiplier: float, messages: int, delta: float) -> float:
    """ε of (ε, δ)-differential privacy of all that a site has sent, with respect to the exchange of its whole data set.

    Args:
        noise_multiplier: z of `Protection`.
        messages: how many replies with tensors it has sent.
        delta: δ.

    >>> round(epsilon(2.0, 1, 1e-5), 2) < round(epsilon(2.0, 10, 1e-5), 2)
    True
    """
    from dp_accounting import GaussianDpEvent  # an extra, and takes a second
    from dp_accounting.rdp import RdpAccountant

    if not messages:
        return 0.0
    if not noise_multiplier:
        return float("inf")
    accountant = RdpAccountant()
    accountant.compose(GaussianDpEvent(noise_multiplier / 2), messages)
    return float(accountant.get_epsilon(delta))
