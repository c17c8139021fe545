"""Estimates scores and gains of a comparison whose runs are the folds of a cross-validation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, final

from numpy.typing import NDArray
from torch import Tensor

from polyfed.comparison.statistics.cross_validation.fold_differences import (
    FoldDifferences,
    difference_over_folds,
    estimate_clients_from_folds,
    estimate_mean_from_folds,
    estimate_variance_between_fold_runs,
    pooled_network_variance,
)
from polyfed.comparison.statistics.cross_validation.fold_influence import FoldScores, score_folds
from polyfed.comparison.statistics.estimate import ALPHA, Estimate
from polyfed.comparison.statistics.random_effects import SharedError, SiteGain
from polyfed.core.evaluation.metric import Metric


@final
@dataclass(frozen=True, eq=False)
class CrossValidationEvidence:
    """Holds all folds' predictions, and estimates gains with intervals from them.

    Attributes:
        metric: the metric that decides.
        seeds: of the runs, repeat by repeat and fold by fold.
        num_folds: folds of a repeat.
        outputs: returns the outputs of a method, seed and client on its test examples; None if they were not kept.
        targets: seed -> client id -> targets of these examples.
        units: seed -> client id -> unit of each, an example or a group of examples.
        alpha: the error rate of intervals.
    """

    metric: Metric
    seeds: Sequence[int]
    num_folds: int
    outputs: Callable[[str, int, str], Tensor | None]
    targets: Mapping[int, Mapping[str, Tensor]]
    units: Mapping[int, Mapping[str, NDArray[Any]]]
    alpha: float = ALPHA
    _cache: dict[tuple[str, str], FoldScores | None] = field(default_factory=dict, repr=False)

    def scores(self, label: str, client: str) -> FoldScores | None:
        """Returns a method's cross-validated scores at a client; None if undefined or not kept."""
        if (label, client) not in self._cache:
            outputs = [self.outputs(label, seed, client) for seed in self.seeds]
            defined = [fold_outputs for fold_outputs in outputs if fold_outputs is not None]
            self._cache[label, client] = (
                score_folds(
                    self.metric,
                    defined,
                    [self.targets[seed][client] for seed in self.seeds],
                    [self.units[seed][client] for seed in self.seeds],
                    self.num_folds,
                )
                if len(defined) == len(outputs)
                else None
            )
        return self._cache[label, client]

    def differences(self, label: str, rival: str | None) -> dict[str, FoldDifferences]:
        """Returns `{client: difference}` of two methods; without `rival`, the scores of `label`."""
        by_client = {}
        for client in sorted(self.targets[self.seeds[0]]):
            ours, theirs = self.scores(label, client), None if rival is None else self.scores(rival, client)
            if ours is not None and (rival is None or theirs is not None):
                by_client[client] = difference_over_folds(ours, theirs)
        return by_client

    def estimate_mean_difference(self, label: str, rival: str | None, num_tests: int) -> Estimate | None:
        """Estimates the difference of two methods as a mean over clients; returns None if no client has scores for it."""
        differences = list(self.differences(label, rival).values())
        return estimate_mean_from_folds(differences, num_tests=num_tests, alpha=self.alpha) if differences else None

    def estimate_clients(self, label: str, rival: str | None, num_tests: int) -> dict[str, Estimate | None]:
        """Estimates the difference of two methods as `{client: estimate}`, None for undefined scores."""
        differences = self.differences(label, rival)
        sites = list(differences.values())
        estimates = estimate_clients_from_folds(sites, num_tests=num_tests, alpha=self.alpha) if sites else []
        by_client = dict(zip(differences, estimates, strict=True))
        return {client: by_client.get(client) for client in sorted(self.targets[self.seeds[0]])}

    def mean_scores(self, label: str) -> tuple[float | None, dict[str, float | None]]:
        """Returns a method's mean score, and `{client: score}` with None for undefined scores."""
        scores = {client: self.scores(label, client) for client in sorted(self.targets[self.seeds[0]])}
        by_client = {c: None if score is None else float(score.values.mean()) for c, score in scores.items()}
        defined = [value for value in by_client.values() if value is not None]
        return (fmean(defined) if defined else None), by_client

    def site_gains(self, label: str, rival: str) -> tuple[dict[str, SiteGain], SharedError]:
        """Returns `{client: gain}` over `rival`, and the error that clients share through the runs' seeds."""
        return describe_site_gains(self.differences(label, rival))


def describe_site_gains(differences: Mapping[str, FoldDifferences]) -> tuple[dict[str, SiteGain], SharedError]:
    """Returns `{client: gain}` and the error that all clients share, for `fit_random_effects`."""
    sites = list(differences.values())
    if not sites:
        return {}, SharedError()
    networks, of_seeds = sites[0].num_networks, pooled_network_variance(sites)
    gains = {
        name: SiteGain(
            site.value,
            site.example_variance + of_seeds / networks,
            site.variance_due_to_examples - site.example_variance,
        )
        for name, site in differences.items()
    }
    return gains, SharedError(
        estimate_variance_between_fold_runs(sites) / networks, sites[0].network_degrees_of_freedom
    )
