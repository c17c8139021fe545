"""What is refused before torch is imported is refused in the library's words, and nothing that the library takes is."""

import csv

import pytest

from polyfed.cli.commands.options.table_checks import check_table
from polyfed.core.errors import UserError
from polyfed.core.io.text.advice import keep_options_in_errors
from polyfed.data.sources.table_file import TableFile

ROWS = range(60)
COLUMNS = {
    "age": [20.5 + k for k in ROWS],
    "site": ["ab"[k % 2] for k in ROWS],
    "ill": [k // 2 % 2 for k in ROWS],
}
CASES = {
    "usable": ({}, {}),
    "amounts with a decimal comma": ({"dose": [f"{k},5" for k in ROWS]}, {"decimal": ","}),
    "truth values": ({"smokes": ["true", "false"] * 30}, {}),
    "words for no value": ({"dose": ["NA", "", "n/a", 1.5] * 15}, {}),
    "own words for no value": ({"dose": ["?", 1.5] * 30}, {"missing": "dose=?"}),
    "identifier": ({"id": [f"p{k}" for k in ROWS]}, {}),
    "identifier as categories": ({"id": [f"p{k}" for k in ROWS]}, {"categorical": "id"}),
    "identifier, left out": ({"id": [f"p{k}" for k in ROWS]}, {"drop": "id"}),
    "dates and an empty column": ({"day": [f"2026-01-{k % 28 + 1:02}" for k in ROWS], "note": [""] * 60}, {}),
    "dates by which rows are split": ({"day": [f"2026-01-{k % 28 + 1:02}" for k in ROWS]}, {"time": "day"}),
    "decimal comma and an identifier": ({"dose": [f"{k},5" for k in ROWS], "id": [f"p{k}" for k in ROWS]}, {}),
    "thousands": ({"cost": [f"{k + 1},000" for k in ROWS]}, {}),
    "a few words among numbers": ({"lab": [1.5] * 58 + ["low", "high"]}, {}),
    "words, one of which a shell would read": ({"lab": [1.5] * 58 + ["<5", "low"]}, {}),
    "shares with a sign": ({"share": [f"{k}.5 %" for k in ROWS]}, {}),
    "five shares with a sign, categories": ({"share": [f"{k % 5}0 %" for k in ROWS]}, {}),
    "codes with an underscore": ({"lab": [f"{k}_1" for k in ROWS]}, {}),
    "a row without a site": ({"site": ["a", "b", ""] * 20}, {}),
    "rows without a site, dropped": ({"site": ["a", "b", ""] * 20, "ill": [0, 1, 7] * 20}, {"missing_site": "drop"}),
    "rows without a site, dropped, with other labels": (
        {"site": ["a", "b", ""] * 20, "ill": [k if k % 3 == 2 else k % 2 for k in ROWS]},
        {"missing_site": "drop"},
    ),
    "a row without a target": ({"ill": [0, 1, ""] * 20}, {}),
    "rows without a target, dropped": ({"ill": [0, 1, ""] * 20}, {"missing_target": "drop"}),
    "rows without a target, dropped, and a word": (
        {"ill": ["", *[0, 1] * 29, ""], "lab": [*[1.5] * 57, "low", 1.5, 1.5]},
        {"missing_target": "drop"},
    ),
    "amounts and gaps as the target": ({"ill": [*range(58), "", ""]}, {"missing_target": "drop"}),
    "many whole numbers as the target": ({"ill": list(ROWS)}, {}),
    "many whole numbers, a condition": ({"ill": list(ROWS)}, {"positive": ">30"}),
    "amounts as the target": ({"ill": [k + 0.5 for k in ROWS]}, {}),
    "amounts with a decimal comma as the target": ({"ill": [f"{k},5" for k in ROWS]}, {}),
    "amounts and a word as the target": ({"ill": ["n/k", *(k + 0.5 for k in range(59))]}, {}),
    "identifiers as the target": ({"ill": [f"p{k}" for k in ROWS]}, {}),
    "dates as the target": ({"ill": [f"2026-0{k % 9 + 1}-03" for k in ROWS]}, {}),
    "many dates as the target": ({"ill": [f"2026-{k % 12 + 1:02}-{k % 28 + 1:02}" for k in ROWS]}, {}),
    "groups of ages": ({}, {"subgroups": "age=30:50"}),
    "groups of a column that is not there": ({}, {"subgroups": ["agee=30:50", "ag"]}),
    "empty rows at the end": ({name: [*values[:-2], "", ""] for name, values in COLUMNS.items()}, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_early_refusals_are_those_of_the_library(case, tmp_path):
    columns, options = CASES[case]
    columns = COLUMNS | columns
    file = tmp_path / "rows.csv"
    with file.open("w", newline="", encoding="utf-8-sig") as stream:
        csv.writer(stream, delimiter=";").writerows([columns, *zip(*columns.values(), strict=True)])
    options = {"path": str(file), "target": "ill", "site": "site", **options}
    assert refusal_by(lambda: check_table({"name": "table", **options})) == refusal_by(TableFile(**options).load)


def test_all_that_is_wrong_with_a_table_is_said_at_once(tmp_path):
    columns = COLUMNS | {
        "ill": ["", *ROWS[1:]],
        "day": [f"{k % 28 + 1:02}.01.2026" for k in ROWS],
        "dose": ["1,5"] * 60,
    }
    file = tmp_path / "rows.csv"
    with file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, delimiter=";").writerows([columns, *zip(*columns.values(), strict=True)])
    with keep_options_in_errors():
        text = refusal_by(lambda: check_table({"name": "table", "path": str(file), "target": "ill", "site": "site"}))
    for cure in ("--data.missing-target drop", "--data.task regression", "--data.drop day", "--data.decimal ,"):
        assert cure in text
    assert text.count("; besides, ") == 3
    cured = {"missing_target": "drop", "task": "regression", "drop": "day", "decimal": ","}
    assert not refusal_by(
        lambda: check_table({"name": "table", "path": str(file), "target": "ill", "site": "site", **cured})
    )


def refusal_by(read):
    try:
        read()
    except UserError as error:
        return str(error)
    return ""


def test_a_target_with_decimal_commas_or_a_word_among_numbers_names_the_option(tmp_path):
    for cell, option in (("{},5", "--data.decimal ,"), ("{}.5", "--data.missing n/k")):
        rows = "".join(
            f"{k % 7};{'n/k' if k % 9 == 0 and '.' in cell else cell.format(k)};{'ab'[k % 2]}\n" for k in range(90)
        )
        (tmp_path / "rows.csv").write_text(f"age;dose;site\n{rows}")
        data = {"name": "table", "path": str(tmp_path / "rows.csv"), "target": "dose", "site": "site"}
        with keep_options_in_errors(), pytest.raises(UserError, match=option) as refusal:
            check_table(data)
        assert str(refusal.value).startswith("target: column 'dose' ")
        assert "categor" not in str(refusal.value)
