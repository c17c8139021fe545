"""Chooses the device on which clients compute, and checks that the packages an engine needs are installed."""

import torch

from polyfed.core.errors import UserError, check_extra_installed
from polyfed.simulation.settings import Settings, unknown_device_error


def check_engine_installed(engine: str) -> None:
    """Raises a `UserError` if the package that an engine needs, such as Ray, is not installed."""
    if engine == "ray":
        check_extra_installed("ray", "ray", "engine='ray'", "take engine='auto'")


def choose_client_device(settings: Settings) -> torch.device:
    """Returns the torch device on which the clients of a run compute.

    With Ray the cluster's nodes may differ from this machine, so that it is CUDA if workers have GPUs, else the CPU.

    Raises:
        UserError: as for `choose_device`.
    """
    if settings.engine == "ray":
        return torch.device("cuda" if settings.gpus_per_worker else "cpu")
    return choose_device(settings.device)


def choose_device(name: str) -> torch.device:
    """Returns the torch device for a name: "auto" (CUDA if available, else CPU), "cpu", "cuda", "cuda:1", "mps", ....

    Raises:
        UserError: an unknown or unavailable device.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(unknown_device_error(name)) from error
    if not _is_device_available(device.type):
        raise UserError(f"device {name!r} is not available on this machine; use device='cpu'")
    return device


def _is_device_available(kind: str) -> bool:
    """Returns whether this machine has a device of this kind ("cuda", say)."""
    if kind in ("cpu", "mps"):
        return kind == "cpu" or torch.backends.mps.is_available()
    module = getattr(torch, kind, None)  # torch.cuda, torch.xpu, or the module of a third-party backend
    return bool(module is not None and hasattr(module, "is_available") and module.is_available())
