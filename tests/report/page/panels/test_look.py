"""The figures of the sites' data: a column of few whole numbers fills its axis, and names the numbers below the bars."""

import random
import re

import pytest

import polyfed as pf
from polyfed.report.page.panels.look import svg_site_histograms


@pytest.fixture(scope="module")
def seen():
    draw = random.Random(0)
    rows = [
        {"site": site, "female": draw.randint(0, 1), "age": draw.gauss(60, 10), "ill": k % 2}
        for site in ("north", "south")
        for k in range(80)
    ]
    return pf.look(pf.data.split_table(rows, "ill", "site"))


def drawn(seen, name):
    column = next(column for column in seen.columns if column.name == name)
    svg = svg_site_histograms(seen, column, ["north", "south"], {}, "k")
    bars = [
        (float(x), float(width))
        for x, width in re.findall(r'class="more" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', svg)
    ]
    return bars, re.findall(r'text-anchor="middle">([^<]+)<', svg)


def test_two_values_have_wide_bars_with_their_names(seen):
    bars, labels = drawn(seen, "female")
    assert len(bars) == 4
    assert min(width for _, width in bars) > 80
    assert labels == ["0", "1"]


def test_numbers_with_decimals_have_the_ends_of_the_axis(seen):
    bars, labels = drawn(seen, "age")
    assert len({x for x, _ in bars}) > 8
    assert len(labels) == 3
    assert float(labels[0]) < 40 < 80 < float(labels[2])
