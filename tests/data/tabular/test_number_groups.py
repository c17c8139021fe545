"""Groups of columns of numbers that tables keep in place of the numbers, for scores of subgroups."""

import pytest

import polyfed as pf
from polyfed.report.page.predictions.subgroups import example_positions_by_group

ROWS = {
    "age": [*range(30, 90), None, 95],
    "sex": ["f", "m"] * 31,
    "hospital": ["north"] * 31 + ["south"] * 31,
    "ill": [0, 1, 1, 0, 0] * 12 + [0, 1],
}


def divide(subgroups):
    return pf.data.split_table(ROWS, "ill", "hospital", drop="age", subgroups=subgroups, test_fraction=0.5).client_data


def kept_names(clients, column="age"):
    return [name for client in clients for part in (client.train, client.test) for name in part.column(column).tolist()]


def test_only_the_names_of_groups_are_kept():
    names = kept_names(divide("age=50:65.5"))
    assert {name: names.count(name) for name in set(names)} == {
        "below 50": 20, "50 to below 65.5": 16, "from 65.5": 25, "": 1
    }  # fmt: skip
    assert [*example_positions_by_group(names)] == ["below 50", "50 to below 65.5", "from 65.5", "not known"]
    quarters = ["below 45", "45 to below 60", "60 to below 75", "from 75", "not known"]
    assert [*example_positions_by_group(kept_names(divide(["age"])))] == quarters
    heart = pf.data.heart(subgroups="age=50").client_data
    assert {*kept_names(heart)} == {"below 50", "from 50"}
    assert {*kept_names(heart, "sex")} == {"0", "1"}  # few values, as before


@pytest.mark.parametrize(
    ("subgroups", "words"),
    [
        ("age=50:93", "the group 'from 93' has fewer than 5 rows; give fewer or other cut points"),
        ("age=65:50", "give ascending numbers with colons between, such as age=50:65"),
        ("age=old", "give ascending numbers with colons between, such as age=50:65"),
        ("sex=1", "column 'sex' has no numbers"),
        ("ill", "which is the target, the site, the group or the time"),
        ("agee=50", "has no column 'agee'; did you mean age"),
    ],
)
def test_unusable_groups_are_refused(subgroups, words):
    with pytest.raises(pf.UserError, match="subgroups") as error:
        divide(subgroups)
    assert words in str(error.value)
