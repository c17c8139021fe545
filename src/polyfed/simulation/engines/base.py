"""Defines the interface of engines: the tasks that they run for clients, and the results that they return."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, final

import torch

from polyfed.core.algorithm import Algorithm, Client, Message
from polyfed.core.errors import ClientError
from polyfed.core.evaluation.evaluate import MetricValues
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import tree_map
from polyfed.core.seeds import derive_seed
from polyfed.core.state_dict import PyTree
from polyfed.simulation.monitoring.update_norms import MeasuredUpdate

Phase = Literal["local", "evaluate", "export"]


@final
@dataclass(frozen=True)
class ClientTask:
    """Describes a client's task: to train ("local"), be evaluated ("evaluate"), or "export" its weights.

    Attributes:
        phase: "local", "evaluate" or "export".
        round: the current round.
        client: id of the client.
        message: the message as the client receives it, decompressed.
        client_state: its private state; None before its first task: then it is created from `run_seed`.
        seed: of this round, client and phase.
        run_seed: of the whole run.
        compressed_message: the message as it is sent; None if it is not compressed.
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
        """Returns the server's message as the client receives it, compressed if the run does so."""
        return self.message if self.compressed_message is None else self.compressed_message

    def start_state(self, algorithm: Algorithm[Any, Any], client: Client) -> PyTree:
        """Returns the client's private state, a new one if it has none yet."""
        return algorithm.client_init(client, self.run_seed) if self.client_state is None else self.client_state

    @property
    def reply_seed(self) -> int:
        """Returns the seed of the random numbers with which the client's reply is compressed."""
        return derive_seed(self.run_seed, self.round, self.client, "compress")


@final
@dataclass(frozen=True)
class SummedReply:
    """Describes a reply that the engine adds up where the client ran; the result has its layout and scalars alone.

    Attributes:
        nbytes: the size of the reply as the client sends it.
        measured: the norm and direction of its update.
        leave_out: a function to call before the next result is asked for, if the reply must not be added.
    """

    nbytes: int
    measured: MeasuredUpdate
    leave_out: Callable[[], None]


@final
@dataclass(frozen=True)
class PartialSum:
    """Holds the fixed-point sum of some clients' replies, which one machine has added up.

    Attributes:
        clients: ids of the clients, sorted.
        message: the sum, as `polyfed.core.messages.fixed_point.build_sum_message` builds it.
    """

    clients: tuple[str, ...]
    message: Message


@final
@dataclass(frozen=True)
class TaskResult:
    """Holds a task's result: reply and state, metrics, or weights; or the error in `failure`.

    Attributes:
        task: the task.
        reply: the reply as it is sent, compressed or not; None for other phases than "local".
        client_state: the client's new private state.
        metrics: name -> value, of an evaluation.
        weights: of the exported network; None if they stay with the client.
        description: of the exported network, if the method brings its own networks.
        seconds: how long the task took.
        failure: the error of a task that failed.
        incidents: workers that died while they ran the task, also if a later attempt succeeded.
        predictions: "test" and, if there are any, "val" -> outputs of the personal network, float32, shape (n, ...);
            empty if they stay with the client.
        masked: whether the reply is part of a secure sum, so that only the sum of all replies has a meaning.
        summed: set if the engine adds the reply up itself, and gives the sum in `take_partial_sums`.
    """

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
    summed: SummedReply | None = None


class Engine(ABC):
    """Runs clients' tasks in this process, in worker processes, on a cluster, or at real sites."""

    max_block_bytes: ClassVar[int] = 256 * 2**20
    """Most bytes of messages in one call of `run`: tasks come in blocks of at most this size, or one task at a time."""

    overlaps_evaluation: ClassVar[bool] = False
    """Says whether the engine gets the evaluation of a round together with the training of the next: the tasks of both
    come in one call, with the private states as they were after the round."""

    @abstractmethod
    def run(self, tasks: Sequence[ClientTask]) -> Iterator[TaskResult]:
        """Runs all tasks, and yields each result once finished, in any order, with errors in `failure`."""

    def take_partial_sums(self) -> Sequence[PartialSum]:
        """Returns the sums of the replies of the last call of `run` that this engine has added up; none by default."""
        return ()

    def close(self) -> None:
        """Releases the engine's processes and memory, if it holds any; the engine cannot be used afterwards."""
        return


class RealTimeEngine(Engine):
    """Runs the tasks of real clients, which take the time that they take, so that a run need not wait for all of them."""

    @abstractmethod
    def start(self, tasks: Sequence[ClientTask]) -> None:
        """Gives clients a training task each, and returns at once."""

    @abstractmethod
    def wait_for_results(self) -> Sequence[TaskResult]:
        """Waits for a started task; returns all results since the last call, empty if no client is at work.

        `run` then returns these results again, for the same tasks.
        """


def move_clients_to_device(clients: Sequence[Client], device: torch.device) -> list[Client]:
    """Copies the clients with their data to `device`; tensors that clients share are moved once."""
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


@final
class ClientsOnDevice(Mapping[str, Client]):
    """Maps ids to clients with their data on a device; each is made, and moved, when it is asked for.

    Args:
        clients: makes a client by its id.
        device: where the data are put.
    """

    def __init__(self, clients: Mapping[str, Client], device: torch.device) -> None:
        self.clients, self._device = clients, device

    def __getitem__(self, client: str) -> Client:
        """Makes a client, and moves its data to the device."""
        return move_clients_to_device([self.clients[client]], self._device)[0]

    def __iter__(self) -> Iterator[str]:
        """Yields the ids."""
        return iter(self.clients)

    def __len__(self) -> int:
        """Returns the number of clients."""
        return len(self.clients)


def place_clients(clients: Sequence[Client] | Mapping[str, Client], device: torch.device) -> Mapping[str, Client]:
    """Returns the clients by their ids, with their data on `device`; those of a mapping are made when they are asked for."""
    if isinstance(clients, Mapping):
        return ClientsOnDevice(clients, device)
    return {client.id: client for client in move_clients_to_device(clients, device)}


def count_examples_of_phase(phase: Phase, client: Client) -> int:
    """Returns how many examples a task of this phase processes, as an estimate of its duration."""
    sets = [client.train] if phase == "local" else [client.test, client.val, client.global_test]
    return sum(len(data) for data in sets if data is not None)


def sort_longest_first(tasks: Sequence[ClientTask], clients: Mapping[str, Client]) -> list[ClientTask]:
    """Sorts tasks by their number of examples, largest first, then by client id.

    Clients that are made on demand are not made for this: then ids alone sort.
    """
    if not isinstance(clients, dict):
        return sorted(tasks, key=lambda task: task.client)
    return sorted(tasks, key=lambda task: (-count_examples_of_phase(task.phase, clients[task.client]), task.client))
