"""What an engine is given and gives back: tasks and results, the same on every engine."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, final

import torch

from polyfed.core.algorithm import Client, Message
from polyfed.core.errors import ClientError
from polyfed.core.evaluation.evaluate import MetricValues
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import tree_map
from polyfed.core.seeds import derive_seed
from polyfed.core.state_dict import PyTree

Phase = Literal["local", "evaluate", "export"]


@final
@dataclass(frozen=True)
class ClientTask:
    """One client's work: train ("local"), evaluate its personal model, or give its weights ("export").

    Attributes: `client_state` is the private state, None for a client that has none yet: then it is made from
    `run_seed`. `seed` is the one for this round, client and purpose. `message` is the message as it arrives;
    `compressed_message`, as it travels, where it is compressed.
    """

    phase: Phase
    round: int
    client: str
    message: Message
    client_state: PyTree
    seed: int
    run_seed: int
    compressed_message: Message | None = None

    @property
    def transmitted_message(self) -> Message:
        """The message as it travels."""
        return self.message if self.compressed_message is None else self.compressed_message

    @property
    def reply_seed(self) -> int:
        """Of what is drawn to compress the reply."""
        return derive_seed(self.run_seed, self.round, self.client, "compress")


@final
@dataclass(frozen=True)
class TaskResult:
    """What became of a task: the reply, as it travels, and private state, metrics, or weights; or else `failure`.
    `incidents` tell of workers that died on the way, also when a later attempt succeeded. `description` goes with the
    weights of a method that brings its own networks; weights are None where they stay with the client. `predictions` go with
    metrics: the outputs of the personal network for the examples of "test" and, if there are any, of "val", float32, shape
    (n, ...); empty where they stay with the client. `masked` replies are parts of a secure sum, of which only the sum means
    anything."""

    task: ClientTask
    reply: Message | None = None
    client_state: PyTree = None
    metrics: MetricValues = field(default_factory=dict)
    weights: Mapping[str, torch.Tensor] | None = field(default_factory=dict)
    description: Mapping[str, Any] | None = None
    seconds: float = 0.0
    failure: ClientError | None = None
    incidents: tuple[str, ...] = ()
    predictions: Mapping[str, torch.Tensor] = field(default_factory=dict)
    masked: bool = False

    def with_seconds(self, seconds: float) -> "TaskResult":
        """The same result with the time it took."""
        return replace(self, seconds=seconds)


class Engine(ABC):
    """Where clients run."""

    max_block_bytes: ClassVar[int] = 256 * 2**20
    """Messages that it is given at once: tasks come in blocks of no more bytes, but one task at least."""

    overlaps_evaluation: ClassVar[bool] = False
    """Whether a round is evaluated together with the training of the next: the tasks of both come at once, with the private
    states as they were after the round."""

    @abstractmethod
    def run(self, tasks: Sequence[ClientTask]) -> Iterator[TaskResult]:
        """Carries out all tasks and yields each result as it comes, in any order. A client's failure is a result."""

    @abstractmethod
    def close(self) -> None:
        """Gives back processes and memory; the engine cannot be used after."""


def move_clients_to_device(clients: Sequence[Client], device: torch.device) -> list[Client]:
    """The clients with their data on `device`; a store that several share is moved once and stays shared."""
    if device.type == "cpu":
        return list(clients)
    moved_stores: dict[int, torch.Tensor] = {}

    def store(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved_stores:
            moved_stores[id(tensor)] = tensor.to(device)
        return moved_stores[id(tensor)]

    def place(data: Examples | None) -> Examples | None:
        if data is None:
            return None
        index = None if data.index is None else data.index.to(device)
        return replace(data, x=tree_map(store, data.x), y=store(data.y), index=index)

    return [
        Client(c.id, c.model, place(c.train), place(c.test), place(c.val), place(c.global_test), c.task, c.loss)
        for c in clients
    ]


def count_examples_of_phase(phase: Phase, client: Client) -> int:
    """Examples that a task of this phase goes through, as a measure of how long it takes."""
    sets = [client.train] if phase == "local" else [client.test, client.val, client.global_test]
    return sum(len(data) for data in sets if data is not None)


def sort_longest_first(tasks: Sequence[ClientTask], clients: Mapping[str, Client]) -> list[ClientTask]:
    """Tasks in the order of falling work, so that no long one starts last; ties by client id."""
    return sorted(tasks, key=lambda task: (-count_examples_of_phase(task.phase, clients[task.client]), task.client))
