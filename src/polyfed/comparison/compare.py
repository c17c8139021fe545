"""Implements `polyfed.compare`: trains several methods on the same clients, with several seeds each."""

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from shlex import quote
from typing import Any, Literal, cast

from polyfed.algorithms import Local, get
from polyfed.comparison.build_results import ResultInputs, build_results
from polyfed.comparison.execution.final_runs import run_final_methods
from polyfed.comparison.execution.fold_tests import collect_test_examples_of_folds
from polyfed.comparison.execution.runs_display import open_runs_display
from polyfed.comparison.execution.sequential_looks import run_until_decided
from polyfed.comparison.plan import ComparisonPlan, Method
from polyfed.comparison.planning.budget import Budget, ResultCriteria
from polyfed.comparison.planning.client_set import ClientSet, make_client_set_of_source
from polyfed.comparison.planning.evaluation_panel import draw_panel
from polyfed.comparison.planning.forecast import count_final_and_search_runs, forecast_cost_and_detectable_gain
from polyfed.comparison.planning.method_selection import labels_added_by_default, select_methods
from polyfed.comparison.planning.plan_description import (
    describe_comparison,
    describe_too_few_planned_rounds,
    initial_search_budget,
    method_fields,
    reference_label,
)
from polyfed.comparison.references.fit_references import FittedReferences, fit_references
from polyfed.comparison.storage import comparison_directory
from polyfed.comparison.storage.comparison import Comparison
from polyfed.comparison.storage.comparison_files import hash_compared_files, lock_comparison, write_comparison_results
from polyfed.comparison.tuning import hyperparameter_search
from polyfed.comparison.tuning.client_rounds import freeze_history_after, select_compared_rounds_of_local_runs
from polyfed.core.algorithm import Architecture, Client
from polyfed.core.errors import RunInterrupt, UserError, collect_data_warnings
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.metrics import resolve_metrics
from polyfed.core.examples.as_examples import as_examples
from polyfed.core.examples.examples import Examples
from polyfed.core.io.atomic_files import add_resume_hint_if_disk_full, expand_user_path
from polyfed.core.io.text.advice import keep_advice_for_this_process
from polyfed.core.io.values.keyword_names import suggest_keywords_and_fields
from polyfed.core.io.values.number_checks import MAX_RUNS, is_whole_number
from polyfed.core.io.values.plain_values import numpy_to_python
from polyfed.core.messages.compressors import Compressor
from polyfed.data.partitioning.folds import build_folds, redraw_clients
from polyfed.data.partitioning.group_split import group_numbers
from polyfed.data.partitioning.resplit import apply_common_preprocessing_to_public
from polyfed.data.sources.client_source import ClientSource, is_client_source
from polyfed.simulation.callbacks.callback import Callback, RecordFunction, validate_callbacks
from polyfed.simulation.checks.clients.client_list import class_names_of, list_clients
from polyfed.simulation.checks.clients.data_leakage import limit_leak_warnings
from polyfed.simulation.checks.clients.table_schemas import table_preprocessors_by_part
from polyfed.simulation.monitoring.progress import Progress
from polyfed.simulation.monitoring.progress_argument import resolve_own_progress
from polyfed.simulation.scheduling.asynchronous.rules import FedAsync, FedBuff
from polyfed.simulation.scheduling.sampling.sampler import Sampler
from polyfed.simulation.scheduling.scheduling_arguments import describe_scheduling
from polyfed.simulation.settings import EngineName, Settings

DEFAULT_NUM_SEEDS = 5
"""Sets the number of seeds of a comparison by default.

A mean gain of 10 points of accuracy over 4 clients with 200 test examples each is found in 66 of 100 comparisons with 3
seeds, in 99 with 5; one of 5 points in 25 and 56 (`benchmarks/verdicts.py`)."""


@suggest_keywords_and_fields(get)
def compare(
    clients: Iterable[Client] | ClientSource,
    algorithms: Method | str | Sequence[Method | str] | Mapping[str, Method | str],
    *,
    rounds: int,
    seeds: int | Sequence[int] | None = None,
    resplit: int | None = None,
    metrics: Any = None,
    folds: int | None = None,
    fold_repeats: int = 1,
    stop_when_decided: bool = False,
    plan_only: bool = False,
    out: str | Path | None = None,
    public: Any = None,
    like: Method | None = None,
    budget: str = "best",
    target: float | None = None,
    tune: Mapping[str, Sequence[Any] | str] | str | None = hyperparameter_search.AUTO,
    trials: int | None = None,
    references: bool = True,
    parallel: int | Literal["auto"] = "auto",
    clients_per_round: int | float = 1.0,
    engine: EngineName = "auto",
    workers: int | Literal["auto"] = "auto",
    ray_address: str = "local",
    gpus_per_worker: float = 0.0,
    device: str = "auto",
    evaluate_every: int = 1,
    evaluate_clients: int | float | Sequence[str] = 1.0,
    checkpoint_every: int = 1,
    on_error: Literal["raise", "skip"] = "raise",
    min_replies: int = 1,
    compress: str | Compressor | None = "none",
    compress_down: str | Compressor | None = "none",
    secure: bool = False,
    regions: int | Mapping[str, str] | None = None,
    cross_site: bool = False,
    sampler: str | Mapping[str, Any] | Sampler = "uniform",
    speeds: str | float | Mapping[str, float] | None = None,
    bandwidth: str | float | Mapping[str, float] | None = None,
    availability: str | Path | Mapping[str, Any] | None = None,
    asynchronous: FedBuff | FedAsync | str | Mapping[str, Any] | None = None,
    title: str = "comparison",
    callbacks: Iterable[Callback | RecordFunction] = (),
    progress: Progress | bool | RecordFunction | None = None,
    quiet: bool = False,
) -> Comparison:
    """Trains several methods on the same clients with several seeds each, and returns a `Comparison` of their scores.

    `local` is always compared, `fedavg` and `fedavg_ft` too where the clients have one architecture. A method that they do
    not suit is left out, with the reason; one of which a run fails (it diverges, for instance) is reported as failed,
    and the others are compared. The same call with the same `out` goes on where it was stopped; finished runs stay.

    Args:
        clients: who takes part, as for `federate`; a client source too, of which `evaluate_clients` are compared.
        algorithms: a method or its name, several of them as a list, or either by label.
        rounds, clients_per_round, engine, workers, ray_address, gpus_per_worker, device, evaluate_every, checkpoint_every,
            on_error, min_replies, compress, compress_down, cross_site, regions (of means), sampler, speeds, bandwidth,
            availability: of each run, as for `federate`.
        asynchronous: as for `federate`; methods whose server takes no mean are left out, and `local` trains in plain rounds.
        evaluate_clients: the clients that every run evaluates: a number or a fraction, drawn once, the same for all methods,
            seeds and rounds; or a list of ids. Intervals of means cover the draw.
        secure: whether the server sees only the sum of a round's replies; methods that need single replies are left out.
        seeds: one run of each method per seed (or how many: 3 is 0, 1, 2); default 0 to 4, or one for each split of
            `resplit` or fold of `folds`. With one seed nothing is decided, and with three only large gains are.
        resplit: how many times each client's training, validation and test examples are divided again, each time with
            another seed: the better answer where data are few. None keeps the sets that were given.
        folds: tests every example of each client once, by k-fold cross-validation with this many folds, a run each. Decides
            more than as many splits of `resplit`. Groups (`Examples.group`) stay together, and count as one in intervals.
            A client with fewer examples (or groups) than folds trains in all of them, and is not tested.
        fold_repeats: how many times the folds are drawn again: 2 needs twice the runs, and decides smaller gains.
        stop_when_decided: draws the folds again until the mean's answer is decided, at most `fold_repeats` times; each look
            costs a little of the 5 % of false answers (O'Brien and Fleming's spending).
        plan_only: trains nothing but a pilot of four runs, and says how many runs and minutes the comparison takes and how
            small a gain it can decide: `results["plan"]`, and in sentences `verdicts`.
        metrics: names, functions `f(outputs, targets) -> float` or `polyfed.Metric` objects; the first decides. None takes
            accuracy, AUC (labels) or, for regression, the mean absolute error, and R² beside it.
        out: the directory (see `polyfed.comparison.storage.comparison_directory`); None keeps the results in memory.
        public: unlabelled examples that are no client's, for methods that need them; the others ignore them.
        like: whose local training the methods get that are given by name; default: that of the first method in `algorithms`
            that is not a name and has no other defaults for it. Without any, they have equal epochs and batches.
        budget: "best" compares each method at its best round by validation loss, and gives no answer against or with one
            that was still learning; "steps" compares after all rounds, "bytes" or "seconds" (or "bytes=5e6", "seconds=30")
            each run at its last evaluated round that has spent no more.
            `polyfed.comparison.planning.budget.Budget` says more.
        target: the mean score for the columns "to reach it"; None takes what training alone reaches.
        tune: "auto" searches the learning rate of every method on validation examples before, over 0.1 to 10 times its
            own and beyond where the best is at the edge; "none" does not, and the results say so; or fields with the values
            to try or their range: {"lr": [0.01, 0.1]}, {"lr": [0.01, 0.1, ...]} (and beyond), {"lr": "0.001..0.3"}.
        trials: runs a method has in that search, by Optuna (extra `tune`); None tries every combination of the values.
        parallel: runs at once, each in a process of its own; "auto" is one per core where a round has few clients.
        references: puts scores of simple models and of all data pooled (`polyfed.comparison.references`) next to methods.
        title: for headings.
        callbacks: as for `federate`, called in each run that is compared, not in those of the search.
        progress, quiet: as for `federate`; a `Progress` gets a sentence for each finished run as well.

    Raises:
        UserError: what `federate` refuses, methods with unequal local training, or clients that suit `local` alone.
        ClientError, RoundError: every method that federates failed, the first as this error says.

    >>> from polyfed.testing import small_clients
    >>> comparison = compare(small_clients(2), ["fedprox"], rounds=1, seeds=[0], tune="none", references=False, quiet=True)
    >>> [row["method"] for row in comparison.table()]
    ['local', 'fedavg', 'fedavg_ft', 'fedprox']
    """
    display = resolve_own_progress(progress, quiet=quiet)
    seeds, resplit, target = numpy_to_python(seeds), numpy_to_python(resplit), numpy_to_python(target)
    tune, trials, parallel = numpy_to_python(tune), numpy_to_python(trials), numpy_to_python(parallel)
    fold_design = build_folds(numpy_to_python(folds), numpy_to_python(fold_repeats))
    if is_whole_number(resplit, MAX_RUNS + 1):
        raise UserError(f"resplit must be at most {MAX_RUNS}, got {resplit}")
    if seeds is None:
        num_runs = DEFAULT_NUM_SEEDS if resplit is None else resplit
        num_runs = num_runs if fold_design is None else fold_design.num_runs
        seeds = range(num_runs) if isinstance(num_runs, int) else ()
    if is_whole_number(seeds, 1) and seeds <= MAX_RUNS:  # a larger one is meant as a seed, and is refused below
        seeds = range(seeds)
    if isinstance(seeds, Iterator):
        seeds = tuple(seeds)
    if not isinstance(seeds, list | tuple | range):
        raise UserError(f"seeds must be different whole numbers, such as [0, 1, 2], or how many, got {seeds!r}")
    settings = Settings(
        rounds=rounds, clients_per_round=clients_per_round, engine=engine, workers=workers, ray_address=ray_address,
        gpus_per_worker=gpus_per_worker, device=device, evaluate_every=evaluate_every, checkpoint_every=checkpoint_every,
        evaluate_clients=evaluate_clients,  # type: ignore[arg-type]  # a list
        on_error=on_error, min_replies=min_replies, secure=secure, regions=regions, cross_site=cross_site,
        compress=compress, compress_down=compress_down,  # type: ignore[arg-type]  # which they become
        **describe_scheduling(sampler, speeds, bandwidth, availability, asynchronous, trusts_sampler_class=True),
    )  # fmt: skip
    pool = None if public is None else as_examples(public, "public", labelled=False)
    search_space = hyperparameter_search.parse_search_space(tune, trials)
    networks: dict[str, Architecture] | None = None
    if is_client_source(clients):
        divides = resplit is not None or fold_design is not None
        client_sets = dict.fromkeys(
            seeds,
            make_client_set_of_source(
                cast(ClientSource, clients),
                settings,
                pool,
                seeds[0],
                divides_examples=divides,
                searches=search_space is not None,
            ),
        )
    else:
        client_list = list_clients(clients)
        networks = {client.id: client.model for client in client_list if client.model is not None}
        clients_by_seed = redraw_clients(client_list, resplit, fold_design, seeds) or [tuple(client_list)] * len(seeds)
        client_sets = {
            seed: ClientSet(tuple(sets), apply_common_preprocessing_to_public(pool, sets), class_names_of(client_list))
            for seed, sets in zip(seeds, clients_by_seed, strict=True)
        }
    is_single = isinstance(metrics, str | Metric) or callable(metrics)
    metric_list = () if metrics is None else (metrics,) if is_single else tuple(metrics)
    selected = select_methods(algorithms, like)
    plan = ComparisonPlan(
        title=title,
        methods=selected,
        unasked=labels_added_by_default(selected, algorithms),
        seeds=tuple(seeds),
        settings=settings,
        build_client_set=client_sets.__getitem__,
        criteria=ResultCriteria(Budget.from_text(budget), target),
        out=None if out is None else expand_user_path(out, "out"),
        parallel_runs=parallel,
        search_space=search_space,
        num_trials=trials,
        quiet=quiet or progress is False,
        progress=display,
        metrics=metric_list,
        num_resplits=resplit,
        folds=fold_design,
        stop_when_decided=stop_when_decided,
        forecast_only=plan_only,
        with_references=references,
        callbacks=validate_callbacks(callbacks),
    )
    return dataclasses.replace(run_comparison(plan), networks=networks)


@limit_leak_warnings()
def run_comparison(plan: ComparisonPlan) -> Comparison:
    """Executes the runs of a plan that are not finished, and returns the `Comparison` of all.

    Raises:
        UserError, ClientError, RoundError: as for `compare`; complete runs are kept.
        Interrupted: Ctrl-C.
        OSError: a full disk, say; complete runs are kept.
    """
    if plan.out is None or plan.forecast_only:
        return run_until_decided(plan, _run_with_display)
    again = (
        f"`polyfed compare {quote(str(plan.out))}`" if plan.experiment else f"the same call with out={str(plan.out)!r}"
    )
    try:
        return run_until_decided(plan, _run_with_display)
    except (KeyboardInterrupt, OSError) as stop:
        if not (plan.out / comparison_directory.DESCRIPTION).exists():  # nothing has been trained
            raise
        with add_resume_hint_if_disk_full(again):
            if isinstance(stop, OSError):
                raise
        raise RunInterrupt(f"interrupted; the complete rounds are saved: continue with {again}") from stop


def _run_with_display(plan: ComparisonPlan) -> Comparison:
    with open_runs_display(plan.progress, quiet=plan.quiet) as display, ExitStack() as open_files:
        return _run_comparison(dataclasses.replace(plan, display=display), open_files)


def _run_comparison(plan: ComparisonPlan, open_files: ExitStack) -> Comparison:
    # Dividing may read and decode whole data sets.
    plan = dataclasses.replace(plan, build_client_set=lru_cache(maxsize=1)(plan.build_client_set))
    with collect_data_warnings() as data_warnings:
        first_client_set = plan.build_client_set(plan.seeds[0])
        task = first_client_set.clients[0].task
        panel = draw_panel(
            plan.settings, first_client_set.ids, plan.seeds[0], divides_examples=bool(plan.folds or plan.num_resplits)
        )
        if plan.folds is not None:
            panel = panel.without_small_clients(first_client_set.clients, plan.folds.number)
        plan = dataclasses.replace(plan, panel=panel)
        metrics = resolve_metrics(plan.metrics or task.comparison_metrics, task)
        plan = dataclasses.replace(plan, metrics=metrics)
        plan.criteria.check_target(metrics[0].unit)
        hyperparameter_search.validate_search(plan)
        plan = dataclasses.replace(plan, search_budget=initial_search_budget(plan))
        description, data, class_names = describe_comparison(plan)
    methods = {label: plan.methods[label] for label in description["methods"]}
    if plan.forecast_only:
        return forecast_cost_and_detectable_gain(plan, methods, description)
    plan.display.set_expected_runs(*count_final_and_search_runs(plan, methods))
    for sentence in () if plan.is_later_look else describe_too_few_planned_rounds(plan):
        plan.display.say(keep_advice_for_this_process(sentence))
    if plan.out is not None:
        open_files.enter_context(lock_comparison(plan.out))
        comparison_directory.write_description(plan.out, description, plan.criteria)
    methods, runs, failed = run_final_methods(plan, methods, description)
    methods = {label: method for label, method in methods.items() if label not in failed}
    if all(isinstance(method, Local) for method in methods.values()):
        if plan.out is not None:
            reasons = {label: str(error) for label, error in failed.items()}
            comparison_directory.write_description(plan.out, {**description, "failed": reasons}, plan.criteria)
        raise next(iter(failed.values()))
    references = (
        fit_references(plan, methods, description["fingerprints"]) if plan.with_references else FittedReferences()
    )
    description["failed"] = {label: str(error) for label, error in failed.items()}
    description["methods"] = {label: method_fields(method) for label, method in methods.items()}
    description["reference"] = reference_label(methods)
    runs = {run: finished_run for run, finished_run in runs.items() if run[0] in methods}
    rounds_by_run = select_compared_rounds_of_local_runs(plan, methods, runs, data, description.get("tuning"))
    histories = {
        run: freeze_history_after(finished_run.history, rounds_by_run[run])
        if run in rounds_by_run
        else finished_run.history
        for run, finished_run in runs.items()
    }
    inputs = ResultInputs(
        description=description,
        client_sizes=data,
        class_names=class_names,
        histories=histories,
        metric=plan.metrics[0],
        outputs=lambda label, seed, client, n: runs[label, seed].test_outputs(
            client, rounds_by_run.get((label, seed), {}).get(client, n)
        ),
        targets=lambda seed, client: _test_set(plan, seed, client).labels.cpu(),
        references=references.references,
        left_out=references.left_out,
        reference_outputs=lambda name, seed, client: references.outputs[name][seed][client],
        data_warnings=data_warnings,
        paths={
            run: finished_run.folder.relative_to(plan.out).as_posix()
            for run, finished_run in runs.items()
            if finished_run.folder and plan.out
        },
        groups=lambda seed, client: group_numbers(_test_set(plan, seed, client)),
        fold_tests=collect_test_examples_of_folds(plan),
        alpha=plan.alpha,
        has_standardised_targets=any(
            part.target for part in table_preprocessors_by_part(first_client_set.clients[0].train).values()
        ),
    )
    plan.display.show_stage("intervals")
    content = build_results(inputs, plan.criteria)
    for sentence in content["warnings"]:
        logging.getLogger("polyfed.comparison").warning("%s", keep_advice_for_this_process(sentence))
    if plan.out is not None:
        content["computed_from"] = hash_compared_files(plan.out, content)
        write_comparison_results(plan.out, content)
    return Comparison(content, plan.out)


def _test_set(plan: ComparisonPlan, seed: int, client: str) -> Examples:
    return next(c.test for c in plan.build_client_set(seed).clients if c.id == client)
