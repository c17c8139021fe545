"""Defines `Sampler`, the interface of rules that choose the clients of a round."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np

from polyfed.simulation.scheduling.timing.client_times import ClientTimes


@final
@dataclass(frozen=True)
class SamplingRound:
    """Holds what a sampler knows about the round for which it draws clients.

    Attributes:
        number: of the round, from 1.
        size: how many clients the round shall have.
        num_examples: numbers of training examples by client, where they are known.
        simulated_seconds: the simulated time at which the round begins; 0 if the run simulates no time.
        times: computes the clients' simulated times; None if the run simulates no time.
        may_be_empty: whether the sampler may draw nobody: while other clients are at work in an asynchronous run.
        state: what the sampler remembers from round to round: a dict of numbers, texts, tensors, lists and dicts, which
            the sampler may change. Checkpoints keep it.
    """

    number: int
    size: int
    num_examples: Mapping[str, int] = field(default_factory=dict)
    simulated_seconds: float = 0.0
    times: ClientTimes | None = None
    may_be_empty: bool = False
    state: dict[str, Any] = field(default_factory=dict)

    def is_available(self, client: str) -> bool:
        """Returns True if a client is available when the round begins."""
        return self.times is None or self.times.is_available(client, self.simulated_seconds)

    def seconds_of_update(self, client: str) -> float | None:
        """Returns how many simulated seconds a client's local update takes; None if the run simulates no time."""
        return None if self.times is None else self.times.seconds_of_update(client)


class Sampler(ABC):
    """Chooses the clients of each round; a subclass is a frozen dataclass whose fields are its options.

    Give an object as `sampler=` of `polyfed.federate`. Everything random comes from `rng`, and what the sampler remembers
    is in `round.state`, so that a resumed run draws the same clients.

    >>> @dataclass(frozen=True)
    ... class InTurn(Sampler):
    ...     def draw(self, round, ids, history, rng):
    ...         first = round.state.get("next", 0)
    ...         round.state["next"] = (first + round.size) % len(ids)
    ...         return [ids[(first + k) % len(ids)] for k in range(round.size)]
    >>> moment = SamplingRound(number=1, size=2)
    >>> [InTurn().draw(moment, ["east", "north", "west"], [], None) for _ in range(2)]
    [['east', 'north'], ['west', 'east']]
    """

    reads_losses: ClassVar[bool] = False
    """Says whether the sampler reads the clients' training losses, which secure sums hide."""

    @abstractmethod
    def draw(
        self, round: SamplingRound, ids: Sequence[str], history: Sequence[Mapping[str, Any]], rng: np.random.Generator
    ) -> Sequence[str]:
        """Returns the ids of the clients that take part in the round: different ones out of `ids`, at most `round.size`.

        Args:
            round: the round, and what is known about the clients.
            ids: the clients that may be drawn, sorted.
            history: the records of the rounds before, as in `metrics.jsonl`.
            rng: a generator that depends on the seed of the run and the round alone.
        """


@final
@dataclass(frozen=True)
class UniformSampler(Sampler):
    """Draws every client with the same probability."""

    def draw(
        self, round: SamplingRound, ids: Sequence[str], history: Sequence[Mapping[str, Any]], rng: np.random.Generator
    ) -> Sequence[str]:
        """Returns clients that were drawn uniformly, without replacement."""
        return [ids[k] for k in rng.choice(len(ids), min(round.size, len(ids)), replace=False)]


@final
@dataclass(frozen=True)
class AvailableSampler(Sampler):
    """Draws uniformly among the clients that are available when the round begins.

    If fewer are available than the round shall have, all of them take part. If none is available, the round has the clients
    that come back first, and waits for them.
    """

    def draw(
        self, round: SamplingRound, ids: Sequence[str], history: Sequence[Mapping[str, Any]], rng: np.random.Generator
    ) -> Sequence[str]:
        """Returns clients that are available, drawn uniformly without replacement."""
        available = [client for client in ids if round.is_available(client)]
        if not available and round.may_be_empty:
            return []
        if not available and round.times is not None:
            returns = {i: round.times.next_available(i, round.simulated_seconds) for i in ids}
            first = min(returns.values())
            available = [client for client in ids if returns[client] == first]
        return UniformSampler().draw(round, available, history, rng)
