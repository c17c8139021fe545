"""The median of norms that a secure sum follows by counts: how fast, how closely, and how far lies move it."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.robust.counted_median import COUNTED_MEDIAN, CountedMedian, are_counts_possible, read_announced_median


def follow(estimate, norms, lie=(), norm_of_mean=None, rounds=12):
    """The estimates before each round; `lie` has the counts of clients that send others than their norms."""
    estimates = [estimate]
    for _ in range(rounds):
        bound = 3 * estimate.median
        counts = [sum(n <= estimate.median for n in norms), sum(n <= bound for n in norms)]
        counts = [a + sum(lying[k] for lying in lie) for k, a in enumerate(counts)]
        estimate = estimate.next_estimate(counts, len(norms) + len(lie), norm_of_mean)
        estimates.append(estimate)
    return [e.median for e in estimates]


NORMS = [0.7, 0.9, 1.0, 1.2, 1.5]


@pytest.mark.parametrize("first", [0.01, 0.1, 1.0, 10.0, 100.0])
def test_it_reaches_the_median_in_five_rounds(first):
    medians = follow(CountedMedian(first), NORMS)
    assert all(1 / 3 < median < 3 for median in medians[5:])
    assert all(2 / 3 < median < 1.5 for median in medians[7:])


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("first", [0.01, 1.0, 100.0])
def test_one_that_lies_about_its_count_shifts_the_median_by_one_place(first, count):
    """As if its norm were 0 or infinite; a step goes at most by the factor exp(0.6/2) beyond that."""
    place = statistics.median_low([*NORMS, math.inf if count == 0 else 0.0])
    for median in follow(CountedMedian(first), NORMS, lie=[(count, 1)])[8:]:
        assert place / 1.8 < median < place * 1.8


@given(
    first=st.floats(0.01, 100),
    lies=st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=30, max_size=30),
)
def test_no_lie_about_counts_moves_it_beyond_what_the_mean_supports(first, lies):
    """Any counts, in 30 rounds, with a mean of norm 0.8; it falls below that only if updates are said to be scaled."""
    estimate, highest = CountedMedian(first), max(first, 2 * math.sqrt(6) * 0.8)
    for lie in lies:
        counts = [sum(n <= estimate.median for n in NORMS) + lie[0], len(NORMS) + lie[1]]
        before, estimate = estimate.median, estimate.next_estimate(counts, 6, 0.8)
        assert estimate.median <= highest
        assert estimate.median >= min(before, 0.8) or counts[1] < 6


def test_counts_that_cannot_be_change_nothing():
    estimate = CountedMedian(2.0, 1.0, -1.0)
    for counts in ([-1, 2], [4, 4], [2, 1], [10**9, 0]):
        assert not are_counts_possible(counts, 3)
        assert estimate.next_estimate(counts, 3) is estimate


def test_it_begins_with_the_norm_of_what_the_server_sends():
    message = Message({"model": {"w": torch.tensor([3.0]), "n": torch.tensor(9)}, "draw": {"b": torch.tensor([4.0])}})
    assert CountedMedian.from_first_message(message).median == 1.0
    assert CountedMedian.from_first_message(Message()).median == 30.0
    estimate = CountedMedian(5.0).next_estimate([0, 1], 3)
    assert CountedMedian.from_server_state({COUNTED_MEDIAN: estimate.to_plain_list()}) == estimate
    assert CountedMedian.from_server_state({}) is None


@pytest.mark.parametrize("value", [None, 0.0, -1.0, math.nan, math.inf, True, "1"])
def test_a_message_with_no_positive_median_is_refused(value):
    scalars = {} if value is None else {COUNTED_MEDIAN: value}
    with pytest.raises(UserError, match=r"counted_median .* needs a positive number"):
        read_announced_median(Message({}, scalars))
