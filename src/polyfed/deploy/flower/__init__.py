"""Connects polyfed with the framework Flower: the server runs as a ServerApp, and each site runs behind a SuperNode.

The projects that `polyfed flower init` writes import `server_app` and `client_app` from here.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyfed.deploy.flower.apps import client_app, server_app

__all__ = ["client_app", "server_app"]


def __getattr__(name: str) -> Any:
    """Imports `server_app` and `client_app` on first access, since they need torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from polyfed.deploy.flower import apps

    return getattr(apps, name)
