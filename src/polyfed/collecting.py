"""One phase of a round: tasks go to the engine, and each result is accepted or recorded as a failure."""

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from polyfed.algorithm import Message
from polyfed.engines.work import Engine, Phase, Result
from polyfed.errors import ClientError
from polyfed.rounds import Federation
from polyfed.runs.checkpoint import Checkpoint
from polyfed.runs.progress import Progress


@final
@dataclass
class Collected:
    """What became of the tasks of one phase: results that can be accepted and bytes that went down, by client; a record of
    each failure; seconds in which the server made messages and in which clients worked."""

    results: dict[str, Result] = field(default_factory=dict)
    bytes_down: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds_dispatch: float = 0.0
    seconds_clients: float = 0.0


def place(failure: Mapping[str, Any]) -> tuple[str, ...]:
    """By what failures are sorted."""
    return failure["client"], failure["phase"], failure["reason"]


def collect(
    federation: Federation,
    engine: Engine,
    phase: Phase,
    clients: Sequence[str],
    number: int,
    at: Checkpoint,
    progress: Progress,
) -> Collected:
    """Carries out one phase for these clients, from the state `at`. Raises at the first failure if so configured."""
    found, done, clock = Collected(), 0, time.perf_counter
    blocks = federation.tasks(phase, clients, number, at, engine.block_bytes)
    while True:
        asked = clock()
        tasks = next(blocks, None)
        found.seconds_dispatch += clock() - asked
        if tasks is None:
            break
        if phase == "local":
            found.bytes_down |= {task.client: task.down.nbytes for task in tasks}
        began = clock()
        for result in engine.run(tasks):
            _accept(federation, result, at, found, progress)
            done += 1
            progress.client(phase, done, len(clients))
        found.seconds_clients += clock() - began
    found.failures.sort(key=place)
    return found


def _accept(federation: Federation, result: Result, at: Checkpoint, found: Collected, progress: Progress) -> None:
    """Puts one result where it belongs: among the accepted, or among the failures."""
    task, failure = result.task, result.failure
    if failure is None and task.phase == "local" and (flaw := federation.flaw(result.reply, at.state, task.down)):
        failure = ClientError(task.round, task.client, "reply", flaw)
    for incident in result.incidents:
        warnings.warn(f"round {task.round}, client {task.client!r}: {incident}", RuntimeWarning, stacklevel=6)
        reason = {"client": task.client, "phase": task.phase, "reason": incident}
        found.failures.append({**reason, "retried": failure is None})
    if failure is None:
        # Without the message: with it, those of all blocks would stay until the end of the phase.
        found.results[task.client] = replace(result, task=replace(task, down=Message(), mine=None))
    elif federation.settings.on_error == "raise":
        raise failure
    else:
        progress.say(f"{failure}; the run goes on without this client")
        reason = {"client": failure.client, "phase": failure.phase, "reason": failure.reason}
        found.failures.append({**reason, "retried": False})
