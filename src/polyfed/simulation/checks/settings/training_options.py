"""Checks that clients have what the options of local training need."""

import fnmatch
from collections.abc import Sequence

from torch import nn

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.methods.declared_words import MODEL_REQUIREMENTS
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.losses import sampling_weights
from polyfed.simulation.checks.networks import trial_forward
from polyfed.simulation.checks.networks.network_layers import cached_module_of


def check_training_options(clients: Sequence[Client], options: LocalTraining) -> None:
    """Raises a `UserError` if a client lacks what its options need, such as validation examples.

    Raises:
        UserError: no validation examples to stop by, no classes to weight, no column of weights, or no parameter with a
            name for which a learning rate is given.
    """
    for client in clients:
        if options.patience is not None and client.val is None:
            raise UserError(
                f"patience={options.patience} needs validation examples, and client {client.id!r} has none: give clients "
                "val=..., or --data.val-fraction"
            )
        try:
            options.criterion(client)
            sampling_weights(client.train, client.task, options.sampler)
        except UserError as error:
            raise UserError(f"client {client.id!r}: {error}") from error
    if not getattr(options, "requires", MODEL_REQUIREMENTS) & MODEL_REQUIREMENTS:
        return
    if isinstance(options.class_weights, tuple):
        _check_number_of_class_weights(clients, options.class_weights)
    if not options.lr_by_name:
        return
    nets = {id(client.model): cached_module_of(client) for client in clients if client.model is not None}
    named = (pair for net in nets.values() for pair in net.module.named_parameters(remove_duplicate=False))
    names = sorted({name for name, parameter in named if parameter.requires_grad})
    for pattern in options.lr_by_name:
        if not fnmatch.filter(names, pattern):
            raise UserError(
                f"lr_by_name: no trained parameter of any client's network is named like {pattern!r}; "
                f"{did_you_mean(pattern, names)}"
            )


def _check_number_of_class_weights(clients: Sequence[Client], class_weights: tuple[float, ...]) -> None:
    client_by_network: dict[nn.Module, Client] = {}
    for client in clients:
        if client.model is not None:
            client_by_network.setdefault(cached_module_of(client).module, client)
    for module, client in client_by_network.items():
        shape = trial_forward.output_shape(module, client.train, f"client {client.id!r}")
        if (number := shape[client.task.output_axis - 1]) != len(class_weights):
            raise UserError(
                f"class_weights has {len(class_weights)} numbers, but the network of client {client.id!r} has {number} "
                "outputs; give one each"
            )
