"""Plans the server updates of an asynchronous run whose clients are real: their replies are taken as they come."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from polyfed.simulation.engines.base import RealTimeEngine, TaskResult
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.replies.reply_validation import ValidatedReply, validate_reply
from polyfed.simulation.scheduling.asynchronous.asynchronous_plan import AsynchronousPlan, DrawClients
from polyfed.simulation.scheduling.asynchronous.idle_clients import IdleClients
from polyfed.simulation.scheduling.asynchronous.rules import AsynchronousRule
from polyfed.simulation.scheduling.asynchronous.updates_in_flight import UpdateInFlight
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint


@final
class RealTimePlanner:
    """Starts idle clients from the newest version, and waits until the replies of the next server update have come.

    Only valid replies fill the buffer: a client that fails or sends NaN holds nobody up, and cannot end a run whose buffer
    is one reply. It starts again after the update, as all do whose task has ended.

    Args:
        federation, rule: of the run.
        engine: reaches the clients.
    """

    def __init__(self, federation: Federation, rule: AsynchronousRule, engine: RealTimeEngine) -> None:
        self._federation, self._rule, self._engine = federation, rule, engine
        self._flights: dict[str, UpdateInFlight] = {}
        self._unused_results = deque[TaskResult]()  # that came at once with the last of a buffer
        self._versions: dict[int, Any] = {}
        self.seconds_waited = 0.0

    def plan_update(self, previous: Checkpoint, concurrency: int, draw: DrawClients) -> AsynchronousPlan:
        """Returns the plan of the next server update, once the replies that it uses have come, or no client is at work.

        Args:
            previous: the newest state.
            concurrency: how many clients are at work at once.
            draw: draws clients that start.
        """
        began = time.monotonic()
        self._versions[previous.round] = previous.state
        self._start_idle_clients(previous, concurrency, draw)
        arrivals, validated = dict[str, UpdateInFlight](), dict[str, ValidatedReply | ValueError]()
        while sum(isinstance(reply, ValidatedReply) for reply in validated.values()) < self._rule.buffer:
            if not self._unused_results:
                self._unused_results.extend(self._engine.wait_for_results())
            if not self._unused_results:
                break
            result = self._unused_results.popleft()
            flight = self._flights.pop(result.task.client)
            arrivals[result.task.client] = replace(flight, finishes=time.monotonic())
            if result.failure is None:
                validated[result.task.client] = self._validate(result, flight.version, previous)
        plan = AsynchronousPlan(self._federation, self._rule, previous, arrivals, dict(self._versions), validated)
        needed_versions = {flight.version for flight in self._flights.values()}
        self._versions = {version: self._versions[version] for version in needed_versions}
        self.seconds_waited = time.monotonic() - began
        return plan

    def _start_idle_clients(self, previous: Checkpoint, concurrency: int, draw: DrawClients) -> None:
        idle_ids: Sequence[str] = IdleClients(self._federation.client_registry.ids, self._flights)
        number = min(concurrency - len(self._flights), len(idle_ids))
        if number <= 0:
            return
        drawn_ids = sorted(draw(idle_ids, number, 0.0, 0, bool(self._flights)))
        now, round_number = time.monotonic(), previous.round + 1
        for tasks in self._federation.build_task_blocks("local", drawn_ids, round_number, previous):
            self._engine.start(tasks)
        self._flights |= {client: UpdateInFlight(now, now, previous.round) for client in drawn_ids}

    def _validate(self, result: TaskResult, version: int, previous: Checkpoint) -> ValidatedReply | ValueError:
        """Returns a client's reply, decoded and checked, or what is wrong with it, which the round reports as a failure."""
        try:
            start = Checkpoint(version, self._versions[version], previous.client_states)
            return validate_reply(self._federation, result, start)
        except ValueError as flaw:
            return flaw
