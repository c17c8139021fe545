"""Computes the cells of a paper's table from finished runs, and prints them next to the values in the paper."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, final

from rich.console import Console

from polyfed.cli.commands.options.recipes import Recipe
from polyfed.cli.commands.papers import job_runner
from polyfed.cli.commands.papers.job_runner import first_variant_with_same_configuration, job_folder
from polyfed.cli.commands.papers.paper_tables import PaperCell, PaperTable, find_paper
from polyfed.cli.commands.terminal import PlainTable, print_line

_DECIMALS = {"%": 1, "fraction": 3, "count": 0, "MB": 2, "s": 1, "ratio": 2}


@final
@dataclass(frozen=True)
class CellResult:
    """Holds polyfed's values for one cell of a paper's table, one value per seed, and the folders of the runs."""

    cell: PaperCell
    value_by_seed: Mapping[int, float]
    run_folders: tuple[str, ...]

    @property
    def mean_value(self) -> float | None:
        """Returns the mean of the cell's values over seeds; None if there are no values."""
        return fmean(self.value_by_seed.values()) if self.value_by_seed else None

    @property
    def standard_deviation(self) -> float | None:
        """Returns the standard deviation of the cell's values over seeds; None with fewer than two values."""
        return stdev(self.value_by_seed.values()) if len(self.value_by_seed) > 1 else None

    @property
    def difference_to_paper(self) -> float | None:
        """Returns polyfed's mean value minus the value in the paper; None if one of them is missing."""
        return None if self.mean_value is None or self.cell.paper is None else self.mean_value - self.cell.paper


def measure_cell_over_seeds(
    cell: PaperCell, recipes: Mapping[str, Recipe], scale: str, seeds: Sequence[int | None], out: Path
) -> CellResult:
    """Computes polyfed's value for a paper's cell from its runs below `out`, one per seed, also earlier ones."""
    from polyfed.cli.commands.papers.cell_metrics import RecipeRun, measure_cell

    if not cell.recipe:
        value = measure_cell(cell, None)
        return CellResult(cell, {} if value is None else {0: value}, ())
    recipe, places = recipes[cell.recipe], []
    by_seed: dict[int, float] = {}
    variants = [
        first_variant_with_same_configuration(recipe, scale, variant) for variant in cell.recipe_variants_to_run
    ]
    for seed in seeds:
        number = recipe.configuration(scale, variants[0])["seed"] if seed is None else seed
        run, *others = (RecipeRun(job_folder(out, recipe.name, variant, number), scale) for variant in variants)
        if all(
            (recipe_run.folder / "config.yaml").exists()
            and job_runner.is_complete_run(recipe_run.folder_of(cell.method))
            for recipe_run in (run, *others)
        ):
            places.append(run.folder.name)
            value = measure_cell(cell, replace(run, compared_runs=tuple(others)))
            by_seed |= {} if value is None else {number: value}
    return CellResult(cell, by_seed, tuple(places))


def build_reproduction_results(
    table: PaperTable,
    results: Sequence[CellResult],
    scale: str,
    reduced: Mapping[str, str],
    run_arguments: Sequence[str],
) -> dict[str, Any]:
    """Returns the content of `reproduce.json`: polyfed's values and the paper's for each cell."""
    cells = [
        {
            **asdict(result.cell),
            "ours": result.mean_value,
            "ours_spread": result.standard_deviation,
            "difference": result.difference_to_paper,
            "seeds": dict(result.value_by_seed),
            "runs": result.run_folders,
        }
        for result in results
    ]
    return {
        "paper": table.paper, "table": table.name, "title": table.title, "note": table.note, "scale": scale,
        "reduced": dict(reduced), "options": list(run_arguments), "cells": cells,
    }  # fmt: skip


def show_cells(
    table: PaperTable,
    results: Sequence[CellResult],
    scale: str,
    reduced: Mapping[str, str],
    run_arguments: Sequence[str],
    console: Console,
) -> None:
    """Prints polyfed's values next to the paper's, and what was reduced; at the scale "smoke" no differences."""
    several = max((len(f.value_by_seed) for f in results), default=0)
    over = f", means over {several} seeds" if several > 1 else ""
    units = dict.fromkeys(f.cell.unit for f in results)
    at = f", scale {scale}{over}" if reduced else ""
    title = f"{find_paper(table.paper).title}, {table.printed_name}: {table.title} ({', '.join(units)}){at}"
    output = PlainTable(title=title, title_justify="left")
    for column in ("row", "column"):
        output.add_column(column)
    columns = ["polyfed", "paper"] if scale == "smoke" and reduced else ["polyfed", "paper", "difference"]
    for column in columns:
        output.add_column(column, justify="right", no_wrap=True)
    previous_row = None
    for f in results:
        if previous_row is not None and f.cell.row != previous_row:
            output.add_section()
        decimals = _DECIMALS[f.cell.unit]
        ours = (
            _with_spread(f.mean_value, f.standard_deviation, decimals)
            if f.mean_value is not None
            else "–"
            if f.run_folders
            else "not run"
        )
        difference = "–" if f.difference_to_paper is None else f"{f.difference_to_paper:+.{decimals}f}"
        values = [ours, f.cell.printed, difference][: len(columns)]
        output.add_row("" if f.cell.row == previous_row else f.cell.row, f.cell.column, *values)
        previous_row = f.cell.row
    console.print(output)
    if "difference" not in columns:
        print_line(console, "scale smoke only checks that everything runs; no figure of polyfed's means anything")
    for sentence, recipes in _recipes_by_sentence(reduced).items():
        reduction_text = (
            f"reduced against the paper: {sentence}" if sentence else "nothing is reduced against the paper"
        )
        print_line(console, f"{', '.join(recipes)}, scale {scale}: {reduction_text}")
    if run_arguments:
        print_line(console, f"changed besides: {' '.join(run_arguments)}")
    if table.note:
        print_line(console, f"note: {table.note}")


def _recipes_by_sentence(reduced: Mapping[str, str]) -> dict[str, list[str]]:
    recipes_by_sentence: dict[str, list[str]] = {}
    for recipe, sentence in reduced.items():
        recipes_by_sentence.setdefault(sentence, []).append(recipe)
    return recipes_by_sentence


def _with_spread(value: float, spread: float | None, decimals: int) -> str:
    return f"{value:.{decimals}f}" + ("" if spread is None else f" ± {spread:.{decimals}f}")
