"""The figures of the sites' data: a column of few whole numbers fills its axis, and names the numbers below the bars."""

import dataclasses
import random
import re

import pytest

import polyfed as pf
from polyfed.report.data.small_counts import hide_small_counts
from polyfed.report.page.panels.look import data_warnings, html_look, svg_site_histograms


@pytest.fixture(scope="module")
def seen():
    draw = random.Random(0)
    rows = [
        {
            "site": site,
            "female": draw.randint(0, 1),
            "age": draw.gauss(60, 10),
            "chol": 0 if k < 20 else draw.gauss(240, 30),
            "ill": k % 2,
        }
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
    assert labels == ["0", "1", "female"]


def test_numbers_with_decimals_have_round_values_on_the_axis(seen):
    bars, labels = drawn(seen, "age")
    assert len({x for x, _ in bars}) > 8
    assert labels == ["40", "60", "80", "age"]


def test_an_outer_bar_says_that_it_holds_all_values_beyond_the_axis(seen):
    """Zeros of a column from 150 to 330 would otherwise be read as values at the axis' end."""
    _, labels = drawn(seen, "chol")
    assert labels[0] == "&lt;"
    assert float(labels[1]) > 50


def test_a_page_of_folds_does_not_show_a_split_that_was_not_used(seen):
    assert '<th scope="col">training</th>' in html_look(seen, "k")
    assert '<th scope="col">training</th>' not in html_look(seen, "k", show_splits=False)


def test_a_site_of_few_rows_has_neither_percentiles_nor_its_number_of_rows(seen):
    page = html_look(seen, "k")
    # Of 80 values 4 are below the 5th percentile.
    summary = seen.sites["north"].numbers["age"]
    low, _, high = (f"{value:.4g}" for value in summary.percentiles)
    assert f">{low}<" not in page
    assert f">{high}<" not in page
    rows = [{"age": 50 + k * 7 % 43 + k / 1000, "ill": k % 2, "site": "north" if k > 3 else "west"} for k in range(204)]
    few = pf.look(pf.data.split_table(rows, "ill", "site"))
    low = f"{few.sites['north'].numbers['age'].percentiles[0]:.4g}"
    assert f">{low}<" in html_look(few, "k")
    assert "west (fewer than 5)" in html_look(few, "k")
    assert "west (4)" not in html_look(few, "k")
    assert hide_small_counts("fedavg is better at ward (3)") == "fedavg is better at ward (3)"  # the name of a site


def test_the_top_of_the_page_repeats_the_two_differences_that_can_change_an_answer():
    draw = random.Random(0)
    rows = [
        {
            "site": site,
            "chol": 0 if site == "south" else draw.gauss(240, 30),
            "slope": None if site == "north" else k % 3,
            "age": draw.gauss(60 + 30 * (site == "west"), 5),
            "ill": int(k > 5) if site == "south" else k % 2,
        }
        for site in ("north", "south", "west")
        for k in range(60)
    ]
    seen = pf.look(pf.data.split_table(rows, "ill", "site"))
    kinds = [finding.kind for finding in seen.findings]
    assert kinds[:2] == ["code", "empty"]
    assert {"few", "shift"} <= set(kinds)
    first, second = data_warnings(seen)
    assert first.startswith("slope is empty")
    assert first.endswith("See “The sites' data side by side” below.")
    assert second.startswith("class has few examples of '0' at south (6 of 60)")
    assert data_warnings(dataclasses.replace(seen, findings=seen.findings[-1:])) == []
