"""Divides each client's examples into folds, so that cross-validation tests on every example once."""

import math
from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.groups import ALONE, group_id_of_each_row, is_alone
from polyfed.core.io.text.number_format import count_with_noun
from polyfed.core.io.values.number_checks import MAX_RUNS, check_whole_number
from polyfed.core.seeds import derive_seed, numpy_generator
from polyfed.data.concat import rows_in_stored_tensors
from polyfed.data.partitioning.allocation import draw_stratified_rows
from polyfed.data.partitioning.group_split import split_by_group_and_record_sets
from polyfed.data.partitioning.resplit import (
    check_disjoint,
    check_untimed,
    concat_sets,
    refit_client_preprocessing,
    resplit_clients,
    select_rows,
)

Rows = NDArray[np.int64]


@final
@dataclass(frozen=True)
class Folds:
    """Describes a repeated k-fold cross-validation, in which each repeat divides the examples again.

    Args:
        number: folds of a repeat, at least 2. Each tests 1/number of a client's examples, and trains on the others.
        repeats: how often the examples are divided.

    Raises:
        UserError: a number below these.

    >>> Folds(5, 2).num_runs
    10
    """

    number: int
    repeats: int = 1

    def __post_init__(self) -> None:
        for name, value, least in (("folds", self.number, 2), ("fold_repeats", self.repeats, 1)):
            check_whole_number(name, value, least, MAX_RUNS)

    @property
    def num_runs(self) -> int:
        """Returns the number of training runs of each method: folds times repeats."""
        return self.number * self.repeats


def build_folds(folds: int | None, fold_repeats: int | None = None) -> Folds | None:
    """Returns the description of a cross-validation, None without `folds`.

    Raises:
        UserError: a number below those of `Folds`, or `fold_repeats` without `folds`.
    """
    if folds is None:
        if fold_repeats not in (None, 1):
            raise UserError(f"fold_repeats={fold_repeats!r} repeats folds; give their number too, folds=5 (--folds 5)")
        return None
    return Folds(folds, 1 if fold_repeats is None else fold_repeats)


def check_seeds_suit_resplit_or_folds(resplit: int | None, folds: Folds | None, seeds: Sequence[int]) -> None:
    """Raises a `UserError` for both `resplit` and `folds`, or another number of seeds than they need."""
    if resplit is not None and folds is not None:
        raise UserError(
            "folds and resplit both divide training and test examples; give one of them (folds tests every example once)"
        )
    if folds is not None and len(seeds) != folds.num_runs:
        raise UserError(
            f"folds={folds.number} with fold_repeats={folds.repeats} needs {folds.num_runs} runs of each method, with a "
            f"seed each; got {len(seeds)} seeds: leave them out"
        )
    if resplit is not None and len(seeds) != resplit:
        raise UserError(
            f"resplit={resplit} divides the data {resplit} times, with a seed each; got {len(seeds)} seeds: leave them out"
        )


def redraw_clients(
    clients: Sequence[Client], resplit: int | None, folds: Folds | None, seeds: Sequence[int]
) -> list[tuple[Client, ...]] | None:
    """Returns each seed's clients with sets of `resplit` or `folds`; None if neither is given.

    Raises:
        UserError: what `check_seeds_suit_resplit_or_folds`, `resplit_clients` or `split_into_folds` refuses.
    """
    check_seeds_suit_resplit_or_folds(resplit, folds, seeds)
    if folds is not None:
        return split_into_folds(clients, folds)
    return None if resplit is None else resplit_clients(clients, resplit)


def split_into_folds(clients: Sequence[Client], folds: Folds) -> list[tuple[Client, ...]]:
    """Returns the clients of each fold, which is their test set; other examples train.

    A client's training, validation and test examples are joined and divided; each class (of survival, events; of images,
    those with anything but background) within one example of its share.
    Groups (`Examples.group`) stay together, at all clients. A client with validation examples holds out its share of the
    training part again. Ids, networks, task and `global_test` stay; preprocessing of a table is fitted again on the new
    training rows. A client of `describe_small_clients` keeps its sets in every fold, unless all are too small or it shares a
    group with another client.

    Args:
        clients: whose examples are divided; no example may be in two sets or at two clients.
        folds: how many folds and repeats.

    Returns:
        One tuple of clients per fold, repeat by repeat, in the order of `clients`.

    Raises:
        UserError: too few examples (or groups) for folds, sets that differ in structure or transform, or examples that are
            in two sets.

    >>> from polyfed.testing import small_clients
    >>> clients_by_fold = split_into_folds(small_clients(2), Folds(3))
    >>> [(len(client.train), len(client.val), len(client.test)) for client in clients_by_fold[2]]
    [(17, 3, 9), (21, 2, 12)]
    """
    check_untimed(clients, "folds")
    check_disjoint(clients, "folds")
    pools = [concat_sets(client, "folds") for client in clients]
    undivided_clients = _find_undivided_clients(clients, pools, folds.number)
    clients_by_fold: list[Sequence[Client]] = []
    for repeat in range(folds.repeats):
        fold_of_group: dict[str, int] = {}
        fold_of_rows = [
            np.empty(0, np.int64)
            if client.id in undivided_clients
            else _split_rows(client, pool, folds.number, derive_seed(0, "folds", repeat, client.id), fold_of_group)
            for client, pool in zip(clients, pools, strict=True)
        ]
        for k in range(folds.number):
            set_of_group = {
                str(name): "train"  # at a client that holds out none, so that no other client does
                for client, pool, fold_of_row in zip(clients, pools, fold_of_rows, strict=True)
                if client.val is None and pool.group is not None and client.id not in undivided_clients
                for name in unit_names(pool)[fold_of_row != k]
            }
            members = [
                client
                if client.id in undivided_clients
                else _client_of_fold(
                    client, pool, fold_of_row == k, derive_seed(0, "folds", repeat, k, client.id), set_of_group
                )
                for client, pool, fold_of_row in zip(clients, pools, fold_of_rows, strict=True)
            ]
            clients_by_fold.append(members)
    return refit_client_preprocessing(clients_by_fold)


def describe_small_clients(clients: Sequence[Client], num_folds: int) -> dict[str, str]:
    """Says of each client with too few examples (or groups) to be tested in every fold how many it has.

    Args:
        clients: before they are drawn, or those of a fold.
        num_folds: folds of a repeat.

    >>> from polyfed.testing import small_clients
    >>> describe_small_clients(small_clients(2), 30)
    {'client-0': '29 examples'}
    """
    small = {}
    for client in clients:
        parts = [part for part in (client.train, client.val, client.test) if part is not None]
        is_grouped = client.train.group is not None
        number = len({name for part in parts for name in unit_names(part)}) if is_grouped else sum(map(len, parts))
        rest = number - math.ceil(number / num_folds)  # of the largest fold, to train and to validate on
        if number < num_folds or rest < len(parts) - 1:
            small[client.id] = count_with_noun(number, "group" if is_grouped else "example")
    return small


def _find_undivided_clients(clients: Sequence[Client], pools: Sequence[Examples], num_folds: int) -> Collection[str]:
    """Returns the ids of small clients that keep their sets, of which none has a group that another client tests."""
    small = describe_small_clients(clients, num_folds)
    if len(small) == len(clients):
        return ()
    clients_of_group: dict[str, set[str]] = {}
    for client, pool in zip(clients, pools, strict=True):
        for name in unit_names(pool) if small and pool.group is not None else ():
            if not is_alone(name):
                clients_of_group.setdefault(str(name), set()).add(client.id)
    return small.keys() - {i for members in clients_of_group.values() if len(members) > 1 for i in members}


def unit_names(examples: Examples) -> NDArray[np.str_]:
    """Returns each example's unit that stays together in folds: its group, or itself.

    Units are drawn independently of each other. The names are the same in each fold in which the clients are divided.
    """
    rows: list[str] = [str(row) for row in rows_in_stored_tensors(examples).tolist()]
    if examples.group is not None:
        groups = group_id_of_each_row(examples.column(examples.group)).tolist()
        # A row without a group is a group alone, by its place in the store.
        rows = [f"{ALONE}{row}" if is_alone(name) else name for row, name in zip(rows, groups, strict=True)]
    return np.array(rows)


def _split_rows(
    client: Client, pool: Examples, num_folds: int, seed: int, fold_of_group: MutableMapping[str, int]
) -> NDArray[np.int64]:
    """Returns the fold of each row of a client; groups of clients before keep their fold."""
    units, unit_of_row = np.unique(unit_names(pool), return_inverse=True)
    strata = client.task.strata(pool.labels)
    label_of_unit = np.zeros(len(units), dtype=np.int64)
    if strata.ndim == 1 and np.issubdtype(strata.dtype, np.integer):
        np.maximum.at(label_of_unit, unit_of_row, strata)
    fold_of_unit = _assign_stratified(label_of_unit, num_folds, seed)
    if pool.group is not None:
        for i, name in enumerate(units.tolist()):
            if not is_alone(name):
                fold_of_unit[i] = fold_of_group.setdefault(name, int(fold_of_unit[i]))
    if empty := sorted(set(range(num_folds)) - set(fold_of_unit.tolist())):
        unit_name = "examples" if pool.group is None else f"groups of column {pool.group!r}"
        raise UserError(
            f"client {client.id!r} has {len(units)} {unit_name}, and none for {len(empty)} of {num_folds} folds; give fewer "
            "folds, or leave the client out (--data.partition.order largest --data.clients N keeps the N largest)"
        )
    fold: NDArray[np.int64] = fold_of_unit[unit_of_row]
    return fold


def _assign_stratified(labels: NDArray[np.int64], num_folds: int, seed: int) -> NDArray[np.int64]:
    """Assigns units in turn, label by label, in random order; the folds of the rarest labels are random too."""
    rng = numpy_generator(seed)
    shuffled = rng.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    fold = np.empty(len(labels), dtype=np.int64)
    fold[order] = rng.permutation(num_folds)[np.arange(len(labels)) % num_folds]
    return fold


def _client_of_fold(
    client: Client, pool: Examples, is_tested: NDArray[np.bool_], seed: int, set_of_group: MutableMapping[str, str]
) -> Client:
    tested, rows = np.flatnonzero(is_tested), np.flatnonzero(~is_tested)
    held_out = {"test": replace(select_rows(pool, tested), augment=None)}
    if client.val is not None:
        share = len(client.val) / (len(client.val) + len(client.train))
        strata = client.task.strata(pool.labels)[rows]
        validation = _draw_validation(strata, pool, rows, share, seed, set_of_group)
        if len(validation) in (0, len(rows)):
            units = "examples" if pool.group is None else f"groups of column {pool.group!r}"
            raise UserError(
                f"client {client.id!r} has in a fold too few {units} of its own for both a training and a validation set; "
                "leave val out, or the client"
            )
        held_out["val"] = replace(select_rows(pool, validation), augment=None)
        rows = np.setdiff1d(rows, validation)
    return replace(client, train=select_rows(pool, rows), **held_out)  # type: ignore[arg-type]


def _draw_validation(
    strata: NDArray[Any], pool: Examples, rows: Rows, share: float, seed: int, set_of_group: MutableMapping[str, str]
) -> Rows:
    if pool.group is None:
        size = min(max(1, round(share * len(rows))), len(rows) - 1)
        return rows[draw_stratified_rows(strata, size, derive_seed(seed, "val"), leave_one_per_class=True)]
    groups = group_id_of_each_row(pool.column(pool.group))[rows]
    return rows[split_by_group_and_record_sets(strata, groups, {"val": share}, seed, set_of_group)["val"]]
