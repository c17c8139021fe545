"""Makes validation sets for clients without one, from their training examples, so that settings can be compared."""

from collections.abc import MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.core.algorithm import Client
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.groups import group_id_of_each_row, is_alone
from polyfed.core.seeds import derive_seed
from polyfed.data.partitioning.allocation import draw_stratified_rows
from polyfed.data.partitioning.group_split import split_by_group_and_record_sets
from polyfed.data.partitioning.resplit import refit_client_preprocessing
from polyfed.data.partitioning.time_split import split_by_time, split_groups_by_time, split_within_groups_by_time

HELD_OUT_SHARE = 0.2
"""Share of the examples that is held out."""
_FEWEST = 5  # training examples of a client that holds some out


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
    set_of_group = _sets_of_groups_that_are_not_split(clients)
    held_out = [
        _hold_out_validation(client, seed, set_of_group) if client.val is None else client for client in clients
    ]
    return refit_client_preprocessing([held_out])[0]


def _sets_of_groups_that_are_not_split(clients: Sequence[Client]) -> dict[str, str]:
    """Returns `{group: set}` of clients whose examples stay as they are, so that no other holds one out."""
    sets: dict[str, str] = {}
    for client in clients:
        if client.val is not None:
            sets.update(dict.fromkeys(_group_ids(client.val), "val"))
        if client.val is not None or len(client.train) < _FEWEST:
            sets.update(dict.fromkeys(_group_ids(client.train), "train"))
    return {name: part for name, part in sets.items() if not is_alone(name)}


def _group_ids(examples: Examples) -> list[str]:
    return [] if examples.group is None else group_id_of_each_row(examples.column(examples.group)).tolist()


def _hold_out_validation(client: Client, seed: int, set_of_group: dict[str, str]) -> Client:
    if len(client.train) < _FEWEST:
        return client
    strata, client_seed = client.task.strata(client.train.labels), derive_seed(seed, "held out", client.id)
    tested_groups = frozenset(name for name in _group_ids(client.test) if not is_alone(name))
    train, val = split_off_examples(client.train, strata, client_seed, set_of_group, tested_groups)
    if not len(train) or not len(val):
        return client
    return Client(client.id, client.model, train, client.test, val, client.global_test, client.task, client.loss)


def split_off_examples(
    examples: Examples,
    strata: NDArray[Any],
    seed: int,
    set_of_group: MutableMapping[str, str],
    tested_groups: frozenset[str] = frozenset(),
) -> tuple[Examples, Examples]:
    """Splits examples into those that stay and a fifth, perhaps empty, that is held out.

    It is the last if they have a time, else drawn by stratum; groups stay together.

    Args:
        examples: at least two.
        strata: of the examples; drawn alike if they are whole numbers, one an example.
        seed: of the draw.
        set_of_group: group -> "train" or "val", of the clients before; those of these examples are added.
        tested_groups: groups that are tested on later rows; if there are such, the last rows of each group are held out.

    >>> import torch
    >>> people = Examples(torch.zeros(10, 1), torch.zeros(10), group=list("aabbccddee"))
    >>> [len(part) for part in split_off_examples(people, np.zeros(10, int), 0, {})]
    [8, 2]
    """
    number, shares, times = len(examples), {"val": HELD_OUT_SHARE}, examples.times
    groups = np.array(_group_ids(examples))
    if times is not None and not len(groups):
        sets = split_by_time(times, shares)
    elif times is not None and not tested_groups.isdisjoint(groups.tolist()):
        sets = split_within_groups_by_time(times, groups, shares)
    elif times is not None:
        sets = split_groups_by_time(times, groups, shares, set_of_group)
    elif len(groups):
        sets = split_by_group_and_record_sets(strata, groups, shares, seed, set_of_group)
    else:
        size = max(1, round(HELD_OUT_SHARE * number))
        held_out = draw_stratified_rows(strata, size, seed, leave_one_per_class=True)
        sets = {"train": np.setdiff1d(np.arange(number), held_out), "val": held_out}
    train, val = (examples.select(torch.from_numpy(sets[name]).to(examples.device)) for name in ("train", "val"))
    return train, val
