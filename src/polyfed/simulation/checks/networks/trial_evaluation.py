"""Tests a user's own losses and metrics before the first round, by computing each once."""

from collections.abc import Sequence

import torch
from torch import nn

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.metrics import is_built_in_metric
from polyfed.core.examples.pytree import call_network, logits_of
from polyfed.core.nn.deep_copy import deep_copy
from polyfed.core.nn.grad_mode import grad_enabled
from polyfed.core.seeds import temporary_rng_seed
from polyfed.core.tasks.task import Loss
from polyfed.core.tasks.task_registry import registered_task_classes
from polyfed.core.training.losses import build_loss, check_is_one_number, describe_failed_loss
from polyfed.simulation.checks.networks.network_layers import cached_module_of

_TRIED = 32  # examples


def check_losses_and_metrics_work(clients: Sequence[Client], metrics: Sequence[Metric]) -> None:
    """Computes the user's losses and metrics on outputs of untrained networks, so that none fails in or after a round.

    Raises:
        UserError: a loss or a metric fails, or returns no number, or a loss has no gradient.
    """
    # One of a kind is tried, the first: losses that differ by client, as in their class weights, would take a pass for each.
    backwards = list(reversed(clients))
    own_tasks = {c.task: c for c in backwards if type(c.task) not in registered_task_classes().values()}
    own_losses = {_kind_of_loss(c.loss): c for c in backwards if c.loss is not None}
    for client in (*own_tasks.values(), *own_losses.values()):
        if client.model is not None:
            _check_loss_works(client)
    _check_metrics_work(clients[0], metrics)


def _kind_of_loss(loss: Loss) -> object:
    """Returns what losses of one kind share: the class of a module, the function of a partial one, or the loss itself."""
    return type(loss) if isinstance(loss, nn.Module) else id(getattr(loss, "func", loss))


@grad_enabled()
def _check_loss_works(client: Client) -> None:
    x, targets = client.train.batch(torch.arange(min(_TRIED, len(client.train))))
    whose = f"client {client.id!r}: its loss" if client.loss is not None else f"the loss of the task {client.task}"
    with temporary_rng_seed(0):
        outputs = logits_of(call_network(deep_copy(cached_module_of(client).module).train(), x))
        try:
            value = build_loss(client.train, client.task, client.loss)(outputs, targets)
        except UserError as error:
            raise UserError(f"client {client.id!r}: {error}") from error
        except Exception as error:  # whatever the loss of the user's task raises
            raise UserError(f"{whose} {describe_failed_loss(outputs, targets, error)}") from error
    check_is_one_number(value, whose)
    if not value.requires_grad:
        raise UserError(f"{whose} has no gradient, so that nothing can be trained; compute it of the outputs, without "
                        "detach(), argmax() or NumPy")  # fmt: skip


def _check_metrics_work(client: Client, metrics: Sequence[Metric]) -> None:
    """Computes the user's metrics on an untrained network's outputs, so that none fails after a round.

    Raises:
        UserError: a metric fails, or returns no number.
    """
    own_metrics = [m for m in metrics if not client.task.find_metric(m.name) and not is_built_in_metric(m.name)]
    if not own_metrics or client.model is None:
        return
    with temporary_rng_seed(0):
        outputs = predict(client.task.prediction_network(deep_copy(cached_module_of(client).module)), client.test)
    for metric in own_metrics:
        metric(outputs, client.test.labels.cpu())
