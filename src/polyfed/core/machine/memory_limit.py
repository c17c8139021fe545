"""Networks that no machine could hold are refused before memory is taken.

A width of 10^9 in a configuration would make the system kill the process, or others. So while one of polyfed's own networks
is built, it is first made of tensors without numbers, and their sizes are added up.
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
def total_memory() -> int:
    """The bytes of memory that this machine, or the container around the process, has in all."""
    sizes = [2**50]  # where the system does not say
    with suppress(AttributeError, ValueError, OSError):  # Windows has no such names
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError):  # "max" where there is no limit
        sizes.append(int(_CGROUP_LIMIT.read_text(encoding="ascii")))
    return min(size for size in sizes if size > 0)


def check_fits_in_memory(name: str, size: int) -> None:
    """Refuses what this machine has no memory for.

    Args:
        name: takes `size` bytes, for the error.

    Raises:
        UserError: this machine has less memory.

    >>> check_fits_in_memory("a table", 4 * 10**15)
    Traceback (most recent call last):
    polyfed.core.errors.UserError: a table would take more than 4 PB of memory, and this machine has ...
    """
    if size > total_memory():
        raise UserError(
            f"{name} would take more than {_format_bytes(size)} of memory, and this machine has "
            f"{_format_bytes(total_memory())}; make it smaller"
        )


def build_within_memory(name: str, build: Callable[[], T]) -> T:
    """What `build` makes, if all tensors of it fit into this machine's memory together. It is called twice: first with
    tensors that have sizes only.

    Args:
        name: is made, for the error.
        build: makes it; the second call has the random state that the first had.

    Raises:
        UserError: they do not fit, or are more than `MAX_NETWORK_TENSORS`.

    >>> build_within_memory("a network", lambda: torch.nn.Linear(10**6, 10**9))
    Traceback (most recent call last):
    polyfed.core.errors.UserError: a network would take more than 4 PB of memory, and this machine has ...
    """
    try:
        with torch.random.fork_rng(devices=[]), _TensorSizeCounter(name):
            build()
    except UserError:
        raise
    except Exception as error:  # it needs values to go on; what is wrong with it otherwise is raised below
        if "overflow" in str(error).lower():  # sizes beyond 2^63, which torch does not even take
            raise UserError(f"{name} would have sizes beyond what any machine can hold; make it smaller") from error
    return build()


@final
class _TensorSizeCounter(TorchFunctionMode):
    """Lets tensors be made without their numbers, and adds up what they would take."""

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
            return args[0]  # the values of an initialisation
        return func(*args, **options)

    def _count(self, tensor: Tensor) -> None:
        self._bytes += tensor.numel() * tensor.element_size()
        self._tensors += 1
        check_fits_in_memory(self._name, self._bytes)
        if self._tensors > MAX_NETWORK_TENSORS:
            raise UserError(f"{self._name} would have more than {MAX_NETWORK_TENSORS} tensors; make it smaller")


def _format_bytes(size: int) -> str:
    """A number of bytes.

    >>> _format_bytes(8 * 10**9), _format_bytes(4 * 10**15), _format_bytes(10**30)
    ('8 GB', '4 PB', '10^30 bytes')
    """
    units = ("bytes", "kB", "MB", "GB", "TB", "PB")
    step = (len(str(size)) - 1) // 3
    if step >= len(units):
        return f"10^{len(str(size)) - 1} bytes"
    return f"{size / 1000**step:.3g} {units[step]}"
