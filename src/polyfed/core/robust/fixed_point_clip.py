"""Limits the norm of a client's update in the fixed-point numbers of a secure sum.

The server of a secure sum knows no single part of it, so each site limits its own update U = x − m, where m is what it
received. The words that it sends, w, stand for the numbers w/(n·2^32), where n is its weight. With D numbers in floating
tensors, all words fulfil, by `clip_fixed_point_words`,

    ‖w/(n·2^32) − m‖ ≤ C + √D·2^-33/n.

Proof. Within the bound, w = round(n·2^32·x), so that each number is off by at most 2^-33/n. Above it, w = r + t with
r = round(n·2^32·m), off from m by as much, and t = trunc(n·2^32·s·U), which is nowhere larger than n·2^32·s·U, and
s·‖U‖ ≤ C: s is made smaller than C/‖U‖ by 2^-20, more than float64 errs in ‖U‖ and in the products.

The weighted mean of parts that fulfil this does so too. So a mean beyond the bound proves that a site has not limited its
update, though not which. `limit_mean_update` takes what is left: the server limits the mean itself to C.
"""

import math
from typing import NamedTuple, final

import numpy as np
import torch

from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.messages.fixed_point import FRACTION_BITS, FixedPointWords, SumLayout, TensorGroups, to_fixed_point
from polyfed.core.robust.clip import clip_update, euclidean_norm, update_changes
from polyfed.core.state_dict import StateDict

_SHRINK = 1.0 - 2.0**-20


@final
class ClippedWords(NamedTuple):
    """Holds the words of a client's part in a secure sum, and the norm that its update had before it was limited."""

    words: FixedPointWords
    norm: float


def clip_fixed_point_words(
    groups: TensorGroups, received: Message, weight: int, num_parties: int, max_norm: float, differences: frozenset[str]
) -> ClippedWords:
    """Returns the words of a client's part in a secure sum, with the norm of its update at most `max_norm`.

    A part within the bound has the words of `to_fixed_point`, bit for bit. Whole numbers are not limited.

    Args:
        groups: the tensors of the reply that enter the sum.
        received: the message that the reply answers.
        weight, num_parties: as in `to_fixed_point`.
        max_norm: C.
        differences: groups that hold changes already.

    Raises:
        UserError: a value is not finite, or does not fit into the sum.
    """
    changes = update_changes(Message(groups), received, groups, differences, torch.float64)
    norm = euclidean_norm(changes)
    if norm <= max_norm or not math.isfinite(norm):  # not finite: `to_fixed_point` says so
        return ClippedWords(to_fixed_point(groups, weight, num_parties), norm)
    start = {
        group: {
            name: tensor.double() - changes[group, name] if (group, name) in changes else tensor
            for name, tensor in tensors.items()
        }
        for group, tensors in groups.items()
    }
    words = to_fixed_point(start, weight, num_parties).view(np.int64)
    scale = max_norm / norm * _SHRINK * float(weight) * 2.0**FRACTION_BITS
    offset = 1
    for group, name, shape, _ in SumLayout.from_tensor_groups(groups).tensors:
        size = math.prod(shape)
        if (group, name) in changes:
            limited = (changes[group, name] * scale).cpu().trunc().flatten().numpy()
            if not np.abs(words[offset : offset + size] + limited).max(initial=0.0) < 2.0**63 / num_parties:  # NaN too
                raise UserError(
                    f"group {group!r}: the update of {name!r} is too large for a fixed-point sum of {num_parties} sites "
                    f"with {weight} examples here, even limited to {max_norm:g}; lower the bound on updates"
                )
            words[offset : offset + size] += limited.astype(np.int64)
        offset += size
    return ClippedWords(words.view(np.uint64), norm)


@final
class LimitedMean(NamedTuple):
    """Holds the mean of a secure sum, its update within the bound, and the norm that its update had before."""

    mean: dict[str, StateDict]
    norm: float


def limit_mean_update(
    mean: TensorGroups, received: Message, max_norm: float, differences: frozenset[str] = frozenset()
) -> LimitedMean:
    """Limits the norm of the update of a mean to a bound; a mean that honest sites can have is returned as it came.

    Args:
        mean: the mean of a secure sum.
        received: the message that all its sites received.
        max_norm: C.
        differences: groups that hold changes already.
    """
    clipped = clip_update(Message(mean), received, mean, max_norm, differences)
    count = sum(tensor.numel() for state_dict in mean.values() for tensor in state_dict.values())
    largest = max(
        (float(t.abs().max()) for state_dict in mean.values() for t in state_dict.values() if t.numel()), default=0.0
    )
    # What fixed point and float32 round, in the mean and in what the sites received.
    rounding = math.sqrt(count) * (2.0**-32 + largest * 2.0**-23)
    tensors = mean if clipped.norm <= max_norm + rounding else clipped.reply.tensors
    return LimitedMean({group: dict(state_dict) for group, state_dict in tensors.items()}, clipped.norm)
