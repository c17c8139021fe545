"""Forecasts, before a comparison starts, how long it takes and how small a gain it can decide, from a pilot of four
short runs: two methods with two seeds each."""

import dataclasses
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.algorithms import Local
from polyfed.comparison.execution.process_pool import default_parallel_runs
from polyfed.comparison.execution.training_runs import RunSpec, execute_or_load_runs
from polyfed.comparison.plan import ComparisonPlan, Method
from polyfed.comparison.planning.plan_description import describe_too_few_planned_rounds
from polyfed.comparison.references.reference_models import fit_client_references
from polyfed.comparison.statistics.cross_validation.fold_differences import FoldDifferences, difference_over_folds
from polyfed.comparison.statistics.cross_validation.fold_influence import score_folds
from polyfed.comparison.statistics.power import (
    POWER,
    ComparisonDesign,
    PilotVariances,
    estimate_pilot_variances,
    smallest_decidable_gain,
)
from polyfed.comparison.storage.comparison import Comparison
from polyfed.comparison.tuning import hyperparameter_search
from polyfed.comparison.verdicts.verdict_sentences import format_difference, name_score_of_difference
from polyfed.core.errors import UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.io.text.number_format import format_time_left
from polyfed.data.partitioning.folds import describe_small_clients, unit_names
from polyfed.data.partitioning.resplit import check_disjoint, check_untimed
from polyfed.simulation.checks.fingerprints import data_fingerprint

_PILOT_RUNS = 4
_PILOT_CLIENTS = 4  # whose simple models are fitted to measure how long they take
_WORTHWHILE = 0.9  # a design that decides a gain of less than this share of another's is worth its runs


def forecast_cost_and_detectable_gain(
    plan: ComparisonPlan, methods: Mapping[str, Method], description: Mapping[str, Any]
) -> Comparison:
    """Forecasts runs, minutes and the smallest decidable gain from a short pilot, which leaves no file.

    The pilot trains `local` and the first method that federates with two seeds on the data of the first run, without a
    search.

    Args:
        plan: the plan of the comparison, with resolved metrics.
        methods: label -> method, those that suit the clients.
        description: of the comparison: the methods that do not suit the clients, and the fingerprints of the data.

    Returns:
        A comparison without methods. `results["plan"]` has the numbers; `verdicts` are sentences.
    """
    skipped = description["skipped"]
    label = next((label for label, method in methods.items() if not isinstance(method, Local)))
    local = next((label for label, method in methods.items() if isinstance(method, Local)))
    with _open_pilot_folder(plan) as folder:
        start = time.monotonic()
        pilot, judged = _run_pilot(plan, methods, (label, local), folder)
        parallel = _num_parallel_runs(plan)
        seconds = (time.monotonic() - start) * min(parallel, _PILOT_RUNS) / _PILOT_RUNS
    num_runs, num_tried = count_final_and_search_runs(plan, methods)
    design, metric = _describe_design(plan, judged), plan.metrics[0]
    forecast: dict[str, Any] = {"runs": num_runs, "search_runs": num_tried, "seconds_per_run": seconds}
    num_splits = len(set(description["fingerprints"].values()))
    total_seconds = (num_runs + num_tried) * seconds + num_splits * _seconds_of_simple_models(plan)
    pooled_seconds = seconds if plan.with_references else 0.0  # one network on the data of all clients, at the end
    forecast["minutes"] = (total_seconds / parallel + pooled_seconds) / 60
    forecast |= {"pilot": [label, local], "score": metric.name, "power": POWER, "designs": {}}
    if pilot is not None:
        forecast["designs"] = {
            name: dict(zip(("mean", "client"), smallest_decidable_gain(pilot, other), strict=True))
            | {"runs": other.runs}
            for name, other in _possible_designs(design, with_folds=_can_split_into_folds(plan)).items()
        }
    sentences = [
        *_describe_forecast(forecast, metric, len(methods)),
        *describe_too_few_planned_rounds(plan),
        *([plan.panel.describe().removesuffix(".")] if plan.panel.too_small else []),
        *(f"left out: {reason}" for reason in skipped.values()),
    ]
    return Comparison(
        {"plan": forecast, "verdicts": sentences, "methods": {}, "seeds": list(plan.seeds), "skipped": dict(skipped)}
    )


@contextmanager
def _open_pilot_folder(plan: ComparisonPlan) -> Iterator[Path | None]:
    """Yields a temporary folder beside the comparison's directory; None if it has no directory."""
    if plan.out is None:
        yield None
        return
    beside = next(parent for parent in plan.out.absolute().parents if parent.is_dir())
    with tempfile.TemporaryDirectory(dir=beside if os.access(beside, os.W_OK) else None, prefix=".pilot-") as folder:
        yield Path(folder)


def _run_pilot(
    plan: ComparisonPlan, methods: Mapping[str, Method], labels: tuple[str, str], folder: Path | None
) -> tuple[PilotVariances | None, list[int]]:
    """Trains the pilot's runs, as many at a time as the comparison does, and estimates variances from them.

    Args:
        plan: of the comparison.
        methods: label -> method.
        labels: of the two methods that are trained.
        folder: where the runs write checkpoints and predictions, as those of the comparison do; None keeps all in memory.

    Returns:
        The variances, None where the methods have no score, or never differ; and the positions of the clients that they
        are of, those in which both methods have a score.
    """
    first = plan.build_client_set(plan.seeds[0])
    seeds = (plan.seeds[0], max(plan.seeds) + 1)
    fingerprint = data_fingerprint(first.clients, first.public)
    jobs = {
        (label, seed): RunSpec(
            label, methods[label], seed, None if folder is None else folder / f"{label}-{seed}", fingerprint
        )
        for label in labels
        for seed in seeds
    }
    pilot = dataclasses.replace(
        plan, out=folder, build_client_set=lambda seed: first, callbacks=(),
        folds=None, num_resplits=None, stop_when_decided=False,  # all on one split, so that runs are shown by their seeds
    )  # fmt: skip
    finished, failed = execute_or_load_runs(pilot, list(jobs.values()))
    if failed:
        raise next(iter(failed.values()))
    differences, judged = [], []
    for position, client in enumerate(first.clients):
        units, targets = unit_names(client.test), client.test.labels.cpu()
        scores = []
        for label in labels:
            outputs = [finished[jobs[label, seed]].test_outputs(client.id, plan.settings.rounds) for seed in seeds]
            defined = [seed_outputs for seed_outputs in outputs if seed_outputs is not None]
            scores.append(
                score_folds(plan.metrics[0], defined, [targets] * 2, [units] * 2, 1) if len(defined) == 2 else None
            )
        if scores[0] is not None and scores[1] is not None and len(np.unique(units)) > 1:
            differences.append(_without_floor(difference_over_folds(scores[0], scores[1])))
            judged.append(position)
    variances = estimate_pilot_variances(differences) if differences else None
    if variances is not None and max(variances.examples) == 0:  # methods that never differ
        return None, judged
    return variances, judged


def _seconds_of_simple_models(plan: ComparisonPlan) -> float:
    """Returns how long the simple models of all clients take for one split, measured on the first clients."""
    clients = plan.panel.select(plan.build_client_set(plan.seeds[0]).clients)
    if not plan.with_references or not clients:
        return 0.0
    fit_client_references(clients[:1], seed=plan.seeds[0])  # which imports what it needs, once and for all splits
    start = time.monotonic()
    fit_client_references(clients[:_PILOT_CLIENTS], seed=plan.seeds[0])
    return (time.monotonic() - start) * len(clients) / len(clients[:_PILOT_CLIENTS])


def _without_floor(difference: FoldDifferences) -> FoldDifferences:
    return dataclasses.replace(difference, min_example_variance=0.0)


def count_final_and_search_runs(plan: ComparisonPlan, methods: Mapping[str, Method]) -> tuple[int, int]:
    """Returns how many runs are compared, and how many runs a search needs at least."""
    final = len(plan.seeds) * len(methods)
    if plan.search_space is None:
        return final, 0
    tried = [
        len(hyperparameter_search.build_search_variants(plan, method)) if plan.num_trials is None else plan.num_trials
        for method in methods.values()
    ]
    return final, sum(tried)


def _num_parallel_runs(plan: ComparisonPlan) -> int:
    if plan.parallel_runs != "auto":
        return plan.parallel_runs
    return default_parallel_runs(plan.settings, len(plan.build_client_set(plan.seeds[0]).ids))


def _describe_design(plan: ComparisonPlan, judged: Sequence[int]) -> ComparisonDesign:
    clients = plan.build_client_set(plan.seeds[0]).clients
    units, tested = [], []
    for client in (clients[position] for position in judged):
        parts = [part for part in (client.train, client.val, client.test) if part is not None]
        units.append(sum(len(np.unique(unit_names(part))) for part in parts))
        tested.append(len(np.unique(unit_names(client.test))))
    kind = "seeds" if plan.num_resplits is None else "resplit"
    folds = len(plan.seeds)
    if plan.folds is not None:
        kind, folds = "folds", plan.folds.number
    return ComparisonDesign(kind, len(plan.seeds), folds, tuple(units), tuple(tested))


def _can_split_into_folds(plan: ComparisonPlan) -> bool:
    """Returns whether a comparison with as many folds as planned runs would take these clients, and test each of them."""
    client_set, num_folds = plan.build_client_set(plan.seeds[0]), max(len(plan.seeds), 2)
    try:
        check_untimed(client_set.clients, "folds")
        check_disjoint(client_set.clients, "folds")
    except UserError:
        return False
    return client_set.source is None and not describe_small_clients(client_set.clients, num_folds)


def _possible_designs(design: ComparisonDesign, *, with_folds: bool) -> dict[str, ComparisonDesign]:
    """Returns the planned design and those that might be better: more runs of the same kind, and folds."""
    doubled = dataclasses.replace(design, runs=2 * design.runs)
    if design.kind == "folds":
        repeats = design.runs // design.folds
        return {
            f"folds={design.folds}, fold_repeats={repeats}": design,
            f"folds={design.folds}, fold_repeats={2 * repeats}": doubled,
        }
    name = {"seeds": "{} seeds", "resplit": "resplit={}"}[design.kind]
    folds = max(design.runs, 2)
    designs = {
        name.format(design.runs): design,
        name.format(2 * design.runs): dataclasses.replace(doubled, folds=doubled.runs),
    }
    if with_folds:
        designs[f"folds={folds}"] = dataclasses.replace(design, kind="folds", runs=folds, folds=folds)
    return designs


def _describe_forecast(forecast: Mapping[str, Any], metric: Metric, num_methods: int) -> list[str]:
    duration = f"about {format_time_left(60 * forecast['minutes']).removesuffix(' left')}"
    searched = f", and {forecast['search_runs']} or more to search hyper-parameters" if forecast["search_runs"] else ""
    sentences = [
        f"{num_methods} methods: {forecast['runs']} runs{searched}: {duration}, roughly (if all runs take as long as the "
        f"pilot's, of {' and '.join(forecast['pilot'])}; methods with larger messages take longer)"
    ]
    if not forecast["designs"]:
        why = "its two methods had the same results on all test examples, or no score"
        return [*sentences, f"which gains can be decided is not known from the pilot: {why}; more rounds may tell"]
    scored = name_score_of_difference(metric.unit, metric.label)
    for name, entry in forecast["designs"].items():
        mean, client = (format_difference(entry[scope], metric.unit) for scope in ("mean", "client"))
        sentences.append(
            f"{name} ({entry['runs']} runs of each method): decides a mean gain of {mean}{scored}, or a gain of {client} "
            f"at one client, with a probability of {100 * forecast['power']:.0f} %"
        )
    return [*sentences, _advise_on_designs(forecast["designs"])]


def _advise_on_designs(designs: Mapping[str, Mapping[str, Any]]) -> str:
    names: Sequence[str] = list(designs)
    planned = designs[names[0]]
    best = min(names[1:], key=lambda name: designs[name]["mean"] * math.sqrt(designs[name]["runs"]))
    if designs[best]["mean"] < _WORTHWHILE * planned["mean"]:
        return f"{best} would decide more; the pilot is small, so these numbers are rough"
    return "more runs would add little: only more test examples would; the pilot is small, so these numbers are rough"
