"""Runs each method with the hyper-parameters that a search chose for it, and with the next best ones if the training
diverges.

A search has the first seed alone, so that its best learning rate may be at the edge of what a method can bear, and diverge
with another seed. The next best of the search is then taken for all seeds, as often as there is one. Test examples have no
say in that. The directory of the first choice is `METHOD/seed-K`, of another `METHOD/FIELDS/seed-K`.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.comparison.plan import ComparisonPlan, Failure, FinishedRun, Method, RunSpec, run_jobs
from polyfed.comparison.tuning import hyperparameter_search
from polyfed.comparison.tuning.search_result import ChoiceKey, SearchResult
from polyfed.simulation.settings import Keep


def run_final_methods(
    plan: ComparisonPlan, methods: Mapping[str, Method], description: dict[str, Any]
) -> tuple[dict[str, Method], dict[tuple[str, int], FinishedRun], dict[str, Failure]]:
    """Trains every method with its best hyper-parameters, for all seeds; adds the search, if there is one, to
    `description`.

    Returns the methods with their chosen fields, the finished runs by label and seed, and the failures by label.

    Args:
        plan, methods: what is compared.
        description: the content of `comparison.yaml`.
    """
    search_result = None
    if plan.search_space is not None:
        search_result = hyperparameter_search.run_search(plan, methods, has_same_clients=description["same_clients"])
    failed = {} if search_result is None else search_result.failed_methods
    rank_by_choice = Counter[ChoiceKey]()  # of what is compared in the ranking of the search
    final_methods, runs = dict(methods), dict[tuple[str, int], FinishedRun]()
    while True:
        if search_result is not None:
            final_methods, description["tuning"] = search_result.apply_choices(rank_by_choice)
        jobs = [
            RunSpec(label, method, seed, _run_folder(plan, label, search_result, rank_by_choice, seed),
                description["fingerprints"][str(seed)], _round_to_keep(plan, label, description.get("tuning")))
            for seed in plan.seeds
            for label, method in final_methods.items()
            if label not in failed and (label, seed) not in runs
        ]  # fmt: skip
        finished_runs, failures = run_jobs(plan, jobs, plan.callbacks) if jobs else ({}, {})
        runs |= {(job.label, job.seed): finished_run for job, finished_run in finished_runs.items()}
        to_repeat = set[ChoiceKey]()
        for job, failure in failures.items():
            next_choice = (
                None
                if search_result is None
                else search_result.next_choice_after_failure(job.label, failure, rank_by_choice)
            )
            if next_choice is not None:
                to_repeat.add(next_choice)
            else:
                failed.setdefault(job.label, failure)
        to_repeat = {next_choice for next_choice in to_repeat if next_choice[0] not in failed}
        if not to_repeat:
            return final_methods, runs, failed
        rank_by_choice.update(to_repeat)
        runs = {
            run: finished_run for run, finished_run in runs.items() if run[0] not in {label for label, _ in to_repeat}
        }


def _run_folder(
    plan: ComparisonPlan,
    label: str,
    search_result: SearchResult | None,
    rank_by_choice: Mapping[ChoiceKey, int],
    seed: int,
) -> Path | None:
    if plan.out is None:
        return None
    return (
        plan.out
        / label
        / ("" if search_result is None else search_result.run_folder_name(label, rank_by_choice))
        / f"seed-{seed}"
    )


def _round_to_keep(plan: ComparisonPlan, label: str, tuning_entry: Mapping[str, Any] | None) -> Keep:
    """Returns the round whose models a run keeps: the round that the search chose, the one with the lowest validation
    loss, or the last."""
    if tuning_entry is not None and "rounds" in tuning_entry:
        return tuning_entry["rounds"].get(label) or "last"
    return "loss" if any(c.val is not None for c in plan.build_client_set(plan.seeds[0]).clients) else "last"
