"""Combines clients' tensors number by number: by the median, or by the mean without the largest and smallest."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.robust.rule import CombiningRule, cast_like_original, check_same_form_and_sort_ids, stack_as_double
from polyfed.core.state_dict import StateDict, weighted_mean


@final
@dataclass(frozen=True)
class Median(CombiningRule):
    """Takes the median of the clients' values of each number; of an even number of clients, the mean of the middle two.

    Yin, Chen, Kannan and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML
    2018, definition 1. It bears fewer than half of the clients lying. The paper has no weights, so every client counts
    the same.

    >>> str(Median())
    'median'
    """

    word: ClassVar[str] = "median"

    def __str__(self) -> str:
        return self.word

    def combine(self, tensors_by_client: Mapping[str, StateDict], weights: Mapping[str, float]) -> dict[str, Tensor]:
        """Returns the coordinate-wise median of the clients' tensors."""
        ids, medians = check_same_form_and_sort_ids(tensors_by_client), {}
        for name, original in tensors_by_client[ids[0]].items():
            ordered = stack_as_double(tensors_by_client, ids, name).sort(dim=0).values
            low, high = ordered[(len(ids) - 1) // 2], ordered[len(ids) // 2]
            medians[name] = cast_like_original(low if len(ids) % 2 else (low + high) / 2, original)
        return medians


@final
@dataclass(frozen=True)
class TrimmedMean(CombiningRule):
    """Averages the clients' values of each number without the largest and the smallest.

    Yin et al. 2018, definition 2: of m values the ⌊βm⌋ largest and the ⌊βm⌋ smallest are left out. It bears a share of
    at most β of the clients lying. The paper has no weights, so every client counts the same; with β = 0 the result is
    the mean of an unweighted method, bit for bit.

    Args:
        share: β, the share of the clients that is left out at each end, from 0 to below 0.5.

    >>> str(TrimmedMean(0.1)), TrimmedMean(0.1).client_count_error(9)
    ('trimmed_mean:0.1', 'it leaves out none of 9 clients; at least 0.112 leaves out one at each end')
    """

    share: float = 0.2
    word: ClassVar[str] = "trimmed_mean"

    def __post_init__(self) -> None:
        if not 0 <= self.share < 0.5:
            raise UserError(f"robust='trimmed_mean:SHARE' takes a share from 0 to below 0.5, got {self.share!r}")

    def __str__(self) -> str:
        return f"{self.word}:{self.share!r}"

    def client_count_error(self, num_clients: int) -> str | None:
        """Returns why the rule would protect nothing with so few clients; None if it leaves out at least one."""
        if not self.share or self._num_cut(num_clients):
            return None
        if num_clients < 3:
            return f"it leaves out none of {num_clients} clients; it needs at least 3"
        return (
            f"it leaves out none of {num_clients} clients; at least {math.ceil(1000 / num_clients) / 1000:g} leaves out "
            "one at each end"
        )

    def _num_cut(self, num_clients: int) -> int:
        return math.floor(self.share * num_clients + 1e-9)

    def combine(self, tensors_by_client: Mapping[str, StateDict], weights: Mapping[str, float]) -> dict[str, Tensor]:
        """Returns the coordinate-wise trimmed mean of the clients' tensors."""
        ids, means = check_same_form_and_sort_ids(tensors_by_client), {}
        if not (cut := self._num_cut(len(ids))):
            return weighted_mean(tensors_by_client)
        for name, original in tensors_by_client[ids[0]].items():
            ordered = stack_as_double(tensors_by_client, ids, name).sort(dim=0).values
            means[name] = cast_like_original(ordered[cut : len(ids) - cut].mean(dim=0), original)
        return means
