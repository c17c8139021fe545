"""Searches the hyper-parameters of all methods of a comparison on validation examples, with the same rule for every
method.

Without `trials` every combination of the given values is tried (grid search). If the best value of a field is then the
smallest or the largest, up to two further values are tried beyond it, unless the grid is closed. With `trials`,
Optuna's tree-structured Parzen estimator chooses that many runs for each method, also within ranges.

Each run has full length and the first seed; its directory is `DIR/tuning/METHOD/FIELDS`. The module `ranking` ranks
the runs. Methods whose clients train together have one choice, by the loss on all validation examples; each client of
`local`, which sends nothing, has its own choice, by the loss on its own examples. The loss is that at the round at
which methods are compared, or the lowest if the budget is "best". Neither test examples nor the metric that decides
are used. A run that diverges counts as tried, and cannot win. If the winner diverges with another seed, the next best
is compared in its place.

Where clients have no validation examples, a fifth of their training examples is held out for the search alone. The
round of the lowest loss is then the round at which the method, or the client of `local`, is compared, and the final
runs train on all training examples. The results say how many runs each method had.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from polyfed.algorithms import Local
from polyfed.comparison.execution.training_runs import RunSpec, execute_or_load_runs
from polyfed.comparison.plan import TUNING_FOLDER, ComparisonPlan, Method
from polyfed.comparison.statistics.curves.learning_curve import build_learning_curve
from polyfed.comparison.tuning.grid import (
    EXTEND,
    EXTENDED_GRID,
    allows_values_beyond_listed,
    check_search_space,
    list_values_or_range_ends,
    next_value_beyond_edge,
    resolve_search_values,
)
from polyfed.comparison.tuning.optuna_search import OptunaSearch, import_optuna
from polyfed.comparison.tuning.ranking import Fields, SearchRun
from polyfed.comparison.tuning.search_result import MAX_EXTENSIONS, SearchResult, join_as_name_equals_value
from polyfed.core.errors import UserError
from polyfed.core.io.values.number_checks import MAX_RUNS, check_whole_number
from polyfed.data.partitioning.resplit import apply_common_preprocessing_to_public
from polyfed.data.partitioning.validation_split import hold_out_missing_validation_sets
from polyfed.simulation.storage.paths import safe_file_name

AUTO, NONE = "auto", "none"
DEFAULT_SEARCH_SPACE = {"lr": EXTENDED_GRID}
"""Fields that are searched by default: every method's learning rate, on a grid around its own value that may be extended."""


def trials_without_fields_error(trials: int) -> str:
    """Returns the error message for a user who gave `--trials` without any hyper-parameter to search."""
    return (
        f"trials={trials} searches nothing without fields and their values or ranges; give them too, as in "
        "tune={'lr': '0.001..0.3'} (--tune lr=0.001..0.3)"
    )


def validate_search(plan: ComparisonPlan) -> None:
    """Raises a `UserError` if there are no validation examples, or a field cannot be searched."""
    trials, space = plan.num_trials, plan.search_space
    if space is None:
        if trials is not None:
            raise UserError(trials_without_fields_error(trials))
        return
    if not isinstance(space, Mapping) or not space:
        raise UserError(f"tune must be fields with the values to try, as in {{'lr': [0.01, 0.1]}}, got {space!r}")
    if trials is not None:
        check_whole_number("trials", trials, 1, MAX_RUNS)
    check_search_space(space, trials, {f.name for method in plan.methods.values() for f in _fields_of_method(method)})
    for name, values in space.items():
        for method in plan.methods.values():
            if name in {f.name for f in _fields_of_method(method)}:
                for value in list_values_or_range_ends(name, resolve_search_values(method, name, values)):
                    dataclasses.replace(method, **{name: value})  # type: ignore[type-var]  # which checks the value
    if trials is not None:
        import_optuna()
    if not any(
        c.val is not None
        for c in hold_out_missing_validation_sets(plan.build_client_set(plan.seeds[0]).clients, plan.seeds[0])
    ):
        raise UserError(
            "hyper-parameters are searched on validation examples, and no client has any, or enough training examples to "
            "hold some out; give val=... (Client), --data.val-fraction 0.2, or tune='none' (--tune none)"
        )


def parse_search_space(tune: Any, trials: int | None = None) -> Mapping[str, Sequence[Any] | str] | None:
    """Returns `{field: values}` from `tune` and `trials`; None for no search.

    Raises:
        UserError: an unknown word, or `trials` without fields.

    >>> parse_search_space("auto"), parse_search_space("none"), parse_search_space({"mu": [0.1, 1, ...]})
    ({'lr': 'grid,...'}, None, {'mu': [0.1, 1, '...']})
    """
    if isinstance(tune, str):
        if tune not in (AUTO, NONE):
            raise UserError(
                f"tune must be 'auto', 'none', or fields with the values to try, as in {{'lr': [0.01, 0.1]}}, got {tune!r}"
            )
        if trials is not None:
            raise UserError(trials_without_fields_error(trials))
        return DEFAULT_SEARCH_SPACE if tune == AUTO else None
    if not isinstance(tune, Mapping):
        search_space: Mapping[str, Sequence[Any] | str] | None = tune  # None, or refused by `tuning.check`
        return search_space
    return {
        name: [EXTEND if value is ... else value for value in values] if isinstance(values, list | tuple) else values
        for name, values in tune.items()
    }


def run_search(plan: ComparisonPlan, methods: Mapping[str, Method], *, has_same_clients: bool) -> SearchResult:
    """Runs the search of all methods; the result chooses the best hyper-parameters.

    Args:
        plan: the plan of the comparison.
        methods: label -> method.
        has_same_clients: whether a client id names the same client with every seed.
    """
    client_set = plan.build_client_set(plan.seeds[0])
    held_out = any(c.val is None for c in client_set.clients)
    clients_with_validation = hold_out_missing_validation_sets(client_set.clients, plan.seeds[0])
    search_clients = dataclasses.replace(
        client_set,
        clients=clients_with_validation,
        public=apply_common_preprocessing_to_public(client_set.public, clients_with_validation),
        config={},
    )
    plan = dataclasses.replace(plan, build_client_set=lambda seed: search_clients)
    sizes = {c.id: 0 if c.val is None else len(c.val) for c in plan.panel.select(search_clients.clients)}
    result = SearchResult(plan, methods, {label: [] for label in methods}, sizes, held_out, has_same_clients)
    if plan.num_trials is None:
        candidates = [
            (label, fields) for label, method in methods.items() for fields in _all_combinations(plan, method)
        ]
        while candidates:
            result = result.with_runs_added(_run_candidates(result, candidates))
            candidates = [(label, fields) for label in methods for fields in _extended_candidates(result, label)]
    else:
        studies = {
            label: OptunaSearch(searched_values, plan.seeds[0])
            for label, method in methods.items()
            if (searched_values := _search_values(plan, method))
        }
        # One run of each method at a time, since Optuna's next suggestion depends on its score.
        for _ in range(plan.num_trials):
            new_runs = _run_candidates(result, [(label, study.suggest_fields()) for label, study in studies.items()])
            result = result.with_runs_added(new_runs)
            for search_run in new_runs:
                is_complete = (
                    search_run.ranking_loss is not None
                    and search_run.validation_losses_by_client.keys() == result.clients_with_loss
                )
                studies[search_run.label].report_score(
                    -search_run.ranking_loss[0] if is_complete and search_run.ranking_loss is not None else None
                )
    return result


def _extended_candidates(result: SearchResult, label: str) -> list[Fields]:
    """Returns the candidates beyond the edge of the grid: the best fields, with the next value of each field at its edge.

    Where clients have their own choices, the client with most validation examples decides on the other fields.
    """
    plan, method, runs = result.plan, result.methods[label], result.runs_by_label[label]
    candidates: list[Fields] = []
    for name, listed_values in _search_values(plan, method).items():
        if not allows_values_beyond_listed((plan.search_space or {})[name]):
            continue
        tried = {search_run.fields[name] for search_run in runs}
        is_integer = not any(f.name == name and "float" in str(f.type) for f in _fields_of_method(method))
        sides = set[bool]()
        for best in result.best_fields_of_method_or_each_client(label):
            upper = best[name] == max(tried)
            beyond = [value for value in tried if (value > max(listed_values) if upper else value < min(listed_values))]
            further = next_value_beyond_edge([*tried], best[name], is_integer) if len(beyond) < MAX_EXTENSIONS else None
            if further is None or upper in sides:
                continue
            sides.add(upper)
            try:
                dataclasses.replace(method, **{name: further})  # type: ignore[type-var]  # which checks the value
            except UserError:
                continue
            candidates.append({**best, name: further})
    return [fields for k, fields in enumerate(candidates) if fields not in candidates[:k]]


def _run_candidates(result: SearchResult, candidates: Sequence[tuple[str, Fields]]) -> list[SearchRun]:
    """Runs the method of each candidate (label, fields) with these fields, and returns the runs in that order."""
    plan, jobs = result.plan, []
    client_set = plan.build_client_set(plan.seeds[0])
    for label, fields in candidates:
        name, method = join_as_name_equals_value(fields), result.methods[label]
        folder = None if plan.out is None else plan.out / TUNING_FOLDER / label / safe_file_name(name)
        changed = dataclasses.replace(method, **fields)  # type: ignore[type-var]
        skips = isinstance(method, Local)  # a client that trains alone and diverges does not affect the others
        jobs.append(
            RunSpec(
                f"{label} with {name}", changed, plan.seeds[0], folder, client_set.fingerprint_of_run(method),
                keep_predictions=False, skip_failed_clients=skips,
            )
        )  # fmt: skip
    finished_runs, failed = execute_or_load_runs(plan, jobs) if jobs else ({}, {})
    runs = []
    for (label, fields), job in zip(candidates, jobs, strict=True):
        history = finished_runs[job].history if job in finished_runs else []
        failed_clients = frozenset(
            f["client"] for record in history for f in record["failures"] if not f.get("retried")
        )
        budget = plan.search_budget
        spent = (
            {point.round: getattr(point, budget.kind) for point in build_learning_curve(history, "")}
            if budget.limit is not None
            else {}
        )
        runs.append(
            SearchRun(
                label, fields, history, budget, result.num_validation, plan.metrics[0].name,
                failed_clients if job.skip_failed_clients else frozenset(), failed.get(job), spent,
            )
        )  # fmt: skip
    return runs


def _fields_of_method(method: Method) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(method)  # type: ignore[arg-type]


def build_search_variants(plan: ComparisonPlan, method: Method) -> list[Method]:
    """Returns copies of a method, one for each combination of the hyper-parameter values to try.

    With Optuna it is one for the low ends of all ranges and one for the high ends.
    """
    if plan.num_trials is None:
        tries = _all_combinations(plan, method)
    else:
        ends = {name: list_values_or_range_ends(name, values) for name, values in _search_values(plan, method).items()}
        tries = [{name: extremes[k] for name, extremes in ends.items()} for k in (0, -1)] if ends else []
    return [dataclasses.replace(method, **fields) for fields in tries]  # type: ignore[type-var]


def _search_values(plan: ComparisonPlan, method: Method) -> dict[str, Any]:
    """Returns the searched fields that the method has, with their values or range."""
    field_names = {f.name for f in _fields_of_method(method)}
    return {
        name: resolve_search_values(method, name, values)
        for name, values in (plan.search_space or {}).items()
        if name in field_names
    }


def _all_combinations(plan: ComparisonPlan, method: Method) -> list[Fields]:
    """Returns all combinations of the values to try for this method."""
    searched = _search_values(plan, method)
    return [dict(zip(searched, values, strict=True)) for values in product(*searched.values())] if searched else []
