"""Computes the scores and gains of methods with confidence intervals, for each client and for the mean over clients."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyfed.comparison.statistics.cross_validation.fold_evidence import CrossValidationEvidence
from polyfed.comparison.statistics.cross_validation.resplits import (
    ResplitDifferences,
    estimate_client_means_over_resplits,
)
from polyfed.comparison.statistics.estimate import Estimate
from polyfed.comparison.statistics.mrmc import (
    GainOverRival,
    SeedScores,
    VarianceComponents,
    estimate_client_means,
    estimate_gain_over_best_rival,
    estimate_mean_over_clients,
    score_seeds,
    variance_components_of_difference,
)
from polyfed.comparison.statistics.random_effects import RandomEffects, SharedError, SiteGain, fit_random_effects
from polyfed.core.evaluation.metric import Metric
from polyfed.core.evaluation.metrics import is_built_in_metric

ScoresByMethod = Mapping[str, Mapping[int, Mapping[str, float | None]]]  # method -> seed -> client -> score


@final
@dataclass(frozen=True)
class MethodEvidence:
    """Holds a method's estimated mean score and gains over others, with intervals.

    The intervals of gains hold for all methods simultaneously.

    Attributes:
        mean_score: the mean score over clients.
        gain_over_reference: the mean gain over the reference method.
        gain_over_best: the mean gain over the best method.
        gain_by_client: client id -> gain over the reference method.

    Each is None where there is no method to compare with, or a variance is not defined.
    """

    mean_score: Estimate | None
    gain_over_reference: Estimate | None = None
    gain_over_best: Estimate | None = None
    gain_by_client: Mapping[str, Estimate | None] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class GainOverRivals:
    """Holds the estimated gain of a method over the best of several rival methods, and over each of them.

    Attributes:
        estimate: the gain over the best rival, whichever it is.
        best_rival: the rival with the best observed score.
        gain_by_rival: the gain over each rival, with an interval as if it were the only rival.
    """

    estimate: Estimate
    best_rival: str
    gain_by_rival: Mapping[str, Estimate]


@final
class GainsOverBestRival(NamedTuple):
    """Holds a method's gains over its best rival, in the mean and by client; None if not estimable.

    Attributes:
        for_mean: the gain for the mean over clients.
        by_client: the gain at each client, over this client's best rival.
    """

    for_mean: GainOverRivals | None
    by_client: dict[str, GainOverRivals | None]


@final
@dataclass(frozen=True, eq=False)
class Evidence:
    """Holds the scores and predictions of a comparison's runs, and estimates gains with confidence intervals from them.

    Attributes:
        metric: the metric that decides.
        seeds: the seeds that every method was run with.
        scores: method -> seed -> client -> score.
        outputs: returns the outputs of a method, seed and client on its test examples; None if they were not kept.
        targets: returns the targets of a client's test examples, the same for every seed if `has_same_data`.
        has_same_data: whether clients have the same data with every seed. If not, only the seeds' scores are used.
        has_same_clients: whether a client id names the same participant with every seed.
        sizes: seed -> client -> number of training and of test examples, or of their groups.
        groups: returns the group of each of a client's test examples, like `targets`; None if each is a unit of its own.
        population: the number of clients from which those with scores were drawn at random; None if they were not drawn.
        folds: the predictions of all folds, if the runs are those of a cross-validation; gains are then estimated from them.
    """

    metric: Metric
    seeds: Sequence[int]
    scores: ScoresByMethod
    outputs: Callable[[str, int, str], Tensor | None]
    targets: Callable[[str], Tensor]
    has_same_data: bool
    has_same_clients: bool
    sizes: Mapping[int, Mapping[str, tuple[int, int]]]
    groups: Callable[[str], NDArray[np.int64] | None] = lambda client: None
    folds: CrossValidationEvidence | None = None
    population: int | None = None
    _seed_scores_cache: dict[tuple[str, str], SeedScores | None] = field(default_factory=dict, repr=False)

    def estimate_scores_and_gains(
        self, labels: Sequence[str], reference: str | None, best: str | None
    ) -> dict[str, MethodEvidence]:
        """Estimates each method's mean score, and gains over `reference` and `best`, by label.

        Args:
            labels: all methods with scores.
            reference: the method that gains are measured against; None for none.
            best: the method that the same scores show to be the best; all pairs of methods therefore count as tests.
        """
        num_others = max(1, len([label for label in labels if label != reference]))
        num_pairs = max(1, len(labels) * (len(labels) - 1) // 2)
        by_label = {}
        for label in labels:
            gain, clients = None, dict[str, Estimate | None]()
            if reference in labels and label != reference:
                gain, clients = (
                    self._estimate_mean_gain(label, reference, num_others),
                    self._estimate_client_gains(label, reference, num_others),
                )
            against = None if best is None or label == best else self._estimate_mean_gain(label, best, num_pairs)
            by_label[label] = MethodEvidence(self._estimate_mean_gain(label, None, 1), gain, against, clients)
        return by_label

    def gain_over_best_rival(
        self, label: str, rivals: Sequence[str], num_simultaneous_methods: int
    ) -> GainsOverBestRival:
        """Estimates a method's gain over its best rival, for the mean and by client.

        A gain is None if it cannot be estimated.

        Args:
            label: the method.
            rivals: the alternatives. One that has no score at a client is no rival there.
            num_simultaneous_methods: how many methods have simultaneous intervals.
        """
        # Tests that the intervals allow for: each rival as if it were the only one, and all rivals together.
        levels = num_simultaneous_methods, num_simultaneous_methods * len(rivals)
        mean = {
            rival: (
                self._estimate_mean_gain(label, rival, levels[0]),
                self._estimate_mean_gain(label, rival, levels[1]),
            )
            for rival in rivals
        }
        clients: dict[str, dict[str, tuple[Estimate | None, Estimate | None]]] = {}
        for rival in rivals:
            single, joint = (self._estimate_client_gains(label, rival, tests) for tests in levels)
            for client, single_estimate in single.items():
                clients.setdefault(client, {})[rival] = single_estimate, joint[client]
        return GainsOverBestRival(
            _gain_over_rivals(mean), {client: _gain_over_rivals(gains) for client, gains in clients.items()}
        )

    def clients_scored_with_every_seed(self, label: str, rival: str | None) -> list[str]:
        """Returns the ids of clients that `label` and, if given, `rival` score with every seed."""
        if self.folds is not None:
            return list(self.folds.differences(label, rival))
        tables = [self.scores[name][seed] for name in (label, rival) if name is not None for seed in self.seeds]
        return [c for c in sorted(tables[0]) if all(table.get(c) is not None for table in tables)]

    def _estimate_mean_gain(self, label: str, rival: str | None, tests: int) -> Estimate | None:
        if self.folds is not None:
            return self.folds.estimate_mean_difference(label, rival, tests)
        clients = self.clients_scored_with_every_seed(label, rival)
        if not clients:
            return None
        if self.has_same_data:
            components = list(self._variance_components(label, rival, clients).values())
            if not components:
                return None
            return estimate_mean_over_clients(components, num_tests=tests, population=self.population)
        means = [fmean(self._score_difference(label, rival, seed, c) for c in clients) for seed in self.seeds]
        if len(means) > 1:
            return estimate_client_means_over_resplits([self._resplit_differences(means, clients)], num_tests=tests)[0]
        return None

    def _estimate_client_gains(self, label: str, rival: str | None, tests: int) -> dict[str, Estimate | None]:
        if self.folds is not None:
            return self.folds.estimate_clients(label, rival, tests)
        if not self.has_same_clients:
            return {}
        clients = self.clients_scored_with_every_seed(label, rival)
        if self.has_same_data:
            components = self._variance_components(label, rival, clients)
            means = estimate_client_means(list(components.values()), num_tests=tests) if components else []
            return dict.fromkeys(clients) | dict(zip(components, means, strict=True))
        if len(self.seeds) < 2 or not clients:
            return dict.fromkeys(clients)
        values = {c: [self._score_difference(label, rival, seed, c) for seed in self.seeds] for c in clients}
        sites = [self._resplit_differences(values[c], [c]) for c in clients]
        return dict(zip(clients, estimate_client_means_over_resplits(sites, num_tests=tests), strict=True))

    def fit_random_effects_of_gains(self, label: str, rival: str) -> tuple[list[str], RandomEffects] | None:
        """Models clients' gains as a mean and deviations; returns ids and model, None for few clients.

        Returns None for few clients, and where an id names another client with each seed.
        """
        if not self.has_same_clients:
            return None
        clients = self.clients_scored_with_every_seed(label, rival)
        gains, common = self._site_gains(label, rival, clients)
        model = fit_random_effects(list(gains.values()), common)
        return None if model is None else (list(gains), model)

    def find_client_that_widens_mean(self, label: str, rival: str) -> str | None:
        """Finds the client without which the variance of the mean gain would be less than half; None without one."""
        gains = self._site_gains(label, rival, self.clients_scored_with_every_seed(label, rival))[0]
        variances = {client: gain.variance + gain.further_variance for client, gain in gains.items()}
        number, total = len(variances), sum(variances.values())
        if number < 2:
            return None
        widest = max(variances, key=variances.__getitem__)
        return widest if (total - variances[widest]) / (number - 1) ** 2 < total / number**2 / 2 else None

    def _site_gains(self, label: str, rival: str, clients: Sequence[str]) -> tuple[dict[str, SiteGain], SharedError]:
        """Returns the gain of each client, and the error that all clients share."""
        if self.folds is not None:
            return self.folds.site_gains(label, rival)
        if self.has_same_data:
            components = self._variance_components(label, rival, clients)
            centres = [component.centres for component in components.values()]
            means = np.mean(centres, axis=0) if centres else np.zeros(1)
            common = float(means.var(ddof=1)) / len(means) if len(means) > 1 else 0.0
            gains = {c: SiteGain(component.mean, component.variance) for c, component in components.items()}
            return gains, SharedError(common, max(len(means) - 1, 1))
        if len(self.seeds) < 2 or not clients:
            return {}, SharedError()
        table = {c: [self._score_difference(label, rival, seed, c) for seed in self.seeds] for c in clients}
        sites = {c: self._resplit_differences(table[c], [c]) for c in clients}
        variances = {c: site.variance_factor_of_mean * site.sample_variance for c, site in sites.items()}
        of_mean = self._resplit_differences([fmean(row) for row in zip(*table.values(), strict=True)], clients)
        apart = sum(variances.values()) / len(variances) ** 2
        common = max(of_mean.variance_factor_of_mean * of_mean.sample_variance - apart, 0.0)
        gains = {c: SiteGain(fmean(table[c]), variances[c]) for c in clients}
        return gains, SharedError(common, len(self.seeds) - 1)

    def _resplit_differences(self, values: Sequence[float], clients: Sequence[str]) -> ResplitDifferences:
        sizes = [self.sizes[seed][c] for seed in self.seeds for c in clients]
        num_train, num_test = (sum(numbers) for numbers in zip(*sizes, strict=True))
        # The clients' own units vary about their own means, so that each client after the first costs one.
        num_units = (num_train + num_test) / len(self.seeds) - len(clients) + 1
        return ResplitDifferences(values, num_train, num_test, num_units)

    def _score_difference(self, label: str, rival: str | None, seed: int, client: str) -> float:
        ours = self.scores[label][seed][client]
        theirs = 0.0 if rival is None else self.scores[rival][seed][client]
        assert ours is not None
        assert theirs is not None
        sign = 1.0 if rival is None or self.metric.higher_is_better else -1.0
        return sign * (ours - theirs)

    def _variance_components(
        self, label: str, rival: str | None, clients: Sequence[str]
    ) -> dict[str, VarianceComponents]:
        """Returns the components of the difference at each client that has them."""
        components = {}
        for client in clients:
            ours, theirs = self._seed_scores(label, client), None if rival is None else self._seed_scores(rival, client)
            if ours is not None and (rival is None or theirs is not None):
                components[client] = variance_components_of_difference(ours, theirs)
        return components

    def _seed_scores(self, label: str, client: str) -> SeedScores | None:
        """Returns the scores of a method at a client for all seeds; None if one of them is not defined.

        The scores are cached, since each method is compared with several others.
        """
        if (label, client) not in self._seed_scores_cache:
            outputs = [self.outputs(label, seed, client) for seed in self.seeds]
            kept_outputs = [seed_outputs for seed_outputs in outputs if seed_outputs is not None]
            is_complete = len(kept_outputs) == len(outputs)
            self._seed_scores_cache[label, client] = (
                score_seeds(self.metric, kept_outputs, self.targets(client), self.groups(client))
                if is_complete
                else None
            )
        return self._seed_scores_cache[label, client]


def _gain_over_rivals(gains: Mapping[str, tuple[Estimate | None, Estimate | None]]) -> GainOverRivals | None:
    """Combines gains into the gain over the best rival; None if one is missing, as it may be the best."""
    defined = {
        name: GainOverRival(single, joint)
        for name, (single, joint) in gains.items()
        if single is not None and joint is not None
    }
    if not defined or len(defined) < len(gains):
        return None
    rival = min(defined, key=lambda name: defined[name].alone.value)
    return GainOverRivals(
        estimate_gain_over_best_rival(list(defined.values())),
        rival,
        {name: gain.alone for name, gain in defined.items()},
    )


def clip_interval_to_metric_range(
    estimate: Estimate | None, metric: Metric, *, is_difference: bool
) -> list[float] | None:
    """Returns `[low, high]` clipped to what scores or differences can be; None without a finite interval."""
    if estimate is None or not math.isfinite(estimate.low):
        return None
    if metric.is_from_zero_to_one:
        return [max(estimate.low, -1.0 if is_difference else 0.0), min(estimate.high, 1.0)]
    # Errors and losses are never negative.
    if not is_difference and not metric.higher_is_better and is_built_in_metric(metric.name):
        return [max(estimate.low, 0.0), estimate.high]
    return [estimate.low, estimate.high]
