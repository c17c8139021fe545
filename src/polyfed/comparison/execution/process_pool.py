"""Executes several training runs in parallel, each in its own forked process.

A process sends its result to the parent as JSON over a pipe; the run's files are in its directory. A process that is
asked to stop saves its run first. A process whose parent has died exits at once, so that the run can be resumed
elsewhere.
"""

import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

import torch

from polyfed.core.errors import ClientError, RoundError, UserError
from polyfed.core.machine.threads import num_usable_cores
from polyfed.simulation.engines.devices import choose_client_device
from polyfed.simulation.engines.pool import can_fork
from polyfed.simulation.settings import Settings

Key = TypeVar("Key")
_ORPHAN_CHECK_SECONDS = 0.2
_STOP_SECONDS = 10.0  # that a process has to save its run
_FEW = 10  # clients per round and core up to which parallel runs use the cores better


class _RunningTask(NamedTuple):
    key: Any
    process: Any


def supports_forked_runs(settings: Settings) -> bool:
    """Returns whether forked processes can run these settings: on Linux, on the CPU, without Ray."""
    return settings.engine != "ray" and can_fork(choose_client_device(settings))


def default_parallel_runs(settings: Settings, num_clients: int) -> int:
    """Returns one run per core if engine and workers are open and a round has few clients, else 1.

    With few clients a round the cores idle while they wait for its last client; parallel runs fill them.

    Args:
        settings: of the runs.
        num_clients: number of clients of each run.

    >>> default_parallel_runs(Settings(rounds=1, workers=2), 10)
    1
    """
    free = settings.engine == "auto" and settings.workers == "auto" and supports_forked_runs(settings)
    cores = num_usable_cores()
    return cores if free and settings.count_round_clients(num_clients) <= _FEW * cores else 1


def run_in_processes(tasks: Iterator[tuple[Key, Callable[[], Any]]], max_processes: int) -> Iterator[tuple[Key, Any]]:
    """Runs tasks in separate processes, and yields (key, result), or a failed run's error, as they end.

    One task is taken from the iterator ahead. A run that fails yields its `ClientError` or `RoundError` as the result,
    and the others go on.

    Args:
        tasks: pairs of a key and a function; what the function returns must be plain data (JSON).
        max_processes: how many run at once; 1 runs all tasks in this process.

    Raises:
        UserError: the first one that a task raises; the other tasks are stopped.
        ChildProcessError: a process died.

    >>> sorted(run_in_processes(iter([("a", lambda: 1), ("b", lambda: 2)]), max_processes=2))
    [('a', 1), ('b', 2)]
    """
    if max_processes == 1:
        for key, task in tasks:
            try:
                result = task()
            except (ClientError, RoundError) as error:
                result = error
            yield key, result
        return
    running: dict[Connection, _RunningTask] = {}
    try:
        next_task = next(tasks, None)
        while running or next_task is not None:
            while next_task is not None and len(running) < max_processes:
                pipe, process = _start_process(next_task[1])
                running[pipe] = _RunningTask(next_task[0], process)
                next_task = next(tasks, None)
            for ready in wait(list(running)):
                pipe = next(open_pipe for open_pipe in running if open_pipe is ready)
                key, process = running.pop(pipe)
                yield key, _receive_result(pipe, process, key)
    finally:
        _stop_processes(running)


def _start_process(task: Callable[[], Any]) -> tuple[Connection, Any]:
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve_task, args=(theirs, task, os.getpid()), daemon=True, name="polyfed-run")
    with warnings.catch_warnings():
        # As in `PoolEngine`: the only other threads are torch's idle ones and the progress bar's.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        process.start()
    theirs.close()
    return ours, process


def _serve_task(pipe: Connection, task: Callable[[], Any], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and stops this process by SIGTERM
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    try:
        answer: dict[str, Any] = {"result": task()}
    except KeyboardInterrupt:
        os._exit(0)
    except (UserError, RoundError) as error:
        answer = {"error": type(error).__name__, "arguments": [str(error)]}
    except ClientError as error:
        answer = {
            "error": "ClientError",
            "arguments": [error.round, error.client, error.phase, error.reason, error.trace],
        }
    except OSError as error:  # a full disk, say
        answer = {"error": "OSError", "arguments": [error.errno, error.strerror or str(error)]}
    pipe.send_bytes(json.dumps(answer).encode())
    pipe.close()


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_ORPHAN_CHECK_SECONDS)
    os._exit(1)  # as by kill -9: what the run has saved is complete


def _receive_result(pipe: Connection, process: Any, key: Any) -> Any:
    try:
        answer = json.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        raise ChildProcessError(
            f"the process of {key} died (exit status {process.exitcode}); the same command goes on from what is saved"
        ) from None
    finally:
        pipe.close()
    process.join()
    if "error" not in answer:
        return answer["result"]
    if answer["error"] == "OSError":
        raise OSError(*answer["arguments"])
    if answer["error"] == "UserError":
        raise UserError(*answer["arguments"])
    kinds: dict[str, Callable[..., Exception]] = {"RoundError": RoundError, "ClientError": ClientError}
    return kinds[answer["error"]](*answer["arguments"])


def _stop_processes(running: dict[Connection, _RunningTask]) -> None:
    for _, process in running.values():
        process.terminate()
    end = time.monotonic() + _STOP_SECONDS
    for pipe, (_, process) in running.items():
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        pipe.close()
