"""Computes networks' representations of many examples, in batches without gradients, or with gradients in the memory of
one batch."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyfed.core.algorithm import Client
from polyfed.core.examples.examples import Examples, Normalise, split_into_batches
from polyfed.core.nn.memory_format import to_preferred_memory_format
from polyfed.core.nn.module_cache import cached_module
from polyfed.core.seeds import torch_generator
from polyfed.core.vectorized.stacked_module import CannotStackError, StackedNetworks
from polyfed.models.structure import compute_batch_representation, find_representation_module

_BATCH = 256


def compute_representations(
    model: nn.Module, examples: Examples, *, module: str | None = None, batch_statistics: bool = False
) -> Tensor:
    """Returns the inputs of the last linear layer or `module` for all examples: float32, CPU, (n, width).

    A = Φ(X; W). The model runs in evaluation mode, without dropout.

    Args:
        model: any network.
        examples: the examples; their labels are not used.
        module: name of the module whose input is the representation; None finds the last nn.Linear.
        batch_statistics: BatchNorm normalises by the statistics of each batch of 256 examples instead of its running ones.

    Raises:
        UserError: the model has no such module, or no nn.Linear.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> compute_representations(net, Examples(torch.ones(5, 4), torch.zeros(5))).shape
    torch.Size([5, 8])
    """
    name = representation_module_name(model, examples) if module is None else module
    batches = []
    with torch.no_grad():
        # In a fixed shuffled order: with examples sorted by class, batch statistics would remove the class.
        order = torch.randperm(len(examples), generator=torch_generator(0))
        for rows in split_into_batches(order.to(examples.device), _BATCH, at_least_two=True):
            x = to_preferred_memory_format(model, examples.batch(rows)[0])
            batches.append(
                compute_batch_representation(model, x, module=name, batch_statistics=batch_statistics).float().cpu()
            )
    return torch.cat(batches)[order.argsort()]


def differentiable_representations(model: nn.Module, examples: Examples, rows: Tensor, module: str) -> Tensor:
    """Returns the representations at `rows` on the network's device, with gradients.

    Returns shape (number, width); for a stack of k networks, each with its own rows (k, number), shape (k, number,
    width).

    BatchNorm normalises by the batch, as in training: with running statistics, which have no gradient, the term would
    align a function that training does not see, and accuracy would collapse.

    If there is more than one batch, each runs again in the backward pass, so that only the activations of one batch are in
    memory: all 5,000 rows of the paper's RAD would need gigabytes.
    """
    places = split_into_batches(
        torch.arange(rows.shape[-1]), representation_batch_size(rows.shape[-1]), at_least_two=True
    )
    batches = torch.split(rows, [len(some) for some in places], dim=-1)

    def run_batch(batch: Tensor) -> Tensor:
        if isinstance(model, StackedNetworks):
            return _stacked_representations(model, examples, batch, module)
        x = to_preferred_memory_format(model, examples.batch(batch)[0])
        return compute_batch_representation(model, x, module=module, batch_statistics=True)

    run = (
        run_batch
        if len(batches) == 1
        else partial(checkpoint, run_batch, use_reentrant=False, preserve_rng_state=False)
    )
    return torch.cat([run(batch) for batch in batches], dim=-2)


def representation_batch_size(num_examples: int) -> int:
    """Returns how many of `num_examples` examples `differentiable_representations` passes through a network at once."""
    return min(num_examples, _BATCH if num_examples <= _BATCH else _BATCH // 2)


def _stacked_representations(networks: StackedNetworks, examples: Examples, rows: Tensor, module: str) -> Tensor:
    if examples.transform is None or isinstance(examples.transform, Normalise):
        x = examples.batch(rows.flatten())[0]
    else:  # the transform may depend on all examples of its batch
        x = torch.cat([examples.batch(mine)[0] for mine in rows])
    real, networks.valid_rows = networks.valid_rows, None  # the minibatch's mask; here clients have equally many rows
    try:
        features = compute_batch_representation(
            networks, x, module=f"module.{module}" if module else "module", batch_statistics=True
        )
    finally:
        networks.valid_rows = real
    if len(features) != rows.numel():
        raise CannotStackError(f"the input of {module!r} does not have one row for each example")
    return features.view(*rows.shape, -1)


def representation_module_name(model: nn.Module, examples: Examples) -> str:
    """Returns the module whose input is the representation, by running one example."""
    first_example = examples.batch(torch.zeros(1, dtype=torch.int64, device=examples.device))[0]
    return find_representation_module(model, to_preferred_memory_format(model, first_example))


def check_has_representation(client: Client, module: str | None) -> None:
    """Raises a `UserError` if `module` gets no input or, without one, there is no last nn.Linear."""
    assert client.model is not None
    compute_representations(cached_module(client.model, client.train.device).module, client.train.head(), module=module)
