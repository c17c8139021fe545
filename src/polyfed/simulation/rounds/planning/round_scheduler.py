"""Defines `RoundScheduler`, which draws the clients of each round, simulates time, and plans asynchronous rounds."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from polyfed.core.errors import UserError
from polyfed.core.seeds import derive_seed, numpy_generator
from polyfed.core.serialization import check_serializable
from polyfed.simulation.engines.base import Engine, RealTimeEngine
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.planning.round_plan import RoundPlan, SynchronousPlan
from polyfed.simulation.scheduling.asynchronous.asynchronous_plan import AsynchronousPlan, plan_server_update
from polyfed.simulation.scheduling.asynchronous.real_time_planner import RealTimePlanner
from polyfed.simulation.scheduling.asynchronous.rules import parse_asynchronous
from polyfed.simulation.scheduling.asynchronous.updates_in_flight import UpdatesInFlight
from polyfed.simulation.scheduling.sampling.registry import build_sampler
from polyfed.simulation.scheduling.sampling.sampler import Sampler, SamplingRound, UniformSampler
from polyfed.simulation.scheduling.timing.build_times import build_client_times
from polyfed.simulation.scheduling.timing.client_times import ClientTimes
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint


@final
class RoundScheduler:
    """Decides which clients take part in each round of a run, and when, in simulated time.

    A checkpoint's `schedule` holds "clock" (simulated seconds), "sampler" (what the sampler remembers), "files" (a hash of
    the files with speeds and availability) and, of an asynchronous run, "flights" (the clients at work).

    Args:
        federation: of the run.
        engine: runs its clients; real ones take the time that they take, and no time is simulated.

    Raises:
        UserError: a file with speeds or availability cannot be read, or has nothing for a client.
    """

    def __init__(self, federation: Federation, engine: Engine) -> None:
        settings = federation.settings
        self._federation, self._settings = federation, settings
        self._sampler: Sampler = federation.sampler or build_sampler(settings.sampler)
        self._rule = parse_asynchronous(settings.asynchronous)
        self._real_time_planner: RealTimePlanner | None = None
        self._times: ClientTimes | None = None
        if not isinstance(engine, RealTimeEngine):
            self._times = build_client_times(settings, federation.algorithm, federation.client_registry)
        elif self._rule is not None:
            self._real_time_planner = RealTimePlanner(federation, self._rule, engine)
        self._schedule: dict[str, Any] = {}

    @property
    def _is_plain(self) -> bool:
        """Returns True if clients are drawn uniformly, in rounds that wait for all, without simulated time."""
        return self._times is None and self._rule is None and isinstance(self._sampler, UniformSampler)

    def plan_round(self, previous: Checkpoint, history: Sequence[Mapping[str, Any]]) -> RoundPlan | None:
        """Returns the plan of the round after `previous`; None for a synchronous round with a uniform draw.

        Raises:
            UserError: a file with speeds or availability has changed since the run began; or the sampler drew a client that
                was not among those it may draw.
        """
        if self._is_plain:
            return None
        # A copy, so that a sampler cannot change what a checkpoint holds.
        schedule = {name: value for name, value in (previous.schedule or {}).items() if name != "flights"}
        self._schedule = copy.deepcopy(schedule)
        digest = "" if self._times is None else self._times.files_digest
        if self._schedule.setdefault("files", digest) != digest:
            raise UserError(
                "the files with speeds, bandwidth or availability have changed since the run began; put back the ones that "
                "it began with, or start another run"
            )
        if self._rule is not None:
            return self._plan_server_update(previous, history)
        if isinstance(self._sampler, UniformSampler):
            return None
        ids, size = self._federation.client_registry.ids, self._federation.num_round_clients
        round_clients = self._draw(previous.round + 1, ids, size, history, self._clock, "cohort", False)
        return SynchronousPlan(self._federation, previous, tuple(sorted(round_clients)))

    def add_simulated_time(self, after: Checkpoint, plan: RoundPlan | None) -> Checkpoint:
        """Returns the state after a round with its schedule, and the simulated time in the round's record.

        Args:
            after: the state after the round.
            plan: that of `plan_round`.
        """
        if self._is_plain:
            return after
        record = dict(after.unevaluated_record or {})
        if isinstance(plan, AsynchronousPlan):
            self._describe_arrivals(record, plan)
            if self._real_time_planner is not None:
                for name in ("seconds", "seconds_clients"):
                    record[name] = round(record[name] + self._real_time_planner.seconds_waited, 4)
        elif self._times is not None:
            self._advance_clock_to_last_reply(record)
        if self._times is not None:
            record["simulated_seconds"] = self._clock
        check_serializable(self._schedule, f"the state of the sampler {type(self._sampler).__name__}")
        return replace(after, unevaluated_record=record, schedule=self._schedule)

    @property
    def _clock(self) -> float:
        clock: float = self._schedule.get("clock", 0.0)
        return clock

    def _advance_clock_to_last_reply(self, record: dict[str, Any]) -> None:
        """Sets the clock to the time at which the last client of a synchronous round has replied."""
        assert self._times is not None
        start, ends = self._clock, []
        for client, row in record["clients"].items():
            if "bytes_down" in row:
                num_bytes = row["bytes_down"] + row.get("bytes_up", 0)
                ends.append(self._times.finish_time(client, start, num_bytes))
                row["update_seconds"] = ends[-1] - start
        self._schedule["clock"] = max(ends, default=start)

    def _describe_arrivals(self, record: dict[str, Any], plan: AsynchronousPlan) -> None:
        """Adds staleness and duration of each client's update to the record of an asynchronous round."""
        for client, flight in plan.arrivals.items():
            if client in record["clients"]:
                row = record["clients"][client]
                row |= {"update_seconds": flight.finishes - flight.started, "staleness": plan.staleness_of(client)}

    def _plan_server_update(self, previous: Checkpoint, history: Sequence[Mapping[str, Any]]) -> AsynchronousPlan:
        assert self._rule is not None
        concurrency = find_concurrency(self._federation)

        def draw(ids: Sequence[str], size: int, clock: float, number: int, may_be_empty: bool) -> Sequence[str]:
            purpose = "cohort" if number == 0 else f"cohort {number}"
            return self._draw(previous.round + 1, ids, size, history, clock, purpose, may_be_empty)

        if self._real_time_planner is not None:
            return self._real_time_planner.plan_update(previous, concurrency, draw)
        assert self._times is not None
        # The states of versions are large and never changed: they are not copied.
        flights_entry = (previous.schedule or {}).get("flights")
        flights = UpdatesInFlight() if flights_entry is None else UpdatesInFlight.from_plain_state(flights_entry)
        planned = plan_server_update(self._federation, self._rule, previous, flights, self._times, concurrency, draw)
        self._schedule["flights"] = planned.flights_after.to_plain_state()
        self._schedule["clock"] = planned.flights_after.clock
        return planned.plan

    def _draw(
        self,
        round_number: int,
        ids: Sequence[str],
        size: int,
        history: Sequence[Mapping[str, Any]],
        clock: float,
        purpose: str,
        may_be_empty: bool,
    ) -> Sequence[str]:
        """Draws clients by the sampler, and checks that they are among those it may draw."""
        is_uniform = isinstance(self._sampler, UniformSampler)
        if is_uniform and size == len(ids):
            return list(ids)
        ids = ids if is_uniform else list(ids)  # an asynchronous run has no list of a million idle clients
        state = self._schedule.setdefault("sampler", {})
        num_examples = self._federation.client_registry.num_examples
        moment = SamplingRound(round_number, size, num_examples, clock, self._times, may_be_empty, state)
        generator = numpy_generator(derive_seed(self._settings.seed, round_number, purpose))
        selection = self._sampler.draw(moment, ids, history, generator)
        if is_uniform:
            return list(selection)
        allowed, name = set(ids), type(self._sampler).__name__
        if isinstance(selection, str) or not isinstance(selection, Iterable):
            raise UserError(f"sampler {name} must draw a list of client ids, got {selection!r}")
        drawn_ids = list(selection)
        if strangers := [client for client in drawn_ids if client not in allowed]:
            raise UserError(f"sampler {name} drew {strangers[0]!r}, which is not among the clients that it may draw")
        if len(set(drawn_ids)) < len(drawn_ids) or len(drawn_ids) > size or not (drawn_ids or may_be_empty):
            raise UserError(
                f"sampler {name} must draw 1 to {size} different clients, got {len(drawn_ids)}: {drawn_ids[:5]}"
            )
        return drawn_ids


def find_concurrency(federation: Federation) -> int:
    """Returns how many clients of an asynchronous run are at work at once.

    Raises:
        UserError: `concurrency` is more than the number of clients.
    """
    rule = parse_asynchronous(federation.settings.asynchronous)
    assert rule is not None
    number = len(federation.client_registry.ids)
    if rule.concurrency is None:
        return federation.num_round_clients
    if isinstance(rule.concurrency, int):
        if rule.concurrency > number:
            raise UserError(
                f"asynchronous={rule.rule}: concurrency={rule.concurrency} asks for more clients than the {number} there are"
            )
        return rule.concurrency
    return max(1, round(rule.concurrency * number + 1e-9))
