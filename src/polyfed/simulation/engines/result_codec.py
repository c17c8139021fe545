"""Encodes task results as safetensors bytes for engines with worker processes, so that no reply is ever unpickled."""

import json

from polyfed.core.algorithm import Message
from polyfed.core.errors import ClientError
from polyfed.core.serialization import deserialize_state, serialize_state
from polyfed.simulation.engines.base import ClientTask, TaskResult


def encode_result_or_failure(result: TaskResult) -> bytes:
    """Encodes a task result as bytes; a result that cannot be encoded is replaced by a failed one, whose error gives
    the reason.
    """
    try:
        return _pack(result)
    except (TypeError, ValueError) as error:
        task = result.task
        reason = f"{type(error).__name__}: {error}"
        return _pack(TaskResult(task, failure=ClientError(task.round, task.client, task.phase, reason)))


def _pack(result: TaskResult) -> bytes:
    failure = result.failure
    return serialize_state(
        {
            "reply": None
            if result.reply is None
            else {"tensors": result.reply.tensors, "scalars": result.reply.scalars},
            "own": result.client_state,
            "metrics": result.metrics,
            "weights": result.weights,
            "predictions": result.predictions,
            "description": None if result.description is None else json.dumps(result.description),
            "seconds": result.seconds,
            "failure": None if failure is None else [failure.reason, failure.trace],
        }
    )


def decode_result(data: bytes, task: ClientTask) -> TaskResult:
    """Decodes the result of `task` from the bytes that `encode_result_or_failure` returned."""
    body = deserialize_state(data)
    reply = None if body["reply"] is None else Message(body["reply"]["tensors"], body["reply"]["scalars"])
    failure = None
    if body["failure"] is not None:
        reason, trace = body["failure"]
        failure = ClientError(task.round, task.client, task.phase, reason, trace)
    description = None if body["description"] is None else json.loads(body["description"])
    return TaskResult(
        task, reply, body["own"], body["metrics"], body["weights"], description, body["seconds"], failure,
        predictions=body["predictions"],
    )  # fmt: skip
