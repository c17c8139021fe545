"""Inputs of several tensors: how they are stored, checked, cut into batches and given to networks."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.core.evaluation.evaluate import evaluate, predict
from polyfed.core.examples.examples import Examples, Normalise, PartwiseTransform
from polyfed.core.examples.nan_checks import check_examples_finite
from polyfed.core.examples.prediction_inputs import convert_inputs_to_examples_like
from polyfed.core.examples.pytree import (
    call_network,
    input_spec_of,
    logits_of,
    named_leaves,
    tree_map,
    unflatten_inputs,
)
from polyfed.core.nn.memory_format import to_preferred_memory_format

Y = torch.tensor([0, 1, 0, 1, 0, 1])
IMAGES = torch.arange(6 * 4, dtype=torch.uint8).view(6, 1, 2, 2)
AGES = torch.arange(6.0).view(6, 1)


class Both(nn.Module):
    """Keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(5, 2)
        self.given = None

    def forward(self, image, age):
        self.given = {"image": image, "age": age}
        return {"logits": self.last(torch.cat([image.flatten(1), age], 1)), "loss": None}


def test_batches_and_views_are_cut_in_every_part():
    store = {"image": IMAGES, "rest": [AGES, {"length": Y}]}
    examples = Examples(store, Y, columns={"number": range(6)}).select(torch.tensor([5, 2, 0]))
    assert len(examples) == 3
    assert examples.x["image"] is IMAGES  # the store is shared
    x, y = examples.batch(torch.tensor([1, 0]))
    assert torch.equal(x["image"], IMAGES[[2, 5]])
    assert isinstance(x["rest"], tuple)
    assert x["rest"][0].tolist() == [[2.0], [5.0]]
    assert x["rest"][1]["length"].tolist() == y.tolist() == [0, 1]
    again = examples.select(torch.tensor([2])).to(torch.device("cpu"))
    assert again.batch(torch.tensor([0]))[0]["rest"][0].item() == 0
    assert examples.raw_inputs["rest"][0].flatten().tolist() == [5.0, 2.0, 0.0]
    assert examples.device.type == "cpu"
    elsewhere = Examples(store, Y).to(torch.device("meta"))
    assert {part.device.type for _, part in named_leaves(elsewhere.x)} == {elsewhere.device.type} == {"meta"}


def test_augmentation_and_transform_get_the_structure():
    def brighter(x, generator):
        return {**x, "image": x["image"] + torch.randint(1, 2, (1,), generator=generator, dtype=torch.uint8)}

    examples = Examples(
        {"image": IMAGES, "age": AGES},
        Y,
        transform=PartwiseTransform({"image": Normalise((0.0,), (1.0,))}),
        augment=brighter,
    )
    rows = torch.tensor([1])
    plain, changed = examples.batch(rows)[0], examples.batch(rows, torch.Generator())[0]
    torch.testing.assert_close(changed["image"] - plain["image"], torch.full((1, 1, 2, 2), 1 / 255))
    assert plain["age"].item() == changed["age"].item() == 1
    with pytest.raises(pf.UserError, match="no part 'imag'; did you mean image"):
        Examples(examples.x, Y, transform=PartwiseTransform({"imag": Normalise((0.0,), (1.0,))})).batch(rows)


def test_what_is_no_structure_of_rows_is_refused():
    for x, sentence in (
        ({}, "the dict holds no tensor"),
        ({"a": AGES, "b": AGES[:2]}, "'b' has 2 rows and 'a' 6 rows"),
        ((AGES, torch.tensor(1.0)), "'1' has no axis of rows"),
        ({"a/b": AGES}, "the key 'a/b' of a dict of inputs must be a text without '/'"),
        ({"a": "text"}, "must be tensors, or tuples or dicts of tensors, got str"),
        ((AGES[:3], AGES[:3]), r"one row per example, got shapes \(3, 1\) and \(6,\)"),
    ):
        with pytest.raises(pf.UserError, match=sentence):
            Examples(x, Y)
    with pytest.raises(pf.UserError, match="this needs inputs of one tensor, got several"):
        _ = Examples((AGES, AGES), Y).input_tensor


def test_networks_are_called_by_position_or_by_name_and_answer_as_they_like():
    net = Both()
    outputs = [
        logits_of(call_network(net, x)) for x in ((IMAGES.float(), AGES), {"age": AGES, "image": IMAGES.float()})
    ]
    assert torch.equal(*outputs)
    examples = Examples({"image": IMAGES.float(), "age": AGES}, Y)
    assert torch.equal(predict(net, examples, batch_size=4), outputs[0].detach())
    assert net.given["age"].tolist() == [[4.0], [5.0]]  # the second batch
    assert evaluate(net, examples, "classification").keys() == {"accuracy", "loss"}

    class Answer:
        __slots__ = ("logits",)

    answer = Answer()
    answer.logits = outputs[0]
    assert logits_of(answer) is outputs[0]
    for wrong in ((outputs[0], None), {"scores": outputs[0]}, None):
        with pytest.raises(pf.UserError, match="must return a tensor of logits, a dict with a tensor 'logits'"):
            logits_of(wrong)


def test_nan_is_found_in_every_part():
    ages = AGES.clone()
    ages[4] = torch.nan
    with pytest.raises(pf.UserError, match=r"'north': train inputs 'age': row 4, column 0 is nan"):
        pf.Client("north", None, ({"image": IMAGES, "age": ages}, Y), ({"image": IMAGES, "age": AGES}, Y))
    filled = Examples({"age": ages, "image": IMAGES}, Y, transform=lambda x: {**x, "age": x["age"].nan_to_num()})
    check_examples_finite(filled, "x")
    check_examples_finite(Examples((ages, IMAGES), Y, index=torch.tensor([0, 5])), "x")  # another's row
    ages[4], ages[0] = 4.0, torch.inf
    with pytest.raises(pf.UserError, match="row 0, column 0 is inf"):  # changed in place since
        check_examples_finite(Examples((ages, IMAGES), Y), "x")


def test_images_of_a_structure_are_laid_out_as_images():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 4, 2), nn.Linear(5, 2)

        def forward(self, image, age):
            return self.last(torch.cat([self.conv(image).mean((2, 3)), age], 1))

    x = {"age": torch.ones(3, 1), "image": torch.rand(3, 3, 4, 4)}
    found = to_preferred_memory_format(Net(), x)
    assert found["image"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found["image"], x["image"])
    assert found["age"] is x["age"]
    tables = (torch.ones(3, 1), torch.ones(3, 2))
    assert to_preferred_memory_format(Net(), tables) is tables


def test_inputs_to_predict_have_the_parts_of_the_clients():
    known = Examples(
        {"image": IMAGES, "age": AGES}, Y, transform=PartwiseTransform({"image": Normalise((0.0,), (1.0,))})
    )
    given = {"age": [[60]], "image": IMAGES[:1, 0]}  # whole numbers, and no axis of channels
    x = convert_inputs_to_examples_like(known, given, "the inputs").batch(torch.tensor([0]))[0]
    assert (x["age"].item(), x["age"].dtype) == (60.0, torch.float32)
    torch.testing.assert_close(x["image"], IMAGES[:1] / 255)
    for wrong, sentence in (
        (IMAGES, r"are one tensor, the client's have the parts \['age', 'image'\]"),
        ({"age": AGES, "image": IMAGES.float()}, "the inputs: 'image' are torch.float32, the client's are torch.uint8"),
        ({"age": AGES[:2], "image": IMAGES}, "'image' has 6 rows and 'age' 2 rows"),
        ({"age": AGES * torch.nan, "image": IMAGES}, "the inputs: 'age' have values that are NaN"),
    ):
        with pytest.raises(pf.UserError, match=sentence):
            convert_inputs_to_examples_like(known, wrong, "the inputs")


def test_forms_are_values():
    one, other = input_spec_of({"b": (AGES, IMAGES), "a": AGES}), input_spec_of({"a": AGES[:1], "b": (AGES, IMAGES)})
    assert one == other
    assert hash(one) == hash(other)
    assert one != input_spec_of({"a": AGES, "b": (AGES, AGES)})
    assert (
        str(one)
        == "a: torch.float32 of shape (1,), b: (0: torch.float32 of shape (1,), 1: torch.uint8 of shape (1, 2, 2))"
    )
    x = {"a": AGES, "b": (AGES, IMAGES)}
    named = dict(named_leaves(x, "x"))
    assert list(named) == ["x/a", "x/b/0", "x/b/1"]
    back = unflatten_inputs(dict(reversed(named.items())), input_spec_of(x))
    assert tree_map(lambda a, b: a is b, x, back) == {"a": True, "b": (True, True)}
    with pytest.raises(pf.UserError, match=r"inputs of the parts \['x/a'\], expected \['x/a', 'x/b/0', 'x/b/1'\]"):
        unflatten_inputs({"x/a": AGES}, input_spec_of(x))
