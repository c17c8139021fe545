"""Validates a site's reply at the server, step by step, so that large parts are read only after smaller ones have
proved valid.

The order is: limits of size (`polyfed.deploy.protocol.wire`), the header, the numbers, the names, shapes and types of the
tensors, and last the tensors. `Federation.flaw` checks for every engine that their values are finite.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from polyfed.core.algorithm import Message
from polyfed.core.errors import ClientError, UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.metric_names import split_metric_column
from polyfed.core.evaluation.metrics import METRICS, is_built_in_metric, metric_by_name
from polyfed.core.io.values.number_checks import is_number
from polyfed.core.messages.compressors import parse_compressor
from polyfed.core.messages.lora import reply_at_server_rank, reply_spec_at_server_rank
from polyfed.core.messages.message_compression import decompressed_specs, select_uncompressed_tensors
from polyfed.core.state_dict import spec_mismatch
from polyfed.deploy.protocol.piggyback import EVALUATION_KEY
from polyfed.deploy.protocol.wire import PackedEnvelope, TensorSpec, parse_head, unpack_small_tensors
from polyfed.deploy.server.server import DeploymentServer
from polyfed.simulation.engines.base import ClientTask, TaskResult

_MAX_SENTENCE_LENGTH = 300  # characters of a site's sentence
_MAX_ABSOLUTE_VALUE = 1e12  # of a site's numbers
_ROUNDING = 1e-6  # by which a share may seem larger than 1
_SMALL_TENSOR_BYTES = 2**13  # largest tensor that is read to check the shapes of all
_MAX_METRIC_PREFIXES = 16  # such as "val_"; each is a column for all sites
_METRIC_PREFIX = re.compile(r"([a-z]{1,20}_){0,2}")


def sanitize_line(text: object) -> str:
    """Shortens a site's text to one line that cannot forge lines in the log.

    >>> sanitize_line("a\\nb"), len(sanitize_line("x" * 10_000))
    ('a b', 300)
    """
    printable_text = "".join(c if c.isprintable() else " " for c in str(text)[: 4 * _MAX_SENTENCE_LENGTH])
    return " ".join(printable_text.split())[:_MAX_SENTENCE_LENGTH]


def parse_task_result(
    task: ClientTask,
    packed: PackedEnvelope,
    server: DeploymentServer,
    introduction: Mapping[str, Any],
    server_state: Any,
    *,
    with_evaluation: bool = False,
) -> TaskResult:
    """Reads a task's result from a site's reply: tensors and scalars for training, metrics for evaluation.

    Args:
        task: the task.
        packed: the site's answer.
        server: the deployment, whose settings limit the reply.
        introduction: header of the site's introduction when the run began.
        server_state: the server state from which the task was sent.
        with_evaluation: whether the task's envelope brought an evaluation too.

    Raises:
        UserError: the reply is not valid.
    """
    head = validate_answer_head(task, parse_head(packed.head), server, with_evaluation=with_evaluation)
    metrics, seconds = _parse_metrics(head, server), head.get("seconds", 0.0)
    if task.phase != "local":
        return TaskResult(task, metrics=metrics, weights=None)
    scalars = _parse_scalars(packed, server, introduction)
    if spec_error := reply_spec_error(packed, task.message, server, server_state, scalars):
        raise UserError(spec_error)
    state_stub = server.describe_stored_state(task)  # in place of the private state, which stays at the site
    reply = Message(packed.unpack_body().tensors, scalars)
    return TaskResult(task, reply, state_stub, seconds=max(0.0, float(seconds)) if _is_finite_number(seconds) else 0.0)


def parse_evaluation_result_or_failure(
    task: ClientTask, answer: PackedEnvelope | str, server: DeploymentServer, *, piggybacked: bool
) -> TaskResult:
    """Reads an evaluation from a reply; an invalid one gives a failure, and harms no training.

    Args:
        task: the evaluation.
        answer: the site's answer, or a text that says why there is none.
        server: the deployment, whose settings limit the reply.
        piggybacked: whether the evaluation travelled with the training of the next round, and its result in that header.
    """
    try:
        if isinstance(answer, str):
            raise UserError(answer)
        head = parse_head(answer.head)
        if piggybacked and not isinstance(head.get(EVALUATION_KEY), dict):
            _raise_if_refused(head)
            raise UserError(f"sends no result of the evaluation of round {task.round}, which was asked for too")
        evaluation_head = validate_answer_head(task, head[EVALUATION_KEY] if piggybacked else head, server)
        return TaskResult(task, metrics=_parse_metrics(evaluation_head, server), weights=None)
    except UserError as error:
        return TaskResult(task, failure=ClientError(task.round, task.client, task.phase, sanitize_line(error)))


def validate_answer_head(
    task: ClientTask, head: Mapping[str, Any], server: DeploymentServer, *, with_evaluation: bool = False
) -> Mapping[str, Any]:
    """Returns a reply's header; raises an error for another task, a refusal or a failure.

    Args:
        task: the task.
        head: header of the answer.
        server: the deployment.
        with_evaluation: whether the task's envelope brought an evaluation too.

    Raises:
        UserError: the reply answers something else, is a refusal, reports a failure, or has an evaluation that was not
            asked for.
    """
    _raise_if_refused(head)
    expected_fields = {"client": task.client, "run": server.run, "round": task.round, "phase": task.phase}
    if wrong_names := [name for name, value in expected_fields.items() if head.get(name) != value]:
        name = wrong_names[0]
        raise UserError(f"answers for {name} {sanitize_line(repr(head.get(name)))}, expected {expected_fields[name]!r}")
    if EVALUATION_KEY in head and not with_evaluation:
        raise UserError("sends an evaluation that it was not asked for")
    if head.get("failure") is not None:
        raise UserError(sanitize_line(head["failure"]))
    return head


def _raise_if_refused(head: Mapping[str, Any]) -> None:
    if head.get("refused"):
        raise UserError(f"refuses: {sanitize_line(head['refused'])}")


def _parse_metrics(head: Mapping[str, Any], server: DeploymentServer) -> dict[str, Any]:
    metrics = head.get("metrics", {})
    if not isinstance(metrics, dict) or not all(
        _is_metric_name(n, server) and (v is None or _is_possible_score(n, v, server)) for n, v in metrics.items()
    ):
        raise UserError(f"its metrics are not scores or losses: {sanitize_line(repr(metrics))}")
    columns = (split_metric_column(name, _metrics_by_name(server)) for name in metrics)
    if (number := len({column[0] for column in columns if column})) > _MAX_METRIC_PREFIXES:
        raise UserError(f"sends its metrics with {number} prefixes; an evaluation has at most {_MAX_METRIC_PREFIXES}")
    return metrics


def _parse_scalars(packed: PackedEnvelope, server: DeploymentServer, introduction: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scalars that the method uses; the number of examples must be as at the start."""
    allowed = server.algorithm.scalars_needed | {"train_loss", "num_examples"}
    scalars = {n: v for n, v in packed.scalars.items() if n in allowed}
    if wrong_names := [n for n, v in scalars.items() if not is_number(v) or abs(v) > _MAX_ABSOLUTE_VALUE]:
        value = scalars[wrong_names[0]]
        description = f"a list of {len(value)}" if isinstance(value, list) else sanitize_line(repr(value))
        raise UserError(
            f"scalar {wrong_names[0]!r} is {description}, which is not a number up to {_MAX_ABSOLUTE_VALUE:g}"
        )
    num_examples = introduction.get("num_examples")
    if num_examples is None:
        scalars.pop("num_examples", None)
    elif scalars.get("num_examples", num_examples) != num_examples:
        raise UserError(
            f"reports num_examples {scalars['num_examples']}, but reported {num_examples} when the run began"
        )
    return scalars


def reply_spec_error(
    packed: PackedEnvelope, message: Message, server: DeploymentServer, server_state: Any, scalars: Mapping[str, Any]
) -> str | None:
    """Returns how a reply's groups, names, shapes and types differ from the method's; or None.

    Args:
        packed: the site's answer.
        message: the server's message that it answers.
        server: the deployment.
        server_state: the server state from which the message was sent.
        scalars: the reply's checked scalars.

    Returns:
        A sentence; None if they do not differ, or if the method can compare only the tensors' values.
    """
    specs: Mapping[str, Mapping[str, TensorSpec]] = packed.tensor_specs_by_group()
    if (reply_compression := parse_compressor(server.settings.compress)) is not None:
        try:
            specs = decompressed_specs(specs, message, reply_compression)
        except ValueError as flaw:
            return sanitize_line(flaw)
    meta: dict[str, Mapping[str, torch.Tensor]] = {
        group: {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in form.items()}
        for group, form in specs.items()
    }
    try:
        meta = dict(reply_at_server_rank(server.algorithm, Message(meta, scalars), message).tensors)
        try:
            reply_spec = server.algorithm.reply_spec(server_state, message, Message(meta, scalars))
        except RuntimeError:  # the method needs values, such as FedFomo's list of clients: small tensors are read
            small = {group: unpack_small_tensors(packed.groups[group], _SMALL_TENSOR_BYTES) for group in meta}
            small = (
                small
                if reply_compression is None
                else {group: select_uncompressed_tensors(tensors) for group, tensors in small.items()}
            )
            meta = {group: {**tensors, **small[group]} for group, tensors in meta.items()}
            reply_spec = server.algorithm.reply_spec(server_state, message, Message(meta, scalars))
    except UserError:
        raise
    except ValueError as flaw:
        return sanitize_line(flaw)
    except (
        RuntimeError
    ):  # the method needs values of large tensors, with which `Federation.flaw` checks the reply again
        return None
    except Exception as error:  # no site's reply may end the run of the others
        return f"the method cannot check the shapes of its reply ({type(error).__name__})"
    reply_spec = reply_spec_at_server_rank(server.algorithm, reply_spec)
    if specs.keys() != reply_spec.keys():
        return sanitize_line(f"the reply holds the groups {sorted(specs)[:9]}, expected {sorted(reply_spec)}")
    differences = ((group, spec_mismatch(meta[group], form)) for group, form in reply_spec.items())
    return next(
        (sanitize_line(f"group {group!r}: {difference}") for group, difference in differences if difference), None
    )


def _metrics_by_name(server: DeploymentServer) -> dict[str, Metric]:
    return {metric.name: metric for metric in (*METRICS.values(), *map(metric_by_name, server.settings.metrics))}


def _is_metric_name(name: str, server: DeploymentServer) -> bool:
    """Returns whether a site may report a metric under this name."""
    name_parts = split_metric_column(name, _metrics_by_name(server))
    return name_parts is not None and _METRIC_PREFIX.fullmatch(name_parts[0]) is not None


def _is_possible_score(name: str, value: Any, server: DeploymentServer) -> bool:
    """Returns whether a metric can have this value: a share in [0, 1], a built-in error from 0.

    A mean over sites would follow any other number of one site.
    """
    if not _is_finite_number(value):
        return False
    metrics = _metrics_by_name(server)
    parts = split_metric_column(name, metrics)
    metric = None if parts is None else metrics.get(parts[1])
    if metric is None:  # a loss
        return True
    if metric.is_from_zero_to_one:
        return bool(-_ROUNDING <= value <= 1 + _ROUNDING)
    return metric.higher_is_better or not is_built_in_metric(metric.name) or value >= 0


def _is_finite_number(value: Any) -> bool:
    # The comparison is false for NaN.
    return is_number(value) and abs(value) <= _MAX_ABSOLUTE_VALUE
