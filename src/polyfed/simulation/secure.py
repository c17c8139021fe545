"""Secure sums in a simulation: the same fixed-point sum as between real sites, without the encryption.

Each client's reply becomes words (`polyfed.core.fixed`) as a site makes them before masking, and the server half sees their
sum. So the result is that of a deployment, bit for bit, and independent of order; no number but the sum of weights goes up.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, final

import numpy as np
from torch import Tensor

from polyfed.algorithms import REGISTRY, name_of
from polyfed.algorithms.averaging import Averaging
from polyfed.core.adapters import mode_of
from polyfed.core.algorithm import Algorithm, Message
from polyfed.core.errors import UserError
from polyfed.core.fixed import Layout, Words, as_message, decode, encode, from_message
from polyfed.core.tree import mismatch


def is_mean(algorithm: Algorithm[Any, Any]) -> TypeGuard[Averaging]:
    """Whether the server half is a mean of the replies."""
    return isinstance(algorithm, Averaging) and type(algorithm).aggregate is Averaging.aggregate


def can_be_secure(algorithm: Algorithm[Any, Any]) -> bool:
    """Whether the sum of a round's replies is all that the server half needs."""
    return is_mean(algorithm) and algorithm.aggregates_by_sum


def disclosed(algorithm: Algorithm[Any, Any], secure: bool) -> frozenset[str]:
    """What the server learns of a client: what the method discloses, or with secure sums no more than a sum.

    >>> from polyfed.algorithms import FedAvg
    >>> sorted(disclosed(FedAvg(), secure=False)), sorted(disclosed(FedAvg(), secure=True))
    (['weights'], ['sum'])
    """
    return frozenset({"sum"}) if secure and can_be_secure(algorithm) else algorithm.discloses


def check_secure(algorithm: Algorithm[Any, Any], parties: int) -> None:
    """Raises a `UserError` if a method cannot run on secure sums, or a round has one client whose sum would be itself."""
    if is_mean(algorithm) and not algorithm.aggregates_by_sum:
        raise UserError(
            f"secure=True gives the server nothing but the sum of a round's replies, and {name_of(algorithm)} with "
            "final='all' keeps each client's latest model by itself; give final='cohort'"
        )
    if mode_of(algorithm) is not None:
        raise UserError(
            "secure=True sums replies of one form, and with adapters=... ranks differ; leave one of them out"
        )
    if not can_be_secure(algorithm):
        base = [name for name, m in REGISTRY.items() if issubclass(m, Averaging) and m.aggregate is Averaging.aggregate]
        raise UserError(
            f"secure=True gives the server nothing but the sum of a round's replies, and {name_of(algorithm)} needs "
            f"each reply by itself, or none; methods whose server half is a mean: {', '.join(base)}"
        )
    if parties < 2:
        raise UserError(
            f"secure=True hides a client among those of its round, and a round has {parties}; raise clients_per_round"
        )


def part_of(reply: Message, algorithm: Algorithm[Any, Any], parties: int) -> Message:
    """What a site adds to the sum for its reply, before it is masked.

    Args:
        reply: of the method; its groups that are averaged, and its number of examples where it weighs.
        algorithm: the method.
        parties: clients of a round.

    Raises:
        UserError: a value does not fit.
    """
    assert is_mean(algorithm)
    weight = reply.scalars["num_examples"] if algorithm.weighted else 1
    groups = {group: reply.tensors[group] for group in algorithm.groups if group in reply.tensors}
    return as_message(encode(groups, weight, parties), Layout.of(groups))  # type: ignore[arg-type]  # whole: encode checks


def part_flaw(part: Message | None, algorithm: Algorithm[Any, Any], state: Any, message: Message) -> str | None:
    """Why something that came as a part of a sum cannot be added to it; None if it can.

    Args:
        part: as `part_of` makes it; masked or not.
        algorithm, state, down: from which state the method had sent what.
    """
    try:
        if not isinstance(part, Message):
            raise UserError(f"the reply is a {type(part).__name__}, not a Message")
        groups = from_message(part)[1].empty()
        wanted = algorithm.reply_spec(state, message, Message(groups))
    except ValueError as flaw:
        return str(flaw)
    for group in sorted(wanted.keys() | groups.keys()):
        if difference := mismatch(groups.get(group, {}), wanted.get(group, {})):
            return f"group {group!r}: {difference}"
    return None


@final
class SecureSum:
    """The parts of a round, added as they come, in any order.

    Args:
        method: whose replies they are.
    """

    def __init__(self, method: Averaging) -> None:
        self._method, self._ids = method, list[str]()
        self._layout: Layout | None = None
        self._total: Words = np.zeros(0, dtype=np.uint64)

    def add(self, client: str, part: Message) -> None:
        """Adds the part of a client.

        Raises:
            UserError: its layout is not that of the first.
        """
        words, layout = from_message(part)
        if self._layout is None:
            self._layout, self._total = layout, words.copy()
        elif layout != self._layout:
            raise UserError(
                f"{type(self._method).__name__}: the tensors of {client!r} are not those of {self._ids[0]!r}; a secure sum "
                "needs replies of one form"
            )
        else:
            self._total += words
        self._ids.append(client)

    def finalize(self, state: Any) -> Any:
        """The server's next state, from the mean alone."""
        assert self._layout is not None
        found, _ = decode(self._total, self._layout)
        mean: Mapping[str, Mapping[str, Tensor]] = {group: found.get(group, {}) for group in self._method.groups}
        who: Sequence[str] = sorted(self._ids)
        return self._method.server_step(state, mean, who)
