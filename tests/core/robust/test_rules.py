"""Each robust rule is what its paper says: identities, hand-made values, and properties of random replies."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from polyfed.core.errors import UserError
from polyfed.core.robust.clip import Clip
from polyfed.core.robust.coordinatewise import Median, TrimmedMean
from polyfed.core.robust.geometric_median import GeometricMedian
from polyfed.core.robust.krum import Krum, MultiKrum, krum_scores
from polyfed.core.robust.parse import RULES, parse_robust_rule
from polyfed.core.robust.rule import CombiningRule
from polyfed.core.state_dict import IncompatibleTensorsError, weighted_mean

COMBINING = [Median(), TrimmedMean(0.2), Krum(1), MultiKrum(1), GeometricMedian(100)]
EVEN = dict.fromkeys("abcdefghij", 1.0)


def replies(*rows):
    return {"abcdefghij"[k]: {"w": torch.tensor(row, dtype=torch.float32)} for k, row in enumerate(rows)}


def random_replies(seed, clients=7, size=5):
    generator = torch.Generator().manual_seed(seed)
    return {
        "abcdefghij"[k]: {"w": torch.randn(size, generator=generator), "b": torch.randn(2, 2, generator=generator)}
        for k in range(clients)
    }


def flat(tree):
    return torch.cat([tensor.flatten() for _, tensor in sorted(tree.items())])


def test_trimming_nothing_is_the_mean_bit_for_bit():
    trees = random_replies(0)
    trimmed, mean = TrimmedMean(0.0).combine(trees, EVEN), weighted_mean(trees)
    assert all(torch.equal(trimmed[name], mean[name]) for name in mean)


def test_the_trimmed_mean_leaves_out_both_ends():
    assert TrimmedMean(0.2).combine(replies([1.0], [2.0], [3.0], [6.0], [1e6]), EVEN)["w"].item() == pytest.approx(
        11 / 3
    )


def test_the_median_of_odd_and_even_numbers():
    assert Median().combine(replies([5.0, 0.0], [1.0, 9.0], [3.0, -2.0]), EVEN)["w"].tolist() == [3.0, 0.0]
    assert Median().combine(replies([5.0], [1.0], [2.0], [100.0]), EVEN)["w"].tolist() == [3.5]


def test_krum_of_identical_replies_is_one_of_them():
    trees = replies(*[[1.5, -2.0]] * 5)
    assert torch.equal(Krum(1).combine(trees, EVEN)["w"], trees["a"]["w"])
    assert torch.equal(MultiKrum(1).combine(trees, EVEN)["w"], trees["a"]["w"])


def test_the_scores_of_krum_by_hand():
    """n = 5 and f = 1: squared distances to the two closest others."""
    assert krum_scores(replies([0.0], [1.0], [2.0], [4.0], [100.0]), 1) == {
        "a": 1 + 4, "b": 1 + 1, "c": 1 + 4, "d": 4 + 9, "e": 96.0**2 + 98.0**2,
    }  # fmt: skip


def test_counters_of_minibatches_decide_no_distance():
    weights = (0.0, 0.1, 0.2, 0.3, 9.0)
    counters = (10, 700, 4000, 90, 10)  # the liar's is that of an honest client
    replies = {
        str(i): {"w": torch.tensor([weight]), "num_batches_tracked": torch.tensor(counter)}
        for i, (weight, counter) in enumerate(zip(weights, counters, strict=True))
    }
    bare = {i: {"w": tree["w"]} for i, tree in replies.items()}
    assert krum_scores(replies, 1) == krum_scores(bare, 1)
    shares = dict.fromkeys(replies, 1.0)
    for rule in (Krum(1), MultiKrum(1), GeometricMedian()):
        combined = rule.combine(replies, shares)
        assert torch.equal(combined["w"], rule.combine(bare, shares)["w"])
        assert combined["num_batches_tracked"].dtype == torch.int64
    assert float(GeometricMedian(100).combine(replies, shares)["w"]) == pytest.approx(0.2, abs=0.01)


def test_multi_krum_is_the_mean_of_the_best():
    trees = replies([0.0], [1.0], [2.0], [4.0], [100.0])
    assert Krum(1).combine(trees, EVEN)["w"].tolist() == [1.0]
    assert MultiKrum(1).combine(trees, EVEN)["w"].tolist() == [1.75]
    assert MultiKrum(1, 3).combine(trees, EVEN)["w"].tolist() == [1.0]
    assert MultiKrum(1, 1).combine(trees, EVEN)["w"].tolist() == Krum(1).combine(trees, EVEN)["w"].tolist()


def test_the_geometric_median_of_points_on_a_line_is_their_median():
    trees = replies([0.0, 0.0], [1.0, 2.0], [2.0, 4.0], [10.0, 20.0], [50.0, 100.0])
    assert flat(GeometricMedian(500).combine(trees, EVEN)).tolist() == pytest.approx([2.0, 4.0], abs=1e-3)


def test_the_geometric_median_is_weighted():
    trees = replies([0.0], [1.0], [2.0])
    assert flat(GeometricMedian(500).combine(trees, {"a": 1, "b": 1, "c": 5})).tolist() == pytest.approx(
        [2.0], abs=1e-3
    )


def test_the_geometric_median_minimises_the_sum_of_distances():
    trees = random_replies(3)
    points = torch.stack([flat(tree) for tree in trees.values()])
    center = flat(GeometricMedian(200).combine(trees, EVEN))

    def total(point):
        return float((points - point).norm(dim=1).sum())

    generator = torch.Generator().manual_seed(1)
    around = [center + 0.01 * torch.randn(center.shape, generator=generator) for _ in range(20)]
    assert all(total(center) <= total(point) + 1e-5 for point in around)


@pytest.mark.parametrize("rule", COMBINING, ids=str)
@pytest.mark.parametrize("factor", [1e3, 1e9])
def test_one_liar_of_seven_moves_the_result_little(rule, factor):
    trees = random_replies(5)
    honest = torch.stack([flat(tree) for tree in list(trees.values())[1:]])
    trees["a"] = {name: factor * torch.ones_like(tensor) for name, tensor in trees["a"].items()}
    spread = (honest - honest.mean(dim=0)).norm(dim=1).max()
    assert (flat(rule.combine(trees, EVEN)) - honest.mean(dim=0)).norm() <= 2 * spread


@pytest.mark.parametrize("rule", COMBINING, ids=str)
def test_equal_replies_stay_what_they_are(rule):
    tree = {"w": torch.tensor([0.1, 1e-20, 3e8]), "n": torch.tensor(7), "h": torch.tensor([0.5], dtype=torch.bfloat16)}
    combined = rule.combine(dict.fromkeys("abcde", tree), EVEN)
    assert all(combined[name].dtype == tree[name].dtype and torch.equal(combined[name], tree[name]) for name in tree)


@pytest.mark.parametrize("rule", COMBINING, ids=str)
def test_replies_of_another_form_are_refused(rule):
    trees = random_replies(0, 5) | {"z": {"w": torch.zeros(5)}}
    with pytest.raises(IncompatibleTensorsError, match="'z'"):
        rule.combine(trees, EVEN | {"z": 1.0})


@pytest.mark.thorough
@given(seed=st.integers(0, 10**6), clients=st.integers(5, 9), shift=st.integers(-8, 8))
def test_the_result_moves_with_the_replies_and_not_with_their_order(seed, clients, shift):
    """Shifting all replies shifts the result; the order of clients changes no bit; the result lies among the replies."""
    trees = random_replies(seed, clients)
    shuffled = dict(reversed(trees.items()))
    shifted = {i: {name: tensor + shift for name, tensor in tree.items()} for i, tree in trees.items()}
    stacked = torch.stack([flat(tree) for tree in trees.values()])
    for rule in COMBINING:
        result = flat(rule.combine(trees, EVEN))
        assert torch.equal(result, flat(rule.combine(shuffled, EVEN))), rule
        assert torch.allclose(
            result + shift, flat(rule.combine(shifted, EVEN)), atol=2e-2 if "geo" in str(rule) else 1e-4
        )
        assert bool((result >= stacked.min(dim=0).values - 1e-6).all()), rule
        assert bool((result <= stacked.max(dim=0).values + 1e-6).all()), rule


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("clip", Clip(times_median=3.0)), ("clip:5", Clip(max_norm=5.0)), ("clip:inf", Clip(max_norm=math.inf)),
        ("clip:1.5x", Clip(times_median=1.5)), ("median", Median()), ("trimmed_mean:0.1", TrimmedMean(0.1)),
        ("krum:2", Krum(2)), ("multi_krum", MultiKrum()), ("multi_krum:2,5", MultiKrum(2, 5)),
        ("geometric_median:3", GeometricMedian(3)),
    ],
)  # fmt: skip
def test_a_rule_is_read_and_written(text, rule):
    assert parse_robust_rule(text) == rule == parse_robust_rule(str(rule)) == parse_robust_rule(rule)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clip:0", "must be positive, got 0.0; a bound of 0"), ("clip:-1x", "must be positive"),
        ("clip:nan", "cannot be read"), ("clip:five", "'clip:5'"), ("trimmed_mean:0.5", "below 0.5, got 0.5"),
        ("krum:0", "whole number from 1, got 0"), ("krum:x", "'krum:1'"), ("median:3", "cannot be read"),
        ("geometric_median:0", "from 1, got 0"), ("multi_krum:1,0", "from 1, got 0"), ("multi_krum:1,2,3", "cannot be"),
        ("mediann", "did you mean median"), (7, "such as 'clip'"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_rule_is_refused(text, words):
    with pytest.raises(UserError, match=words):
        parse_robust_rule(text)


def test_both_bounds_at_once_are_refused():
    with pytest.raises(UserError, match="not both"):
        Clip(max_norm=1.0, times_median=2.0)


def test_too_few_clients_are_said_with_a_cure():
    assert "2f + 3 = 5" in Krum(1).client_count_error(4)
    assert "krum:2" in Krum(3).client_count_error(8)
    assert "n − f = 6" in MultiKrum(1, 7).client_count_error(7)
    assert "at least 0.334" in TrimmedMean(0.2).client_count_error(3)
    assert TrimmedMean(0.334).client_count_error(3) is None
    assert "at least 3" in TrimmedMean(0.4).client_count_error(2)
    assert all(
        rule.client_count_error(5) is None for rule in (Median(), Krum(), MultiKrum(), GeometricMedian(), Clip())
    )


def test_every_rule_has_one_word_and_a_default():
    assert all(RULES[word]().word == word for word in RULES)
    assert {word for word in RULES if issubclass(RULES[word], CombiningRule)} == set(RULES) - {"clip"}
