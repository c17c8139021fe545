"""A column whose values lie at some sites alone is one finding, and names each value with the sites that lack it."""

import random

import polyfed as pf


def test_values_of_one_column_are_one_finding():
    draw = random.Random(0)
    wards = {"north": ["a", "b"], "south": ["a", "c"], "east": ["b", "c"]}
    rows = [
        {"site": site, "ward": draw.choice(names), "age": draw.gauss(50, 9), "ill": k % 2}
        for site, names in wards.items()
        for k in range(60)
    ]
    findings = [f for f in pf.look(pf.data.split_table(rows, "ill", "site")).findings if f.kind == "category"]
    assert [finding.text for finding in findings] == [
        "ward is never 'a' (at east), 'b' (at south), 'c' (at north), and often elsewhere"
    ]
    assert set(findings[0].sites) == set(wards)


def test_one_value_at_most_sites_tells_no_site_where_it_is_the_same():
    rows = [{"site": f"s{k % 3}", "brush": "yes" if k == 0 else "no", "age": k % 7, "ill": k % 2} for k in range(180)]
    (brush,) = (f for f in pf.look(pf.data.split_table(rows, "ill", "site")).findings if f.column == "brush")
    assert (brush.kind, brush.sites) == ("constant", ("s1", "s2"))
    assert "which site a row is from" not in brush.meaning
    assert "cannot learn what another value means" in brush.meaning
