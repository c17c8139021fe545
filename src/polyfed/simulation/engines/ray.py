"""Ray: clients on the workers (actors) of a cluster, or of a Ray that is started on this machine.

Everything goes into Ray's object store once: the clients when the engine starts, one copy per node, from which workers read
their data in place (a method that wrote into a client's examples would be killed for it); a tensor that several clients
receive, once per call of `run`. Private states and replies travel as safetensors bytes, as they do in the pool.

Networks and methods travel by Ray's cloudpickle, so that lambdas and classes of a notebook will do; a module of yours must
be importable on every node. That is pickle between processes of one user's cluster: whoever may write to a Ray cluster may
run code on it in any case. Nothing from elsewhere is unpickled here.

A worker that dies, or is lost with its node, is reported; its task is tried once more and another worker is started.
This is the only file that imports ray, and it is imported when the engine is chosen.
"""

import io
import logging
import os
import re
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, final

import ray
import torch
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayError, RayTaskError
from torch import Tensor

from polyfed.core.algorithm import Algorithm, Client, Message
from polyfed.core.errors import ClientError, RoundError, UserError
from polyfed.core.evaluation.metrics import Metric
from polyfed.core.io.trusted_code import inherit_trust, trusted_names
from polyfed.core.machine.threads import num_usable_cores
from polyfed.core.messages.compressors import Compressor
from polyfed.core.serialization import deserialize_state, serialize_state
from polyfed.simulation.engines.base import ClientTask, Engine, TaskResult, sort_longest_first
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.engines.object_store import (
    FlatTensor,
    SharedTensors,
    StoredClient,
    store_clients,
    unflatten_tensor,
)
from polyfed.simulation.engines.result_codec import pack_result, unpack_result

_ATTEMPTS = 2
_STARTS = 3  # workers that may die in a row before they can work, each
_ANSWER_SECONDS = 10.0  # for a cluster to take a connection
_RESOURCES = {"CPU": "cores", "GPU": "GPUs"}
_START_SECONDS = 180.0  # for the first worker, and for the next after the last was lost; nodes may have to boot


_WorkerOptions = tuple[tuple[Metric, ...], Compressor | None]  # what of the settings the workers need
_WorkerPayload = tuple[
    Algorithm[Any, Any], list[StoredClient], str, list[tuple[type, str]], _WorkerOptions, tuple[str, ...]
]


@dataclass
class _RayWorker:
    """An actor; `ready`, the answer that we wait for before it gets work, None once it has come; how incidents call it; its
    tasks, each with the reference of its result and the number of the attempt: it works on the first."""

    actor: Any
    ready: Any
    name: str = "worker process"
    tasks: deque[tuple[Any, ClientTask, int]] = field(default_factory=deque)


@final
class RayEngine(Engine):
    """`workers` actors with a core each, which take the longest clients first.

    Args:
        algorithm, clients: put into the object store when the engine starts.
        workers: number of actors; "auto" is as many as the cluster has cores (and shares of GPUs), at most one per client.
        address: "local", "auto" or HOST:PORT, see `Settings`. A Ray that this process is already connected to is used, and
            left running.
        gpus_per_worker: GPUs of each actor; a fraction shares one. 0 computes on CPUs.
        metrics: what is computed at evaluation; none is the task's own.
        compression: of replies; None leaves them as they are.

    Raises:
        UserError: no cluster at the address, no GPU on this machine, or clients that cannot be sent.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        clients: Sequence[Client],
        workers: int | str = "auto",
        address: str = "local",
        gpus_per_worker: float = 0.0,
        metrics: Sequence[Metric] = (),
        compression: Compressor | None = None,
    ) -> None:
        self._clients = {client.id: client for client in clients}
        self._workers: list[_RayWorker] = []
        self._incidents: dict[str, list[str]] = {}  # client -> deaths of workers that are not reported yet
        self._call, self._failed_starts, self._gpus = 0, 0, gpus_per_worker
        self._owns_ray = _connect(address, workers)
        try:
            count = min(_count_slots(gpus_per_worker), len(clients)) if workers == "auto" else int(workers)
            if address == "local" and ray.cluster_resources().get("GPU", 0) < gpus_per_worker:
                raise UserError(f"gpus_per_worker={gpus_per_worker}, but Ray finds no such GPU on this machine; use 0")
            options = {"num_cpus": 1, "num_gpus": gpus_per_worker, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
            self._actor_class = ray.remote(_Actor).options(**options)
            self._payload = _put_payload(
                algorithm, clients, "cuda" if gpus_per_worker else "cpu", (tuple(metrics), compression)
            )
            self._workers += [self._start_worker() for _ in range(count)]
        except BaseException:
            self.close()
            raise

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, on their nodes, once all have started."""
        return [pid for pid, _ in ray.get([worker.actor.where.remote() for worker in self._workers])]

    def _start_worker(self) -> _RayWorker:
        actor = self._actor_class.remote()
        return _RayWorker(actor, actor.start.remote(self._payload))

    def run(self, tasks: Sequence[ClientTask]) -> Iterator[TaskResult]:
        """Yields results as workers finish. A task whose worker died twice is a failure.

        Raises:
            UserError: a worker cannot read the clients: a module of theirs is missing on its node.
            RoundError: no worker starts.
        """
        for position, worker in enumerate(self._workers):
            if worker.tasks:  # an earlier call was abandoned
                self._restart_worker(position)
        self._call += 1
        waiting = deque((task, 1) for task in sort_longest_first(tasks, self._clients))
        shared = SharedTensors(tasks, ray.put)
        while waiting or any(worker.tasks for worker in self._workers):
            self._send_tasks(waiting, shared)
            position = self._wait_for_worker()
            worker = self._workers[position]
            if worker.ready is not None:
                self._check_started(position)
                continue
            reference, task, _ = worker.tasks[0]
            try:
                data = ray.get(reference)
            except RayTaskError as error:  # outside the client's code, which the worker reports by itself
                worker.tasks.popleft()
                reason = f"its worker failed: {type(error.cause).__name__}: {error.cause}"
                failure = ClientError(task.round, task.client, task.phase, reason, str(error))
                yield TaskResult(task, failure=failure, incidents=self._take_incidents(task))
            except RayError as error:
                yield from self._handle_dead_worker(position, waiting, _cause_of_death(error))
            else:
                worker.tasks.popleft()
                self._send_tasks(waiting, shared)  # before anything else, so that it does not wait for us
                yield replace(unpack_result(data, task), incidents=self._take_incidents(task))

    def _send_tasks(self, waiting: deque[tuple[ClientTask, int]], shared: SharedTensors) -> None:
        """A task for every worker that has none; one more ahead, as long as enough are left to go round."""
        for depth, reserve in ((1, 0), (2, len(self._workers))):
            for worker in self._workers:
                if worker.ready is None and len(worker.tasks) < depth and len(waiting) > reserve:
                    task, attempt = waiting.popleft()
                    encoded_task = serialize_state(_encode_task(task), shared.names)
                    reference = worker.actor.run.remote(self._call, shared.references_for(task), encoded_task)
                    worker.tasks.append((reference, task, attempt))

    def _wait_for_worker(self) -> int:
        """Waits for a worker that has started or finished its task, and returns its position."""
        busy = any(worker.tasks for worker in self._workers)
        expected = {(w.tasks[0][0] if w.tasks else w.ready): i for i, w in enumerate(self._workers)}
        expected.pop(None, None)  # those without work
        ready_references, _ = ray.wait(list(expected), num_returns=1, timeout=None if busy else _START_SECONDS)
        if not ready_references:
            raise RoundError(
                f"no worker of Ray could start in {_START_SECONDS:.0f} s; each needs a free core and {self._gpus} GPUs, of "
                f"the cluster's {_describe_resources()}"
            )
        return expected[ready_references[0]]

    def _check_started(self, position: int) -> None:
        """A worker that has started, or has not: then another takes its place."""
        worker = self._workers[position]
        try:
            pid, node = ray.get(worker.ready)
        except RayTaskError as error:
            _raise_unreadable(error)
        except RayError as error:
            self._failed_starts += 1
            if self._failed_starts >= _STARTS * len(self._workers):
                raise RoundError(
                    f"workers of Ray die before they can work, last by {_cause_of_death(error)}"
                ) from error
            self._restart_worker(position)
        else:
            self._failed_starts, worker.ready, worker.name = 0, None, f"worker process {pid} on node {node}"

    def _handle_dead_worker(
        self, position: int, waiting: deque[tuple[ClientTask, int]], cause: str
    ) -> Iterator[TaskResult]:
        """A new worker in the place of one that died. The task it worked on waits again, or fails after the last
        attempt; those that it had not begun just wait again."""
        dead_worker = self._restart_worker(position)
        _, task, attempt = dead_worker.tasks.popleft()
        incident = f"{dead_worker.name} died ({cause}), phase {task.phase!r}, attempt {attempt} of {_ATTEMPTS}"
        self._incidents.setdefault(task.client, []).append(incident)
        waiting.extendleft((again, number) for _, again, number in reversed(dead_worker.tasks))
        if attempt < _ATTEMPTS:
            waiting.appendleft((task, attempt + 1))
        else:
            reason = f"its worker process died {_ATTEMPTS} times, last by {cause} (which may be a lack of memory)"
            failure = ClientError(task.round, task.client, task.phase, reason)
            yield TaskResult(task, failure=failure, incidents=self._take_incidents(task))

    def _restart_worker(self, position: int) -> _RayWorker:
        """Puts a new worker in the place of another, which is killed if it still lives, and returns that."""
        old_worker = self._workers[position]
        ray.kill(old_worker.actor)
        self._workers[position] = self._start_worker()
        return old_worker

    def _take_incidents(self, task: ClientTask) -> tuple[str, ...]:
        return tuple(self._incidents.pop(task.client, ()))

    def close(self) -> None:
        """Kills the actors, and ends the connection to Ray if it is ours: a Ray that was started for it ends too."""
        if ray.is_initialized():
            for worker in self._workers:
                ray.kill(worker.actor)
            if self._owns_ray:
                ray.shutdown()
                _log_worker_deaths(True)
        self._workers.clear()
        self._payload = None


class _Actor:
    """A worker: clients that it has been asked for, ready to run, and the shared tensors of this call of `run`."""

    def start(self, payload: _WorkerPayload) -> tuple[int, str]:
        """Takes algorithm and clients; returns where it is."""
        torch.set_num_threads(1)
        self._algorithm, clients, device, classes, self._options, allowed = payload
        inherit_trust(allowed)
        for user_class, name in classes:
            user_class.__qualname__ = name
        self._device = torch.device(device)
        self._stored_clients = {client.id: client for client in clients}
        self._engines: dict[str, InProcessEngine] = {}
        self._tensors: dict[Any, Tensor] = {}
        self._call, self._loaded_references, self._shared_tensors = 0, set[Any](), dict[str, Tensor]()
        return self.where()

    def where(self) -> tuple[int, str]:
        """Process id and address of the node."""
        return os.getpid(), ray.util.get_node_ip_address()

    def run(self, call: int, references: list[Any], data: bytes) -> bytes:
        """Carries out a task."""
        if call != self._call:
            self._call = call
            self._loaded_references.clear()
            self._shared_tensors.clear()
        if missing := [reference for reference in references if reference not in self._loaded_references]:
            self._loaded_references.update(missing)
            for group in ray.get(missing):
                # A copy of its own: a network may be filled by reference, and what is in the store cannot be written to.
                self._shared_tensors |= {name: unflatten_tensor(stored, copy=True) for name, stored in group.items()}
        body = deserialize_state(data, self._shared_tensors)
        phase, number, client, seed, run_seed = body["task"]
        task = ClientTask(phase, number, client, Message(body["down"], body["scalars"]), body["own"], seed, run_seed)
        return pack_result(next(iter(self._engine_for(client).run([task]))))

    def _engine_for(self, client: str) -> InProcessEngine:
        if client not in self._engines:
            client_data = self._stored_clients[client].restore(self._load_tensor)
            self._engines[client] = InProcessEngine(self._algorithm, [client_data], self._device, *self._options)
        return self._engines[client]

    def _load_tensor(self, reference: Any) -> Tensor:
        """A tensor on the worker's device; one that several clients share is made once."""
        key = id(reference) if isinstance(reference, FlatTensor) else reference
        if key not in self._tensors:
            stored = reference if isinstance(reference, FlatTensor) else ray.get(reference)
            self._tensors[key] = unflatten_tensor(stored).to(self._device)
        return self._tensors[key]


def _encode_task(task: ClientTask) -> dict[str, Any]:
    return {
        "task": [task.phase, task.round, task.client, task.seed, task.run_seed],
        "down": task.message.tensors,
        "scalars": dict(task.message.scalars),
        "own": task.client_state,
    }


def _put_payload(
    algorithm: Algorithm[Any, Any], clients: Sequence[Client], device: str, options: _WorkerOptions
) -> Any:
    """Algorithm, clients and settings as one object of the store; large tensors are objects of their own, fetched when
    needed."""
    stored_clients = store_clients(clients, ray.put)
    try:
        pickler = _ClassNamePickler()
        pickler.dump((algorithm, stored_clients, options))
        return ray.put((algorithm, stored_clients, device, pickler.classes, options, trusted_names()))
    except Exception as error:  # cloudpickle raises what the object's own methods raise
        sentence = str(error).strip().splitlines()[0]
        raise UserError(
            f"a network, transform, metric or method cannot be sent to Ray's workers: {type(error).__name__}: {sentence}; "
            "keep open files, locks and generators out of what it refers to, or use engine='pool'"
        ) from error


class _ClassNamePickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
    """Finds the classes that travel by value under a name that cloudpickle does not keep, as `build.<locals>.Net`. A
    network's architecture, from which its first weights derive, is told by that name too."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), buffer_callback=lambda buffer: None)
        self.classes: list[tuple[type, str]] = []

    def reducer_override(self, obj: Any) -> Any:
        """What cloudpickle would write."""
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented and isinstance(obj, type) and obj.__qualname__ != obj.__name__:
            self.classes.append((obj, obj.__qualname__))
        return reduced


def _raise_unreadable(error: RayTaskError) -> NoReturn:
    sentence = f"{type(error.cause).__name__}: {error.cause}".strip().splitlines()[
        -1
    ]  # Ray may have put a traceback before it
    raise UserError(
        f"a worker of Ray cannot read the clients: {sentence}; polyfed and the modules that define networks, transforms and "
        "method must be importable on every node"
    ) from error


def _connect(address: str, workers: int | str) -> bool:
    """Starts or joins Ray, silently; returns whether that was needed."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    # Ray takes over SIGTERM, whose meaning is the caller's.
    in_main_thread = threading.current_thread() is threading.main_thread()
    sigterm_handler = signal.getsignal(signal.SIGTERM) if in_main_thread else None
    try:
        if address == "local":
            cores = max(num_usable_cores(), 0 if workers == "auto" else int(workers))
            ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
        else:
            endpoint = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
            if ":" in endpoint and "://" not in endpoint:  # Ray itself would try for minutes
                host, _, port = endpoint.rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
            ray.init(address=address, **quiet)
    except (OSError, OverflowError, ValueError, RuntimeError, RayError) as error:  # a ConnectionError is an OSError
        sentence = " ".join(str(error).split())
        raise UserError(
            f"ray_address={address!r}: no Ray answers there ({sentence}); start one with `ray start --head`, or use 'local'"
            "; if the cluster wants a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here too"
        ) from error
    finally:
        if sigterm_handler is not None:
            signal.signal(signal.SIGTERM, sigterm_handler)
    _log_worker_deaths(False)
    return True


def _log_worker_deaths(enabled: bool) -> None:
    """Whether Ray prints a paragraph to standard output for each worker that dies: there it would be among the results, and
    we report deaths ourselves. Ray has no public switch for it."""
    if hasattr(ray._private.worker, "_worker_logs_enabled"):
        ray._private.worker._worker_logs_enabled = enabled


def _count_slots(gpus_per_worker: float) -> int:
    """Workers that fit the cluster as it is, at least one."""
    total = ray.cluster_resources()
    slots = int(total.get("CPU", 0))
    if gpus_per_worker:
        # Several workers share a GPU, but none has parts of two.
        gpu_share, gpus = gpus_per_worker, int(total.get("GPU", 0))
        slots = min(slots, gpus * int(1 / gpu_share + 1e-9) if gpu_share <= 1 else int(gpus / gpu_share))
    return max(slots, 1)


def _describe_resources() -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{total.get(kind, 0):g} {name} ({free.get(kind, 0):g} free)" for kind, name in _RESOURCES.items())


def _cause_of_death(error: RayError) -> str:
    """What ended a worker, in a few words; Ray tells it in a paragraph of possibilities."""
    text = str(error)
    connection_lost = isinstance(
        error, ObjectLostError | ActorUnavailableError
    )  # the latter comes seconds before Ray knows of a node
    if connection_lost or "node has died" in text or "node was terminated" in text:
        return "the loss of its node or connection"
    if exit_code := re.search(r"exit code (\d+)", text):
        return f"exit status {exit_code[1]}"
    return "a crash or kill"
