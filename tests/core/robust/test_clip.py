"""A bound on the norm of an update holds, in floating point and in the fixed point of a secure sum."""

import math
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.messages.fixed_point import SumLayout, mean_from_fixed_point, to_fixed_point
from polyfed.core.robust.clip import Clip, clip_update, update_changes
from polyfed.core.robust.fixed_point_clip import clip_fixed_point_words, limit_mean_update


def message(*values, **more):
    return Message({"model": {"w": torch.tensor(values, dtype=torch.float32), **more}})


def test_an_update_above_the_bound_is_scaled_to_it():
    clipped = clip_update(message(4.0, 5.0), message(1.0, 1.0), ["model"], 2.5)
    assert (clipped.norm, clipped.factor) == (5.0, 0.5)
    assert clipped.reply.tensors["model"]["w"].tolist() == [2.5, 3.0]


@pytest.mark.parametrize(("group", "before"), [("model", 1.0), ("draw", 1.0), ("others", 0.0)])
def test_an_update_counts_from_its_own_group_or_the_common_draw(group, before):
    received = Message({group: {"w": torch.tensor([1.0])}})
    assert update_changes(message(4.0), received, ["model"])["model", "w"].tolist() == [4.0 - before]


def test_an_update_within_the_bound_is_the_same_object():
    reply = message(4.0, 5.0)
    for bound in (5.0, math.inf, None):
        assert clip_update(reply, message(1.0, 1.0), ["model"], bound).reply is reply


def test_what_was_not_sent_counts_from_zero_and_whole_numbers_stay():
    reply = Message({"model": {"w": torch.tensor([3.0, 4.0]), "n": torch.tensor(10**6)}})
    clipped = clip_update(reply, Message(), ["model"], 1.0)
    assert clipped.reply.tensors["model"]["w"].tolist() == pytest.approx([0.6, 0.8])
    assert clipped.reply.tensors["model"]["n"].item() == 10**6


def test_groups_that_are_changes_already_are_not_subtracted_from():
    clipped = clip_update(message(3.0), message(1.0), ["model"], 1.5, frozenset({"model"}))
    assert (clipped.norm, clipped.reply.tensors["model"]["w"].tolist()) == (3.0, [1.5])


def test_other_groups_of_a_reply_stay():
    reply = Message({"model": {"w": torch.tensor([3.0])}, "head": {"w": torch.tensor([99.0])}})
    assert clip_update(reply, Message(), ["model"], 1.0).reply.tensors["head"]["w"].item() == 99.0


def test_the_bound_follows_the_median_of_medians():
    rule = Clip(times_median=2.0)
    assert rule.bound([]) is None
    assert rule.bound([1.0, 100.0]) == 2.0  # the lower: of two sites, the larger may be the liar's
    assert rule.bound([3.0, 1.0, 2.0]) == 4.0
    assert rule.bound([0.0]) == math.inf
    assert Clip(max_norm=4.0).bound([]) == 4.0


numbers = st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3)


@given(reply=numbers, received=numbers, weight=st.integers(1, 10**6), max_norm=st.floats(1e-3, 1e3))
def test_the_words_of_a_secure_sum_keep_the_bound(reply, received, weight, max_norm):
    """In exact arithmetic: ‖w/(n·2^32) − m‖ ≤ C + √D·2^-33/n."""
    sent, start = message(*reply), message(*received)
    words = clip_fixed_point_words(sent.tensors, start, weight, 2, max_norm, frozenset()).words.view(np.int64)
    assert words[0] == weight
    changes = [Fraction(int(w), weight * 2**32) - Fraction(m) for w, m in zip(words[1:], received, strict=True)]
    assert sum(c * c for c in changes) <= (Fraction(max_norm) + Fraction(math.sqrt(3) * 1.0001) / (weight * 2**33)) ** 2


@given(reply=numbers, received=numbers, weight=st.integers(1, 10**6))
def test_within_the_bound_the_words_are_those_without(reply, received, weight):
    sent = message(*reply)
    words = clip_fixed_point_words(sent.tensors, message(*received), weight, 2, math.inf, frozenset()).words
    assert np.array_equal(words, to_fixed_point(sent.tensors, weight, 2))


def test_the_clipped_words_are_of_the_clipped_update():
    sent, start = message(4.0, 5.0, n=torch.tensor(8)), message(1.0, 1.0, n=torch.tensor(2))
    words = clip_fixed_point_words(sent.tensors, start, 3, 2, 2.5, frozenset()).words
    mean, weight = mean_from_fixed_point(words, SumLayout.from_tensor_groups(sent.tensors))
    assert (mean["model"]["w"].tolist(), mean["model"]["n"].item(), weight) == (
        pytest.approx([2.5, 3.0], abs=1e-5),
        8,
        3,
    )


def test_a_value_that_is_not_finite_is_refused_as_without_a_bound():
    with pytest.raises(UserError, match="has the value inf"):
        clip_fixed_point_words(message(math.inf).tensors, message(0.0), 1, 2, 1.0, frozenset())


def test_a_mean_beyond_the_bound_is_limited_and_its_norm_is_known():
    start = message(0.0, 0.0)
    limited = limit_mean_update({"model": {"w": torch.tensor([30.0, 40.0])}}, start, 5.0)
    assert (limited.norm, limited.mean["model"]["w"].tolist()) == (50.0, [3.0, 4.0])
    mean = {"model": {"w": torch.tensor([3.0, 4.0])}}
    assert limit_mean_update(mean, start, 5.0).mean["model"]["w"] is mean["model"]["w"]
