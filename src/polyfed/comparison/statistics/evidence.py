"""What predictions on test examples support: each method's score and gains with intervals, for the mean and by site."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import final

from torch import Tensor

from polyfed.comparison.statistics.mrmc import (
    Estimate,
    ResplitDifferences,
    SeedScores,
    VarianceComponents,
    combine_gains_over_rivals,
    difference_components,
    estimate_by_client,
    estimate_from_resplits,
    estimate_mean,
    score_seeds,
)
from polyfed.core.evaluation.metrics import Metric, is_built_in_metric

ScoresByMethod = Mapping[str, Mapping[int, Mapping[str, float | None]]]  # by method, seed and client


@final
@dataclass(frozen=True)
class MethodEvidence:
    """What is known of one method: `mean`, of its score over clients; `gain` over the reference; `against_best`, its gain
    over the best method; `clients`, the gain of each over the reference. The intervals of gains hold for all methods
    together. None where there is nothing to compare with, or a variance is not defined."""

    mean: Estimate | None
    gain: Estimate | None = None
    against_best: Estimate | None = None
    clients: Mapping[str, Estimate | None] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class GainOverRivals:
    """The gain of a method over the best of several rivals.

    Attributes: `estimate`, of that gain; `best_rival`, the best of them by what was seen; `gain_by_rival`, over each,
    as if it were the only one.
    """

    estimate: Estimate
    best_rival: str
    gain_by_rival: Mapping[str, Estimate]


@final
@dataclass(frozen=True, eq=False)
class Evidence:
    """The compared rounds of all runs of a comparison.

    Attributes:
        metric: which decides.
        seeds: of each method.
        scores: by method, seed and client.
        outputs: of a method, seed and client on its test examples; None where they were not kept.
        targets: of the test examples of a client, the same in each seed if `has_same_data`.
        has_same_data: whether clients have the same data in each seed. Otherwise the seeds' scores alone are used.
        has_same_clients: whether a client's name is the same participant in each seed.
        sizes: by seed and client, the number of training and of test examples.
    """

    metric: Metric
    seeds: Sequence[int]
    scores: ScoresByMethod
    outputs: Callable[[str, int, str], Tensor | None]
    targets: Callable[[str], Tensor]
    has_same_data: bool
    has_same_clients: bool
    sizes: Mapping[int, Mapping[str, tuple[int, int]]]
    _seed_scores_cache: dict[tuple[str, str], SeedScores | None] = field(default_factory=dict, repr=False)

    def evaluate_methods(
        self, labels: Sequence[str], reference: str | None, best: str | None
    ) -> dict[str, MethodEvidence]:
        """Of each method.

        Args:
            labels: all methods with scores.
            reference: the method that gains are over; None for none.
            best: the method that the same scores show to be the best, so that all pairs count as tests.
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
        self, label: str, rivals: Sequence[str], num_methods: int
    ) -> tuple[GainOverRivals | None, dict[str, GainOverRivals | None]]:
        """What a method gains over the best that there is without it: for the mean over clients, where the best is one for
        all of them, and for each client, where it is its own.

        Args:
            label: of the method.
            rivals: what there is without it. One that has no score at a client is no rival there.
            num_methods: how many methods there are intervals for at the same time.
        """
        levels = (
            num_methods,
            num_methods * len(rivals),
        )  # of each rival as if it were the only one, and of all together
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
        return _gain_over_rivals(mean), {client: _gain_over_rivals(of) for client, of in clients.items()}

    def clients_with_scores(self, label: str, rival: str | None) -> list[str]:
        """Clients with a score by each seed of the method, and of the other one."""
        tables = [self.scores[name][seed] for name in (label, rival) if name is not None for seed in self.seeds]
        return [c for c in sorted(tables[0]) if all(table.get(c) is not None for table in tables)]

    def _estimate_mean_gain(self, label: str, rival: str | None, tests: int) -> Estimate | None:
        clients = self.clients_with_scores(label, rival)
        if not clients:
            return None
        if self.has_same_data:
            components = [
                client_components
                for c in clients
                if (client_components := self._variance_components(label, rival, c)) is not None
            ]
            return estimate_mean(components, tests=tests) if components else None
        means = [fmean(self._score_difference(label, rival, seed, c) for c in clients) for seed in self.seeds]
        return (
            estimate_from_resplits([self._resplit_differences(means, clients)], tests=tests)[0]
            if len(means) > 1
            else None
        )

    def _estimate_client_gains(self, label: str, rival: str | None, tests: int) -> dict[str, Estimate | None]:
        if not self.has_same_clients:
            return {}
        clients = self.clients_with_scores(label, rival)
        if self.has_same_data:
            components = {
                c: client_components
                for c in clients
                if (client_components := self._variance_components(label, rival, c)) is not None
            }
            estimates = (
                dict(zip(components, estimate_by_client(list(components.values()), tests=tests), strict=True))
                if components
                else {}
            )
            return {c: estimates.get(c) for c in clients}
        if len(self.seeds) < 2 or not clients:
            return dict.fromkeys(clients)
        values = {c: [self._score_difference(label, rival, seed, c) for seed in self.seeds] for c in clients}
        sites = [self._resplit_differences(values[c], [c]) for c in clients]
        return dict(zip(clients, estimate_from_resplits(sites, tests=tests), strict=True))

    def _resplit_differences(self, values: Sequence[float], clients: Sequence[str]) -> ResplitDifferences:
        sizes = [self.sizes[seed][c] for seed in self.seeds for c in clients]
        return ResplitDifferences(values, sum(train for train, _ in sizes), sum(test for _, test in sizes))

    def _score_difference(self, label: str, rival: str | None, seed: int, client: str) -> float:
        ours = self.scores[label][seed][client]
        theirs = 0.0 if rival is None else self.scores[rival][seed][client]
        assert ours is not None
        assert theirs is not None
        sign = 1.0 if rival is None or self.metric.higher_is_better else -1.0
        return sign * (ours - theirs)

    def _variance_components(self, label: str, rival: str | None, client: str) -> VarianceComponents | None:
        ours, theirs = self._seed_scores(label, client), None if rival is None else self._seed_scores(rival, client)
        return None if ours is None or (rival is not None and theirs is None) else difference_components(ours, theirs)

    def _seed_scores(self, label: str, client: str) -> SeedScores | None:
        """Of a method at a client; it is compared with several others."""
        if (label, client) not in self._seed_scores_cache:
            outputs = [self.outputs(label, seed, client) for seed in self.seeds]
            kept_outputs = [seed_outputs for seed_outputs in outputs if seed_outputs is not None]
            is_complete = len(kept_outputs) == len(outputs)
            self._seed_scores_cache[label, client] = (
                score_seeds(self.metric, kept_outputs, self.targets(client)) if is_complete else None
            )
        return self._seed_scores_cache[label, client]


def _gain_over_rivals(gains: Mapping[str, tuple[Estimate | None, Estimate | None]]) -> GainOverRivals | None:
    """None where the variance of one is not defined: that rival may be the best."""
    defined = {
        name: (single, joint) for name, (single, joint) in gains.items() if single is not None and joint is not None
    }
    if not defined or len(defined) < len(gains):
        return None
    rival = min(defined, key=lambda name: defined[name][0].value)
    return GainOverRivals(
        combine_gains_over_rivals(list(defined.values())),
        rival,
        {name: single for name, (single, _) in defined.items()},
    )


def interval_ends(estimate: Estimate | None, metric: Metric, *, difference: bool) -> list[float] | None:
    """The ends of an interval, without what no share or error can be; None without one."""
    if estimate is None or not math.isfinite(estimate.low):
        return None
    if metric.unit == "%" or metric.name == "auc":
        return [max(estimate.low, -1.0 if difference else 0.0), min(estimate.high, 1.0)]
    if (
        not difference and not metric.higher_is_better and is_built_in_metric(metric.name)
    ):  # errors and losses are never below 0
        return [max(estimate.low, 0.0), estimate.high]
    return [estimate.low, estimate.high]
