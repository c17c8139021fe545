"""Rows without a target or a site are refused by their numbers, or left out and counted if that is asked for."""

import warnings

import pytest

import polyfed as pf
from polyfed.core.errors import UserError, collect_data_warnings
from polyfed.data.sources.folders import ImageTable
from tests.data.sources.test_table_file import frame, write


@pytest.mark.parametrize("extra", [{}, {"event": "died"}])
def test_rows_without_a_target_are_left_out_and_counted(extra):
    """Also those whose time is known and whose event is not."""
    data = frame().assign(died=[0, 1] * 40, days=[1.0, None, *range(2, 80)], cost=None, patient=None)
    data.loc[[10, 11], "died"] = None
    target = "days" if extra else "died"
    options = {"columns": ["age"], **extra}
    with pytest.raises(UserError, match=r"has no value in rows? .*drop the rows? \(missing_target='drop'\)"):
        pf.data.split_table(data, target, "hospital", **options)
    with warnings.catch_warnings(), collect_data_warnings() as texts:
        warnings.simplefilter("ignore")
        sites = pf.data.split_table(data, target, "hospital", missing_target="drop", **options)
    rows = [10, 11, *([1] if extra else [])]
    counts = data["hospital"].iloc[rows].value_counts()
    columns = "'days' and 'died'" if extra else "'died'"
    assert texts[0] == (
        f"{len(rows)} of 80 rows have no value in the target {columns} and are left out "
        f"({', '.join(f'{name} {counts[name]}' for name in sorted(counts.index))})"
    )
    with pytest.raises(UserError, match="target: no row has a value in "):
        pf.data.split_table(data.assign(died=None), target, "hospital", missing_target="drop", **options)
    remaining = data.drop(index=rows)
    assert {part.id: len(part.train) + len(part.test) for part in sites.client_data} == dict(
        remaining["hospital"].value_counts()
    )
    assert sites.dataset.train.x[:, 0].nan_to_num(-1).tolist() == pytest.approx(remaining["age"].fillna(-1).tolist())
    assert pf.data.split_table(remaining, target, "hospital", **options).dataset.train.y.equal(sites.dataset.train.y)


def test_rows_without_a_site_are_left_out_and_counted(tmp_path):
    data = frame().assign(died=[0, 1] * 40)
    data.loc[[10, 11], "hospital"] = None
    data.loc[[3, 10], "died"] = None
    options = {"columns": ["age"], "missing_target": "drop"}
    with pytest.raises(UserError, match=r"rows 11 and 12 .*drop the rows \(missing_site='drop'\)"):
        pf.data.split_table(data, "died", "hospital", **options)
    with warnings.catch_warnings(), collect_data_warnings() as texts:
        warnings.simplefilter("ignore")
        sites = pf.data.split_table(data, "died", "hospital", missing_site="drop", **options)
    assert [text.partition(" and ")[0] for text in texts[:2]] == [
        "2 of 80 rows have no value in the site 'hospital'",
        "1 of 78 rows have no value in the target 'died'",
    ]
    assert sum(len(part.train) + len(part.test) for part in sites.client_data) == 77
    listed = write(tmp_path, data.assign(file="a.png"))
    for target, site in (("died", "sex"), ("sex", "hospital")):
        with pytest.raises(UserError, match=r"drop the rows?$"):  # a source without these options does not offer them
            ImageTable(listed, target=target, image="file", site=site).load()
