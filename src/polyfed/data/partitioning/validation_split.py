"""Makes validation sets for clients without one, from their training examples, so that settings can be compared."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.core.algorithm import Client
from polyfed.core.examples.groups import group_id_of_each_row, is_alone
from polyfed.core.seeds import derive_seed
from polyfed.data.partitioning.allocation import draw_stratified_rows
from polyfed.data.partitioning.group_split import split_by_group_and_record_sets
from polyfed.data.partitioning.resplit import refit_client_preprocessing
from polyfed.data.partitioning.time_split import split_by_time, split_groups_by_time, split_within_groups_by_time

VALIDATION_SHARE = 0.2
"""Share of the training examples that is held out."""


def hold_out_missing_validation_sets(clients: Sequence[Client], seed: int) -> tuple[Client, ...]:
    """Returns all clients; for each client without a validation set, a fifth of its training examples becomes one.

    Examples are drawn by `seed` and, for classification, each class within one example of its share. A client with fewer
    than five training examples holds out none. If examples have a time (`Examples.time`), the last are held out. Groups
    (`Examples.group`) stay together, and preprocessing of a table is fitted again on the remaining rows.

    >>> from polyfed.testing import small_clients
    >>> bare = [Client(c.id, c.model, c.train, c.test) for c in small_clients(2)]
    >>> [(len(c.train), len(c.val)) for c in hold_out_missing_validation_sets(bare, seed=0)]
    [(16, 4), (21, 5)]
    """
    set_of_group: dict[str, str] = {}
    return refit_client_preprocessing(
        [_hold_out_validation(client, seed, set_of_group) if client.val is None else client for client in clients]
    )


def _hold_out_validation(client: Client, seed: int, set_of_group: dict[str, str]) -> Client:
    number = len(client.train)
    size = round(VALIDATION_SHARE * number)
    if not size or number < 1 / VALIDATION_SHARE:
        return client
    labels, client_seed = client.task.strata(client.train.labels), derive_seed(seed, "held out", client.id)
    if client.train.time is not None:
        sets = _split_last_rows(client, set_of_group)
        train_rows, val_rows = sets["train"], sets["val"]
        if not len(train_rows) or not len(val_rows):
            return client
    elif client.train.group is None:
        val_rows = draw_stratified_rows(labels, size, client_seed, leave_one_per_class=True)
        train_rows = np.setdiff1d(np.arange(number), val_rows)
    else:
        groups = group_id_of_each_row(client.train.column(client.train.group))
        sets = split_by_group_and_record_sets(labels, groups, {"val": VALIDATION_SHARE}, client_seed, set_of_group)
        train_rows, val_rows = sets["train"], sets["val"]
        if not len(train_rows) or not len(val_rows):
            return client
    train, val = (
        client.train.select(torch.from_numpy(part).to(client.train.device)) for part in (train_rows, val_rows)
    )
    return Client(client.id, client.model, train, client.test, val, client.global_test, client.task, client.loss)


def _split_last_rows(client: Client, set_of_group: dict[str, str]) -> dict[str, NDArray[np.int64]]:
    """Splits the training rows by time as the test rows were: within groups if the client is tested on later rows of the
    groups that it trains on.
    """
    train, shares, times = client.train, {"val": VALIDATION_SHARE}, client.train.times
    assert times is not None  # callers check this
    if train.group is None:
        return split_by_time(times, shares)
    groups = group_id_of_each_row(train.column(train.group))
    tested = (
        set()
        if client.test.group is None
        else set(group_id_of_each_row(client.test.column(client.test.group)).tolist())
    )
    if any(name in tested and not is_alone(name) for name in groups.tolist()):
        return split_within_groups_by_time(times, groups, shares)
    return split_groups_by_time(times, groups, shares, set_of_group)
