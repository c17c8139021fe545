"""Builds the engine that the settings of a run name: in this process, in a pool of processes, or on a Ray cluster."""

import pickle
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from polyfed.core.algorithm import Algorithm, Client
from polyfed.core.errors import UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.metrics import unpicklable_metric_error
from polyfed.core.machine.threads import num_usable_cores
from polyfed.core.messages.compressors import Compressor, parse_compressor
from polyfed.simulation.engines.base import Engine
from polyfed.simulation.engines.benchmark import EngineChoice
from polyfed.simulation.engines.cohort import CohortEngine
from polyfed.simulation.engines.devices import check_engine_installed, choose_client_device
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.engines.pool import PoolEngine, can_fork
from polyfed.simulation.settings import Settings
from polyfed.simulation.sources.source_clients import SourceClients


def build_engine(
    name: str,
    algorithm: Algorithm[Any, Any],
    clients: Sequence[Client] | SourceClients,
    device: torch.device,
    workers: int | str,
    ray_address: str = "local",
    gpus_per_worker: float = 0.0,
    metrics: Sequence[Metric] = (),
    reply_compression: Compressor | None = None,
    choice: EngineChoice | None = None,
    num_parties: int | None = None,
) -> Engine:
    """Builds the engine "inprocess", "pool", "cohort", "ray" or "auto" for these clients.

    Raises:
        UserError: "pool" cannot send a client to its processes.

    Args:
        name: "inprocess"; "pool"; "cohort", many clients stacked, in this process or in each worker of a pool; "ray"; or
            "auto": the pool on a CPU with two or more workers, else this process.
        algorithm, clients: given to each worker.
        device: where clients compute; "ray" goes by `gpus_per_worker` instead.
        workers: number of processes, at most one per client; "auto" is one per usable core on Linux, and this process
            on other systems; 0 means this process.
            (`Settings` checks both.)
        ray_address, gpus_per_worker: see `Settings`; for "ray".
        metrics: computed at evaluation; empty takes the default ones of the task.
        reply_compression: of replies; None sends them uncompressed.
        choice: what "auto" measured; None trains one by one.
        num_parties: clients of a round, if "ray" adds up their replies on its nodes.
    """
    if name == "ray":
        check_engine_installed(name)
        from polyfed.simulation.engines.ray.ray_engine import (
            RayEngine,  # imported late: Ray is an extra, and takes a second
        )

        options = ray_address, gpus_per_worker, metrics, reply_compression, num_parties
        return RayEngine(algorithm, clients, workers, *options)
    count = min(num_usable_cores() if workers == "auto" else int(workers), len(clients))
    # On other systems than Linux a worker takes seconds to start, and a script needs `if __name__ == "__main__":` for it.
    is_one_process_better = count == 1 or device.type != "cpu" or sys.platform != "linux"
    in_this_process = count == 0 or (workers == "auto" and is_one_process_better)
    uses_cohorts = name == "cohort" or (name == "auto" and choice is not None and choice.uses_cohorts)
    sequential = choice.apart if choice is not None and name == "auto" else ()
    runs_here = name == "inprocess" or (name != "pool" and in_this_process)
    if not runs_here and not can_fork(device):
        pickle_error = unpicklable_client_error(clients) or unpicklable_metric_error(metrics)
        if pickle_error and name == "pool":
            raise UserError(f"{pickle_error}; define it at the top level of a module, or use engine='inprocess'")
        if pickle_error:
            warnings.warn(f"{pickle_error}, so all clients run in this process", RuntimeWarning, stacklevel=2)
            runs_here = True
    if not runs_here:
        return PoolEngine(
            algorithm, clients, device, count, metrics=metrics, compression=reply_compression,
            uses_cohorts=uses_cohorts, sequential=sequential,
        )  # fmt: skip
    if uses_cohorts:
        return CohortEngine(algorithm, clients, device, metrics, reply_compression, sequential=sequential)
    return InProcessEngine(algorithm, clients, device, metrics, reply_compression)


def build_engine_for_settings(
    settings: Settings,
    algorithm: Algorithm[Any, Any],
    clients: Sequence[Client] | SourceClients,
    metrics: Sequence[Metric] = (),
    choice: EngineChoice | None = None,
) -> Engine:
    """Builds the engine that the settings name; `choice` decides `engine="auto"`."""
    device = choose_client_device(settings)
    ray_options = settings.ray_address, settings.gpus_per_worker
    reply_compression = parse_compressor(settings.compress)
    num_parties = None if settings.regions is None else settings.count_round_clients(len(clients))
    return build_engine(
        settings.engine, algorithm, clients, device, settings.workers, *ray_options, metrics, reply_compression, choice,
        num_parties,
    )  # fmt: skip


def unpicklable_client_error(clients: Sequence[Client] | SourceClients) -> str | None:
    """Returns an error if a client's model factory or loss cannot be sent to another process, or None."""
    if isinstance(clients, SourceClients):
        owned: list[tuple[str, Any]] = [("source of clients", clients)]
    else:
        owned = [("model factory", client.model) for client in clients] + [("loss", client.loss) for client in clients]
    for kind, thing in {id(thing): (kind, thing) for kind, thing in owned}.values():
        try:
            pickle.dumps(thing)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            return f"the {kind} {getattr(thing, '__qualname__', thing)} cannot be sent to another process ({error})"
    return None
