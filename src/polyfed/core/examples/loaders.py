"""Says what of a torch `DataLoader` is taken, and refuses loaders that choose among the examples of their data set."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from polyfed.core.errors import UserError


class LoaderParts(NamedTuple):
    """Holds the parts of a `DataLoader` that polyfed uses: its data set, and its collate_fn unless that is torch's own."""

    dataset: Any
    collate: Callable[[list[Any]], Any] | None


def read_data_loader(loader: DataLoader[Any], name: str) -> LoaderParts:
    """Returns the data set and the collate_fn of a loader, and warns that its batches do not count.

    Args:
        loader: a torch `DataLoader`.
        name: whose it is, for errors.

    Raises:
        UserError: a sampler of the user's own, or one that draws some examples.
    """
    sampler, size = loader.sampler, getattr(loader.dataset, "__len__", lambda: None)()
    draws_all = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == size
    )
    if size is not None and (not draws_all or type(loader.batch_sampler) not in (BatchSampler, type(None))):
        kind = type(sampler if not draws_all else loader.batch_sampler).__name__
        raise UserError(
            f"{name}: the DataLoader chooses its examples by a {kind}, which a client does not have; give the examples "
            "themselves, such as torch.utils.data.Subset(loader.dataset, indices)"
        )
    warnings.warn(
        "of a DataLoader its data set is taken, and its collate_fn; its batches, order and workers are not: a method draws "
        "its own minibatches (batch_size=... of the method). Give loader.dataset to say so",
        UserWarning,
        stacklevel=7,
    )
    is_torchs = loader.collate_fn in (default_collate, default_convert)
    return LoaderParts(loader.dataset, None if is_torchs else loader.collate_fn)
