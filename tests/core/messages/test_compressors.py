"""Compressed messages: what rounding and thinning out do to numbers, by theory and by loops; and what no sender makes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.messages.compressors import COMPRESSORS, MAX_UNCOMPRESSED_VECTOR, Int8, TopK, parse_compressor
from polyfed.core.messages.message_compression import (
    BroadcastCompressor,
    compress_message,
    decompress_message,
    decompressed_specs,
)
from polyfed.core.seeds import torch_generator
from polyfed.core.serialization import serialize_state
from polyfed.core.state_dict import state_dict_spec

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch_generator(seed)).to(dtype)


def sent(tensor, before=None, how=None, seed=0):
    """A tensor after its way, and the message that travelled."""
    known = Message({} if before is None else {"model": {"w": before}})
    travelling = compress_message(Message({"model": {"w": tensor}}), known, how or Int8(), seed)
    return decompress_message(travelling, known, how or Int8()).tensors["model"]["w"], travelling


# -- int8 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [True, False])
def test_rounding_is_unbiased_with_the_variance_of_a_bernoulli_draw(change):
    """x/s lies between two whole numbers; the upper one is drawn with probability f, the fraction. So the mean of n draws of
    s·q has the variance s²f(1−f)/n. Numbers x with f near 0 are left out of the second test, whose divisor is that."""
    tensor, before, n = drawn(16, 16).double(), drawn(16, 16, seed=1).double() if change else None, 400
    x = tensor - before if change else tensor
    s = float(torch.tensor(float(x.abs().max()) / 127))
    mean = sum(sent(tensor, before, seed=k)[0] for k in range(n)) / n - (before if change else 0)
    f = (x / s) - (x / s).floor()
    deviation = s * (f * (1 - f) / n).sqrt()
    far = ((mean - x) / deviation)[(f > 0.05) & (f < 0.95)]
    assert abs(float((mean - x).mean())) < 4 * float((deviation**2).sum().sqrt()) / x.numel()
    assert 0.8 < float((far**2).mean()) < 1.2
    assert float(far.abs().max()) < 4.5


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("change", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e-3, 1e4])
def test_the_error_is_below_one_step(dtype, change, size):
    tensor = (size * drawn(20, 30).double()).to(dtype)
    before = (size * drawn(20, 30, seed=1).double()).to(dtype) if change else None
    found, travelling = sent(tensor, before)
    assert found.dtype == dtype
    x = tensor.double() - before.double() if change else tensor.double()
    step = max(float(x.abs().max()) / 127 * (1 + 1e-6), 1.5e-45)
    rounding = torch.finfo(dtype).eps * float(tensor.double().abs().max()) + torch.finfo(dtype).smallest_normal
    assert float((found.double() - tensor.double()).abs().max()) <= step + rounding
    steps = next(t for name, t in travelling.tensors["model"].items() if t.dtype == torch.int8)
    assert int(steps.min()) >= -127


def test_what_did_not_change_comes_back_bit_for_bit():
    before = drawn(10, 10)
    found, travelling = sent(before.clone(), before)
    assert torch.equal(found, before)
    assert travelling.tensors["model"][":scales"].tolist() == [0.0]


def test_the_largest_change_arrives_as_it_is_and_none_exceeds_it():
    """Also where max/127 is not a number of float32: the scale is rounded up, not down."""
    for seed in range(200):
        tensor = drawn(4, 4, seed=seed)
        steps = sent(tensor, seed=seed)[1].tensors["model"]["w:float32"]
        assert int(steps.abs().max()) in (126, 127)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(100), torch.arange(100) > 3, torch.tensor(1.5), drawn(15), drawn(3, 5), drawn(MAX_UNCOMPRESSED_VECTOR),
        torch.full((20, 20), math.nan), torch.full((20, 20), -math.inf), torch.zeros(0, 5), 1e300 * drawn(5, 5).double(),
    ],
    ids=lambda t: f"{t.dtype}{tuple(t.shape)}",
)  # fmt: skip
def test_these_travel_as_they_are(tensor):
    """Not finite: the server must see it. 1e300: no float32 is its scale."""
    found, travelling = sent(tensor)
    assert found is tensor
    assert list(travelling.tensors["model"]) == ["w:"]


def test_draws_differ_by_seed_tensor_and_group_and_by_nothing_else():
    tensor = drawn(16, 16)
    tree = {"a": tensor, "b": tensor}
    one, again, other = (
        compress_message(Message({"g": tree, "h": {"b": tensor, "a": tensor}}), Message(), Int8(), seed)
        for seed in (1, 1, 2)
    )
    steps = [t for m in (one, other) for g in m.tensors.values() for t in g.values() if t.dtype == torch.int8]
    assert len({bytes(t.numpy().tobytes()) for t in steps}) == 8
    assert serialize_state(dict(one.tensors)) == serialize_state(dict(again.tensors))
    alone = compress_message(Message({"h": {"a": tensor}}), Message(), Int8(), 1)
    assert torch.equal(alone.tensors["h"]["a:float32"], one.tensors["h"]["a:float32"])


# -- top-k -------------------------------------------------------------------------------------------------------------


CASES = [(s, share, dtype) for s in ((4, 4), (20, 15)) for share in (0.01, 0.1, 0.5) for dtype in FLOATS]


@pytest.mark.parametrize(("shape", "share", "dtype"), [*CASES, ((300, 220), 0.1, torch.float32)])
def test_the_entries_that_changed_most_travel_and_no_others(dtype, share, shape):
    """Against a sort by (−|change|, position); half of the changes are alike."""
    before = drawn(*shape, dtype=dtype)
    tensor = torch.where(drawn(*shape, seed=2) > 0, before + 1, drawn(*shape, seed=1, dtype=dtype))
    found, travelling = sent(tensor, before, TopK(share))
    group = travelling.tensors["model"]
    assert sum(t.nbytes for t in group.values()) <= tensor.nbytes
    if "w:topk" not in group:
        assert share == 0.5, "it would be smaller"
        assert found is tensor
        return
    change = (tensor.double() - before.double()).abs().flatten().tolist()
    entries = len(change)
    first = sorted(range(entries), key=lambda k: (-change[k], k))[: max(1, round(share * entries))]
    where = torch.tensor(sorted(first))
    expected = before.flatten().clone()
    expected[where] = tensor.flatten()[where]
    assert torch.equal(found, expected.reshape(shape))
    assert torch.equal(group["w:topk"].long(), where)
    assert group[":values"].dtype == dtype
    assert group["w:topk"].dtype == {16: torch.uint8, 300: torch.uint16}.get(entries, torch.int32)


@pytest.mark.parametrize("shape", [(15,), (3, 5), (MAX_UNCOMPRESSED_VECTOR,)])
def test_small_tensors_and_vectors_travel_whole(shape):
    """A statistic of a norm layer that stays behind its weights would spoil the network."""
    tensor = drawn(*shape)
    assert sent(tensor, torch.zeros(shape), TopK(0.01))[0] is tensor


def test_a_share_of_one_is_the_message_itself():
    tensor, before = drawn(10, 10), drawn(10, 10, seed=1)
    assert sent(tensor, before, TopK(1))[0] is tensor


@pytest.mark.parametrize(
    "before", [None, torch.zeros(10, 11), torch.zeros(10, 10, dtype=torch.float64), torch.zeros(100)]
)
def test_without_a_counterpart_of_the_same_form_nothing_is_left_out(before):
    tensor = drawn(10, 10)
    assert sent(tensor, before, TopK(0.1))[0] is tensor


def test_a_diverged_tensor_arrives_as_diverged():
    tensor = drawn(10, 10)
    tensor[3, 3] = math.nan
    assert sent(tensor, torch.zeros(10, 10), TopK(0.01))[0] is tensor


def test_groups_of_several_types_keep_their_values():
    """The values of a group are one tensor, in a type that holds all."""
    known = {str(dtype): drawn(10, 10, dtype=dtype) for dtype in FLOATS}
    tree = {name: t + 1 for name, t in known.items()}
    down, how = Message({"g": known}), TopK(0.2)
    travelling = compress_message(Message({"g": tree}), down, how, 0)
    assert travelling.tensors["g"][":values"].dtype == torch.float64
    for name, found in decompress_message(travelling, down, how).tensors["g"].items():
        moved = found != known[name]
        assert int(moved.sum()) == 20
        assert torch.equal(found[moved], tree[name][moved])
        assert found.dtype == tree[name].dtype


# -- any message -------------------------------------------------------------------------------------------------------

tensors = st.builds(
    lambda shape, dtype, seed: (100 * torch.randn(shape, generator=torch_generator(seed))).to(dtype),
    st.lists(st.integers(0, 7), max_size=3),
    st.sampled_from([*FLOATS, torch.int64, torch.uint8, torch.bool]),
    st.integers(0, 5),
)
names = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=6) | st.sampled_from(
    ["", ":", "a:topk", ":scales", "w:float32", ":values:"]
)
trees = st.dictionaries(names, st.dictionaries(names, tensors, max_size=4), max_size=3)


@given(trees, trees, st.sampled_from([Int8(), TopK(0.1), TopK(0.9)]), st.booleans())
@settings(max_examples=25, deadline=None)
def test_every_message_comes_back_with_its_names_in_order_and_its_forms(up, down, how, answer):
    """Whatever the names; nothing is changed in place; and the forms are known from the forms alone."""
    known = Message(
        {g: {n: torch.zeros_like(t) for n, t in tree.items()} for g, tree in up.items()} if answer else down
    )
    message = Message(up, {"n": 3})
    before = serialize_state([up, dict(known.tensors)])
    travelling = compress_message(message, known, how, 7)
    found = decompress_message(travelling, known, how)
    assert serialize_state([up, dict(known.tensors)]) == before
    assert list(found.tensors) == list(up)
    assert found.scalars == {"n": 3}
    for group, tree in up.items():
        assert list(state_dict_spec(found.tensors[group]).items()) == list(state_dict_spec(tree).items())
    forms = {g: state_dict_spec(tree) for g, tree in travelling.tensors.items()}
    assert decompressed_specs(forms, known, how) == {g: state_dict_spec(tree) for g, tree in up.items()}


def test_what_goes_down_is_compressed_once_for_all_and_does_not_depend_on_the_others():
    shared, own = {"w": drawn(10, 10)}, {"w": drawn(10, 10, seed=1)}
    sending = BroadcastCompressor(Int8(), seed=3)
    (first, a), (_, b), (_, c) = (sending(Message({"model": tree})) for tree in (shared, dict(shared), own))
    assert a.tensors["model"]["w"] is b.tensors["model"]["w"]
    assert list(first.tensors["model"]) == ["w:float32", ":scales"]
    alone = BroadcastCompressor(Int8(), seed=3)(Message({"model": own}))[1]
    assert torch.equal(alone.tensors["model"]["w"], c.tensors["model"]["w"])
    assert not torch.equal(alone.tensors["model"]["w"], own["w"])
    assert not torch.equal(
        BroadcastCompressor(Int8(), seed=4)(Message({"model": own}))[1].tensors["model"]["w"], c.tensors["model"]["w"]
    )


def test_public_examples_go_down_as_they_are():
    """FedHeNN's clients check that they stay the same."""
    x = drawn(40, 6)
    for group in ("public", "rad"):
        travelling, arrived = BroadcastCompressor(Int8(), 0)(Message({group: {"x": x}}))
        assert arrived.tensors[group]["x"] is travelling.tensors[group]["x:"] is x


def test_without_compression_messages_are_themselves():
    message = Message({"model": {"w": drawn(10, 10)}})
    assert all(one is message for one in BroadcastCompressor(None, 0)(message))


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "how"), [("int8", Int8()), ("topk:0.1", TopK(0.1)), ("topk:1", TopK(1.0))])
def test_a_compression_is_named_by_its_text(text, how):
    assert parse_compressor(text) == how
    assert parse_compressor(str(how)) == how
    assert text.partition(":")[0] in COMPRESSORS


@pytest.mark.parametrize(
    ("text", "sentence"),
    {
        "int4": "unknown compression 'int4'; did you mean int8",
        "": "unknown compression ''",
        "int8:3": "int8 takes no number, got int8:3",
        "topk": "topk needs the share of entries that travel, got ''; for example topk:0.1",
        "topk:few": "topk needs the share of entries that travel, got 'few'",
        "topk:0": "must be above 0 and at most 1, got 0.0; for example topk:0.1",
        "topk:1.5": "must be above 0 and at most 1, got 1.5",
        "topk:nan": "must be above 0 and at most 1, got nan",
        3: "unknown compression 3",
    }.items(),
)
def test_other_texts_are_refused(text, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_compressor(text)


# -- what no sender makes ----------------------------------------------------------------------------------------------

DOWN = Message({"model": {"w": drawn(10, 10), "b": drawn(20), "n": torch.arange(100)}})
UP = Message({"model": {"w": drawn(10, 10, seed=1), "b": drawn(20, seed=1), "n": torch.arange(100)}})


def swapped(**entries):
    """The model's group with other entries; None takes one away."""

    def change(tree):
        return {name: t for name, t in {**tree, **entries}.items() if t is not None}

    return change


def where(change):
    return lambda tree: {**tree, "w:topk": change(tree["w:topk"].clone())}


def moved(position, value):
    def change(positions):
        positions[position] = value
        return positions

    return where(change)


F32, I8 = torch.float32, torch.int8
HOSTILE = {
    Int8(): {
        "a scale that is NaN": (swapped(**{":scales": torch.tensor([math.nan])}), "tensor 'w' has the scale nan"),
        "an infinite scale": (swapped(**{":scales": torch.tensor([math.inf])}), "tensor 'w' has the scale inf"),
        "a negative scale": (swapped(**{":scales": torch.tensor([-1.0])}), "tensor 'w' has the scale -1.0"),
        "no scales": (swapped(**{":scales": None}), "':scales' is missing, expected"),
        "too many scales": (
            swapped(**{":scales": torch.ones(2)}),
            r"':scales' is \(\(2,\), torch.float32\), expected \(\(1,",
        ),
        "scales of another type": (swapped(**{":scales": torch.ones(1, dtype=torch.float64)}), "':scales' is"),
        "-128": (swapped(**{"w:float32": torch.full((10, 10), -128, dtype=I8)}), "a step below -127"),
        "steps of another type": (swapped(**{"w:float32": torch.ones(10, 10)}), "steps of type torch.float32"),
        "too few": (
            swapped(**{"w:float32": torch.ones(3, 5, dtype=I8)}),
            r"of shape \(3, 5\) does not travel as 'float32'",
        ),
        "a vector": (swapped(**{"w:float32": torch.ones(100, dtype=I8)}), r"of shape \(100,\) does not travel as"),
        "an unknown type": (
            lambda t: {"w:int4" if n == "w:float32" else n: v for n, v in t.items()},
            "travel as 'int4'",
        ),
        "a top-k": (lambda t: {"w:topk" if n == "w:float32" else n: v for n, v in t.items()}, "travel as 'topk'"),
        "twice": (swapped(**{"w:": torch.ones(10, 10)}), "tensor 'w' comes twice"),
        "no mark": (
            swapped(w=torch.ones(10, 10)),
            "tensor 'w' does not say how it travels; this run has compress=int8",
        ),
        "scales without tensors": (swapped(**{"w:float32": None}), "':scales' is .*, expected none"),
    },
    TopK(0.1): {
        "beyond the end": (
            moved(-1, 100),
            "tensor 'w' has positions that are not different, ascending and from 0 to 99",
        ),
        "twice": (moved(0, 255), "positions that are not different"),
        "repeated": (
            lambda t: {**t, "w:topk": t["w:topk"][torch.tensor([0, *range(9)])]},
            "positions that are not different",
        ),
        "falling": (where(lambda p: p.flip(0)), "positions that are not different"),
        "negative": (
            where(lambda p: p.to(I8).neg()),
            "has positions of shape .* and type torch.int8, expected .* torch.uint8",
        ),
        "too many": (where(lambda p: torch.arange(11, dtype=torch.uint8)), r"has positions of shape \(11,\)"),
        "none": (where(lambda p: p[:0]), r"has positions of shape \(0,\)"),
        "a table": (where(lambda p: p[None]), r"has positions of shape \(1, 10\)"),
        "too few values": (lambda t: {**t, ":values": t[":values"][1:]}, "':values' is .* expected"),
        "values of another type": (lambda t: {**t, ":values": t[":values"].double()}, "':values' is .* expected"),
        "no values": (swapped(**{":values": None}), "':values' is missing, expected"),
        "of nothing that went down": (lambda t: {**t, "v:topk": t["w:topk"]}, "tensor 'v' does not travel as 'topk'"),
        "of whole numbers": (
            lambda t: {"n:topk" if n == "n:" else n: v for n, v in t.items()},
            "tensor 'n' does not travel",
        ),
        "an int8": (lambda t: {"w:float32" if n == "w:topk" else n: v for n, v in t.items()}, "travel as 'float32'"),
        "no mark": (
            swapped(w=torch.ones(10, 10)),
            "tensor 'w' does not say how it travels; this run has compress=topk:0.1",
        ),
    },
}


@pytest.mark.parametrize(("how", "kind"), [(how, kind) for how, kinds in HOSTILE.items() for kind in kinds])
def test_a_hostile_message_is_refused_with_a_sentence(how, kind):
    change, sentence = HOSTILE[how][kind]
    honest = compress_message(UP, DOWN, how, 0)
    decompress_message(honest, DOWN, how)
    hostile = Message({"model": change(dict(honest.tensors["model"]))})
    with pytest.raises(ValueError, match=f"^group 'model': .*{sentence}"):
        decompress_message(hostile, DOWN, how)


def test_forms_are_refused_before_anything_is_made():
    """A terabyte is claimed, and nothing of it is there."""
    for forms, sentence in (
        ({"w:topk": ((10**12,), torch.uint8), ":values": ((10**12,), F32)}, "has positions of shape"),
        ({"w:float32": ((10**6, 10**6), I8)}, "':scales' is missing"),
    ):
        how = TopK(0.1) if "w:topk" in forms else Int8()
        with pytest.raises(ValueError, match=sentence):
            decompressed_specs({"model": forms}, DOWN, how)
    claimed = {"w:float32": ((10**6, 10**6), I8), ":scales": ((1,), F32)}  # what the method takes decides
    assert decompressed_specs({"model": claimed}, DOWN, Int8()) == {"model": {"w": ((10**6, 10**6), F32)}}
