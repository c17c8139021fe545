"""Cells of `polyfed reproduce` that are aggregation weights: pFedLA's Figs. 1b, 5, 6 and 7."""

from statistics import fmean

import numpy as np
import pytest

from polyfed.cli.commands.papers.cell_metrics import RecipeRun, measure_cell
from polyfed.cli.commands.papers.paper_tables import find_table


def cell_of(paper, table, row, column):
    return next(c for c in find_table(paper, table).cells if (c.row, c.column) == (row, column))


@pytest.fixture
def done(tmp_path):
    """A run directory, without weights as yet."""
    (tmp_path / "config.yaml").write_text("algorithm: {name: pfedla}\n")
    (tmp_path / "analysis").mkdir()
    return RecipeRun(tmp_path, "smoke")


def test_weights_after_the_last_round(done):
    """α[i, l, j] = 100 i + 10 j + l, so that each mean can be told by hand."""
    names = [f"client-{k:03d}" for k in range(8)]
    alpha = np.array([[[100 * i + 10 * j + l for j in range(8)] for l in range(2)] for i in range(8)], np.float32)  # noqa: E741
    for number, values in ((0, np.zeros_like(alpha)), (1, alpha)):
        file = done.folder / "analysis" / f"round-{number:06d}.npz"
        np.savez(file, alpha=values, rows=np.array(names), layers=np.array(["conv1", "fc1"]), clients=np.array(names))
    told = {c: measure_cell(cell_of("pfedla", "fig5", "EMNIST", c), done) for c in
            ("itself", "the same classes", "three of four classes", "each of the others")}  # fmt: skip
    assert told == {"itself": 0.5, "the same classes": 10.5, "three of four classes": 20.5, "each of the others": 50.5}
    assert measure_cell(cell_of("pfedla", "fig5", "EMNIST, prior period", "itself"), done) == 0.5
    assert measure_cell(cell_of("pfedla", "fig5", "EMNIST, middle period", "itself"), done) is None  # of one round
    assert measure_cell(cell_of("pfedla", "fig1b", "layer-wise, learned: the same classes", "fc1"), done) == 11
    assert measure_cell(cell_of("pfedla", "fig1b", "layer-wise, learned: each of the others", "conv1"), done) == 45
    assert measure_cell(cell_of("pfedla", "fig1b", "model-wise, learned: itself", "the whole model"), done) is None
    assert measure_cell(cell_of("pfedla", "fig7", "EMNIST", "fc1"), done) == 1
    assert measure_cell(cell_of("pfedla", "fig7", "EMNIST", "fc2"), done) is None
    pairs = [(i, j) for i in range(8) for j in range(8) if abs(i - j) == 2]
    expected = fmean(100 * i + 10 * j + 0.5 for i, j in pairs)
    assert measure_cell(cell_of("pfedla", "fig6", "EMNIST", "2 away, 2 of 4 classes"), done) == pytest.approx(
        expected, rel=1e-6
    )


def test_weights_of_a_period_are_the_mean_over_a_third_of_the_rounds(done):
    """Rounds 1 to 6 have weights r/10 for the client itself; the start, round 0, is in no period."""
    names = np.array(["a", "b", "c", "d"])
    for number in range(7):
        alpha = np.full((4, 1, 4), number / 10, np.float32)
        file = done.folder / "analysis" / f"round-{number:06d}.npz"
        np.savez(file, alpha=alpha, rows=names, layers=np.array(["conv1"]), clients=names)
    rows = ("EMNIST, prior period", "EMNIST, middle period", "EMNIST, last period", "EMNIST")
    found = [measure_cell(cell_of("pfedla", "fig5", row, "itself"), done) for row in rows]
    assert found == pytest.approx([0.15, 0.35, 0.55, 0.6])
