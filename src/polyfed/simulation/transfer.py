"""Transfer of an architecture to a new task: a client's network of a FedPNAS run, adapted with few examples of it while the
samplers stay as they are (FedPNAS, section 4, Table 2)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from torch import nn

from polyfed.algorithms.searching import Searching, adapt, network
from polyfed.core.algorithm import Client
from polyfed.core.copies import deep_copy
from polyfed.core.criteria import trained_loss
from polyfed.core.errors import UserError, nearest
from polyfed.core.evaluation import Metrics, client_metrics
from polyfed.core.seeds import derive
from polyfed.core.threads import one_thread
from polyfed.simulation.checks import data_spec_of
from polyfed.simulation.runs.results import Run

Parts = Literal["personal", "all"]


@final
@dataclass(frozen=True, eq=False)
class Transfer:
    """What became of a new task.

    Attributes:
        before: score and loss on the new test examples of the client's network as it is.
        after: the same after the steps on the new training examples.
        model: the adapted network, a module of its own in evaluation mode on the CPU.
    """

    before: Metrics
    after: Metrics
    model: nn.Module


@one_thread()
def transfer(
    run: Run,
    like: str,
    task: Client,
    *,
    steps: int = 100,
    lr: float | None = None,
    parts: Parts = "all",
    seed: int = 0,
) -> Transfer:
    """Retrains the network of one client on a new task, the samplers frozen.

    Args:
        run: of `fedpnas`, `ca_fedpnas`, `feddsnas` or `ca_feddsnas`.
        like: id of the client whose network it is.
        task: the new task: few training examples (the paper has 200) and test examples, of the form of the run's.
        steps: minibatches (100, paper).
        lr: learning rate; None takes the method's.
        parts: "all" retrains the weights of both stacks ("the weights of each local model", section 4), "personal" those
            of the personal stack (authors' code).
        seed: of minibatches and samples.

    Raises:
        UserError: a run of another method, no such client, examples of another form, or labels that the run did not have.
    """
    method = _searching(run, like)
    if steps < 1:
        raise UserError(f"steps must be at least 1, got {steps}")
    client, before = run.federation.clients[like], run.model(like)
    _check_form(client, task, before)
    loss = trained_loss(task, method)
    scored = client_metrics(before, task, loss=loss)
    order = run.federation.one_task("export", like, run.kept)
    own: Mapping[str, Any] = method.client_init(client, order.run_seed) if order.own is None else order.own
    net = method.receive(order.down, dict(own), client)
    supernet = network(net)
    lr = method.lr if lr is None else lr
    if method.finetune_epochs:
        tuning = replace(method, local_epochs=method.finetune_epochs, local_steps=None)
        adapt(supernet, client, tuning, lr=order.down.scalars["lr"], seed=order.seed)
    few = replace(method, local_steps=steps)
    adapt(supernet, task, few, lr=lr, seed=derive(seed, "transfer"), samplers=False, base=parts == "all")
    adapted = method.taken(net, {}, task, order.seed)
    return Transfer(scored, client_metrics(adapted, task, loss=loss), deep_copy(adapted).to("cpu").eval())


@one_thread()
def adapted(run: Run, like: str, *, epochs: int = 1) -> Metrics:
    """Scores of a client's own network after a number of epochs of adaptation of its personal stack, whatever the run's
    `finetune_epochs` are: what FedDSNAS, which has no such phase, would score with that of FedPNAS. The run is not
    changed, and need not be made again: nothing that the clients sent depends on the adaptation.

    Args:
        run: of `fedpnas`, `ca_fedpnas`, `feddsnas` or `ca_feddsnas`.
        like: id of the client.
        epochs: 0 is no adaptation.

    Raises:
        UserError: a run of another method, no such client, or a negative number.
    """
    method = _searching(run, like)
    order = run.federation.one_task("export", like, run.kept)
    client = run.federation.clients[like]
    own = method.client_init(client, order.run_seed) if order.own is None else order.own
    tuned = replace(method, finetune_epochs=epochs)
    model = tuned.personal_model(order.down, dict(own), client, order.seed)
    return client_metrics(model, client, loss=trained_loss(client, method))


def _searching(run: Run, like: str) -> Searching:
    """The run's method, where it is a search and the run has such a client."""
    method = run.federation.algorithm
    if not isinstance(method, Searching):
        raise UserError(
            f"only an architecture search can be transferred, this run is of {type(method).__name__}; run fedpnas, "
            "ca_fedpnas, feddsnas or ca_feddsnas"
        )
    if like not in run.federation.clients:
        raise UserError(f"no client {like!r} in this run; {nearest(like, run.federation.clients)}")
    return method


def _check_form(client: Client, task: Client, model: nn.Module) -> None:
    here, there = data_spec_of(client), data_spec_of(task)
    if here.inputs != there.inputs or client.task != task.task:
        raise UserError(
            f"the new task has inputs {there.inputs} ({task.task}), but the run's network takes {here.inputs} "
            f"({client.task})"
        )
    with torch.no_grad():
        outputs = model(torch.zeros(1, *here.inputs)).shape[1]
    if there.outputs > outputs:
        raise UserError(f"the new task has label {there.outputs - 1}, but the run's network has {outputs} outputs")
