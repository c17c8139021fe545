"""A column that is empty or nearly so is a finding wherever that is so, and stands first in the printed table."""

import random

import polyfed as pf


def look_at_columns(bleed):
    """Looks at three sites with 40 columns; `bleed(k)` is the cell of the last of them in row k."""
    draw = random.Random(0)
    rows = [
        {"site": f"s{k % 3}", **{f"x{i}": draw.gauss(0, 1) for i in range(39)}, "bleed": bleed(k), "ill": k // 3 % 2}
        for k in range(300)
    ]
    return pf.look(pf.data.split_table(rows, "ill", "site"))


def test_a_column_that_is_nearly_empty_at_all_sites_is_found_and_printed_first():
    for filled in (2.5, "severe"):
        seen = look_at_columns(lambda k, filled=filled: filled if k % 20 == 0 else None)
        (finding,) = seen.findings
        assert (finding.kind, finding.column, finding.sites) == ("empty", "bleed", ("s0", "s1", "s2"))
        assert finding.text.startswith("bleed is empty or nearly so at s0 (5 of 100 rows have a value), s1")
        assert "from these few rows" in finding.meaning
        assert "(drop='bleed', --data.drop bleed)" in finding.meaning
        lines = str(seen).splitlines()
        assert lines[lines.index("bleed") - 1].lstrip().startswith("missing"), "above the columns without a mark"


def test_a_column_that_is_half_empty_elsewhere_is_empty_where_it_is():
    seen = look_at_columns(lambda k: 2.5 + k if k % 3 and k % 9 > 5 else None)
    (finding,) = (finding for finding in seen.findings if finding.kind == "empty")
    assert finding.sites == ("s0",)
    assert "from the other sites alone" in finding.meaning
