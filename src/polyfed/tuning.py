"""Hyper-parameters of a comparison, searched on validation examples: every combination of the values given.

Each combination is a run with the first seed; the best mean validation score after the last round wins, of equals the first.
Test examples have no say. Every method gets the same number of runs, of those fields that it has.
"""

import dataclasses
from collections.abc import Mapping
from itertools import product
from typing import Any

from polyfed.errors import UserError, nearest
from polyfed.evaluation import SCORE
from polyfed.plans import EQUAL, Job, Method, Plan, play
from polyfed.runs.checkpoint import file_name

FOLDER = "tuning"  # of the comparison directory: METHOD/FIELDS, one run directory each


def check(plan: Plan) -> None:
    """Raises a `UserError` if there are no validation examples, or a field may not or cannot be searched."""
    for name, values in (plan.search or {}).items():
        if name in EQUAL:
            raise UserError(f"{name} cannot be searched: methods are compared with equal local training")
        if isinstance(values, str) or not values:
            raise UserError(f"the values to try for {name} must be a list of at least one, got {values!r}")
        known = {f.name for method in plan.methods.values() for f in _fields(method)}
        if name not in known:
            raise UserError(f"no method of the comparison has a field {name!r} to search; {nearest(name, known)}")
        for method in plan.methods.values():
            if name in {f.name for f in _fields(method)}:
                for value in values:
                    dataclasses.replace(method, **{name: value})  # type: ignore[type-var]  # which checks the value
    without = [c.id for c in plan.cast(plan.seeds[0]).clients if c.val is None]
    if without:
        raise UserError(
            f"hyper-parameters are searched on validation examples, and client {without[0]!r} has none; give val=... "
            "(Client) or --data.val_fraction 0.2"
        )


def search(plan: Plan, methods: Mapping[str, Method]) -> tuple[dict[str, Method], dict[str, Any]]:
    """The methods with what was found best for each, and the search as `comparison.json` tells it.

    Raises:
        UserError: no run of a method has a validation score.
    """
    seed = plan.seeds[0]
    jobs: list[tuple[str, dict[str, Any], Job]] = []
    for label, method in methods.items():
        for fields in _grid(plan, method):
            name = ",".join(f"{key}={value}" for key, value in fields.items())
            folder = None if plan.out is None else plan.out / FOLDER / label / file_name(name)
            changed = dataclasses.replace(method, **fields)  # type: ignore[type-var]
            jobs.append((label, fields, Job(f"{label} with {name}", changed, seed, folder)))
    histories = play(plan, [job for _, _, job in jobs]) if jobs else {}
    column = f"val_{SCORE[plan.cast(seed).clients[0].task]}"
    found, told = dict(methods), dict[str, Any]()
    for label in methods:
        tried = [
            (fields, job, histories[job][-1]["summary"].get(column, {}).get("mean"))
            for owner, fields, job in jobs
            if owner == label
        ]
        scored = [(fields, job, value) for fields, job, value in tried if value is not None]
        if tried and not scored:
            raise UserError(f"no run of {label} in the search has a validation score")
        best = max(scored, key=_validation, default=None)
        if best is not None:
            found[label] = best[1].method
        told[label] = {
            "chosen": {} if best is None else best[0],
            "runs": len(tried),
            "tried": [{"fields": fields, "validation": value} for fields, _, value in tried],
        }
    names = ", ".join(plan.search or {})
    sentence = (
        f"{names}: for each method {max(entry['runs'] for entry in told.values())} runs at most of "
        f"{plan.settings.rounds} rounds with seed {seed}, chosen by the mean validation score after the last"
    )
    return found, {"told": sentence, "by": "validation", "methods": told}


def _validation(tried: tuple[Any, Any, Any]) -> float:
    return float(tried[2])


def _fields(method: Method) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(method)  # type: ignore[arg-type]


def _grid(plan: Plan, method: Method) -> list[dict[str, Any]]:
    own = {f.name for f in _fields(method)}
    searched = {name: values for name, values in (plan.search or {}).items() if name in own}
    return [dict(zip(searched, values, strict=True)) for values in product(*searched.values())] if searched else []
