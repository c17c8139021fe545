"""Carries a deployment over Flower: clients at real sites, each behind a SuperNode; the server runs as a ServerApp.

`polyfed.deploy.flower:server_app` and `polyfed.deploy.flower:client_app` stand in the projects of sites.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyfed.deploy.flower.apps import client_app, server_app

__all__ = ["client_app", "server_app"]


def __getattr__(name: str) -> Any:
    """Imports the apps when they are asked for, since `polyfed.deploy.flower.superlink` must not load torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from polyfed.deploy.flower import apps

    return getattr(apps, name)
