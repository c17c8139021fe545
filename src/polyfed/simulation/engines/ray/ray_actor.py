"""Runs the tasks of one worker of a Ray cluster."""

import os
from typing import Any

import ray
import torch
from torch import Tensor

from polyfed.core.algorithm import Message
from polyfed.core.io.trusted_code import add_trusted_names
from polyfed.core.serialization import deserialize_state
from polyfed.simulation.engines.base import ClientTask
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.engines.ray.object_store import FlatTensor, unflatten_tensor
from polyfed.simulation.engines.ray.ray_payload import WorkerPayload
from polyfed.simulation.engines.ray.ray_sums import WorkerSum, as_arrays
from polyfed.simulation.engines.result_codec import encode_result_or_failure
from polyfed.simulation.sources.source_clients import SourceClients


class RayActor:
    """Runs tasks on a node of the cluster; keeps its clients, and the tensors that tasks share."""

    def start(self, payload: WorkerPayload) -> tuple[int, str, str]:
        """Loads the method and the clients; returns the worker's process id, and the address and the id of its node."""
        torch.set_num_threads(1)
        self._algorithm, clients, device, classes, self._options, allowed, self._num_parties = payload
        self._sum = self._new_sum()
        add_trusted_names(allowed)
        for user_class, name in classes:
            user_class.__qualname__ = name
        self._device = torch.device(device)
        self._engines: dict[str, InProcessEngine] = {}
        self._source_engine = None
        if isinstance(clients, SourceClients):
            self._source_engine = InProcessEngine(self._algorithm, clients, self._device, *self._options)
        else:
            self._stored_clients = {client.id: client for client in clients}
        self._tensors: dict[Any, Tensor] = {}
        self._call, self._loaded_references, self._shared_tensors = 0, set[Any](), dict[str, Tensor]()
        return *self.where(), ray.get_runtime_context().get_node_id()

    def where(self) -> tuple[int, str]:
        """Returns the worker's process id and the address of its node."""
        return os.getpid(), ray.util.get_node_ip_address()

    def _new_sum(self) -> WorkerSum | None:
        number = self._num_parties
        return None if number is None else WorkerSum(self._algorithm, number, self._options[1])

    def take_sum(self, verdicts: dict[str, bool]) -> dict[str, Any]:
        """Returns the sum of the replies that count, as arrays, and begins a new one."""
        assert self._sum is not None
        self._sum.add_accepted_replies(verdicts)
        return as_arrays(self._sum.take_sum())

    def run(self, call: int, references: list[Any], data: bytes, verdicts: dict[str, bool]) -> bytes:
        """Runs one encoded task and returns its encoded result; `verdicts` says which replies held back here count."""
        if call != self._call:
            self._call = call
            self._loaded_references.clear()
            self._shared_tensors.clear()
            self._sum = self._new_sum()
        if self._sum is not None:
            self._sum.add_accepted_replies(verdicts)
        if missing := [reference for reference in references if reference not in self._loaded_references]:
            self._loaded_references.update(missing)
            for group in ray.get(missing):
                # Copied, since a network may be filled by reference, and the store is read-only.
                self._shared_tensors |= {name: unflatten_tensor(stored, copy=True) for name, stored in group.items()}
        body = deserialize_state(data, self._shared_tensors)
        phase, number, client, seed, run_seed = body["task"]
        task = ClientTask(phase, number, client, Message(body["down"], body["scalars"]), body["own"], seed, run_seed)
        result = next(iter(self._engine_for(client).run([task])))
        return encode_result_or_failure(*((result,) if self._sum is None else self._sum.keep_reply_for_sum(result)))

    def _engine_for(self, client: str) -> InProcessEngine:
        if self._source_engine is not None:
            return self._source_engine
        if client not in self._engines:
            client_data = self._stored_clients[client].restore(self._load_tensor)
            self._engines[client] = InProcessEngine(self._algorithm, [client_data], self._device, *self._options)
        return self._engines[client]

    def _load_tensor(self, reference: Any) -> Tensor:
        """Loads a stored tensor to the worker's device; a tensor that several clients share is loaded once."""
        key = id(reference) if isinstance(reference, FlatTensor) else reference
        if key not in self._tensors:
            stored = reference if isinstance(reference, FlatTensor) else ray.get(reference)
            self._tensors[key] = unflatten_tensor(stored).to(self._device)
        return self._tensors[key]
