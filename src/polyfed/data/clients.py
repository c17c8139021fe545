"""From a pool to clients: partition, split and shift, without copying the data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.examples import Examples
from polyfed.core.seeds import derive
from polyfed.data.partitions import Partition
from polyfed.data.pool import Pool
from polyfed.data.shifts import Shift
from polyfed.data.split import ClientRows, Split, split, stratified


@final
@dataclass(frozen=True, eq=False)
class ClientData:
    """What one client owns.

    Args:
        id: what the partition calls it: "client-000" and so on, or its value in a column of the data.
        train: training examples.
        test: the client's own test set, with the distribution of `train`; empty if the split leaves none.
        val: validation set with the same distribution; None if the split has none.
        global_test: examples of the source's common test set, the same for all clients; None if not asked for.
        rows: the rows of the pool that these are.
    """

    id: str
    train: Examples
    test: Examples
    val: Examples | None
    global_test: Examples | None
    rows: ClientRows


def make_clients(
    pool: Pool,
    config: Split,
    partition: Partition,
    seed: int,
    shifts: Sequence[Shift] = (),
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
) -> tuple[list[ClientData], Examples | None]:
    """The clients of a simulation, and the public pool.

    All examples are views of the pool's store, so that 500 clients need no more memory than the data set; only those
    with a shift have a store of their own. They have the pool's columns.

    Args:
        pool: the data set.
        config: number and sizes.
        partition: who owns what.
        seed: of every random choice.
        shifts: transformations, dealt to the clients in turn (the sixth client of five shifts has the first); all that
            the client sees is shifted, the common test set too. The public pool is not.
        augment: random change of training batches.

    Returns:
        The clients in order, and the public examples (None if `public_fraction` is 0).

    Raises:
        UserError: the partition or the split is impossible, or there is no common test set to draw from.

    >>> from polyfed.data.partitions import IID
    >>> from polyfed.data.vision import Digits
    >>> clients, public = make_clients(Digits().load(), Split(clients=6), IID(), seed=0)
    >>> clients[5].id, len(clients[5].train), len(clients[5].test), public
    ('client-005', 209, 90, None)
    """
    rows, public = split(pool.train.labels.numpy(), config, partition, seed, pool.columns)
    train = pool.train
    if pool.columns and train.index is None and train.columns is None:
        train = replace(train, columns=pool.columns)
    common = _global_test(pool, config.global_test, seed)
    clients = []
    for i, own in enumerate(rows):
        shift = shifts[i % len(shifts)] if shifts else Shift()
        clients.append(
            ClientData(
                id=own.id,
                train=replace(shift.apply(_select(train, own.train)), augment=augment),
                test=shift.apply(_select(train, own.test)),
                val=shift.apply(_select(train, own.val)) if len(own.val) else None,
                global_test=None if common is None else shift.apply(common),
                rows=own,
            )
        )
    return clients, _select(pool.train, public) if len(public) else None


def _global_test(pool: Pool, size: int, seed: int) -> Examples | None:
    if size == 0:
        return None
    if pool.test is None:
        raise UserError(
            f"global_test={size} needs a common test set, which this data set does not have; set global_test to 0 or "
            "give one (digits: common_test; files: a test split)"
        )
    if size > len(pool.test):
        raise UserError(f"global_test={size} is more than the {len(pool.test)} examples of the common test set")
    if size == -1:
        return pool.test
    # The word decides the draw, so that it stays what it was: results that were measured can be measured again.
    return _select(pool.test, stratified(pool.test.labels.numpy(), size, derive(seed, "balanced_test")))


def _select(examples: Examples, rows: NDArray[Any]) -> Examples:
    return examples.select(torch.from_numpy(rows))
