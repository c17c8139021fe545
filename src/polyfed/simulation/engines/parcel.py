"""Results as bytes, for the engines whose workers are other processes: safetensors, so that nobody unpickles a reply."""

import json

from polyfed.core.algorithm import Message
from polyfed.core.errors import ClientError
from polyfed.core.tree import decode, encode
from polyfed.simulation.engines.work import Result, Task


def pack_result(result: Result) -> bytes:
    """A result as bytes; one that cannot be written becomes a failure that says why."""
    try:
        return _pack(result)
    except (TypeError, ValueError) as error:
        task = result.task
        reason = f"{type(error).__name__}: {error}"
        return _pack(Result(task, failure=ClientError(task.round, task.client, task.phase, reason)))


def _pack(result: Result) -> bytes:
    failure = result.failure
    return encode(
        {
            "reply": None
            if result.reply is None
            else {"tensors": result.reply.tensors, "scalars": result.reply.scalars},
            "own": result.own,
            "metrics": result.metrics,
            "weights": result.weights,
            "predictions": result.predictions,
            "description": None if result.description is None else json.dumps(result.description),
            "seconds": result.seconds,
            "failure": None if failure is None else [failure.reason, failure.trace],
        }
    )


def unpack_result(data: bytes, task: Task) -> Result:
    """The result of `task` that `pack_result` wrote."""
    body = decode(data)
    reply = None if body["reply"] is None else Message(body["reply"]["tensors"], body["reply"]["scalars"])
    failure = None
    if body["failure"] is not None:
        reason, trace = body["failure"]
        failure = ClientError(task.round, task.client, task.phase, reason, trace)
    description = None if body["description"] is None else json.loads(body["description"])
    return Result(
        task, reply, body["own"], body["metrics"], body["weights"], description, body["seconds"], failure,
        predictions=body["predictions"],
    )  # fmt: skip
