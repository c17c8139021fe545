"""Provides an immutable, hashable mapping for the fields of frozen dataclasses."""

from collections.abc import Iterator, Mapping
from typing import Any, final

from polyfed.core.errors import UserError


@final
class FrozenMapping(Mapping[str, Any]):
    """Maps strings to hashable values unchangeably; lists become tuples, and mappings this class.

    Raises:
        UserError: a name is not text, or a value cannot be hashed.

    >>> {FrozenMapping({"hidden": [64, 32]}): 1}[FrozenMapping({"hidden": (64, 32)})]
    1
    """

    def __init__(self, items: Mapping[str, Any]) -> None:
        if bad := [name for name in items if not isinstance(name, str)]:
            raise UserError(f"arguments need text as names, got {bad[0]!r}")
        self._items = {name: _freeze_value(name, value) for name, value in items.items()}

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def _freeze_value(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return FrozenMapping(value)
    if isinstance(value, list | tuple):
        return tuple(_freeze_value(name, item) for item in value)
    try:
        hash(value)
    except TypeError as error:
        raise UserError(
            f"argument {name}={value!r} is of type {type(value).__name__}, which a "
            f"description cannot hold; use numbers, text, lists and mappings"
        ) from error
    return value
