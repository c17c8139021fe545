"""Builds the clients of a simulation from one data set, without copying examples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.seeds import derive_seed
from polyfed.data.formats.lazy_images import DecodeAndAugment, LazyImageDecoder
from polyfed.data.partitioning.allocation import draw_stratified_rows
from polyfed.data.partitioning.partitions import Partition
from polyfed.data.partitioning.split import ClientRows, Split, split_rows_by_client
from polyfed.data.pooled_dataset import PooledDataset
from polyfed.data.shifts import Shift
from polyfed.data.tabular.fit_preprocessor import fit_preprocessor
from polyfed.data.tabular.preprocessing import warn_of_changed_constants


@final
@dataclass(frozen=True, eq=False)
class ClientData:
    """Holds one client's training, validation and test examples, without a network.

    Args:
        id: the partition's name for it: "client-000" and so on, or its value in a column of the data.
        train: training examples.
        test: the client's own test set, with the distribution of `train`; empty if the split leaves none.
        val: validation set with the same distribution; None if the split has none.
        global_test: examples of the source's common test set, the same for all clients; None without one.
        rows: the rows of the pool that these examples are.
    """

    id: str
    train: Examples
    test: Examples
    val: Examples | None
    global_test: Examples | None
    rows: ClientRows


def make_clients(
    pool: PooledDataset,
    config: Split,
    partition: Partition,
    seed: int,
    shifts: Sequence[Shift] = (),
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
    fits_preprocessing: bool = True,
) -> tuple[list[ClientData], Examples | None]:
    """Divides a data set among simulated clients; returns them, and public examples or None.

    All examples are views of the pool's store, so that 500 clients need no more memory than the data set; only clients with
    a shift have a store of their own, and test and validation rows of a table, so that `client.test.x` are its own rows. The
    examples keep the pool's columns.

    Args:
        pool: the data set.
        config: number of clients, and sizes of their sets.
        partition: assigns examples to clients.
        seed: of every random choice.
        shifts: transformations, assigned to the clients in turn (the sixth client of five shifts has the first). All
            examples of the client are shifted, the common test set too; the public pool is not.
        augment: random change of training batches.
        fits_preprocessing: whether preprocessing that all sites of a table share is fitted here; if not, they must agree
            on it later
            (`polyfed.simulation.rounds.columns.federated_preprocessing.fit_common_preprocessing`).

    Returns:
        The clients in order, and the public examples (None if `public_fraction` is 0).

    Raises:
        UserError: the partition or the split is impossible, or there is no common test set to draw from.

    >>> from polyfed.data.partitioning.partitions import IID
    >>> from polyfed.data.sources.published.vision import Digits
    >>> clients, public = make_clients(Digits().load(), Split(clients=6), IID(), seed=0)
    >>> clients[5].id, len(clients[5].train), len(clients[5].test), public
    ('client-005', 209, 90, None)
    """
    strata = pool.task.strata(pool.train.labels)
    rows, public = split_rows_by_client(strata, config, partition, seed, pool.columns, pool.group, pool.time)
    train = pool.train
    if pool.columns and train.index is None and train.columns is None:
        by_time = config.choose_split_order(pool.time, pool.group) != "random"
        columns = {name: column for name, column in pool.columns.items() if by_time or name != pool.time}
        train = replace(train, columns=columns, group=pool.group, time=pool.time if by_time else None)
    if pool.preprocessor is not None:
        return _build_table_clients(train, rows, public, pool, config, shifts, fits_preprocessing)
    augmentation = augment
    if augment is not None and isinstance(train.transform, LazyImageDecoder):
        augmentation = DecodeAndAugment(train.transform, augment)
    common_test = _draw_global_test(pool, config.global_test, seed)
    classes = pool.num_outputs if pool.task.one_class_per_example else None
    clients = []
    for i, client_rows in enumerate(rows):
        shift = partial((shifts[i % len(shifts)] if shifts else Shift()).apply, num_classes=classes)
        clients.append(
            ClientData(
                id=client_rows.id,
                train=replace(shift(_select_rows(train, client_rows.train)), augment=augmentation),
                test=shift(_select_rows(train, client_rows.test)),
                val=shift(_select_rows(train, client_rows.val)) if len(client_rows.val) else None,
                global_test=None if common_test is None else shift(common_test),
                rows=client_rows,
            )
        )
    return clients, _select_rows(pool.train, public) if len(public) else None


def _build_table_clients(
    store: Examples,
    rows: Sequence[ClientRows],
    public: NDArray[Any],
    pool: PooledDataset,
    config: Split,
    shifts: Sequence[Shift],
    fits_preprocessing: bool,
) -> tuple[list[ClientData], Examples | None]:
    """Builds clients from a table, with preprocessing fitted to each one's training rows or to all.

    Regression targets are scaled by mean and standard deviation over all training rows, so that a network starts near them;
    `predict` converts predictions back to their unit. If sites must first agree on the preprocessing, as a single site with
    `preprocess="federated"` must, targets stay as they were read.
    """
    template = pool.preprocessor
    assert template is not None
    if shifts:
        raise UserError(
            "shifts change images and their labels, and these data are a table; leave them out "
            "(shifts=None, --data.shifts null)"
        )
    if config.global_test:
        raise UserError("global_test needs a common test set, which a table does not have; set global_test to 0")
    if len(public) and template.scope != "federated":
        raise UserError(
            "public_fraction needs one preprocessing for all sites, so that public examples are prepared as theirs are; "
            "give preprocess='federated' (--data.preprocess federated)"
        )
    rows_in_training = rows[: len(rows) - config.unseen]
    is_fitted_later = template.scope == "federated" and (not fits_preprocessing or len(rows) == 1)
    if pool.task.standardises_targets and is_fitted_later:
        template = replace(template, target=((0.0, 1.0),) * pool.num_outputs)
    elif pool.task.standardises_targets:
        train_targets = store.y[
            torch.from_numpy(np.concatenate([client_rows.train for client_rows in rows_in_training]))
        ].double()
        spread = train_targets.std(0, correction=0)
        spread = torch.where(spread > 0, spread, torch.ones_like(spread))
        target = tuple(zip(train_targets.mean(0).tolist(), spread.tolist(), strict=True))
        template = replace(template, target=target)
        store = replace(store, y=((store.y.double() - train_targets.mean(0)) / spread).to(torch.float32))
    trains = [_select_rows(store, client_rows.train) for client_rows in rows]
    common_preprocessor = (
        fit_preprocessor(template, trains[: len(rows_in_training)], "federated")
        if template.scope == "federated"
        else None
    )
    clients, changed_by_site = [], {}
    for client_rows, train in zip(rows, trains, strict=True):
        client_preprocessor = common_preprocessor or fit_preprocessor(template, [train])
        changed_by_site[f"site {client_rows.id!r}"] = client_preprocessor.changed_constant_columns(
            store.input_tensor[np.concatenate([client_rows.test, client_rows.val])]
        )
        client_store = replace(store, transform=client_preprocessor)
        train = _select_rows(client_store, client_rows.train)
        test, val = (_own_rows(client_store, part) for part in (client_rows.test, client_rows.val))
        clients.append(ClientData(client_rows.id, train, test, val if len(val) else None, None, client_rows))
    if not is_fitted_later:  # otherwise there are no statistics yet to compare with
        warn_of_changed_constants(changed_by_site)
    return clients, _select_rows(replace(store, transform=common_preprocessor), public) if len(public) else None


def _draw_global_test(pool: PooledDataset, size: int, seed: int) -> Examples | None:
    if size == 0:
        return None
    if pool.test_set_in_train:
        raise UserError(
            f"global_test={size} needs a common test set, and deal_test gives its examples to the clients, who would be "
            "tested on what they train on; leave one of the two out"
        )
    if pool.test is None:
        raise UserError(
            f"global_test={size} needs a common test set, which this data set does not have; set global_test to 0 or "
            "give one (digits: common_test; files: a test split)"
        )
    if size > len(pool.test):
        raise UserError(f"global_test={size} is more than the {len(pool.test)} examples of the common test set")
    if size == -1:
        return pool.test
    # Renaming this purpose would change the draw, and with it published results.
    rows = draw_stratified_rows(pool.task.strata(pool.test.labels), size, derive_seed(seed, "balanced_test"))
    return _select_rows(pool.test, rows)


def _own_rows(examples: Examples, rows: NDArray[Any]) -> Examples:
    """Returns the examples at these rows with a store of their own, so that `client.test.x` are the client's rows alone."""
    part = _select_rows(examples, rows)
    columns = {name: part.column(name) for name in part.columns or {}}
    return replace(part, x=part.raw_inputs, y=part.labels, index=None, columns=columns or None)


def _select_rows(examples: Examples, rows: NDArray[Any]) -> Examples:
    return examples.select(torch.from_numpy(rows))
