"""Defines `IdleClients`, the clients that may start, without a list of all clients."""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from typing import Any, final


@final
class IdleClients(Sequence[str]):
    """Lists the ids of all clients but the busy ones, sorted; an entry is found in the time that the busy ones take.

    Args:
        all_ids: sorted.
        busy_ids: which are left out; all of them are in `all_ids`.

    >>> idle = IdleClients(("a", "b", "c", "d"), {"a", "c"})
    >>> len(idle), list(idle), idle[1], idle[-1], idle[:1]
    (2, ['b', 'd'], 'd', 'd', ['b'])
    """

    def __init__(self, all_ids: Sequence[str], busy_ids: Collection[str]) -> None:
        self._all_ids = all_ids
        self._busy_positions = sorted(bisect_left(all_ids, client) for client in busy_ids)

    def __len__(self) -> int:
        """Returns the number of clients that are not busy."""
        return len(self._all_ids) - len(self._busy_positions)

    def __getitem__(self, position: Any) -> Any:
        """Returns the id at a position, or a list of the ids of a slice."""
        if isinstance(position, slice):
            return [self[k] for k in range(*position.indices(len(self)))]
        target = range(len(self))[position]
        for busy in self._busy_positions:
            if busy > target:
                break
            target += 1
        return self._all_ids[target]

    def __iter__(self) -> Iterator[str]:
        """Yields the ids in their order."""
        busy = set(self._busy_positions)
        return (client for position, client in enumerate(self._all_ids) if position not in busy)
