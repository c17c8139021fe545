"""Implements `polyfed compare`: builds the plan of the comparison, runs it, and prints the results."""

import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from rich.console import Console

from polyfed.algorithms import registry_name
from polyfed.cli.commands.argv import option_name
from polyfed.cli.commands.compare.compare_options import CompareOptions
from polyfed.cli.commands.compare.comparison_tables import show_comparison
from polyfed.cli.commands.results.show_command import JSON_FORMAT, describe_directory
from polyfed.cli.commands.terminal import print_json, print_line
from polyfed.comparison.compare import DEFAULT_NUM_SEEDS, run_comparison
from polyfed.comparison.plan import ComparisonPlan, Method
from polyfed.comparison.planning.client_set import ClientSet
from polyfed.comparison.planning.method_selection import (
    DEFAULT_METHODS,
    build_method_with_training_of,
    labels_added_by_default,
    select_methods,
)
from polyfed.comparison.storage.comparison import Comparison
from polyfed.comparison.storage.comparison_directory import (
    DESCRIPTION,
    command_to_continue,
    load_unchanged_comparison,
    parse_result_criteria,
    read_description,
)
from polyfed.comparison.tuning.hyperparameter_search import AUTO, parse_search_space
from polyfed.comparison.tuning.optuna_search import parse_number_or_text
from polyfed.core.errors import RoundError, UserError, did_you_mean
from polyfed.core.io.text.advice import keep_advice_for_terminal
from polyfed.core.io.text.site_words import name_sites
from polyfed.core.io.text.terminal_text import sanitise_for_terminal
from polyfed.core.io.trusted_code import find_trusted_import_path
from polyfed.core.training.config import TRANSFERABLE_FIELDS
from polyfed.data.partitioning.folds import Folds, build_folds, check_seeds_suit_resplit_or_folds, redraw_clients
from polyfed.data.partitioning.partitions import Natural
from polyfed.data.partitioning.resplit import apply_common_preprocessing_to_public
from polyfed.data.tabular.preprocessing import CONSTANT_COLUMNS_WARNING
from polyfed.simulation.checks.requirements import check_networks_run
from polyfed.simulation.experiment import (
    Experiment,
    build_experiment,
    check_ray_cluster_trusted,
    describe_participants,
    load_participants,
)
from polyfed.simulation.monitoring.trackers import validate_logger_names
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.configuration import build_method, describe_method_and_settings, find_method_class
from polyfed.simulation.storage.directory import read_config


class ShownPlan(TypedDict):
    """Describes what `polyfed compare --plan --json` prints."""

    format: int
    runs: int
    """Counts the runs that are compared."""
    search_runs: int
    """Counts the runs of the search for hyper-parameters before."""
    minutes: float
    score: str
    """The name of the metric that decides."""
    pilot: list[str]
    """The two methods that the pilot trained."""
    designs: list[dict[str, Any]]
    """Holds `options`, `runs`, and the smallest gains that are decided in four of five cases: `decides_mean`,
    `decides_client` (null where it cannot be told)."""
    sentences: list[str]
    left_out: dict[str, str]


class _RedrawError(UserError):
    """Raised when the clients' examples cannot be divided into folds, or split again."""


def run_compare_command(config: Mapping[str, Any], options: CompareOptions, title: str, out: Path) -> None:
    """Compares several methods on the experiment of a configuration, and prints the results.

    Raises:
        UserError: what `polyfed.compare` refuses, hyper-parameters that do not fit, or another comparison in `out`.
        RoundError: methods failed; the results of the others are printed.
    """
    validate_logger_names(options.logger)
    experiment = build_experiment(config)
    requested = _methods_by_label(experiment, options)
    methods = select_methods(requested, like=experiment.algorithm)
    search = options.search_space() or parse_search_space(options.tune or AUTO, options.trials)
    added_labels = sorted(labels_added_by_default(methods, requested))
    if options.algorithms and added_labels and not options.quiet:
        print(f"added: {', '.join(added_labels)}", file=sys.stderr)
    description = {
        "config": {key: value for key, value in config.items() if key not in ("baselines", "seed")},
        "methods": {
            label: describe_method_and_settings(method, Settings())["algorithm"] for label, method in methods.items()
        },
        "same_data": options.same_data,
        "resplit": options.resplit,
        "references": not options.no_references,
        "unasked": added_labels,
    }
    plan = _plan_default_folds(experiment, options, description, methods, title, out)
    if plan is None:
        folds = build_folds(options.folds, options.fold_repeats)
        plan = _plan_seeds_or_folds(options, description, methods, folds, title, out)
    plan = replace(plan, criteria=options.result_criteria(), search_space=search, num_trials=options.trials)
    plan = replace(plan, parallel_runs=options.parallel, quiet=options.quiet, forecast_only=options.plan)
    _run_plan(plan, options)


def resume_comparison(folder: Path, options: CompareOptions) -> None:
    """Continues a directory's comparison, or computes its results for another budget or target; prints them.

    A finished one to which nothing is added is read from its file.

    Raises:
        UserError: the clients were made in Python.
        RoundError: as for `run_compare_command`.
    """
    validate_logger_names(options.logger)
    is_as_stored = options.budget is None and options.target is None and not options.logger
    if is_as_stored and (comparison := load_unchanged_comparison(folder)):
        if not options.quiet:
            print("This comparison was finished, and nothing was left to run.", file=sys.stderr)
        _print_comparison(comparison, options)
        return
    _run_plan(read_comparison_plan(folder, options), options)


def read_comparison_plan(folder: Path, options: CompareOptions) -> ComparisonPlan:
    """Builds a comparison's plan from its directory, with values replaced by the command line's.

    Raises:
        UserError: its description is damaged, or the clients were made in Python.
    """
    description = read_description(folder)
    experiment = description.get("experiment")
    if experiment is None:
        raise UserError(
            f"the clients of {folder} were made in Python; go on with it there: {command_to_continue(folder)}"
        )
    required_keys = {"config", "methods", "same_data", "resplit", "references"}
    if missing_keys := [*({"title", "seeds"} - description.keys()), *(required_keys - experiment.keys())]:
        raise UserError(
            f"{folder / DESCRIPTION} is damaged: it has no {missing_keys[0]}; give the whole command again with another "
            "--out"
        )
    methods = {label: build_method(entry) for label, entry in experiment["methods"].items()}
    seeds = tuple(experiment.get("stop_when_decided") or description["seeds"])
    plan = _build_plan(experiment, methods, seeds, description["title"], folder)
    plan = replace(
        plan,
        criteria=options.result_criteria(parse_result_criteria(description)),
        search_space=description.get("search"),
        num_trials=description.get("trials"),
    )
    return replace(plan, parallel_runs=options.parallel, quiet=options.quiet)


def _name_designs_by_options(sentence: str) -> str:
    """Returns a sentence of a plan with options in place of the arguments of Python.

    >>> _name_designs_by_options("folds=5, fold_repeats=2 would decide more")
    '--folds 5 --fold-repeats 2 would decide more'
    """
    with_repeats = re.sub(r"\bfolds=(\d+), fold_repeats=(\d+)", r"--folds \1 --fold-repeats \2", sentence)
    return re.sub(r"\b(folds|resplit)=(\d+)", r"--\1 \2", with_repeats)


def _describe_plan(comparison: Comparison) -> ShownPlan:
    """Returns what a pilot says of a comparison, with designs as options."""
    forecast = comparison.results["plan"]
    return {
        "format": JSON_FORMAT, "runs": forecast["runs"], "search_runs": forecast["search_runs"],
        "minutes": forecast["minutes"], "score": forecast["score"], "pilot": list(forecast["pilot"]),
        "designs": [
            {"options": _name_designs_by_options(name), "runs": design["runs"], "decides_mean": design["mean"],
             "decides_client": design["client"]}
            for name, design in forecast["designs"].items()
        ],
        "sentences": list(map(_name_designs_by_options, comparison.results["verdicts"])),
        "left_out": dict(comparison.skipped),
    }  # fmt: skip


def _print_comparison(comparison: Comparison, options: CompareOptions) -> None:
    if options.json and comparison.out is not None:
        print_json(describe_directory(comparison.out))
    else:
        show_comparison(comparison, Console(), with_tables=options.tables)


def _run_plan(plan: ComparisonPlan, options: CompareOptions) -> None:
    comparison, console, logger = run_comparison(plan), Console(stderr=options.json), options.logger
    if plan.forecast_only and options.json:
        print_json(_describe_plan(comparison))
        return
    if plan.forecast_only:
        for sentence in comparison.results["verdicts"]:
            print_line(console, _name_designs_by_options(sentence))
        print_line(console, "To train them: the same command without --plan", style="cyan")
        return
    _print_comparison(comparison, options)
    if logger and comparison.out is not None:
        # imported late: most comparisons do without
        from polyfed.report.export.mlflow_models import log_comparison_to_trackers

        log_comparison_to_trackers(comparison.results, comparison.out, logger)
        print_line(console, f"tracked with {', '.join(logger)}")
    if comparison.failed:
        raise RoundError(
            f"no results of {', '.join(comparison.failed)}, for the reason printed above: give other hyper-parameters "
            "(--method-config FILE) and another --out, or leave the method out"
        )


def _plan_default_folds(
    experiment: Experiment, options: CompareOptions, description: Mapping[str, Any], methods: Mapping[str, Method],
    title: str, out: Path,
) -> ComparisonPlan | None:  # fmt: skip
    """Plans folds if the data's sites are the clients and no option divides examples, so that each site has an answer.

    None elsewhere, or if the sites' examples cannot be divided into folds. Raises a `UserError` if there is one site.
    """
    is_open = options.seeds is None and options.resplit is None and options.folds is None and not options.same_data
    if not is_open or not isinstance(experiment.partition, Natural):
        return None
    folds = Folds(DEFAULT_NUM_SEEDS, options.fold_repeats or 1)
    plan = _plan_seeds_or_folds(options, description, methods, folds, title, out)
    try:
        clients = plan.build_client_set(plan.seeds[0]).clients
    except _RedrawError as error:  # too few examples, or a time
        reason = sanitise_for_terminal(keep_advice_for_terminal(str(error)))
        print(f"no folds, and so no answer for each site: {reason}", file=sys.stderr)
        return None
    if len(clients) == 1:
        raise UserError(
            f"{name_sites([clients[0].id])} is the one site, and nobody can join it: give the rows of two sites or more"
        )
    return plan


def _plan_seeds_or_folds(
    options: CompareOptions, description: Mapping[str, Any], methods: Mapping[str, Method], folds: Folds | None,
    title: str, out: Path,
) -> ComparisonPlan:  # fmt: skip
    num_runs = DEFAULT_NUM_SEEDS if options.resplit is None else max(options.resplit, 1)
    seeds = options.seeds or tuple(range(num_runs if folds is None else folds.num_runs))
    more: dict[str, Any] = {"stop_when_decided": list(seeds)} if options.stop_when_decided else {}
    if folds is not None:
        check_seeds_suit_resplit_or_folds(options.resplit, folds, seeds)
        more["folds"] = folds.number
    return _build_plan({**description, **more}, methods, seeds, title, out)


def _build_plan(
    description: Mapping[str, Any], methods: Mapping[str, Method], seeds: tuple[int, ...], title: str, out: Path
) -> ComparisonPlan:
    config, resplit = description["config"], description["resplit"]
    number = description.get("folds")
    folds = None if number is None else Folds(number, max(len(seeds) // number, 1))
    check_seeds_suit_resplit_or_folds(resplit, folds, seeds)
    is_redrawn = resplit is not None or folds is not None

    @cache
    def load_and_divide(data_seed: int) -> tuple[Any, Any]:  # once where the same data are divided again for each run
        with warnings.catch_warnings():
            if is_redrawn:  # the sets of the file are not used, and those that are have a warning of their own
                warnings.filterwarnings("ignore", message=CONSTANT_COLUMNS_WARNING)
            experiment_data = load_participants(build_experiment({**config, "seed": data_seed}))
        check_networks_run(experiment_data.clients, experiment_data.pool.num_outputs)
        try:
            return experiment_data, redraw_clients(experiment_data.clients, resplit, folds, seeds)
        except UserError as error:
            raise _RedrawError(error) from error

    def clients_of_seed(seed: int) -> ClientSet:
        data_seed = seeds[0] if description["same_data"] or is_redrawn else seed
        experiment_data, redrawn = (load_and_divide if is_redrawn else load_and_divide.__wrapped__)(data_seed)
        if redrawn:
            seed_clients = redrawn[seeds.index(seed)]
            experiment_data = replace(
                experiment_data,
                clients=seed_clients,
                public=apply_common_preprocessing_to_public(experiment_data.public, seed_clients),
            )
            data_seed = -1  # no file describes these clients
        # A run's `config.yaml` describes its clients only if its own seed divides them.
        run_config = config if data_seed == seed else {k: v for k, v in config.items() if k not in ("data", "model")}
        names = experiment_data.pool.class_names if experiment_data.pool.task.one_class_per_example else None
        return ClientSet(
            experiment_data.clients, experiment_data.public, names, run_config, describe_participants(experiment_data)
        )

    settings = build_experiment(config).settings
    check_ray_cluster_trusted(settings)
    return ComparisonPlan(
        title, methods, seeds, settings, clients_of_seed, out=out, experiment=description, metrics=settings.metrics,
        num_resplits=resplit, folds=folds, with_references=description["references"],
        stop_when_decided=bool(description.get("stop_when_decided")), unasked=frozenset(description.get("unasked", ())),
    )  # fmt: skip


def check_fields_have_a_method(words: Sequence[str], main_method: str, algorithms: Sequence[str]) -> None:
    """Raises a `UserError` if `words` set a field of `main_method` alone, which is not compared."""
    if not algorithms or main_method in algorithms:
        return
    prefix = "--algorithm."
    names = [option_name(word).removeprefix(prefix) for word in words if option_name(word).startswith(prefix)]
    if lost := [name for name in names if name.partition(".")[0].replace("-", "_") not in TRANSFERABLE_FIELDS]:
        raise UserError(
            f"{prefix}{lost[0]} is of {main_method}, which --algorithms does not name; name the method that it is for with "
            f"--algorithm {algorithms[0]}, or give fields of several methods with --method-config"
        )


def _methods_by_label(experiment: Experiment, options: CompareOptions) -> dict[str, Method]:
    """Builds the methods that somebody asked for, by label.

    Each has the local training of the experiment's method, and its own fields from the experiment, the file of
    hyper-parameters, or its defaults.
    """
    experiment_methods: dict[str, Method] = {
        _method_name(experiment.algorithm): experiment.algorithm,
        **experiment.baselines,
    }
    method_config = {} if options.method_config is None else read_config(options.method_config)
    always = [label for label in method_config if label in DEFAULT_METHODS]  # which are compared unasked
    labels = tuple(
        dict.fromkeys([*options.algorithms, *always] if options.algorithms else [*experiment_methods, *method_config])
    )
    if unknown := [label for label in method_config if label not in labels]:
        raise UserError(
            f"{options.method_config} has {unknown[0]!r}, which is not compared; {did_you_mean(unknown[0], labels)}"
        )
    # A label becomes the name of a folder, and ":" is none's.
    return {
        label.replace(":", "."): _build_method(
            label, method_config.get(label), experiment_methods, experiment, options.method_config
        )
        for label in labels
    }


def _method_name(method: Method) -> str:
    return find_trusted_import_path(type(method)) or registry_name(method)


def _build_method(
    label: str, entry: Any, experiment_methods: Mapping[str, Method], experiment: Experiment, file: Path | None
) -> Method:
    if not (entry is None or isinstance(entry, Mapping)):
        raise UserError(f"{file}: {label} must be a mapping of fields, got {entry!r}")
    # YAML has 1e-3 as a word.
    changes = {k: parse_number_or_text(v) if isinstance(v, str) else v for k, v in dict(entry or {}).items()}
    name = str(changes.pop("name", label))
    kind = find_method_class(name)
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    if unknown := [key for key in changes if key not in names]:
        raise UserError(f"{file}: {name} has no field {unknown[0]!r}; {did_you_mean(str(unknown[0]), names)}")
    try:
        if name in experiment_methods:
            return replace(experiment_methods[name], **changes)  # type: ignore[type-var]
        return build_method_with_training_of(name, experiment.algorithm, changes)
    except UserError as error:
        raise UserError(f"{file}: {label}: {error}" if entry else str(error)) from error
