"""A pool of processes on this machine, one torch thread each.

Workers get the clients once, when they start: by `fork` on Linux, so that the data is shared memory, models may be
lambdas and nothing is pickled; by `spawn` elsewhere and on CUDA, which cannot be forked. After that only messages and
private states travel, as safetensors bytes over a pipe; a tensor that several clients receive is sent once per worker.

A worker that dies, by `kill -9` too, is reported and its task is tried once more on a new worker.
"""

import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any, final

import torch
import torch.multiprocessing as multiprocessing

from polyfed.core.algorithm import Algorithm, Client, Message
from polyfed.core.code import granted, inherit
from polyfed.core.compression import Compression
from polyfed.core.errors import ClientError
from polyfed.core.metrics import Metric, prepare
from polyfed.core.tree import decode, encode, tensors_of
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.engines.parcel import pack_result, unpack_result
from polyfed.simulation.engines.work import Engine, Result, Task, longest_first

_ATTEMPTS = 2
_AHEAD_BYTES = 32 * 1024  # half of a Linux pipe
_ORPHAN_CHECK_SECONDS = 2.0


def can_fork(device: torch.device) -> bool:
    """Whether workers are forked here: on Linux, and not for CUDA, which does not survive it."""
    return sys.platform == "linux" and device.type == "cpu"


@dataclass
class _Worker:
    """A process, our end of its pipe, the tensors it holds in this call of `run`, and its tasks with the number of the
    attempt; the first is the one it works on."""

    process: Any  # multiprocessing's types differ between fork and spawn
    pipe: Connection
    holds: dict[int, str] = field(default_factory=dict)
    tasks: deque[tuple[Task, int]] = field(default_factory=deque)


@final
class PoolEngine(Engine):
    """`workers` processes that take the longest clients first.

    Args:
        algorithm, clients: given to each worker when it starts.
        device: where clients' data and models lie.
        workers: number of processes, at least 1.
        start_method: "fork" or "spawn"; None takes fork on Linux with the CPU, spawn otherwise.
        metrics: what is computed at evaluation; none is the task's own.
        compression: of replies; None leaves them as they are.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        clients: Sequence[Client],
        device: torch.device,
        workers: int,
        start_method: str | None = None,
        metrics: Sequence[Metric] = (),
        compression: Compression | None = None,
    ) -> None:
        self._algorithm, self._clients, self._device = algorithm, {c.id: c for c in clients}, device
        self._metrics, self._compression = tuple(metrics), compression
        method = start_method or ("fork" if can_fork(device) else "spawn")
        self._context: Any = multiprocessing.get_context(method)
        self._incidents: dict[str, list[str]] = {}  # client -> deaths of workers that are not reported yet
        self._workers: list[_Worker] = []
        prepare(metrics)
        for _ in range(workers):
            self._workers.append(self._start())

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return [worker.process.pid for worker in self._workers]

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        forked = self._context.get_start_method() == "fork"
        # A forked worker inherits our ends of all pipes; it closes them, so that it sees when we are gone.
        inherited = [*(worker.pipe for worker in self._workers), ours] if forked else []
        arguments = (
            theirs,
            inherited,
            self._algorithm,
            tuple(self._clients.values()),
            self._device,
            self._metrics,
            self._compression,
            granted(),
        )
        process = self._context.Process(target=_serve, args=arguments, daemon=True, name="polyfed-worker")
        with warnings.catch_warnings():
            # Python 3.12 warns of forking beside threads. Ours are torch's idle OpenMP threads and the progress bar's;
            # the worker uses one thread, and takes no lock that either could hold.
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def run(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """Yields results as workers finish. A task whose worker died twice is a failure."""
        waiting = deque((task, 1) for task in longest_first(tasks, self._clients))
        for position, worker in enumerate(self._workers):
            worker.holds.clear()
            if worker.tasks:  # an earlier call was abandoned: what the worker still sends is no answer to us
                worker.process.kill()
                self._exchange(position)
        while waiting or any(worker.tasks for worker in self._workers):
            for worker in self._workers:
                _feed(worker, waiting)
            busy = {worker.pipe: i for i, worker in enumerate(self._workers) if worker.tasks}
            for pipe in wait(list(busy)):
                position = busy[pipe]  # type: ignore[index]
                worker = self._workers[position]
                try:
                    data = worker.pipe.recv_bytes()
                except (EOFError, OSError):  # also when it died in the middle of its reply
                    yield from self._replace(position, waiting)
                    continue
                task, _ = worker.tasks.popleft()
                _feed(worker, waiting)  # before anything else, so that it does not wait for us
                yield replace(unpack_result(data, task), incidents=self._told(task))

    def _replace(self, position: int, waiting: deque[tuple[Task, int]]) -> Iterator[Result]:
        """A new worker in the place of one that died. The task it worked on waits again, or fails after the last
        attempt; those that it had not begun just wait again."""
        dead = self._exchange(position)
        code = dead.process.exitcode
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        task, attempt = dead.tasks.popleft()
        incident = (
            f"worker process {dead.process.pid} died ({cause}), phase {task.phase!r}, attempt {attempt} of {_ATTEMPTS}"
        )
        self._incidents.setdefault(task.client, []).append(incident)
        waiting.extendleft(reversed(dead.tasks))
        if attempt < _ATTEMPTS:
            waiting.appendleft((task, attempt + 1))
        else:
            reason = f"its worker process died {_ATTEMPTS} times, last by {cause} (out of memory ends as SIGKILL)"
            failure = ClientError(task.round, task.client, task.phase, reason)
            yield Result(task, failure=failure, incidents=self._told(task))

    def _exchange(self, position: int) -> _Worker:
        """Puts a new worker in the place of a dead one, and returns the dead."""
        dead = self._workers.pop(position)  # before the fork, which must not inherit a closed pipe
        dead.pipe.close()
        dead.process.join()
        self._workers.insert(position, self._start())
        return dead

    def _told(self, task: Task) -> tuple[str, ...]:
        return tuple(self._incidents.pop(task.client, ()))

    def close(self) -> None:
        """Ends the workers; one that does not leave within a second is killed."""
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(1.0)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers.clear()


def _feed(worker: _Worker, waiting: deque[tuple[Task, int]]) -> None:
    """Gives a worker its next task, and one more ahead if that message is small. A large one would not fit the pipe while
    the worker is busy: we would wait to write for a worker that waits to write to us."""
    while waiting and len(worker.tasks) < 2:
        task = waiting[0][0]
        fresh = {id(t): t for t in tensors_of(task.down.tensors) if id(t) not in worker.holds}
        if worker.tasks and sum(t.nbytes for t in (*fresh.values(), *tensors_of(task.own))) > _AHEAD_BYTES:
            return  # known without encoding it
        message = _message(task, fresh, worker.holds)
        if worker.tasks and len(message) > _AHEAD_BYTES:
            return
        worker.tasks.append(waiting.popleft())
        worker.holds.update(_names(fresh))
        try:
            worker.pipe.send_bytes(message)
        except OSError:
            return  # it is dead, which `run` notices when it waits for the reply


def _names(tensors: Mapping[int, torch.Tensor]) -> dict[int, str]:
    return {key: f"t{key}" for key in tensors}


def _message(task: Task, fresh: Mapping[int, torch.Tensor], holds: Mapping[int, str]) -> bytes:
    """A task as bytes. Tensors that the worker does not hold yet are in it; the others go by name."""
    names = {**holds, **_names(fresh)}
    return encode(
        {
            "forget": not holds,
            "fresh": {names[key]: tensor for key, tensor in fresh.items()},
            "down": {group: {n: names[id(t)] for n, t in tree.items()} for group, tree in task.down.tensors.items()},
            "task": [task.phase, task.round, task.client, task.seed, task.run_seed],
            "scalars": dict(task.down.scalars),
            "own": task.own,
        }
    )


def _serve(
    pipe: Connection,
    inherited: Sequence[Connection],
    algorithm: Algorithm[Any, Any],
    clients: Sequence[Client],
    device: torch.device,
    metrics: Sequence[Metric],
    compression: Compression | None,
    allowed: Sequence[str],
) -> None:
    """A worker's life: take a task, carry it out, answer; leave when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which saves the run and closes the pipe
    for connection in inherited:
        connection.close()
    parent = os.getppid()
    inherit(allowed)
    torch.set_num_threads(1)
    engine = InProcessEngine(algorithm, clients, device, metrics, compression)
    held: dict[str, torch.Tensor] = {}
    try:
        while True:
            while not pipe.poll(_ORPHAN_CHECK_SECONDS):
                if os.getppid() != parent:
                    raise EOFError
            body = decode(pipe.recv_bytes())
            if body["forget"]:
                held.clear()
            held.update(body["fresh"])
            arrays = {group: {name: held[key] for name, key in tree.items()} for group, tree in body["down"].items()}
            phase, number, client, seed, run_seed = body["task"]
            task = Task(phase, number, client, Message(arrays, body["scalars"]), body["own"], seed, run_seed)
            for result in engine.run([task]):
                pipe.send_bytes(pack_result(result))
    except (EOFError, ConnectionError):
        os._exit(0)  # the parent closed the pipe; no clean-up of what was inherited from it
    except BaseException:
        traceback.print_exc()
        os._exit(1)
