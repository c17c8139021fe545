"""Numbers of rows have no unit: that they lie elsewhere at each site is no finding."""

import random

import pytest

import polyfed as pf


def test_identifiers_have_neither_unit_nor_shift():
    draw = random.Random(0)
    starts = {"north": 1000, "south": 2200, "west": 5000}
    rows = [
        {"site": site, "id": start + k, "age": draw.gauss(50, 9), "ill": k % 2}
        for site, start in starts.items()
        for k in range(100)
    ]
    draw.shuffle(rows)
    with pytest.warns(UserWarning, match="column 'id' looks like an identifier"):
        sites = pf.data.split_table(rows, "ill", "site")
    assert pf.look(sites).findings == ()
