"""Hyper-parameters of a comparison, searched on validation examples before it, by the same rule for every method.

Without `trials` every combination of the values given is tried, the small grid. Where the best is then the smallest or the
largest value, up to two further ones are tried beyond it, unless only those given were asked for. With `trials` there are
that many runs a method, chosen by Optuna's tree-structured Parzen estimator, also within ranges.

Each is a run of full length with the first seed. What wins is in module `choices`: methods whose clients train together have
one choice, by the loss on all validation examples; of `local`, which sends nothing, each client has a choice of its own, by
the loss on its own. The loss is that at the round at which methods are to be compared, or the lowest where that is theirs.
Test examples have no say, nor has the metric that decides. Where clients have no validation examples, a fifth of their
training examples is held out for the search alone: the round of the lowest loss is then the round at which the method, or
the client of `local`, is compared, and the final runs train on all of it. The results tell how many runs each method had. A
run that diverges counts as tried, and does not win. If what won diverges with another seed, the next best is compared in its
place. `DIR/tuning/METHOD/FIELDS` is the directory of each.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, final

from polyfed.algorithms import Local
from polyfed.comparison.plan import EQUAL_FIELDS, TUNING_FOLDER, ComparisonPlan, Failure, Method, RunSpec, run_jobs
from polyfed.comparison.statistics.learning_curve import build_learning_curve
from polyfed.comparison.tuning.grid import (
    EXTENDED_GRID,
    GRID,
    check_extension,
    is_number,
    may_extend,
    next_value_beyond_edge,
    resolve_search_values,
    values_to_check,
)
from polyfed.comparison.tuning.optuna_search import OptunaSearch, import_optuna
from polyfed.comparison.tuning.ranking import (
    POOLED_LOSS_WEIGHT,
    SMOOTHED_ROUNDS,
    Fields,
    SearchRun,
    freeze_losses_after,
    rank_runs,
    rank_runs_for_client,
)
from polyfed.comparison.verdicts.verdict_sentences import join_names
from polyfed.core.errors import ClientError, RoundError, UserError, did_you_mean
from polyfed.data.partitioning.resplit import prepare_public_like_clients
from polyfed.data.partitioning.validation_split import hold_out_validation_sets
from polyfed.simulation.checks.fingerprints import data_fingerprint
from polyfed.simulation.monitoring.validation_losses import pool_losses
from polyfed.simulation.storage.paths import safe_file_name

AUTO, NONE = "auto", "none"
DEFAULT_SEARCH_SPACE = {"lr": EXTENDED_GRID}
"""What is searched unless something else is asked for: every method's learning rate, around its own and beyond."""
_BEYOND = 2  # further values of a field, on either side
_LOSS = ("label_smoothing", "class_weights")  # fields that change what the loss means
_EACH = "by_client"  # field of `local` with what each client has chosen
ChoiceKey = tuple[str, str | None]  # a label, and a client that chooses alone


def no_fields_error(trials: int) -> str:
    """A sentence for an error."""
    return (
        f"trials={trials} searches nothing without fields and their values or ranges; give them too, as in "
        "tune={'lr': '0.001..0.3'} (--tune lr=0.001..0.3)"
    )


def validate_search(plan: ComparisonPlan) -> None:
    """Raises a `UserError` if there are no validation examples, or a field may not or cannot be searched."""
    trials, space = plan.num_trials, plan.search_space
    if space is None:
        if trials is not None:
            raise UserError(no_fields_error(trials))
        return
    if not isinstance(space, Mapping) or not space:
        raise UserError(f"tune must be fields with the values to try, as in {{'lr': [0.01, 0.1]}}, got {space!r}")
    if trials is not None and (isinstance(trials, bool) or not isinstance(trials, int) or trials < 1):
        raise UserError(f"trials must be a whole number of runs a method from 1, got {trials!r}")
    for name, values in space.items():
        if name in EQUAL_FIELDS:
            raise UserError(f"{name} cannot be searched: methods are compared with equal local training")
        if name in _LOSS:
            raise UserError(f"{name} cannot be searched: the search goes by the loss, whose meaning it changes; compare "
                            "methods with different values, each by a label of its own")  # fmt: skip
        if name == _EACH:
            raise UserError(f"{name} cannot be searched: it holds what each client has chosen; search the fields in it")
        if isinstance(values, str) and values not in (GRID, EXTENDED_GRID) and trials is None:
            raise UserError(f"the range {values!r} for {name} needs a number of runs a method, trials=20 (--trials 20), "
                            "or give the values to try")  # fmt: skip
        field_names = {f.name for method in plan.methods.values() for f in _fields(method)}
        if name not in field_names:
            raise UserError(
                f"no method of the comparison has a field {name!r} to search; {did_you_mean(name, field_names)}"
            )
        check_extension(name, values, trials)
        for method in plan.methods.values():
            if name in {f.name for f in _fields(method)}:
                for value in values_to_check(name, resolve_search_values(method, name, values)):
                    dataclasses.replace(method, **{name: value})  # type: ignore[type-var]  # which checks the value
    if trials is not None:
        import_optuna()
    if not any(
        c.val is not None for c in hold_out_validation_sets(plan.client_set(plan.seeds[0]).clients, plan.seeds[0])
    ):
        raise UserError(
            "hyper-parameters are searched on validation examples, and no client has any, or enough training examples to "
            "hold some out; give val=... (Client), --data.val-fraction 0.2, or tune='none' (--tune none)"
        )


def run_search(plan: ComparisonPlan, methods: Mapping[str, Method], *, alike: bool) -> "SearchResult":
    """Tries what is to be tried of each method; `has_same_clients`, whether an id is the same client in each seed."""
    client_set = plan.client_set(plan.seeds[0])
    held_out = any(c.val is None for c in client_set.clients)
    clients_with_validation = hold_out_validation_sets(client_set.clients, plan.seeds[0])
    search_clients = dataclasses.replace(
        client_set,
        clients=clients_with_validation,
        public=prepare_public_like_clients(client_set.public, clients_with_validation),
        config={},
    )
    plan = dataclasses.replace(plan, client_set=lambda seed: search_clients)
    data = data_fingerprint(search_clients.clients, search_clients.public)
    sizes = {c.id: 0 if c.val is None else len(c.val) for c in search_clients.clients}
    result = SearchResult(plan, methods, {label: [] for label in methods}, sizes, held_out, alike)
    if plan.num_trials is None:
        candidates = [
            (label, fields) for label, method in methods.items() for fields in _all_combinations(plan, method)
        ]
        while candidates:
            result = result.with_runs(_run_candidates(result, candidates, data))
            candidates = [(label, fields) for label in methods for fields in _extended_candidates(result, label)]
    else:
        studies = {
            label: OptunaSearch(of, plan.seeds[0])
            for label, method in methods.items()
            if (of := _search_values(plan, method))
        }
        for _ in range(plan.num_trials):  # one run of each method at a time: the next depends on what it found
            new_runs = _run_candidates(
                result, [(label, study.suggest_fields()) for label, study in studies.items()], data
            )
            result = result.with_runs(new_runs)
            for search_run in new_runs:
                is_complete = (
                    search_run.selected_point is not None
                    and search_run.validation_losses_by_client.keys() == result.scored_clients
                )
                studies[search_run.label].report_score(
                    -search_run.selected_point[0] if is_complete and search_run.selected_point is not None else None
                )
    return result


def _extended_candidates(result: "SearchResult", label: str) -> list[Fields]:
    """What was best, with the next value of each field of which the best value is the smallest or the largest. Of clients
    that have a choice of their own, whoever has most validation examples decides on the other fields."""
    plan, method, runs = result.plan, result.methods[label], result.runs_by_label[label]
    candidates: list[Fields] = []
    for name, listed_values in _search_values(plan, method).items():
        if not may_extend((plan.search_space or {})[name]):
            continue
        tried = {search_run.fields[name] for search_run in runs}
        is_integer = not any(f.name == name and "float" in str(f.type) for f in _fields(method))
        sides = set[bool]()
        for best in result.best_fields(label):
            upper = best[name] == max(tried)
            beyond = [value for value in tried if (value > max(listed_values) if upper else value < min(listed_values))]
            further = next_value_beyond_edge([*tried], best[name], is_integer) if len(beyond) < _BEYOND else None
            if further is None or upper in sides:
                continue
            sides.add(upper)
            try:
                dataclasses.replace(method, **{name: further})  # type: ignore[type-var]  # which checks the value
            except UserError:
                continue
            candidates.append({**best, name: further})
    return [fields for k, fields in enumerate(candidates) if fields not in candidates[:k]]


@final
@dataclass(frozen=True, eq=False)
class SearchResult:
    """What a search found.

    Attributes: `plan` and `methods`, of the search; `runs_by_label`, by label; `num_validation`, validation examples by
    client; `held_out`, whether validation examples were held out for it; `has_same_clients`, whether an id is the same
    client in each seed.
    """

    plan: ComparisonPlan
    methods: Mapping[str, Method]
    runs_by_label: Mapping[str, Sequence[SearchRun]]
    num_validation: Mapping[str, int]
    held_out: bool
    has_same_clients: bool

    def with_runs(self, runs: Sequence[SearchRun]) -> "SearchResult":
        """The same with further runs."""
        tried = {
            label: [*earlier_runs, *(run for run in runs if run.label == label)]
            for label, earlier_runs in self.runs_by_label.items()
        }
        return dataclasses.replace(self, runs_by_label=tried)

    @cached_property
    def scored_clients(self) -> frozenset[str]:
        """The clients that a loss is the mean over."""
        return max(
            (frozenset(run.validation_losses_by_client) for runs in self.runs_by_label.values() for run in runs),
            key=len,
            default=frozenset(),
        )

    @cached_property
    def ranked_runs(self) -> Mapping[str, Sequence[SearchRun]]:
        """By label the runs that have a loss of all these clients, the best first."""
        return {label: rank_runs(runs, self.scored_clients) for label, runs in self.runs_by_label.items()}

    @cached_property
    def ranked_runs_by_client(self) -> Mapping[str, Mapping[str, Sequence[tuple[SearchRun, int]]]]:
        """By label of a method whose clients train alone and so choose alone, and by client: the runs in which it has a
        loss, the best for it first, each with its round. A client without any has the choice of all. Where each seed
        deals the data again, an id is no client, and there is none."""
        return {
            label: {
                client: order for client in sorted(self.num_validation) if (order := rank_runs_for_client(runs, client))
            }
            for label, runs in self.runs_by_label.items()
            if self.has_same_clients and runs and self.ranked_runs[label] and isinstance(self.methods[label], Local)
        }

    def best_fields(self, label: str) -> list[Fields]:
        """What was found best for a method, or for its clients, those with most validation examples first."""
        if label in self.ranked_runs_by_client:
            clients = sorted(self.ranked_runs_by_client[label], key=lambda client: -self.num_validation[client])
            return [self.ranked_runs_by_client[label][client][0][0].fields for client in clients]
        return [run.fields for run in self.ranked_runs[label][:1]]

    @property
    def failed_methods(self) -> dict[str, Failure]:
        """The methods of which each run failed."""
        failures = dict[str, Failure]()
        for label, runs in self.runs_by_label.items():
            if runs and not self.ranked_runs[label]:
                lost = RoundError(f"no run of the search has a validation loss of every client (method {label})")
                failures[label] = next((run.failure for run in runs if run.failure is not None), lost)
        return failures

    def next_choice_after_failure(
        self, label: str, failure: Failure, rank_by_choice: Mapping[ChoiceKey, int]
    ) -> ChoiceKey | None:
        """Whose choice gives way to the next best after a failure of what was chosen: the client's that failed where clients
        choose alone, else the method's; None if there is no more."""
        if label in self.ranked_runs_by_client:
            client = failure.client if isinstance(failure, ClientError) else ""
            order = self.ranked_runs_by_client[label].get(client, ())
            return (label, client) if rank_by_choice.get((label, client), 0) + 1 < len(order) else None
        return (label, None) if rank_by_choice.get((label, None), 0) + 1 < len(self.ranked_runs[label]) else None

    def run_folder_name(self, label: str, rank_by_choice: Mapping[ChoiceKey, int]) -> str:
        """Within the folder of a method that for runs with what was chosen; empty for the first choice."""
        if rank := rank_by_choice.get((label, None), 0):
            return safe_file_name(_format_fields(self.ranked_runs[label][rank].fields))
        later = sum(rank for (name, _), rank in rank_by_choice.items() if name == label)
        return f"choice-{later + 1}" if later else ""

    def apply_choices(self, rank_by_choice: Mapping[ChoiceKey, int]) -> tuple[dict[str, Method], dict[str, Any]]:
        """The methods with what was found best for each, and the search as `comparison.json` says it.

        Args:
            rank_by_choice: of the methods and clients whose best diverged with another seed: which of the next is
                taken instead.
        """
        tuned_methods, entry_by_label = dict(self.methods), dict[str, Any]()
        rounds: dict[str, int | None] = {}
        losses: dict[str, list[list[float]]] = {}
        edge = []
        for label, runs in self.runs_by_label.items():
            order, rank = self.ranked_runs[label], rank_by_choice.get((label, None), 0)
            entry: dict[str, Any] = {
                "chosen": {},
                "diverged": [search_run.fields for search_run in order[:rank]],
                "runs": len(runs),
            }
            if order:
                best = order[rank]
                tuned_methods[label] = dataclasses.replace(tuned_methods[label], **best.fields)  # type: ignore[type-var]
                entry["chosen"] = best.fields
                rounds[label], losses[label] = best.selected_round, [list(point) for point in best.pooled_loss_curve]
                edge += [] if label in self.ranked_runs_by_client else [
                    f"{name} of {label}" for name in best.fields if _is_at_edge(name, best, runs)]  # fmt: skip
            if label in self.ranked_runs_by_client:
                choice_by_client = {
                    c: order[rank_by_choice.get((label, c), 0)]
                    for c, order in self.ranked_runs_by_client[label].items()
                }
                tuned_methods[label] = _with_client_fields(
                    tuned_methods[label], {c: search_run.fields for c, (search_run, _) in choice_by_client.items()}
                )
                entry["by_client"] = {c: search_run.fields for c, (search_run, _) in choice_by_client.items()}
                entry["rounds"] = {
                    c: choice_by_client[c][1] if c in choice_by_client else best.selected_round
                    for c in sorted(self.num_validation)
                }
                rounds[label] = max(entry["rounds"].values())
                losses[label] = self._pooled_curve_of_choices(choice_by_client)
                for name in next(iter(entry["by_client"].values())):
                    if at := [
                        c for c, (search_run, _) in choice_by_client.items() if _is_at_edge(name, search_run, runs)
                    ]:
                        edge.append(f"{name} of {label} at {join_names(at)}")
                entry["diverged"] = [
                    {"client": c, **search_run.fields} for c, order in self.ranked_runs_by_client[label].items()
                    for search_run, _ in order[: rank_by_choice.get((label, c), 0)]
                ]  # fmt: skip
            complete_ids = {id(search_run) for search_run in order}
            entry["tried"] = [
                {
                    "fields": search_run.fields,
                    "loss": search_run.selected_point[0]
                    if id(search_run) in complete_ids and search_run.selected_point
                    else None,
                    "validation": search_run.mean_validation_score if id(search_run) in complete_ids else None,
                }
                for search_run in runs
            ]
            entry_by_label[label] = entry
        most = max(entry["runs"] for entry in entry_by_label.values())
        sentence = self._sentence(most)
        entry = {
            "sentence": sentence, "by": "validation loss", "methods": entry_by_label, "edge": edge, "losses": losses,
        }  # fmt: skip
        return tuned_methods, entry | ({"rounds": rounds} if self.held_out else {})

    def _pooled_curve_of_choices(self, choice_by_client: Mapping[str, tuple[SearchRun, int]]) -> list[list[float]]:
        """The loss on all validation examples where each client trains as it has chosen, and ends at its round."""
        histories = {c: search_run.validation_losses_by_client[c] for c, (search_run, _) in choice_by_client.items()}
        return [
            list(point)
            for point in pool_losses(
                freeze_losses_after(histories, {c: n for c, (_, n) in choice_by_client.items()}), self.num_validation
            )
        ]

    def _sentence(self, max_runs: int) -> str:
        plan, at = self.plan, self.plan.search_budget
        how = "all combinations" if plan.num_trials is None else "by Optuna"
        if plan.num_trials is None and any(may_extend(values) for values in (plan.search_space or {}).values()):
            how += f", and up to {_BEYOND} values beyond where the best was the smallest or the largest"
        runs = (
            f"up to {max_runs} {'run' if max_runs == 1 else 'runs'} of {plan.settings.rounds} rounds with seed "
            f"{plan.seeds[0]}"
        )
        score = "lowest loss on all validation examples together"
        if at.is_fixed:
            score += f", of the last {SMOOTHED_ROUNDS} evaluated rounds" + ("" if at.limit is None else f" within {at}")
        sentence = (
            f"{', '.join(plan.search_space or {})}, {how}: {runs} for each method that has the fields, chosen by the "
            f"{score}"
        )
        if self.ranked_runs_by_client:
            sentence += (
                f"; each client of {join_names(list(self.ranked_runs_by_client))} chose for itself, by the loss on its "
                f"own validation examples (where they are few, that of all clients counts as {POOLED_LOSS_WEIGHT} more)"
            )
        if not self.held_out:
            return sentence
        also = "" if at.is_fixed else "which also chose the number of rounds, "
        return (
            f"{sentence}; clients without validation examples held out a fifth of their training examples for the search, "
            f"{also}and train on all of them afterwards"
        )


def _with_client_fields(method: Method, chosen: Mapping[str, Fields]) -> Method:
    """`local` with what each client has chosen; what a client was given beforehand stays."""
    assert isinstance(method, Local)
    before = method.by_client or {}
    return dataclasses.replace(
        method, by_client={**before, **{c: {**fields, **before.get(c, {})} for c, fields in chosen.items()}}
    )


def _is_at_edge(name: str, best: SearchRun, runs: Sequence[SearchRun]) -> bool:
    """Whether the best number is the smallest or the largest that was tried, of three or more."""
    values = sorted({run.fields[name] for run in runs if is_number(run.fields[name])})
    return len(values) > 2 and best.fields[name] in (values[0], values[-1])


def _format_fields(fields: Fields) -> str:
    return ",".join(f"{key}={value}" for key, value in fields.items())


def _run_candidates(result: SearchResult, candidates: Sequence[tuple[str, Fields]], data: str) -> list[SearchRun]:
    plan, jobs = result.plan, []
    for label, fields in candidates:
        name, method = _format_fields(fields), result.methods[label]
        folder = None if plan.out is None else plan.out / TUNING_FOLDER / label / safe_file_name(name)
        changed = dataclasses.replace(method, **fields)  # type: ignore[type-var]
        skips = isinstance(method, Local)  # who diverges alone takes nothing from the others
        jobs.append(
            RunSpec(
                f"{label} with {name}", changed, plan.seeds[0], folder, data, keep_predictions=False,
                skip_failed_clients=skips,
            )
        )  # fmt: skip
    finished_runs, failed = run_jobs(plan, jobs) if jobs else ({}, {})
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


def _fields(method: Method) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(method)  # type: ignore[arg-type]


def search_variants(plan: ComparisonPlan, method: Method) -> list[Method]:
    """The method with the values that are to be tried: all combinations, or the low and the high ends of ranges."""
    if plan.num_trials is None:
        tries = _all_combinations(plan, method)
    else:
        ends = {name: values_to_check(name, values) for name, values in _search_values(plan, method).items()}
        tries = [{name: extremes[k] for name, extremes in ends.items()} for k in (0, -1)] if ends else []
    return [dataclasses.replace(method, **fields) for fields in tries]  # type: ignore[type-var]


def _search_values(plan: ComparisonPlan, method: Method) -> dict[str, Any]:
    """The fields to search that a method has, with their values or range."""
    field_names = {f.name for f in _fields(method)}
    return {
        name: resolve_search_values(method, name, values)
        for name, values in (plan.search_space or {}).items()
        if name in field_names
    }


def _all_combinations(plan: ComparisonPlan, method: Method) -> list[Fields]:
    searched = _search_values(plan, method)
    return [dict(zip(searched, values, strict=True)) for values in product(*searched.values())] if searched else []
