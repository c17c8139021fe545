"""The answers of a comparison as values: for the mean and for each client."""

import pytest

import polyfed as pf
from polyfed.comparison.storage.comparison import Comparison

MEAN = {"client": None, "answer": "undecided", "method": "fml", "gain": 0.01, "interval": None, "sentence": "mean: ..."}
NORTH = {"client": "north", "answer": "join", "method": "fml", "gain": 0.03, "interval": [0.01, 0.05], "over": "ridge",
         "test_examples": 90, "sentence": "north: join with fml"}  # fmt: skip


def comparison(**more):
    return Comparison({"seeds": [0], "methods": {}, "mean_answer": MEAN, "answers": [NORTH], **more})


def test_the_answer_of_a_client_has_its_numbers():
    answer = comparison().answer("north")
    assert isinstance(answer, pf.Answer)
    assert (answer.decision, answer.method, answer.gain, answer.low, answer.high) == ("join", "fml", 0.03, 0.01, 0.05)
    assert (answer.alternative, answer.test_examples, str(answer)) == ("ridge", 90, "north: join with fml")
    mean = comparison().answer()
    assert (mean.client, mean.decision, mean.low, mean.high, mean.alternative) == (None, "undecided", None, None, None)


def test_all_answers_are_rows_of_a_table():
    rows = comparison().answer_table()
    assert [row["client"] for row in rows] == ["mean", "north"]
    assert [str(comparison().answer(row["client"])) for row in rows] == ["mean: ...", "north: join with fml"]
    site = comparison(answers=[{**NORTH, "client": "mean"}])  # a site may have this name
    assert (site.answer("mean").client, site.answer().client) == ("mean", None)
    assert [row["decision"] for row in rows] == ["undecided", "join"]
    assert "sentence" not in rows[0]
    assert str(rows).splitlines()[2].split()[:3] == ["north", "join", "fml"]


def test_an_answer_that_does_not_exist_is_refused_with_the_nearest_name():
    with pytest.raises(pf.UserError, match=r"no answer for a client 'nort'; did you mean north"):
        comparison().answer("nort")
    with pytest.raises(pf.UserError, match=r"this comparison has no answers; print\(comparison\) says why"):
        comparison(mean_answer=None, answers=[]).answer()
    assert comparison(mean_answer=None, answers=[]).answer_table() == []
