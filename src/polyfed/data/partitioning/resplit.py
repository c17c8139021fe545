"""Draws each client's training, validation and test sets several times, for data sets with few examples.

With few data, which examples happen to test a client decides more than the seed of its training.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.groups import group_id_of_each_row
from polyfed.core.io.values.number_checks import is_whole_number
from polyfed.core.seeds import derive_seed
from polyfed.data.concat import concat_examples, concatenation_obstacle, input_memory_locations, rows_in_stored_tensors
from polyfed.data.partitioning.allocation import draw_stratified_rows
from polyfed.data.partitioning.group_split import split_by_group_and_record_sets
from polyfed.data.tabular.fit_preprocessor import fit_preprocessor
from polyfed.data.tabular.preprocessing import Column, TablePreprocessor, warn_of_changed_constants


def resplit_clients(clients: Sequence[Client], splits: int, seed: int = 0) -> list[tuple[Client, ...]]:
    """Returns `splits` versions of the clients, each with new random training, validation and test sets.

    Each client's examples are joined and drawn again into sets of the same sizes, at random and independently of all other
    clients and splits; for classification each class within one example of its share. Ids, networks, task and `global_test`
    stay. Groups (`Examples.group`) stay together, at all clients; sizes are then of groups. Preprocessing of a table is
    fitted again on the new training rows. No data are copied if a client's sets are views of one store; otherwise once per
    client.

    Args:
        clients: whose examples are redrawn; no example may be in two sets or at two clients.
        splits: number of splits, at least 2.
        seed: of every draw.

    Returns:
        One tuple of clients per split, in the order of `clients`.

    Raises:
        UserError: fewer than two splits, examples with a time, sets that differ in structure or transform, or examples
            that are in two sets.

    >>> from polyfed.testing import small_clients
    >>> clients_by_split = resplit_clients(small_clients(2), splits=3)
    >>> [(len(client.train), len(client.val), len(client.test)) for client in clients_by_split[2]]
    [(20, 3, 6), (26, 3, 6)]
    """
    if not is_whole_number(splits, 2):
        raise UserError(f"resplit must be a number of splits of at least 2, got {splits!r}")
    check_untimed(clients, "resplit")
    check_disjoint(clients)
    pools = [concat_sets(client) for client in clients]
    clients_by_split: list[Sequence[Client]] = []
    for k in range(splits):
        set_of_group: dict[str, str] = {}
        # First the clients without validation examples: their groups must not be in another client's validation set.
        in_order = sorted(zip(clients, pools, strict=True), key=lambda member: member[0].val is not None)
        redrawn = {
            c.id: _redraw_sets(c, pool, derive_seed(seed, "resplit", k, c.id), set_of_group) for c, pool in in_order
        }
        clients_by_split.append([redrawn[c.id] for c in clients])
    return refit_client_preprocessing(clients_by_split)


def refit_client_preprocessing(clients_by_split: Iterable[Sequence[Client]]) -> list[tuple[Client, ...]]:
    """Returns each split's clients with the preprocessing of table data fitted again to their training rows of that split.

    Regression targets keep their scale. Columns that are constant in the training rows of a split get one warning for all.
    """
    splits = [(clients, refit_preprocessors({c.id: c.train for c in clients})) for clients in clients_by_split]
    changed: dict[str, dict[str, None]] = {}  # by site, in order
    for clients, refitted in splits:
        for c in clients:
            if c.id in refitted:
                held_out = [p.input_tensor[rows_in_stored_tensors(p)] for p in (c.test, c.val) if p is not None]
                names = refitted[c.id].changed_constant_columns(torch.cat(held_out))
                changed.setdefault(f"site {c.id!r}", {}).update(dict.fromkeys(names))
    warn_of_changed_constants({site: tuple(names) for site, names in changed.items()})
    return [
        tuple(_with_transform(c, refitted[c.id]) if c.id in refitted else c for c in clients)
        for clients, refitted in splits
    ]


def refit_preprocessors(trains: Mapping[str, Examples]) -> dict[str, TablePreprocessor]:
    """Returns `{site: preprocessing}`, fitted to each site's present training rows, if they are a table."""
    preprocessors = {
        i: train.transform for i, train in trains.items() if isinstance(train.transform, TablePreprocessor)
    }
    federated: dict[tuple[Column, ...], TablePreprocessor] = {}
    for i in preprocessors:
        if preprocessors[i].scope == "federated" and preprocessors[i].columns not in federated:
            members = [trains[j] for j in preprocessors if preprocessors[j].columns == preprocessors[i].columns]
            federated[preprocessors[i].columns] = fit_preprocessor(preprocessors[i], members, "federated")
    return {
        i: federated[preprocessor.columns]
        if preprocessor.scope == "federated"
        else fit_preprocessor(preprocessor, [trains[i]])
        for i, preprocessor in preprocessors.items()
    }


def apply_common_preprocessing_to_public(public: Examples | None, clients: Sequence[Client]) -> Examples | None:
    """Returns public examples with the clients' common table preprocessing; others unchanged.

    Networks must see public rows prepared as their clients' own rows are.
    """
    if public is None or not isinstance(public.transform, TablePreprocessor) or public.transform.scope != "federated":
        return public
    transforms = {client.train.transform for client in clients}
    if (
        len(transforms) != 1
        or not isinstance(common_transform := next(iter(transforms)), TablePreprocessor)
        or common_transform.scope != "federated"
    ):
        return public
    return (
        replace(public, transform=common_transform) if common_transform.columns == public.transform.columns else public
    )


def _with_transform(client: Client, transform: TablePreprocessor) -> Client:
    parts = {name: replace(part, transform=transform) for name, part in _sets_of_client(client).items()}
    return replace(client, **parts)  # type: ignore[arg-type]


def _sets_of_client(client: Client) -> dict[str, Examples]:
    parts = {"train": client.train, "val": client.val, "test": client.test}
    return {name: part for name, part in parts.items() if part is not None}


def concat_sets(client: Client, option: str = "resplit") -> Examples:
    """Returns a client's training, validation and test examples as one.

    Raises:
        UserError: the sets cannot be joined; the message advises to leave `option` out.
    """
    parts = _sets_of_client(client)
    for name, part in parts.items():
        if difference := concatenation_obstacle(client.train, part):
            raise UserError(
                f"client {client.id!r}: train and {name} cannot be joined and split again, since their {difference}; "
                f"prepare both alike, or leave {option} out"
            )
    return concat_examples(list(parts.values()))


def _redraw_sets(client: Client, pool: Examples, seed: int, set_of_group: dict[str, str]) -> Client:
    labels = client.task.strata(pool.labels)
    if pool.group is not None:
        return _redraw_sets_by_group(client, pool, labels, seed, set_of_group)
    remaining: NDArray[np.int64] = np.arange(len(pool))
    held_out: dict[str, Examples] = {}
    for name, old_set in (("test", client.test), ("val", client.val)):
        if old_set is not None:
            out = draw_stratified_rows(
                labels[remaining], len(old_set), derive_seed(seed, name), leave_one_per_class=True
            )
            held_out[name] = replace(select_rows(pool, remaining[out]), augment=None)
            remaining = np.delete(remaining, out)
    return replace(client, train=select_rows(pool, remaining), **held_out)  # type: ignore[arg-type]


def _redraw_sets_by_group(
    client: Client, pool: Examples, labels: NDArray[Any], seed: int, set_of_group: dict[str, str]
) -> Client:
    groups = group_id_of_each_row(pool.column(str(pool.group)))
    ends = np.cumsum([len(part) for part in _sets_of_client(client).values()])
    groups_by_set = dict(zip(_sets_of_client(client), np.split(groups, ends[:-1]), strict=True))
    num_groups = len(np.unique(groups))
    share_by_set = {name: len(np.unique(set_groups)) / num_groups for name, set_groups in groups_by_set.items()}
    shares = {str(name): share_by_set[name] for name in ("test", "val") if name in share_by_set}
    sets = split_by_group_and_record_sets(labels, groups, shares, seed, set_of_group)
    if empty := [name for name, rows in sets.items() if not len(rows)]:
        reason = "since other clients have the same groups" if num_groups >= len(sets) else f"of {num_groups} in all"
        raise UserError(
            f"client {client.id!r} has no group of column {pool.group!r} for its {empty[0]} set when examples are split "
            f"again, {reason}; leave resplit out"
        )
    held_out = {name: replace(select_rows(pool, sets[name]), augment=None) for name in shares}
    return replace(client, train=select_rows(pool, sets["train"]), **held_out)  # type: ignore[arg-type]


def select_rows(pool: Examples, rows: NDArray[np.int64]) -> Examples:
    """Returns the examples at the positions `chosen` of `pool`."""
    return pool.select(torch.from_numpy(rows).to(pool.device))


def check_untimed(clients: Sequence[Client], option: str) -> None:
    """Raises a `UserError` for examples split by time: random sets would train on later ones.

    Args:
        clients: the clients.
        option: "resplit" or "folds", for the error.
    """
    if timed := [client.id for client in clients if any(part.time for part in _sets_of_client(client).values())]:
        raise UserError(
            f"client {timed[0]!r} was split by time, and {option} would draw sets at random, and train on what came "
            f"later; leave {option} out (several seeds on the same data: seeds=5 (--seeds 5 --same-data)), or give "
            "Examples without time (split='random', --data.split random)"
        )


def check_disjoint(clients: Sequence[Client], option: str = "resplit") -> None:
    """Raises a `UserError` for an example in two sets, which a new draw could train and test on.

    Raises:
        UserError: an example is in two sets; the message advises to leave `option` out.
    """
    stored: dict[tuple[object, ...], list[tuple[str, str, NDArray[np.int64]]]] = {}
    for client in clients:
        for name, part in _sets_of_client(client).items():
            stored.setdefault(input_memory_locations(part.x), []).append(
                (client.id, name, rows_in_stored_tensors(part).cpu().numpy())
            )
    for sets in stored.values():
        all_rows = np.concatenate([set_rows for *_, set_rows in sets])
        set_of = np.repeat(np.arange(len(sets)), [len(set_rows) for *_, set_rows in sets])
        order = np.argsort(all_rows, kind="stable")
        twice = np.flatnonzero(np.diff(all_rows[order]) == 0)
        if len(twice):
            first, second = (sets[set_of[order[twice[0] + k]]] for k in (0, 1))
            raise UserError(
                f"{first[1]} of client {first[0]!r} and {second[1]} of client {second[0]!r} hold the same example: "
                "split again, it could train one network and test another; give each set examples of its own (a test "
                f"set for all clients is global_test), or leave {option} out"
            )
