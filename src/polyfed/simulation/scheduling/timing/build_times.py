"""Builds the clients' simulated times from the settings of a run."""

import hashlib
from typing import Any

from polyfed.core.algorithm import Algorithm
from polyfed.simulation.rounds.client_registry import ClientRegistry
from polyfed.simulation.scheduling.timing.availability import read_availability
from polyfed.simulation.scheduling.timing.client_times import ClientTimes
from polyfed.simulation.scheduling.timing.device_files import load_device_text
from polyfed.simulation.scheduling.timing.rates import parse_rates
from polyfed.simulation.settings import Settings


def build_client_times(
    settings: Settings, algorithm: Algorithm[Any, Any], registry: ClientRegistry
) -> ClientTimes | None:
    """Builds times from `speeds`, `bandwidth` and `availability`; None if no time is simulated.

    Where time is simulated without `speeds`, each client goes through one example in a second.

    Raises:
        UserError: a file cannot be read, or has nothing for a client.
    """
    if not settings.simulates_time:
        return None
    ids, seed = registry.ids, settings.seed
    speeds = parse_rates(1.0 if settings.speeds is None else settings.speeds, "speeds", seed, ids)
    bandwidths = None if settings.bandwidth is None else parse_rates(settings.bandwidth, "bandwidth", seed, ids)
    traces = None if settings.availability is None else read_availability(settings.availability, ids)
    return ClientTimes(algorithm, registry.num_examples, speeds, bandwidths, traces, _hash_files(settings))


def _hash_files(settings: Settings) -> str:
    """Returns a hash of the files that the settings name, by which a resumed run finds a changed one; "" for none."""
    paths = {name: getattr(settings, name) for name in ("speeds", "bandwidth", "availability")}
    texts = [
        load_device_text(path, name)
        for name, path in paths.items()
        if isinstance(path, str) and path.endswith((".csv", ".json"))
    ]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest() if texts else ""
