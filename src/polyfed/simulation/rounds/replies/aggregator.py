"""Passes the clients' replies of a round to the server half of the method, and leaves out replies that would make the
server's state invalid.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch

from polyfed.algorithms.base.reply_sum import ReplySum
from polyfed.core.algorithm import Algorithm, Message, ServerContext
from polyfed.core.errors import RoundError, describe_exception
from polyfed.core.state_dict import iter_tensors, state_dict_spec
from polyfed.simulation.engines.base import PartialSum
from polyfed.simulation.rounds.replies.regional_sums import RegionalSum
from polyfed.simulation.rounds.replies.secure_aggregation import SecureSum, uses_default_mean
from polyfed.simulation.settings import Regions
from polyfed.simulation.storage.checkpoints.client_states import with_changes_only


@final
class AggregatedReplies(NamedTuple):
    """Holds the server's state after aggregation, and the clients whose replies were left out, each with the reason."""

    server_state: Any
    reason_by_left_out_client: dict[str, str]


@final
class ReplyAggregator:
    """Collects the valid replies of the clients in a round, and computes the server's next state from them.

    If the method averages replies, each reply is added to a sum in the order of client ids (an early one waits) and
    released. Otherwise all replies are kept until the end, so that one that makes the state invalid can be left out.

    Args:
        algorithm: the method.
        state: the server's state before the round.
        client_ids: the clients whose replies count.
        num_examples: id -> number of training examples, where it is known.
        secure: whether the replies are parts of a secure sum.
        rebase: makes of a reply to an earlier state one to `state`, and returns it with the message that it then answers;
            None: all replies answer messages made from `state`.
        regions: the region of each client, or their number, if the replies are parts of regional sums.
        waits_for_counts: whether, where numbers of examples are not known, replies are summed when all have come, with the
            numbers in them: the mean has the bits that it has where they are known.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        state: Any,
        client_ids: Sequence[str],
        num_examples: Mapping[str, int],
        secure: bool = False,
        rebase: Callable[[str, Message, Message], tuple[Message, Message]] | None = None,
        regions: Regions | None = None,
        waits_for_counts: bool = False,
    ) -> None:
        self._algorithm, self._state, self._rebase = algorithm, state, rebase
        self._remaining_ids, self._replies = deque(sorted(client_ids)), dict[str, Message]()
        self._messages = dict[str, Message]()  # that waiting replies answer, where a robust rule needs them
        self._is_robust = getattr(algorithm, "robust", None) is not None
        self._report: Mapping[str, Any] = {}
        self._missing_ids: set[str] = set()
        self._round_client_ids = frozenset(client_ids)
        self._sum: ReplySum | None = None
        self.seconds = 0.0  # spent on summing
        if secure and uses_default_mean(algorithm):
            self._sum = SecureSum(algorithm, state)
        elif regions is not None and uses_default_mean(algorithm):
            self._sum = RegionalSum(algorithm, regions)
        elif uses_default_mean(algorithm) and algorithm.reply_spec_is_known(state):
            has_all_counts = not algorithm.weighted or all(i in num_examples for i in client_ids)
            if waits_for_counts and not has_all_counts:
                return
            expected = {i: float(num_examples.get(i, 1)) for i in self._remaining_ids} if has_all_counts else None
            self._sum = algorithm.empty_reply_sum(expected, state)

    @property
    def robust_report(self) -> Mapping[str, Any]:
        """Returns what a robust rule did with the replies, after `aggregate`; empty without a rule."""
        return self._report if self._sum is None else self._sum.report

    @property
    def regional_report(self) -> Mapping[str, Any]:
        """Returns what the regions have forwarded to the server, for the record of the round; empty without regions."""
        if not isinstance(self._sum, RegionalSum):
            return {}
        return {"regions": {"sums": len(sizes := self._sum.bytes_by_region), "bytes_up": sum(sizes.values())}}

    def add_reply(self, client: str, reply: Message, message: Message | None = None) -> bool:
        """Adds a client's reply and returns True; False for a client outside the round's sample.

        With `everyone_trains` such clients train, too.
        """
        if client in self._round_client_ids:
            if self._rebase is not None and message is not None:
                reply, message = self._rebase(client, reply, message)
            if isinstance(self._sum, RegionalSum):  # has no order
                self._sum.add(client, reply, message)
                return True
            self._replies[client] = reply
            if message is not None and self._is_robust:
                self._messages[client] = message
            self._sum_waiting_replies()
        return client in self._round_client_ids

    def add_partial_sum(self, partial_sum: PartialSum) -> None:
        """Adds the sum of some clients' replies that the engine has added up where the clients ran."""
        assert isinstance(self._sum, RegionalSum)
        self._sum.add_partial_sum(partial_sum)

    def mark_client_missing(self, client: str) -> None:
        """Records that a client will not reply in this round."""
        self._missing_ids.add(client)
        self._sum_waiting_replies()

    def _sum_waiting_replies(self) -> None:
        started = time.perf_counter()
        while (
            self._sum is not None
            and self._remaining_ids
            and (self._remaining_ids[0] in self._replies or self._remaining_ids[0] in self._missing_ids)
        ):
            client = self._remaining_ids.popleft()
            if client in self._replies:
                assert uses_default_mean(self._algorithm)
                message = self._messages.pop(client, None)
                self._algorithm.add_reply(self._sum, client, self._replies.pop(client), message)
        self.seconds += time.perf_counter() - started

    def aggregate(self, server: ServerContext, *, leave_out_bad_replies: bool) -> AggregatedReplies:
        """Computes the server's next state, and returns it with the clients left out.

        Args:
            server: what the server knows.
            leave_out_bad_replies: whether a reply that breaks the state is left out; otherwise it ends the run.

        Raises:
            RoundError: the state is not finite, and no single reply is to blame, or none may be left out.
        """
        if self._sum is not None:
            next_state = self._algorithm.aggregate(self._state, self._sum, server)
            if broken := _nonfinite_error(next_state, self._state):
                raise RoundError(
                    f"{type(self._algorithm).__name__}: {broken} after the mean; lower lr or set clip_norm"
                )
            return AggregatedReplies(next_state, {})
        dropped: dict[str, str] = {}
        if leave_out_bad_replies and uses_default_mean(self._algorithm):
            dropped = _find_incompatible_replies(self._replies)
        replies = {i: reply for i, reply in self._replies.items() if i not in dropped}
        next_state, error_text, error = self._try_aggregate(replies, server)
        if error_text is None:
            return AggregatedReplies(next_state, dropped)
        if error is not None and not leave_out_bad_replies:
            raise error
        bad_replies = self._find_bad_replies(replies, server)
        if not leave_out_bad_replies or not bad_replies or len(bad_replies) == len(replies):
            whose = f" for the replies of {', '.join(map(repr, bad_replies))}" if bad_replies else ""
            raise error or RoundError(
                f"{type(self._algorithm).__name__}: {error_text} after aggregation{whose}; lower lr or set clip_norm"
            )
        good_replies = {i: reply for i, reply in replies.items() if i not in bad_replies}
        next_state, error_text, error = self._try_aggregate(good_replies, server)
        if error_text is not None:
            raise error or RoundError(f"{type(self._algorithm).__name__}: {error_text} after aggregation")
        return AggregatedReplies(next_state, dropped | bad_replies)

    def _try_aggregate(
        self, replies: Mapping[str, Message], server: ServerContext
    ) -> tuple[Any, str | None, Exception | None]:
        try:
            summed = self._sum_for_robust_rule(replies)
            next_state = self._algorithm.aggregate(self._state, summed, server)
            self._report = summed.report if isinstance(summed, ReplySum) else {}
        except Exception as error:  # whatever a method raises for numbers that it cannot work with
            return None, describe_exception(error), error
        return next_state, _nonfinite_error(next_state, self._state), None

    def _sum_for_robust_rule(self, replies: Mapping[str, Message]) -> Mapping[str, Message]:
        """Returns the replies, in a sum if a robust rule takes the place of the mean, which needs the messages too."""
        if not (self._is_robust and uses_default_mean(self._algorithm)):
            return replies
        total = self._algorithm.empty_reply_sum(None, self._state)
        for client in sorted(replies):
            self._algorithm.add_reply(total, client, replies[client], self._messages.get(client))
        return total

    def _find_bad_replies(self, replies: Mapping[str, Message], server: ServerContext) -> dict[str, str]:
        """Returns `{client: reason}` of replies that make the state invalid by themselves, or the one to leave out."""
        bad_alone = {
            i: error_text for i in sorted(replies) if (error_text := self._try_aggregate({i: replies[i]}, server)[1])
        }
        if bad_alone or len(replies) == 1:
            return bad_alone
        for i in sorted(replies):
            if self._try_aggregate({j: reply for j, reply in replies.items() if j != i}, server)[1] is None:
                return {i: "with this reply the server's state is not finite, without it it is"}
        return {}


def _find_incompatible_replies(replies: Mapping[str, Message]) -> dict[str, str]:
    """Returns `{client: reason}` of replies whose tensors differ in name, shape or type from most."""
    ids_by_spec: dict[str, list[str]] = {}
    for i in sorted(replies):
        ids_by_spec.setdefault(
            repr({group: state_dict_spec(tensors) for group, tensors in sorted(replies[i].tensors.items())}), []
        ).append(i)
    majority = max(ids_by_spec.values(), key=len)
    reason = f"its tensors have another form than those of {len(majority)} of {len(replies)} clients"
    return {i: reason for i in sorted(replies) if i not in majority}


def _nonfinite_error(after: Any, before: Any) -> str | None:
    """Returns an error if a tensor that the round changed is not finite, or None."""
    unchanged_ids = {id(tensor) for tensor in iter_tensors(with_changes_only(before))}
    for tensor in iter_tensors(with_changes_only(after)):
        if id(tensor) not in unchanged_ids and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return "the server's state is not finite"
    return None
