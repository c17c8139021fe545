"""Converts the clients that a caller passes in any iterable to a list."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.examples.text_labels import share_classes
from polyfed.data.sources.client_source import is_client_source
from polyfed.simulation.checks.clients.table_schemas import table_class_names

_SETS = ("train", "test", "val", "global_test")


def list_clients(clients: Any) -> list[Client]:
    """Returns the clients as a list, from any iterable of them (list, generator, `dict.values()`, array of objects).

    Where labels were given as texts, they are numbered by the classes of all clients together.

    Raises:
        UserError: one client, a mapping, something that cannot be iterated, an empty iterable, or one that holds anything
            else; or labels of some clients are texts, of others numbers.

    >>> from polyfed.testing import small_clients
    >>> [client.id for client in list_clients(client for client in small_clients(2))]
    ['client-0', 'client-1']
    """
    if is_client_source(clients):
        raise UserError(
            f"{type(clients).__name__} is a source, which makes clients when they are drawn, and only federate, resume and "
            "compare take one; give a list: [source.client(i) for i in source.ids[:100]]"
        )
    if isinstance(clients, Client):
        raise UserError(f"clients must be a list of polyfed.Client objects, got one client, {clients.id!r}: [client]")
    if hasattr(clients, "iloc"):
        raise UserError(
            f"clients must be a list of polyfed.Client objects, got {type(clients).__name__}; divide it by its sites: "
            "pf.data.split_table(rows, target, site).build_clients(network)"
        )
    if isinstance(clients, Mapping):
        raise UserError(
            "clients must be a list of polyfed.Client objects, got a mapping; give its values: list(clients.values())"
        )
    if not isinstance(clients, Iterable) or isinstance(clients, str | bytes):
        almost = (
            " (the class itself: make one)" if isinstance(clients, type) else " with no method client(id)"
            if hasattr(clients, "ids") else "; give its clients, .build_clients(network)"
            if hasattr(clients, "build_clients") else ""
        )  # fmt: skip
        raise UserError(
            f"clients must be a list of polyfed.Client objects, or a source with ids and client(id), got "
            f"{clients.__name__ if isinstance(clients, type) else type(clients).__name__}{almost}"
        )
    listed = list(clients)
    if not listed:
        raise UserError("a federation needs at least one client, got none")
    for client in listed:
        if not isinstance(client, Client):
            raise UserError(f"clients must be polyfed.Client objects, got {type(client).__name__}")
    return _share_classes_of_clients(listed)


def class_names_of(clients: Sequence[Client]) -> tuple[str, ...] | None:
    """Returns the classes' names, from labels given as texts or from tables; None if labels were numbers."""
    if clients[0].train.classes is not None:
        return clients[0].train.classes
    names, *others = {table_class_names(client.train) for client in clients}
    return None if others or not clients[0].task.yes_no_columns(len(names)) else names


def _share_classes_of_clients(clients: list[Client]) -> list[Client]:
    """Returns clients whose labels are numbered by the classes of all of them, where labels were given as texts."""
    if len({client.train.classes for client in clients}) == 1:
        return clients
    sets = {
        f"client {client.id!r}: {name}": examples
        for client in clients
        for name in _SETS
        if (examples := getattr(client, name)) is not None
    }
    shared = share_classes(sets)

    def renumber(client: Client) -> Client:
        sets: dict[str, Any] = {name: shared.get(f"client {client.id!r}: {name}") for name in _SETS}
        return replace(client, **sets)

    return [renumber(client) for client in clients]
