"""Warnings of columns that look like ids and of columns that nearly are the target, and none of a clean table."""

import warnings

import numpy as np
import pytest

from polyfed.core.errors import collect_data_warnings
from polyfed.data import split_table
from polyfed.data.sources.published.heart import read_heart_table


def voices(order="in sequence"):
    """42 patients with 20 recordings each, as UCI's Parkinson data have them."""
    rng = np.random.default_rng(0)
    subject = np.arange(1, 43).repeat(20)
    motor = rng.normal(size=42)[subject - 1] + 0.3 * rng.normal(size=840)
    rows = {
        "subject": subject, "age": rng.integers(40, 80, 42)[subject - 1], "sex": rng.integers(0, 2, 42)[subject - 1],
        "hospital": (subject - 1) // 7, "jitter": rng.normal(size=840), "total": 1.3 * motor + 0.3 * rng.normal(size=840),
        "motor": motor,
    }  # fmt: skip
    if order != "in sequence":
        shuffled = rng.permutation(840)
        rows = {name: column[shuffled] for name, column in rows.items()}
    return {name: column.tolist() for name, column in rows.items()}


def warned(rows, target, site="hospital", **options):
    with warnings.catch_warnings(), collect_data_warnings() as texts:
        warnings.simplefilter("ignore")
        split_table(rows, target, site, **options)
    return texts


def test_an_id_in_sequence_and_a_second_target():
    ids, near = warned(voices(), "motor")
    assert ids.startswith("column 'subject' has 42 values that each occur about 20 times in sequence: an id? give ")
    assert "--data.group subject" in ids
    assert "leave it out (drop='subject', --data.drop subject)" in ids
    assert near.startswith("column 'total' nearly is the target 'motor' (correlation 0.9")


def test_an_id_in_any_order_and_one_that_was_dropped():
    ids = warned(voices("shuffled"), "motor")[0]
    assert "42 values that each occur about 20 times, and 2 columns are constant within each" in ids
    (dropped,) = warned(voices(), "motor", drop="subject,total")
    assert dropped.startswith("column 'subject', which is not a feature, has 42 values")


@pytest.mark.parametrize("name", ["patient", "k"])
def test_visits_that_follow_one_another_in_blocks(name):
    """Three visits of each patient, stacked by visit: what is constant has fractions and missing values."""
    rng = np.random.default_rng(0)
    age, stage = rng.normal(60, 10, 80).tolist(), rng.choice(["I", "II", None], 80).tolist()
    rows = {name: list(range(80)) * 3, "age": age * 3, "stage": stage * 3, "lab": rng.normal(size=240).tolist()}
    rows |= {"y": rng.integers(0, 2, 240).tolist(), "s": [k % 2 for k in range(80)] * 3}
    (ids,) = warned(rows, "y", "s")
    assert f"column '{name}' has 80 values that each occur about 3 times, and 2 columns are constant within each" in ids
    varying = {name: rows[name], "lab": rows["lab"], "y": rows["y"], "s": rows["s"]}
    found = warned(varying, "y", "s")
    assert [text.split(": ")[0] for text in found] == (
        ["column 'patient' has 80 values that each occur about 3 times"] if name == "patient" else []
    )


def test_a_group_answers():
    assert warned(voices(), "motor", group="subject", drop="total") == []


def test_row_numbers_without_a_name():
    rng = np.random.default_rng(0)
    rows = {"k": range(5, 105), "x": rng.normal(size=100), "y": [0, 1] * 50, "s": ["a"] * 50 + ["b"] * 50}
    (text,) = warned({name: list(column) for name, column in rows.items()}, "y", "s")
    assert text.startswith("column 'k' has a different value in each row, in order: the number of the row, or a time?")


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (lambda y, rng: y + 0.3 * rng.random(200), "(alone it has an AUC of 1.000)"),
        (lambda y, rng: -3.0 * y - 0.3 * rng.random(200), "(alone it has an AUC of 1.000)"),
        (lambda y, rng: np.array(["well", "ill"])[y], "(each of its values goes with one class)"),
        (lambda y, rng: 2 * y + rng.integers(0, 2, 200), "(each of its values goes with one class)"),
    ],
)
def test_a_column_that_gives_the_class_away(column, words):
    rng = np.random.default_rng(0)
    y = rng.permutation([0, 1] * 100)
    rows = {"x": rng.normal(size=200), "later": column(y, rng), "y": y, "s": ["a", "b"] * 100}
    (text,) = warned({name: list(values) for name, values in rows.items()}, "y", "s")
    assert text.startswith("column 'later' nearly is the target 'y' ")
    assert words in text
    assert "leave it out (drop='later', --data.drop later)" in text


def test_nothing_of_clean_tables():
    """Sites with columns of their own, sorted by site; and real patients."""
    rng = np.random.default_rng(0)
    school = np.arange(30).repeat(40)
    rows = {
        "pupils": (40 + school).tolist(), "x": rng.normal(size=1200), "age": rng.integers(10, 30, 1200),
        "score": rng.normal(size=1200), "school": school,
    }  # fmt: skip
    assert warned(rows, "score", "school") == []
    (copies,) = warned(read_heart_table(), "num", positive=">0")
    assert copies.startswith("2 of 920 rows are copies")


def test_no_value_of_a_row_is_shown():
    rows = voices()
    rows["subject"] = [f"voice-{k}" for k in rows["subject"]]
    texts = warned(rows, "motor", categorical="subject", drop="total")
    assert texts
    assert "voice-" not in " ".join(texts)
