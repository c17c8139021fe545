"""Repeated splits into training, validation and test examples, client by client, where data are few: which examples happen
to test a client then decides more than the seed of its training."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.examples import Examples
from polyfed.core.seeds import derive
from polyfed.data.dealing import stratified
from polyfed.data.features import Prepared, fitted_again, warn_of_constants
from polyfed.data.grouped import by_group, groups_of
from polyfed.data.joined import differ, joined, places, rows


def resplit(clients: Sequence[Client], splits: int, seed: int = 0) -> list[tuple[Client, ...]]:
    """The same clients with other training, validation and test examples, `splits` times.

    Each client's examples are put together and dealt again into sets of the same sizes, at random and independently of all
    other clients and splits; for classification each class within one example of its share. Ids, networks, task and
    `global_test` stay. Groups (`Examples.group`) stay together, at all clients; sizes are then of groups. Preprocessing of
    a table is fitted again on the new training rows. No data are copied where a client's sets are views of one store;
    otherwise once per client.

    Args:
        clients: whose examples are dealt; none may be in two sets or at two clients.
        splits: how many times, at least 2.
        seed: of every draw.

    Returns:
        One tuple of clients per split, in the order of `clients`.

    Raises:
        UserError: fewer than two splits, sets that differ in form or transform, or examples that are in two sets.

    >>> from polyfed.testing import small_clients
    >>> dealt = resplit(small_clients(2), splits=3)
    >>> [(len(one.train), len(one.val), len(one.test)) for one in dealt[2]]
    [(20, 3, 6), (26, 3, 6)]
    """
    if not isinstance(splits, int) or isinstance(splits, bool) or splits < 2:
        raise UserError(f"resplit must be a number of splits of at least 2, got {splits!r}")
    _check_disjoint(clients)
    pools = [_pool(client) for client in clients]
    found = []
    for k in range(splits):
        roles: dict[str, str] = {}
        dealt = [
            _dealt(c, pool, derive(seed, "resplit", k, c.id), roles) for c, pool in zip(clients, pools, strict=True)
        ]
        found.append(prepared_again(dealt))
    return found


def prepared_again(clients: Sequence[Client]) -> tuple[Client, ...]:
    """The clients, those whose examples are a table's with preprocessing that is fitted on their training rows as they are
    now; targets keep their scale."""
    again = fitted_again({client.id: client.train for client in clients})
    later = {
        c.id: [part.tensor[rows(part)] for part in (c.test, c.val) if part is not None]
        for c in clients
        if c.id in again
    }
    warn_of_constants({f"site {i!r}": again[i].constants_changed(torch.cat(x)) for i, x in later.items()})
    return tuple(_prepared(client, again[client.id]) if client.id in again else client for client in clients)


def public_prepared_again(public: Examples | None, clients: Sequence[Client]) -> Examples | None:
    """Returns the public examples of a table with the preprocessing that all clients have in common now, and any others as
    they are: networks must see public rows as they see their clients' own."""
    if public is None or not isinstance(public.transform, Prepared) or public.transform.scope != "federated":
        return public
    common = {client.train.transform for client in clients}
    if len(common) != 1 or not isinstance(now := next(iter(common)), Prepared) or now.scope != "federated":
        return public
    return replace(public, transform=now) if now.columns == public.transform.columns else public


def _prepared(client: Client, transform: Prepared) -> Client:
    ready = {name: replace(part, transform=transform) for name, part in _parts(client).items()}
    return replace(client, **ready)  # type: ignore[arg-type]


def _parts(client: Client) -> dict[str, Examples]:
    parts = {"train": client.train, "val": client.val, "test": client.test}
    return {name: part for name, part in parts.items() if part is not None}


def _pool(client: Client) -> Examples:
    parts = _parts(client)
    for name, part in parts.items():
        if difference := differ(client.train, part):
            raise UserError(
                f"client {client.id!r}: train and {name} cannot be put together and dealt again, since their {difference}; "
                "prepare both alike, or leave resplit out"
            )
    return joined(list(parts.values()))


def _dealt(client: Client, pool: Examples, seed: int, roles: dict[str, str]) -> Client:
    labels = pool.labels.cpu().numpy()
    if pool.group is not None:
        return _dealt_by_group(client, pool, labels, seed, roles)
    rest: NDArray[np.int64] = np.arange(len(pool))
    held_out: dict[str, Examples] = {}
    for name, given in (("test", client.test), ("val", client.val)):
        if given is not None:
            out = stratified(labels[rest], len(given), derive(seed, name), keep=True)
            held_out[name] = replace(_select(pool, rest[out]), augment=None)
            rest = np.delete(rest, out)
    return replace(client, train=_select(pool, rest), **held_out)  # type: ignore[arg-type]


def _dealt_by_group(client: Client, pool: Examples, labels: NDArray[Any], seed: int, roles: dict[str, str]) -> Client:
    groups = groups_of(pool.column(str(pool.group)))
    ends = np.cumsum([len(part) for part in _parts(client).values()])
    given = dict(zip(_parts(client), np.split(groups, ends[:-1]), strict=True))
    number = len(np.unique(groups))
    of_sets = {name: len(np.unique(own)) / number for name, own in given.items()}
    shares = {str(name): of_sets[name] for name in ("test", "val") if name in of_sets}
    sets = by_group(labels, groups, shares, seed, roles)
    if empty := [name for name, rows in sets.items() if not len(rows)]:
        raise UserError(
            f"client {client.id!r} has no group of column {pool.group!r} for its {empty[0]} set when examples are dealt "
            "again, since other clients have the same groups; leave resplit out"
        )
    held_out = {name: replace(_select(pool, sets[name]), augment=None) for name in shares}
    return replace(client, train=_select(pool, sets["train"]), **held_out)  # type: ignore[arg-type]


def _select(pool: Examples, chosen: NDArray[np.int64]) -> Examples:
    return pool.select(torch.from_numpy(chosen).to(pool.device))


def _check_disjoint(clients: Sequence[Client]) -> None:
    """Dealt again, what is in two sets would train one client and test another, or the same."""
    stored: dict[tuple[object, ...], list[tuple[str, str, NDArray[np.int64]]]] = {}
    for client in clients:
        for name, part in _parts(client).items():
            stored.setdefault(places(part.x), []).append((client.id, name, rows(part).cpu().numpy()))
    for sets in stored.values():
        found = np.concatenate([own for *_, own in sets])
        set_of = np.repeat(np.arange(len(sets)), [len(own) for *_, own in sets])
        order = np.argsort(found, kind="stable")
        twice = np.flatnonzero(np.diff(found[order]) == 0)
        if len(twice):
            one, other = (sets[set_of[order[twice[0] + k]]] for k in (0, 1))
            raise UserError(
                f"{one[1]} of client {one[0]!r} and {other[1]} of client {other[0]!r} hold the same example: dealt again, "
                "it could train one network and test another; give each set examples of its own (a test set for all "
                "clients is global_test), or leave resplit out"
            )
