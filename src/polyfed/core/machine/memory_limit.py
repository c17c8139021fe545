"""Raises an error for networks that are too large for this machine, before their memory is allocated.

A width of 10^9 in a configuration would make the system kill this process, or others. So one of polyfed's own networks is
first built from tensors without values, whose sizes are added up.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from polyfed.core.errors import UserError

T = TypeVar("T")
MAX_NETWORK_TENSORS = 20_000
_TENSOR_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.randint}
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


@cache
def total_memory_bytes() -> int:
    """Returns the total memory in bytes of this machine, or of the container in which the process runs."""
    sizes = [2**50]  # if the system reports no size
    with suppress(AttributeError, ValueError, OSError):  # Windows has no such names
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError):  # "max" where there is no limit
        sizes.append(int(_CGROUP_LIMIT.read_text(encoding="ascii")))
    return min(size for size in sizes if size > 0)


def check_fits_in_memory(name: str, num_bytes: int) -> None:
    """Raises a `UserError` if this machine's memory is smaller than `num_bytes` bytes.

    Args:
        name: what takes the memory, for the error.
        num_bytes: size of the memory in bytes.

    >>> check_fits_in_memory("a table", 4 * 10**15)
    Traceback (most recent call last):
    polyfed.core.errors.UserError: a table would take more than 4 PB of memory, and this machine has ...
    """
    if num_bytes > total_memory_bytes():
        raise UserError(
            f"{name} would take more than {_format_bytes(num_bytes)} of memory, and this machine has "
            f"{_format_bytes(total_memory_bytes())}; make it smaller"
        )


def build_after_memory_check(name: str, build: Callable[[], T]) -> T:
    """Builds a network by calling `build` twice, first with tensors that have sizes only.

    Args:
        name: what is built, for the error.
        build: builds it; both calls start with the same random state.

    Raises:
        UserError: the tensors do not fit, or are more than `MAX_NETWORK_TENSORS`.

    >>> build_after_memory_check("a network", lambda: torch.nn.Linear(10**6, 10**9))
    Traceback (most recent call last):
    polyfed.core.errors.UserError: a network would take more than 4 PB of memory, and this machine has ...
    """
    try:
        with torch.random.fork_rng(devices=[]), _TensorSizeCounter(name):
            build()
    except UserError:
        raise
    except Exception as error:  # tensors without values can fail here; a real error is raised by the second call below
        if "overflow" in str(error).lower():  # torch takes no sizes beyond 2^63
            raise UserError(f"{name} would have sizes beyond what any machine can hold; make it smaller") from error
    return build()


@final
class _TensorSizeCounter(TorchFunctionMode):
    """Creates tensors without values inside the block, and adds up the memory that real ones would take."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name, self._bytes, self._tensors = name, 0, 0

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func in _TENSOR_FACTORIES:
            meta_options = {key: value for key, value in options.items() if key not in ("generator", "pin_memory")}
            tensor = func(*args, **{**meta_options, "device": "meta"})
            if str(options.get("device")) != "meta":
                self._count(tensor)
            return tensor
        if name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], Tensor) and args[0].is_meta:
            return args[0]  # an initialisation in place, such as `normal_`, has no values to set
        return func(*args, **options)

    def _count(self, tensor: Tensor) -> None:
        self._bytes += tensor.numel() * tensor.element_size()
        self._tensors += 1
        check_fits_in_memory(self._name, self._bytes)
        if self._tensors > MAX_NETWORK_TENSORS:
            raise UserError(f"{self._name} would have more than {MAX_NETWORK_TENSORS} tensors; make it smaller")


def _format_bytes(size: int) -> str:
    """Returns a number of bytes as text with a unit, such as "4 PB".

    >>> _format_bytes(8 * 10**9), _format_bytes(4 * 10**15), _format_bytes(10**30)
    ('8 GB', '4 PB', '10^30 bytes')
    """
    units = ("bytes", "kB", "MB", "GB", "TB", "PB")
    step = (len(str(size)) - 1) // 3
    if step >= len(units):
        return f"10^{len(str(size)) - 1} bytes"
    return f"{size / 1000**step:.3g} {units[step]}"
