"""Transfers a searched architecture to a new task: retrains a client's network of a FedPNAS run on a few examples of the
task, with the architecture samplers frozen (FedPNAS, section 4, Table 2)."""

from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from torch import nn

from polyfed.algorithms.nas.supernet_method import SupernetMethod, adapt_personal_stack, supernet_of
from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.evaluation.evaluate import MetricValues, evaluate_client
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.deep_copy import deep_copy
from polyfed.core.seeds import derive_seed
from polyfed.core.training.client_loss import training_loss_without_penalties
from polyfed.simulation.checks.requirements import client_data_spec
from polyfed.simulation.results.run import Run

Parts = Literal["personal", "all"]


@final
@dataclass(frozen=True, eq=False)
class TransferResult:
    """Holds a network that was transferred to a new task, and its scores on the task before and after retraining.

    Attributes:
        scores_before_retraining: score and loss of the client's network on the new task's test examples.
        scores_after_retraining: the same after retraining on the new training examples.
        model: the retrained network, independent of the run, in evaluation mode on the CPU.
    """

    scores_before_retraining: MetricValues
    scores_after_retraining: MetricValues
    model: nn.Module


@exclusive_single_torch_thread_with_grad()
def transfer_network(
    run: Run,
    client_id: str,
    task: Client,
    *,
    steps: int = 100,
    lr: float | None = None,
    parts: Parts = "all",
    seed: int = 0,
) -> TransferResult:
    """Retrains a client's searched network on a new task, with the samplers frozen.

    Args:
        run: of `fedpnas`, `ca_fedpnas`, `feddsnas` or `ca_feddsnas`.
        client_id: the client whose network is retrained.
        task: the new task: few training examples (the paper has 200) and test examples, of the form of the run's.
        steps: number of minibatches (100, paper).
        lr: learning rate; None takes the method's.
        parts: "all" retrains the weights of both stacks ("the weights of each local model", section 4), "personal" those
            of the personal stack (authors' code).
        seed: of minibatches and samples.

    Raises:
        UserError: a run of another method, no such client, examples of another form, or labels that the run did not have.
    """
    method = _require_search_method(run, client_id)
    if steps < 1:
        raise UserError(f"steps must be at least 1, got {steps}")
    client, before = run.federation.clients[client_id], run.model(client_id)
    _check_task_fits(client, task, before)
    loss = training_loss_without_penalties(task, method)
    metrics_before = evaluate_client(before, task, loss=loss)
    export_task = run.federation.build_single_task("export", client_id, run.kept_checkpoint)
    client_state = dict(export_task.start_state(method, client))
    client_network = method.load_supernet(export_task.message, client_state, client)
    supernet = supernet_of(client_network)
    lr = method.lr if lr is None else lr
    if method.finetune_epochs:
        tuning = replace(method, local_epochs=method.finetune_epochs, local_steps=None)
        adapt_personal_stack(supernet, client, tuning, lr=export_task.message.scalars["lr"], seed=export_task.seed)
    transfer_method = replace(method, local_steps=steps)
    adapt_personal_stack(
        supernet,
        task,
        transfer_method,
        lr=lr,
        seed=derive_seed(seed, "transfer"),
        trains_samplers=False,
        trains_base_stack=parts == "all",
    )
    adapted_network = method.derive_network(client_network, {}, task, export_task.seed)
    return TransferResult(
        metrics_before, evaluate_client(adapted_network, task, loss=loss), deep_copy(adapted_network).to("cpu").eval()
    )


@exclusive_single_torch_thread_with_grad()
def score_after_adaptation(run: Run, client_id: str, *, epochs: int = 1) -> MetricValues:
    """Returns a client's scores after some epochs of training its personal layers.

    `epochs` replaces the run's `finetune_epochs`: it shows what FedDSNAS, which has no such phase, would score with
    that of FedPNAS. The run is not changed and need not be repeated: nothing that the clients sent depends on the
    adaptation.

    Args:
        run: of `fedpnas`, `ca_fedpnas`, `feddsnas` or `ca_feddsnas`.
        client_id: id of the client.
        epochs: 0 leaves the network as it is.

    Raises:
        UserError: a run of another method, no such client, or a negative number.
    """
    method = _require_search_method(run, client_id)
    export_task = run.federation.build_single_task("export", client_id, run.kept_checkpoint)
    client = run.federation.clients[client_id]
    client_state, tuning_method = dict(export_task.start_state(method, client)), replace(method, finetune_epochs=epochs)
    model = tuning_method.personal_model(export_task.message, client_state, client, export_task.seed)
    return evaluate_client(model, client, loss=training_loss_without_penalties(client, method))


def _require_search_method(run: Run, client_id: str) -> SupernetMethod:
    """Returns the method of a run; raises a `UserError` if it searches no architecture, or the run has no such client."""
    method = run.federation.algorithm
    if not isinstance(method, SupernetMethod):
        raise UserError(
            f"only an architecture search can be transferred, this run is of {type(method).__name__}; run fedpnas, "
            "ca_fedpnas, feddsnas or ca_feddsnas"
        )
    if client_id not in run.federation.clients:
        raise UserError(f"no client {client_id!r} in this run; {did_you_mean(client_id, run.federation.clients)}")
    return method


def _check_task_fits(client: Client, task: Client, model: nn.Module) -> None:
    """Raises a `UserError` unless a new task has the same form of inputs, and an output for each label."""
    run_spec, new_spec = client_data_spec(client), client_data_spec(task)
    if run_spec.inputs != new_spec.inputs or client.task != task.task:
        raise UserError(
            f"the new task has inputs {new_spec.inputs} ({task.task}), but the run's network takes {run_spec.inputs} "
            f"({client.task})"
        )
    with torch.no_grad():
        outputs = model(torch.zeros(1, *run_spec.inputs)).shape[1]
    if new_spec.outputs > outputs:
        raise UserError(f"the new task has label {new_spec.outputs - 1}, but the run's network has {outputs} outputs")
