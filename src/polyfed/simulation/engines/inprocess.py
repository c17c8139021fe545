"""Runs clients one after the other in this process: for debugging, for a single device, and inside each worker of a
pool."""

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from polyfed.algorithms import REGISTRY
from polyfed.core.algorithm import Algorithm, Client, Message
from polyfed.core.errors import ClientError, UserError, describe_exception
from polyfed.core.evaluation.evaluate import (
    MetricValues,
    compute_metrics,
    evaluate_client_with_outputs,
    out_of_fold_outputs,
    predict,
)
from polyfed.core.evaluation.metric import Metric
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.nan_checks import nonfinite_state_error
from polyfed.core.machine.allocator import make_malloc_keep_freed_memory
from polyfed.core.messages.compressors import Compressor
from polyfed.core.messages.contiguous import as_contiguous, contiguous_message, message_error
from polyfed.core.messages.lora import cut_message_to_client_rank_within_block, fold_adapter_scales_into_reply
from polyfed.core.messages.message_compression import compress_message
from polyfed.core.methods.capabilities import BringsNetwork
from polyfed.core.nn.grad_mode import grad_enabled
from polyfed.core.nn.module_cache import restore_all_but_weights_and_set_eval
from polyfed.core.seeds import temporary_rng_seed
from polyfed.core.serialization import check_serializable
from polyfed.core.state_dict import PyTree
from polyfed.core.tasks.task import Loss
from polyfed.core.training.client_loss import training_loss_without_penalties
from polyfed.simulation.engines.base import ClientTask, Engine, TaskResult, place_clients


@final
class InProcessEngine(Engine):
    """Runs tasks one after the other in this process, so that a debugger and tracebacks reach the client's code.

    Args:
        algorithm, clients, device: what is computed, for whom, and where. Clients of a mapping are made for each task.
        metrics: computed at evaluation; empty takes the default ones of the task.
        compression: of replies; None sends them uncompressed.
    """

    def __init__(
        self,
        algorithm: Algorithm[Any, Any],
        clients: Sequence[Client] | Mapping[str, Client],
        device: torch.device,
        metrics: Sequence[Metric] = (),
        compression: Compressor | None = None,
    ) -> None:
        make_malloc_keep_freed_memory()
        self._algorithm, self._device, self._metrics = algorithm, device, tuple(metrics)
        self._compression = compression
        self._clients = place_clients(clients, device)

    def run(self, tasks: Sequence[ClientTask]) -> Iterator[TaskResult]:
        """Runs the tasks in order, and yields each result, with a client's error in `failure`.

        An exception of the method or of a client's network becomes a failure with round, client and phase, and with
        the exception as its cause.
        """
        algorithm = self._algorithm
        for task in tasks:
            start = time.perf_counter()
            try:
                client = self._clients[task.client]
                # Networks and methods may draw from torch's global generator.
                adapted_message = cut_message_to_client_rank_within_block(algorithm, client, task.message)
                with grad_enabled(), temporary_rng_seed(task.seed, self._device), adapted_message as message:
                    client_state = task.start_state(algorithm, client)
                    if task.phase == "local":
                        reply, client_state = _check_is_pair(
                            algorithm, algorithm.local_update(message, client_state, client, task.seed)
                        )
                        reply = fold_adapter_scales_into_reply(algorithm, client, reply)
                        check_serializable(client_state, f"{type(algorithm).__name__}: the private state")
                        _check_finite(algorithm, reply, client_state)
                        if not message_error(reply):  # an invalid reply is rejected later, unchanged
                            if self._compression is not None:
                                reply = compress_message(reply, task.message, self._compression, task.reply_seed)
                            reply = contiguous_message(reply)
                        result = TaskResult(task, reply=reply, client_state=as_contiguous(client_state))
                    else:
                        model = algorithm.personal_model(message, client_state, client, task.seed)
                        _check_is_network(algorithm, model)
                        model = restore_all_but_weights_and_set_eval(model)
                        if task.phase == "export":
                            description = None
                            if isinstance(algorithm, BringsNetwork):
                                description = algorithm.describe_personal_network(model, client)
                            weights = {n: t.detach().to("cpu", copy=True) for n, t in model.state_dict().items()}
                            result = TaskResult(task, weights=weights, description=description)
                        else:
                            loss = training_loss_without_penalties(client, algorithm)
                            metrics, outputs = self._evaluate(model, client, task, message, client_state, loss)
                            others = algorithm.other_models(message, client_state, client, task.seed)
                            for name, other_model in (_check_is_named_network(algorithm, pair) for pair in others):
                                metrics |= evaluate_client_with_outputs(
                                    restore_all_but_weights_and_set_eval(other_model),
                                    client,
                                    self._metrics,
                                    f"{name}_",
                                    loss,
                                )[0]
                            result = TaskResult(task, metrics=metrics, predictions=outputs)
            except Exception as error:  # whatever a user's network or data may raise is reported, never swallowed
                text = str(error) if isinstance(error, UserError) else describe_exception(error)
                reason = f"{text}{_list_names_of_state(error, task)}"
                failure = ClientError(task.round, task.client, task.phase, reason, traceback.format_exc())
                failure.__cause__ = error
                result = TaskResult(task, failure=failure)
            client = None  # type: ignore[assignment]  # one that was made for this task is dropped before the next is made
            yield replace(result, seconds=time.perf_counter() - start)

    def _evaluate(
        self, model: torch.nn.Module, client: Client, task: ClientTask, message: Message, client_state: Any, loss: Loss
    ) -> tuple[MetricValues, dict[str, Tensor]]:
        """Evaluates a client's personal network; returns its metrics, and its outputs by split.

        If the method fits the network to validation examples, each of these gets the output of a network fitted
        without it.
        """
        algorithm = self._algorithm
        if "fits_validation" not in algorithm.traits or client.val is None:
            return evaluate_client_with_outputs(model, client, self._metrics, loss=loss)
        metrics, outputs = evaluate_client_with_outputs(model, replace(client, val=None), self._metrics, loss=loss)

        def personal(owner: Client) -> torch.nn.Module:
            return restore_all_but_weights_and_set_eval(
                algorithm.personal_model(message, client_state, owner, task.seed)
            )

        val_outputs = out_of_fold_outputs(personal, client)
        targets = client.val.labels.cpu()
        row = compute_metrics(val_outputs, targets, client.task, self._metrics, loss)
        stored = client.task.stored_outputs(val_outputs, targets, self._metrics)
        return metrics | {f"val_{name}": value for name, value in row.items()}, outputs | {"val": stored}

    def predict(self, task: ClientTask, examples: Examples) -> torch.Tensor:
        """Returns the outputs of a client's personal network for these examples, computed as in an evaluation.

        Returns:
            float32 on the CPU, shape (n, ...).

        Raises:
            ClientError: the network or the method fails.
        """
        client = self._clients[task.client]
        try:
            with (
                temporary_rng_seed(task.seed, self._device),
                cut_message_to_client_rank_within_block(self._algorithm, client, task.message) as message,
            ):
                client_state = task.start_state(self._algorithm, client)
                model = restore_all_but_weights_and_set_eval(
                    self._algorithm.personal_model(message, client_state, client, task.seed)
                )
                return predict(client.task.prediction_network(model), examples.to(self._device))
        except Exception as error:  # as in `run`
            reason = describe_exception(error)
            raise ClientError(task.round, task.client, "predict", reason, traceback.format_exc()) from error


def _check_is_pair(algorithm: Any, returned: Any) -> tuple[Any, Any]:
    """Returns what `local_update` returned; raises a `TypeError` unless it is a pair of a reply and a state."""
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    kind_of_returned = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else type(returned).__name__
    raise TypeError(
        f"{type(algorithm).__name__}.local_update must return two things, the reply and the client's new private state "
        f"(`return reply, client_state`), got {kind_of_returned}"
    )


def _check_is_network(algorithm: Any, returned: Any) -> None:
    """Raises a `TypeError` if what `personal_model` returned is not a network."""
    if not isinstance(returned, torch.nn.Module):
        raise TypeError(
            f"{type(algorithm).__name__}.personal_model must return a torch.nn.Module, got {type(returned).__name__}"
        )


def _check_is_named_network(algorithm: Any, pair: Any) -> tuple[str, torch.nn.Module]:
    """Returns what `other_models` yielded; raises a `TypeError` unless it is a name and a network."""
    if isinstance(pair, tuple) and list(map(isinstance, pair, (str, torch.nn.Module))) == [True, True]:
        return pair
    raise TypeError(
        f"{type(algorithm).__name__}.other_models must yield a name and a torch.nn.Module, as in `yield 'server', network`, "
        f"got {type(pair).__name__}"
    )


def _list_names_of_state(error: Exception, task: ClientTask) -> str:
    """Returns the end of an error about a name that a message or a private state lacks: the names that they have."""
    if not isinstance(error, KeyError):
        return ""
    names = {"groups": task.message.tensors, "scalars": task.message.scalars, "private state": task.client_state or ()}
    return "; " + ", ".join(f"{part}: {' '.join(sorted(values)) or 'none'}" for part, values in names.items())


def _check_finite(algorithm: Algorithm[Any, Any], reply: Any, client_state: PyTree) -> None:
    """Checks that a built-in method has left no NaN or infinite values in a client's private state.

    A network that stays with its client may diverge while everything it sends is finite. A run never resumes from such
    a state (see `StateValidator`), so none may create one. Methods of your own may keep what they like.

    Raises:
        FloatingPointError: the private state has NaN or infinite values.
    """
    if type(algorithm) not in REGISTRY.values() or message_error(reply) or nonfinite_state_error(dict(reply.scalars)):
        return  # an invalid reply is reported where replies are accepted
    if problem := nonfinite_state_error(client_state):
        raise FloatingPointError(
            f"the private state: {problem}; the local training diverged: lower lr or set clip_norm"
        )
