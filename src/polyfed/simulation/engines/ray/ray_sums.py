"""Adds up the replies of Ray's workers where they ran, so that one sum per node travels, and no single reply.

Sums are in 64-bit fixed point, as those of regions (`polyfed.simulation.rounds.replies.regional_sums`), so that it does
not matter which worker or node added what.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from polyfed.core.algorithm import Algorithm, Message
from polyfed.core.errors import ClientError
from polyfed.core.messages.compressors import Compressor
from polyfed.core.messages.message_compression import decompress_message
from polyfed.core.state_dict import find_value_error
from polyfed.simulation.engines.base import PartialSum, SummedReply, TaskResult
from polyfed.simulation.monitoring.update_directions import UpdateSketch
from polyfed.simulation.monitoring.update_norms import MeasuredUpdate, measure_update
from polyfed.simulation.rounds.replies.secure_aggregation import SecureSum, encode_reply_in_fixed_point


@final
class WorkerSum:
    """Adds up the replies of one worker's clients.

    A reply waits until the driver has accepted it: the worker keeps at most as many as it has tasks at a time.

    Args:
        algorithm: the method.
        num_parties: the clients of a round.
        compression: of replies; None if they are not compressed.
    """

    def __init__(self, algorithm: Algorithm[Any, Any], num_parties: int, compression: Compressor | None) -> None:
        self._algorithm, self._num_parties, self._compression = algorithm, num_parties, compression
        self._waiting: dict[str, Message] = {}
        self._sum = SecureSum(algorithm)  # type: ignore[arg-type]  # a method without a mean has no regions

    def keep_reply_for_sum(self, result: TaskResult) -> tuple[TaskResult, dict[str, Any]]:
        """Keeps a reply in fixed point; returns the result with its layout and scalars, and facts on it.

        A reply that no sum can hold becomes a failure.
        """
        task, reply = result.task, result.reply
        if result.failure is not None or reply is None or task.phase != "local":
            return result, {}
        try:
            decoded = reply if self._compression is None else decompress_message(reply, task.message, self._compression)
            if error_text := find_value_error(decoded.tensors, self._algorithm._largest):
                raise ValueError(error_text)
            part = encode_reply_in_fixed_point(decoded, self._algorithm, self._num_parties, task.message)
        except ValueError as error:
            failure = ClientError(task.round, task.client, "reply", str(error))
            return TaskResult(task, failure=failure, seconds=result.seconds), {}
        except Exception:  # no reply that the method makes; the driver refuses it, and says why
            return result, {}
        measured = measure_update(decoded, task.message, self._algorithm._differences)
        self._waiting[task.client] = part
        layout = Message({"sum": {"layout": part.tensors["sum"]["layout"]}}, decoded.scalars)
        sketch = None if measured.sketch is None else measured.sketch.numbers
        forms = [] if measured.sketch is None else [list(form) for form in measured.sketch.forms]
        facts = {"nbytes": reply.nbytes, "norm": measured.norm, "sketch": sketch, "forms": forms}
        return replace(result, reply=layout), facts

    def add_accepted_replies(self, accepted_by_client: Mapping[str, bool]) -> None:
        """Adds the replies that the driver has accepted, and discards those that it has refused."""
        for client, is_accepted in accepted_by_client.items():
            part = self._waiting.pop(client)
            if is_accepted:
                self._sum.add(client, part)

    def take_sum(self) -> Message:
        """Returns the sum of the accepted replies, and begins a new one."""
        total, self._sum = self._sum, SecureSum(self._algorithm)  # type: ignore[arg-type]  # as above
        return total.to_message()


def read_summed_reply(facts: Mapping[str, Any], leave_out: Callable[[], None]) -> SummedReply | None:
    """Returns the facts that a worker sent about a reply that it keeps for its sum; None if it keeps none."""
    if not facts:
        return None
    forms = tuple(tuple(form) for form in facts["forms"])
    sketch = None if facts["sketch"] is None else UpdateSketch(forms, facts["sketch"])
    return SummedReply(facts["nbytes"], MeasuredUpdate(facts["norm"], sketch), leave_out)


def collect_node_sums(
    sums: Sequence[tuple[Any, str, Sequence[str]]], algorithm: Algorithm[Any, Any]
) -> list[PartialSum]:
    """Returns one sum for each node: the workers' sums of a node are added there, and one travels.

    Args:
        sums: for each worker the reference to its sum, its node's id, and the clients in the sum.
        algorithm: the method.

    Raises:
        RayError: a worker or its node is lost, and its sum with it.
    """
    if not sums:
        return []
    references_by_node, clients_by_node = defaultdict[str, list[Any]](list), defaultdict[str, list[str]](list)
    for reference, node, clients in sums:
        references_by_node[node].append(reference)
        clients_by_node[node] += clients
    add_up, totals = ray.remote(_add_up), {}
    for node, references in references_by_node.items():
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": place}
        totals[node] = add_up.options(**options).remote(algorithm, clients_by_node[node], *references)
    return [
        PartialSum(tuple(sorted(clients_by_node[node])), _from_arrays(arrays))
        for node, arrays in zip(totals, ray.get(list(totals.values())), strict=True)
    ]


def _add_up(algorithm: Algorithm[Any, Any], clients: Sequence[str], *sums: Mapping[str, Any]) -> dict[str, Any]:
    """Adds up the sums of a node's workers, on this node."""
    total = SecureSum(algorithm)  # type: ignore[arg-type]  # a method without a mean has no regions
    for arrays in sums:
        total.add(clients[0], _from_arrays(arrays))
    return as_arrays(total.to_message())


def _from_arrays(arrays: Mapping[str, Any]) -> Message:
    return Message({"sum": {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}})


def as_arrays(message: Message) -> dict[str, Any]:
    """Returns the tensors of a sum as NumPy arrays, which Ray keeps in its store without a copy."""
    return {name: tensor.numpy() for name, tensor in message.tensors["sum"].items()}
