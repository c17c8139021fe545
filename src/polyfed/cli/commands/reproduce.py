"""What the command `reproduce` does: runs the recipes of a paper's table, and prints what they reach next to it."""

import fnmatch
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, final

from rich.console import Console

from polyfed.cli.commands import options, playing
from polyfed.cli.commands.papers import Cell, PaperTable, find, find_paper, papers
from polyfed.cli.commands.recipes import SCALES, Recipe, read
from polyfed.cli.commands.terminal import Table, say
from polyfed.core.errors import Interrupted, RoundError, UserError, nearest
from polyfed.core.files import make_folder, replace_file, user_path
from polyfed.simulation.runs.directory import plain, read_config

if TYPE_CHECKING:
    from polyfed.simulation.experiment import Experiment

RESULT = "reproduce.json"  # the cells, in the folder of --out
_DECIMALS = {"%": 1, "fraction": 3, "count": 0, "MB": 2, "s": 1, "ratio": 2}
# What may differ between a run that is there and the one that is asked for: where data lie and where it is computed.
_PLACES = ("engine", "workers", "ray_address", "gpus_per_worker", "device")
_PATHS = ("path", "cache")


@final
@dataclass(frozen=True)
class Wanted:
    """What the command was asked for beside paper, table and the options of `polyfed run`.

    Args:
        scale: of the recipes; None is "cpu".
        variant: names or patterns with commas between, of the recipes' variants to run; None runs all that make a cell.
        seeds: whole numbers with commas between; None takes the recipe's.
        out: folder of the runs and of `reproduce.json`; None is runs/reproduce-PAPER-TABLE-SCALE.

    Raises:
        UserError: an unknown scale, or seeds that are none.
    """

    scale: str | None = None
    variant: str | None = None
    seeds: str | None = None
    out: str | None = None

    def __post_init__(self) -> None:
        if self.scale is not None and self.scale not in SCALES:
            raise UserError(f"unknown scale {self.scale!r}; {nearest(self.scale, SCALES)}")
        parts = [] if self.seeds is None else [part.strip() for part in self.seeds.split(",")]
        if not all(part.isdecimal() for part in parts) or len(set(map(int, parts))) < len(parts):
            raise UserError(
                f"--seeds must be different whole numbers with commas between, e.g. --seeds 0,1,2, got {self.seeds!r}"
            )

    @property
    def numbers(self) -> list[int | None]:
        """The seeds; None is the recipe's.

        >>> Wanted(seeds="0, 7").numbers, Wanted().numbers
        ([0, 7], [None])
        """
        return [None] if self.seeds is None else [int(part) for part in self.seeds.split(",")]

    def folder(self, table: PaperTable) -> Path:
        """Where everything goes."""
        kept = Path("runs") / f"reproduce-{table.paper}-{table.name}-{self.scale or 'cpu'}"
        return kept if self.out is None else user_path(self.out, "--out")


@final
@dataclass(frozen=True)
class Found:
    """A cell with what polyfed reached: the value of each seed that has one, in the unit of the cell, and the folders of
    the runs."""

    cell: Cell
    by_seed: Mapping[int, float]
    runs: tuple[str, ...]

    @property
    def ours(self) -> float | None:
        """Mean over seeds."""
        return fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds, where there are several."""
        return stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return None if self.ours is None or self.cell.paper is None else self.ours - self.cell.paper


def run(words: Sequence[str], wanted: Wanted, *, quiet: bool = False) -> None:
    """Carries out the command.

    Args:
        words: paper and table, then options of `polyfed run`; nothing, or a paper alone, lists what there is.
        wanted: the other options.
        quiet: no progress.

    Raises:
        UserError: no such paper, table or option, or data that are not there.
        RoundError: a method could not finish its run (it diverged, say); the table has all others.
    """
    console = Console()
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    given = list(words[len(names) :])
    if len(names) == 1 and "_" in names[0]:
        names = [names[0].split("_")[0], names[0]]  # the name of a recipe
    if len(names) > 1:
        _reproduce(find(names[0], " ".join(names[1:])), given, wanted, console, quiet=quiet)
    elif given or wanted != Wanted():
        raise UserError("polyfed reproduce takes a paper and a table before its options, e.g. fedhenn table1")
    else:
        show_choices(console, names[0] if names else None)


def _reproduce(table: PaperTable, given: Sequence[str], wanted: Wanted, console: Console, *, quiet: bool) -> None:
    if table.elsewhere:
        raise UserError(table.elsewhere)
    if any(word.partition("=")[0] == "--seed" for word in given):
        raise UserError("polyfed reproduce takes --seeds, one or several with commas between, instead of --seed")
    scale, folder = wanted.scale or "cpu", wanted.folder(table)
    recipes = {name: read(name) for name in table.variants()}
    jobs = _jobs(table, recipes, wanted, given)
    _check(jobs)
    try:
        failed = playing.play(jobs, quiet=quiet)
    except KeyboardInterrupt as stop:
        raise Interrupted("interrupted; the complete rounds are saved: the same command goes on") from stop
    found = [_found(cell, recipes, scale, wanted.numbers, folder) for cell in table.cells]
    reduced = {name: recipe.reduced(scale) for name, recipe in recipes.items()}
    make_folder(folder, parents=True)
    content = _content(table, found, scale, reduced, given)
    replace_file(folder / RESULT, json.dumps(content, indent=1, ensure_ascii=False).encode())
    show(table, found, scale, reduced, given, console)
    say(console, f"Runs and cells ({RESULT}) are in {folder}")
    if failed:
        raise RoundError("\n".join(failed))


def show_choices(console: Console, paper: str | None = None) -> None:
    """Prints the tables and figures of one paper or of all.

    Raises:
        UserError: there is no such paper.
    """
    for name, found in papers().items() if paper is None else [(find_paper(paper).name, find_paper(paper))]:
        shown = Table(title=f"{name}: {found.title}", title_justify="left", box=None, pad_edge=False)
        for column in ("table", "", "recipes"):
            shown.add_column(column, overflow="fold", no_wrap=column == "table")
        for table in found.tables.values():
            also = f" (also: {', '.join(table.also)})" if table.also else ""
            shown.add_row(table.name, table.title + also, ", ".join(table.variants()) or "–")
        console.print(shown)
    say(console, "polyfed reproduce PAPER TABLE --scale smoke|cpu|paper")


def _selected(table: PaperTable, patterns: str | None) -> dict[str, list[str | None]]:
    """The variants to run, by recipe."""
    every = table.variants()
    if patterns is None:
        return {recipe: list(variants) for recipe, variants in every.items()}
    known = dict.fromkeys(v for variants in every.values() for v in variants if v is not None)
    if not known:
        raise UserError(f"{table.paper} {table.name} has no variants; leave --variant {patterns} out")
    wanted: set[str] = set()
    for pattern in (part.strip() for part in patterns.split(",")):
        matched = fnmatch.filter(known, pattern)
        if not matched:
            raise UserError(f"{table.paper} {table.name} has no variant {pattern!r}; {nearest(pattern, known)}")
        wanted.update(matched)
    return {recipe: [v for v in variants if v in wanted] for recipe, variants in every.items()}


def _jobs(table: PaperTable, recipes: Mapping[str, Recipe], wanted: Wanted, given: Sequence[str]) -> list[playing.Job]:
    """The runs that the chosen variants need; variants that are the same at this scale share one. Runs of other variants
    that are there are shown, too, and so must have the same settings."""
    scale, selected = wanted.scale or "cpu", _selected(table, wanted.variant)
    _check_path(
        table, {recipes[n].configuration(scale, v)["data"]["name"] for n, of in selected.items() for v in of}, given
    )
    jobs: dict[Path, playing.Job] = {}
    for name, variants in table.variants().items():
        recipe = recipes[name]
        chosen = {_same(recipe, scale, v) for v in selected[name]}
        for variant in dict.fromkeys(_same(recipe, scale, v) for v in variants):
            config = recipe.configuration(scale, variant)
            for number in wanted.numbers:
                seed = config["seed"] if number is None else number
                folder = _folder(wanted.folder(table), name, variant, seed)
                if variant not in chosen and not folder.exists():
                    continue
                words = given if variant in chosen else _without_paths(given)
                experiment = _experiment(options.parse([*words, "--seed", str(seed)], config, "polyfed reproduce"))
                _check_settings(folder, experiment)
                if variant in chosen:
                    jobs[folder] = playing.Job(f"{recipe.title(scale, variant)}, seed {seed}", experiment, folder)
    return list(jobs.values())


def _experiment(config: Mapping[str, Any]) -> "Experiment":
    from polyfed.simulation.experiment import from_config  # here and below: after the words have been checked

    return from_config(config)


def _same(recipe: Recipe, scale: str, variant: str | None) -> str | None:
    """The first variant whose configuration at this scale is that of `variant`: at scale smoke many are the same."""
    config = recipe.configuration(scale, variant)
    return next((v for v in recipe.variants if recipe.configuration(scale, v) == config), variant)


def _folder(out: Path, recipe: str, variant: str | None, seed: int) -> Path:
    return out / "-".join([recipe, *([variant] if variant else []), f"seed{seed}"])


def _check_settings(folder: Path, experiment: "Experiment") -> None:
    """Refuses a folder whose runs have other settings than those that are asked for."""
    from polyfed.cli.commands.running import parts
    from polyfed.simulation.runs.configuration import described

    for name, place in parts(experiment, folder).items():
        if not (place / "config.yaml").exists():
            continue
        method, kept = experiment.baselines.get(name, experiment.algorithm), dict(experiment.config)
        if place != folder:
            kept.pop("baselines", None)
        now = {**plain(kept, "config"), **described(method, experiment.settings)}
        before = read_config(place)
        for key in sorted(now):
            was, wanted = _settled(key, before.get(key)), _settled(key, now.get(key))
            if key not in _PLACES and was != wanted:
                raise UserError(
                    f"{place} is a run with other settings ({key} was {was!r} and is now {wanted!r}); choose another "
                    "--out, or delete the folder"
                )


def _check_path(table: PaperTable, sources: set[str], words: Sequence[str]) -> None:
    """Refuses one path for several data sets."""
    named = {word.partition("=")[0] for word in words}
    if len(sources) > 1 and "--data.path" in named and not named & {"--data", "--data.name"}:
        several = f"{table.paper} {table.name} is of several data sets ({', '.join(sorted(sources))})"
        how = "choose with --variant, in one call for each, with the same --out"
        raise UserError(f"{several}, and --data.path says where one lies; {how}")


def _without_paths(words: Sequence[str]) -> list[str]:
    """The words for a variant that only is shown: where the chosen one's data lie is no option of data without files."""
    paths, before = {f"--data.{path}" for path in _PATHS}, ["", *words]
    return [word for word, last in zip(words, before, strict=False) if not {word.partition("=")[0], last} & paths]


def _settled(key: str, value: Any) -> Any:
    return {k: v for k, v in value.items() if k not in _PATHS} if key == "data" and isinstance(value, dict) else value


def _check(jobs: Sequence[playing.Job]) -> None:
    """Finds before the first run whether a later one lacks its data."""
    sources = list(dict.fromkeys(job.experiment.source for job in jobs if not playing.complete(job)))
    for source in sources[1:]:
        source.load()


def _found(cell: Cell, recipes: Mapping[str, Recipe], scale: str, seeds: Sequence[int | None], out: Path) -> Found:
    """Ours of the runs that are there, those of an earlier call too."""
    from polyfed.cli.commands.measures import Finished, measure

    if not cell.recipe:
        value = measure(cell, None)
        return Found(cell, {} if value is None else {0: value}, ())
    recipe, places = recipes[cell.recipe], []
    by_seed: dict[int, float] = {}
    variants = [_same(recipe, scale, variant) for variant in cell.variants]
    for seed in seeds:
        number = recipe.configuration(scale, variants[0])["seed"] if seed is None else seed
        run, *others = (Finished(_folder(out, recipe.name, variant, number), scale) for variant in variants)
        if all(
            (of.folder / "config.yaml").exists() and playing.has_all_rounds(of.of(cell.method)) for of in (run, *others)
        ):
            places.append(run.folder.name)
            value = measure(cell, replace(run, others=tuple(others)))
            by_seed |= {} if value is None else {number: value}
    return Found(cell, by_seed, tuple(places))


def _content(
    table: PaperTable, found: Sequence[Found], scale: str, reduced: Mapping[str, str], given: Sequence[str]
) -> dict[str, Any]:
    cells = [
        {
            **asdict(f.cell),
            "ours": f.ours,
            "ours_spread": f.spread,
            "difference": f.difference,
            "seeds": dict(f.by_seed),
            "runs": f.runs,
        }
        for f in found
    ]
    return {
        "paper": table.paper, "table": table.name, "title": table.title, "note": table.note, "scale": scale,
        "reduced": dict(reduced), "options": list(given), "cells": cells,
    }  # fmt: skip


def show(
    table: PaperTable,
    found: Sequence[Found],
    scale: str,
    reduced: Mapping[str, str],
    given: Sequence[str],
    console: Console,
) -> None:
    """Prints the cells next to the paper's, and what was reduced against the paper."""
    several = max((len(f.by_seed) for f in found), default=0)
    over = f", means over {several} seeds" if several > 1 else ""
    units = dict.fromkeys(f.cell.unit for f in found)
    at = f", scale {scale}{over}" if reduced else ""
    title = f"{find_paper(table.paper).title}, {table.number}: {table.title} ({', '.join(units)}){at}"
    shown = Table(title=title, title_justify="left")
    for column in ("row", "column"):
        shown.add_column(column)
    for column in ("polyfed", "paper", "difference"):
        shown.add_column(column, justify="right", no_wrap=True)
    last = None
    for f in found:
        if last is not None and f.cell.row != last:
            shown.add_section()
        decimals = _DECIMALS[f.cell.unit]
        ours = _with_spread(f.ours, f.spread, decimals) if f.ours is not None else "–" if f.runs else "not run"
        difference = "–" if f.difference is None else f"{f.difference:+.{decimals}f}"
        shown.add_row("" if f.cell.row == last else f.cell.row, f.cell.column, ours, f.cell.printed, difference)
        last = f.cell.row
    console.print(shown)
    for sentence, recipes in _by_sentence(reduced).items():
        what = f"reduced against the paper: {sentence}" if sentence else "nothing is reduced against the paper"
        say(console, f"{', '.join(recipes)}, scale {scale}: {what}")
    if given:
        say(console, f"changed besides: {' '.join(given)}")
    if table.note:
        say(console, f"note: {table.note}")


def _by_sentence(reduced: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for recipe, sentence in reduced.items():
        found.setdefault(sentence, []).append(recipe)
    return found


def _with_spread(value: float, spread: float | None, decimals: int) -> str:
    return f"{value:.{decimals}f}" + ("" if spread is None else f" ± {spread:.{decimals}f}")
