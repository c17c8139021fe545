"""Replies on their way to the server half of a method: summed as they come, or held; and which of them to leave out."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from polyfed.algorithms.averaging import RunningAggregate
from polyfed.core.algorithm import Algorithm, Message, ServerContext
from polyfed.core.errors import RoundError
from polyfed.core.tree import spec, tensors_of
from polyfed.simulation.secure import SecureSum, is_mean


@final
class Intake:
    """The valid replies of a round. Where the server half is a mean, each is summed and let go, in the order of ids: one
    that comes early waits. Otherwise all are held, and a reply that breaks the server's state can be found and left out.

    Args:
        algorithm, state: the method, and the server's state before the round.
        who: the clients whose replies count.
        num_examples: of those whose number is known.
        secure: whether the replies are parts of a secure sum.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        state: Any,
        who: Sequence[str],
        num_examples: Mapping[str, int],
        secure: bool = False,
    ) -> None:
        self._algorithm, self._state = algorithm, state
        self._left, self._held = deque(sorted(who)), dict[str, Message]()
        self._lost: set[str] = set()
        self._wanted = frozenset(who)
        self._sum: RunningAggregate | SecureSum | None = None
        self.seconds = 0.0  # that summing took
        if secure and is_mean(algorithm):
            self._sum = SecureSum(algorithm)
        elif is_mean(algorithm) and algorithm.reply_spec_is_known(state):
            known = not algorithm.weighted or all(i in num_examples for i in who)  # without weights ids are enough
            self._sum = algorithm.running_aggregate({i: num_examples.get(i, 1) for i in self._left} if known else None)

    def came(self, client: str, reply: Message) -> None:
        """Takes in the reply of a client; one that is not of this round's clients (`everyone_trains`) is let go."""
        if client in self._wanted:
            self._held[client] = reply
            self._go_on()

    def lost(self, client: str) -> None:
        """No reply of this client will come."""
        self._lost.add(client)
        self._go_on()

    def _go_on(self) -> None:
        began = time.perf_counter()
        while self._sum is not None and self._left and (self._left[0] in self._held or self._left[0] in self._lost):
            client = self._left.popleft()
            if client in self._held:
                self._sum.add(client, self._held.pop(client))
        self.seconds += time.perf_counter() - began

    def aggregate(self, server: ServerContext, *, drop: bool) -> tuple[Any, dict[str, str]]:
        """The server's next state.

        Args:
            server: what the server knows.
            drop: whether a reply that breaks the state is left out; otherwise it ends the run.

        Returns:
            The state, and the clients that were left out, each with the reason.

        Raises:
            RoundError: the state is not finite, and no single reply is to blame, or none may be left out.
        """
        if self._sum is not None:
            after = self._sum.finalize(self._state)
            if broken := _broken(after, self._state):
                raise RoundError(
                    f"{type(self._algorithm).__name__}: {broken} after the mean; lower lr or set clip_norm"
                )
            return after, {}
        dropped = _unlike(self._held) if drop and is_mean(self._algorithm) else {}
        replies = {i: reply for i, reply in self._held.items() if i not in dropped}
        after, flaw, error = self._try(replies, server)
        if flaw is None:
            return after, dropped
        if error is not None and not drop:
            raise error
        blamed = self._blamed(replies, server)
        if not drop or not blamed or len(blamed) == len(replies):
            whose = f" for the replies of {', '.join(map(repr, blamed))}" if blamed else ""
            raise error or RoundError(f"{type(self._algorithm).__name__}: {flaw} after aggregation{whose}; lower lr or set "
                                      "clip_norm")  # fmt: skip
        rest = {i: reply for i, reply in replies.items() if i not in blamed}
        after, flaw, error = self._try(rest, server)
        if flaw is not None:
            raise error or RoundError(f"{type(self._algorithm).__name__}: {flaw} after aggregation")
        return after, dropped | blamed

    def _try(self, replies: Mapping[str, Message], server: ServerContext) -> tuple[Any, str | None, Exception | None]:
        try:
            after = self._algorithm.aggregate(self._state, replies, server)
        except Exception as error:  # whatever a method raises for numbers that it cannot work with
            return None, f"{type(error).__name__}: {error}", error
        return after, _broken(after, self._state), None

    def _blamed(self, replies: Mapping[str, Message], server: ServerContext) -> dict[str, str]:
        """Replies that break the state by themselves; if there is none, the one without which it stays whole."""
        alone = {i: flaw for i in sorted(replies) if (flaw := self._try({i: replies[i]}, server)[1])}
        if alone or len(replies) == 1:
            return alone
        for i in sorted(replies):
            if self._try({j: reply for j, reply in replies.items() if j != i}, server)[1] is None:
                return {i: "with this reply the server's state is not finite, without it it is"}
        return {}


def _unlike(replies: Mapping[str, Message]) -> dict[str, str]:
    """Replies whose tensors have another form than those of most clients; they would leave no mean."""
    forms: dict[str, list[str]] = {}
    for i in sorted(replies):
        forms.setdefault(repr({group: spec(tree) for group, tree in sorted(replies[i].tensors.items())}), []).append(i)
    most = max(forms.values(), key=len)
    reason = f"its tensors have another form than those of {len(most)} of {len(replies)} clients"
    return {i: reason for i in sorted(replies) if i not in most}


def _broken(after: Any, before: Any) -> str | None:
    """What is wrong with the numbers of a state, those that a round has not changed aside."""
    kept = {id(tensor) for tensor in tensors_of(before)}
    for tensor in tensors_of(after):
        if id(tensor) not in kept and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return "the server's state is not finite"
    return None
