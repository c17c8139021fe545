"""The engine for debugging and for one device: clients run one after the other in this process."""

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from polyfed.algorithms import REGISTRY
from polyfed.core.adapters import fitted, leaving
from polyfed.core.algorithm import Algorithm, BringsNetwork, Client, Loss, Message
from polyfed.core.compressed import compress
from polyfed.core.compression import Compression
from polyfed.core.criteria import trained_loss
from polyfed.core.dense import dense, dense_message, message_error
from polyfed.core.errors import ClientError
from polyfed.core.evaluation import Metrics, client_scores, out_of_fold, predict, scores
from polyfed.core.examples import Examples
from polyfed.core.finite import not_finite_in
from polyfed.core.gradients import gradients
from polyfed.core.memory import keep_memory
from polyfed.core.metrics import Metric
from polyfed.core.scratch import settled
from polyfed.core.seeds import local_rng
from polyfed.core.tree import Nested, check_keepable
from polyfed.simulation.engines.work import Engine, Result, Task, place_clients


@final
class InProcessEngine(Engine):
    """Runs tasks in the order given; a debugger and an exception's cause reach into the client's code. Each worker of
    the pool runs one of these.

    Args:
        algorithm, clients, device: who computes what, and where.
        metrics: what is computed at evaluation; none is the task's own.
        compression: of replies; None leaves them as they are.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        clients: Sequence[Client],
        device: torch.device,
        metrics: Sequence[Metric] = (),
        compression: Compression | None = None,
    ) -> None:
        keep_memory()
        self._algorithm, self._device, self._metrics = algorithm, device, tuple(metrics)
        self._compression = compression
        self._clients = {client.id: client for client in place_clients(clients, device)}

    def run(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """One task after the other. An exception of the method or of a client's network becomes a failure that says
        round, client and phase, and keeps the exception as its cause."""
        algorithm = self._algorithm
        for task in tasks:
            client, start = self._clients[task.client], time.perf_counter()
            try:
                # The random state is for networks and methods that draw from torch's generator.
                adapted = fitted(algorithm, client, task.down)
                with gradients(), local_rng(task.seed, self._device), adapted as down:
                    own = algorithm.client_init(client, task.run_seed) if task.own is None else task.own
                    if task.phase == "local":
                        reply, own = algorithm.local_update(down, own, client, task.seed)
                        reply = leaving(algorithm, client, reply)
                        check_keepable(own, "the private state")
                        _check_finite(algorithm, reply, own)
                        if not message_error(reply):  # else it is refused as it is
                            if self._compression is not None:
                                reply = compress(reply, task.down, self._compression, task.reply_seed)
                            reply = dense_message(reply)
                        result = Result(task, reply=reply, own=dense(own))
                    else:
                        model = settled(algorithm.personal_model(down, own, client, task.seed))
                        if task.phase == "export":
                            described = None
                            if isinstance(algorithm, BringsNetwork):
                                described = algorithm.description(model, client)
                            result = _weights(task, model, described)
                        else:
                            loss = trained_loss(client, algorithm)
                            metrics, outputs = self._scored(model, task, down, own, loss)
                            for name, other in algorithm.other_models(down, own, client, task.seed):
                                metrics |= client_scores(settled(other), client, self._metrics, f"{name}_", loss)[0]
                            result = Result(task, metrics=metrics, predictions=outputs)
            except Exception as error:  # whatever a user's network or data may raise; it is reported, never swallowed
                reason = f"{type(error).__name__}: {error}"
                failure = ClientError(task.round, task.client, task.phase, reason, traceback.format_exc())
                failure.__cause__ = error
                result = Result(task, failure=failure)
            yield result.after(time.perf_counter() - start)

    def _scored(
        self, model: torch.nn.Module, task: Task, message: Message, own: Any, loss: Loss
    ) -> tuple[Metrics, dict[str, Tensor]]:
        """Metrics and outputs of the personal network. Where it was fitted to validation examples, each of these has the
        outputs of a network that was made without it."""
        algorithm, client = self._algorithm, self._clients[task.client]
        if "fits_validation" not in algorithm.traits or client.val is None:
            return client_scores(model, client, self._metrics, loss=loss)
        metrics, outputs = client_scores(model, replace(client, val=None), self._metrics, loss=loss)

        def personal(of: Client) -> torch.nn.Module:
            return settled(algorithm.personal_model(message, own, of, task.seed))

        found = out_of_fold(personal, client)
        row = scores(found, client.val.labels.cpu(), client.task, self._metrics, loss)
        return metrics | {f"val_{name}": value for name, value in row.items()}, outputs | {"val": found}

    def predict(self, task: Task, examples: Examples) -> torch.Tensor:
        """What the personal network of a task's client makes of these examples, computed as at evaluation: float32 on the
        CPU, shape (n, ...).

        Raises:
            ClientError: the network or the method fails.
        """
        client = self._clients[task.client]
        try:
            with local_rng(task.seed, self._device), fitted(self._algorithm, client, task.down) as down:
                own = self._algorithm.client_init(client, task.run_seed) if task.own is None else task.own
                model = settled(self._algorithm.personal_model(down, own, client, task.seed))
                return predict(model, examples.to(self._device))
        except Exception as error:  # as in `run`
            reason = f"{type(error).__name__}: {error}"
            raise ClientError(task.round, task.client, "predict", reason, traceback.format_exc()) from error

    def close(self) -> None:
        """Nothing to give back."""


def _check_finite(algorithm: Algorithm[Any, Any], reply: Any, own: Nested) -> None:
    """A network that stays with its client may diverge while all that travels is sound. No run goes on from such a state
    (see `Forms`), so none begins to. Methods of your own may keep what they like.

    Raises:
        FloatingPointError: the private state has NaN or infinite values.
    """
    if type(algorithm) not in REGISTRY.values() or message_error(reply) or not_finite_in(dict(reply.scalars)):
        return  # what is wrong with a reply is said where it is accepted
    if wrong := not_finite_in(own):
        raise FloatingPointError(f"the private state: {wrong}; the local training diverged: lower lr or set clip_norm")


def _weights(task: Task, model: torch.nn.Module, description: Mapping[str, Any] | None) -> Result:
    weights = {n: t.detach().to("cpu", copy=True) for n, t in model.state_dict().items()}
    return Result(task, weights=weights, description=description)
