"""The runs that are compared: each method with what a search found for it, and with the next best where that diverges.

A search has the first seed alone, so that its best learning rate may be at the edge of what a method can bear, and diverge
with another seed. The next best of the search is then taken for all seeds, as often as there is one. Test examples have no
say in that. The directory of the first choice is `METHOD/seed-K`, of another `METHOD/FIELDS/seed-K`.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.comparison import tuning
from polyfed.comparison.plans import Failure, Job, Method, Plan, Played, play
from polyfed.simulation.settings import Keep


def compared(
    plan: Plan, methods: Mapping[str, Method], description: dict[str, Any]
) -> tuple[dict[str, Method], dict[tuple[str, int], Played], dict[str, Failure]]:
    """The methods as they are compared, their runs by label and seed, and why methods failed. The search, if there is one,
    is put into the description.

    Args:
        plan, methods: what is compared.
        description: the content of `comparison.yaml`.
    """
    searched = None
    if plan.search is not None:
        searched = tuning.search(plan, methods, alike=description["same_clients"])
    failed = {} if searched is None else searched.failed
    places = Counter[tuning.Place]()  # of what is compared in the ranking of the search
    found, runs = dict(methods), dict[tuple[str, int], Played]()
    while True:
        if searched is not None:
            found, description["tuning"] = searched.chosen(places)
        jobs = [
            Job(label, method, seed, _folder(plan, label, searched, places, seed),
                description["fingerprints"][str(seed)], _kept(plan, label, description.get("tuning")))
            for seed in plan.seeds
            for label, method in found.items()
            if label not in failed and (label, seed) not in runs
        ]  # fmt: skip
        played, lost = play(plan, jobs) if jobs else ({}, {})
        runs |= {(job.label, job.seed): one for job, one in played.items()}
        again = set[tuning.Place]()
        for job, failure in lost.items():
            place = None if searched is None else searched.next_place(job.label, failure, places)
            if place is not None:
                again.add(place)
            else:
                failed.setdefault(job.label, failure)
        again = {place for place in again if place[0] not in failed}
        if not again:
            return found, runs, failed
        places.update(again)
        runs = {run: one for run, one in runs.items() if run[0] not in {label for label, _ in again}}


def _folder(
    plan: Plan, label: str, searched: tuning.Searched | None, places: Mapping[tuning.Place, int], seed: int
) -> Path | None:
    if plan.out is None:
        return None
    return plan.out / label / ("" if searched is None else searched.folder(label, places)) / f"seed-{seed}"


def _kept(plan: Plan, label: str, searched: Mapping[str, Any] | None) -> Keep:
    """The round whose models a run keeps: the one at which it is compared unless a budget is the question."""
    if searched is not None and "rounds" in searched:
        return searched["rounds"].get(label) or "last"
    return "loss" if any(c.val is not None for c in plan.cast(plan.seeds[0]).clients) else "last"
