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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any, final

import torch
import torch.multiprocessing as multiprocessing

from polyfed.algorithm import Algorithm, Client, Message
from polyfed.engines.inprocess import InProcessEngine
from polyfed.engines.work import Engine, Result, Task, longest_first
from polyfed.errors import ClientError
from polyfed.tree import decode, encode, tensors_of

_ATTEMPTS = 2
_ORPHAN_CHECK_SECONDS = 2.0


@dataclass
class _Worker:
    """A process, our end of its pipe, the tensors it holds in this call of `run`, and what it is busy with."""

    process: Any  # multiprocessing's types differ between fork and spawn
    pipe: Connection
    holds: dict[int, str] = field(default_factory=dict)
    task: Task | None = None
    attempts: int = 0


@final
class PoolEngine(Engine):
    """`workers` processes that take the longest clients first.

    Args:
        algorithm, clients: given to each worker when it starts.
        device: where clients' data and models lie.
        workers: number of processes, at least 1.
        start_method: "fork" or "spawn"; None takes fork on Linux with the CPU, spawn otherwise.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        clients: Sequence[Client],
        device: torch.device,
        workers: int,
        start_method: str | None = None,
    ) -> None:
        self._algorithm, self._clients, self._device = algorithm, {c.id: c for c in clients}, device
        can_fork = sys.platform == "linux" and device.type == "cpu"
        self._context: Any = multiprocessing.get_context(start_method or ("fork" if can_fork else "spawn"))
        self._incidents: dict[str, list[str]] = {}  # client -> deaths of workers that are not reported yet
        self._workers: list[_Worker] = []
        # The first optimiser of a process imports a second's worth of torch; forked workers share what we have.
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
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
        arguments = (theirs, inherited, self._algorithm, tuple(self._clients.values()), self._device)
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
        for worker in self._workers:
            worker.holds.clear()
            worker.task = None
        while waiting or any(worker.task for worker in self._workers):
            for position, worker in enumerate(self._workers):
                if worker.task is None and waiting:
                    worker.task, worker.attempts = waiting.popleft()
                    if not _send(worker):
                        yield from self._replace(position, waiting)
            busy = {worker.pipe: i for i, worker in enumerate(self._workers) if worker.task is not None}
            for pipe in wait(list(busy)):
                worker = self._workers[busy[pipe]]  # type: ignore[index]
                assert worker.task is not None
                try:
                    result = _unpack(worker.pipe.recv_bytes(), worker.task)
                except (EOFError, ConnectionError):
                    yield from self._replace(busy[pipe], waiting)  # type: ignore[index]
                    continue
                result = replace(result, incidents=self._told(worker.task))
                worker.task = None
                yield result

    def _replace(self, position: int, waiting: deque[tuple[Task, int]]) -> Iterator[Result]:
        """A new worker in the place of one that died; its task waits again, or fails after the last attempt."""
        dead = self._workers[position]
        dead.pipe.close()
        dead.process.join()
        code = dead.process.exitcode
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        assert dead.task is not None
        incident = (
            f"worker process {dead.process.pid} died ({cause}), phase {dead.task.phase!r}, "
            f"attempt {dead.attempts} of {_ATTEMPTS}"
        )
        self._incidents.setdefault(dead.task.client, []).append(incident)
        del self._workers[position]  # before the fork, which must not inherit a closed pipe
        self._workers.insert(position, self._start())
        if dead.attempts < _ATTEMPTS:
            waiting.appendleft((dead.task, dead.attempts + 1))
        else:
            reason = f"its worker process died {_ATTEMPTS} times, last by {cause} (out of memory ends as SIGKILL)"
            failure = ClientError(dead.task.round, dead.task.client, dead.task.phase, reason)
            yield Result(dead.task, failure=failure, incidents=self._told(dead.task))

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


def _send(worker: _Worker) -> bool:
    """Sends the worker its task; False if it is dead. Tensors it already holds go by name."""
    task = worker.task
    assert task is not None
    known = dict(worker.holds)
    fresh = {id(t): f"t{id(t)}" for t in tensors_of(task.down.arrays) if id(t) not in known}
    body = {
        "forget": not known,
        "fresh": {name: t for t in tensors_of(task.down.arrays) if (name := fresh.get(id(t))) is not None},
        "down": None,
        "task": [task.phase, task.round, task.client, task.seed, task.run_seed],
        "scalars": dict(task.down.scalars),
        "mine": task.mine,
    }
    names = known | fresh
    body["down"] = {group: {name: names[id(t)] for name, t in tree.items()} for group, tree in task.down.arrays.items()}
    worker.holds.update(fresh)
    try:
        worker.pipe.send_bytes(encode(body))
    except (BrokenPipeError, ConnectionError):
        return False
    return True


def _serve(
    pipe: Connection,
    inherited: Sequence[Connection],
    algorithm: Algorithm[Any, Any],
    clients: Sequence[Client],
    device: torch.device,
) -> None:
    """A worker's life: take a task, carry it out, answer; leave when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which saves the run and closes the pipe
    for connection in inherited:
        connection.close()
    parent = os.getppid()
    torch.set_num_threads(1)
    engine = InProcessEngine(algorithm, clients, device)
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
            task = Task(phase, number, client, Message(arrays, body["scalars"]), body["mine"], seed, run_seed)
            for result in engine.run([task]):
                pipe.send_bytes(_pack(result))
    except (EOFError, ConnectionError):
        os._exit(0)  # the parent closed the pipe; no clean-up of what was inherited from it
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _pack(result: Result) -> bytes:
    failure = result.failure
    return encode(
        {
            "reply": None if result.reply is None else {"arrays": result.reply.arrays, "scalars": result.reply.scalars},
            "mine": result.mine,
            "metrics": result.metrics,
            "weights": result.weights,
            "seconds": result.seconds,
            "failure": None if failure is None else [failure.reason, failure.trace],
        }
    )


def _unpack(data: bytes, task: Task) -> Result:
    body = decode(data)
    reply = None if body["reply"] is None else Message(body["reply"]["arrays"], body["reply"]["scalars"])
    failure = None
    if body["failure"] is not None:
        reason, trace = body["failure"]
        failure = ClientError(task.round, task.client, task.phase, reason, trace)
    return Result(task, reply, body["mine"], body["metrics"], body["weights"], body["seconds"], failure)
