"""Defines `RoundPlan`: which clients a round trains, and from which versions of the server state they start."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from polyfed.core.algorithm import Message
from polyfed.simulation.engines.base import ClientTask, TaskResult
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.replies.reply_validation import ValidatedReply, validate_reply
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint


class RoundPlan(ABC):
    """Says which clients a round trains, from which states, and how their replies enter the mean.

    Args:
        federation: of the run.
    """

    federation: Federation

    @property
    @abstractmethod
    def client_ids(self) -> Sequence[str]:
        """Returns the ids of the clients whose replies the round uses, sorted."""

    @abstractmethod
    def build_task_blocks(self, clients: Sequence[str], max_bytes: int) -> Iterator[list[ClientTask]]:
        """Yields the training tasks of these clients in blocks whose messages take at most `max_bytes`."""

    @abstractmethod
    def start_of(self, client: str) -> Checkpoint:
        """Returns the state from which a client has started."""

    def validate_reply(self, result: TaskResult) -> ValidatedReply:
        """Decodes a client's reply and checks it; raises a `ValueError` if it is not valid."""
        return validate_reply(self.federation, result, self.start_of(result.task.client))

    @abstractmethod
    def rebase_reply(self, client: str, reply: Message, message: Message) -> tuple[Message, Message]:
        """Returns a client's reply as one to the newest server state, and the message that it then answers.

        Args:
            client: who replied.
            reply: the decoded reply.
            message: what the client had received.
        """


@final
@dataclass(frozen=True)
class SynchronousPlan(RoundPlan):
    """Lets the clients that a sampler has drawn train from the newest state.

    Args:
        federation: of the run.
        previous: the state before the round.
        round_clients: the clients, sorted.
    """

    federation: Federation
    previous: Checkpoint
    round_clients: tuple[str, ...]

    @property
    def client_ids(self) -> Sequence[str]:
        """Returns the ids of the clients that were drawn."""
        return self.round_clients

    def build_task_blocks(self, clients: Sequence[str], max_bytes: int) -> Iterator[list[ClientTask]]:
        """Yields the clients' training tasks, all from the newest state."""
        number = self.previous.round + 1
        return self.federation.build_task_blocks("local", clients, number, self.previous, max_bytes)

    def start_of(self, client: str) -> Checkpoint:
        """Returns the newest state, for every client."""
        return self.previous

    def rebase_reply(self, client: str, reply: Message, message: Message) -> tuple[Message, Message]:
        """Returns reply and message as they are, since they belong to the newest state."""
        return reply, message
