"""What this machine has for clients to compute on: a device, and the packages of an engine."""

import torch

from polyfed.core.errors import UserError, check_extra_installed
from polyfed.simulation.settings import Settings


def check_engine_installed(engine: str) -> None:
    """Raises a `UserError` if the engine needs a package that is missing."""
    if engine == "ray":
        check_extra_installed("ray", "ray", "engine='ray'", "take engine='auto'")


def client_device(settings: Settings) -> torch.device:
    """Where the clients of a run compute. With Ray that is not for this machine to say.

    Raises:
        UserError: as for `choose_device`.
    """
    if settings.engine == "ray":
        return torch.device("cuda" if settings.gpus_per_worker else "cpu")
    return choose_device(settings.device)


def choose_device(name: str) -> torch.device:
    """The device of a name: "auto" (cuda if there is one, else cpu), "cpu", "cuda", "cuda:1", "mps", or another that this
    torch knows.

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
        raise UserError(f"unknown device {name!r}; use auto, cpu, cuda, cuda:N, mps, or what else torch has") from error
    if not _available(device.type):
        raise UserError(f"device {name!r} is not available on this machine; use device='cpu'")
    return device


def _available(kind: str) -> bool:
    """Whether this machine has devices of the kind."""
    if kind in ("cpu", "mps"):
        return kind == "cpu" or torch.backends.mps.is_available()
    module = getattr(torch, kind, None)  # torch.cuda, torch.xpu, or that of a backend from outside
    return bool(module is not None and hasattr(module, "is_available") and module.is_available())
