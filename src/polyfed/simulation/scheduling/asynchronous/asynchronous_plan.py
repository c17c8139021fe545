"""Defines `AsynchronousPlan`, the plan of one server update of an asynchronous run, and finds whose replies it uses."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, final

from polyfed.core.algorithm import Message
from polyfed.core.errors import RoundError
from polyfed.core.messages.message_compression import compress_message
from polyfed.core.nn.module_cache import cached_module
from polyfed.simulation.engines.base import ClientTask, TaskResult
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.planning.round_plan import RoundPlan
from polyfed.simulation.rounds.replies.reply_validation import ValidatedReply
from polyfed.simulation.scheduling.asynchronous.idle_clients import IdleClients
from polyfed.simulation.scheduling.asynchronous.rebase import mix_model, rebase_update
from polyfed.simulation.scheduling.asynchronous.rules import AsynchronousRule, FedAsync
from polyfed.simulation.scheduling.asynchronous.updates_in_flight import UpdateInFlight, UpdatesInFlight
from polyfed.simulation.scheduling.timing.client_times import ClientTimes
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint

DrawClients = Callable[[Sequence[str], int, float, int, bool], Sequence[str]]
"""Draws clients: from the ids that may be drawn, how many, the simulated time, the number of the draw, and whether
nobody may be drawn."""


@final
@dataclass(frozen=True)
class AsynchronousPlan(RoundPlan):
    """Lets each client whose reply arrives train from the version of the server state from which it started.

    The update is computed when it arrives, not when it starts: the result is the same, and all replies of a round are
    computed together.

    Args:
        federation, rule: of the run.
        previous: the newest state.
        arrivals: the flights that end in this round, by client.
        versions: version -> server state.
        validated: by client, the valid reply or what is wrong with it, where that is known already; each is used once.
    """

    federation: Federation
    rule: AsynchronousRule
    previous: Checkpoint
    arrivals: Mapping[str, UpdateInFlight]
    versions: Mapping[int, Any]
    validated: dict[str, ValidatedReply | ValueError] = field(default_factory=dict)

    @property
    def client_ids(self) -> Sequence[str]:
        """Returns the ids of the clients whose replies arrive, sorted."""
        return sorted(self.arrivals)

    def build_task_blocks(self, clients: Sequence[str], max_bytes: int) -> Iterator[list[ClientTask]]:
        """Yields the clients' training tasks, each with the message of the version from which the client started.

        The clients of one version share the tensors of their messages. The blocks of several versions are joined as far as
        their messages take at most `max_bytes`.
        """
        block: list[ClientTask] = []
        block_bytes = 0
        for version in sorted({self.arrivals[client].version for client in clients}):
            same_start = [client for client in clients if self.arrivals[client].version == version]
            state = self._checkpoint_of_version(version)
            for tasks in self.federation.build_task_blocks("local", same_start, version + 1, state, max_bytes):
                num_bytes = tasks[0].message.nbytes
                if block and block_bytes + num_bytes > max_bytes:
                    yield block
                    block, block_bytes = [], 0
                block, block_bytes = [*block, *tasks], block_bytes + num_bytes
        if block:
            yield block

    def start_of(self, client: str) -> Checkpoint:
        """Returns the state from which a client has started, with the clients' present private states."""
        return self._checkpoint_of_version(self.arrivals[client].version)

    def validate_reply(self, result: TaskResult) -> ValidatedReply:
        """Returns a client's reply, decoded and checked when it came or now; raises a `ValueError` if it is not valid."""
        outcome = self.validated.pop(result.task.client, None)
        if isinstance(outcome, ValueError):
            raise outcome
        return super().validate_reply(result) if outcome is None else outcome

    def rebase_reply(self, client: str, reply: Message, message: Message) -> tuple[Message, Message]:
        """Returns the reply with its change, scaled by staleness, added to the newest state; and its message."""
        newest = self._newest_messages[client]
        scale = self.rule.scale(self.staleness_of(client))
        try:
            if isinstance(self.rule, FedAsync):
                return mix_model(reply, newest, scale), newest
            return rebase_update(reply, message, newest, scale, self._buffer_names), newest
        except ValueError as flaw:
            raise RoundError(
                f"client {client!r}: {flaw}; asynchronous={self.rule.rule} is for methods whose replies hold what the "
                'server\'s message held, and the method should have "one_version" among its traits'
            ) from flaw

    def staleness_of(self, client: str) -> int:
        """Returns the number of server updates between a client's start and this round."""
        return self.previous.round - self.arrivals[client].version

    def _checkpoint_of_version(self, version: int) -> Checkpoint:
        return Checkpoint(version, self.versions[version], self.previous.client_states)

    @cached_property
    def _newest_messages(self) -> Mapping[str, Message]:
        ids = self.client_ids
        infos = [self.federation.client_info(client, self.previous.round + 1) for client in ids]
        messages = self.federation.algorithm.dispatch_all(self.previous.state, infos)
        return dict(zip(ids, messages, strict=True))

    @cached_property
    def _buffer_names(self) -> Collection[str]:
        model = self.federation.server_context().model
        return frozenset() if model is None else frozenset(cached_module(model).buffers)


class PlannedUpdate(NamedTuple):
    """Holds the plan of a server update, and the clients at work after it."""

    plan: AsynchronousPlan
    flights_after: UpdatesInFlight


def plan_server_update(
    federation: Federation,
    rule: AsynchronousRule,
    previous: Checkpoint,
    flights: UpdatesInFlight,
    times: ClientTimes,
    concurrency: int,
    draw: DrawClients,
) -> PlannedUpdate:
    """Advances the simulated time until the server has the replies of its next update, and returns whose they are.

    Replies arrive in the order of simulated time, then of client id. At one instant replies come before starts, so that
    clients start from the newest version. A client that has replied starts again after the update.

    Args:
        federation, rule: of the run.
        previous: the newest state.
        flights: the clients at work.
        times: computes when their updates end.
        concurrency: how many clients are at work at once.
        draw: draws clients that start.
    """
    at_work, arrivals = dict(flights.by_client or {}), dict[str, UpdateInFlight]()
    clock, draws, all_ids = flights.clock, flights.draws, federation.client_registry.ids
    while len(arrivals) < rule.buffer:
        next_reply = min((flight.finishes for flight in at_work.values()), default=math.inf)
        num_free = concurrency - len(at_work)
        if num_free > 0 and next_reply > clock:
            idle_ids = IdleClients(all_ids, [*at_work, *arrivals])
            if len(idle_ids):
                drawn_ids = sorted(draw(idle_ids, min(num_free, len(idle_ids)), clock, draws, bool(at_work)))
                num_bytes = _count_bytes_of_updates(federation, previous, drawn_ids, times)
                for client in drawn_ids:
                    finishes = times.finish_time(client, clock, num_bytes.get(client, 0))
                    at_work[client] = UpdateInFlight(clock, finishes, previous.round)
                draws += 1
        finishes, client = min((flight.finishes, client) for client, flight in at_work.items())
        clock = max(clock, finishes)
        arrivals[client] = at_work.pop(client)
    known_versions = {**(flights.versions or {}), previous.round: previous.state}
    needed_versions = {flight.version for flight in at_work.values()}
    versions_after = {version: known_versions[version] for version in sorted(needed_versions)}
    plan = AsynchronousPlan(federation, rule, previous, arrivals, known_versions)
    return PlannedUpdate(plan, UpdatesInFlight(clock, draws, at_work, versions_after))


def _count_bytes_of_updates(
    federation: Federation, previous: Checkpoint, client_ids: Sequence[str], times: ClientTimes
) -> dict[str, int]:
    """Returns the bytes of message and reply of clients that start now; empty if bytes take no simulated time.

    The reply is not known yet. It counts as large as a reply with the tensors of the message, compressed as replies are.
    """
    if times.bandwidths is None or not client_ids:
        return {}
    sizes = {}
    groups = getattr(federation.algorithm, "groups", ())
    for tasks in federation.build_task_blocks("local", client_ids, previous.round + 1, previous):
        size_by_message: dict[tuple[int, ...], int] = {}
        for task in tasks:
            key = tuple(id(tensor) for tensors in task.message.tensors.values() for tensor in tensors.values())
            if key not in size_by_message:
                sent = {group: task.message.tensors[group] for group in groups if group in task.message.tensors}
                reply = Message(sent or task.message.tensors)
                if federation.reply_compression is not None:
                    reply = compress_message(reply, task.message, federation.reply_compression, task.reply_seed)
                size_by_message[key] = task.transmitted_message.nbytes + reply.nbytes
            sizes[task.client] = size_by_message[key]
    return sizes
