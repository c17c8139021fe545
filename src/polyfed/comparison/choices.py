"""By what a search chooses: the loss on validation examples.

Clients that train together have one choice: the lowest mean loss over all their validation examples, each counted once. A
mean over clients of an AUC, say, lets the one negative of a small site outvote the examples of all others.

A client that trains alone has a choice of its own, by the loss on its own n validation examples. Where these are few, the
loss of all counts too, as that of `WEIGHT` examples: (n·l_i + WEIGHT·l) / (n + WEIGHT). `benchmarks/rate_choice.py` measures
how much that choice loses to the best one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median_low
from typing import Any, final

from polyfed.comparison.plans import Failure
from polyfed.comparison.reading import Budget
from polyfed.comparison.verdicts import listed
from polyfed.simulation.losses import Curve, pooled, validation_losses

WEIGHT = 50
"""Validation examples for which the loss of all clients counts in the choice of a client that trains alone."""
NEAR = 3
"""Evaluated rounds, neighbours, of which a loss is the mean: the lowest of many single rounds is low by luck."""
_DIGITS = 6  # that count in a loss; those that agree in them are equal
Fields = dict[str, Any]
Place = tuple[float, int]  # a loss and its round


def smoothed_lowest(curve: Curve) -> Place | None:
    """The lowest loss and its round, the first of equals; None for an empty curve. A loss is the mean of an evaluated round
    and its two neighbours.

    >>> smoothed_lowest([(1, 0.5), (2, 0.1), (3, 0.6), (4, 0.3), (5, 0.2), (6, 0.25)])
    (0.25, 5)
    """
    smooth = [(fmean(value for _, value in near), number)
              for k, (number, _) in enumerate(curve) if (near := curve[max(0, k - 1) : k + 2])]  # fmt: skip
    return min(smooth[1:-1] or smooth, default=None)


def lately(curve: Curve, spent: Mapping[int, float], limit: float | None) -> Place | None:
    """The mean loss of the last evaluated rounds up to which no more than `limit` was spent, or of the first round if that
    is none; and the last of them.

    >>> lately([(1, 0.9), (2, 0.25), (3, 0.5), (4, 0.75)], {}, None)
    (0.5, 4)
    """
    inside = [point for point in curve if limit is None or spent[point[0]] <= limit][-NEAR:] or curve[:1]
    return (fmean(loss for _, loss in inside), inside[-1][0]) if inside else None


def unsteadiness(curve: Curve) -> float:
    """By how much a loss rises from round to round, all rises together.

    >>> unsteadiness([(1, 1.0), (2, 0.5), (3, 0.75), (4, 0.25)])
    0.25
    """
    return sum(max(0.0, after - before) for (_, before), (_, after) in pairwise(curve))


def drawn(own: Mapping[int, float], number: int, all_clients: Curve, weight: float = WEIGHT) -> list[tuple[int, float]]:
    """The loss by which a client that trains alone chooses, by round.

    Args:
        own: its loss by round, on `number` validation examples.
        number: of them.
        all_clients: the loss on the validation examples of all clients.
        weight: for how many examples that counts.

    >>> drawn({1: 1.0, 2: 0.5}, 10, [(1, 0.5), (2, 1.0)], weight=10)
    [(1, 0.75), (2, 0.75)]
    """
    share = number / (number + weight)
    return [(t, share * own[t] + (1 - share) * loss) for t, loss in all_clients if t in own]


def capped(losses: Mapping[str, Mapping[int, float]], most: Mapping[str, float]) -> dict[str, dict[int, float]]:
    """The losses of clients, none above what is the client's most: one whose training explodes would outvote all others.

    >>> capped({"a": {1: 1.0, 2: 1e9}}, {"a": 1.0})
    {'a': {1: 1.0, 2: 1.0}}
    """
    return {client: {t: min(loss, most[client]) for t, loss in own.items()} for client, own in losses.items()}


def first(losses: Mapping[int, float]) -> float:
    """Of the losses by round that of the first.

    >>> first({2: 0.5, 1: 0.75})
    0.75
    """
    return losses[min(losses)]


def stopped(losses: Mapping[str, Mapping[int, float]], rounds: Mapping[str, int]) -> dict[str, dict[int, float]]:
    """The losses of clients that each train up to a round of their own, and stay as they are then.

    >>> stopped({"a": {1: 0.5, 2: 0.75}, "b": {1: 0.5, 2: 0.25}}, {"a": 1, "b": 2})
    {'a': {1: 0.5, 2: 0.5}, 'b': {1: 0.5, 2: 0.25}}
    """
    return {
        client: {t: own[min(t, rounds[client])] if rounds.get(client) in own else loss for t, loss in own.items()}
        for client, own in losses.items()
    }


def chosen_words(tuned: Mapping[str, Any]) -> str:
    """What a search chose for a method, or for each of its clients; empty for nothing.

    Args:
        tuned: as `comparison.json` has it.

    >>> chosen_words({"chosen": {"lr": 0.1}})
    'lr 0.1'
    >>> chosen_words({"chosen": {"lr": 0.1}, "by_client": {"a": {"lr": 0.1}, "b": {"lr": 0.3}, "c": {"lr": 0.1}}})
    'lr 0.1 (a, c), lr 0.3 (b)'
    """
    whose: dict[str, list[str]] = {}
    for client, fields in (tuned.get("by_client") or {}).items():
        whose.setdefault(_words(fields), []).append(client)
    if len(whose) < 2:
        return next(iter(whose), _words(tuned["chosen"]))
    return ", ".join(f"{words} ({listed(clients)})" for words, clients in sorted(whose.items()))


def _words(fields: Fields) -> str:
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in fields.items())


@final
@dataclass(frozen=True, eq=False)
class Tried:
    """A run of a search.

    Attributes:
        label, fields: of which method, with which values.
        history: the objects of `metrics.jsonl`; empty where the run failed.
        budget: by whose rounds it is judged.
        sizes: validation examples by client.
        score: the name of the metric that decides, which is told beside the loss.
        dropped: clients whose training failed in the run.
        failure: why there is no run.
    """

    label: str
    fields: Fields
    history: Sequence[Mapping[str, Any]]
    budget: Budget
    sizes: Mapping[str, int]
    score: str
    dropped: frozenset[str] = frozenset()
    failure: Failure | None = None
    spent: Mapping[int, float] = field(default_factory=dict)

    @cached_property
    def losses(self) -> Mapping[str, Mapping[int, float]]:
        """By client and evaluated round. A client whose training diverged has none: a mean over the others would be rewarded
        for that."""
        found = {c: rounds for c, rounds in validation_losses(self.history).items() if c not in self.dropped}
        evaluated = sum(bool(record["summary"]) for record in self.history)
        return {c: rounds for c, rounds in found.items() if len(rounds) == evaluated}

    @cached_property
    def curve(self) -> Curve:
        """The loss on all validation examples, by round."""
        return pooled(self.losses, self.sizes)

    def placed(self, curve: Curve) -> Place | None:
        """The loss by which a curve is judged, and its round."""
        if self.budget.asked:
            return lately(curve, self.spent, self.budget.limit)
        return smoothed_lowest(curve)

    @cached_property
    def place(self) -> Place | None:
        """The loss on all validation examples, and its round; None without any."""
        return self.placed(self.curve)

    @property
    def round(self) -> int | None:
        """The round of `place`."""
        return None if self.place is None else self.place[1]

    @property
    def validation(self) -> float | None:
        """The mean over clients of the metric that decides, after that round; it has no say."""
        if self.round is None:
            return None
        found: float | None = self.history[self.round - 1]["summary"].get(f"val_{self.score}", {}).get("mean")
        return found


def ranked(runs: Sequence[Tried], everyone: frozenset[str]) -> list[Tried]:
    """The runs with a loss of each of `everyone`, the lowest loss first; of equal ones the steadier, then the smaller
    learning rate."""
    whole = [one for one in runs if one.place is not None and one.losses.keys() == everyone]
    return sorted(whole, key=lambda one: _order(one, one.place or (0.0, 0), one.curve))


def ranked_alone(runs: Sequence[Tried], client: str) -> list[tuple[Tried, int]]:
    """The runs in which a client that trains alone has a loss, the best for it first, each with its best round.

    In the loss of all, a client counts with no more than it began with, the median over the runs, and with that in a run in
    which its training failed. So the mean is over the same clients in each run, and one that explodes does not decide for
    the others.
    """
    everyone = sorted({c for one in runs for c in one.losses})
    began = {c: median_low(first(one.losses[c]) for one in runs if c in one.losses) for c in everyone}
    found: list[tuple[tuple[float, float, float], int, Tried, int]] = []
    for one in runs:
        if client not in one.losses:
            continue
        own = one.losses[client]
        filled = capped({c: one.losses.get(c) or dict.fromkeys(own, began[c]) for c in everyone}, began)
        curve = drawn(own, one.sizes.get(client, 0), pooled(filled, one.sizes))
        if (place := one.placed(curve)) is not None:
            found.append((_order(one, place, curve), len(found), one, place[1]))
    return [(one, number) for _, _, one, number in sorted(found, key=lambda entry: entry[:2])]


def _order(one: Tried, place: Place, curve: Curve) -> tuple[float, float, float]:
    rate = one.fields.get("lr", 0.0)
    return float(f"{place[0]:.{_DIGITS}g}"), float(f"{unsteadiness(curve):.{_DIGITS}g}"), float(rate)
