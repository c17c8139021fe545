"""Defines mappings from client ids to values that need no entry for each client."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar, final, overload

Value = TypeVar("Value")


@final
class ValueByClient(Mapping[str, Value], Generic[Value]):
    """Maps the id of each client to a value that a function computes from the client's place among the sorted ids.

    Args:
        ids: sorted.
        value_at: returns the value of the client at a place.

    >>> ages = ValueByClient(("ann", "bob"), [31, 42].__getitem__)
    >>> ages["bob"], ages.get("eve"), len(ages)
    (42, None, 2)
    """

    def __init__(self, ids: Sequence[str], value_at: Callable[[int], Value]) -> None:
        self._ids, self._value_at = ids, value_at

    def __getitem__(self, client: str) -> Value:
        """Returns the value of a client; raises a `KeyError` for an unknown id."""
        return self._value_at(place_of_id(self._ids, client))

    def __iter__(self) -> Iterator[str]:
        """Yields the ids."""
        return iter(self._ids)

    def __len__(self) -> int:
        """Returns the number of clients."""
        return len(self._ids)


@final
class ComputedSequence(Sequence[Value], Generic[Value]):
    """Computes each item of a sequence from its position, when it is asked for.

    >>> list(ComputedSequence(3, lambda place: 2 * place))
    [0, 2, 4]
    """

    def __init__(self, length: int, item_at: Callable[[int], Value]) -> None:
        self._length, self._item_at = length, item_at

    @overload
    def __getitem__(self, place: int) -> Value: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Value]: ...
    def __getitem__(self, place: int | slice) -> Value | Sequence[Value]:
        """Returns the item at a place, or the items of a slice."""
        if isinstance(place, slice):
            return [self._item_at(i) for i in range(*place.indices(self._length))]
        if not -self._length <= place < self._length:
            raise IndexError(place)
        return self._item_at(place % self._length)

    def __iter__(self) -> Iterator[Value]:
        """Yields the items, in less time than one by one by their places."""
        return map(self._item_at, range(self._length))

    def __len__(self) -> int:
        """Returns the number of items."""
        return self._length


def place_of_id(ids: Sequence[str], client: str) -> int:
    """Returns the place of a client's id among the sorted ids; raises a `KeyError` if it is not one of them."""
    place = bisect_left(ids, client)
    if place == len(ids) or ids[place] != client:
        raise KeyError(client)
    return place
