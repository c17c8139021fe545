"""One check of declared types, for what files hold and for the fields of dataclasses."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from polyfed.core.errors import UserError
from polyfed.core.io.values.validation import (
    check_field_types,
    describe_annotation,
    field_types,
    parse_json,
    parse_yaml,
    validation_error,
)


@dataclass(frozen=True)
class Options:
    rounds: int | None = None
    lr: float = 0.1
    schedule: Literal["constant", "cosine"] = "constant"
    unit: Literal["%", ""] = ""
    metric: Callable[[Any], float] | str = "auc"

    def __post_init__(self) -> None:
        check_field_types(self)


def test_right_fields_pass():
    Options(rounds=3, lr=1, schedule="cosine", unit="%", metric=len)
    assert list(field_types(Options)) == ["rounds", "lr", "schedule", "unit", "metric"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"rounds": 1.5}, "Options: rounds must be a whole number, got 1.5"),
        ({"rounds": True}, "Options: rounds must be a whole number, got True"),
        ({"lr": "fast"}, "Options: lr must be a number, got 'fast'"),
        ({"schedule": "cosin"}, "Options: unknown schedule 'cosin'; did you mean cosine"),
        ({"unit": "s"}, "Options: unit must be '%' or '', got 's'"),
        ({"metric": 3}, "Options: metric must be callable, got 3"),
    ],
)
def test_a_wrong_field_is_named_with_what_it_must_be(fields, sentence):
    with pytest.raises(UserError) as error:
        Options(**fields)
    assert str(error.value).startswith(sentence)


def test_only_the_named_fields_are_checked():
    @dataclass(frozen=True)
    class Loose:
        task: Literal["auto", "regression"] = "auto"
        positive: str | None = None

        def __post_init__(self) -> None:
            check_field_types(self, "task")

    Loose(positive=1)
    with pytest.raises(UserError, match="Loose: unknown task 'sums'"):
        Loose(task="sums")


def test_callables_and_choices_are_described():
    assert validation_error(len, Callable[[str], int]) is None
    assert validation_error("len", Callable[[str], int], "f") == "f must be callable, got 'len'"
    assert describe_annotation(Literal["a", "b", "c"]) == "a, b or c"


@pytest.mark.parametrize(("text", "value"), [
    ("010", "010"), ("-017", "-017"), ("1:30", "1:30"), ("1:30.5", "1:30.5"),
    ("{010: mlp, 10: cnn}", {"010": "mlp", 10: "cnn"}),
    ("[0, 10, -3, 0.5, 1_000, 0x10]", [0, 10, -3, 0.5, 1000, 16]), ("{a: &x 012, b: *x}", {"a": "012", "b": "012"}),
])  # fmt: skip
def test_yaml_reads_no_number_that_people_read_otherwise(text, value):
    assert parse_yaml(text) == value


@pytest.mark.parametrize(("text", "sentence"), [
    ("a: 1\na: 2", "the key 'a' stands twice"),
    ("{1: mlp, 1.0: cnn}", "the key '1.0' is equal to the key '1' above"),
    ("[{1: mlp, 2: cnn, true: vit}]", "the key 'true' is equal to the key '1' above"),
])  # fmt: skip
def test_yaml_with_a_key_twice_is_refused(text, sentence):
    with pytest.raises(ValueError, match=f"{re.escape(sentence)}; leave one out$"):
        parse_yaml(text)
    assert parse_yaml("{1: {1: mlp}, '1': vit, 2: {1: cnn}}") == {1: {1: "mlp"}, "1": "vit", 2: {1: "cnn"}}


@pytest.mark.parametrize(("text", "sentence"), [
    ('{"seed": 0, "seed": 1}', "the key 'seed' stands twice; leave one out"),
    ('[{"a": {"b": 1, "c": 2, "b": 1}}]', "the key 'b' stands twice; leave one out"),
    ('{"loss": 1e999}', "it has 1e999, which a float cannot hold"),
    ("[NaN]", "it has NaN, which is not a number"),
])  # fmt: skip
def test_json_with_two_meanings_is_refused(text, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        parse_json(text)
    assert parse_json('{"a": {"b": 1}, "b": -1.5e300, "c": [{"b": 1}, {"b": 2}]}')["b"] == -1.5e300
