"""Sums in fixed point: exact against whole numbers of Python, without order, and within their rounding of the real mean."""

import json
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.messages.fixed_point import (
    FRACTION_BITS,
    SumLayout,
    build_sum_message,
    counts_in_sum,
    mean_from_fixed_point,
    parse_sum_message,
    to_fixed_point,
)

numbers = st.floats(-1e4, 1e4, width=32)
parties = st.lists(st.tuples(st.lists(numbers, min_size=3, max_size=3), st.integers(1, 1000)), min_size=1, max_size=6)


def added(all_words):
    total = np.zeros(len(all_words[0]), dtype=np.uint64)
    for words in all_words:
        total = total + words
    return total


@settings(max_examples=50, deadline=None)
@given(parties)
def test_the_mean_is_that_of_whole_numbers_whatever_the_order(given_parties):
    trees = [({"m": {"w": torch.tensor(values)}}, n) for values, n in given_parties]
    words = [to_fixed_point(tree, n, len(trees)) for tree, n in trees]
    total = added(words)
    random.Random(0).shuffle(words)
    assert np.array_equal(total, added(words))
    mean, weight = mean_from_fixed_point(total, SumLayout.from_tensor_groups(trees[0][0]))
    assert weight == sum(n for _, n in trees)
    for k in range(3):
        sums = sum(round(Fraction(float(tree["m"]["w"][k])) * n * 2**FRACTION_BITS) for tree, n in trees)
        exact = Fraction(sums, weight * 2**FRACTION_BITS)
        found = Fraction(float(mean["m"]["w"][k]))
        assert abs(found - exact) <= abs(exact) * Fraction(1, 2**23) + Fraction(1, 2**149)
        real = sum(Fraction(float(tree["m"]["w"][k])) * n for tree, n in trees) / weight
        assert abs(exact - real) <= Fraction(len(trees), 2 * weight * 2**FRACTION_BITS)


def test_one_party_gets_back_what_it_gave_where_the_grid_has_it():
    tree = {"m": {"w": torch.tensor([0.5, -3.25, 2.0**-32, -0.0]), "d": torch.tensor([1 / 3], dtype=torch.float64)}}
    mean, weight = mean_from_fixed_point(to_fixed_point(tree, 7, 1), SumLayout.from_tensor_groups(tree))
    assert weight == 7
    assert torch.equal(mean["m"]["w"], tree["m"]["w"])
    assert abs(float(mean["m"]["d"]) - 1 / 3) < 2.0**-33


def test_every_type_travels():
    types = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int64]
    trees = [{"m": {str(t): torch.full((2,), value, dtype=t) for t in types}} for value in (3, 5)]
    mean, _ = mean_from_fixed_point(
        to_fixed_point(trees[0], 1, 2) + to_fixed_point(trees[1], 1, 2), SumLayout.from_tensor_groups(trees[0])
    )
    for dtype in types:
        assert torch.equal(mean["m"][str(dtype)], torch.full((2,), 4, dtype=dtype))


def test_whole_numbers_are_rounded_and_booleans_are_any():
    trees = [{"m": {"n": torch.tensor([a, -a]), "b": torch.tensor([a == 1, False])}} for a in (0, 1)]
    mean, _ = mean_from_fixed_point(
        to_fixed_point(trees[0], 1, 2) + to_fixed_point(trees[1], 1, 2), SumLayout.from_tensor_groups(trees[0])
    )
    assert mean["m"]["n"].tolist() == [1, 0]  # 1/2 and -1/2, up from the middle
    assert mean["m"]["b"].tolist() == [True, False]
    mean, _ = mean_from_fixed_point(
        to_fixed_point(trees[0], 3, 2) + to_fixed_point(trees[1], 1, 2), SumLayout.from_tensor_groups(trees[0])
    )
    assert mean["m"]["n"].tolist() == [0, 0]
    large = {"m": {"n": torch.tensor([2**53 + 1])}}  # above what float64 holds
    assert mean_from_fixed_point(
        to_fixed_point(large, 1, 2) + to_fixed_point(large, 3, 2), SumLayout.from_tensor_groups(large)
    )[0]["m"]["n"].tolist() == [2**53 + 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**31 / 10 / 3, -(2.0**31)])
def test_what_does_not_fit_is_refused_with_its_value(value):
    with pytest.raises(UserError, match=r"tensor 'w' has the value .* of 10 sites with 3 examples here holds up to"):
        to_fixed_point({"m": {"w": torch.tensor([0.0, value])}}, 3, 10)


def test_whole_numbers_that_do_not_fit_get_advice_of_their_own():
    with pytest.raises(UserError, match=r"tensor 'n' has the value 9.22e\+18, .* keep it with buffers='local'$"):
        to_fixed_point({"m": {"n": torch.tensor([2**63 - 1])}}, 3, 10)


def test_what_just_fits_never_overflows():
    most = {"m": {"w": torch.tensor([2.0**31 / 10 / 3 * (1 - 1e-6)], dtype=torch.float64)}}
    mean, weight = mean_from_fixed_point(added([to_fixed_point(most, 3, 10)] * 10), SumLayout.from_tensor_groups(most))
    assert weight == 30
    assert torch.allclose(mean["m"]["w"], most["m"]["w"])


@pytest.mark.parametrize("weight", [0, -1, 1.5, True, float("nan"), 2**62])
def test_a_weight_is_a_whole_number(weight):
    with pytest.raises((UserError, ValueError)):
        to_fixed_point({"m": {"w": torch.zeros(1)}}, weight, 4)


def test_words_that_are_no_sum_are_refused():
    layout = SumLayout.from_tensor_groups({"m": {"w": torch.zeros(2)}})
    for words in (np.zeros(3, np.uint64), np.full(3, 2**64 - 5, np.uint64)):
        with pytest.raises(UserError, match="the weights of a sum add up to"):
            mean_from_fixed_point(words, layout)
    with pytest.raises(UserError, match="a sum of 3 words is expected, got 4"):
        mean_from_fixed_point(np.zeros(4, np.uint64), layout)
    with pytest.raises(UserError, match=r"torch\.complex64, which a fixed-point sum cannot hold"):
        SumLayout.from_tensor_groups({"m": {"w": torch.zeros(2, dtype=torch.complex64)}})


def hostile():
    tree = {"m": {"w": torch.zeros(2)}}
    good = build_sum_message(to_fixed_point(tree, 1, 2), SumLayout.from_tensor_groups(tree)).tensors["sum"]

    def layout(text):
        return {"sum": {**good, "layout": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}}

    return [
        {}, {"model": {}}, {"sum": {"words": good["words"]}}, {"sum": {**good, "words": good["words"][:2]}},
        {"sum": {**good, "words": good["words"].double()}}, {"sum": {**good, "layout": good["words"]}},
        layout("["), layout("{}{"), layout('[["m","w",[-1],"float32"]]'), layout('[["m","w",[2.0],"float32"]]'),
        layout('[["m","w",[2],"float31"]]'), layout('[["m",3,[2],"float32"]]'), layout('[["m","w",2,"float32"]]'),
        layout('[["m","w",[99999999999],"float32"]]'), layout('[["m","w",[1],"float32"],["m","w",[1],"float32"]]'),
        layout("[" * 9999),
    ]  # fmt: skip


@pytest.mark.parametrize("tensors", hostile())
def test_what_is_no_part_of_a_sum_is_refused(tensors):
    with pytest.raises(UserError):
        parse_sum_message(Message(tensors))


def test_a_part_comes_back_from_its_message():
    tree = {"m": {"w": torch.tensor([1.5]), "a": torch.tensor([3])}, "b": {"c": torch.zeros(())}}
    words = to_fixed_point(tree, 2, 3)
    back, layout = parse_sum_message(build_sum_message(words, SumLayout.from_tensor_groups(tree)))
    assert np.array_equal(words, back)
    assert layout == SumLayout.from_tensor_groups(tree)


def test_counts_at_the_end_of_a_sum_are_added_without_weights():
    tree = {"m": {"w": torch.tensor([0.5, 1.0])}}
    layout = SumLayout.from_tensor_groups(tree, 2)
    assert SumLayout.from_byte_tensor(layout.to_byte_tensor()) == layout
    assert layout != SumLayout.from_tensor_groups(tree)
    parts = [
        np.concatenate([to_fixed_point(tree, weight, 2), np.array(counts, np.uint64)])
        for weight, counts in ((3, [1, 1]), (5, [0, 1]))
    ]
    total = parts[0] + parts[1]
    mean, weight = mean_from_fixed_point(total, layout)
    assert (mean["m"]["w"].tolist(), weight, counts_in_sum(total, layout)) == ([0.5, 1.0], 8, [1, 2])


@pytest.mark.parametrize("counts", [-1, 17, 1.5, True, "2"])
def test_a_layout_with_another_number_of_counts_is_refused(counts):
    content = json.dumps({"counts": counts, "tensors": [["m", "w", [2], "float32"]]}).encode()
    with pytest.raises(UserError, match="the number of counts is not valid"):
        SumLayout.from_byte_tensor(torch.frombuffer(bytearray(content), dtype=torch.uint8))
