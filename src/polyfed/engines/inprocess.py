"""The engine for debugging and for one device: clients run one after the other in this process."""

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch

from polyfed.algorithm import Algorithm, Client
from polyfed.engines.work import Engine, Result, Task, check_keepable, place_clients
from polyfed.errors import ClientError
from polyfed.evaluation import client_metrics
from polyfed.seeds import local_rng


@final
class InProcessEngine(Engine):
    """Runs tasks in the order given; a debugger and an exception's cause reach into the client's code. Each worker of
    the pool runs one of these."""

    def __init__(self, algorithm: Algorithm[Any, Any], clients: Sequence[Client], device: torch.device) -> None:
        self._algorithm, self._device = algorithm, device
        self._clients = {client.id: client for client in place_clients(clients, device)}

    def run(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """One task after the other. An exception of the method or of a client's network becomes a failure that says
        round, client and phase, and keeps the exception as its cause."""
        algorithm = self._algorithm
        for task in tasks:
            client, start = self._clients[task.client], time.perf_counter()
            try:
                with local_rng(task.seed, self._device):  # for networks and methods that draw from torch's generator
                    mine = algorithm.client_init(client, task.run_seed) if task.mine is None else task.mine
                    if task.phase == "local":
                        reply, mine = algorithm.local(task.down, mine, client, task.seed)
                        check_keepable(mine, "the private state")
                        result = Result(task, reply=reply, mine=mine)
                    else:
                        model = algorithm.personal(task.down, mine, client, task.seed)
                        if task.phase == "export":
                            result = _weights(task, model, algorithm.description(model, client))
                        else:
                            metrics = client_metrics(model, client)
                            for name, other in algorithm.beside(task.down, mine, client, task.seed):
                                metrics |= client_metrics(other, client, f"{name}_")
                            result = Result(task, metrics=metrics)
            except Exception as error:  # whatever a user's network or data may raise; it is reported, never swallowed
                reason = f"{type(error).__name__}: {error}"
                failure = ClientError(task.round, task.client, task.phase, reason, traceback.format_exc())
                failure.__cause__ = error
                result = Result(task, failure=failure)
            yield result.after(time.perf_counter() - start)

    def close(self) -> None:
        """Nothing to give back."""


def _weights(task: Task, model: torch.nn.Module, description: Mapping[str, Any] | None) -> Result:
    weights = {n: t.detach().to("cpu", copy=True) for n, t in model.state_dict().items()}
    return Result(task, weights=weights, description=description)
