"""Warnings of columns that look like ids and of columns that nearly are the target, and none of a clean table."""

import warnings

import numpy as np
import pytest
from sklearn import datasets

from polyfed.core.errors import UserError, collect_data_warnings
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


def rows_with(name, values):
    rng = np.random.default_rng(0)
    n = len(values)
    site = ["a"] * (n // 2) + ["b"] * (n - n // 2)
    return {
        name: list(values),
        "x": rng.normal(size=n).tolist(),
        "y": rng.permutation([0, 1] * n)[:n].tolist(),
        "s": site,
    }


def case_numbers(n, repeated=0, seed=0):
    numbers = np.random.default_rng(seed).choice(np.arange(100_000, 1_000_000), n, replace=False)
    numbers[:repeated] = numbers[repeated : 2 * repeated]
    return numbers.tolist()


IDENTIFIERS = {
    "row numbers": ("k", range(5, 105), "100 different whole numbers in 100 rows, in order"),
    "row numbers in any order": ("k", np.random.default_rng(0).permutation(60), "which would repeat more often"),
    "numbers of each site": ("k", [*range(40), *range(40)][::-1], "which would repeat more often"),
    "long numbers": ("schluessel", case_numbers(200), "each of 6 digits and spread evenly"),
    "long numbers with second visits": (
        "key_",
        case_numbers(200, 30),
        "170 different whole numbers in 200 rows, each of 6",
    ),
    "a gap": ("akte", [None, *case_numbers(199)], "199 different whole numbers in 199 rows, each of 6 digits"),
    "a few rows and a name": ("fallnr", case_numbers(24), "24 different whole numbers in 24 rows, and its name"),
    "a name in the middle": ("patient_ID", case_numbers(24, 2), "22 different whole numbers in 24 rows, and its name"),
}


@pytest.mark.parametrize("case", IDENTIFIERS)
def test_an_identifier_of_any_name(case):
    name, values, words = IDENTIFIERS[case]
    (text,) = warned(rows_with(name, values), "y", "s")
    assert text.startswith(f"column {name!r} looks like an identifier (")
    assert words in text
    role = "time" if "in order" in text else "group"
    assert f"leave it out (drop={name!r}, --data.drop {name}), or give {role}={name!r} (--data.{role} {name})" in text
    assert not [text for text in warned(rows_with(name, values), "y", "s", drop=name) if "identifier" in text]


MEASUREMENTS = {
    "ages of few people": ("age", range(21, 81, 3)),
    "uric acid": ("uric_acid", np.random.default_rng(0).permutation(np.arange(150, 600))[:90]),
    "platelets": ("platelets", np.random.default_rng(0).normal(250_000, 50_000, 300).round()),
    "incomes": ("income", np.random.default_rng(0).lognormal(10.5, 0.5, 300).round()),
    "amounts with a fraction": ("k", np.arange(100)[::-1] + 0.5),
    "counts": ("number_of_cells", np.random.default_rng(0).poisson(5000, 300)),
}


@pytest.mark.parametrize("case", MEASUREMENTS)
def test_a_measurement_is_no_identifier(case):
    name, values = MEASUREMENTS[case]
    assert warned(rows_with(name, values), "y", "s") == []


@pytest.mark.parametrize("visits", [2, 3, 8])
@pytest.mark.one_case
def test_ages_of_patients_who_are_the_sites_are_no_identifier(visits):
    ages = np.random.default_rng(0).integers(30, 85, 140)
    rows = {
        "age": (ages[:, None] + np.arange(visits)).ravel().tolist(),
        "site": np.repeat(np.arange(140), visits).tolist(),
    }
    rows["y"] = np.random.default_rng(1).permutation([0, 1] * (70 * visits)).tolist()
    assert not [text for text in warned(rows, "y", "site") if "identifier" in text]


@pytest.mark.parametrize("name", ["breast_cancer", "diabetes", "wine"])
def test_no_column_of_scikit_learns_tables_is_an_identifier(name):
    data = getattr(datasets, f"load_{name}")(**({"scaled": False} if name == "diabetes" else {}))
    task = "regression" if name == "diabetes" else "auto"
    rows = dict(zip(data.feature_names, data.data.T.tolist(), strict=True))
    assert not [
        text for text in warned({**rows, "y": data.target.tolist()}, "y", None, task=task) if "identifier" in text
    ]


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
    assert copies.startswith("2 of 920 rows are equal to other rows in all columns ")


def test_no_value_of_a_row_is_shown():
    rows = voices()
    rows["subject"] = [f"voice-{k}" for k in rows["subject"]]
    texts = warned(rows, "motor", categorical="subject", drop="total")
    assert texts
    assert "voice-" not in " ".join(texts)


def test_names_that_differ_in_case_alone_are_told():
    table = {"x": range(8), "ward": list("aBabBaab"), "h": ["north", "North"] * 4, "y": ["no", "yes", "No", "YES"] * 2}
    with pytest.warns(UserWarning, match="spell them alike") as told:
        split_table(table, "y", "h")
    texts = [str(warning.message) for warning in told]
    for column, first, second in (("ward", "B", "b"), ("h", "north", "North"), ("y", "No", "no")):
        assert any(f"column {column!r} has {first!r} and {second!r}, which are two different" in text for text in texts)


def test_all_spellings_of_a_name_are_told():
    table = {"x": [0, 1] * 20, "h": ["Hull", "hull", "HULL", "York"] * 10, "y": ["no", "no", "yes", "yes"] * 10}
    with pytest.warns(UserWarning, match="'h' has 'Hull', 'hull' and 'HULL', which are 3 different values here"):
        split_table(table, "y", "h")


def test_names_whose_accents_are_encoded_differently_are_told():
    table = {"x": [*range(8)], "h": ["Köln", "Ko\u0308ln"] * 4, "ward": ["a b", "a  b"] * 4, "y": ["no", "yes"] * 4}
    with pytest.warns(UserWarning, match="spell them alike") as told:
        split_table(table, "y", "h")
    texts = "".join(str(warning.message) for warning in told)
    assert r"column 'h' has 'K\xf6ln' and 'Ko\u0308ln', which are two different values here" in texts
    assert "column 'ward' has 'a  b' and 'a b'" in texts


def test_a_target_that_is_the_same_everywhere_is_told():
    table = {"x": [*range(40)], "h": ["a", "b"] * 20, "y": [1.5] * 40, "z": [0, 1, 1, 0] * 10}
    with pytest.warns(UserWarning, match="target 'y' is the same in every row, so that there is nothing to learn"):
        split_table(table, "y", "h", task="regression")
    with pytest.warns(UserWarning, match="target 'y' is the same in every row") as told:
        split_table({**table, "y": [0] * 40}, ["y", "z"], "h", task="multilabel")
    assert not any("target 'z'" in str(warning.message) for warning in told)


def test_a_target_that_32_bits_cannot_tell_apart_is_refused():
    table = {"x": [*range(40)], "h": ["a", "b"] * 20, "y": [2**40 + k for k in range(40)]}
    with pytest.raises(UserError, match="target 'y' has numbers so large compared with their differences"):
        split_table(table, "y", "h", task="regression")
    split_table({**table, "y": [1_700_000_000 + 86_400 * k for k in range(40)]}, "y", "h", task="regression")


def rows_of_four_hospitals():
    rng = np.random.default_rng(2)
    rows = {"hospital": np.array(list("nesw"))[rng.integers(0, 4, 800)], "age": rng.integers(30, 90, 800)}
    rows |= {"crp": rng.normal(size=800).round(2), "ill": rng.integers(0, 2, 800)}
    return {name: column.tolist() for name, column in rows.items()}


@pytest.mark.parametrize(
    ("target", "site", "sentence"),
    [
        ("hospital", "age", "site: column 'age' has 60 different numbers in 800 rows, and target 'hospital' 4 different "
         "values; each of the 60 becomes a client; if the two are swapped, give site='hospital' (--data.site hospital) and "
         "target='age' (--data.target age)"),
        ("ill", "age", "each of the 60 becomes a client; if these are no clients, give site=... (--data.site) with the "),
        ("ill", "hospital", None),
        ("ill", "site_id", None),
        ("ill", "user", "site: column 'user' has 400 different texts in 800 rows"),
        ("ill", "town", None),
    ],
)  # fmt: skip
def test_a_column_of_sites_that_may_be_another_is_warned_of(target, site, sentence):
    rows = rows_of_four_hospitals()
    rows |= {"site_id": [k % 60 for k in range(800)]} if site == "site_id" else {}
    rows |= {"user": [f"u{k % 400}" for k in range(800)]} if site == "user" else {}
    rows |= {"town": [f"t{k % 80}" for k in range(800)]} if site == "town" else {}
    texts = [
        text for text in warned(rows, target, site, drop=[] if site != "user" else "age") if text.startswith("site: ")
    ]
    assert len(texts) == (sentence is not None)
    assert (sentence or "") in "".join(texts)
    assert not any(value in "".join(texts) for value in ("'n'", "'31'", "u17"))
