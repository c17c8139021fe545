"""Counts of fewer than five rows of a class at a site do not stand on the page: not in texts, tables or tooltips."""

import random
import re

import polyfed as pf
from polyfed.data.look.look import look_at_sites
from polyfed.report.page.panels.look import html_look
from polyfed.report.page.sections import PageDetails, html_class_counts


def test_the_look_at_the_data_hides_them():
    draw, rows = random.Random(0), []
    for site, ill, size in (("small", 3, 13), ("large", 30, 70)):
        for row in range(size):
            age = "" if site == "small" and row < 2 else draw.gauss(60, 10)
            rows.append({"site": site, "age": age, "weight": draw.gauss(80, 9), "ill": "yes" if row < ill else "no"})
    look = look_at_sites(pf.data.split_table(rows, "ill", "site"), hide_small_categories=True)
    page = html_look(look, "k")
    assert "no: at least 5, yes: fewer than 5" in page
    assert "(fewer than 5 of 13)" in page
    assert "no &lt;5" not in page
    assert "yes &lt;5" in page
    assert "<td>≥10</td><td>&lt;5</td>" in page  # eleven ages, of two none
    assert "Counts of fewer than 5 rows are shown as &lt;5, and drawn as 5." in page
    figure = page.partition(", the target")[0].rpartition("<figure>")[2]
    assert len(re.findall(r'<rect class="\w+" ', figure)) == 4  # no bar is absent


def test_the_label_distribution_hides_them():
    page = html_class_counts(PageDetails({0: {"small": (3, 10), "large": (30, 40)}}, ("ill", "well")), "k")
    assert "<td>&lt;5</td><td>≥5</td><td>13</td>" in page
    assert 'data-t="small, ill: &lt;5"' in page
    assert ">3<" not in page
    assert "small, ill: 3" not in page
