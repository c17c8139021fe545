"""Encodes task results as safetensors bytes for engines with worker processes, so that no reply is ever unpickled."""

import json
from collections.abc import Mapping
from typing import Any

from polyfed.core.algorithm import Message
from polyfed.core.errors import ClientError, describe_exception
from polyfed.core.serialization import deserialize_state, serialize_state
from polyfed.simulation.engines.base import ClientTask, TaskResult


def encode_result_or_failure(result: TaskResult, facts: Mapping[str, Any] | None = None) -> bytes:
    """Encodes a task result as bytes, or a failed result with the reason why it cannot.

    `facts` are what else an engine's worker has to say of it.
    """
    try:
        return _pack_result(result, facts)
    except (TypeError, ValueError) as error:
        task = result.task
        reason = describe_exception(error)
        return _pack_result(TaskResult(task, failure=ClientError(task.round, task.client, task.phase, reason)))


def _pack_result(result: TaskResult, facts: Mapping[str, Any] | None = None) -> bytes:
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
            "facts": dict(facts or {}),
            "failure": None if failure is None else [failure.reason, failure.trace],
        }
    )


def decode_result_and_facts(data: bytes, task: ClientTask) -> tuple[TaskResult, Mapping[str, Any]]:
    """Decodes the result of `task` and the facts from the bytes that `encode_result_or_failure` returned."""
    body = deserialize_state(data)
    reply = None if body["reply"] is None else Message(body["reply"]["tensors"], body["reply"]["scalars"])
    failure = None
    if body["failure"] is not None:
        reason, trace = body["failure"]
        failure = ClientError(task.round, task.client, task.phase, reason, trace)
    description = None if body["description"] is None else json.loads(body["description"])
    result = TaskResult(
        task, reply, body["own"], body["metrics"], body["weights"], description, body["seconds"], failure,
        predictions=body["predictions"],
    )  # fmt: skip
    return result, body["facts"]
