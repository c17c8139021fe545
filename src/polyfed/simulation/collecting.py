"""A round: in each phase tasks go to the engine, and each result is accepted or recorded as a failure.

A simulation evaluates a round before the next begins. Between sites each exchange of messages takes long, so that the
evaluation goes with the training of the next round (`Engine.rides`): from the same state, with the same seeds and under the
number of its own round, so that records are the same. Until then the record of a round is unfinished.
"""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from torch import Tensor

from polyfed.algorithms import name_of
from polyfed.core.adapters import mode_of
from polyfed.core.algorithm import Message
from polyfed.core.dense import dense
from polyfed.core.errors import ClientError, RoundError
from polyfed.core.evaluation import summarise
from polyfed.core.tree import check_keepable
from polyfed.simulation.engines.work import Engine, Phase, Result, Task
from polyfed.simulation.intake import Intake
from polyfed.simulation.norms import NORM, update_norm, warnings_about
from polyfed.simulation.rounds import Federation, mean_train_loss
from polyfed.simulation.runs.checkpoint import Checkpoint
from polyfed.simulation.runs.directory import RunDirectory
from polyfed.simulation.runs.predictions import Outputs
from polyfed.simulation.runs.progress import Progress
from polyfed.simulation.runs.signature import write_model
from polyfed.simulation.secure import part_flaw, part_of
from polyfed.simulation.settings import Settings


@final
@dataclass
class Collected:
    """What became of the tasks of one phase: results that can be accepted, and by client bytes that went down and came up,
    scalars, and norms of what replies change; a record of each failure; seconds in which the server made messages and in
    which clients worked, and all of them, where the phase has had the engine to itself."""

    results: dict[str, Result] = field(default_factory=dict)
    bytes_down: dict[str, int] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    scalars: dict[str, Mapping[str, float]] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds_dispatch: float = 0.0
    seconds_clients: float = 0.0
    seconds: float = 0.0


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
    intake: Intake | None = None,
    beside: Collected | None = None,
) -> Collected:
    """Carries out one phase for these clients, from the state `at`. Raises at the first failure if so configured. Replies
    go to `intake` as they come, and are not kept elsewhere. `beside` takes in the evaluation of all clients after the round
    of `at`, whose tasks go to the engine together with the others."""
    found, done, clock = Collected(), {"local": 0, "evaluate": 0, "export": 0}, time.perf_counter
    began_all = clock()
    blocks = federation.tasks(phase, clients, number, at, engine.block_bytes)
    everyone, others = list(federation.roster.ids), iter(list[list[Task]]())
    if beside is not None:
        others = federation.tasks("evaluate", everyone, at.round, at, engine.block_bytes)
    while True:
        asked = clock()
        tasks, more = next(blocks, []), next(others, [])
        found.seconds_dispatch += clock() - asked
        if not (tasks or more):
            break
        if phase == "local":
            found.bytes_down |= {task.client: task.travelling.nbytes for task in tasks}
        began = clock()
        for result in engine.run([*tasks, *more]):
            now = result.task.phase
            into = found if beside is None or now == phase else beside
            _accept(federation, result, at, into, progress, intake if into is found else None)
            done[now] += 1
            progress.client(now, done[now], len(clients if into is found else everyone))
        found.seconds_clients += clock() - began
    for part in (found, beside) if beside is not None else (found,):
        part.failures.sort(key=place)
    found.seconds = clock() - began_all
    return found


def _opened(federation: Federation, result: Result, at: Checkpoint) -> tuple[Any, Any, float | None]:
    """The reply as the server half takes it, as it travelled, and the norm of what it changes. Of a secure sum both are
    words, and no single norm is known.

    Raises:
        ValueError: why it cannot be accepted; half a sentence.
    """
    task, reply = result.task, result.reply
    if result.masked:
        if reply is not None and (flaw := part_flaw(reply, federation.algorithm, at.state, task.down)):
            raise ValueError(flaw)
        return reply, reply, None  # no reply of a site that is in no sum of this round
    opened = federation.opened(reply, task.down)
    if flaw := federation.flaw(opened, at.state, task.down, task.client):
        raise ValueError(flaw)
    if not federation.settings.secure:
        assert isinstance(reply, Message)  # what is none has a flaw
        plain = opened if mode_of(federation.algorithm) is None else federation.decompressed(reply, task.down)
        return opened, reply, update_norm(plain, task.down, federation.algorithm._differences)
    part = part_of(opened, federation.algorithm, federation.parties)  # as a site does before it masks
    return part, part, None


def _accept(
    federation: Federation,
    result: Result,
    at: Checkpoint,
    found: Collected,
    progress: Progress,
    intake: Intake | None,
) -> None:
    """Puts one result where it belongs: among the accepted, or among the failures."""
    task, failure, reply, sent, norm = result.task, result.failure, result.reply, result.reply, None
    if failure is None and task.phase == "local":
        try:
            reply, sent, norm = _opened(federation, result, at)
        except ValueError as flaw:
            failure = ClientError(task.round, task.client, "reply", str(flaw))
    for incident in result.incidents:
        warnings.warn(f"round {task.round}, client {task.client!r}: {incident}", RuntimeWarning, stacklevel=6)
        reason = {"client": task.client, "phase": task.phase, "reason": incident}
        found.failures.append({**reason, "retried": failure is None})
    if failure is None:
        if sent is not None and reply is not None and intake is not None:
            found.bytes_up[task.client], found.scalars[task.client] = sent.nbytes, reply.scalars
            found.norms |= {} if norm is None else {task.client: norm}
            intake.came(task.client, reply)
            result = replace(result, reply=None)
        # Without the message: with it, those of all blocks would stay until the end of the phase.
        found.results[task.client] = replace(result, task=replace(task, down=Message(), own=None, sent=None))
    elif federation.settings.on_error == "raise":
        raise failure
    else:
        if intake is not None:
            intake.lost(task.client)
        progress.say(f"{failure}; the run goes on without this client")
        reason = {"client": failure.client, "phase": failure.phase, "reason": failure.reason}
        found.failures.append({**reason, "retried": False})


def is_evaluated(settings: Settings, number: int) -> bool:
    """Whether all clients are evaluated after a round."""
    return number % settings.evaluate_every == 0 or number == settings.rounds


def evaluation(federation: Federation, at: Checkpoint, engine: Engine, progress: Progress) -> Collected:
    """The evaluation of all clients after a round, by itself."""
    return collect(federation, engine, "evaluate", list(federation.roster.ids), at.round, at, progress)


def play_round(
    federation: Federation,
    before: Checkpoint,
    history: Sequence[Mapping[str, Any]],
    engine: Engine,
    progress: Progress,
    finish: Callable[[Checkpoint, Collected], object],
) -> Checkpoint:
    """One round up to its evaluation: the state after it, with its record as far as it is known by then. If the round before
    is still to be evaluated, that is done beside, and `finish` gets what came of it before the replies are aggregated."""
    settings, algorithm, number, clock = federation.settings, federation.algorithm, before.round + 1, time.perf_counter
    started = clock()
    who = federation.cohort(number)
    trained = list(federation.roster.ids) if "everyone_trains" in algorithm.traits else who
    intake = Intake(algorithm, before.state, who, federation.roster.num_examples, settings.secure)
    beside = None if before.unfinished is None else Collected()
    local = collect(federation, engine, "local", trained, number, before, progress, intake, beside)
    if beside is not None:
        finish(before, beside)
    replies = [i for i in who if i in local.results]
    if len(replies) < settings.min_replies:
        reasons = "; ".join(f"{f['client']}: {f['reason']}" for f in local.failures[:3])
        raise RoundError(f"round {number} has {len(replies)} valid replies of {len(who)}, min_replies is "
                         f"{settings.min_replies} ({reasons})")  # fmt: skip
    aggregating = clock()
    state, dropped = intake.aggregate(federation.context(), drop=settings.on_error == "skip")
    for i, reason in dropped.items():
        local.failures.append({"client": i, "phase": "aggregate", "reason": reason, "retried": False})
        progress.say(f"client {i!r}: {reason}; its reply is left out")
    replies = [i for i in replies if i not in dropped]
    if len(replies) < settings.min_replies:
        raise RoundError(f"round {number} has {len(replies)} replies that can be aggregated, min_replies is "
                         f"{settings.min_replies} ({next(iter(dropped.values()), '')})")  # fmt: skip
    check_keepable(state, f"{name_of(algorithm)}: the server's state")
    state = dense(state)
    seconds_server = local.seconds_dispatch + intake.seconds + clock() - aggregating

    rows: dict[str, dict[str, Any]] = {i: {"bytes_down": size} for i, size in local.bytes_down.items()}
    for i, result in local.results.items():
        scalars = local.scalars.get(i, {})
        told = {"train_loss": scalars["train_loss"]} if "train_loss" in scalars else {}
        norm = {NORM: local.norms[i]} if i in local.norms else {}
        rows[i] |= {"seconds": round(result.seconds, 4), **told, **norm}
    for i in replies:
        rows[i]["bytes_up"] = local.bytes_up[i]
    down, up = (sum(row.get(f"bytes_{way}", 0) for row in rows.values()) for way in ("down", "up"))
    record = {
        "round": number,
        "seconds": round(clock() - started, 4),
        "seconds_clients": round(local.seconds_clients - intake.seconds, 4),
        "seconds_server": round(seconds_server, 4),
        "train_loss": mean_train_loss({i: local.scalars[i] for i in replies}),
        "bytes_down": down,
        "bytes_up": up,
        "bytes_down_total": down + (history[-1]["bytes_down_total"] if history else 0),
        "bytes_up_total": up + (history[-1]["bytes_up_total"] if history else 0),
        "clients": {i: rows[i] for i in sorted(rows)},
        "summary": {},
        "failures": local.failures,
        "replied": sorted(replies),
        "score": federation.metrics[0].name,
    }
    states = {**before.client_states, **{i: result.own for i, result in local.results.items()}}
    return Checkpoint(number, state, states, record)


def finished(
    federation: Federation,
    record: Mapping[str, Any],
    evaluated: Collected | None,
    history: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Any], Outputs]:
    """The record of a round for `metrics.jsonl`, and what the evaluated networks gave.

    Args:
        federation: who took part.
        record: as `play_round` leaves it.
        evaluated: what came of the evaluation; None for a round that has none.
        history: the records of the rounds before.
    """
    whole, outputs = dict(record), dict[str, Mapping[str, Tensor]]()
    if evaluated is not None:
        rows = dict(record["clients"])
        metrics = {i: result.metrics for i, result in sorted(evaluated.results.items())}
        for i, values in metrics.items():
            rows[i] = {**rows.get(i, {}), **values}
        outputs = {i: result.predictions for i, result in sorted(evaluated.results.items()) if result.predictions}
        whole |= {
            "seconds": round(record["seconds"] + evaluated.seconds, 4),
            "clients": {i: rows[i] for i in sorted(rows)},
            "summary": summarise(metrics, federation.roster.num_examples),
            "failures": sorted([*record["failures"], *evaluated.failures], key=place),
        }
    before: Sequence[Mapping[str, Any]] = history
    if federation.settings.keep == "loss" and history:  # all but the best were worse
        before = [history[history[-1]["best_round"] - 1]] if history[-1]["best_round"] else []
    best = federation.best_round([*before, whole])
    return {**whole, "warnings": warnings_about(whole), "best_round": best}, outputs


def write_models(
    federation: Federation, at: Checkpoint, engine: Engine, directory: RunDirectory, progress: Progress
) -> None:
    """The personal models after a round, `models/ID.safetensors`. With `on_error="skip"` a client whose model cannot
    be made costs no other client's; the records of the rounds are complete by now, so it is told as a warning."""
    blocks = federation.tasks("export", list(federation.roster.ids), at.round, at, engine.block_bytes)
    for result in (result for tasks in blocks for result in engine.run(tasks)):
        client, failure = result.task.client, result.failure
        for incident in result.incidents:
            warnings.warn(f"export of client {client!r}: {incident}", RuntimeWarning, stacklevel=4)
        if failure is not None:
            if federation.settings.on_error == "raise":
                raise failure
            progress.say(f"{failure}; its model is not written")
            warnings.warn(f"{failure}; its model is not written", RuntimeWarning, stacklevel=4)
            continue
        if result.weights is not None:  # at a site they stay there
            own = federation.clients.get(client)
            write_model(directory.model_path(client), result.weights, result.description, own)
