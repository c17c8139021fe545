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

Made = TypeVar("Made")
MOST_TENSORS = 20_000
_MAKERS = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.randint}
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


@cache
def room() -> int:
    """The bytes of memory that this machine, or the container around the process, has in all."""
    found = [2**50]  # where the system does not say
    with suppress(AttributeError, ValueError, OSError):  # Windows has no such names
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError):  # "max" where there is no limit
        found.append(int(_LIMIT.read_text(encoding="ascii")))
    return min(size for size in found if size > 0)


def check_room(what: str, size: int) -> None:
    """Refuses what this machine has no memory for.

    Args:
        what: takes `size` bytes, for the error.

    Raises:
        UserError: this machine has less memory.

    >>> check_room("a table", 4 * 10**15)
    Traceback (most recent call last):
    polyfed.core.errors.UserError: a table would take more than 4 PB of memory, and this machine has ...
    """
    if size > room():
        raise UserError(
            f"{what} would take more than {_in_words(size)} of memory, and this machine has {_in_words(room())}; make it "
            "smaller"
        )


def within_memory(what: str, make: Callable[[], Made]) -> Made:
    """What `make` makes, if all tensors of it fit into this machine's memory together. It is called twice: first with
    tensors that have sizes only.

    Args:
        what: is made, for the error.
        make: makes it; the second call has the random state that the first had.

    Raises:
        UserError: they do not fit, or are more than `MOST_TENSORS`.

    >>> within_memory("a network", lambda: torch.nn.Linear(10**6, 10**9))
    Traceback (most recent call last):
    polyfed.core.errors.UserError: a network would take more than 4 PB of memory, and this machine has ...
    """
    try:
        with torch.random.fork_rng(devices=[]), _Sizes(what):
            make()
    except UserError:
        raise
    except Exception as error:  # it needs values to go on; what is wrong with it otherwise is raised below
        if "overflow" in str(error).lower():  # sizes beyond 2^63, which torch does not even take
            raise UserError(f"{what} would have sizes beyond what any machine can hold; make it smaller") from error
    return make()


@final
class _Sizes(TorchFunctionMode):
    """Lets tensors be made without their numbers, and adds up what they would take."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what, self._bytes, self._tensors = what, 0, 0

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func in _MAKERS:
            known = {key: value for key, value in given.items() if key not in ("generator", "pin_memory")}
            made = func(*args, **{**known, "device": "meta"})
            if str(given.get("device")) != "meta":
                self._count(made)
            return made
        if name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], Tensor) and args[0].is_meta:
            return args[0]  # the values of an initialisation
        return func(*args, **given)

    def _count(self, made: Tensor) -> None:
        self._bytes += made.numel() * made.element_size()
        self._tensors += 1
        check_room(self._what, self._bytes)
        if self._tensors > MOST_TENSORS:
            raise UserError(f"{self._what} would have more than {MOST_TENSORS} tensors; make it smaller")


def _in_words(size: int) -> str:
    """A number of bytes.

    >>> _in_words(8 * 10**9), _in_words(4 * 10**15), _in_words(10**30)
    ('8 GB', '4 PB', '10^30 bytes')
    """
    units = ("bytes", "kB", "MB", "GB", "TB", "PB")
    step = (len(str(size)) - 1) // 3
    if step >= len(units):
        return f"10^{len(str(size)) - 1} bytes"
    return f"{size / 1000**step:.3g} {units[step]}"
