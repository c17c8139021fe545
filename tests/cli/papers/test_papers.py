"""The papers' tables: their figures are typed right, each cell has something that makes it, and names are found."""

import functools
import math
from statistics import fmean, pstdev

import pytest

from polyfed.cli.commands.options import recipes as shipped
from polyfed.cli.commands.options.recipes import SCALES, shipped_recipe_files
from polyfed.cli.commands.papers.cell_metrics import CELL_METRICS
from polyfed.cli.commands.papers.paper_tables import find_table, load_papers

read = functools.cache(shipped.read_recipe)
TABLES = [table for paper in load_papers().values() for table in paper.tables.values()]


def figures(paper, table):
    """The paper's figures by row and column."""
    found = {}
    for cell in find_table(paper, table).cells:
        found.setdefault(cell.row, {})[cell.column] = cell.paper
    return found


# -- the papers' figures: what the papers say of them elsewhere -------------------------------------------------------


def test_flha_table_7_drops_as_much_as_the_paper_says():
    """ "The average drop in performance of 2.2 ± 1.4" of the architectures that are not replaced."""
    none, *others = figures("flha", "table7").items()
    drops = []
    for row, accuracies in others:
        drops += [none[1][arch] - accuracies[arch] for arch in accuracies if not row.startswith(arch)]
    assert len(drops) == 12
    assert (math.floor(10 * fmean(drops)) / 10, round(pstdev(drops), 1)) == (2.2, 1.4)
    assert list(none[1].values()) == list(figures("flha", "table1")["25 %, FLHA-GHN"].values())[4:8]


def test_flha_appendix_b_has_the_distillation_of_table_1_beside_it():
    """ "Its performance under the FLHA-distillation baseline is 90, 85.7, 51.1, 44.2"."""
    table = figures("flha", "table1")
    told = [
        table[f"{share} %, distillation"][f"{data}, Arch 0"]
        for data in ("CIFAR-10", "CIFAR-100")
        for share in (25, 12.5)
    ]
    assert told == [90.0, 85.7, 51.1, 44.2]
    rows = [row["ResNet-18"] for row in figures("flha", "appendix b").values()]
    assert (rows[::2], rows[1::2]) == ([88.96, 88.6, 56, 50.6], told)


def test_flha_table_5_has_one_global_model_in_standard_fl():
    """On the common test set all clients have the same accuracy, that of the one model."""
    for alpha, accuracy in (("100", 93.7), ("1", 93.0), ("0.1", 53.8)):
        row = figures("flha", "table5")[f"α = {alpha}, standard FL"]
        assert {value for column, value in row.items() if column.endswith(" bal.")} == {accuracy}


def test_pfedla_table_3_repeats_table_1():
    first, third = figures("pfedla", "table1"), figures("pfedla", "table3")["accuracy"]
    for data in ("EMNIST", "CIFAR10"):
        assert third[f"{data}, k = 0"] == first["pFedLA"][f"{data}, 10"]
        assert third[f"{data}, k = 1"] == first["HeurpFedLA"][f"{data}, 10"]


def test_fedhenn_table_3_repeats_table_2():
    second, third = figures("fedhenn", "table2"), figures("fedhenn", "table3")
    assert third["Sentiment140"]["linear CKA"] == second["Sentiment140, 100 clients"]["FedHeNN Homo"]
    assert third["CIFAR-100"]["linear CKA"] == second["CIFAR-10, 100 clients, 5 classes"]["FedHeNN Homo"]


def test_fedpnas_tables_improve_as_the_text_says():
    """ "Up to 7% improvement on ROTATE 90", "5% and 8% improvement respectively on two unseen tasks"."""
    rows = {row: cells for row, cells in figures("fedpnas", "table1").items() if cells["FedDSNAS"] is not None}
    gains = {row: cells["CA-FedPNAS"] - cells["FedDSNAS"] for row, cells in rows.items()}
    assert max(gains, key=gains.get) == "high, rotate 90"
    assert round(100 * max(gains.values())) == 7
    retrained = [
        row["CA-FedPNAS, retrained"] / row["FedDSNAS, retrained"]
        for name, row in figures("fedpnas", "table2").items()
        if name.startswith("CIFAR-10, rotate") and "over clients" not in name
    ]
    assert [round(100 * (ratio - 1)) for ratio in retrained] == [5, 8]


@pytest.mark.parametrize(("column", "skipped"), [("32 channels (CIFAR-10)", 5312), ("16 channels (MNIST)", 2144)])
def test_fedpnas_table_3_adds_up(column, skipped):
    """An edge has the operations listed and one more, the 7×7 separable convolution."""
    *parts, edge, network = (row[column] for row in figures("fedpnas", "table3").values())
    assert sum(parts) + skipped == edge
    assert 32 * edge == network  # "total of 32 edges"


def test_not_stated_is_not_a_number():
    drawn = {(t.paper, t.name) for t in TABLES if t.cells and all(c.paper is None for c in t.cells)}
    assert drawn == {("fedhenn", "effects"), ("fedhenn", "fig1"), ("fedhenn", "fig3"), ("flha", "fig4"), ("flha", "fig6"),
                     ("flha", "fig7"), ("flha", "appendix_d"),
                     ("fedpnas", "fig3c"), ("fedpnas", "effects"), ("fedpnas", "sweep_eta"), ("fedpnas", "proposition1"),
                     ("pfedla", "sweep_hn_lr"), ("pfedla", "sweep_layer"),
                     *(("pfedla", f"fig{n}") for n in (1, "1b", 5, 6, 7))}  # fmt: skip
    stated = [c.paper for t in TABLES for c in t.cells if c.paper is not None and c.unit == "%"]
    assert all(0 < value < 100 for value in stated)
    fractions = [c.paper for t in TABLES for c in t.cells if c.paper is not None and c.unit == "fraction"]
    assert all(0 < value < 1 for value in fractions)


# -- what makes a cell ------------------------------------------------------------------------------------------------


def test_every_recipe_of_the_papers_is_in_a_table():
    known = {name for name in shipped_recipe_files() if name.startswith(tuple(load_papers()))}
    assert {recipe for table in TABLES for recipe in table.variants_by_recipe()} == known
    assert len(known) == 32


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.paper} {table.name}")
def test_every_cell_has_a_run_of_its_method(table):
    methods = {}
    for cell in table.cells:
        assert cell.metric in CELL_METRICS
        for scale in SCALES if cell.recipe else ():
            key = cell.recipe, scale, cell.variant
            if key not in methods:
                config = read(cell.recipe).configuration(scale, cell.variant)
                entries = [config["algorithm"], *config.get("baselines", ())]
                methods[key] = {"", *(e if isinstance(e, str) else e["name"] for e in entries)}
            assert cell.method in methods[key], (cell.row, cell.column, scale)


def test_variants_without_a_cell_are_ours():
    left = set()
    for name in {recipe for table in TABLES for recipe in table.variants_by_recipe()}:
        shown = {v for t in TABLES for v in t.variants_by_recipe().get(name, ())}
        left |= {f"{name} {v}" for v in read(name).variants if v not in shown}
    forms = {name for name in left if name.endswith("-published")}
    assert all("fashion" in name or name == "fedhenn_table2 cifar10-100-2-vit" for name in left - forms), left


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.paper} {table.name}")
def test_the_smoke_scale_needs_no_files(table):
    for recipe, variants in table.variants_by_recipe().items():
        assert {read(recipe).configuration("smoke", v)["data"]["name"] for v in variants} == {"digits"}


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    ["fedhenn table1", "fedhenn Table_1", "FedHeNN 1", "fedhenn t1", "fedhenn tab.1", "fedhenn fedhenn_table1"],
)
def test_names_may_be_written_as_one_likes(words):
    assert find_table(*words.split()) == find_table("fedhenn", "Table 1")


@pytest.mark.parametrize(
    ("web", "content", "table"),
    [("Web Table 1", "kernels", "table3"), ("web table 2", "global", "table1"), ("web table 3", "personal", "table2")],
)
def test_fedhenns_tables_by_the_numbers_of_its_web_text(web, content, table):
    assert find_table("fedhenn", web) == find_table("fedhenn", content) == find_table("fedhenn", table)


def test_a_figure_by_its_number_alone_where_there_is_no_such_table():
    assert find_table("pfedla", "7").printed_name == "Fig. 7"
    assert find_table("pfedla", "1").printed_name == "Table 1"
    assert find_table("flha", "7").printed_name == "Table 7"
