"""Collects the clients' replies of a round for a robust rule, which takes the place of their mean.

A bound on norms needs no single reply: each is scaled as it comes and added. Only the first round of an adaptive bound,
and the rules that compare replies with one another, hold all replies of a round until the last has come.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final

from torch import Tensor

from polyfed.algorithms.base.reply_sum import PlainReplySum, ReplySum, flatten_groups, split_into_groups
from polyfed.core.algorithm import Message
from polyfed.core.errors import RoundError
from polyfed.core.robust.clip import ROUNDS_REMEMBERED, Clip, clip_update
from polyfed.core.robust.rule import CombiningRule, RobustRule

NORMS_KEY = "robust_norms"
"""The key of the server state with the median norms of the last rounds, which an adaptive bound needs."""


class AveragingSettings(Protocol):
    """Describes the settings of an averaging method that a robust rule reads."""

    @property
    def groups(self) -> Sequence[str]:
        """Returns the groups of a reply that are averaged."""

    @property
    def adapters(self) -> str | None:
        """Returns how adapters of different ranks are averaged; None if they have one rank."""

    @property
    def _differences(self) -> frozenset[str]:
        """Returns the groups of a reply that hold changes already."""

    @property
    def aggregates_by_sum(self) -> bool:
        """Returns True if the server needs only the sum of a round's replies."""


def robust_error(rule: RobustRule, method: AveragingSettings, *, replaces_mean: bool) -> str | None:
    """Returns, as half a sentence, why a rule cannot take the place of a method's mean; None if it can.

    Args:
        rule, method: the rule and the method.
        replaces_mean: whether the method's server takes the default mean.
    """
    if not replaces_mean:
        return "the method's server does more with the replies than to take their mean"
    if method.adapters is not None:
        return "adapters of several ranks are combined by adapters=...; leave one of them out"
    if isinstance(rule, Clip):
        return None
    if not method.aggregates_by_sum:
        return "the method's server also keeps single replies, which only robust='clip' limits"
    if "classes" in method.groups:
        return (
            "replies hold sums over the classes that a client has, which are not comparable; robust='clip' is possible"
        )
    return None


def build_robust_sum(
    rule: RobustRule,
    method: AveragingSettings,
    total: PlainReplySum,
    server_state: Mapping[str, Any],
    *,
    is_weighted: bool,
) -> ReplySum:
    """Builds the object that collects the replies of a round for a robust rule.

    Args:
        rule, method: the rule and the method.
        total: an empty sum, which takes what is averaged.
        server_state: the state before the round.
        is_weighted: whether the method weighs clients by their numbers of examples; only some rules do.
    """
    if isinstance(rule, Clip):
        return ClippedReplySum(rule, method, total, server_state.get(NORMS_KEY, []))
    assert isinstance(rule, CombiningRule)
    return CombinedReplies(rule, method.groups, is_weighted=is_weighted)


@final
class ClippedReplySum(ReplySum):
    """Limits the norm of each client's update, and sums the limited replies.

    Args:
        rule: the bound.
        method: the method.
        total: an empty sum.
        recent_medians: the median norms of the last rounds.
    """

    def __init__(
        self, rule: Clip, method: AveragingSettings, total: PlainReplySum, recent_medians: Sequence[float]
    ) -> None:
        super().__init__()
        self._rule, self._total, self._recent_medians = rule, total, list(recent_medians)
        self._groups, self._differences = tuple(method.groups), frozenset(method._differences)
        self._bound = rule.bound(self._recent_medians)
        self._waiting: dict[str, tuple[Message, Message]] = {}  # of a round whose own norms decide
        self._norms: dict[str, float] = {}
        self._factors: dict[str, float] = {}

    @property
    def client_ids(self) -> Sequence[str]:
        """Returns, sorted, the ids of the clients whose replies were added."""
        return sorted({*self._total.client_ids, *self._waiting})

    @property
    def server_state_entries(self) -> Mapping[str, Any]:
        """Returns the median norms of the last rounds, this one included, if the bound follows them."""
        if self._rule.times_median is None or not self._norms:
            return {}
        medians = [*self._recent_medians, statistics.median_low(self._norms.values())]
        return {NORMS_KEY: medians[-ROUNDS_REMEMBERED:]}

    @property
    def report(self) -> Mapping[str, Any]:
        """Returns the rule, the bound of this round, and the factor by which each update above it was scaled."""
        return {"rule": str(self._rule), "bound": self._bound, "scaled": dict(sorted(self._factors.items()))}

    def add(self, client_id: str, reply: Message, message: Message | None = None) -> None:
        """Adds one client's reply, with its update scaled to the bound.

        Raises:
            IncompatibleTensorsError: the reply's tensors differ in name or shape from those of the first reply.
        """
        received = message or Message()
        if self._bound is None:
            norm = clip_update(reply, received, self._groups, None, self._differences).norm
            self._norms[client_id] = norm
            self._waiting[client_id] = reply, received
        else:
            self._add_clipped(client_id, reply, received)

    def _add_clipped(self, client_id: str, reply: Message, received: Message) -> None:
        clipped = clip_update(reply, received, self._groups, self._bound, self._differences)
        self._norms[client_id] = clipped.norm
        if clipped.factor < 1:
            self._factors[client_id] = clipped.factor
        self._total.add(client_id, clipped.reply)
        self._kept.update(self._total)

    def mean(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns the weighted mean of the limited replies, as `{group: {tensor name: tensor}}`."""
        if self._waiting:
            self._bound = self._rule.bound([statistics.median_low(self._norms.values())])
        for client_id in sorted(self._waiting):
            self._add_clipped(client_id, *self._waiting.pop(client_id))
        return self._total.mean()


@final
class CombinedReplies(ReplySum):
    """Holds all replies of a round, and combines them by a robust rule.

    Args:
        rule: the rule.
        groups: the groups of a reply that are combined.
        is_weighted: whether the method weighs clients by their numbers of examples; only some rules do.
    """

    def __init__(self, rule: CombiningRule, groups: Sequence[str], *, is_weighted: bool) -> None:
        super().__init__()
        self._rule, self._groups, self._is_weighted = rule, groups, is_weighted
        self._tensors: dict[str, dict[str, Tensor]] = {}
        self._weights: dict[str, float] = {}

    @property
    def client_ids(self) -> Sequence[str]:
        """Returns, sorted, the ids of the clients whose replies were added."""
        return sorted(self._tensors)

    @property
    def report(self) -> Mapping[str, Any]:
        """Returns the rule."""
        return {"rule": str(self._rule)}

    def add(self, client_id: str, reply: Message, message: Message | None = None) -> None:
        """Adds one client's reply, which is held until the last has come."""
        self._tensors[client_id] = flatten_groups(reply, self._groups)
        self._weights[client_id] = float(reply.scalars["num_examples"]) if self._is_weighted else 1.0

    def mean(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns the replies as the rule combines them, as `{group: {tensor name: tensor}}`.

        Raises:
            RoundError: fewer replies have come than the rule needs.
            IncompatibleTensorsError: the tensors of two replies differ in name or shape.
        """
        if error_text := self._rule.client_count_error(len(self._tensors)):
            raise RoundError(
                f"robust='{self._rule}' cannot combine the {len(self._tensors)} replies that have come: {error_text}; set "
                "min_replies so that a round waits for enough"
            )
        return split_into_groups(self._rule.combine(self._tensors, self._weights), self._groups)
