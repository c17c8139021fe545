"""Runs one round: samples its clients, sends messages, runs the clients, aggregates their replies, and makes the
record.

A simulation evaluates a round before the next begins. Between sites each exchange of messages takes long, so that a round is
evaluated during the training of the next (`Engine.overlaps_evaluation`): from the same state, with the same seeds and under
its own number, so that the records are the same. Until then the record of a round is incomplete.
"""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, final

from torch import Tensor

from polyfed.algorithms import registry_name
from polyfed.core.algorithm import Message
from polyfed.core.errors import ClientError, RoundError, UserError
from polyfed.core.evaluation.evaluate import summarise_clients
from polyfed.simulation.checks.settings.private_training import describe_epsilon
from polyfed.simulation.engines.base import ClientTask, Engine, Phase, TaskResult
from polyfed.simulation.monitoring.progress import Progress, SilentProgress
from polyfed.simulation.monitoring.update_norms import MeasuredUpdate, describe_measures, describe_round_warnings
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.planning.evaluation_sample import describe_evaluation_sample
from polyfed.simulation.rounds.planning.round_plan import RoundPlan
from polyfed.simulation.rounds.replies.aggregator import ReplyAggregator
from polyfed.simulation.rounds.replies.reply_validation import ValidatedReply, validate_reply
from polyfed.simulation.rounds.round_scores import mean_train_loss
from polyfed.simulation.sources.source_clients import SourceClients
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.simulation.storage.checkpoints.client_states import check_and_wrap_server_state
from polyfed.simulation.storage.directory import RunDirectory
from polyfed.simulation.storage.model_signature import remove_other_models, write_model_with_signature
from polyfed.simulation.storage.predictions.prediction_store import OutputsByClient


@final
@dataclass
class PhaseResults:
    """Collects, by client, the results of one phase of a round: training or evaluation.

    Attributes:
        results: the accepted results, by client.
        bytes_down, bytes_up: the sizes of messages and replies, by client.
        scalars: the scalars of the replies, by client.
        measures: norm and direction of the update in each reply, by client.
        failures: an entry of the record for each failure.
        seconds_dispatch: time in which the server made messages.
        seconds_clients: time in which clients worked.
        seconds: duration of the phase, if the engine did nothing else meanwhile.
    """

    results: dict[str, TaskResult] = field(default_factory=dict)
    bytes_down: dict[str, int] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    scalars: dict[str, Mapping[str, float]] = field(default_factory=dict)
    measures: dict[str, MeasuredUpdate] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds_dispatch: float = 0.0
    seconds_clients: float = 0.0
    seconds: float = 0.0


def failure_sort_key(failure: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the key by which a round's failures are sorted: client, phase and reason."""
    return failure["client"], failure["phase"], failure["reason"]


def run_phase(
    federation: Federation,
    engine: Engine,
    phase: Phase,
    clients: Sequence[str],
    round_number: int,
    checkpoint: Checkpoint,
    progress: Progress,
    aggregator: ReplyAggregator | None = None,
    evaluation_results: PhaseResults | None = None,
    plan: RoundPlan | None = None,
) -> PhaseResults:
    """Runs a round's training or evaluation: sends messages, runs tasks, accepts or refuses results.

    Args:
        federation, engine, progress: of the run.
        phase, clients, round_number: the work, and who does it.
        checkpoint: the state from which the server makes its messages.
        aggregator: takes each accepted reply as it comes; the results do not hold replies.
        evaluation_results: if not None, clients are also evaluated from `checkpoint`, with the number of its round, and
            their results are collected here. The engine gets the tasks of both together.
        plan: builds the tasks of the training; None: they begin from `checkpoint`.

    Raises:
        ClientError: a client failed and `on_error` is "raise".
    """
    phase_results, done_by_phase, clock = PhaseResults(), {"local": 0, "evaluate": 0, "export": 0}, time.perf_counter
    phase_start = clock()
    if plan is None:
        blocks = federation.build_task_blocks(phase, clients, round_number, checkpoint, engine.max_block_bytes)
    else:
        blocks = plan.build_task_blocks(clients, engine.max_block_bytes)
    evaluated_ids, evaluation_blocks = list[str](), iter(list[list[ClientTask]]())
    if evaluation_results is not None:
        evaluated_ids = federation.sample_evaluated_clients(checkpoint.round)
        evaluation_blocks = federation.build_task_blocks(
            "evaluate", evaluated_ids, checkpoint.round, checkpoint, engine.max_block_bytes
        )
    while True:
        dispatch_start = clock()
        tasks, evaluation_tasks = next(blocks, []), next(evaluation_blocks, [])
        phase_results.seconds_dispatch += clock() - dispatch_start
        if not (tasks or evaluation_tasks):
            break
        if phase == "local":
            phase_results.bytes_down |= {task.client: task.transmitted_message.nbytes for task in tasks}
        clients_start = clock()
        for result in engine.run([*tasks, *evaluation_tasks]):
            result_phase = result.task.phase
            destination = phase_results if evaluation_results is None or result_phase == phase else evaluation_results
            summing = aggregator if destination is phase_results else None
            validate = (
                partial(validate_reply, federation, checkpoint=checkpoint) if plan is None else plan.validate_reply
            )
            _record_result(federation, result, validate, destination, progress, summing)
            done_by_phase[result_phase] += 1
            progress.show_clients_done(
                result_phase,
                done_by_phase[result_phase],
                len(clients if destination is phase_results else evaluated_ids),
            )
        if aggregator is not None:
            for partial_sum in engine.take_partial_sums():
                aggregator.add_partial_sum(partial_sum)
        phase_results.seconds_clients += clock() - clients_start
    for part in (phase_results, evaluation_results) if evaluation_results is not None else (phase_results,):
        part.failures.sort(key=failure_sort_key)
    phase_results.seconds = clock() - phase_start
    return phase_results


def _record_result(
    federation: Federation,
    result: TaskResult,
    validate: Callable[[TaskResult], ValidatedReply],
    phase_results: PhaseResults,
    progress: Progress,
    aggregator: ReplyAggregator | None,
) -> None:
    """Adds a client's result to the accepted results or to the failures of the phase."""
    task, failure, reply, transmitted = result.task, result.failure, result.reply, result.reply
    measured = MeasuredUpdate(None, None)
    if failure is None and task.phase == "local":
        try:
            reply, transmitted, measured = validate(result)
        except ValueError as flaw:
            if result.summed is not None:
                result.summed.leave_out()
            failure = ClientError(task.round, task.client, "reply", str(flaw))
    for incident_text in result.incidents:
        warnings.warn(f"round {task.round}, client {task.client!r}: {incident_text}", RuntimeWarning, stacklevel=6)
        reason = {"client": task.client, "phase": task.phase, "reason": incident_text}
        phase_results.failures.append({**reason, "retried": failure is None})
    if failure is None:
        if transmitted is not None and reply is not None and aggregator is not None:
            phase_results.scalars[task.client] = reply.scalars
            phase_results.bytes_up[task.client] = (result.summed or transmitted).nbytes
            phase_results.measures[task.client] = measured
            if not aggregator.add_reply(task.client, reply, task.message) and result.summed is not None:
                result.summed.leave_out()
            result = replace(result, reply=None)
        # Without the message: with it, those of all blocks would stay until the end of the phase.
        phase_results.results[task.client] = replace(
            result, task=replace(task, message=Message(), client_state=None, compressed_message=None)
        )
    elif federation.settings.on_error == "raise":
        raise failure
    else:
        if aggregator is not None:
            aggregator.mark_client_missing(task.client)
        progress.say(f"{failure}; the run goes on without this client")
        reason = {"client": failure.client, "phase": failure.phase, "reason": failure.reason}
        phase_results.failures.append({**reason, "retried": False})


def evaluate_clients(
    federation: Federation, checkpoint: Checkpoint, engine: Engine, progress: Progress
) -> PhaseResults:
    """Evaluates the clients' personal models after a round, and returns the results by client."""
    evaluated_ids = federation.sample_evaluated_clients(checkpoint.round)
    return run_phase(federation, engine, "evaluate", evaluated_ids, checkpoint.round, checkpoint, progress)


def train_and_aggregate_round(
    federation: Federation,
    previous: Checkpoint,
    history: Sequence[Mapping[str, Any]],
    engine: Engine,
    progress: Progress,
    on_previous_round_evaluated: Callable[[Checkpoint, PhaseResults], object],
    plan: RoundPlan | None = None,
) -> Checkpoint:
    """Runs one round: clients train, and the server aggregates; the next round evaluates it.

    Args:
        federation, engine, progress: of the run.
        previous: the state after the round before. If that round is unevaluated, all clients are evaluated beside the
            training.
        history: the records of the rounds before.
        on_previous_round_evaluated: gets `previous` and its evaluation, before the replies of this round are aggregated.
        plan: who trains, and from which versions of the state; None: a uniform draw, from `previous`.

    Returns:
        The state after the round, with the record as far as it is known.

    Raises:
        RoundError: fewer than `min_replies` replies are valid.
    """
    settings, clock, number = federation.settings, time.perf_counter, previous.round + 1
    algorithm = federation.algorithm
    started, registry = clock(), federation.client_registry
    round_clients = federation.sample_round_clients(number) if plan is None else list(plan.client_ids)
    trained = list(registry.ids) if "everyone_trains" in algorithm.traits else round_clients
    rebase = None if plan is None else plan.rebase_reply
    counts, is_source = registry.num_examples, isinstance(federation.clients, SourceClients)
    aggregator = ReplyAggregator(
        algorithm, previous.state, round_clients, counts, settings.secure, rebase, settings.regions, is_source
    )
    evaluation = None if previous.unevaluated_record is None else PhaseResults()
    training = run_phase(federation, engine, "local", trained, number, previous, progress, aggregator, evaluation, plan)
    if evaluation is not None:
        on_previous_round_evaluated(previous, evaluation)
    reply_ids = [i for i in round_clients if i in training.results]
    if len(reply_ids) < settings.min_replies:
        reasons = "; ".join(f"{f['client']}: {f['reason']}" for f in training.failures[:3])
        raise RoundError(f"round {number} has {len(reply_ids)} valid replies of {len(round_clients)}, min_replies is "
                         f"{settings.min_replies} ({reasons})")  # fmt: skip
    aggregating = clock()
    state, dropped = _compute_server_state(federation, previous, aggregator)
    for i, reason in dropped.items():
        training.failures.append({"client": i, "phase": "aggregate", "reason": reason, "retried": False})
        progress.say(f"client {i!r}: {reason}; its reply is left out")
    reply_ids = [i for i in reply_ids if i not in dropped]
    if len(reply_ids) < settings.min_replies:
        raise RoundError(f"round {number} has {len(reply_ids)} replies that can be aggregated, min_replies is "
                         f"{settings.min_replies} ({next(iter(dropped.values()), '')})")  # fmt: skip
    seconds_server = training.seconds_dispatch + aggregator.seconds + clock() - aggregating
    record = {
        "round": number,
        "seconds": round(clock() - started, 4),
        "seconds_clients": round(training.seconds_clients - aggregator.seconds, 4),
        "seconds_server": round(seconds_server, 4),
        **_describe_training(training, reply_ids, history),
        **describe_epsilon(algorithm, federation.clients.values(), number / settings.rounds),
        "summary": {},
        "failures": training.failures,
        "replied": sorted(reply_ids),
        **aggregator.regional_report,
        **({"robust": dict(aggregator.robust_report)} if aggregator.robust_report else {}),
        "score": federation.metrics[0].name,
    }
    states = previous.client_states | {i: result.client_state for i, result in training.results.items()}
    return Checkpoint(number, state, states, record)


def run_unevaluated_rounds(federation: Federation, engine: Engine) -> tuple[Any, Mapping[str, Any]]:
    """Runs all rounds of a method that trains no network; returns the last server state and the last round's record."""
    checkpoint, history = federation.initial_checkpoint(), list[Mapping[str, Any]]()
    for _ in range(federation.settings.rounds):
        after = train_and_aggregate_round(federation, checkpoint, history, engine, SilentProgress(), lambda *_: None)
        history.append(after.unevaluated_record or {})
        checkpoint = replace(after, unevaluated_record=None)
    return checkpoint.state, history[-1]


def _compute_server_state(
    federation: Federation, previous: Checkpoint, aggregator: ReplyAggregator
) -> tuple[Any, Mapping[str, str]]:
    """Returns the server's next state, and why replies were left out, by client."""
    method, number = registry_name(federation.algorithm), previous.round + 1
    try:
        state, dropped = aggregator.aggregate(
            federation.server_context(), leave_out_bad_replies=federation.settings.on_error == "skip"
        )
    except (LookupError, AttributeError, TypeError) as error:  # of a method's code; the message alone may be one word
        names = (
            f"; groups of the server's state: {', '.join(previous.state)}" if isinstance(previous.state, dict) else ""
        )
        error.add_note(f"polyfed: round {number}, in aggregate or server_step of {method}{names}")
        raise
    if state is None and previous.state is not None:
        raise UserError(
            f"{method}: after round {number} the server's state is None; aggregate (or server_step) must "
            "return the next state: does it end without a return?"
        )
    return check_and_wrap_server_state(state, federation.algorithm, f"{method}: the server's state"), dropped


def _describe_training(
    training: PhaseResults, reply_ids: Sequence[str], history: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the training part of a round's record: losses, bytes and measures of updates, in all and by client."""
    before = history[-1] if history else {}
    measures = describe_measures(training.measures, training.scalars, history)
    rows: dict[str, dict[str, Any]] = {i: {"bytes_down": size} for i, size in training.bytes_down.items()}
    for i, result in training.results.items():
        scalars = training.scalars.get(i, {})
        loss = {"train_loss": scalars["train_loss"]} if "train_loss" in scalars else {}
        rows[i] |= {"seconds": round(result.seconds, 4), **loss, **measures.get(i, {})}
    for i in reply_ids:
        rows[i]["bytes_up"] = training.bytes_up[i]
    bytes_down, bytes_up = (sum(row.get(f"bytes_{way}", 0) for row in rows.values()) for way in ("down", "up"))
    return {
        "train_loss": mean_train_loss({i: training.scalars[i] for i in reply_ids}),
        "bytes_down": bytes_down,
        "bytes_up": bytes_up,
        "bytes_down_total": bytes_down + before.get("bytes_down_total", 0),
        "bytes_up_total": bytes_up + before.get("bytes_up_total", 0),
        "clients": {i: rows[i] for i in sorted(rows)},
    }


@final
class RoundRecordWithOutputs(NamedTuple):
    """Holds the complete record of a round, and the outputs of the evaluated networks for each client."""

    record: dict[str, Any]
    outputs_by_client: OutputsByClient


def complete_record(
    federation: Federation,
    incomplete_record: Mapping[str, Any],
    evaluation_results: PhaseResults | None,
    history: Sequence[Mapping[str, Any]],
) -> RoundRecordWithOutputs:
    """Adds a round's evaluation to its record, and returns it with the networks' outputs.

    Args:
        federation: of the run.
        incomplete_record: the incomplete record that `train_and_aggregate_round` made.
        evaluation_results: the evaluation of the clients; None in a round without one.
        history: the records of the rounds before.
    """
    full_record, outputs = dict(incomplete_record), dict[str, Mapping[str, Tensor]]()
    if evaluation_results is not None:
        rows = dict(incomplete_record["clients"])
        metrics = {i: result.metrics for i, result in sorted(evaluation_results.results.items())}
        for i, values in metrics.items():
            rows[i] = {**rows.get(i, {}), **values}
        outputs = {
            i: result.predictions for i, result in sorted(evaluation_results.results.items()) if result.predictions
        }
        full_record |= {
            "seconds": round(incomplete_record["seconds"] + evaluation_results.seconds, 4),
            "clients": {i: rows[i] for i in sorted(rows)},
            "summary": (summary := summarise_clients(metrics, federation.client_registry.num_examples)),
            **describe_evaluation_sample(
                federation.settings, len(federation.client_registry.ids), metrics, summary, metrics, federation.metrics
            ),
            "failures": sorted([*incomplete_record["failures"], *evaluation_results.failures], key=failure_sort_key),
        }
    earlier_records: Sequence[Mapping[str, Any]] = history
    if history and "best_round" in history[-1]:  # all but the best were worse
        earlier_records = [history[history[-1]["best_round"] - 1]] if history[-1]["best_round"] else []
    best = federation.best_round([*earlier_records, full_record])
    completed = {**full_record, "warnings": describe_round_warnings(full_record, history), "best_round": best}
    return RoundRecordWithOutputs(completed, outputs)


def write_personal_models(
    federation: Federation, checkpoint: Checkpoint, engine: Engine, directory: RunDirectory, progress: Progress
) -> None:
    """Writes personal models to `models/ID.safetensors`; of a source, those of evaluated clients.

    With `on_error="skip"` a client whose model cannot be made causes a warning, since the records are complete by now.
    """
    ids = federation.exported_clients(checkpoint.round)
    remove_other_models(directory.path / "models", ids)
    blocks = federation.build_task_blocks("export", ids, checkpoint.round, checkpoint, engine.max_block_bytes)
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
            owner = federation.clients.get(client)
            write_model_with_signature(directory.model_path(client), result.weights, result.description, owner)
