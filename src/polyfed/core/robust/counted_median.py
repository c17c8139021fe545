"""Follows the median norm of updates in secure sums, which show no single norm, but how many are below a threshold.

Each client of a round gets the threshold M and adds two counts to its part of the sum: 1[‖U‖ ≤ M], and 1[‖U‖ ≤ C], where C,
a multiple of M, is the bound to which it scales its update U. The server learns the two sums alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.io.values.number_checks import is_positive_number
from polyfed.core.robust.clip import euclidean_norm

COUNTED_MEDIAN = "counted_median"
"""The name of M among the scalars of a message, and of a `CountedMedian` in the server state."""
NUM_COUNTS = 2
BOUND_TOLERANCE = 1e-3
"""The share of a bound by which the mean of updates may exceed it before that proves that one of them does."""
_FIRST_RATE, _LEAST_RATE = 2 * math.log(10), 0.6  # a step divides by 10 at most at first, and by 1.35 later
_LARGEST_RISE = 3.0  # of a round: more would leave the next one without a bound that protects
_SMALLEST, _LARGEST = 1e-12, 1e12
_SHARE_OF_START = 0.2
_UNKNOWN_NORM = 30.0  # such as that of the weights of a network of a few million


@final
@dataclass(frozen=True)
class CountedMedian:
    """Holds an estimate of the median norm, which each round's counts move towards the median.

    M ← M · exp(−η (b̄ − γ)) with γ = 1/2 and b̄ the share of norms up to M (Andrew, Thakkar, McMahan and Ramaswamy,
    "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021, section 2.1, without their noise). polyfed's
    choice: η begins at 2·ln 10, so that a first M that is wrong by a factor of 100 takes few rounds, and is halved whenever
    M turns round, to 0.6 at least; in a round M rises threefold at most.

    Args:
        median: M.
        rate: η.
        direction: the sign of the last change of log M; 0 before the first.

    >>> start = CountedMedian(1.0)
    >>> [round(start.next_estimate([within, 4], 4).median, 3) for within in (0, 1, 2, 3, 4)]
    [3.0, 3.0, 1.0, 0.316, 0.1]
    """

    median: float
    rate: float = _FIRST_RATE
    direction: float = 0.0

    @classmethod
    def from_first_message(cls, message: Message) -> "CountedMedian":
        """Starts at a fifth of the norm that the server sends, or 30: no client's data have changed it."""
        changes = {
            (g, n): t for g, tensors in message.tensors.items() for n, t in tensors.items() if t.is_floating_point()
        }
        norm = euclidean_norm(changes)
        return cls(_SHARE_OF_START * norm if _SMALLEST < norm < _LARGEST else _UNKNOWN_NORM)

    @classmethod
    def from_server_state(cls, server_state: Mapping[str, Any]) -> "CountedMedian | None":
        """Returns the estimate after earlier rounds; None before round 1."""
        values = server_state.get(COUNTED_MEDIAN)
        return None if values is None else cls(*values)

    def to_plain_list(self) -> list[float]:
        """Returns the estimate as the server state keeps it."""
        return [self.median, self.rate, self.direction]

    def next_estimate(
        self, counts: Sequence[int], num_clients: int, norm_of_mean: float | None = None
    ) -> "CountedMedian":
        """Returns the estimate for the next round.

        Counts that cannot be change nothing. M rises to 2√n ‖Ū‖ at most, which half of the norms exceed only if updates
        cancel out more than unrelated ones do: so who lies about counts, and sends a usual update, cannot raise the bound
        without limit. If no update was scaled, M falls to ‖Ū‖ at least, since norms are on average no less than that.

        Args:
            counts: how many norms were up to M, and how many up to the bound.
            num_clients: n.
            norm_of_mean: ‖Ū‖, of the mean of the limited updates; None if it is not known.
        """
        if not are_counts_possible(counts, num_clients):
            return self
        pull = 0.5 - counts[0] / num_clients
        rate = max(self.rate / 2, _LEAST_RATE) if pull * self.direction < 0 else self.rate
        median = self.median * min(math.exp(rate * pull), _LARGEST_RISE)
        if norm_of_mean is not None:
            lowest = min(self.median, norm_of_mean) if counts[1] == num_clients else 0.0
            median = min(max(median, lowest), max(self.median, 2 * math.sqrt(num_clients) * norm_of_mean))
        median = min(max(median, _SMALLEST), _LARGEST)
        return CountedMedian(median, rate, math.copysign(1, pull) if pull else self.direction)


def are_counts_possible(counts: Sequence[int], num_clients: int) -> bool:
    """Returns whether clients that count as agreed can have sent counts with these sums.

    >>> are_counts_possible([1, 2], 3), are_counts_possible([-1, 2], 3), are_counts_possible([2, 1], 3)
    (True, False, False)
    """
    return 0 <= counts[0] <= counts[1] <= num_clients


def read_announced_median(message: Message) -> float:
    """Returns M from the server's message.

    Raises:
        UserError: the message has none, or one that is not a positive number.
    """
    median = message.scalars.get(COUNTED_MEDIAN)
    if not is_positive_number(median):
        raise UserError(
            f"the server's message has the {COUNTED_MEDIAN} {median!r}, and a bound on updates in secure sums needs a "
            "positive number"
        )
    return float(median)
