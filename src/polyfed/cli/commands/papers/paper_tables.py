"""Loads the descriptions of the papers' tables and figures from `recipes/papers/*.yaml`.

Each cell has the paper's figure, if the paper's text states one, and the metric of a recipe's run to compare with it.

A table has `columns` and `rows`, partial descriptions of cells by name; a cell is the table's description, with the
column's laid over it, and the row's over that. `recipe`, `variant` (`{field}` in it stands for a field of the cell),
`method` (of the run; default: the recipe's own) and `metric` say what polyfed's value is; other fields say which part of it
(`polyfed.cli.commands.papers.cell_metrics`).
`cells` of a row are the paper's figures in the order of the columns, numbers or "71.5 ± 0.5";
null is not stated, "-" means no cell.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from polyfed.cli.commands.options.recipes import RECIPE_FOLDER, load_shipped_yaml
from polyfed.core.errors import UserError, did_you_mean

_CELL_KEYS = ("recipe", "variant", "method", "metric", "unit", "cells", "title", "also", "note", "columns", "rows")


@final
@dataclass(frozen=True)
class PaperCell:
    """Describes a cell by the paper's value, and the run and metric of polyfed's.

    Args:
        row, column: where it is.
        paper: the paper's figure in the table's unit; None if the text does not state it.
        spread: its ±; None if there is none.
        printed: both as the paper prints them.
        recipe: the recipe whose run gives polyfed's value; empty where no run is needed.
        variant: of the recipe; None for a recipe without variants.
        method: name of the method whose run it is, the recipe's own or a baseline; empty for the recipe's own.
        metric: what is measured, see `polyfed.cli.commands.papers.cell_metrics.CELL_METRICS`.
        unit: "%", "fraction", "count", "MB", "s" or "ratio".
        part: which clients, layers and so on.
    """

    row: str
    column: str
    paper: float | None
    spread: float | None
    printed: str
    recipe: str
    variant: str | None
    method: str
    metric: str
    unit: str
    part: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recipe_variants_to_run(self) -> tuple[str | None, ...]:
        """Returns the cell's recipe variant and `others`, with which it is compared."""
        return (self.variant, *self.part.get("others", ()))


@final
@dataclass(frozen=True)
class PaperTable:
    """Describes a paper's table or figure, or polyfed's own series: names, title and cells in order.

    A table that cannot be run has `reason_not_run`, a sentence that says what to do.
    """

    paper: str
    name: str
    aliases: tuple[str, ...]
    title: str
    note: str
    reason_not_run: str
    cells: tuple[PaperCell, ...]

    @property
    def printed_name(self) -> str:
        """Returns the table's name as the paper prints it, such as "Table 1".

        >>> ([find_table("flha", name).printed_name for name in ("table1", "fig7", "appendix b")],
        ...  find_table("fedhenn", "effects").printed_name)
        (['Table 1', 'Fig. 7', 'Appendix B'], 'Effects')
        >>> (find_table("fedpnas", "fig. 3c").printed_name, find_table("pfedla", "sweep_hn_lr").printed_name,
        ...  find_table("flha", "table 1 forms").printed_name)
        ('Fig. 3c', 'sweep of hn_lr', 'Table 1 forms')
        >>> find_table("fedpnas", "proposition1").printed_name, find_table("flha", "drop").printed_name
        ('Proposition 1', 'Section 5.4')
        """
        prefixes = {
            "table": "Table", "fig": "Fig.", "appendix_": "Appendix", "effects": "Effects", "sweep_": "sweep of",
            "proposition": "Proposition", "drop": "Section 5.4",
        }  # fmt: skip
        kind = next(kind for kind in prefixes if self.name.startswith(kind))
        suffix = self.name.removeprefix(kind)
        if kind == "appendix_":
            suffix = suffix.upper()
        elif kind != "sweep_":  # of a field, whose name has its "_"
            suffix = suffix.replace("_", " ")
        return f"{prefixes[kind]} {suffix}".rstrip()

    def variants_by_recipe(self) -> dict[str, tuple[str | None, ...]]:
        """Returns {recipe: its variants that give the value of a cell of this table}, in the order of the cells.

        >>> find_table("fedhenn", "table 3").variants_by_recipe()["fedhenn_table3"][:2]
        ('cifar10-linear', 'cifar10-rbf')
        """
        names_by_recipe: dict[str, dict[str | None, None]] = {}
        for cell in self.cells:
            if cell.recipe:
                names_by_recipe.setdefault(cell.recipe, {}).update(dict.fromkeys(cell.recipe_variants_to_run))
        return {recipe: tuple(names) for recipe, names in names_by_recipe.items()}


@final
@dataclass(frozen=True)
class Paper:
    """Describes a paper: its short name, title and other names, and its tables as {short name: table}."""

    name: str
    title: str
    aliases: tuple[str, ...]
    tables: Mapping[str, PaperTable]


@cache
def load_papers() -> Mapping[str, Paper]:
    """Loads the descriptions of all papers, and returns {short name: paper}.

    >>> list(load_papers())
    ['fedhenn', 'fedpnas', 'flha', 'pfedla']
    """
    return MappingProxyType(
        {path.stem: _read_paper(path) for path in sorted((RECIPE_FOLDER / "papers").glob("*.yaml"))}
    )


def find_paper(name: str) -> Paper:
    """Returns the paper with this name, ignoring case and punctuation.

    Raises:
        UserError: there is no such paper.

    >>> find_paper("FLHA-GHN").name
    'flha'
    """
    paper_by_name = load_papers()
    for paper in paper_by_name.values():
        if _normalize_name(name) in {_normalize_name(each) for each in (paper.name, *paper.aliases)}:
            return paper
    raise UserError(f"there is no paper {name!r}; {did_you_mean(_normalize_name(name), paper_by_name)}")


def find_table(paper: str, table: str) -> PaperTable:
    """Returns a paper's table or figure by a name such as "table1", "1", "Fig. 3", or its recipe's.

    A bare number is the table, or where there is no such table the figure.

    Raises:
        UserError: there is no such paper or table.

    >>> [find_table("flha", name).name for name in ("Table 1", "1", "Fig. 3", "figure 7", "flha_table1", "Appendix B")]
    ['table1', 'table1', 'table6', 'fig7', 'table1', 'appendix_b']
    """
    publication = find_paper(paper)
    # If a recipe has several tables, its name stands for the first.
    names = {
        _normalize_name(n): t
        for t in reversed([*publication.tables.values()])
        for n in (t.name, *t.aliases, *t.variants_by_recipe())
    }
    table_name = re.sub(r"^(figure|fig)", "fig", _normalize_name(table))
    table_name = re.sub(r"^(tab|t)(?=\d)", "table", table_name)
    candidates = (table_name, f"table{table_name}", f"fig{table_name}") if table_name.isdecimal() else (table_name,)
    for name in candidates:
        if name in names:
            return names[name]
    raise UserError(
        f"{publication.name} has no table or figure {table!r}; {did_you_mean(table_name, publication.tables)}"
    )


def _normalize_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _read_paper(path: Path) -> Paper:
    content = load_shipped_yaml(path)
    tables = {name: _parse_table(path.stem, name, table) for name, table in content["tables"].items()}
    return Paper(path.stem, content["title"], tuple(content.get("also", ())), tables)


def _parse_table(paper: str, name: str, content: Mapping[str, Any]) -> PaperTable:
    of_paper, ours, rows = content.get("columns", {}), content.get("columns_ours", {}), content.get("rows", {})
    columns = {**of_paper, **ours}
    shared = {key: value for key, value in content.items() if key not in ("columns", "columns_ours", "rows")}

    def row_figures(row: Mapping[str, Any]) -> list[Any]:
        """Returns a figure for each column; None for those that the paper does not have, if the row leaves them out."""
        row_cells = row["cells"]
        return [*row_cells, *[None] * len(ours)] if len(row_cells) == len(of_paper) else row_cells

    cells = tuple(
        _parse_cell(row, column, figure, {**shared, **columns[column], **rows[row]})
        for row in rows
        for column, figure in zip(columns, row_figures(rows[row]), strict=True)
        if figure != "-"
    )
    note, elsewhere = (" ".join(str(content.get(key, "")).split()) for key in ("note", "elsewhere"))
    return PaperTable(paper, name, tuple(content.get("also", ())), content["title"], note, elsewhere, cells)


def _parse_cell(row: str, column: str, figure: Any, description: Mapping[str, Any]) -> PaperCell:
    number, _, spread = str(figure).partition("±")
    variant = description.get("variant")
    return PaperCell(
        row, column,
        None if figure is None else float(number), float(spread) if spread else None,
        "not stated" if figure is None else " ± ".join(part.strip() for part in str(figure).split("±")),
        description.get("recipe", ""), None if variant is None else str(variant).format_map(description),
        description.get("method", ""), description["metric"], description.get("unit", "%"),
        {key: value for key, value in description.items() if key not in _CELL_KEYS},
    )  # fmt: skip
