"""Issues and collects warnings about data that may mislead: leaks, ids among the features, copies of rows."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_COLLECTED: ContextVar[list[str] | None] = ContextVar("_COLLECTED", default=None)


def warn_of_data(text: str, *, stacklevel: int = 2) -> None:
    """Issues `text` as a `UserWarning` about the data, and appends it to the list of an enclosing
    `collect_data_warnings` block, if there is one.
    """
    collected = _COLLECTED.get()
    if collected is not None and text not in collected:
        collected.append(text)
    warnings.warn(text, UserWarning, stacklevel=stacklevel + 1)


@contextmanager
def collect_data_warnings() -> Iterator[list[str]]:
    """Yields a list that receives the text of each data warning issued inside the `with` block, each text once; the
    warnings are still issued.

    >>> with warnings.catch_warnings(), collect_data_warnings() as texts:
    ...     warnings.simplefilter("ignore")
    ...     warn_of_data("3 rows are copies")
    >>> texts
    ['3 rows are copies']
    """
    texts: list[str] = []
    before = _COLLECTED.set(texts)
    try:
        yield texts
    finally:
        _COLLECTED.reset(before)
