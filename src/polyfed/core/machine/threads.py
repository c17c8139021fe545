"""Runs each piece of work on one thread, so that results do not depend on how many threads there are.

Clients compute with one thread each. On the server, while processes that run clients wait, each item is computed by one
thread, and only which thread computes it varies: torch's own threads would divide an operation among them, which changes the
rounding.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from polyfed.core.nn.grad_mode import grad_enabled

Item = TypeVar("Item")
Result = TypeVar("Result")
_ONE_FEDERATION = threading.RLock()


def num_usable_cores() -> int:
    """Returns the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Applies `function` to each item in a thread pool, and yields the results in the order of the items.

    The threads end with the iterator, so that a process that is forked later inherits none.

    >>> list(map_in_threads(lambda n: n * n, [1, 2, 3]))
    [1, 4, 9]
    """
    cores = num_usable_cores()
    if min(cores, len(items)) < 2:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(min(cores, len(items)), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.map(function, items)


@contextmanager
def exclusive_single_torch_thread_with_grad() -> Iterator[None]:
    """Gives torch one thread and gradients inside a `with` block that one Python thread can enter.

    Sums in another order would give other results, and two busy processes with two threads each slow one another down
    tenfold. Federations in two Python threads of a process take turns: they would share cached modules and torch's random
    state.
    """
    with _ONE_FEDERATION:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with grad_enabled():  # whatever the caller's mode
                yield
        finally:
            torch.set_num_threads(before)
