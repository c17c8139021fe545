"""What predictions on test examples support: each method's score and gains with intervals, for the mean and by site."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import final

from torch import Tensor

from polyfed.comparison.crossed import (
    Dealt,
    Estimate,
    Parts,
    Scored,
    difference,
    least,
    of_mean,
    of_sites,
    of_splits,
    scored,
)
from polyfed.core.metrics import Metric, is_built_in

Scores = Mapping[str, Mapping[int, Mapping[str, float | None]]]  # by method, seed and client


@final
@dataclass(frozen=True)
class Found:
    """What is known of one method: `mean`, of its score over clients; `gain` over the reference; `against_best`, its gain
    over the best method; `clients`, the gain of each over the reference. The intervals of gains hold for all methods
    together. None where there is nothing to compare with, or a variance is not defined."""

    mean: Estimate | None
    gain: Estimate | None = None
    against_best: Estimate | None = None
    clients: Mapping[str, Estimate | None] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class Rivalry:
    """The gain of a method over the best of several rivals.

    Attributes: `estimate`, of that gain; `rival`, the best of them by what was seen; `gains`, over each, as if it were the
    only one.
    """

    estimate: Estimate
    rival: str
    gains: Mapping[str, Estimate]


@final
@dataclass(frozen=True, eq=False)
class Evidence:
    """The compared rounds of all runs of a comparison.

    Attributes:
        metric: which decides.
        seeds: of each method.
        scores: by method, seed and client.
        outputs: of a method, seed and client on its test examples; None where they were not kept.
        targets: of the test examples of a client, the same in each seed if `fixed`.
        fixed: whether clients have the same data in each seed. Otherwise the seeds' scores alone are used.
        named: whether a client's name is the same participant in each seed.
        sizes: by seed and client, the number of training and of test examples.
    """

    metric: Metric
    seeds: Sequence[int]
    scores: Scores
    outputs: Callable[[str, int, str], Tensor | None]
    targets: Callable[[str], Tensor]
    fixed: bool
    named: bool
    sizes: Mapping[int, Mapping[str, tuple[int, int]]]
    _known: dict[tuple[str, str], Scored | None] = field(default_factory=dict, repr=False)

    def of(self, labels: Sequence[str], reference: str | None, best: str | None) -> dict[str, Found]:
        """Of each method.

        Args:
            labels: all methods with scores.
            reference: the method that gains are over; None for none.
            best: the method that the same scores show to be the best, so that all pairs count as tests.
        """
        others = max(1, len([label for label in labels if label != reference]))
        pairs = max(1, len(labels) * (len(labels) - 1) // 2)
        found = {}
        for label in labels:
            gain, clients = None, dict[str, Estimate | None]()
            if reference in labels and label != reference:
                gain, clients = self._gain(label, reference, others), self._clients(label, reference, others)
            against = None if best is None or label == best else self._gain(label, best, pairs)
            found[label] = Found(self._gain(label, None, 1), gain, against, clients)
        return found

    def over(self, label: str, rivals: Sequence[str], methods: int) -> tuple[Rivalry | None, dict[str, Rivalry | None]]:
        """What a method gains over the best that there is without it: for the mean over clients, where the best is one for
        all of them, and for each client, where it is its own.

        Args:
            label: of the method.
            rivals: what there is without it. One that has no score at a client is no rival there.
            methods: how many methods there are intervals for at the same time.
        """
        levels = (methods, methods * len(rivals))  # of each rival as if it were the only one, and of all together
        mean = {other: (self._gain(label, other, levels[0]), self._gain(label, other, levels[1])) for other in rivals}
        clients: dict[str, dict[str, tuple[Estimate | None, Estimate | None]]] = {}
        for other in rivals:
            single, joint = (self._clients(label, other, tests) for tests in levels)
            for client, one in single.items():
                clients.setdefault(client, {})[other] = one, joint[client]
        return _rivalry(mean), {client: _rivalry(of) for client, of in clients.items()}

    def clients_of(self, label: str, other: str | None) -> list[str]:
        """Clients with a score by each seed of the method, and of the other one."""
        tables = [self.scores[one][seed] for one in (label, other) if one is not None for seed in self.seeds]
        return [c for c in sorted(tables[0]) if all(table.get(c) is not None for table in tables)]

    def _gain(self, label: str, other: str | None, tests: int) -> Estimate | None:
        clients = self.clients_of(label, other)
        if not clients:
            return None
        if self.fixed:
            known = [one for c in clients if (one := self._parts(label, other, c)) is not None]
            return of_mean(known, tests=tests) if known else None
        means = [fmean(self._difference(label, other, seed, c) for c in clients) for seed in self.seeds]
        return of_splits([self._dealt(means, clients)], tests=tests)[0] if len(means) > 1 else None

    def _clients(self, label: str, other: str | None, tests: int) -> dict[str, Estimate | None]:
        if not self.named:
            return {}
        clients = self.clients_of(label, other)
        if self.fixed:
            known = {c: one for c in clients if (one := self._parts(label, other, c)) is not None}
            estimates = dict(zip(known, of_sites(list(known.values()), tests=tests), strict=True)) if known else {}
            return {c: estimates.get(c) for c in clients}
        if len(self.seeds) < 2 or not clients:
            return dict.fromkeys(clients)
        values = {c: [self._difference(label, other, seed, c) for seed in self.seeds] for c in clients}
        sites = [self._dealt(values[c], [c]) for c in clients]
        return dict(zip(clients, of_splits(sites, tests=tests), strict=True))

    def _dealt(self, values: Sequence[float], clients: Sequence[str]) -> Dealt:
        sizes = [self.sizes[seed][c] for seed in self.seeds for c in clients]
        return Dealt(values, sum(train for train, _ in sizes), sum(test for _, test in sizes))

    def _difference(self, label: str, other: str | None, seed: int, client: str) -> float:
        ours = self.scores[label][seed][client]
        theirs = 0.0 if other is None else self.scores[other][seed][client]
        assert ours is not None
        assert theirs is not None
        sign = 1.0 if other is None or self.metric.higher_is_better else -1.0
        return sign * (ours - theirs)

    def _parts(self, label: str, other: str | None, client: str) -> Parts | None:
        ours, theirs = self._scored(label, client), None if other is None else self._scored(other, client)
        return None if ours is None or (other is not None and theirs is None) else difference(ours, theirs)

    def _scored(self, label: str, client: str) -> Scored | None:
        """Of a method at a client; it is compared with several others."""
        if (label, client) not in self._known:
            outputs = [self.outputs(label, seed, client) for seed in self.seeds]
            kept = [one for one in outputs if one is not None]
            whole = len(kept) == len(outputs)
            self._known[label, client] = scored(self.metric, kept, self.targets(client)) if whole else None
        return self._known[label, client]


def _rivalry(gains: Mapping[str, tuple[Estimate | None, Estimate | None]]) -> Rivalry | None:
    """None where the variance of one is not defined: that rival may be the best."""
    known = {other: (one, joint) for other, (one, joint) in gains.items() if one is not None and joint is not None}
    if not known or len(known) < len(gains):
        return None
    rival = min(known, key=lambda other: known[other][0].value)
    return Rivalry(least(list(known.values())), rival, {other: one for other, (one, _) in known.items()})


def span(estimate: Estimate | None, metric: Metric, *, difference: bool) -> list[float] | None:
    """The ends of an interval, without what no share or error can be; None without one."""
    if estimate is None or not math.isfinite(estimate.low):
        return None
    if metric.unit == "%" or metric.name == "auc":
        return [max(estimate.low, -1.0 if difference else 0.0), min(estimate.high, 1.0)]
    if (
        not difference and not metric.higher_is_better and is_built_in(metric.name)
    ):  # errors and losses are never below 0
        return [max(estimate.low, 0.0), estimate.high]
    return [estimate.low, estimate.high]
