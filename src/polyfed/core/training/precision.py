"""Sets the precision of local training: float32, or autocast to bfloat16 if the processor supports it."""

import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Literal

import torch

from polyfed.core.errors import UserError

Precision = Literal["fp32", "bf16"]


def autocast_context(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Returns a context manager inside which forward passes are computed in this precision; the weights stay float32."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, torch.bfloat16)


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raises a `UserError` if this processor cannot compute in the precision; called before a run starts.

    Some virtual machines report AMX but kill the process at its first instruction, so a child process tries it.
    """
    if precision == "bf16" and device.type == "cpu" and not _is_bf16_supported():
        raise UserError(
            "precision='bf16' kills the process on this processor (tried in a child process); use precision='fp32', or "
            "set the environment variable ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 to keep oneDNN from AMX"
        )


_BF16_PROBE = """
import torch
net = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 5), torch.nn.Flatten(), torch.nn.Linear(32 * 576, 64))
with torch.autocast("cpu", torch.bfloat16):
    net(torch.randn(32, 3, 28, 28)).float().sum().backward()
"""


@lru_cache(maxsize=1)
def _is_bf16_supported() -> bool:
    return subprocess.run([sys.executable, "-c", _BF16_PROBE], capture_output=True, check=False).returncode == 0
