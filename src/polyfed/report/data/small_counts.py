"""Hides counts of fewer than five rows of a site on the page: it can be passed on, and such a count nearly names a row."""

import re
from collections.abc import Sequence

import torch

from polyfed.core.io.text.number_format import format_count
from polyfed.data.look.counts import MIN_COUNT, SUPPRESSED, describe_count, hide_small_cells

# The words of `Task.describe_rarest`: of a class, of a label's side, and of events.
_FEW_OF_CLASS = re.compile(rf"\b[1-{MIN_COUNT - 1}] (of the rare(?:r|st) class|on the rarer side|event)\b")
# The number of folds without a class is told by its examples.
_SOME_FOLDS = re.compile(r"\bin \d+ of \d+ (folds|runs)\b")
# A site's number of rows, in a finding of a look: alone, or after that of a class.
_FEW_ROWS = re.compile(rf"\((?:fewer than {MIN_COUNT} of )?[1-{MIN_COUNT - 1}]\)")


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
    >>> hide_small_counts("AUC is not defined at west in 3 of 5 folds")
    'AUC is not defined at west in some folds'
    """
    plural = {"event": "events"}
    text = _FEW_OF_CLASS.sub(lambda match: f"fewer than {MIN_COUNT} {plural.get(match[1], match[1])}", text)
    return _SOME_FOLDS.sub(r"in some \1", text) if " is not defined at " in text else text


def hide_small_sites(text: str) -> str:
    """Returns a finding about few examples without numbers of rows below `MIN_COUNT` of a site.

    >>> hide_small_sites("few examples: west (3), south (22)")
    'few examples: west (fewer than 5), south (22)'
    """
    return _FEW_ROWS.sub(f"(fewer than {MIN_COUNT})", text)
