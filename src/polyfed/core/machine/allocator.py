"""Makes this process keep freed memory and compiled kernels for reuse, which saves time."""

import ctypes
import os
import sys
from functools import cache

_TRIM, _TOP, _MMAP = -1, -2, -3  # M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD of glibc's malloc.h
_LARGEST = 32 * 2**20  # largest M_MMAP_THRESHOLD that glibc accepts


@cache
def make_malloc_keep_freed_memory() -> bool:
    """Makes glibc's malloc keep freed memory; returns whether that worked, as on Linux with glibc.

    By default glibc gives large pieces back to the system. A step of training needs the same megabytes as the one before;
    getting them anew, page by page, can cost as much as the arithmetic. The process stays as large as it ever was.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    limits = (_MMAP, _LARGEST), (_TRIM, 2**31 - 1), (_TOP, 2 * _LARGEST)
    return all(mallopt(option, value) == 1 for option, value in limits)


def enlarge_onednn_kernel_cache() -> None:
    """Enlarges oneDNN's cache to 16,384 kernels, unless ONEDNN_PRIMITIVE_CACHE_CAPACITY is set.

    Each shape has its own kernels. Where the examples of a batch take different operations, more than 1,024 shapes change
    from step to step, and compiling can take a third of a step. oneDNN reads the number at its first computation in a
    process, so call this where such a network is imported.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
