"""Holds the runs of a hyper-parameter search, and chooses the best hyper-parameters for each method or client."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, final

from polyfed.algorithms import Local
from polyfed.comparison.execution.training_runs import Failure
from polyfed.comparison.plan import ComparisonPlan, Method
from polyfed.comparison.tuning.grid import allows_values_beyond_listed
from polyfed.comparison.tuning.ranking import (
    POOLED_LOSS_WEIGHT,
    SMOOTHED_ROUNDS,
    Fields,
    RunWithBestRound,
    SearchRun,
    hold_losses_after_clients_stop,
    rank_runs_by_pooled_loss,
    rank_runs_for_one_client,
)
from polyfed.core.errors import ClientError, RoundError
from polyfed.core.io.text.number_format import join_first_and_count_rest
from polyfed.core.io.text.site_words import name_sites
from polyfed.core.io.values.number_checks import is_number
from polyfed.simulation.monitoring.validation_losses import pool_losses
from polyfed.simulation.storage.paths import safe_file_name

MAX_EXTENSIONS = 2  # values that a grid is extended by, on either side


@final
class HyperparameterOwner(NamedTuple):
    """Names a method, or also one of its clients, whose hyper-parameters a search chose."""

    label: str
    client: str | None


@final
class TunedMethods(NamedTuple):
    """Holds methods by label with the fields chosen by a search, and the entry `tuning`."""

    methods: dict[str, Method]
    tuning_entry: dict[str, Any]


@final
@dataclass(frozen=True, eq=False)
class SearchResult:
    """Holds the runs of a hyper-parameter search, ranks them, and builds the methods with the best hyper-parameters.

    Attributes:
        plan: the plan of the search.
        methods: label -> method, before the search.
        runs_by_label: label -> runs so far.
        num_validation: client id -> number of validation examples.
        held_out: whether validation examples were held out for the search.
        has_same_clients: whether a client id names the same client with every seed.
    """

    plan: ComparisonPlan
    methods: Mapping[str, Method]
    runs_by_label: Mapping[str, Sequence[SearchRun]]
    num_validation: Mapping[str, int]
    held_out: bool
    has_same_clients: bool

    def with_runs_added(self, runs: Sequence[SearchRun]) -> "SearchResult":
        """Returns a copy of this search result with `runs` added to its runs."""
        tried = {
            label: [*earlier_runs, *(run for run in runs if run.label == label)]
            for label, earlier_runs in self.runs_by_label.items()
        }
        return dataclasses.replace(self, runs_by_label=tried)

    @cached_property
    def clients_with_loss(self) -> frozenset[str]:
        """Returns the clients over which losses are averaged: the most that a run has."""
        return max(
            (frozenset(run.validation_losses_by_client) for runs in self.runs_by_label.values() for run in runs),
            key=len,
            default=frozenset(),
        )

    @cached_property
    def ranked_runs_by_label(self) -> Mapping[str, Sequence[SearchRun]]:
        """Returns `{label: runs, best first}`, of runs with a loss for all `clients_with_loss`."""
        return {
            label: rank_runs_by_pooled_loss(runs, self.clients_with_loss) for label, runs in self.runs_by_label.items()
        }

    @cached_property
    def ranked_runs_by_label_and_client(self) -> Mapping[str, Mapping[str, Sequence[RunWithBestRound]]]:
        """Ranks the search runs for each client separately, for the methods whose clients train on their own data only.

        Returns:
            label -> client id -> the runs in which the client has a loss, each with the client's best round, best first. A
                client without a loss is missing and takes the method's choice. Empty if a client id names other data with
                each seed.
        """
        return {
            label: {
                client: order
                for client in sorted(self.num_validation)
                if (order := rank_runs_for_one_client(runs, client))
            }
            for label, runs in self.runs_by_label.items()
            if self.has_same_clients
            and runs
            and self.ranked_runs_by_label[label]
            and isinstance(self.methods[label], Local)
        }

    def best_fields_of_method_or_each_client(self, label: str) -> list[Fields]:
        """Returns a method's best fields in a list, or those of each client.

        The client with most validation examples comes first.
        """
        if label in self.ranked_runs_by_label_and_client:
            clients = sorted(
                self.ranked_runs_by_label_and_client[label], key=lambda client: -self.num_validation[client]
            )
            return [self.ranked_runs_by_label_and_client[label][client][0][0].fields for client in clients]
        return [run.fields for run in self.ranked_runs_by_label[label][:1]]

    @property
    def failed_methods(self) -> dict[str, Failure]:
        """Returns `{method label: first failure}` for the methods of which every search run failed."""
        failures = dict[str, Failure]()
        for label, runs in self.runs_by_label.items():
            if runs and not self.ranked_runs_by_label[label]:
                default_failure = RoundError(
                    f"no run of the search has a validation loss of every client (method {label})"
                )
                failures[label] = next((run.failure for run in runs if run.failure is not None), default_failure)
        return failures

    def find_failed_choice_to_replace(
        self, label: str, failure: Failure, rank_by_choice: Mapping[HyperparameterOwner, int]
    ) -> HyperparameterOwner | None:
        """Returns whose choice to replace after a final run failed; None if no search run is left.

        It is that of the failed client where clients choose alone, else that of the method.
        """
        if label in self.ranked_runs_by_label_and_client:
            client = failure.client if isinstance(failure, ClientError) else ""
            choice = HyperparameterOwner(label, client)
            num_runs = len(self.ranked_runs_by_label_and_client[label].get(client, ()))
        else:
            choice, num_runs = HyperparameterOwner(label, None), len(self.ranked_runs_by_label[label])
        return choice if rank_by_choice.get(choice, 0) + 1 < num_runs else None

    def subfolder_of_final_runs(self, label: str, rank_by_choice: Mapping[HyperparameterOwner, int]) -> str:
        """Returns the subfolder of final runs with these choices; "" for the best."""
        if rank := rank_by_choice.get(HyperparameterOwner(label, None), 0):
            return safe_file_name(join_as_name_equals_value(self.ranked_runs_by_label[label][rank].fields))
        later = sum(rank for (name, _), rank in rank_by_choice.items() if name == label)
        return f"choice-{later + 1}" if later else ""

    def set_chosen_fields_in_methods(self, rank_by_choice: Mapping[HyperparameterOwner, int]) -> TunedMethods:
        """Returns the methods with their best fields, and the entry `tuning` on the search.

        Args:
            rank_by_choice: the rank of the chosen run, for the methods and clients whose better runs diverged with
                another seed; 0 for all others.
        """
        tuned_methods, entry_by_label = dict(self.methods), dict[str, Any]()
        rounds: dict[str, int | None] = {}
        losses: dict[str, list[list[float]]] = {}
        edge = []
        for label, runs in self.runs_by_label.items():
            order, rank = self.ranked_runs_by_label[label], rank_by_choice.get(HyperparameterOwner(label, None), 0)
            entry: dict[str, Any] = {
                "chosen": {},
                "diverged": [search_run.fields for search_run in order[:rank]],
                "runs": len(runs),
            }
            if order:
                best = order[rank]
                tuned_methods[label] = dataclasses.replace(tuned_methods[label], **best.fields)  # type: ignore[type-var]
                entry["chosen"] = best.fields
                rounds[label], losses[label] = best.ranking_round, [list(point) for point in best.pooled_loss_curve]
                edge += [] if label in self.ranked_runs_by_label_and_client else [
                    f"{name} of {label}" for name in best.fields if _is_at_edge(name, best, runs)]  # fmt: skip
            if label in self.ranked_runs_by_label_and_client:
                choice_by_client = {
                    c: order[rank_by_choice.get(HyperparameterOwner(label, c), 0)]
                    for c, order in self.ranked_runs_by_label_and_client[label].items()
                }
                tuned_methods[label] = _with_client_fields(
                    tuned_methods[label], {c: search_run.fields for c, (search_run, _) in choice_by_client.items()}
                )
                entry["by_client"] = {c: search_run.fields for c, (search_run, _) in choice_by_client.items()}
                entry["rounds"] = {
                    c: choice_by_client[c][1] if c in choice_by_client else best.ranking_round
                    for c in sorted(self.num_validation)
                }
                rounds[label] = max(entry["rounds"].values())
                losses[label] = self._pooled_curve_of_choices(choice_by_client)
                for name in next(iter(entry["by_client"].values())):
                    if at := [
                        c for c, (search_run, _) in choice_by_client.items() if _is_at_edge(name, search_run, runs)
                    ]:
                        edge.append(f"{name} of {label} at {name_sites(at)}")
                entry["diverged"] = [
                    {"client": c, **search_run.fields} for c, order in self.ranked_runs_by_label_and_client[label].items()
                    for search_run, _ in order[: rank_by_choice.get(HyperparameterOwner(label, c), 0)]
                ]  # fmt: skip
            complete_ids = {id(search_run) for search_run in order}
            entry["tried"] = [
                {
                    "fields": search_run.fields,
                    "loss": search_run.ranking_loss.loss
                    if id(search_run) in complete_ids and search_run.ranking_loss
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
        return TunedMethods(tuned_methods, entry | ({"rounds": rounds} if self.held_out else {}))

    def _pooled_curve_of_choices(self, choice_by_client: Mapping[str, RunWithBestRound]) -> list[list[float]]:
        """Returns the pooled loss by round if each client has its own choice and last round."""
        histories = {c: search_run.validation_losses_by_client[c] for c, (search_run, _) in choice_by_client.items()}
        return [
            list(point)
            for point in pool_losses(
                hold_losses_after_clients_stop(histories, {c: n for c, (_, n) in choice_by_client.items()}),
                self.num_validation,
            )
        ]

    def _sentence(self, max_runs: int) -> str:
        """Describes the search in a sentence for users."""
        plan, at = self.plan, self.plan.search_budget
        how = "all combinations" if plan.num_trials is None else "by Optuna"
        if plan.num_trials is None and any(
            allows_values_beyond_listed(values) for values in (plan.search_space or {}).values()
        ):
            how += f", and up to {MAX_EXTENSIONS} values beyond where the best was the smallest or the largest"
        runs = (
            f"up to {max_runs} {'run' if max_runs == 1 else 'runs'} of {plan.settings.rounds} rounds with seed "
            f"{plan.seeds[0]}"
        )
        score = "lowest loss on all validation examples together"
        if at.determines_compared_round:
            score += f", of the last {SMOOTHED_ROUNDS} evaluated rounds" + ("" if at.limit is None else f" within {at}")
        sentence = (
            f"{', '.join(plan.search_space or {})}, {how}: {runs} for each method that has the fields, chosen by the "
            f"{score}"
        )
        if self.ranked_runs_by_label_and_client:
            labels = join_first_and_count_rest(list(self.ranked_runs_by_label_and_client))
            sentence += (
                f"; each client of {labels} chose for itself, by the loss on its own validation examples (the loss of all "
                f"clients counts as {POOLED_LOSS_WEIGHT} further examples)"
            )
        if not self.held_out:
            return sentence
        also = "" if at.determines_compared_round else "which also chose the number of rounds, "
        return (
            f"{sentence}; clients without validation examples held out a fifth of their training examples for the search, "
            f"{also}and train on all of them afterwards"
        )


def _with_client_fields(method: Method, fields_by_client: Mapping[str, Fields]) -> Method:
    """Returns `local` with each client's chosen fields; those that the user set for a client win."""
    assert isinstance(method, Local)
    before = method.by_client or {}
    return dataclasses.replace(
        method, by_client={**before, **{c: {**fields, **before.get(c, {})} for c, fields in fields_by_client.items()}}
    )


def _is_at_edge(name: str, best: SearchRun, runs: Sequence[SearchRun]) -> bool:
    """Returns whether the best value is the smallest or largest of three or more."""
    values = sorted({run.fields[name] for run in runs if is_number(run.fields[name])})
    return len(values) > 2 and best.fields[name] in (values[0], values[-1])


def join_as_name_equals_value(fields: Fields) -> str:
    """Formats hyper-parameters as one text, "NAME=VALUE,NAME=VALUE"."""
    return ",".join(f"{key}={value}" for key, value in fields.items())
