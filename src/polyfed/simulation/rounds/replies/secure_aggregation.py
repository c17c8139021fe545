"""Simulates secure aggregation: computes the same fixed-point sum of replies as real sites do, but without the
encryption.

Each reply is encoded in fixed point (`polyfed.core.messages.fixed_point`), as a site encodes it before masking. The server
half sees only the sum. So the result equals that of a deployment, bit for bit, and does not depend on the order of replies.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, final

import numpy as np

from polyfed.algorithms import REGISTRY, registry_name
from polyfed.algorithms.base.averaging import Averaging
from polyfed.algorithms.base.reply_sum import ReplySum
from polyfed.core.algorithm import Algorithm, Message
from polyfed.core.errors import UserError
from polyfed.core.messages.fixed_point import (
    FixedPointWords,
    SumLayout,
    build_sum_message,
    counts_in_sum,
    mean_from_fixed_point,
    parse_sum_message,
    to_fixed_point,
)
from polyfed.core.messages.lora import adapter_averaging_mode
from polyfed.core.methods.declared_words import disclosures_needing_consent
from polyfed.core.robust.clip import Clip
from polyfed.core.robust.counted_median import (
    BOUND_TOLERANCE,
    COUNTED_MEDIAN,
    NUM_COUNTS,
    CountedMedian,
    read_announced_median,
)
from polyfed.core.robust.fixed_point_clip import clip_fixed_point_words, limit_mean_update
from polyfed.core.robust.parse import parse_robust_rule
from polyfed.core.state_dict import StateDict, spec_mismatch


def uses_default_mean(algorithm: Algorithm[Any, Any]) -> TypeGuard[Averaging]:
    """Returns True if the method's server only takes the default mean of the clients' replies, weighted or not."""
    return isinstance(algorithm, Averaging) and type(algorithm).aggregate is Averaging.aggregate


def supports_secure_sum(algorithm: Algorithm[Any, Any]) -> bool:
    """Returns whether a method's server needs only the sum of a round's replies."""
    return uses_default_mean(algorithm) and algorithm.aggregates_by_sum


def effective_disclosures(algorithm: Algorithm[Any, Any], secure: bool) -> frozenset[str]:
    """Returns what the server learns of a client ("weights", say); with secure sums only a sum.

    >>> from polyfed.algorithms import FedAvg
    >>> sorted(effective_disclosures(FedAvg(), secure=False)), sorted(effective_disclosures(FedAvg(), secure=True))
    (['weights'], ['sum'])
    """
    return frozenset({"sum"}) if secure and supports_secure_sum(algorithm) else algorithm.discloses


def disclosures_to_allow(algorithm: Algorithm[Any, Any], secure: bool) -> list[str]:
    """Returns, sorted, the disclosures of a method (such as "weights") that each site must have allowed.

    >>> from polyfed.algorithms import IFCA
    >>> disclosures_to_allow(IFCA(), secure=False)
    ['weights']
    """
    return sorted(disclosures_needing_consent(effective_disclosures(algorithm, secure)))


def check_secure_support(algorithm: Algorithm[Any, Any], num_round_clients: int) -> None:
    """Raises a `UserError` if a method needs single replies, or a round has one client."""
    if uses_default_mean(algorithm) and not algorithm.aggregates_by_sum:
        raise UserError(
            f"secure=True gives the server nothing but the sum of a round's replies, and {registry_name(algorithm)} with "
            "averaged_over='all' keeps each client's latest model by itself; give averaged_over='cohort'"
        )
    if adapter_averaging_mode(algorithm) is not None:
        raise UserError(
            "secure=True sums replies of one form, and with adapters=... ranks differ; leave one of them out"
        )
    if not supports_secure_sum(algorithm):
        base = [name for name, m in REGISTRY.items() if issubclass(m, Averaging) and m.aggregate is Averaging.aggregate]
        raise UserError(
            f"secure=True gives the server nothing but the sum of a round's replies, and {registry_name(algorithm)} needs "
            f"each reply by itself, or none; methods whose server half is a mean: {', '.join(base)}"
        )
    check_secure_rule(algorithm)
    if num_round_clients < 2:
        raise UserError(
            f"secure=True hides a client among those of its round, and a round has {num_round_clients}; raise "
            "clients_per_round"
        )


def check_secure_rule(algorithm: Algorithm[Any, Any]) -> None:
    """Raises a `UserError` if a method's robust rule needs single replies, which secure sums hide."""
    rule = parse_robust_rule(getattr(algorithm, "robust", None))
    if rule is not None and not isinstance(rule, Clip):
        raise UserError(
            f"secure=True hides single replies, and robust='{rule}' compares them; give robust='clip' or 'clip:C': then "
            "each site limits its own update before it masks it; or leave one of them out"
        )


def sums_count_norms(algorithm: Algorithm[Any, Any]) -> bool:
    """Returns whether secure sums count norms, so that the bound on updates follows their median.

    See `polyfed.core.robust.counted_median`.

    >>> from polyfed.algorithms import FedAvg
    >>> sums_count_norms(FedAvg(robust="clip:3x")), sums_count_norms(FedAvg(robust="clip:5"))
    (True, False)
    """
    rule = parse_robust_rule(getattr(algorithm, "robust", None))
    return isinstance(rule, Clip) and rule.times_median is not None


@final
class SecureBound(NamedTuple):
    """Holds the bound on an update's norm in a secure sum, and the median that it follows or None."""

    max_norm: float
    median: float | None


def secure_bound(algorithm: Algorithm[Any, Any], message: Message) -> SecureBound | None:
    """Returns the bound on the norm of an update that a client keeps in a secure sum; None without one.

    Args:
        algorithm: the method.
        message: the server's message to the client.

    Raises:
        UserError: the bound follows a median, and the message has none.
    """
    rule = parse_robust_rule(getattr(algorithm, "robust", None))
    if not isinstance(rule, Clip):
        return None
    if rule.times_median is None:
        assert rule.max_norm is not None
        return SecureBound(rule.max_norm, None)
    median = read_announced_median(message)
    return SecureBound(rule.times_median * median, median)


def encode_reply_in_fixed_point(
    reply: Message, algorithm: Algorithm[Any, Any], num_round_clients: int, received: Message | None = None
) -> Message:
    """Encodes a reply in fixed point as its part of a secure sum, as a site does before masking.

    Args:
        reply: the method's reply. Only the averaged groups are encoded, weighted by the number of examples if the method
            weights.
        algorithm: the method.
        num_round_clients: the number of clients in a round.
        received: the message that the reply answers, from which a bound on the update (`robust="clip"`) counts.

    Raises:
        UserError: a value is too large for fixed point, or the message lacks the median that the bound follows.
    """
    assert uses_default_mean(algorithm)
    weight: Any = reply.scalars["num_examples"] if algorithm.weighted else 1  # whole: the encoding checks it
    groups = {group: reply.tensors[group] for group in algorithm.groups if group in reply.tensors}
    received = received or Message()
    bound = secure_bound(algorithm, received)
    if bound is None:
        return build_sum_message(
            to_fixed_point(groups, weight, num_round_clients), SumLayout.from_tensor_groups(groups)
        )
    words, norm = clip_fixed_point_words(
        groups, received, weight, num_round_clients, bound.max_norm, algorithm._differences
    )
    counts = [] if bound.median is None else [norm <= bound.median, norm <= bound.max_norm]
    words = np.concatenate([words, np.array(counts, dtype=np.uint64)])
    return build_sum_message(words, SumLayout.from_tensor_groups(groups, len(counts)))


def find_secure_reply_error(
    part: Message | None, algorithm: Algorithm[Any, Any], server_state: Any, message: Message
) -> str | None:
    """Returns half a sentence on why an encoded reply cannot be summed; None if it can.

    Args:
        part: made by `encode_reply_in_fixed_point`, masked or not.
        algorithm: the method.
        server_state: the state from which the server made `message`.
        message: what was sent to the client.
    """
    try:
        if not isinstance(part, Message):
            raise UserError(f"the reply is a {type(part).__name__}, not a Message")
        layout = parse_sum_message(part)[1]
        if layout.num_counts != (expected := NUM_COUNTS if sums_count_norms(algorithm) else 0):
            raise UserError(f"a part of this secure sum has {expected} counts, and the reply {layout.num_counts}")
        groups = layout.meta_tensors()
        specs = algorithm.reply_spec(server_state, message, Message(groups))
    except ValueError as flaw:
        return str(flaw)
    for group in sorted(specs.keys() | groups.keys()):
        if difference := spec_mismatch(groups.get(group, {}), specs.get(group, {})):
            return f"group {group!r}: {difference}"
    return None


@final
class SecureSum(ReplySum):
    """Sums clients' replies of one round that are encoded in fixed point for secure aggregation, in any order.

    Args:
        method: the method that the replies belong to.
        server_state: the state before the round, with the median that a bound follows; None before round 1.
    """

    def __init__(self, method: Averaging, server_state: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._method, self._ids = method, list[str]()
        self._layout: SumLayout | None = None
        self._total: FixedPointWords = np.zeros(0, dtype=np.uint64)
        self._is_bounded = isinstance(parse_robust_rule(method.robust), Clip)
        self._median = CountedMedian.from_server_state(server_state or {})
        self._messages: list[Message] = []
        self._norm: float | None = None

    @property
    def nbytes(self) -> int:
        """Returns the size of the sum in bytes, eight for each number."""
        return self._total.nbytes

    @property
    def report(self) -> Mapping[str, Any]:
        """Returns the sites' bound, the norm of the mean update, and counts within it; empty without a bound.

        If the bound follows a median, the median and the updates within it are there, too.
        """
        bound = self._bound
        if bound is None:
            return {}
        report = {"rule": str(self._method.robust), "bound": bound.max_norm, "norm_of_mean": self._norm}
        if bound.median is None:
            return report
        within_median, within_bound = self._counts
        counts = {"updates": len(self._ids), "within_median": within_median, "within_bound": within_bound}
        return {**report, "median": bound.median, **counts}

    @property
    def server_state_entries(self) -> Mapping[str, Any]:
        """Returns the median norm that the bound of the next round follows, if it follows one."""
        bound, norm = self._bound, self._norm
        if bound is None or bound.median is None:
            return {}
        if norm is not None and norm > bound.max_norm * (1 + BOUND_TOLERANCE):
            norm = 0.0  # a site does not keep to the bound, so that the mean supports no higher one
        median = (self._median or CountedMedian(bound.median)).next_estimate(self._counts, len(self._ids), norm)
        return {COUNTED_MEDIAN: median.to_plain_list()}

    @property
    def _bound(self) -> SecureBound | None:
        """Returns the bound that each site of the round keeps; None without one, or before a reply has come."""
        return secure_bound(self._method, self._messages[0]) if self._messages else None

    @property
    def _counts(self) -> list[int]:
        """Returns how many updates were up to the median, and up to the bound, as their sites say."""
        assert self._layout is not None
        return counts_in_sum(self._total, self._layout)

    @property
    def client_ids(self) -> Sequence[str]:
        """Returns, in ascending order, the ids of the clients whose replies were added."""
        return sorted(self._ids)

    def add(self, client_id: str, reply: Message, message: Message | None = None) -> None:
        """Adds a client's reply, encoded by `encode_reply_in_fixed_point`.

        Raises:
            UserError: the reply's layout differs from that of the first reply.
        """
        words, layout = parse_sum_message(reply)
        self._add_words(words, layout, [client_id])
        self.note_message_for_bound(message)

    def note_message_for_bound(self, message: Message | None) -> None:
        """Notes a message that a reply of the sum answers, from which a bound on the mean's update counts."""
        if self._is_bounded and message is not None:
            self._messages.append(message)

    def add_sum(self, other: "SecureSum") -> None:
        """Adds another sum of the same round.

        Raises:
            UserError: the sum's layout differs from that of the first reply.
        """
        assert other._layout is not None
        self._add_words(other._total, other._layout, other._ids)
        self._messages += other._messages

    def _add_words(self, words: FixedPointWords, layout: SumLayout, client_ids: Sequence[str]) -> None:
        if self._layout is None:
            self._layout, self._total = layout, words.copy()
        elif layout != self._layout:
            raise UserError(
                f"{type(self._method).__name__}: the tensors of {client_ids[0]!r} are not those of {self._ids[0]!r}; "
                "a secure sum needs replies of one form"
            )
        else:
            self._total += words
        self._ids += client_ids

    def to_message(self) -> Message:
        """Returns the sum as a message that `add` takes."""
        assert self._layout is not None
        return build_sum_message(self._total, self._layout)

    def mean(self) -> Mapping[str, StateDict]:
        """Returns the weighted mean reply, `{group: {name: tensor}}`, with its update within the bound."""
        assert self._layout is not None
        mean, _ = mean_from_fixed_point(self._total, self._layout)
        if (bound := self._bound) is not None and self._received_the_same():
            limited = limit_mean_update(mean, self._messages[0], bound.max_norm, self._method._differences)
            mean, self._norm = dict(limited.mean), limited.norm  # type: ignore[arg-type]
        return {group: mean.get(group, {}) for group in self._method.groups}

    def _received_the_same(self) -> bool:
        """Returns whether all clients of the sum received the same tensors, so that its mean has one update."""
        if not self._messages:
            return False
        first = self._messages[0].tensors
        return all(
            message.tensors.get(group, {}).get(name) is tensor
            for message in self._messages[1:]
            for group in self._method.groups
            for name, tensor in first.get(group, {}).items()
        )
