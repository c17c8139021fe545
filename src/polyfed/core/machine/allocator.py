"""What this process keeps for what it computes next: memory, and compiled kernels."""

import ctypes
import os
import sys
from functools import cache

_TRIM, _TOP, _MMAP = -1, -2, -3  # M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD of glibc's malloc.h
_LARGEST = 32 * 2**20  # that glibc takes for the last


@cache
def tune_malloc() -> bool:
    """Lets this process keep memory that it frees for what it allocates next; whether it does, on Linux with glibc.

    By default glibc gives large pieces back to the system. A step of training takes the same megabytes as the one before; to
    get them anew, page by page, can cost as much as the arithmetic. The process stays as large as it ever was.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    limits = (_MMAP, _LARGEST), (_TRIM, 2**31 - 1), (_TOP, 2 * _LARGEST)
    return all(mallopt(option, value) == 1 for option, value in limits)


def enlarge_kernel_cache() -> None:
    """Lets oneDNN keep 16,384 compiled kernels instead of 1,024, unless ONEDNN_PRIMITIVE_CACHE_CAPACITY says otherwise.

    Each shape has kernels of its own. Where the examples of a batch take different operations, shapes differ from step to
    step, and are more than 1,024: without this a third of a step can be spent on compiling. oneDNN reads the number when it
    computes for the first time in a process, so this is called where such a network is imported.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
