"""Splits examples by time, to train on earlier and test on later examples."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.core.examples.groups import is_alone

Rows = NDArray[np.int64]


def split_by_time(times: NDArray[np.float64], shares: Mapping[str, float]) -> dict[str, Rows]:
    """Splits rows into `{set: rows}`: the first set gets the latest, "train" the earliest.

    Rows of equal time go to one set, so that every set is later than the one before; sizes are as near to the shares as that
    allows, and a set is empty only if there are too few different times.

    Args:
        times: of the rows.
        shares: set -> share of the rows; {"test": 0.3, "val": 0.1} makes train, val, test in this order.

    Returns:
        set -> rows, ascending; with "train", the rest.

    >>> split_by_time(np.array([5.0, 1.0, 2.0, 2.0, 9.0]), {"test": 0.4})
    {'train': array([1, 2, 3]), 'test': array([0, 4])}
    """
    rows: dict[str, Rows] = {}
    remaining = np.arange(len(times))
    for position, (name, share) in enumerate(shares.items()):
        different, counts = np.unique(times[remaining], return_counts=True)
        size = max(round(share * len(times)), int(share > 0))
        earlier_sets = 1 + sum(other > 0 for other in list(shares.values())[position + 1 :])  # a time stays for each
        # For each number of different times that go to this set: the number of rows.
        sizes = np.concatenate([[0], np.cumsum(counts[::-1])])[: max(1, len(different) - earlier_sets + 1)]
        num_latest = int(np.argmin(np.abs(sizes - size) + (len(times) * (sizes == 0) if size else 0)))
        is_later = np.isin(times[remaining], different[len(different) - num_latest :])
        rows[name], remaining = remaining[is_later], remaining[~is_later]
    return {"train": remaining, **rows}


def split_groups_by_time(
    times: NDArray[np.float64],
    groups: NDArray[Any],
    shares: Mapping[str, float],
    set_of_group: MutableMapping[str, str],
) -> dict[str, Rows]:
    """Splits whole groups by the time of their first row into `{set: rows}`: the groups that began last are tested on.

    Args:
        times: of the rows.
        groups: of the same rows.
        shares: set -> share of the groups.
        set_of_group: group -> set, of the clients before; a patient of two hospitals is in one set at both. The groups
            of these rows are added.

    >>> split_groups_by_time(np.array([1.0, 2.0, 3.0, 9.0]), np.array(list("aaba")), {"test": 0.3}, {})
    {'train': array([0, 1, 3]), 'test': array([2])}
    """
    names, group_index = np.unique(groups, return_inverse=True)
    began = np.full(len(names), np.inf)
    np.minimum.at(began, group_index, times)
    set_of_lone_row: dict[str, str] = {}
    for name, positions in split_by_time(began, shares).items():
        for group_id in (str(names[position]) for position in positions):
            (set_of_lone_row if is_alone(group_id) else set_of_group).setdefault(group_id, name)
    sets = {**set_of_group, **set_of_lone_row}
    role = np.array([sets[str(name)] for name in names])[group_index]
    return {name: np.flatnonzero(role == name) for name in ("train", *shares)}


def split_within_groups_by_time(
    times: NDArray[np.float64], groups: NDArray[Any], shares: Mapping[str, float]
) -> dict[str, Rows]:
    """Splits the rows of each group by time into `{set: rows}`: earlier rows are trained on, later rows tested on.

    A group with too few different times for all sets is trained on.

    >>> split_within_groups_by_time(np.array([1.0, 2.0, 5.0, 3.0, 4.0]), np.array(list("aaabc")), {"test": 0.3})
    {'train': array([0, 1, 3, 4]), 'test': array([2])}
    """
    names, group_index = np.unique(groups, return_inverse=True)
    parts: dict[str, list[Rows]] = {name: [] for name in ("train", *shares)}
    for group in range(len(names)):
        rows = np.flatnonzero(group_index == group)
        few = len(np.unique(times[rows])) <= sum(share > 0 for share in shares.values())
        for name, positions in ({"train": np.arange(len(rows))} if few else split_by_time(times[rows], shares)).items():
            parts[name].append(rows[positions])
    return {name: np.sort(np.concatenate([np.zeros(0, np.int64), *rows])) for name, rows in parts.items()}
