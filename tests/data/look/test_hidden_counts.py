"""Counts of one to four rows that are hidden cannot be computed from the counts that are shown and their sum."""

import itertools

import torch

from polyfed.data.look.counts import MIN_COUNT, SUPPRESSED, hide_small_cells


def _solutions(marks, total):
    """Returns every choice of counts for the hidden cells that fits their marks and the sum of all cells."""
    rest = total - sum(mark for mark in marks if mark >= 0)
    ranges = [
        range(1, MIN_COUNT) if mark == SUPPRESSED else range(MIN_COUNT, int(rest) + 1) for mark in marks if mark < 0
    ]
    return [choice for choice in itertools.product(*ranges) if sum(choice) == rest]


def test_sum_of_hidden_cells_has_more_than_one_solution():
    for cells in itertools.combinations_with_replacement((0, 1, 2, 4, 5, 6, 17), 3):
        marks = hide_small_cells(torch.tensor([*cells, 9.0])).tolist()
        if min(count or MIN_COUNT for count in cells) >= MIN_COUNT:
            assert marks == [*cells, 9.0]
            continue
        solutions = _solutions(marks, sum(cells) + 9)
        small = [place for place, mark in enumerate(mark for mark in marks if mark < 0) if mark == SUPPRESSED]
        assert all(len({choice[place] for choice in solutions}) > 1 for place in small), (cells, marks)
