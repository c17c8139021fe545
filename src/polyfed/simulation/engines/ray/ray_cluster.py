"""Connects to a Ray cluster, counts the workers that fit on it, and describes its resources and why workers died."""

import logging
import os
import re
import signal
import socket
import threading

import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayError

from polyfed.core.errors import UserError
from polyfed.core.machine.threads import num_usable_cores

_ANSWER_SECONDS = 10.0  # that a cluster has to accept a connection
_RESOURCES = {"CPU": "cores", "GPU": "GPUs"}


def connect_to_ray_if_needed(address: str, workers: int | str) -> bool:
    """Joins or starts a Ray cluster, unless this process is connected; returns whether it did.

    Raises:
        UserError: no Ray answers at `address`.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    # Ray replaces the handler of SIGTERM, which belongs to the caller.
    in_main_thread = threading.current_thread() is threading.main_thread()
    sigterm_handler = signal.getsignal(signal.SIGTERM) if in_main_thread else None
    try:
        if address == "local":
            cores = max(num_usable_cores(), 0 if workers == "auto" else int(workers))
            ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
        else:
            endpoint = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
            if ":" in endpoint and "://" not in endpoint:  # Ray itself would keep trying for minutes
                host, _, port = endpoint.rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
            ray.init(address=address, **quiet)
    except (OSError, OverflowError, ValueError, RuntimeError, RayError) as error:  # a ConnectionError is an OSError
        sentence = " ".join(str(error).split())
        raise UserError(
            f"ray_address={address!r}: no Ray answers there ({sentence}); start one with `ray start --head`, or use 'local'"
            "; if the cluster wants a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here too"
        ) from error
    finally:
        if sigterm_handler is not None:
            signal.signal(signal.SIGTERM, sigterm_handler)
    set_worker_death_logging(False)
    return True


def set_worker_death_logging(enabled: bool) -> None:
    """Sets whether Ray prints a message to standard output for each worker that dies.

    It would stand among the results, and the engine reports deaths itself. Ray has no public switch for it.
    """
    if hasattr(ray._private.worker, "_worker_logs_enabled"):
        ray._private.worker._worker_logs_enabled = enabled


def count_worker_slots(gpus_per_worker: float) -> int:
    """Returns how many workers fit on the cores and GPUs of the Ray cluster, at least one."""
    total = ray.cluster_resources()
    slots = int(total.get("CPU", 0))
    if gpus_per_worker:
        # Several workers may share a GPU, but no worker spans parts of two.
        gpu_share, gpus = gpus_per_worker, int(total.get("GPU", 0))
        slots = min(slots, gpus * int(1 / gpu_share + 1e-9) if gpu_share <= 1 else int(gpus / gpu_share))
    return max(slots, 1)


def describe_cluster_resources() -> str:
    """Describes in a text the cores and GPUs of the Ray cluster, and how many of them are free."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{total.get(kind, 0):g} {name} ({free.get(kind, 0):g} free)" for kind, name in _RESOURCES.items())


def describe_worker_death(error: RayError) -> str:
    """Describes in a few words how a Ray worker died, in place of Ray's long message about possible causes."""
    text = str(error)
    # Ray raises `ActorUnavailableError` seconds before it knows that a node is lost.
    connection_lost = isinstance(error, ObjectLostError | ActorUnavailableError)
    if connection_lost or "node has died" in text or "node was terminated" in text:
        return "the loss of its node or connection"
    if exit_code := re.search(r"exit code (\d+)", text):
        return f"exit status {exit_code[1]}"
    return "a crash or kill"
