"""Runs clients in a pool of worker processes on this machine, with one torch thread each.

Workers get the clients once, when they start: by `fork` on Linux, so that data is shared memory, models may be lambdas
and nothing is pickled; by `spawn` elsewhere and with CUDA, which does not survive a fork. After that only messages and
private states travel, as safetensors bytes over a pipe; a tensor that several clients receive is sent once per worker.

If a worker dies, also by `kill -9`, this is reported, and its task is tried once more on a new worker.
"""

import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, final

import torch
import torch.multiprocessing as multiprocessing

from polyfed.core.algorithm import Algorithm, Client, Message
from polyfed.core.errors import ClientError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.io.trusted_code import add_trusted_names, trusted_names
from polyfed.core.messages.compressors import Compressor
from polyfed.core.serialization import deserialize_state, serialize_state
from polyfed.core.state_dict import iter_tensors
from polyfed.core.training.cohort import MAX_COHORT_SIZE
from polyfed.simulation.engines.base import ClientTask, Engine, TaskResult, sort_longest_first
from polyfed.simulation.engines.cohort import CohortEngine
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.engines.result_codec import decode_result_and_facts, encode_result_or_failure

_ATTEMPTS = 2
_AHEAD_BYTES = 32 * 1024  # half of a Linux pipe
_ORPHAN_CHECK_SECONDS = 2.0


def can_fork(device: torch.device) -> bool:
    """Returns whether workers can be forked: on Linux, on the CPU, with gradients after a fork.

    On a machine with a GPU torch starts threads at the first gradient, also at one on the CPU; gradients in a process that
    is forked later fail.
    """
    return sys.platform == "linux" and device.type == "cpu" and _computes_gradients_after_fork()


def _computes_gradients_after_fork() -> bool:
    """Returns True if a process forked now computes a gradient; without a GPU it always does, and none is forked."""
    if not (torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())):
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        process = multiprocessing.get_context("fork").Process(target=_compute_gradient, daemon=True)
        process.start()
    process.join(20)
    if process.is_alive():
        process.kill()
        return False
    return bool(process.exitcode == 0)


def _compute_gradient() -> None:
    try:
        torch.autograd.backward(torch.ones(1, requires_grad=True).sum())
    except RuntimeError:  # where it is expected it is not printed
        os._exit(1)


@dataclass
class _TaskBatch:
    """Holds the tasks that a worker gets at once, in the order in which it answers, and the number of the attempt."""

    tasks: deque[ClientTask]
    attempt: int = 1


@dataclass
class _PoolWorker:
    """Describes a worker process of the pool: its pipe, the tensors that it holds, and its unfinished tasks.

    Attributes:
        process: the process.
        pipe: the parent's end of its pipe.
        tensor_names: `id(tensor)` -> name, of the tensors that it holds in this call of `run`.
        batches: its work; it works on the first.
    """

    process: Any  # multiprocessing's types differ between fork and spawn
    pipe: Connection
    tensor_names: dict[int, str] = field(default_factory=dict)
    batches: deque[_TaskBatch] = field(default_factory=deque)


@final
class PoolEngine(Engine):
    """Runs tasks in a pool of worker processes on this machine; tasks of clients with the most examples start first.

    Args:
        algorithm, clients: given to each worker when it starts; clients of a source are made in the workers.
        device: where clients' data and models lie.
        workers: number of processes, at least 1.
        start_method: "fork" or "spawn"; None takes fork on Linux with the CPU, spawn otherwise.
        metrics: computed at evaluation; empty takes the default ones of the task.
        compression: of replies; None sends them uncompressed.
        uses_cohorts: whether each worker computes a cohort of clients at once.
        sequential: as for `CohortEngine`.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        clients: Sequence[Client] | Mapping[str, Client],
        device: torch.device,
        workers: int,
        start_method: str | None = None,
        metrics: Sequence[Metric] = (),
        compression: Compressor | None = None,
        uses_cohorts: bool = False,
        sequential: Sequence[str] = (),
    ) -> None:
        self._algorithm, self._device = algorithm, device
        self._clients = clients if isinstance(clients, Mapping) else {c.id: c for c in clients}
        self._uses_cohorts, self._sequential = uses_cohorts, tuple(sequential)
        self._metrics, self._compression = tuple(metrics), compression
        method = start_method or ("fork" if can_fork(device) else "spawn")
        self._context: Any = multiprocessing.get_context(method)
        self._incidents: dict[str, list[str]] = {}  # client -> deaths of workers that are not reported yet
        self._workers: list[_PoolWorker] = []
        for _ in range(workers):
            self._workers.append(self._start_worker())

    @property
    def worker_pids(self) -> list[int]:
        """Returns the process ids of the running workers."""
        return [worker.process.pid for worker in self._workers]

    def _start_worker(self) -> _PoolWorker:
        parent_end, worker_end = self._context.Pipe()
        forked = self._context.get_start_method() == "fork"
        # A forked worker inherits the parent's ends of all pipes; it closes them, to notice when the parent is gone.
        inherited = [*(worker.pipe for worker in self._workers), parent_end] if forked else []
        arguments = (
            worker_end,
            inherited,
            self._algorithm,
            tuple(self._clients.values()) if isinstance(self._clients, dict) else self._clients,
            self._device,
            self._metrics,
            self._compression,
            trusted_names(),
            self._uses_cohorts,
            self._sequential,
        )
        process = self._context.Process(target=_run_worker, args=arguments, daemon=True, name="polyfed-worker")
        with warnings.catch_warnings():
            # Python 3.12 warns of forking with threads. Here these are torch's idle OpenMP threads and the progress bar's;
            # the worker uses one thread, and takes no lock that they could hold.
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            process.start()
        worker_end.close()
        return _PoolWorker(process, parent_end)

    def run(self, tasks: Sequence[ClientTask]) -> Iterator[TaskResult]:
        """Runs the tasks in worker processes, and yields each result as soon as it is finished.

        A task whose worker died twice yields a result with an error in `failure`.
        """
        ordered = sort_longest_first(tasks, self._clients)
        # Tasks are assigned in turn, so that batches take equally long; without cohorts a batch is one task.
        number = max(len(self._workers), -(-len(ordered) // MAX_COHORT_SIZE)) if self._uses_cohorts else len(ordered)
        waiting = deque(_TaskBatch(deque(part)) for i in range(number) if (part := ordered[i::number]))
        for position, worker in enumerate(self._workers):
            worker.tensor_names.clear()
            if worker.batches:  # an earlier call was abandoned: the worker would still send its results
                worker.process.kill()
                self._restart_worker(position)
        while waiting or any(worker.batches for worker in self._workers):
            for worker in self._workers:
                _send_tasks(worker, waiting)
            busy = {worker.pipe: i for i, worker in enumerate(self._workers) if worker.batches}
            for pipe in wait(list(busy)):
                position = busy[pipe]  # type: ignore[index]
                worker = self._workers[position]
                try:
                    data = worker.pipe.recv_bytes()
                except (EOFError, OSError):  # also when it died in the middle of its reply
                    yield from self._handle_dead_worker(position, waiting)
                    continue
                task = worker.batches[0].tasks.popleft()
                if not worker.batches[0].tasks:
                    worker.batches.popleft()
                _send_tasks(worker, waiting)  # first of all, so that the worker does not wait
                result, _ = decode_result_and_facts(data, task)
                yield replace(result, incidents=self._take_incidents(task))

    def _handle_dead_worker(self, position: int, waiting: deque[_TaskBatch]) -> Iterator[TaskResult]:
        """Replaces a worker that died, and reschedules its tasks or reports them as failed.

        The task that it worked on is tried again, or fails after the last attempt; tasks that it had not begun are
        rescheduled without counting an attempt. Tasks of a cohort are rescheduled one by one, so that a client that
        kills its worker does so alone.
        """
        dead = self._restart_worker(position)
        code = dead.process.exitcode
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        lost_batch = dead.batches.popleft()
        waiting.extendleft(reversed(dead.batches))
        if len(lost_batch.tasks) > 1:
            waiting.extendleft(_TaskBatch(deque([task])) for task in reversed(lost_batch.tasks))
            return
        task, attempt = lost_batch.tasks[0], lost_batch.attempt
        incident = (
            f"worker process {dead.process.pid} died ({cause}), phase {task.phase!r}, attempt {attempt} of {_ATTEMPTS}"
        )
        self._incidents.setdefault(task.client, []).append(incident)
        if attempt < _ATTEMPTS:
            waiting.appendleft(_TaskBatch(lost_batch.tasks, attempt + 1))
        else:
            reason = f"its worker process died {_ATTEMPTS} times, last by {cause} (out of memory ends as SIGKILL)"
            failure = ClientError(task.round, task.client, task.phase, reason)
            yield TaskResult(task, failure=failure, incidents=self._take_incidents(task))

    def _restart_worker(self, position: int) -> _PoolWorker:
        """Starts a new worker in place of a dead one, and returns the dead one."""
        dead = self._workers.pop(position)  # before the fork, which must not inherit a closed pipe
        dead.pipe.close()
        dead.process.join()
        self._workers.insert(position, self._start_worker())
        return dead

    def _take_incidents(self, task: ClientTask) -> tuple[str, ...]:
        """Returns a message for each worker that died during this client's tasks and has not been reported yet."""
        return tuple(self._incidents.pop(task.client, ()))

    def close(self) -> None:
        """Ends the worker processes; kills a worker that does not end within a second."""
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(1.0)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers.clear()


def _send_tasks(worker: _PoolWorker, waiting: deque[_TaskBatch]) -> None:
    """Sends a worker its next tasks, and one batch ahead if its message is small.

    A large message would not fit the pipe while the worker is busy: parent and worker would each wait for the other to
    read.
    """
    while waiting and len(worker.batches) < 2:
        tasks = waiting[0].tasks
        if worker.batches and len(tasks) > 1:
            return  # a cohort's message is too large to send ahead; encoding it at each reply to find that out is a waste
        message_tensors = [tensor for task in tasks for tensor in iter_tensors(task.message.tensors)]
        new_tensors = {id(t): t for t in message_tensors if id(t) not in worker.tensor_names}
        state_tensors = [tensor for task in tasks for tensor in iter_tensors(task.client_state)]
        if worker.batches and sum(t.nbytes for t in (*new_tensors.values(), *state_tensors)) > _AHEAD_BYTES:
            return  # too large, which is known without encoding it
        message = _encode_tasks(tasks, new_tensors, worker.tensor_names)
        if worker.batches and len(message) > _AHEAD_BYTES:
            return
        worker.batches.append(waiting.popleft())
        worker.tensor_names.update(_tensor_names(new_tensors))
        try:
            worker.pipe.send_bytes(message)
        except OSError:
            return  # the worker is dead; `run` notices when it waits for the reply


def _tensor_names(tensors: Mapping[int, torch.Tensor]) -> dict[int, str]:
    return {key: f"t{key}" for key in tensors}


def _encode_tasks(
    tasks: Sequence[ClientTask], new_tensors: Mapping[int, torch.Tensor], held_names: Mapping[int, str]
) -> bytes:
    """Encodes tasks as bytes; tensors that the worker already holds are sent as names only."""
    names = {**held_names, **_tensor_names(new_tensors)}
    return serialize_state(
        {
            "forget": not held_names,
            "fresh": {names[key]: tensor for key, tensor in new_tensors.items()},
            "tasks": {
                f"{number:06}": {
                    "down": {
                        g: {n: names[id(t)] for n, t in tensors.items()} for g, tensors in task.message.tensors.items()
                    },
                    "task": [task.phase, task.round, task.client, task.seed, task.run_seed],
                    "scalars": dict(task.message.scalars),
                    "own": task.client_state,
                }
                for number, task in enumerate(tasks)
            },
        }
    )


def _decode_task(part: Any, tensor_by_name: Mapping[str, torch.Tensor]) -> ClientTask:
    arrays = {
        group: {name: tensor_by_name[key] for name, key in tensors.items()} for group, tensors in part["down"].items()
    }
    phase, number, client, seed, run_seed = part["task"]
    return ClientTask(phase, number, client, Message(arrays, part["scalars"]), part["own"], seed, run_seed)


def _run_worker(
    pipe: Connection,
    inherited: Sequence[Connection],
    algorithm: Algorithm[Any, Any],
    clients: Sequence[Client] | Mapping[str, Client],
    device: torch.device,
    metrics: Sequence[Metric],
    compression: Compressor | None,
    allowed: Sequence[str],
    uses_cohorts: bool,
    sequential: Sequence[str],
) -> None:
    """Runs tasks in a worker process, answers in order, and exits when the parent process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C: it saves the run and closes the pipe
    for connection in inherited:
        connection.close()
    parent = os.getppid()
    add_trusted_names(allowed)
    torch.set_num_threads(1)
    engine: Engine = (partial(CohortEngine, sequential=sequential) if uses_cohorts else InProcessEngine)(
        algorithm, clients, device, metrics, compression
    )
    tensor_by_name: dict[str, torch.Tensor] = {}
    try:
        while True:
            while not pipe.poll(_ORPHAN_CHECK_SECONDS):
                if os.getppid() != parent:
                    raise EOFError
            body = deserialize_state(pipe.recv_bytes())
            if body["forget"]:
                tensor_by_name.clear()
            tensor_by_name.update(body["fresh"])
            tasks = [_decode_task(part, tensor_by_name) for _, part in sorted(body["tasks"].items())]
            results = {result.task.client: result for result in engine.run(tasks)}
            for task in tasks:
                pipe.send_bytes(encode_result_or_failure(results[task.client]))
    except (EOFError, ConnectionError):
        os._exit(0)  # the parent closed the pipe; do not clean up what was inherited from it
    except BaseException:
        traceback.print_exc()
        os._exit(1)
