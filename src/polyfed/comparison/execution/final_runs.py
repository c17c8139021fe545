"""Runs each method with the hyper-parameters that a search chose for it, and with the next best ones if the training
diverges.

A search has the first seed alone, so that its best learning rate may be at the edge of what a method can bear, and diverge
with another seed. The next best of the search is then taken for all seeds, as often as there is one. Test examples have no
say in that. The directory of the first choice is `METHOD/seed-K`, of another `METHOD/FIELDS/seed-K`.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

from polyfed.comparison.execution.training_runs import Failure, FinishedRun, RunSpec, execute_or_load_runs
from polyfed.comparison.plan import ComparisonPlan, Method
from polyfed.comparison.tuning import hyperparameter_search
from polyfed.comparison.tuning.search_result import HyperparameterOwner, SearchResult
from polyfed.simulation.settings import Keep


@final
class FinalRuns(NamedTuple):
    """Holds by label the methods with their final fields, the finished runs by seed, and the errors."""

    methods: dict[str, Method]
    runs: dict[tuple[str, int], FinishedRun]
    failures: dict[str, Failure]


def run_final_methods(plan: ComparisonPlan, methods: Mapping[str, Method], description: dict[str, Any]) -> FinalRuns:
    """Trains every method with its best fields for all seeds; adds any search to `description`.

    Args:
        plan, methods: what is compared.
        description: the content of `comparison.yaml`.
    """
    search_result = None
    if plan.search_space is not None:
        search_result = hyperparameter_search.run_search(plan, methods, has_same_clients=description["same_clients"])
    failed = {} if search_result is None else search_result.failed_methods
    rank_by_choice = Counter[HyperparameterOwner]()  # of what is compared in the ranking of the search
    final_methods, runs = dict(methods), dict[tuple[str, int], FinishedRun]()
    while True:
        if search_result is not None:
            final_methods, description["tuning"] = search_result.set_chosen_fields_in_methods(rank_by_choice)
        jobs = [
            RunSpec(label, method, seed, _run_folder(plan, label, search_result, rank_by_choice, seed),
                _fingerprint_of_run(plan, method, description["fingerprints"][str(seed)]),
                _round_to_keep(plan, label, description.get("tuning")))
            for seed in plan.seeds
            for label, method in final_methods.items()
            if label not in failed and (label, seed) not in runs
        ]  # fmt: skip
        finished_runs, failures = execute_or_load_runs(plan, jobs, plan.callbacks) if jobs else ({}, {})
        runs |= {(job.label, job.seed): finished_run for job, finished_run in finished_runs.items()}
        to_repeat = set[HyperparameterOwner]()
        for job, failure in failures.items():
            next_choice = (
                None
                if search_result is None
                else search_result.find_failed_choice_to_replace(job.label, failure, rank_by_choice)
            )
            if next_choice is not None:
                to_repeat.add(next_choice)
            else:
                failed.setdefault(job.label, failure)
        to_repeat = {next_choice for next_choice in to_repeat if next_choice.label not in failed}
        if not to_repeat:
            return FinalRuns(final_methods, runs, failed)
        rank_by_choice.update(to_repeat)
        runs = {
            run: finished_run for run, finished_run in runs.items() if run[0] not in {label for label, _ in to_repeat}
        }


def _run_folder(
    plan: ComparisonPlan,
    label: str,
    search_result: SearchResult | None,
    rank_by_choice: Mapping[HyperparameterOwner, int],
    seed: int,
) -> Path | None:
    if plan.out is None:
        return None
    return (
        plan.out
        / label
        / ("" if search_result is None else search_result.subfolder_of_final_runs(label, rank_by_choice))
        / f"seed-{seed}"
    )


def _fingerprint_of_run(plan: ComparisonPlan, method: Method, fingerprint: str) -> str:
    """Returns the fingerprint of a run's clients: all, or from a source only those that train alone."""
    first_client_set = plan.build_client_set(plan.seeds[0])
    return fingerprint if first_client_set.source is None else first_client_set.fingerprint_of_run(method)


def _round_to_keep(plan: ComparisonPlan, label: str, tuning_entry: Mapping[str, Any] | None) -> Keep:
    """Returns whose round's models a run keeps: the search's, that of the lowest validation loss, or the last."""
    if tuning_entry is not None and "rounds" in tuning_entry:
        return tuning_entry["rounds"].get(label) or "last"
    return "loss" if any(c.val is not None for c in plan.build_client_set(plan.seeds[0]).clients) else "last"
