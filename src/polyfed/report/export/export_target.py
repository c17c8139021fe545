"""Says what a network can be exported to; the command line asks it before torch is imported."""

from pathlib import Path
from typing import Literal

from polyfed.core.errors import UserError, check_extra_installed, did_you_mean

Format = Literal["torchscript", "onnx", "weights"]
NETWORK_FILES: dict[str, str | None] = {"torchscript": "network.ts", "onnx": "network.onnx", "weights": None}


def check_export_target(folder: Path, name: str) -> None:
    """Raises an error unless a folder is new, and the name is "torchscript", "onnx" or "weights" with its package installed.

    Raises:
        UserError: the folder exists, the name is not a format, or a package is missing; the message says which to install.

    >>> check_export_target(Path("new"), "onxx")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: unknown format 'onxx'; did you mean onnx? Choices: onnx, torchscript, weights
    """
    if name not in NETWORK_FILES:
        raise UserError(f"unknown format {name!r}; {did_you_mean(name, NETWORK_FILES)}")
    if name == "onnx":
        check_extra_installed("onnx", "export", "format onnx")
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} exists; choose another folder, or remove it")
