"""Checks that a run can be trained with differential privacy, and computes the ε that each client has spent."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from polyfed.algorithms import REGISTRY
from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import named_leaves
from polyfed.core.nn.module_cache import cached_module
from polyfed.core.seeds import temporary_rng_seed, torch_generator
from polyfed.core.tasks.task_lookup import has_elementwise_loss
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.privacy.private_backend import number_of_units
from polyfed.data.tabular.preprocessing import TablePreprocessor
from polyfed.simulation.checks.networks.trial_forward import name_of_buffer_from_examples


def check_and_complete_privacy(
    algorithm: Algorithm[Any, Any], clients: Sequence[Client], rounds: int
) -> Algorithm[Any, Any]:
    """Returns the method with the number of steps of the run in its `privacy`, or the method itself if it has none.

    Raises:
        UserError: a method, an option, a network or a task that noise on gradients does not cover, or an ε that no noise
            gives.
    """
    if not isinstance(algorithm, LocalTraining) or algorithm.privacy is None:
        return algorithm
    check_privacy_covers_method(algorithm, [client.id for client in clients])
    for client in clients:
        check_privacy_suits_client(client, algorithm)
    private = algorithm.with_privacy_of_run(rounds)
    for client in clients:
        try:
            epsilon_spent(private, client, 1.0)
        except UserError as error:  # no noise gives the ε
            raise UserError(f"client {client.id!r}: {error}") from error
    _warn_of_large_delta(clients, private)
    if any(isinstance(client.train.transform, TablePreprocessor) for client in clients):
        warnings.warn(
            "privacy: means and spreads of the tables' columns are computed without noise; epsilon does not cover them",
            RuntimeWarning,
            stacklevel=2,
        )
    return private


def _warn_of_large_delta(clients: Sequence[Client], algorithm: LocalTraining) -> None:
    """Warns if δ is so large that training may publish one of a client's units as it is."""
    assert algorithm.privacy is not None
    delta = algorithm.privacy.delta
    sizes = {client.id: number_of_units(client.train, algorithm.privacy) for client in clients}
    if exposed := next((i for i, size in sizes.items() if delta * size >= 1), None):
        kind = "examples" if algorithm.privacy.unit == "example" else "groups"
        warnings.warn(
            f"privacy: delta={delta:g} is not below one over the {sizes[exposed]} {kind} of client {exposed!r}, so that "
            "one of them may come out unprotected; take a smaller delta",
            RuntimeWarning,
            stacklevel=3,
        )


def check_privacy_covers_method(algorithm: LocalTraining, client_ids: Iterable[str]) -> None:
    """Raises a `UserError` if a method or its options use training examples beyond gradients with noise."""
    if not algorithm.private_fits:
        able = [n for n, method in REGISTRY.items() if getattr(method, "private_fits", ())]
        raise UserError(
            f"{type(algorithm).__name__}: privacy is not known to cover all that this method computes from training "
            f"examples; methods that it covers: {', '.join(able)}"
        )
    # Of `Local`.
    options_for: Callable[[str], LocalTraining] = getattr(algorithm, "options_for", lambda client: algorithm)
    for client_id in client_ids:
        _check_options(options_for(client_id))


def epsilon_spent(algorithm: LocalTraining, client: Client, share_of_run: float) -> float:
    """Returns the ε of a client's units after a share of the run, from 0 to 1, as if it took part in every round."""
    assert algorithm.privacy is not None
    rate = algorithm.sampling_rate(number_of_units(client.train, algorithm.privacy))
    return algorithm.privacy.epsilon_after(rate, share_of_run)


def describe_epsilon(algorithm: Algorithm[Any, Any], clients: Iterable[Client], share_of_run: float) -> dict[str, Any]:
    """Returns `{"epsilon": {client: ε}}` after a share of the run, for a round's record; empty without privacy."""
    if not isinstance(algorithm, LocalTraining) or algorithm.privacy is None:
        return {}
    spent = {client.id: round(epsilon_spent(algorithm, client, share_of_run), 4) for client in clients}
    return {"epsilon": spent} if spent else {}  # between real sites the server does not know it


def _check_options(options: LocalTraining) -> None:
    allowed_values = {"patience": None, "sampler": "shuffle", "class_weights": None, "accumulate": 1}
    for field, allowed in allowed_values.items():
        if (value := getattr(options, field)) != allowed:
            raise UserError(
                f"{type(options).__name__}: privacy does not cover {field}={value!r}, which depends on the examples; leave "
                "it out"
            )


def check_privacy_suits_client(client: Client, algorithm: LocalTraining) -> None:
    """Raises a `UserError` if a client's task, examples or network do not allow private training."""
    assert algorithm.privacy is not None
    if not has_elementwise_loss(client.task):
        raise UserError(
            f"client {client.id!r}: privacy needs a loss that is a mean over examples, and that of {client.task} is not"
        )
    if algorithm.privacy.unit == "group" and client.train.group is None:
        raise UserError(
            f"client {client.id!r}: privacy with unit 'group' needs to know which rows belong to one; give group=, or "
            "unit='example'"
        )
    rows = [] if client.train.index is None else client.train.index.tolist()
    if algorithm.privacy.unit == "example" and (repeated := len(rows) - len(set(rows))):
        raise UserError(
            f"client {client.id!r}: {repeated} training examples are there more than once, each of "
            "which would count as an example of its own; give each once, or the same group= and unit='group'"
        )
    if _mixes_examples(client.train):
        raise UserError(
            f"client {client.id!r}: transform or augment mixes the examples of a minibatch, so that clipping one example's "
            "gradient does not bound what it changes; compute each row from itself, and means from other data beforehand"
        )
    if client.model is None:
        return
    module = cached_module(client.model).module
    for layer_name, layer in module.named_modules():
        if isinstance(layer, _NormBase) and (layer.track_running_stats or "Batch" in type(layer).__name__):
            raise UserError(
                f"client {client.id!r}: {layer_name} ({type(layer).__name__}) mixes the examples of a minibatch, so that no "
                "example's gradient can be told from the others'; replace it by torch.nn.GroupNorm"
            )
    if name := name_of_buffer_from_examples(module, client.train):
        raise UserError(
            f"client {client.id!r}: its network computes the buffer {name!r} from the examples, which leaves the client and "
            "has no noise; take it out of the network, or compute it from weights alone"
        )


def _mixes_examples(examples: Examples) -> bool:
    """Returns whether an example's input depends on others in the minibatch; False if it cannot be told.

    It cannot where an augmentation draws from a generator that is not torch's.
    """
    among_others = torch.arange(min(8, len(examples)), device=examples.device)
    alone = torch.zeros_like(among_others)
    return any(  # a random permutation may leave the first example in its place
        not _has_same_first_input(examples, alone, among_others, seed)
        and _has_same_first_input(examples, alone, alone, seed)
        for seed in range(4)
    )


def _has_same_first_input(examples: Examples, rows: Tensor, other_rows: Tensor, seed: int) -> bool:
    """Returns whether the first inputs of two minibatches, augmented with the same seed, are alike."""
    batches = []
    for positions in (rows, other_rows):
        with temporary_rng_seed(seed):  # of augmentations that draw from torch's default generator
            batches.append(named_leaves(examples.batch(positions, torch_generator(seed))[0]))
    return all(
        a.shape == b.shape and torch.allclose(a[0], b[0], rtol=1e-4, atol=1e-5, equal_nan=True)
        for (_, a), (_, b) in zip(*batches, strict=True)
    )
