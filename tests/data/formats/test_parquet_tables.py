"""Parquet tables give what the same table as CSV gives, and damaged ones a sentence."""

import datetime
import re
from decimal import Decimal

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from polyfed.core.errors import UserError
from polyfed.data import split_table

ROWS = 32
COLUMNS = {
    "age": [40 + row % 17 for row in range(ROWS)],
    "y": [("no", "yes")[row % 2] for row in range(ROWS)],
    "site": [("A", "B")[row // 16] for row in range(ROWS)],
}


def write_parquet(folder, **columns):
    pyarrow.parquet.write_table(pyarrow.table({**COLUMNS, **columns}), folder / "t.parquet")
    return folder / "t.parquet"


def as_decimals(numbers):
    return pyarrow.array([Decimal(number) for number in numbers], pyarrow.decimal128(38, 2))


@pytest.mark.parametrize(
    ("name", "values", "texts"),
    [
        ("ward", pyarrow.array(["a", "b"] * 16, pyarrow.string_view()), ["a", "b"] * 16),
        ("y", as_decimals([0, 1] * 16), ["0", "1"] * 16),
        ("site", as_decimals([10**17 + 1] * 16 + [10**17 + 3] * 16), [f"{10**17 + 1}"] * 16 + [f"{10**17 + 3}"] * 16),
    ],
)
def test_column_types_of_other_programs_give_what_csv_gives(tmp_path, name, values, texts):
    lines = zip(*({**COLUMNS, name: texts}).values(), strict=True)
    csv = tmp_path / "t.csv"
    csv.write_text("\n".join(",".join(map(str, line)) for line in [[*COLUMNS, *({name} - {*COLUMNS})], *lines]))
    from_csv, from_parquet = (split_table(p, "y", "site") for p in (csv, write_parquet(tmp_path, **{name: values})))
    assert (from_parquet.class_names, from_parquet.feature_names) == (from_csv.class_names, from_csv.feature_names)
    assert [part.id for part in from_parquet.client_data] == [part.id for part in from_csv.client_data]
    np.testing.assert_array_equal(from_parquet.client_data[0].train.x, from_csv.client_data[0].train.x)


def test_texts_that_are_no_utf8_are_refused_without_their_bytes(tmp_path):
    file = write_parquet(tmp_path, ward=["SECRET", "ward b"] * 16)
    file.write_bytes(file.read_bytes().replace(b"SECRET", b"\xffECRET"))
    with pytest.raises(UserError, match=r"cannot be read as Parquet \(.*UTF8") as refused:
        split_table(file, "y", "site")
    assert "ECRET" not in str(refused.value)


def test_column_name_that_occurs_twice_is_named(tmp_path):
    names, values = [*COLUMNS, "age"], [*COLUMNS.values(), COLUMNS["age"]]
    table = pyarrow.Table.from_arrays([pyarrow.array(column) for column in values], names=names)
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(UserError, match=r"t.parquet' has two columns 'age'; rename one$"):
        split_table(tmp_path / "t.parquet", "y", "site")


def test_parquet_file_with_another_name_is_recognised(tmp_path):
    file = write_parquet(tmp_path, z=[0.1 * row for row in range(ROWS)]).rename(tmp_path / "t.csv")
    with pytest.raises(UserError, match=re.escape("it is a Parquet file, whose name must end with .parquet")):
        split_table(file, "y", "site")


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["age", "y", datetime.date(2020, 1, 1)], r"^a column of the frame is called .*\]$"),
        (["y", "y", "site"], r"^the DataFrame has two columns 'y'; rename one$"),
    ],
)
def test_odd_column_names_of_frames_are_named_without_other_advice(names, error):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(COLUMNS)
    frame.columns = pandas.Index(names)
    with pytest.raises(UserError, match=error):
        split_table(frame, "y", "site")
