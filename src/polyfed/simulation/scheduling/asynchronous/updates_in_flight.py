"""Defines `UpdatesInFlight`: the clients at work in an asynchronous run, and when each will have replied."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, final

from polyfed.core.errors import UserError
from polyfed.core.io.values.validation import validation_error
from polyfed.core.state_dict import PyTree


@final
@dataclass(frozen=True)
class UpdateInFlight:
    """Describes the local update of one client: when it started and ends, in simulated seconds, and from which version.

    Attributes:
        started: when the client was called.
        finishes: when its reply arrives.
        version: the number of server updates before it started.
    """

    started: float
    finishes: float
    version: int


class _UpdateInFlightEntry(TypedDict):
    """Describes an `UpdateInFlight` in a checkpoint."""

    started: float
    finishes: float
    version: int


class _UpdatesInFlightEntry(TypedDict):
    """Describes `UpdatesInFlight` in a checkpoint."""

    clock: float
    draws: int
    clients: dict[str, _UpdateInFlightEntry]
    versions: dict[str, Any]


@final
@dataclass(frozen=True)
class UpdatesInFlight:
    """Holds the clients at work after a server update, and the versions of the server state from which they started.

    Attributes:
        clock: simulated seconds.
        draws: how often clients have been drawn.
        by_client: the clients at work.
        versions: version -> server state, of the versions before the newest from which a client at work has started.
    """

    clock: float = 0.0
    draws: int = 0
    by_client: Mapping[str, UpdateInFlight] | None = None
    versions: Mapping[int, PyTree] | None = None

    def to_plain_state(self) -> dict[str, Any]:
        """Returns the flights as nested dicts, for a checkpoint."""
        clients = sorted((self.by_client or {}).items())
        return {
            "clock": self.clock,
            "draws": self.draws,
            "clients": {
                client: {"started": flight.started, "finishes": flight.finishes, "version": flight.version}
                for client, flight in clients
            },
            "versions": {str(version): state for version, state in sorted((self.versions or {}).items())},
        }

    @classmethod
    def from_plain_state(cls, entry: Any) -> "UpdatesInFlight":
        """Builds the flights from a checkpoint's nested dicts.

        Raises:
            UserError: a field is missing or of another type, or the server state of a version is missing.
        """
        if error_text := validation_error(entry, _UpdatesInFlightEntry, "the schedule"):
            raise UserError(f"{error_text}")
        flights = {client: UpdateInFlight(**flight) for client, flight in entry["clients"].items()}
        versions = {int(version): state for version, state in entry["versions"].items() if version.isdecimal()}
        for client, flight in flights.items():
            if flight.version not in versions or not 0 <= flight.started <= flight.finishes < math.inf:
                raise UserError(
                    f"{client!r} is at work in it from version {flight.version} on, and the server state of that version, "
                    "or the time of the reply, is missing"
                )
        return cls(float(entry["clock"]), entry["draws"], flights, versions)
