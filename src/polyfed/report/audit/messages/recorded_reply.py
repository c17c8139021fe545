"""Trains the first round of a run again, or the first two, and records what the server sees of a client's reply."""

import copy
import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from polyfed.core.algorithm import Algorithm, Client, Message
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.messages.lora import cut_message_to_client_rank_within_block
from polyfed.core.nn.module_cache import initial_state
from polyfed.core.seeds import temporary_rng_seed
from polyfed.simulation.engines.base import ClientTask
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.replies.secure_aggregation import (
    SecureSum,
    encode_reply_in_fixed_point,
    uses_default_mean,
)
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.simulation.storage.checkpoints.client_states import ClientStates, check_and_wrap_server_state

_CPU = torch.device("cpu")


@final
@dataclass(frozen=True, eq=False)
class WeightChange:
    """Holds a network before a client's training, and how the weights that travel have changed in it.

    Attributes:
        network: with the weights before the training, as far as the server can know them: from the message, or drawn from
            the run's seed; None if the weights are of no network that could be built.
        change: by parameter, weight before minus weight after, so that it points where gradients point.
        after: the weights after the training; empty if only differences travel.
    """

    network: nn.Module | None
    change: Mapping[str, Tensor]
    after: Mapping[str, Tensor]


@final
@dataclass(frozen=True, eq=False)
class RecordedReply:
    """Holds the message to a client and the client's reply as the server sees them, for an attack on both.

    Attributes:
        round: 1, or 2 if weights before the training are known only then.
        message: what the server sent.
        reply: what it sees: the client's reply, decompressed; with secure sums the mean over `senders` clients.
        senders: number of clients in `reply`.
        weights: the change of a network's weights; None if no weights travel whose values before the training the server
            knows.
    """

    round: int
    message: Message
    reply: Message
    senders: int
    weights: WeightChange | None


@exclusive_single_torch_thread_with_grad()
def record_first_replies(federation: Federation, client_ids: Sequence[str]) -> dict[str, RecordedReply]:
    """Trains round 1 (or 2, if weights are unknown before) as the run did; returns what the server sees.

    Raises:
        ClientError: the training of a client failed.
    """
    algorithm = federation.algorithm
    round_clients = federation.sample_round_clients(1)
    secure = federation.settings.secure
    engine = InProcessEngine(algorithm, federation.clients, _CPU, federation.metrics, federation.reply_compression)
    start = federation.initial_checkpoint()
    tasks, replies, states = _train_clients(
        federation, engine, start, {*client_ids, *(round_clients if secure else ())}
    )
    recorded = {}
    for i in client_ids:
        members, reply = [i, *(j for j in round_clients if j != i)][: len(round_clients)] if secure else [i], replies[i]
        if secure:
            reply = _mean_of_replies(algorithm, {j: (tasks[j].message, replies[j]) for j in members})
        change = _find_network_change(algorithm, federation.clients[i], tasks[i], reply)
        recorded[i] = RecordedReply(1, tasks[i].message, reply, len(members), change)
    unknown = {i for i, entry in recorded.items() if entry.weights is None and entry.reply.tensors}
    if secure or not unknown:
        return recorded
    _, more_replies, more_states = _train_clients(federation, engine, start, set(round_clients) - tasks.keys())
    first_replies = {i: reply for i, reply in (replies | more_replies).items() if i in round_clients}
    state = algorithm.aggregate(start.state, first_replies, federation.server_context())
    state = check_and_wrap_server_state(state, algorithm, "the server's state")
    tasks, replies, _ = _train_clients(
        federation, engine, Checkpoint(1, state, ClientStates.wrap(states | more_states)), unknown
    )
    for i in unknown:
        if (change := _find_change_of_same_names(algorithm, tasks[i], replies[i])) is not None:
            recorded[i] = RecordedReply(2, tasks[i].message, replies[i], 1, change)
    return recorded


def _train_clients(
    federation: Federation, engine: InProcessEngine, checkpoint: Checkpoint, client_ids: Set[str]
) -> tuple[dict[str, ClientTask], dict[str, Message], dict[str, Any]]:
    """Trains clients for the round after a checkpoint; returns their tasks, replies and private states."""
    tasks, replies, states = dict[str, ClientTask](), dict[str, Message](), dict[str, Any]()
    for block in federation.build_task_blocks("local", sorted(client_ids), checkpoint.round + 1, checkpoint):
        for result in engine.run(block):
            if result.failure is not None:
                raise result.failure
            task = result.task
            tasks[task.client], states[task.client] = task, result.client_state
            replies[task.client] = federation.decode_reply_for_server(result.reply, task.message)
    return tasks, replies, states


def _mean_of_replies(algorithm: Algorithm[Any, Any], exchanges: Mapping[str, tuple[Message, Message]]) -> Message:
    """Returns what the server takes out of a secure sum of replies to messages: their mean, and nothing else."""
    assert uses_default_mean(algorithm)  # checked before round 1
    total = SecureSum(algorithm)
    for client, (message, reply) in exchanges.items():
        total.add(client, encode_reply_in_fixed_point(reply, algorithm, len(exchanges), message), message)
    return Message(total.mean())


def _find_network_change(
    algorithm: Algorithm[Any, Any], client: Client, task: ClientTask, reply: Message
) -> WeightChange | None:
    """Returns the change of the network of which most parameters travel."""
    best: WeightChange | None = None
    for network in _networks_known_before_training(algorithm, client, task):
        weights = dict(network.state_dict())
        parameters = {name for name, parameter in network.named_parameters() if parameter.is_floating_point()}
        for group, tensors in reply.tensors.items():
            if not tensors or any(n not in weights or weights[n].shape != t.shape for n, t in tensors.items()):
                continue
            names = [name for name in tensors if name in parameters]
            if not names or (best is not None and len(names) <= len(best.change)):
                continue
            loaded = copy.deepcopy(network)
            loaded.load_state_dict(_find_sent_tensors(task.message, group, weights), strict=False)
            before, is_difference = loaded.state_dict(), group in algorithm._differences
            change = {n: (tensors[n] if is_difference else before[n] - tensors[n]).detach().clone() for n in names}
            best = WeightChange(loaded, change, {} if is_difference else {n: t.detach() for n, t in tensors.items()})
    return best


def _find_change_of_same_names(algorithm: Algorithm[Any, Any], task: ClientTask, reply: Message) -> WeightChange | None:
    """Returns the change of the weights that came with the message under the same names, of no network that is known."""
    for group, tensors in reply.tensors.items():
        before = task.message.tensors.get(group, {})
        names = [n for n, t in tensors.items() if n in before and before[n].shape == t.shape and t.is_floating_point()]
        if names and group not in algorithm._differences:
            return WeightChange(None, {n: before[n] - tensors[n] for n in names}, {n: tensors[n] for n in names})
    return None


def _networks_known_before_training(
    algorithm: Algorithm[Any, Any], client: Client, task: ClientTask
) -> Iterator[nn.Module]:
    """Yields the networks that the message and the run's seed determine."""
    few = dataclasses.replace(client, train=client.train.head(min(2, len(client.train))))
    with (
        warnings.catch_warnings(),
        temporary_rng_seed(task.seed, _CPU),
        cut_message_to_client_rank_within_block(algorithm, client, task.message) as message,
    ):
        warnings.simplefilter("ignore")
        if client.model is not None:
            network = client.model()
            network.load_state_dict(initial_state(client.model, task.run_seed), strict=False)
            yield network
        try:
            state = algorithm.client_init(client, task.run_seed)
            yield copy.deepcopy(algorithm.personal_model(message, state, few, task.seed))
            for _, network in algorithm.other_models(message, state, few, task.seed):
                yield copy.deepcopy(network)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
            return  # a method need not be able to build networks before it has trained


def _find_sent_tensors(message: Message, group: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of the message that have name and form of a network's: of the reply's group first."""
    sent = dict[str, Tensor]()
    for tensors in (message.tensors.get(group, {}), *message.tensors.values()):
        for name, tensor in tensors.items():
            if name in weights and weights[name].shape == tensor.shape:
                sent.setdefault(name, tensor)
    return sent
