"""Converts the clients that a caller passes in any iterable to a list."""

from collections.abc import Iterable, Mapping
from typing import Any

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError


def list_clients(clients: Any) -> list[Client]:
    """Returns the clients as a list, from any iterable of them (list, generator, `dict.values()`, array of objects);
    raises a `UserError` if it is empty or holds anything else.

    Raises:
        UserError: one client, a mapping, something that cannot be iterated, an empty iterable, or one that holds anything
            else.

    >>> from polyfed.testing import small_clients
    >>> [client.id for client in list_clients(client for client in small_clients(2))]
    ['client-0', 'client-1']
    """
    if isinstance(clients, Client):
        raise UserError(f"clients must be a list of polyfed.Client objects, got one client, {clients.id!r}: [client]")
    if isinstance(clients, Mapping):
        raise UserError(
            "clients must be a list of polyfed.Client objects, got a mapping; give its values: list(clients.values())"
        )
    if not isinstance(clients, Iterable) or isinstance(clients, str | bytes):
        raise UserError(f"clients must be a list of polyfed.Client objects, got {type(clients).__name__}")
    listed = list(clients)
    if not listed:
        raise UserError("a federation needs at least one client, got none")
    for client in listed:
        if not isinstance(client, Client):
            raise UserError(f"clients must be polyfed.Client objects, got {type(client).__name__}")
    return listed
