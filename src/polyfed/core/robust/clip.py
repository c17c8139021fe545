"""Limits the norm of a client's update before it enters the mean."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.io.values.number_checks import is_number
from polyfed.core.robust.rule import RobustRule

COMMON_DRAW = "draw"
"""The group of a message with the whole initial network, from which all clients begin while the server knows no head."""
ROUNDS_REMEMBERED = 5
"""The number of rounds whose medians make the running median."""


@final
@dataclass(frozen=True)
class Clip(RobustRule):
    """Scales an update down to the bound C if its norm is larger, and averages as without a rule.

    U_i ← U_i · min(1, C/‖U_i‖) with U_i = θ_i − θ (Sun, Kairouz, Suresh and McMahan, "Can You Really Backdoor Federated
    Learning?", 2019, section 4, "norm thresholding"). C is a number, or a multiple of the running median of the norms
    (polyfed's choice): the median over the last five rounds of the lower median of each round's norms; in round 1 that of
    the round itself. In secure sums, which hide norms, the median is followed by counts (`CountedMedian`). Clients keep the
    weights of the method. A median of 0 limits nothing.

    Args:
        max_norm: C; None takes the median.
        times_median: C in running medians; None if `max_norm` is given.

    >>> str(Clip()), str(Clip(max_norm=5.0)), Clip().bound([1.0, 4.0, 2.0])
    ('clip:3.0x', 'clip:5.0', 6.0)
    """

    max_norm: float | None = None
    times_median: float | None = None
    word: ClassVar[str] = "clip"
    is_weighted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.max_norm is None and self.times_median is None:
            object.__setattr__(self, "times_median", 3.0)
        if self.max_norm is not None and self.times_median is not None:
            raise UserError("robust='clip' takes max_norm or times_median, not both")
        bound = self.max_norm if self.times_median is None else self.times_median
        if not (is_number(bound) and bound > 0):
            raise UserError(
                f"robust='clip:C' limits the norm of an update to C, which must be positive, got {bound!r}; a bound of 0 "
                "would let no client change anything"
            )

    def __str__(self) -> str:
        if self.times_median is not None:
            return f"{self.word}:{float(self.times_median)!r}x"
        return f"{self.word}:{float(self.max_norm or 0)!r}"

    def bound(self, recent_medians: Sequence[float]) -> float | None:
        """Returns C for a round; None if it depends on norms and none are known yet.

        Args:
            recent_medians: the lower median of the norms of each of the last rounds.
        """
        if self.times_median is None:
            return self.max_norm
        if not recent_medians:
            return None
        median = statistics.median_low(recent_medians)
        return self.times_median * median if median > 0 else math.inf


class ClippedUpdate(NamedTuple):
    """Holds an update's norm, the factor by which it was scaled (1 if it was within the bound), and the reply with it."""

    norm: float
    factor: float
    reply: Message


def update_changes(
    reply: Message,
    received: Message,
    groups: Iterable[str],
    differences: frozenset[str] = frozenset(),
    precision: torch.dtype = torch.float32,
) -> dict[tuple[str, str], Tensor]:
    """Returns the change in each floating-point tensor of a reply, by group and name.

    A tensor that the server has sent as part of a common draw (group "draw", in round 1) counts as a change from that; one
    that it has not sent, or not in this form, as a change from zero.

    Args:
        reply, received: a client's reply, and the message that it answers.
        groups: the groups of the reply that count.
        differences: groups that hold changes already.
        precision: the type of the changes, or that of a tensor if it is more precise.
    """
    changes = {}
    for group in groups:
        for name, tensor in reply.tensors.get(group, {}).items():
            if tensor.is_floating_point():
                change = tensor.detach().to(torch.promote_types(tensor.dtype, precision))
                before = None if group in differences else _tensor_before(received, group, name, tensor)
                changes[group, name] = change if before is None else change - before.to(change)
    return changes


def _tensor_before(received: Message, group: str, name: str, tensor: Tensor) -> Tensor | None:
    """Returns the received tensor of this name and shape, of the same group or the common draw; or None.

    A tensor of another group may have the same name and mean something else.
    """
    for tensors in (received.tensors.get(group, {}), received.tensors.get(COMMON_DRAW, {})):
        before = tensors.get(name)
        if before is not None and before.shape == tensor.shape:
            return before
    return None


def euclidean_norm(changes: Mapping[tuple[str, str], Tensor]) -> float:
    """Returns the Euclidean norm of all tensors together, summed in float64.

    >>> euclidean_norm({("model", "w"): torch.tensor([3.0]), ("model", "b"): torch.tensor([4.0])})
    5.0
    """
    squares = (float(torch.linalg.vector_norm(change, dtype=torch.float64)) ** 2 for change in changes.values())
    return math.sqrt(math.fsum(squares))


def clip_update(
    reply: Message,
    received: Message,
    groups: Iterable[str],
    bound: float | None,
    differences: frozenset[str] = frozenset(),
) -> ClippedUpdate:
    """Scales a client's update down to a bound on its norm; a reply within the bound is returned as it came.

    Whole numbers, such as counters of BatchNorm, do not count and stay.

    Args:
        reply, received, groups, differences: as in `update_changes`.
        bound: C; None only measures.
    """
    changes = update_changes(reply, received, groups, differences)
    norm = euclidean_norm(changes)
    if bound is None or norm <= bound:
        return ClippedUpdate(norm, 1.0, reply)
    factor = bound / norm
    tensors = {group: dict(state_dict) for group, state_dict in reply.tensors.items()}
    for (group, name), change in changes.items():
        tensor = reply.tensors[group][name]
        before = None if group in differences else _tensor_before(received, group, name, tensor)
        limited = change * factor if before is None else torch.add(before.to(change), change, alpha=factor)
        tensors[group][name] = limited.to(tensor.dtype)
    return ClippedUpdate(norm, factor, Message(tensors, reply.scalars))
