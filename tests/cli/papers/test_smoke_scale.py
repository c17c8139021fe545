"""At the scale smoke, which only checks that everything runs, a table has no differences from the paper."""

import pytest
from rich.console import Console

from polyfed.cli.commands.papers.cell_results import CellResult, show_cells
from polyfed.cli.commands.papers.paper_tables import find_table


@pytest.mark.parametrize(
    ("scale", "reduced", "differences"),
    [("cpu", {"fedhenn_table3": "fewer rounds"}, 1), ("smoke", {"fedhenn_table3": "3 rounds"}, 0), ("smoke", {}, 1)],
)
def test_smoke_shows_no_difference_from_the_paper(capsys, scale, reduced, differences):
    table = find_table("fedhenn", "3")
    show_cells(table, [CellResult(table.cells[0], {0: 50.8}, ("a",))], scale, reduced, (), Console())
    out = capsys.readouterr().out
    assert (out.count("difference"), out.count("-43.7")) == (differences, differences)
    assert ("scale smoke only checks that everything runs" in out) is (differences == 0)
