"""Trees: exact bytes, exact means, and a serialisation that gives back what it was given."""

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.core.errors import UserError
from polyfed.core.messages import fixed_point
from polyfed.core.seeds import torch_generator
from polyfed.core.serialization import check_scalars_finite, deserialize_state, safetensors_num_bytes, serialize_state
from polyfed.core.state_dict import (
    IncompatibleTensorsError,
    RunningMean,
    name_of_first_nonfinite,
    spec_mismatch,
    state_dict_spec,
    view_as_bytes,
    weighted_mean,
)

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint16, torch.uint8, torch.bool,
]  # fmt: skip
tensors = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from(DTYPES),
)
names = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12).filter(
    lambda n: n != "__metadata__"
)


@pytest.mark.thorough
@given(st.dictionaries(names, tensors, max_size=8))
@settings(max_examples=200, deadline=None)
def test_num_bytes_is_the_size_of_the_file(tree):
    assert safetensors_num_bytes(tree) == (len(safetensors.torch.save(tree)) if tree else 0)


scalars = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5)
nested = st.recursive(
    scalars | st.lists(st.floats(-1, 1), min_size=1, max_size=3).map(torch.tensor),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.thorough
@given(nested)
@settings(max_examples=200, deadline=None)
def test_encode_and_decode_are_inverse(value):
    assert equal(deserialize_state(serialize_state({"value": value})), {"value": value})


def test_tensors_that_share_memory_or_are_views_survive():
    base = torch.arange(12.0).view(3, 4)
    value = {"a": base, "b": base, "row": base[1], "column": base[:, 1], "a/b": torch.ones(1), "x": {"y": base.t()}}
    assert equal(deserialize_state(serialize_state(value)), value)
    clash = {"a": {"b": torch.zeros(1)}, "a/b": torch.ones(1)}
    assert equal(deserialize_state(serialize_state(clash)), clash)


def test_shared_tensors_travel_by_name():
    big = torch.zeros(1000)
    data = serialize_state({"model": {"w": big}}, shared_names_by_id={id(big): "t1"})
    assert len(data) < 500
    assert deserialize_state(data, shared_tensors={"t1": big})["model"]["w"] is big


@pytest.mark.parametrize("value", [{"a": object()}, {1: 2}, {"a": {"b": {3}}}])
def test_what_cannot_be_kept_is_refused_with_its_path(value):
    with pytest.raises(TypeError, match="state at"):
        serialize_state(value)


@pytest.mark.parametrize("cut", [0, 4, 9, 60, -1])
def test_half_a_state_is_refused(cut):
    data = serialize_state({"w": torch.ones(5)})
    with pytest.raises(UserError, match="not a complete polyfed state"):
        deserialize_state(data[:cut])


def test_mean_is_weighted_keeps_types_and_ignores_order():
    trees = {
        "b": {"w": torch.tensor([1.0, 2.0]), "count": torch.tensor(3)},
        "a": {"w": torch.tensor([3.0, 6.0]), "count": torch.tensor(7)},
    }
    mean = weighted_mean(trees, {"a": 1, "b": 3})
    assert mean["w"].tolist() == [1.5, 3.0]
    assert mean["count"].dtype == torch.int64
    assert int(mean["count"]) == (1 * 7 + 3 * 3) / 4
    assert torch.equal(mean["w"], weighted_mean(dict(reversed(trees.items())), {"b": 3, "a": 1})["w"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_mean_of_equal_trees_is_that_tree_bit_for_bit(dtype):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    limits = torch.finfo(dtype)
    edges = torch.tensor([0.0, -0.0, limits.max, limits.min, limits.tiny, limits.smallest_normal / 2], dtype=dtype)
    tree = {"w": torch.cat([values.to(dtype), edges])}
    for number in (1, 2, 3, 7, 10, 200):
        ids = [str(i) for i in range(number)]
        for weights in (None, {i: float(k + 1) for k, i in enumerate(ids)}, {i: 10.0**-k for k, i in enumerate(ids)}):
            mean = weighted_mean(dict.fromkeys(ids, tree), weights)["w"]
            assert mean.dtype == dtype
            assert torch.equal(mean.view(torch.uint8), tree["w"].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_mean_of_finite_trees_is_finite_and_ignores_order(dtype):
    top = torch.finfo(dtype).max
    generator = torch.Generator().manual_seed(1)
    trees = {
        str(k): {
            "w": torch.cat(
                [
                    torch.randn(50, generator=generator).to(dtype),
                    torch.tensor([top if k % 2 else -top, top], dtype=dtype),
                ]
            )
        }
        for k in range(6)
    }
    mean = weighted_mean(trees)["w"]
    assert bool(mean.isfinite().all())
    assert abs(float(mean[-2])) < top / 1000
    assert torch.equal(mean, weighted_mean(dict(reversed(trees.items())))["w"])
    expected = torch.stack([t["w"].double()[:50] for t in trees.values()]).mean(0)
    torch.testing.assert_close(mean[:50], expected.to(dtype))


@pytest.mark.parametrize("weights", [{"a": 0.0, "b": 0.0}, {"a": -1.0, "b": 2.0}, {"a": float("nan"), "b": 1.0}])
def test_mean_refuses_weights_that_are_none(weights):
    with pytest.raises(ValueError, match="weights must be finite"):
        weighted_mean({"a": {"w": torch.ones(1)}, "b": {"w": torch.ones(1)}}, weights)
    with pytest.raises(ValueError, match="no state dicts"):
        weighted_mean({})


def test_mismatch_names_the_tensor_and_the_reason():
    expected = state_dict_spec({"w": torch.zeros(2, 3), "b": torch.zeros(3)})
    good = {"w": torch.ones(2, 3), "b": torch.ones(3)}
    assert spec_mismatch(good, expected) is None
    assert "'b' is missing" in spec_mismatch({"w": good["w"]}, expected)
    assert "'x' is unexpected" in spec_mismatch({**good, "x": good["b"]}, expected)
    assert "'w' has shape (3, 2)" in spec_mismatch({**good, "w": torch.ones(3, 2)}, expected)
    assert "'b' has dtype torch.float64" in spec_mismatch({**good, "b": good["b"].double()}, expected)
    assert spec_mismatch({"a": torch.zeros(5, 3)}, {"a": ((None, 3), torch.float32)}) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_finds_one_bad_value(value):
    tree = {"a": torch.ones(1000), "n": torch.tensor([1]), "b": torch.ones(1000)}
    assert name_of_first_nonfinite(tree) is None
    tree["b"][77] = value
    assert name_of_first_nonfinite(tree) == "b"
    assert name_of_first_nonfinite({"big": torch.full((4,), 3e38)}) is None  # the sum overflows, the values do not


def shares(dtype, seed=0):
    generator = torch_generator(seed)
    trees = {f"c{k}": {"w": torch.randn(50, generator=generator).to(dtype), "n": torch.tensor(k)} for k in range(5)}
    return trees, {i: float(3 + 7 * k) for k, i in enumerate(trees)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_running_mean_is_the_sum_of_shares(dtype):
    """The mean of shares w_i/Σw in float64, as written out; also where it is not told who is expected."""
    trees, weights = shares(dtype)
    total = sum(weights.values())
    expected = sum(trees[i]["w"].to(torch.float64) * (weights[i] / total) for i in trees)
    for told in (weights, None, {**weights, "z": 100.0}):
        mean = RunningMean(told)
        for i, tree in trees.items():
            mean.add(i, tree, weights[i])
        assert mean.mean()["w"].dtype == dtype
        torch.testing.assert_close(
            mean.mean()["w"], expected.to(dtype), rtol=1e-13 if dtype == torch.float64 else 0, atol=0
        )
        assert mean.mean()["n"] == round(sum(k * weights[f"c{k}"] for k in range(5)) / total) == 3
        assert mean.client_ids == list(trees)


WHOLE = {
    torch.int64: [2**62, 7], torch.int32: [2**31 - 1, 9], torch.int16: [-(2**15), 3], torch.int8: [-128, -1],
    torch.uint8: [255, 4], torch.bool: [1, 0],
}  # fmt: skip


@pytest.mark.parametrize("dtype", WHOLE)
def test_the_mean_of_whole_numbers_is_that_of_a_secure_sum(dtype):
    """To the bit: rounded to the nearest, up from the middle; and equal ones stay, however large."""
    generator, (large, small) = torch_generator(2), WHOLE[dtype]
    low = -5 if dtype not in (torch.uint8, torch.bool) else 0
    for weights in ((1, 1), (1, 1, 1), (7, 70, 700), (3, 5)):
        trees = [{"n": torch.randint(low, 1 + (dtype != torch.bool) * 40 + 1, (60,), generator=generator).to(dtype)}
                 for _ in weights]  # fmt: skip
        words = [
            fixed_point.to_fixed_point({"m": tree}, n, len(weights)) for tree, n in zip(trees, weights, strict=True)
        ]
        (secure, _) = fixed_point.mean_from_fixed_point(
            sum(words[1:], words[0]), fixed_point.SumLayout.from_tensor_groups({"m": trees[0]})
        )
        names = [f"c{k}" for k in range(len(weights))]
        plain = weighted_mean(dict(zip(names, trees, strict=True)), dict(zip(names, weights, strict=True)))
        assert torch.equal(plain["n"], secure["m"]["n"])
        assert plain["n"].dtype == dtype
        alike = {"n": torch.tensor([large, small], dtype=dtype)}
        assert torch.equal(weighted_mean(dict.fromkeys(names, alike))["n"], alike["n"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("told", [True, False])
def test_the_running_mean_of_equal_trees_is_that_tree(dtype, told):
    tree = {"w": torch.randn(200, generator=torch_generator(1)).to(dtype)}
    weights = {f"c{k}": float(n) for k, n in enumerate((3, 7, 11, 13))}
    mean = RunningMean(weights | {"missing": 5.0} if told else None)
    for i, weight in weights.items():
        mean.add(i, tree, weight)
    assert torch.equal(mean.mean()["w"], tree["w"])


def test_what_a_running_mean_refuses():
    mean = RunningMean({"a": 1.0, "b": 1.0})
    mean.add("b", {"w": torch.zeros(2)})
    with pytest.raises(ValueError, match="'a' comes after 'b'; add state dicts in the order of their ids"):
        mean.add("a", {"w": torch.zeros(2)})
    with pytest.raises(
        IncompatibleTensorsError, match=r"of 'c' are not those of 'b': tensor 'w' has shape \(3,\), expected \(2,\)"
    ):
        mean.add("c", {"w": torch.zeros(3)})
    with pytest.raises(ValueError, match="weights must be finite, not negative"):
        mean.add("c", {"w": torch.zeros(2)}, float("nan"))
    with pytest.raises(ValueError, match="the mean of no state dicts"):
        RunningMean().mean()


def test_scalars_are_finite_numbers():
    check_scalars_finite({"a": 1, "b": 0.5}, "it")
    for wrong in (True, "1", None, float("nan"), float("inf"), torch.tensor(1.0)):
        with pytest.raises(TypeError, match="it: scalar 'a' is"):
            check_scalars_finite({"a": wrong}, "it")


def test_bytes_of_tensors_of_any_stride():
    every_third = torch.arange(10)[1::3]
    for tensor in (every_third, every_third[1:2], torch.tensor(4), torch.zeros(0, 3), torch.randn(4, 3).t().bfloat16()):
        content = view_as_bytes(tensor)
        assert content.dtype == torch.uint8
        assert content.shape == (tensor.numel() * tensor.element_size(),)
        assert torch.equal(content, view_as_bytes(tensor.clone(memory_format=torch.contiguous_format)))
