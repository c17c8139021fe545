"""Runs clients on the workers (actors) of a Ray cluster, or of a Ray instance that is started on this machine.

Everything goes into Ray's object store once: the clients when the engine starts, one copy per node, from which workers
read their data in place (a method that wrote into a client's examples would be killed for it); a tensor that several
clients receive, once per call of `run`. Private states and replies travel as safetensors bytes, as in the pool.

Networks and methods travel by Ray's cloudpickle, so that lambdas and classes of a notebook work; a module of yours
must be importable on every node. That is pickle between processes of one user's cluster: whoever may write to a Ray
cluster may run code on it in any case. Nothing from elsewhere is unpickled here.

If a worker dies, or is lost with its node, this is reported; its task is tried once more and another worker is
started. Only this file and those beside it named `ray_...` import ray, and they are imported when the engine is chosen.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, final

import ray
from ray.exceptions import RayError, RayTaskError

from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import ClientError, RoundError, UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.messages.compressors import Compressor
from polyfed.core.serialization import serialize_state
from polyfed.simulation.engines.base import ClientTask, Engine, PartialSum, TaskResult, sort_longest_first
from polyfed.simulation.engines.ray.object_store import SharedTensorStore
from polyfed.simulation.engines.ray.ray_actor import RayActor
from polyfed.simulation.engines.ray.ray_cluster import (
    connect_to_ray_if_needed,
    count_worker_slots,
    describe_cluster_resources,
    describe_worker_death,
    set_worker_death_logging,
)
from polyfed.simulation.engines.ray.ray_payload import put_payload
from polyfed.simulation.engines.ray.ray_sums import collect_node_sums, read_summed_reply
from polyfed.simulation.engines.result_codec import decode_result_and_facts
from polyfed.simulation.sources.source_clients import SourceClients

_ATTEMPTS = 2
_STARTS = 3  # failed starts in a row, per worker, after which the run ends
_START_SECONDS = 180.0  # for the first worker to start, also after all were lost; nodes may have to boot


@dataclass
class _RayWorker:
    """Describes a worker of the cluster: its actor, and its unfinished tasks.

    Attributes:
        actor: handle of the Ray actor.
        ready: reference to the result of its start; None once it has started.
        name: its name in incidents.
        tasks: (reference to the result, task, number of the attempt); it works on the first.
        node: the id of its node, once it has started.
        verdicts: whether a reply that it holds back counts in its sum, for those of which it was not told yet.
        summed: the tasks whose replies are in its sum, by client.
    """

    actor: Any
    ready: Any
    name: str = "worker process"
    tasks: deque[tuple[Any, ClientTask, int]] = field(default_factory=deque)
    node: str = ""
    verdicts: dict[str, bool] = field(default_factory=dict)
    summed: dict[str, ClientTask] = field(default_factory=dict)


@final
class RayEngine(Engine):
    """Runs tasks on Ray actors (worker processes) of one core each, those of most examples first.

    Args:
        algorithm, clients: put into the object store when the engine starts.
        workers: number of actors; "auto" is as many as the cluster has cores (and shares of GPUs), at most one per
            client.
        address: "local", "auto" or HOST:PORT, see `Settings`. A Ray that this process is already connected to is used,
            and left running.
        gpus_per_worker: GPUs of each actor; a fraction shares one. 0 computes on CPUs.
        metrics: computed at evaluation; empty takes the default ones of the task.
        compression: of replies; None sends them uncompressed.
        num_parties: clients of a round, if replies are summed by region: then each node adds up the replies of its own
            clients, and one sum per node travels. None sends each reply.

    Raises:
        UserError: no cluster at the address, no GPU on this machine, or clients that cannot be sent.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        clients: Sequence[Client] | SourceClients,
        workers: int | str = "auto",
        address: str = "local",
        gpus_per_worker: float = 0.0,
        metrics: Sequence[Metric] = (),
        compression: Compressor | None = None,
        num_parties: int | None = None,
    ) -> None:
        self._clients: Mapping[str, Client] = (
            clients if isinstance(clients, SourceClients) else {client.id: client for client in clients}
        )
        self._workers: list[_RayWorker] = []
        self._incidents: dict[str, list[str]] = {}  # client -> deaths of workers that are not reported yet
        self._call, self._failed_starts, self._gpus, self._algorithm = 0, 0, gpus_per_worker, algorithm
        self._lost: set[str] = set()  # clients whose results were given, and whose sum was lost with its worker
        self._sums: list[PartialSum] = []
        self._owns_ray = connect_to_ray_if_needed(address, workers)
        try:
            count = min(count_worker_slots(gpus_per_worker), len(clients)) if workers == "auto" else int(workers)
            if address == "local" and ray.cluster_resources().get("GPU", 0) < gpus_per_worker:
                raise UserError(f"gpus_per_worker={gpus_per_worker}, but Ray finds no such GPU on this machine; use 0")
            options = {"num_cpus": 1, "num_gpus": gpus_per_worker, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
            self._actor_class = ray.remote(RayActor).options(**options)
            self._payload = put_payload(
                algorithm, clients, "cuda" if gpus_per_worker else "cpu", (tuple(metrics), compression), num_parties
            )
            self._workers += [self._start_worker() for _ in range(count)]
        except BaseException:
            self.close()
            raise

    @property
    def worker_pids(self) -> list[int]:
        """Returns the process ids of the Ray workers on their machines; waits until all have started."""
        return [pid for pid, _ in ray.get([worker.actor.where.remote() for worker in self._workers])]

    def _start_worker(self) -> _RayWorker:
        actor = self._actor_class.remote()
        return _RayWorker(actor, actor.start.remote(self._payload))

    def run(self, tasks: Sequence[ClientTask]) -> Iterator[TaskResult]:
        """Runs the tasks on the workers, and yields each result; `failure` says of a worker that died twice.

        Raises:
            UserError: a worker cannot read the clients: a module of theirs is missing on its node.
            RoundError: no worker starts.
        """
        for position, worker in enumerate(self._workers):
            if worker.tasks:  # an earlier call was abandoned
                self._restart_worker(position)
        self._call += 1
        self._lost.clear()
        for worker in self._workers:
            worker.verdicts, worker.summed = {}, {}
        waiting = deque((task, 1) for task in sort_longest_first(tasks, self._clients))
        shared = SharedTensorStore(tasks, ray.put)
        while waiting or any(worker.tasks for worker in self._workers) or not self._collect_sums(waiting):
            self._send_tasks(waiting, shared)
            position = self._wait_for_worker()
            worker = self._workers[position]
            if worker.ready is not None:
                self._check_started(position)
                continue
            reference, task, _ = worker.tasks[0]
            try:
                data = ray.get(reference)
            except RayTaskError as error:  # not raised by the client's code: the worker reports that as a failure
                worker.tasks.popleft()
                reason = f"its worker failed: {type(error.cause).__name__}: {error.cause}"
                yield self._make_failed_result(task, reason, str(error))
            except RayError as error:
                yield from self._handle_dead_worker(position, waiting, describe_worker_death(error))
            else:
                worker.tasks.popleft()
                self._send_tasks(waiting, shared)  # first of all, so that the worker does not wait
                result, facts = decode_result_and_facts(data, task)
                yield from self._accept(worker, result, facts)

    def _accept(self, worker: _RayWorker, result: TaskResult, facts: Mapping[str, Any]) -> Iterator[TaskResult]:
        """Yields a result unless it was yielded before, and notes whether the worker's sum has its reply."""
        task, refused = result.task, list[str]()
        summed = read_summed_reply(facts, lambda: refused.append(task.client))
        if task.client in self._lost:
            if summed is None:
                self._make_failed_result(task, str(result.failure))
            self._lost.remove(task.client)
        else:
            yield replace(result, incidents=self._take_incidents(task), summed=summed)
        if summed is not None:
            worker.verdicts[task.client] = not refused
            worker.summed |= {} if refused else {task.client: task}

    def _make_failed_result(self, task: ClientTask, reason: str, trace: str = "") -> TaskResult:
        """Returns the result of a failed task; raises a `RoundError` for a reply that counts, but was lost with a worker."""
        if task.client in self._lost:
            raise RoundError(f"the reply of {task.client!r} was lost with its worker; tried again: {reason}")
        failure = ClientError(task.round, task.client, task.phase, reason, trace)
        return TaskResult(task, failure=failure, incidents=self._take_incidents(task))

    def _collect_sums(self, waiting: deque[tuple[ClientTask, int]]) -> bool:
        """Fetches each node's sum of replies; returns False if one was lost, whose tasks then wait again."""
        sums = [(w.actor.take_sum.remote(w.verdicts), w.node, list(w.summed)) for w in self._workers if w.summed]
        try:
            self._sums = collect_node_sums(sums, self._algorithm)
        except RayTaskError:  # no loss: a second try would fail, too
            raise
        except RayError:
            for position, worker in enumerate(self._workers):
                if worker.summed:
                    self._requeue_summed(self._restart_worker(position), waiting)
            return False
        for worker in self._workers:
            worker.verdicts, worker.summed = {}, {}
        return True

    def _requeue_summed(self, dead_worker: _RayWorker, waiting: deque[tuple[ClientTask, int]]) -> None:
        self._lost |= dead_worker.summed.keys()
        waiting.extend((task, 1) for task in dead_worker.summed.values())

    def take_partial_sums(self) -> Sequence[PartialSum]:
        """Returns the sums of the replies of the last call of `run`, one for each node."""
        sums, self._sums = self._sums, []
        return sums

    def _send_tasks(self, waiting: deque[tuple[ClientTask, int]], shared: SharedTensorStore) -> None:
        """Sends a task to every idle worker, and a second one ahead while enough tasks are left for all workers."""
        for depth, reserve in ((1, 0), (2, len(self._workers))):
            for worker in self._workers:
                if worker.ready is None and len(worker.tasks) < depth and len(waiting) > reserve:
                    task, attempt = waiting.popleft()
                    encoded_task = serialize_state(_encode_task(task), shared.names)
                    references, worker.verdicts, verdicts = shared.references[id(task)], {}, worker.verdicts
                    reference = worker.actor.run.remote(self._call, references, encoded_task, verdicts)
                    worker.tasks.append((reference, task, attempt))

    def _wait_for_worker(self) -> int:
        """Waits until a worker has started or has finished its task, and returns the worker's position."""
        busy = any(worker.tasks for worker in self._workers)
        expected = {(w.tasks[0][0] if w.tasks else w.ready): i for i, w in enumerate(self._workers)}
        expected.pop(None, None)  # workers without work
        ready_references, _ = ray.wait(list(expected), num_returns=1, timeout=None if busy else _START_SECONDS)
        if not ready_references:
            raise RoundError(
                f"no worker of Ray could start in {_START_SECONDS:.0f} s; each needs a free core and {self._gpus} GPUs, of "
                f"the cluster's {describe_cluster_resources()}"
            )
        return expected[ready_references[0]]

    def _check_started(self, position: int) -> None:
        """Marks a worker as ready if it has started; replaces it if its start failed."""
        worker = self._workers[position]
        try:
            pid, node, worker.node = ray.get(worker.ready)
        except RayTaskError as error:
            _raise_unreadable(error)
        except RayError as error:
            self._failed_starts += 1
            if self._failed_starts >= _STARTS * len(self._workers):
                raise RoundError(
                    f"workers of Ray die before they can work, last by {describe_worker_death(error)}"
                ) from error
            self._restart_worker(position)
        else:
            self._failed_starts, worker.ready, worker.name = 0, None, f"worker process {pid} on node {node}"

    def _handle_dead_worker(
        self, position: int, waiting: deque[tuple[ClientTask, int]], cause: str
    ) -> Iterator[TaskResult]:
        """Replaces a worker that died, and reschedules its tasks or reports them as failed.

        The task that it worked on is tried again, or fails after the last attempt; tasks that it had not begun are
        rescheduled without counting an attempt.
        """
        dead_worker = self._restart_worker(position)
        _, task, attempt = dead_worker.tasks.popleft()
        incident = f"{dead_worker.name} died ({cause}), phase {task.phase!r}, attempt {attempt} of {_ATTEMPTS}"
        self._incidents.setdefault(task.client, []).append(incident)
        self._requeue_summed(dead_worker, waiting)
        waiting.extendleft((again, number) for _, again, number in reversed(dead_worker.tasks))
        if attempt < _ATTEMPTS:
            waiting.appendleft((task, attempt + 1))
        else:
            reason = f"its worker process died {_ATTEMPTS} times, last by {cause} (which may be a lack of memory)"
            yield self._make_failed_result(task, reason)

    def _restart_worker(self, position: int) -> _RayWorker:
        """Replaces a worker by a new one, kills the old one if it is still alive, and returns it."""
        old_worker = self._workers[position]
        ray.kill(old_worker.actor)
        self._workers[position] = self._start_worker()
        return old_worker

    def _take_incidents(self, task: ClientTask) -> tuple[str, ...]:
        """Returns a message for each worker that died during this client's tasks and has not been reported yet."""
        return tuple(self._incidents.pop(task.client, ()))

    def close(self) -> None:
        """Kills the workers; disconnects from Ray, or ends it, if this engine connected or started it."""
        if ray.is_initialized():
            for worker in self._workers:
                ray.kill(worker.actor)
            if self._owns_ray:
                ray.shutdown()
                set_worker_death_logging(True)
        self._workers.clear()
        self._payload = None


def _encode_task(task: ClientTask) -> dict[str, Any]:
    """Converts a task to a nested dict of plain values and tensors, which `serialize_state` can write."""
    return {
        "task": [task.phase, task.round, task.client, task.seed, task.run_seed],
        "down": task.message.tensors,
        "scalars": dict(task.message.scalars),
        "own": task.client_state,
    }


def _raise_unreadable(error: RayTaskError) -> NoReturn:
    """Raises a `UserError` that explains why a worker could not unpickle the clients."""
    # Ray may have put a traceback in front of the message.
    sentence = f"{type(error.cause).__name__}: {error.cause}".strip().splitlines()[-1]
    raise UserError(
        f"a worker of Ray cannot read the clients: {sentence}; polyfed and the modules that define networks, transforms and "
        "method must be importable on every node"
    ) from error
