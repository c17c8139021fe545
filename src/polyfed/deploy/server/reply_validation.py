"""What the reply of a site is worth: each part is checked before the next, larger one is read.

Limits of size come first (`polyfed.deploy.protocol.wire`), then the head, the numbers, names and shapes and types of tensors, and at
last the tensors. Whether these are finite is checked for every engine (`Federation.flaw`).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from polyfed.core.algorithm import Message
from polyfed.core.errors import ClientError, UserError
from polyfed.core.evaluation.evaluate import split_metric_column
from polyfed.core.evaluation.metrics import METRICS, metric_by_name
from polyfed.core.messages.compressors import parse_compressor
from polyfed.core.messages.lora import unpack_adapters, unpacked_reply_spec
from polyfed.core.messages.message_compression import decompressed_specs, uncompressed_tensors
from polyfed.core.state_dict import spec_mismatch
from polyfed.deploy.protocol.piggyback import EVALUATION_KEY
from polyfed.deploy.protocol.wire import PackedEnvelope, TensorSpec, parse_head, unpack_small_tensors
from polyfed.deploy.server.server import DeploymentServer
from polyfed.simulation.engines.base import ClientTask, TaskResult

_MAX_SENTENCE_LENGTH = 300  # characters of a site's sentence
_MAX_ABSOLUTE_VALUE = 1e12  # of its numbers
_SMALL_TENSOR_BYTES = 2**13  # bytes of a tensor that is read to tell whether the form of all is right
_METRIC_PREFIX = re.compile(r"([a-z]{1,20}_){0,2}")


def sanitize_line(text: object) -> str:
    """What a site has written, short enough for a log, and without line breaks that would forge one.

    >>> sanitize_line("a\\nb"), len(sanitize_line("x" * 10_000))
    ('a b', 300)
    """
    shown = "".join(c if c.isprintable() else " " for c in str(text)[: 4 * _MAX_SENTENCE_LENGTH])
    return " ".join(shown.split())[:_MAX_SENTENCE_LENGTH]


def parse_result(
    task: ClientTask,
    packed: PackedEnvelope,
    server: DeploymentServer,
    introduction: Mapping[str, Any],
    server_state: Any,
    *,
    with_evaluation: bool = False,
) -> TaskResult:
    """The result of a task.

    Args:
        task: what was asked.
        packed: what came.
        server: whose settings say what may come.
        introduction: what the site said of itself when the run began.
        server_state: the server's, from which the task was sent.
        with_evaluation: whether an evaluation rode on it.

    Raises:
        UserError: why the reply is not taken.
    """
    head = validate_head(task, parse_head(packed.head), server, with_evaluation=with_evaluation)
    metrics, seconds = _parse_metrics(head, server), head.get("seconds", 0.0)
    if task.phase != "local":
        return TaskResult(task, metrics=metrics, weights=None)
    scalars = _parse_scalars(packed, server, introduction)
    if spec_error := reply_spec_error(packed, task.message, server, server_state, scalars):
        raise UserError(spec_error)
    state_stub = {"round": task.round}  # in place of the private state, which stays there
    reply = Message(packed.unpack_body().tensors, scalars)
    return TaskResult(task, reply, state_stub, seconds=float(seconds) if _is_finite_number(seconds) else 0.0)


def parse_evaluation_result(
    task: ClientTask, answer: PackedEnvelope | str, server: DeploymentServer, *, piggybacked: bool
) -> TaskResult:
    """The result of an evaluation, which costs the site no more than itself.

    Args:
        task: what was asked.
        answer: what came, or why nothing did.
        server: whose settings say what may come.
        piggybacked: whether the evaluation rode on the training of the next round, so that it is in the head of that answer.
    """
    try:
        if isinstance(answer, str):
            raise UserError(answer)
        head = parse_head(answer.head)
        if piggybacked and not isinstance(head.get(EVALUATION_KEY), dict):
            _raise_if_refused(head)
            raise UserError(f"tells nothing of the evaluation of round {task.round}, which was asked for too")
        evaluation_head = validate_head(task, head[EVALUATION_KEY] if piggybacked else head, server)
        return TaskResult(task, metrics=_parse_metrics(evaluation_head, server), weights=None)
    except UserError as error:
        return TaskResult(task, failure=ClientError(task.round, task.client, task.phase, sanitize_line(error)))


def validate_head(
    task: ClientTask, head: Mapping[str, Any], server: DeploymentServer, *, with_evaluation: bool = False
) -> Mapping[str, Any]:
    """The head of the answer to a task.

    Raises:
        UserError: it is the answer to something else, a refusal, or tells of a failure, or of an evaluation although none
            was `with_evaluation`.
    """
    _raise_if_refused(head)
    expected_fields = {"client": task.client, "run": server.run, "round": task.round, "phase": task.phase}
    if wrong := [name for name, value in expected_fields.items() if head.get(name) != value]:
        raise UserError(
            f"answers for {wrong[0]} {sanitize_line(repr(head.get(wrong[0])))}, asked was {expected_fields[wrong[0]]!r}"
        )
    if EVALUATION_KEY in head and not with_evaluation:
        raise UserError("tells of an evaluation that it was not asked for")
    if head.get("failure") is not None:
        raise UserError(sanitize_line(head["failure"]))
    return head


def _raise_if_refused(head: Mapping[str, Any]) -> None:
    if head.get("refused"):
        raise UserError(f"refuses: {sanitize_line(head['refused'])}")


def _parse_metrics(head: Mapping[str, Any], server: DeploymentServer) -> dict[str, Any]:
    metrics = head.get("metrics", {})
    if not isinstance(metrics, dict) or not all(
        _is_metric_name(n, server) and (v is None or _is_finite_number(v)) for n, v in metrics.items()
    ):
        raise UserError(f"its metrics are no scores or losses: {sanitize_line(repr(metrics))}")
    return metrics


def _parse_scalars(packed: PackedEnvelope, server: DeploymentServer, introduction: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that are used. How many examples a site has is what it said at the beginning, or not known."""
    allowed = server.algorithm.scalars_needed | {"train_loss", "num_examples"}
    scalars = {n: v for n, v in packed.scalars.items() if n in allowed}
    if wrong := [
        n
        for n, v in scalars.items()
        if isinstance(v, bool) or not isinstance(v, int | float) or abs(v) > _MAX_ABSOLUTE_VALUE
    ]:
        value = scalars[wrong[0]]
        shown = f"a list of {len(value)}" if isinstance(value, list) else sanitize_line(repr(value))
        raise UserError(f"scalar {wrong[0]!r} is {shown}, which is no number in reach")
    num_examples = introduction.get("num_examples")
    if num_examples is None:
        scalars.pop("num_examples", None)
    elif scalars.get("num_examples", num_examples) != num_examples:
        raise UserError(f"tells num_examples {scalars['num_examples']}, and told {num_examples} when the run began")
    return scalars


def reply_spec_error(
    packed: PackedEnvelope, message: Message, server: DeploymentServer, server_state: Any, scalars: Mapping[str, Any]
) -> str | None:
    """How names, shapes and types of a reply differ from what the method takes; None if they do not, or if the method must
    see the tensors to tell."""
    specs: Mapping[str, Mapping[str, TensorSpec]] = packed.tensor_specs()
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
        meta = dict(unpack_adapters(server.algorithm, Message(meta, scalars), message).tensors)
        try:
            reply_spec = server.algorithm.reply_spec(server_state, message, Message(meta, scalars))
        except RuntimeError:  # it asks for values: small tensors are read, such as which clients FedFomo asks for
            small = {group: unpack_small_tensors(packed.groups[group], _SMALL_TENSOR_BYTES) for group in meta}
            small = (
                small
                if reply_compression is None
                else {group: uncompressed_tensors(tree) for group, tree in small.items()}
            )
            meta = {group: {**tree, **small[group]} for group, tree in meta.items()}
            reply_spec = server.algorithm.reply_spec(server_state, message, Message(meta, scalars))
    except UserError:
        raise
    except ValueError as flaw:
        return sanitize_line(flaw)
    except RuntimeError:  # a tensor without values was asked for one; `Federation.flaw` checks it again with them
        return None
    except Exception as error:  # nothing that a site sends may end the run of the others
        return f"the method cannot check its form ({type(error).__name__})"
    reply_spec = unpacked_reply_spec(server.algorithm, reply_spec)
    if specs.keys() != reply_spec.keys():
        return sanitize_line(f"the reply holds the groups {sorted(specs)[:9]}, expected {sorted(reply_spec)}")
    differences = ((group, spec_mismatch(meta[group], form)) for group, form in reply_spec.items())
    return next(
        (sanitize_line(f"group {group!r}: {difference}") for group, difference in differences if difference), None
    )


def _is_metric_name(name: str, server: DeploymentServer) -> bool:
    """Whether a site may send a number of this name."""
    name_parts = split_metric_column(name, [*METRICS.values(), *map(metric_by_name, server.settings.metrics)])
    return name_parts is not None and _METRIC_PREFIX.fullmatch(name_parts[0]) is not None


def _is_finite_number(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_ABSOLUTE_VALUE
    )  # nor NaN
