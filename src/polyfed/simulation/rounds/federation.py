"""Defines `Federation`, which holds clients, method and settings of a run, samples each round's clients, builds their
tasks and checks their replies.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from polyfed.algorithms import registry_name
from polyfed.core.algorithm import Algorithm, Architecture, Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError, describe_exception
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.metrics import resolve_metrics
from polyfed.core.examples.examples import Examples
from polyfed.core.io.values.number_checks import is_number
from polyfed.core.messages import lora
from polyfed.core.messages.compressors import Compressor, parse_compressor
from polyfed.core.messages.contiguous import contiguous_message, message_error
from polyfed.core.messages.message_compression import BroadcastCompressor, decompress_message
from polyfed.core.methods.capabilities import describe_evaluated_network
from polyfed.core.robust.counted_median import COUNTED_MEDIAN, CountedMedian
from polyfed.core.seeds import derive_seed, numpy_generator
from polyfed.core.serialization import check_scalars_finite
from polyfed.core.state_dict import find_value_error, iter_tensors, spec_mismatch
from polyfed.core.tasks.task import Task
from polyfed.simulation.checks.clients.client_list import class_names_of
from polyfed.simulation.engines.base import ClientTask, Engine, Phase
from polyfed.simulation.monitoring.validation_losses import round_of_lowest_pooled_loss
from polyfed.simulation.rounds.client_registry import ClientRegistry
from polyfed.simulation.rounds.planning.evaluation_sample import has_other_clients_each_round, sample_evaluated_clients
from polyfed.simulation.rounds.replies.secure_aggregation import sums_count_norms
from polyfed.simulation.rounds.round_scores import round_of_best_score
from polyfed.simulation.scheduling.sampling.sampler import Sampler
from polyfed.simulation.settings import Settings
from polyfed.simulation.sources.per_client import ComputedSequence
from polyfed.simulation.sources.source_clients import SourceClients
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.simulation.storage.checkpoints.client_states import ClientStates, check_and_wrap_server_state

_MOST_EXAMPLES = 10**12


@final
@dataclass(frozen=True)
class Federation:
    """Holds what stays the same in all rounds of a run: clients, method, settings, public examples and metrics.

    Attributes:
        clients: the simulated clients, by id: `SourceClients` makes each when it is asked for; empty in a deployment.
        remote_clients: the registry of clients that are not at hand: those of a deployment, which are at their sites, and of
            a source, which are made when they are drawn; None for a list of clients.
        metrics: the scores computed at evaluation, of which the first decides. If none are given, those that the settings
            name, or the task's own.
        sampler: draws the clients of a round; None builds the one that the settings name.
    """

    clients: Mapping[str, Client]
    algorithm: Algorithm[Any, Any]
    settings: Settings
    public: Examples | None = None
    remote_clients: ClientRegistry | None = None
    metrics: tuple[Metric, ...] = ()
    sampler: Sampler | None = None

    def __post_init__(self) -> None:
        if not self.metrics and (self.remote_clients or self.clients):
            object.__setattr__(self, "metrics", resolve_metrics(self.settings.metrics, self.task))

    def __repr__(self) -> str:
        return f"Federation({type(self.algorithm).__name__}, {len(self.client_registry.ids)} clients)"

    @property
    def task(self) -> Task:
        """Returns the learning task (such as classification) that all clients have in common."""
        return self.remote_clients.task if self.remote_clients else next(iter(self.clients.values())).task

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Returns the classes' names in the order of outputs; None if labels were numbers or are not at hand."""
        if isinstance(self.clients, SourceClients):
            return class_names_of([self.clients[self.clients.first]])
        return class_names_of(list(self.clients.values())) if self.clients else None

    @cached_property
    def client_registry(self) -> ClientRegistry:
        """Returns all that the server knows about the clients, as a `ClientRegistry`."""
        return self.remote_clients or ClientRegistry.from_clients(list(self.clients.values()), self.algorithm.requires)

    def client_info(self, client: str, round_number: int, phase: Phase = "local") -> ClientInfo:
        """Returns what the server knows of a client for `dispatch`, with its architecture if required.

        The personal network after a round is made from the message that the client would receive in the next round, so
        that in the phases other than "local" the number of the round is one higher. (That download is not counted: a
        client that takes part gets it anyway.)
        """
        sees_architecture = "architectures" in self.algorithm.requires
        architecture = self.client_registry.architectures.get(client) if sees_architecture else None
        if phase == "local":
            return ClientInfo(client, round_number, self.settings.rounds, architecture)
        return ClientInfo(client, round_number + 1, self.settings.rounds, architecture, "personal")

    def best_round(self, history: Sequence[Mapping[str, Any]]) -> int | None:
        """Returns the first round of the best validation score or loss; None if rounds cannot be compared.

        They cannot without validation scores, or where each round evaluates other clients.

        The mean validation score decides, or with `keep="loss"` the loss on all validation examples together.
        """
        if has_other_clients_each_round(self.settings, len(self.client_registry.ids)):
            return None
        if self.settings.keep == "loss":
            return round_of_lowest_pooled_loss(history, self._num_validation)
        return round_of_best_score(history, self.metrics[0])

    @cached_property
    def _num_validation(self) -> dict[str, int]:
        """Returns the numbers of validation examples of the clients that are evaluated, and have some."""
        sample = self.settings.evaluate_clients
        clients = {i: self.clients[i] for i in (sample if isinstance(sample, tuple) else self.clients)}
        return {i: len(client.val) for i, client in clients.items() if client.val is not None}

    @property
    def num_round_clients(self) -> int:
        """Returns the number of clients that take part in a round."""
        return self.settings.count_round_clients(len(self.client_registry.ids))

    def initial_checkpoint(self) -> Checkpoint:
        """Builds the state of the run before round 1.

        Raises:
            TypeError: the server's state holds a value that a checkpoint cannot restore.
            UserError: the method refuses this federation.
        """
        context = self.server_context()
        state = lora.scale_initial_server_adapters(self.algorithm, self.algorithm.server_init(context), context.model)
        name = f"{registry_name(self.algorithm)}: the server's state"
        return Checkpoint(0, check_and_wrap_server_state(state, self.algorithm, name), ClientStates())

    def server_context(self) -> ServerContext:
        """Returns what the server knows before the first round, limited to what the method requires."""
        return self._server_context

    @cached_property
    def _server_context(self) -> ServerContext:
        requirements, roster = self.algorithm.requires, self.client_registry
        return ServerContext(
            seed=self.settings.seed,
            rounds=self.settings.rounds,
            clients=ComputedSequence(len(roster.ids), lambda place: self.client_info(roster.ids[place], 1))
            if isinstance(self.clients, SourceClients)
            else tuple(self.client_info(client, 1) for client in roster.ids),
            model=self._common_model() if "one_architecture" in requirements else None,
            architectures=roster.models if "architectures" in requirements else None,
            layer_catalogue=roster.layer_catalogue,
            public=self.public if "public_data" in requirements else None,
            data_spec=roster.data_spec if "one_data_spec" in requirements else None,
        )

    def _common_model(self) -> Architecture:
        """Returns the clients' common architecture, with the largest rank if adapters' ranks differ."""
        models, mode = self.client_registry.models, lora.adapter_averaging_mode(self.algorithm)
        return next(iter(models.values())) if mode is None else lora.network_with_largest_ranks(models, mode)

    def sample_round_clients(self, round_number: int) -> list[str]:
        """Samples the clients that take part in a round, and returns their ids, sorted.

        The draw depends on the seed and the round alone, so that every method has the same clients in each round.

        Returns:
            Client ids, sorted.
        """
        ids = self.client_registry.ids
        size = self.settings.count_round_clients(len(ids))
        if size == len(ids):
            return list(ids)
        generator = numpy_generator(derive_seed(self.settings.seed, round_number, "cohort"))
        return sorted(ids[i] for i in generator.choice(len(ids), size, replace=False))

    def sample_evaluated_clients(self, round_number: int) -> list[str]:
        """Returns the sorted ids of clients evaluated after a round, as `evaluate_clients` says."""
        return sample_evaluated_clients(self.settings, self.client_registry.ids, round_number)

    def exported_clients(self, round_number: int) -> list[str]:
        """Returns the ids of the clients whose models a run writes at its end: of a source those that were evaluated."""
        is_source = isinstance(self.clients, SourceClients)
        return self.sample_evaluated_clients(round_number) if is_source else list(self.client_registry.ids)

    @cached_property
    def reply_compression(self) -> Compressor | None:
        """Returns the object that compresses the clients' replies; None if replies are not compressed."""
        return parse_compressor(self.settings.compress)

    def message_compressor(self, checkpoint: Checkpoint) -> BroadcastCompressor:
        """Returns the object that compresses the server's messages to clients in the round after `checkpoint`.

        Evaluation after a round and training in the next get the same messages, bit for bit.
        """
        return build_message_compressor(self.settings, checkpoint.round)

    def build_task(
        self,
        phase: Phase,
        client: str,
        round_number: int,
        message: Message,
        checkpoint: Checkpoint,
        compressor: BroadcastCompressor | None = None,
    ) -> ClientTask:
        """Builds a client's task, with a seed of run, round, client and phase.

        Args:
            phase, client, round_number, checkpoint: of the task.
            message: the method's message to the client.
            compressor: compresses the message; tasks with one compressor share its compressed tensors.

        Raises:
            TypeError: the message holds a value that cannot travel.
        """
        check_scalars_finite(message.scalars, f"{registry_name(self.algorithm)}: the message to {client!r}")
        purpose = "local" if phase == "local" else "personal"
        seed = derive_seed(self.settings.seed, round_number, client, purpose)
        message = contiguous_message(message)
        sent_message, arrived = (compressor or self.message_compressor(checkpoint))(message)
        client_state = checkpoint.client_states.get(client)
        return ClientTask(
            phase,
            round_number,
            client,
            arrived,
            client_state,
            seed,
            self.settings.seed,
            None if sent_message is message else sent_message,
        )

    def build_task_blocks(
        self,
        phase: Phase,
        clients: Sequence[str],
        round_number: int,
        checkpoint: Checkpoint,
        max_bytes: int = Engine.max_block_bytes,
    ) -> Iterator[list[ClientTask]]:
        """Yields clients' tasks in blocks whose messages take at most `max_bytes`.

        Args:
            phase, clients, round_number: of the tasks.
            checkpoint: the state from which the server makes the messages.
            max_bytes: the messages of a block take no more bytes, unless it has a single task. Tensors that several
                messages share, such as those of a global model, count once.
        """
        order = sorted(clients)  # what is computed for many at once may differ in its last bits from order to order
        client_infos = [self.client_info(client, round_number, phase) for client in order]
        compressor = self.message_compressor(checkpoint)
        follows_median = phase == "local" and self.settings.secure and sums_count_norms(self.algorithm)
        median = CountedMedian.from_server_state(checkpoint.state) if follows_median else None
        block: list[ClientTask] = []
        tensor_ids: set[int] = set()
        size = 0
        for client_info, message in zip(
            client_infos, self.algorithm.dispatch_all(checkpoint.state, client_infos), strict=True
        ):
            is_message = isinstance(message, Message)
            if not is_message or not all(isinstance(group, Mapping) for group in message.tensors.values()):
                result = "tensors that are in no group" if is_message else type(message).__name__
                raise UserError(f"{registry_name(self.algorithm)}: dispatch must return a polyfed.Message, as in "
                                f"Message({{'model': tensors by name}}, {{'lr': 0.1}}), got {result}")  # fmt: skip
            if follows_median:
                median = median or CountedMedian.from_first_message(message)
                message = Message(message.tensors, {**message.scalars, COUNTED_MEDIAN: median.median})
            parts = {id(tensor): tensor.nbytes for tensor in iter_tensors(message.tensors)}
            added_bytes = sum(nbytes for key, nbytes in parts.items() if key not in tensor_ids)
            if block and size + added_bytes > max_bytes:
                yield block
                block, tensor_ids, size, added_bytes = [], set(), 0, sum(parts.values())
                compressor.clear_cache()
            block.append(self.build_task(phase, client_info.id, round_number, message, checkpoint, compressor))
            tensor_ids.update(parts)
            size += added_bytes
        if block:
            yield block

    def build_single_task(self, phase: Phase, client: str, checkpoint: Checkpoint) -> ClientTask:
        """Builds the task of a single client, equal bit for bit to that client's task from `build_task_blocks`.

        A method that makes all clients' messages at once does so here too.
        """
        if type(self.algorithm).dispatch_all is Algorithm.dispatch_all:
            client_message = self.algorithm.dispatch(
                checkpoint.state, self.client_info(client, checkpoint.round, phase)
            )
        else:
            client_infos = [
                self.client_info(other_id, checkpoint.round, phase) for other_id in self.client_registry.ids
            ]
            messages = zip(client_infos, self.algorithm.dispatch_all(checkpoint.state, client_infos), strict=False)
            client_message = next(message for client_info, message in messages if client_info.id == client)
        return self.build_task(phase, client, checkpoint.round, client_message, checkpoint)

    def decode_reply_for_server(self, reply: Any, message: Message) -> Any:
        """Returns a reply as the server half takes it: decompressed, with full adapters.

        An object that is not a valid message is returned unchanged, for `reply_error` to refuse.

        Raises:
            ValueError: the reply is not compressed as the settings say; the message is half a sentence.
        """
        if message_error(reply):
            return reply
        return lora.reply_at_server_rank(self.algorithm, self.decompress_reply(reply, message), message)

    def decompress_reply(self, reply: Message, message: Message) -> Message:
        """Returns a client's reply to `message` without compression.

        Raises:
            ValueError: the reply is not compressed as the settings say; the message is half a sentence.
        """
        return reply if self.reply_compression is None else decompress_message(reply, message, self.reply_compression)

    def reply_error(
        self, reply: Message | None, server_state: Any, message: Message, client: str | None = None
    ) -> str | None:
        """Returns half a sentence on why the server must refuse a reply; None if it is valid.

        Args:
            reply: the decoded reply.
            server_state: the state from which the server made `message`.
            message: what was sent to the client.
            client: the id of the sender; None skips the check of its number of examples.
        """
        if form_error := message_error(reply):
            return form_error
        assert reply is not None  # `message_error` refuses None
        for name, value in reply.scalars.items():
            if not is_number(value) or not abs(value) < float("inf"):
                return f"scalar {name!r} is {value!r}; the local training diverged: lower lr or set clip_norm"
        if not reply.scalars.get("num_examples", 1) >= 1:
            return f"num_examples is {reply.scalars['num_examples']!r}; a client has at least one"
        max_examples = self.client_registry.num_examples.get(client or "", _MOST_EXAMPLES)
        if reply.scalars.get("num_examples", 1) > max_examples:
            return (
                f"num_examples is {reply.scalars['num_examples']!r}, more than the {max_examples} that the client has"
            )
        if missing_scalars := sorted(self.algorithm.scalars_needed - reply.scalars.keys()):
            return f"{missing_scalars[0]} is missing, a number that the method needs; a site must not hold it back"
        try:
            specs = lora.reply_spec_at_server_rank(
                self.algorithm, self.algorithm.reply_spec(server_state, message, reply)
            )
        except ValueError as flaw:
            return str(flaw)
        except Exception as error:  # a method may fail in any way on a reply that is not of its form
            return f"the reply cannot be read: {describe_exception(error)}"
        if reply.tensors.keys() != specs.keys():
            return f"the reply holds the groups {sorted(reply.tensors)}, expected {sorted(specs)}"
        for group, expected in specs.items():
            if difference := spec_mismatch(reply.tensors[group], expected):
                return f"group {group!r}: {difference}"
        return find_value_error(reply.tensors, self.algorithm._largest)


def build_message_compressor(settings: Settings, round_number: int) -> BroadcastCompressor:
    """Returns the object that compresses the server's messages to clients in the round after `round_number`."""
    return BroadcastCompressor(
        parse_compressor(settings.compress_down), derive_seed(settings.seed, round_number, "compress down")
    )


def deciding_metric_manifest_entry(federation: Federation) -> dict[str, Any]:
    """Returns the deciding metric for `manifest.json`, with the network that the method evaluates if it says so."""
    network = describe_evaluated_network(federation.algorithm)
    return federation.metrics[0].describe() | ({"network": network} if network else {})
