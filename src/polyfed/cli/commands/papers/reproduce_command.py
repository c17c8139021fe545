"""Implements `polyfed reproduce`: runs the recipes of a paper's table, and prints the results next to those in the
paper.
"""

import argparse
import fnmatch
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rich.console import Console

from polyfed.cli.commands.argv import parse_seeds
from polyfed.cli.commands.options import configuration_parser
from polyfed.cli.commands.options.recipes import SCALES, Recipe, read_recipe
from polyfed.cli.commands.papers import job_runner
from polyfed.cli.commands.papers.cell_results import build_reproduction_results, measure_cell_over_seeds, show_cells
from polyfed.cli.commands.papers.job_runner import first_variant_with_same_configuration, job_folder
from polyfed.cli.commands.papers.paper_tables import PaperTable, find_paper, find_table, load_papers
from polyfed.cli.commands.terminal import PlainTable, print_line
from polyfed.core.errors import RoundError, RunInterrupt, UserError, did_you_mean
from polyfed.core.io.atomic_files import create_private_folder_if_missing, expand_user_path, write_file_atomically
from polyfed.core.io.values.plain_values import to_plain_values
from polyfed.simulation.settings import EXECUTION_FIELDS
from polyfed.simulation.storage.directory import read_config

if TYPE_CHECKING:
    from polyfed.simulation.experiment import Experiment

RESULT_FILE = "reproduce.json"  # the cells, in the folder of --out
# These may differ between an existing run and the requested one: they say where data lie, not which data.
_PATHS = ("path", "cache")


@final
@dataclass(frozen=True)
class ReproduceOptions:
    """Holds the options of `polyfed reproduce` but the paper, the table and those of `polyfed run`.

    Args:
        scale: of the recipes; None is "cpu".
        variant: names or patterns with commas between, of the recipes' variants to run; None runs all that make a cell.
        seeds: whole numbers with commas between, or how many; None takes the recipe's.
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
            raise UserError(f"unknown scale {self.scale!r}; {did_you_mean(self.scale, SCALES)}")
        try:
            seeds = [] if self.seeds is None else parse_seeds(self.seeds)
        except argparse.ArgumentTypeError:
            seeds = [-1]
        if any(seed < 0 for seed in seeds) or len(set(seeds)) < len(seeds):
            raise UserError(
                f"--seeds must be different whole numbers with commas between, e.g. --seeds 0,1,2, got {self.seeds!r}"
            )

    @property
    def seeds_to_run(self) -> list[int | None]:
        """Returns the seeds of each experiment; None stands for the recipe's.

        >>> ReproduceOptions(seeds="0, 7").seeds_to_run, ReproduceOptions().seeds_to_run
        ([0, 7], [None])
        """
        return [None] if self.seeds is None else list(parse_seeds(self.seeds))

    def output_folder(self, table: PaperTable) -> Path:
        """Returns the path of the folder for the runs of a table and for `reproduce.json`."""
        default_folder = Path("runs") / f"reproduce-{table.paper}-{table.name}-{self.scale or 'cpu'}"
        return default_folder if self.out is None else expand_user_path(self.out, "--out")


def reproduce_table_or_list_papers(
    argv: Sequence[str], reproduce_options: ReproduceOptions, *, quiet: bool = False
) -> None:
    """Runs the experiments of a paper's table and prints the results, or lists the tables if none is named.

    Args:
        argv: paper and table, then options of `polyfed run`; nothing, or a paper alone, lists what there is.
        reproduce_options: the other options.
        quiet: no progress.

    Raises:
        UserError: no such paper, table or option, or data that are not there.
        RoundError: a method could not finish its run (it diverged, say); the table has all others.
    """
    console = Console()
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    run_arguments = list(argv[len(names) :])
    if len(names) == 1 and "_" in names[0]:
        names = [names[0].split("_")[0], names[0]]  # the name of a recipe
    if len(names) > 1:
        _reproduce_table(
            find_table(names[0], " ".join(names[1:])), run_arguments, reproduce_options, console, quiet=quiet
        )
    elif run_arguments or reproduce_options != ReproduceOptions():
        raise UserError("polyfed reproduce takes a paper and a table before its options, e.g. fedhenn table1")
    else:
        show_papers(console, names[0] if names else None)


def _reproduce_table(
    table: PaperTable,
    run_arguments: Sequence[str],
    reproduce_options: ReproduceOptions,
    console: Console,
    *,
    quiet: bool,
) -> None:
    if table.reason_not_run:
        raise UserError(table.reason_not_run)
    if any(word.partition("=")[0] == "--seed" for word in run_arguments):
        raise UserError("polyfed reproduce takes --seeds, one or several with commas between, instead of --seed")
    scale, folder = reproduce_options.scale or "cpu", reproduce_options.output_folder(table)
    recipes = {name: read_recipe(name) for name in table.variants_by_recipe()}
    jobs = _build_jobs(table, recipes, reproduce_options, run_arguments)
    _check_data_available(jobs)
    try:
        failed = job_runner.run_paper_jobs_and_list_failures(jobs, quiet=quiet)
    except KeyboardInterrupt as stop:
        raise RunInterrupt("interrupted; the complete rounds are saved; the same command continues") from stop
    results = [
        measure_cell_over_seeds(cell, recipes, scale, reproduce_options.seeds_to_run, folder) for cell in table.cells
    ]
    reduced = {name: recipe.reduction_note(scale) for name, recipe in recipes.items()}
    create_private_folder_if_missing(folder, parents=True)
    content = build_reproduction_results(table, results, scale, reduced, run_arguments)
    write_file_atomically(folder / RESULT_FILE, json.dumps(content, indent=1, ensure_ascii=False).encode())
    show_cells(table, results, scale, reduced, run_arguments, console)
    print_line(console, f"Runs and cells ({RESULT_FILE}) are in {folder}")
    if failed:
        raise RoundError("\n".join(failed))


def show_papers(console: Console, paper: str | None = None) -> None:
    """Prints the tables and figures of one paper, or of all papers if `paper` is None.

    Raises:
        UserError: there is no such paper.
    """
    for name, publication in load_papers().items() if paper is None else [(find_paper(paper).name, find_paper(paper))]:
        output = PlainTable(title=f"{name}: {publication.title}", title_justify="left", box=None, pad_edge=False)
        for column in ("table", "", "recipes"):
            output.add_column(column, overflow="fold", no_wrap=column == "table")
        for table in publication.tables.values():
            also = f" (also: {', '.join(table.aliases)})" if table.aliases else ""
            output.add_row(table.name, table.title + also, ", ".join(table.variants_by_recipe()) or "–")
        console.print(output)
    print_line(console, "polyfed reproduce PAPER TABLE --scale smoke|cpu|paper")


def _variants_to_run(table: PaperTable, patterns: str | None) -> dict[str, list[str | None]]:
    """Returns the variants to run, by recipe."""
    all_variants = table.variants_by_recipe()
    if patterns is None:
        return {recipe: list(variants) for recipe, variants in all_variants.items()}
    variant_names = dict.fromkeys(v for variants in all_variants.values() for v in variants if v is not None)
    if not variant_names:
        raise UserError(f"{table.paper} {table.name} has no variants; leave --variant {patterns} out")
    selection: set[str] = set()
    for pattern in (part.strip() for part in patterns.split(",")):
        matched = fnmatch.filter(variant_names, pattern)
        if not matched:
            raise UserError(
                f"{table.paper} {table.name} has no variant {pattern!r}; {did_you_mean(pattern, variant_names)}"
            )
        selection.update(matched)
    return {recipe: [v for v in variants if v in selection] for recipe, variants in all_variants.items()}


def _build_jobs(
    table: PaperTable, recipes: Mapping[str, Recipe], reproduce_options: ReproduceOptions, run_arguments: Sequence[str]
) -> list[job_runner.PaperJob]:
    """Builds the runs that the chosen variants need; variants that are the same at this scale share one.

    Runs of other variants that exist are shown, too, and must have the same settings.
    """
    scale, selected = reproduce_options.scale or "cpu", _variants_to_run(table, reproduce_options.variant)
    _check_single_data_path(
        table,
        {
            recipes[n].configuration(scale, v)["data"]["name"]
            for n, chosen_variants in selected.items()
            for v in chosen_variants
        },
        run_arguments,
    )
    jobs: dict[Path, job_runner.PaperJob] = {}
    for name, variants in table.variants_by_recipe().items():
        recipe = recipes[name]
        selected_variants = {first_variant_with_same_configuration(recipe, scale, v) for v in selected[name]}
        for variant in dict.fromkeys(first_variant_with_same_configuration(recipe, scale, v) for v in variants):
            config = recipe.configuration(scale, variant)
            for number in reproduce_options.seeds_to_run:
                seed = config["seed"] if number is None else number
                folder = job_folder(reproduce_options.output_folder(table), name, variant, seed)
                if variant not in selected_variants and not folder.exists():
                    continue
                argv = run_arguments if variant in selected_variants else _without_paths(run_arguments)
                experiment = _experiment_from_config(
                    configuration_parser.parse_configuration([*argv, "--seed", str(seed)], config, "polyfed reproduce")
                )
                _check_same_settings(folder, experiment)
                if variant in selected_variants:
                    jobs[folder] = job_runner.PaperJob(
                        f"{recipe.title(scale, variant)}, seed {seed}", experiment, folder
                    )
    return list(jobs.values())


def _experiment_from_config(config: Mapping[str, Any]) -> "Experiment":
    from polyfed.simulation.experiment import build_experiment  # here and below: after the words have been checked

    return build_experiment(config)


def _check_same_settings(folder: Path, experiment: "Experiment") -> None:
    """Raises a `UserError` if a folder holds runs with other settings than the requested ones."""
    from polyfed.cli.commands.run.run_command import run_folders_by_method
    from polyfed.simulation.storage.configuration import describe_method_and_settings

    for name, run_folder in run_folders_by_method(experiment, folder).items():
        if not (run_folder / "config.yaml").exists():
            continue
        method, config = experiment.baselines.get(name, experiment.algorithm), dict(experiment.config)
        if run_folder != folder:
            config.pop("baselines", None)
        new_config = {**to_plain_values(config, "config"), **describe_method_and_settings(method, experiment.settings)}
        stored_config = read_config(run_folder)
        for key in sorted(new_config):
            stored_value, new_value = (
                _without_data_paths(key, stored_config.get(key)),
                _without_data_paths(key, new_config.get(key)),
            )
            if key not in EXECUTION_FIELDS and stored_value != new_value:
                raise UserError(
                    f"{run_folder} is a run with other settings ({key} was {stored_value!r} and is now {new_value!r}); "
                    "choose another --out, or delete the folder"
                )


def _check_single_data_path(table: PaperTable, sources: set[str], argv: Sequence[str]) -> None:
    """Raises a `UserError` if the user gives one data path for several data sets."""
    option_names = {word.partition("=")[0] for word in argv}
    if len(sources) > 1 and "--data.path" in option_names and not option_names & {"--data", "--data.name"}:
        several = f"{table.paper} {table.name} is of several data sets ({', '.join(sorted(sources))})"
        how = "choose with --variant, in one call for each, with the same --out"
        raise UserError(f"{several}, and --data.path says where one lies; {how}")


def _without_paths(argv: Sequence[str]) -> list[str]:
    """Returns the words without data paths, for a variant that is only shown and whose data set has no files."""
    paths, before = {f"--data.{path}" for path in _PATHS}, ["", *argv]
    return [word for word, last in zip(argv, before, strict=False) if not {word.partition("=")[0], last} & paths]


def _without_data_paths(key: str, value: Any) -> Any:
    return {k: v for k, v in value.items() if k not in _PATHS} if key == "data" and isinstance(value, dict) else value


def _check_data_available(jobs: Sequence[job_runner.PaperJob]) -> None:
    """Checks, before the first run, that the data sets of all runs are on this machine."""
    sources = list(dict.fromkeys(job.experiment.source for job in jobs if not job_runner.is_complete_job(job)))
    for source in sources[1:]:
        source.load()
