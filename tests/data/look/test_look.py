"""A look at the data of several sites: every trap of a small table is found, and nothing else."""

import json
import random
import re

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.data.look.counts import CODES, MIN_COUNT, suppress_small_counts
from polyfed.data.look.number_statistics import NumberStatistics
from polyfed.data.look.site_columns import LookColumn, merge_columns, read_site_columns
from polyfed.data.look.units import describe_unit_difference
from polyfed.simulation.rounds.columns.federated_look import columns_from_json, look_between_sites

SITES = {"north": 120, "south": 90, "east": 60, "west": 100}


def trapped_rows():
    """Four hospitals whose table has the traps of real ones: an empty column, 0 and 999 for "not measured", another unit, a
    column with one value, a category that is missing, few events; `calm`, `grade` and `children` have none."""
    draw = random.Random(0)
    rows = []
    for site, count in SITES.items():
        for k in range(count):
            height = draw.gauss(170, 9)
            chol = draw.gauss(240, 45)
            if site == "east" or (site == "west" and k % 4 == 0):
                chol = 0.0
            rows.append(
                {
                    "site": site,
                    "calm": draw.gauss(50, 10),
                    "grade": draw.choice([0, 0, 0, 1, 2]),
                    "children": max(0, round(draw.gauss(1.2, 1.3))),
                    "chol": round(chol),
                    "pulse": 999 if site == "north" and k % 10 == 0 else round(draw.gauss(75, 12)),
                    "height": height / 100 if site == "south" else height,
                    "vessels": (None if k > 2 else 2.0) if site == "south" else float(draw.randint(0, 3)),
                    "device": 1.0 if site == "west" else draw.gauss(3, 1),
                    "smokes": draw.choice(["no", "yes"] if site == "north" else ["no", "yes", "former"]),
                    "ill": int(k < 6 if site == "east" else k % 2),
                }
            )
    return rows


@pytest.fixture(scope="module")
def sites():
    return pf.data.split_table(trapped_rows(), "ill", "site")


@pytest.fixture(scope="module")
def seen(sites):
    return pf.look(sites)


def kinds(look):
    return {(finding.kind, finding.column): finding for finding in look.findings}


def test_every_trap_is_found_and_nothing_else(seen):
    expected = {
        ("code", "chol"): ("east", "west"),
        ("code", "pulse"): ("north",),
        ("unit", "height"): ("south",),
        ("empty", "vessels"): ("south",),
        ("constant", "device"): ("west",),
        ("category", "smokes"): ("north",),
        ("few", "class"): ("east",),
        ("balance", "class"): ("east", "north"),
    }
    found_kinds = kinds(seen)
    assert {place: finding.sites for place, finding in found_kinds.items()} == expected | {
        ("balance", "class"): found_kinds["balance", "class"].sites
    }


def test_findings_say_what_was_seen_and_what_it_means(seen):
    findings = kinds(seen)
    assert "chol is 0 at east (60 of 60 values), west (25 of 100 values), never at" in findings["code", "chol"].text
    assert "empty these cells (missing='chol=0', --data.missing chol=0)" in findings["code", "chol"].meaning
    assert "999" in findings["code", "pulse"].text
    assert "a factor of about 100" in findings["unit", "height"].text
    assert "fewer than 5 of 90 rows have a value" in findings["empty", "vessels"].text
    assert "preprocess='federated' is refused" in findings["empty", "vessels"].meaning
    assert "'1' at east (6 of 60)" in findings["few", "class"].text
    assert "never 'former' at north" in findings["category", "smokes"].text
    numbered = [row | {"site": list(SITES).index(row["site"])} for row in trapped_rows()]
    text = kinds(pf.look(pf.data.split_table(numbered, "ill", "site")))["unit", "height"].text
    assert f"another unit at site {list(SITES).index('south')} (mean " in text


def test_numbers_are_those_of_numpy(seen):
    rows = trapped_rows()
    values = np.array([row["calm"] for row in rows if row["site"] == "north"])
    summary = seen.sites["north"].numbers["calm"]
    assert summary.statistics.mean == pytest.approx(values.mean())
    assert summary.statistics.sd == pytest.approx(values.std())
    assert summary.percentiles == pytest.approx(np.percentile(values, (5, 50, 95)))
    assert sum(summary.histogram) == len(values)
    assert seen.sites["west"].numbers["vessels"].missing == 0
    assert seen.sites["south"].numbers["vessels"].is_hidden, "three values are nearly the rows themselves"
    assert seen.sites["east"].categories["class"] == {"0": 54, "1": 6, "": 0}


def test_the_text_has_a_line_for_each_site_and_says_what_differs(seen):
    text = str(seen)
    assert "east: 60 examples (42 train, 18 test); class 0: 54, 1: 6" in text
    assert "<< code" in text
    assert "█" in text
    assert 'does 0 stand for "not measured"?\n' in text
    assert "\x1b" not in text


def test_json_holds_everything_and_no_nan(seen):
    content = json.loads(json.dumps(seen.to_json_dict(), allow_nan=False))
    assert content["smallest_count"] == 1
    assert len(content["columns"]) == len(seen.columns) * len(SITES)
    assert {finding["kind"] for finding in content["findings"]} >= {"code", "unit", "empty"}


def test_representations_hold_no_data(sites, seen):
    assert repr(seen) == "Look(10 columns at east, north, south, west)"
    assert "tensor" not in repr(read_site_columns({"train": sites.client_data[0].train}))


# -- between sites ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clients(sites):
    with pytest.warns(UserWarning, match='"not measured"') as caught:
        built = sites.build_clients(lambda: torch.nn.Linear(sites.num_features, sites.num_outputs))
    texts = sorted(str(warning.message) for warning in caught)
    assert [text.partition(" at ")[0] for text in texts] == ["chol is 0", "pulse is 999"]
    assert "if 0 means not measured, empty these cells (missing='chol=0')" in texts[0]
    return built


def test_messages_find_the_same_without_small_counts(seen, clients):
    between = look_between_sites(clients)
    assert set(kinds(between)) == set(kinds(seen))
    for site in between.sites.values():
        counts = [c for by_value in site.categories.values() for c in by_value.values()]
        for summary in site.numbers.values():
            counts += [*summary.histogram, *summary.statistics.codes.values(), summary.statistics.count]
        assert all(count == 0 or count >= MIN_COUNT or count in (-1, -2) for count in counts)
    assert between.sites["south"].numbers["vessels"].is_hidden
    assert between.sites["south"].numbers["vessels"].statistics.total == 0
    assert "fewer than 5 of 90 rows have a value" in kinds(between)["empty", "vessels"].text
    assert between.to_json_dict()["smallest_count"] == MIN_COUNT
    assert "Counts of fewer than 5 rows are not shown" in str(between)


def test_secure_sums_show_all_sites_together(clients, seen):
    secure = pf.look(clients, secure=True)
    assert list(secure.sites) == ["all sites"]
    whole = secure.sites["all sites"]
    assert whole.rows == sum(SITES.values())
    total = sum(site.numbers["calm"].statistics.total for site in seen.sites.values())
    assert whole.numbers["calm"].statistics.total == pytest.approx(total, rel=1e-6)


def test_a_site_with_too_few_examples_shows_nothing_between_sites():
    x, y = torch.zeros(2, 3), torch.tensor([0, 1])
    few = [pf.Client(name, None, (x, y), (x, y)) for name in ("a", "b")]
    with pytest.raises(pf.UserError, match="fewer than 5 examples"):
        look_between_sites(few)


def test_one_hidden_cell_hides_another():
    columns = [LookColumn("x", ("a", "b", "c"))]
    hidden = suppress_small_counts({"categories": torch.tensor([50.0, 2.0, 8.0, 0.0])}, columns)["categories"]
    assert hidden.tolist() == [50.0, -1.0, -2.0, 0.0]
    both = suppress_small_counts({"categories": torch.tensor([50.0, 2.0, 3.0, 0.0])}, columns)["categories"]
    assert both.tolist() == [50.0, -1.0, -1.0, 0.0]


def test_hidden_counts_cannot_be_computed_from_their_sum():
    columns = [LookColumn("x", ("a", "b", "c"))]
    two = suppress_small_counts({"categories": torch.tensor([58.0, 1.0, 1.0, 0.0])}, columns)["categories"]
    assert two.tolist() == [-2.0, -1.0, -1.0, 0.0], "60 rows less 58 are two categories of one row"


def test_a_class_that_is_hidden_for_a_rare_one_is_neither_rare_nor_absent():
    x = np.random.default_rng(0).normal(size=120)
    rows = {"x": x, "ill": ["yes", *["no"] * 59, *["yes", "no"] * 30], "site": ["a"] * 60 + ["b"] * 60}
    sites = pf.data.split_table(rows, "ill", "site").build_clients(lambda: torch.nn.Linear(1, 2))
    between = look_between_sites(sites)
    assert between.sites["a"].categories["class"] == {"no": -2, "yes": -1, "": 0}
    assert "no: at least 5, yes: fewer than 5" in str(between)
    assert "≥5" in str(between)
    findings = {(f.kind, f.text) for f in between.findings if f.column == "class"}
    assert ("few", "class has few examples of 'yes' at a (fewer than 5 of 60)") in findings
    assert not any("'no'" in text for _, text in findings)


def test_few_hidden_values_are_not_many_missing_ones():
    rows = {
        "x": range(36),
        "dose": ([0.0] * 14 + [1.5, 2.0, 7.0, 8.0]) * 2,
        "ill": ["no", "yes"] * 18,
        "site": ["a"] * 18 + ["b"] * 18,
    }
    sites = pf.data.split_table(rows, "ill", "site", test_fraction=0.5).build_clients(lambda: torch.nn.Linear(2, 2))
    between = look_between_sites(sites)
    assert between.sites["a"].numbers["dose"].statistics.count == 10
    assert not [f for f in between.findings if f.column == "dose" and f.kind in ("missing", "empty")]


def rare_values(missing, others):
    draw = np.random.default_rng(7)
    number = 60
    return {
        "age": [*([np.nan] * missing), *draw.normal(60, 9, number - missing)],
        "dose": [*([37.5] * others), *([0.0] * (number - others))],
        "code": [*([99.0] * 20), *([9.0] * 38), *draw.normal(50, 9, 2)],
        "ill": ["no", "yes"] * (number // 2),
    }


def look_at(rows):
    clients = [
        pf.data.split_table(rows, "ill", None, name=n).build_clients(lambda: torch.nn.Linear(3, 2))[0] for n in "ab"
    ]
    return look_between_sites(clients).sites["a"]


@pytest.mark.filterwarnings("ignore:code is 9")
@pytest.mark.filterwarnings("ignore:columns that had one value")
def test_few_values_unlike_all_others_are_in_no_sum():
    dose = look_at(rare_values(missing=0, others=1)).numbers["dose"]
    assert dose.statistics.total == 0, "it would be the one patient's dose"
    assert (dose.statistics.count, dose.missing) == (55, 5), "the one has no value, and the number of these is hidden"
    assert look_at(rare_values(missing=0, others=5)).numbers["dose"].statistics.total == 5 * 37.5


@pytest.mark.filterwarnings("ignore:code is 9")
@pytest.mark.filterwarnings("ignore:columns that had one value")
def test_neither_codes_nor_histograms_tell_how_many_values_few_are():
    site = look_at(rare_values(missing=3, others=1))
    for summary in site.numbers.values():
        shown = [count for count in (*summary.histogram, *summary.statistics.codes.values()) if count > 0]
        assert all(count % MIN_COUNT == 0 for count in shown)
    assert site.numbers["age"].statistics.count == 55, "of 57"
    assert set(site.numbers["age"].histogram) <= {-1.0, *range(5, 60, 5)}, "an empty cell is as one of few"


def test_few_missing_values_are_not_counted():
    counts = {
        "rows": torch.tensor([23.0]), "count": torch.tensor([21.0]), "total": torch.tensor([42.0]),
        "whole": torch.tensor([0.0]), "codes": torch.zeros(1, len(CODES)),
    }  # fmt: skip
    safe = suppress_small_counts(counts, [LookColumn("x")])
    assert float(safe["count"]) == 20
    assert float(safe["total"] / safe["count"]) == pytest.approx(2.0)


@pytest.mark.parametrize("text", ["{", "{}", '[["a", 1, true]]', '[["a"]]', '[["a", null, true], ["a", null, true]]'])
def test_columns_of_a_server_are_read_with_suspicion(text):
    with pytest.raises(pf.UserError, match="not columns of a look"):
        columns_from_json(text)


# -- other data -------------------------------------------------------------------------------------------------------


def test_images_by_size_channels_and_intensity():
    draw = torch.Generator().manual_seed(0)
    dark = torch.randint(0, 60, (40, 3, 8, 8), generator=draw, dtype=torch.uint8)
    labels = torch.arange(40) % 2
    clients = [
        pf.Client("dark", None, (dark, labels), (dark, labels)),
        pf.Client("bright", None, (dark + 150, labels), (dark + 150, labels)),
        pf.Client("large", None, (torch.zeros(40, 3, 9, 8, dtype=torch.uint8), labels), (dark, labels)),
    ]
    names = [column.name for column in pf.look(clients[:2]).columns]
    assert names[:3] == ["size (channels × height × width)", "intensity", "contrast (sd of intensity)"]
    assert "intensity of channel 2" in names
    findings = kinds(pf.look(clients[:2]))
    assert set(findings["shift", "intensity"].sites) <= {"dark", "bright"}
    assert ("constant", "size (channels × height × width)") in kinds(pf.look(clients))


def test_pixels_of_another_scale_are_no_other_unit():
    draw = torch.Generator().manual_seed(0)
    shares = 0.2 + 0.6 * torch.rand(40, 1, 8, 8, generator=draw) * torch.linspace(0.8, 1, 40).view(40, 1, 1, 1)
    labels = torch.arange(40) % 2
    clients = [
        pf.Client(name, None, (x, labels), (x, labels))
        for name, x in (("a", shares), ("b", 255 * shares), ("c", shares))
    ]
    finding = kinds(pf.look(clients))["unit", "intensity"]
    assert "seems to have another scale at b (mean " in finding.text
    assert "a factor of about 255)" in finding.text
    assert "scale all sites' images alike" in finding.meaning


def test_texts_by_length_and_vocabulary():
    tokens = torch.tensor([[5, 6, 0, 0], [7, 7, 7, 0], [1, 2, 3, 4]])
    client = pf.Client("a", None, (tokens, torch.tensor([0, 1, 0])), (tokens, torch.tensor([1, 1, 0])))
    site = pf.look([client]).sites["a"]
    assert site.numbers["length"].percentiles[1] == 3
    assert site.numbers["different tokens"].statistics.total == 2 * (2 + 1 + 4)
    assert site.different_tokens == 8


def test_labels_targets_and_parts_of_inputs():
    x = {"image": torch.zeros(30, 1, 4, 4), "age": torch.arange(30.0).view(30, 1)}
    labels = torch.stack([torch.arange(30) % 2, torch.zeros(30)], dim=1)
    several = pf.look([pf.Client("a", None, (x, labels), (x, labels), task="multilabel")])
    assert [c.name for c in several.columns][-2:] == ["target 0", "target 1"]
    assert several.sites["a"].categories["target 0"] == {"0": 30, "1": 30, "": 0}
    assert "age: x0" in several.sites["a"].numbers
    number = pf.look([pf.Client("a", None, (x, torch.arange(30.0)), (x, torch.arange(30.0)), task="regression")])
    assert number.sites["a"].numbers["target"].statistics.mean == 14.5


def test_targets_of_a_table_are_shown_in_its_unit():
    rows = [{"x": 37 * k % 60 / 2, "weight": 60.5 + k % 7, "site": "ab"[k % 2]} for k in range(60)]
    seen = pf.look(pf.data.split_table(rows, "weight", "site", task="regression"))
    assert seen.sites["a"].numbers["weight"].statistics.mean == pytest.approx(63.4, abs=0.2)


def test_lists_of_other_things_are_refused():
    with pytest.raises(pf.UserError, match="look takes clients"):
        pf.look([1])
    with pytest.raises(pf.UserError, match="at least one client"):
        pf.look([])
    x, y = torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64)
    with pytest.raises(pf.UserError, match="two clients are called 'a'"):
        pf.look([pf.Client("a", None, (x, y), (x, y))] * 2)


def test_columns_of_all_sites():
    numbers, answers = LookColumn("x", None, True), LookColumn("x", ("0", "1"), True)
    assert merge_columns([[numbers], [answers]]) == (numbers,)
    assert merge_columns([[LookColumn("c", ("10", "9"))], [LookColumn("c", ("2",))]])[0].values == ("2", "9", "10")


def test_natural_differences_are_no_units():
    tall, short = NumberStatistics(100.0, 18000.0, 0.0, 3.25e6), NumberStatistics(100.0, 16000.0, 0.0, 2.57e6)
    assert describe_unit_difference(tall, short) == ""
    skewed, mild = NumberStatistics(100.0, 2200.0, 0.0, 1e5), NumberStatistics(100.0, 1000.0, 0.0, 2e4)
    assert describe_unit_difference(skewed, mild) == "", "a skewed laboratory value of 22 ± 23 against 10 ± 10"


def test_a_hundred_sites_need_no_hundred_sentences():
    draw = torch.Generator().manual_seed(0)
    clients = []
    for k in range(100):
        x, y = torch.randn(40, 2, generator=draw), torch.full((40,), k % 5)
        clients.append(pf.Client(f"client-{k:03d}", None, (x, y), (x, y)))
    seen = pf.look(clients)
    assert len(seen.findings) <= 4
    assert len(str(seen).splitlines()) < 80
    assert "at 80 of 100 sites" in str(seen)


def test_a_column_that_is_constant_within_sites_is_one_finding():
    draw = random.Random(0)
    rows = [{"school": f"s{k % 6}", "kind": ["boys", "girls", "mixed"][k % 3], "beds": 100.5 + k % 6,
             "age": draw.gauss(12, 2), "passed": draw.randint(0, 1)} for k in range(360)]  # fmt: skip
    findings = pf.look(pf.data.split_table(rows, "passed", "school")).findings
    (kind,) = (finding for finding in findings if finding.column == "kind")
    assert kind.kind == "constant"
    assert kind.text.startswith("kind has one value only at 6 of 6 sites: s0 ('boys'), s1 ('girls')")
    assert "which site a row is from" in kind.meaning
    (beds,) = (finding for finding in findings if finding.column == "beds")
    assert beds.kind == "constant"


def test_a_factor_of_an_unknown_unit_is_said_with_the_shift():
    """D-dimer in two units, which are twice as large in one; overlapping, so that neither unit nor shift was said."""
    draw = random.Random(1)
    factors = {"north": 1.0, "south": 2.0, "west": 1.0}
    rows = [{"hospital": name, "dimer": factor * draw.lognormvariate(-1, 0.6), "age": draw.gauss(60, 9),
             "thrombosis": draw.randint(0, 1)} for _ in range(150) for name, factor in factors.items()]  # fmt: skip
    findings = kinds(pf.look(pf.data.split_table(rows, "thrombosis", "hospital")))
    assert list(findings) == [("shift", "dimer")]
    assert findings["shift", "dimer"].sites == ("south",)
    assert re.search(r"mean and spread (1\.9|2|2\.1) times as large", findings["shift", "dimer"].text)
    assert findings["shift", "dimer"].meaning.startswith("another unit? If not: ")


def test_another_scale_of_columns_around_zero_is_seen_by_the_spread_alone():
    draw = torch.Generator().manual_seed(0)
    clients = []
    for name, scale in (("north", 1.0), ("south", 1.0), ("west", 1000.0)):
        x, other = (scale * torch.randn(60, 2, generator=draw) for _ in range(2))
        y = torch.arange(60) % 2
        clients.append(pf.Client(name, None, (x - x.mean(0), y), (other - other.mean(0), y)))
    findings = [finding for finding in pf.look(clients).findings if finding.kind == "shift"]
    assert [finding.sites for finding in findings] == [("west",), ("west",)]
    assert all("spread" in f.text and "00 times as large" in f.text for f in findings)
    assert all(f.meaning.startswith("another unit? If not: ") for f in findings)
