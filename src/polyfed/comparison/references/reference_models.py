"""Trains reference models that show whether a federated network is worth its cost: a constant, simple models, and a
network on the pooled data of all clients.

For simulations only: they need all clients' examples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from polyfed.algorithms import Local
from polyfed.comparison.references.simple_models import fit_pooled_simple_models, fit_simple_models
from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.evaluation.simple_model import ConstantModel, Floats
from polyfed.core.examples.examples import Examples
from polyfed.core.nn.module_cache import build_module
from polyfed.core.training.config import TRANSFERABLE_FIELDS, LocalTraining
from polyfed.data.concat import concat_examples, concatenation_obstacle
from polyfed.simulation.checks import requirements
from polyfed.simulation.checks.clients.table_schemas import have_same_columns
from polyfed.simulation.federate import federate
from polyfed.simulation.monitoring.progress import SilentProgress


@final
@dataclass(frozen=True, eq=False)
class ReferenceModel:
    """Holds the name of a reference model, a sentence about it, and its outputs on each client's test examples.

    Args:
        name: "majority", "mean", "logistic_regression", "gradient_boosting", "ridge" or "pooled".
        sentence: a description for users.
        outputs: client id -> outputs on its test examples in their order, float32, shape (n, outputs), in the form of a
            network's: logits for classes and labels, values for regression.

    Raises:
        UserError: outputs of another form, or not finite.
    """

    name: str
    sentence: str
    outputs: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        for client, values in self.outputs.items():
            if values.dim() < 2 or values.dtype != torch.float32 or not bool(torch.isfinite(values).all()):
                raise UserError(
                    f"{self.name}: outputs for client {client!r} must be finite and float32, of shape (examples, outputs) "
                    f"or more, got {values.dtype} {tuple(values.shape)}"
                )


def fit_client_references(clients: Sequence[Client], *, seed: int = 0) -> tuple[list[ReferenceModel], tuple[str, ...]]:
    """Fits a constant and simple models on each client's data; returns them, and why others were left out.

    Each client has its own, as if it were alone. The constant is the share of each class or label, or the mean, of its
    training examples. Simple models are fitted on its training and validation examples (module `simple_models`): logistic
    regression (one a label where there are several) or ridge regression, on standardised inputs, and gradient-boosted trees.

    Args:
        clients: of one task. Classes are as many as the largest label of all clients asks for.
        seed: of cross-validation and trees.

    Returns:
        The constant first. Inputs that are not floats of shape (n, features), images and tokens for instance, or that are
        not finite, have the constant alone.

    Raises:
        UserError: no clients, an id twice, or several tasks.

    >>> from polyfed.testing import small_clients
    >>> [reference.name for reference in fit_client_references(small_clients())[0]]
    ['majority', 'logistic_regression', 'gradient_boosting']
    """
    requirements.check_clients(clients)
    if any(c.loss is not None for c in clients):
        return [], (
            "Clients train by a loss of their own, which simple models do not minimise, so that none is an alternative.",
        )
    outputs = {c.id: requirements.num_outputs_needed(c) for c in clients}
    if clients[0].task.outputs_are_classes:
        outputs = dict.fromkeys(outputs, max(outputs.values()))
    simple_models = fit_simple_models(list(clients), outputs, seed)
    simple = [
        ReferenceModel(name, words, _as_float32(client_outputs))
        for name, (words, client_outputs) in simple_models.outputs_by_model.items()
    ]
    constant = clients[0].task.constant_model()
    constants = [] if constant is None else [_constant_reference(constant, clients, outputs)]
    return [*constants, *simple], simple_models.left_out_notes


def fit_pooled_references(clients: Sequence[Client], *, seed: int = 0) -> list[ReferenceModel]:
    """Fits to all clients' examples the simple models that the task wants so (Cox regression, say).

    Args:
        clients: of one task.
        seed: of cross-validation.

    Returns:
        Models named "pooled_" and the name of the simple model; empty for clients with a loss of their own, or inputs that
        are not rows of finite numbers of one length.
    """
    if any(client.loss is not None for client in clients):
        return []
    num_outputs = max(requirements.num_outputs_needed(client) for client in clients)
    return [
        ReferenceModel(f"pooled_{name}", sentence, _as_float32(outputs))
        for name, (sentence, outputs) in fit_pooled_simple_models(list(clients), num_outputs, seed).items()
    ]


def train_pooled_reference(
    clients: Sequence[Client], method: LocalTraining, *, rounds: int, seed: int
) -> ReferenceModel | None:
    """Trains one network per architecture on all clients' data; None if they cannot be pooled.

    Their score is what a method can hope for. It is not a strict upper bound: clients that differ much may do better with
    networks of their own. Each architecture is trained on the examples of all clients together, from the clients'
    initial weights, and scored on each client's test examples after the last round. This takes as long as `Local`
    does, once for each architecture.

    Args:
        clients: of one task.
        method: its local training is taken over. `local_steps`, if set, is multiplied by the number of clients, so that
            each example is seen as often as by `Local`.
        rounds, seed: as for `federate`.

    Returns:
        None where it is not defined: a client without a network, inputs of different form, several forms of labels, or a
            network without an output for a class that another client has.

    Raises:
        UserError: no clients, an id twice, several tasks, or a network that does not suit its data.
        ClientError: the training diverges.
    """
    requirements.check_clients(clients)
    train = _pool_training_examples(clients)
    if train is None or any(client.model is None for client in clients):
        return None
    requirements.check_networks_run(clients)
    task, architecture_of = clients[0].task, requirements.architecture_keys_by_client(clients)
    client_of_architecture = {architecture_of[c.id]: c for c in reversed(clients)}  # the first client of each
    placeholder_test = replace(train.select(torch.zeros(1, dtype=torch.int64, device=train.device)), group=None)
    if task.outputs_are_classes:
        networks = (
            build_module(c.model, seed=0).to(train.device)
            for c in client_of_architecture.values()
            if c.model is not None
        )
        if any(
            predict(network, placeholder_test).shape[task.output_axis] <= int(train.labels.max())
            for network in networks
        ):
            return None
    shared = {field: getattr(method, field) for field in TRANSFERABLE_FIELDS} | {"patience": None}
    if method.local_steps is not None:
        shared["local_steps"] = method.local_steps * len(clients)
    pooled_clients = [
        Client(kind, c.model, train, placeholder_test, task=task, loss=c.loss)
        for kind, c in sorted(client_of_architecture.items())
    ]
    run = federate(
        pooled_clients, Local(**shared), rounds=rounds, seed=seed, engine="inprocess", workers=0,
        evaluate_every=rounds, progress=SilentProgress(),
    )  # fmt: skip
    models = {kind: run.model(kind) for kind in client_of_architecture}
    networks_by_kind = {kind: task.prediction_network(model) for kind, model in models.items()}
    cpu = torch.device("cpu")
    outputs = {c.id: predict(networks_by_kind[architecture_of[c.id]], c.test.to(cpu)) for c in clients}
    sentence = (
        "the clients' networks, each trained on the training examples of all clients together, which nobody could have"
    )
    return ReferenceModel("pooled", sentence, outputs)


def _pool_training_examples(clients: Sequence[Client]) -> Examples | None:
    """Concatenates all training examples into one set; returns None if their forms differ."""
    sets = [client.train for client in clients]
    first = sets[0]
    if any(s.device != first.device or s.augment != first.augment for s in sets[1:]):
        return None
    # The same number of columns, but with another meaning.
    if any(not have_same_columns(first, client_set) for client_set in sets[1:]):
        return None
    if all(not concatenation_obstacle(first, client_set) for client_set in sets[1:]):
        return concat_examples(sets)
    # Each transformed by its own transform.
    ready = [Examples(*s.batch(torch.arange(len(s), device=s.device))) for s in sets]
    if first.augment is not None or any(concatenation_obstacle(ready[0], client_set) for client_set in ready[1:]):
        return None
    return concat_examples(ready)


# -- the constant model -----------------------------------------------------------------------------------------------------


def _constant_reference(model: ConstantModel, clients: Sequence[Client], outputs: Mapping[str, int]) -> ReferenceModel:
    """Builds the task's constant model from each client's own training targets."""
    rows = {
        client.id: np.tile(model.outputs(client.train.labels.cpu().numpy(), outputs[client.id]), (len(client.test), 1))
        for client in clients
    }
    sentence = f"gives every example the {model.content} in the client's own training examples, whatever the input"
    return ReferenceModel(model.name, sentence, _as_float32(rows))


def _as_float32(outputs: Mapping[str, Floats]) -> dict[str, Tensor]:
    return {client: torch.from_numpy(values.astype(np.float32)) for client, values in outputs.items()}
