"""Hides counts of fewer than five rows of a site on the page: it can be passed on, and such a count nearly names a row."""

import re
from collections.abc import Sequence

import torch

from polyfed.core.io.text.number_format import format_count
from polyfed.data.look.counts import MIN_COUNT, SUPPRESSED, describe_count, hide_small_cells

# The words of `Task.describe_rarest`: of a class, of a label's side, and of events.
_FEW_OF_CLASS = re.compile(rf"\b[1-{MIN_COUNT - 1}] (of the rare(?:r|st) class|on the rarer side|event)\b")


def format_count_of_rows(count: float) -> str:
    """Returns a count of rows as text, without saying one from 1 to `MIN_COUNT` - 1.

    >>> [format_count_of_rows(count) for count in (0, 3, 12)]
    ['0', '<5', '12']
    """
    return describe_count(SUPPRESSED) if 0 < count < MIN_COUNT else format_count(count)


def format_counts_of_parts(counts: Sequence[float]) -> list[str]:
    """Returns as texts the counts of parts whose sum is shown, so that no small one can be computed from the others.

    >>> format_counts_of_parts([3, 10]), format_counts_of_parts([20, 3, 9])
    (['<5', '≥5'], ['20', '<5', '≥5'])
    """
    return [describe_count(count) for count in hide_small_cells(torch.tensor(counts, dtype=torch.float64)).tolist()]


def hide_small_counts(text: str) -> str:
    """Returns a sentence of a comparison without its counts of fewer than `MIN_COUNT` rows of a class.

    >>> hide_small_counts("9 test examples, 2 of the rarer class (ill); 1 event")
    '9 test examples, fewer than 5 of the rarer class (ill); fewer than 5 events'
    """
    plural = {"event": "events"}
    return _FEW_OF_CLASS.sub(lambda found: f"fewer than {MIN_COUNT} {plural.get(found[1], found[1])}", text)
