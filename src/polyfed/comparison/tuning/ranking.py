"""Ranks the runs of a hyper-parameter search by their loss on validation examples.

Clients that train together have one choice: the lowest mean loss over all their validation examples, each counted
once. (In a mean over clients, of an AUC say, the single negative example of a small client would outweigh the examples
of all others.)

A client that trains alone has its own choice, by the loss on its own n validation examples. Since these may be few,
its loss is shrunk towards the pooled loss, which counts as `POOLED_LOSS_WEIGHT` examples: (n·l_i + WEIGHT·l) / (n +
WEIGHT). `benchmarks/rate_choice.py` measures the regret of that choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median_low
from typing import Any, NamedTuple, final

from polyfed.comparison.execution.training_runs import Failure
from polyfed.comparison.planning.budget import Budget
from polyfed.core.io.text.site_words import name_sites
from polyfed.simulation.monitoring.validation_losses import LossCurve, pool_losses, validation_losses_by_client

POOLED_LOSS_WEIGHT = 50
"""Number of validation examples that the pooled loss counts as when a client that trains alone chooses."""
SMOOTHED_ROUNDS = 3
"""Neighbouring evaluated rounds over which a loss is averaged: the lowest of many single rounds is low by chance."""
_DIGITS = 6  # significant digits of a loss; losses that agree in these are equal
Fields = dict[str, Any]


@final
class LossAtRound(NamedTuple):
    """Holds a loss, and the number of the round that has it."""

    loss: float
    round: int


def lowest_smoothed_loss(curve: LossCurve) -> LossAtRound | None:
    """Returns the lowest loss averaged with its neighbours, and its first round; None without any.

    >>> lowest_smoothed_loss([(1, 0.5), (2, 0.1), (3, 0.6), (4, 0.3), (5, 0.2), (6, 0.25)])
    LossAtRound(loss=0.25, round=5)
    """
    smooth = [LossAtRound(fmean(value for _, value in near), number)
              for k, (number, _) in enumerate(curve) if (near := curve[max(0, k - 1) : k + 2])]  # fmt: skip
    return min(smooth[1:-1] or smooth, default=None)


def mean_of_last_losses(
    curve: LossCurve, cost_by_round: Mapping[int, float], limit: float | None
) -> LossAtRound | None:
    """Returns the mean of the last `SMOOTHED_ROUNDS` losses within `limit`, and the last round; or None.

    If no round is within the budget, these are the first round's.

    >>> mean_of_last_losses([(1, 0.9), (2, 0.25), (3, 0.5), (4, 0.75)], {}, None)
    LossAtRound(loss=0.5, round=4)
    """
    inside = [point for point in curve if limit is None or cost_by_round[point[0]] <= limit][
        -SMOOTHED_ROUNDS:
    ] or curve[:1]
    return LossAtRound(fmean(loss for _, loss in inside), inside[-1][0]) if inside else None


def sum_of_loss_increases(curve: LossCurve) -> float:
    """Returns the sum of a loss's increases between rounds, a measure of unsteadiness.

    >>> sum_of_loss_increases([(1, 1.0), (2, 0.5), (3, 0.75), (4, 0.25)])
    0.25
    """
    return sum(max(0.0, after - before) for (_, before), (_, after) in pairwise(curve))


def shrink_client_loss_to_pooled_loss(
    client_loss_by_round: Mapping[int, float],
    num_examples: int,
    pooled_loss_curve: LossCurve,
    weight: float = POOLED_LOSS_WEIGHT,
) -> list[tuple[int, float]]:
    """Returns (round, loss) of a client's loss, averaged with that of all clients by weight.

    Args:
        client_loss_by_round: round -> loss of the client on its `num_examples` validation examples.
        num_examples: number of these.
        pooled_loss_curve: the loss curve on the validation examples of all clients.
        weight: number of examples that the pooled loss counts as.

    >>> shrink_client_loss_to_pooled_loss({1: 1.0, 2: 0.5}, 10, [(1, 0.5), (2, 1.0)], weight=10)
    [(1, 0.75), (2, 0.75)]
    """
    share = num_examples / (num_examples + weight)
    return [
        (t, share * client_loss_by_round[t] + (1 - share) * loss)
        for t, loss in pooled_loss_curve
        if t in client_loss_by_round
    ]


def cap_losses(
    losses_by_client: Mapping[str, Mapping[int, float]], max_loss_by_client: Mapping[str, float]
) -> dict[str, dict[int, float]]:
    """Caps each client's losses at its entry, so that one diverging client does not outweigh others.

    >>> cap_losses({"a": {1: 1.0, 2: 1e9}}, {"a": 1.0})
    {'a': {1: 1.0, 2: 1.0}}
    """
    return {
        client: {t: min(loss, max_loss_by_client[client]) for t, loss in client_losses.items()}
        for client, client_losses in losses_by_client.items()
    }


def first_loss(loss_by_round: Mapping[int, float]) -> float:
    """Returns the loss of the first evaluated round, from `{round: loss}`.

    >>> first_loss({2: 0.5, 1: 0.75})
    0.75
    """
    return loss_by_round[min(loss_by_round)]


def hold_losses_after_clients_stop(
    losses_by_client: Mapping[str, Mapping[int, float]], last_round_by_client: Mapping[str, int]
) -> dict[str, dict[int, float]]:
    """Returns losses as if each client had stopped after its round in `last_round_by_client`.

    >>> hold_losses_after_clients_stop({"a": {1: 0.5, 2: 0.75}, "b": {1: 0.5, 2: 0.25}}, {"a": 1, "b": 2})
    {'a': {1: 0.5, 2: 0.5}, 'b': {1: 0.5, 2: 0.25}}
    """
    return {
        client: {
            t: client_losses[min(t, last_round_by_client[client])]
            if last_round_by_client.get(client) in client_losses
            else loss
            for t, loss in client_losses.items()
        }
        for client, client_losses in losses_by_client.items()
    }


def format_chosen_fields(tuning_entry: Mapping[str, Any]) -> str:
    """Formats the hyper-parameters chosen for a method or its clients; "" for none.

    Args:
        tuning_entry: the method's search result, as in `comparison.json`.

    >>> format_chosen_fields({"chosen": {"lr": 0.1}})
    'lr 0.1'
    >>> format_chosen_fields({"chosen": {"lr": 0.1}, "by_client": {"a": {"lr": 0.1}, "b": {"lr": 0.3}, "c": {"lr": 0.1}}})
    'lr 0.1 (a, c), lr 0.3 (b)'
    """
    whose: dict[str, list[str]] = {}
    for client, fields in (tuning_entry.get("by_client") or {}).items():
        whose.setdefault(_format_fields(fields), []).append(client)
    if len(whose) < 2:
        return next(iter(whose), _format_fields(tuning_entry["chosen"]))
    return ", ".join(f"{words} ({name_sites(clients)})" for words, clients in sorted(whose.items()))


def _format_fields(fields: Fields) -> str:
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in fields.items())


@final
@dataclass(frozen=True, eq=False)
class SearchRun:
    """Describes one run of a hyper-parameter search: the values that it tried, and its validation losses.

    Attributes:
        label: of the method.
        fields: the values that the run tried.
        history: the records of `metrics.jsonl`; empty if the run failed.
        budget: defines the round at which the run is ranked.
        num_validation: client id -> number of validation examples.
        metric_name: the metric that decides the comparison; it is reported, not used.
        failed_clients: clients whose training failed in the run.
        failure: the error of a run that failed.
        cost_by_round: evaluated round -> bytes or seconds spent up to it, if the budget limits these.
    """

    label: str
    fields: Fields
    history: Sequence[Mapping[str, Any]]
    budget: Budget
    num_validation: Mapping[str, int]
    metric_name: str
    failed_clients: frozenset[str] = frozenset()
    failure: Failure | None = None
    cost_by_round: Mapping[int, float] = field(default_factory=dict)

    @cached_property
    def validation_losses_by_client(self) -> Mapping[str, Mapping[int, float]]:
        """Returns the validation losses of each client in this run, as `{client id: {evaluated round: loss}}`.

        A client whose training diverged is left out: a mean over its other rounds would reward the divergence.
        """
        losses = {
            c: rounds for c, rounds in validation_losses_by_client(self.history).items() if c not in self.failed_clients
        }
        evaluated = sum(bool(record["summary"]) for record in self.history)
        return {c: rounds for c, rounds in losses.items() if len(rounds) == evaluated}

    @cached_property
    def pooled_loss_curve(self) -> LossCurve:
        """Returns (round, mean loss) on the validation examples of all clients together."""
        return pool_losses(self.validation_losses_by_client, self.num_validation)

    def ranking_loss_of_curve(self, curve: LossCurve) -> LossAtRound | None:
        """Returns the loss and round that would rank this run by `curve`; None if it is empty."""
        if self.budget.determines_compared_round:
            return mean_of_last_losses(curve, self.cost_by_round, self.budget.limit)
        return lowest_smoothed_loss(curve)

    @cached_property
    def ranking_loss(self) -> LossAtRound | None:
        """Returns the validation loss by which this run is ranked, with its round; None if the run has no loss."""
        return self.ranking_loss_of_curve(self.pooled_loss_curve)

    @property
    def ranking_round(self) -> int | None:
        """Returns the round whose validation loss ranks this run (see `ranking_loss`); None if the run has no loss."""
        return None if self.ranking_loss is None else self.ranking_loss.round

    @property
    def mean_validation_score(self) -> float | None:
        """Returns the mean validation score after `ranking_round`; None if undefined.

        It is reported only, and does not change the ranking.
        """
        if self.ranking_round is None:
            return None
        mean: float | None = (
            self.history[self.ranking_round - 1]["summary"].get(f"val_{self.metric_name}", {}).get("mean")
        )
        return mean


def rank_runs_by_pooled_loss(runs: Sequence[SearchRun], clients_with_loss: frozenset[str]) -> list[SearchRun]:
    """Ranks runs with a loss for all these clients by loss, steadiness of its curve, and learning rate."""
    complete_runs = [
        run
        for run in runs
        if run.ranking_loss is not None and run.validation_losses_by_client.keys() == clients_with_loss
    ]
    return sorted(
        complete_runs, key=lambda run: _sort_key(run, run.ranking_loss or LossAtRound(0.0, 0), run.pooled_loss_curve)
    )


@final
class RunWithBestRound(NamedTuple):
    """Holds a run of a hyper-parameter search, and the round of this run that is best for one client."""

    run: SearchRun
    best_round: int


def rank_runs_for_one_client(runs: Sequence[SearchRun], client: str) -> list[RunWithBestRound]:
    """Ranks the runs in which a client that trains alone has a loss, each with its best round.

    In the pooled loss each client is capped at its first loss (the median over the runs), which also stands in where
    its training failed. So every run averages over the same clients, and one that diverges does not decide for the
    others.
    """
    client_ids = sorted({c for run in runs for c in run.validation_losses_by_client})
    first_losses = {
        c: median_low(
            first_loss(run.validation_losses_by_client[c]) for run in runs if c in run.validation_losses_by_client
        )
        for c in client_ids
    }
    entries: list[tuple[tuple[float, float, float], int, SearchRun, int]] = []
    for run in runs:
        if client not in run.validation_losses_by_client:
            continue
        client_losses = run.validation_losses_by_client[client]
        filled = cap_losses(
            {
                c: run.validation_losses_by_client.get(c) or dict.fromkeys(client_losses, first_losses[c])
                for c in client_ids
            },
            first_losses,
        )
        curve = shrink_client_loss_to_pooled_loss(
            client_losses, run.num_validation.get(client, 0), pool_losses(filled, run.num_validation)
        )
        if (place := run.ranking_loss_of_curve(curve)) is not None:
            entries.append((_sort_key(run, place, curve), len(entries), run, place.round))
    return [RunWithBestRound(run, number) for _, _, run, number in sorted(entries, key=lambda entry: entry[:2])]


def _sort_key(run: SearchRun, place: LossAtRound, curve: LossCurve) -> tuple[float, float, float]:
    rate = run.fields.get("lr", 0.0)
    return float(f"{place.loss:.{_DIGITS}g}"), float(f"{sum_of_loss_increases(curve):.{_DIGITS}g}"), float(rate)
