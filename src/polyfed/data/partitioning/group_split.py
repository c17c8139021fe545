"""Splits examples by group, so that all rows of one patient, for example, go to the same set."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.core.examples.examples import Examples
from polyfed.core.examples.groups import group_id_of_each_row, is_alone
from polyfed.core.seeds import derive_seed
from polyfed.data.partitioning.allocation import draw_stratified_rows

Rows = NDArray[np.int64]


def group_numbers(examples: Examples) -> NDArray[np.int64] | None:
    """Returns each example's group as a number in the order of appearance; None without groups.

    >>> import torch
    >>> group_numbers(Examples(torch.zeros(3, 1), torch.zeros(3), group=["p9", "p2", "p9"])).tolist()
    [0, 1, 0]
    """
    if examples.group is None:
        return None
    _, first, inverse = np.unique(
        group_id_of_each_row(examples.column(examples.group)), return_index=True, return_inverse=True
    )
    numbers: NDArray[np.int64] = np.argsort(np.argsort(first))[inverse]
    return numbers


def split_by_group_and_record_sets(
    labels: NDArray[Any],
    groups: NDArray[Any],
    shares: Mapping[str, float],
    seed: int,
    set_of_group: MutableMapping[str, str],
) -> dict[str, Rows]:
    """Splits rows into `{set: rows}` with groups whole; writes their sets to `set_of_group`.

    Groups are drawn at random, stratified by the largest label among their rows: the share of a set, at least one group, and
    at least one stays for "train".

    Args:
        labels: of the client's rows; stratified if they are whole numbers, one an example.
        groups: of the same rows.
        shares: set -> share of the groups, in the order in which sets are drawn.
        seed: of the draw.
        set_of_group: group -> set, of the clients before; a patient of two hospitals is in one set at both. The groups drawn
            here are added. A row without a group is in no other client's groups.

    Returns:
        set -> rows, ascending; with "train", the rest.

    >>> rows = split_by_group_and_record_sets(np.zeros(6, int), np.array(list("aabbcc")), {"test": 0.3}, 0, {})
    >>> sorted(len(part) for part in rows.values())
    [2, 4]
    """
    names, group_index = np.unique(groups, return_inverse=True)
    are_classes = labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer)
    label = np.zeros(len(names), np.int64 if are_classes else np.float64)
    if are_classes:
        np.maximum.at(label, group_index, labels)
    ids = [str(name) for name in names]
    assigned = {name: set_of_group[name] for name in ids if name in set_of_group and not is_alone(name)}
    unassigned = np.array([i for i, name in enumerate(ids) if name not in assigned], np.int64)
    for name, share in shares.items():
        num_assigned = sum(assigned.get(group_id) == name for group_id in ids)
        num_missing = max(round(share * len(ids)), int(share > 0)) - num_assigned
        size = int(np.clip(num_missing, 0, max(0, len(unassigned) - 1)))
        positions = draw_stratified_rows(label[unassigned], size, derive_seed(seed, name), leave_one_per_class=True)
        assigned.update({ids[i]: name for i in unassigned[positions]})
        unassigned = np.delete(unassigned, positions)
    assigned.update({ids[i]: "train" for i in unassigned})
    set_of_group.update({name: part for name, part in assigned.items() if not is_alone(name)})
    role = np.array([assigned[name] for name in ids])[group_index]
    return {name: np.flatnonzero(role == name) for name in ("train", *shares)}
