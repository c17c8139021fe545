"""Builds a run's learning curve with its costs, and finds the round that is compared."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True)
class CurvePoint:
    """Holds an evaluated round of a run: the mean score over clients, and the bytes and seconds spent up to it."""

    round: int
    score: float | None
    bytes: int
    seconds: float


def build_learning_curve(history: Sequence[Mapping[str, Any]], score: str) -> list[CurvePoint]:
    """Builds the learning curve of a run from the records of its `metrics.jsonl`.

    Seconds are those of clients and server: evaluation is no cost of the method.

    >>> rounds = [{"round": t, "bytes_down_total": t, "bytes_up_total": t, "seconds_clients": 1.0, "seconds_server": 0.5,
    ...     "summary": {"accuracy": {"mean": t / 4}} if t == 2 else {}} for t in (1, 2)]
    >>> build_learning_curve(rounds, "accuracy")
    [CurvePoint(round=2, score=0.5, bytes=4, seconds=3.0)]
    """
    return [
        CurvePoint(record["round"], record["summary"].get(score, {}).get("mean"), moved, round(seconds, 4))
        for record, moved, seconds in add_costs(history)
        if record["summary"]
    ]


def add_costs(history: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], int, float]]:
    """Yields each round's record with the bytes and seconds up to it.

    Seconds are those of clients and server, without evaluation; NaN for records of early versions, which have none.
    """
    seconds = 0.0
    for record in history:
        seconds += record.get("seconds_clients", math.nan) + record.get("seconds_server", math.nan)
        yield record, record["bytes_down_total"] + record["bytes_up_total"], seconds


def mean_metric_by_round(history: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Returns each evaluated round that has a metric, and the metric's mean over clients.

    >>> mean_metric_by_round([{"round": 2, "summary": {"val_loss": {"mean": 0.5}}}, {"round": 3, "summary": {}}], "val_loss")
    [(2, 0.5)]
    """
    return [(r["round"], r["summary"][name]["mean"]) for r in history if name in r["summary"]]


def last_point_within_budget(points: Sequence[CurvePoint], kind: str, limit: float | None) -> CurvePoint | None:
    """Returns the last evaluated round within `limit` bytes or seconds (all rounds without a limit), or None.

    >>> last_point_within_budget([CurvePoint(1, 0.5, 10, 1.0), CurvePoint(2, 0.6, 20, 2.0)], "bytes", 15).round
    1
    """
    inside = [p for p in points if limit is None or getattr(p, kind) <= limit]
    return inside[-1] if inside else None


def first_point_reaching_target(
    points: Sequence[CurvePoint], target: float | None, *, higher_is_better: bool = True
) -> CurvePoint | None:
    """Returns the first evaluated round whose mean score is at least as good as `target`, or None.

    >>> first_point_reaching_target([CurvePoint(1, 0.5, 10, 1.0), CurvePoint(2, 0.6, 20, 2.0)], 0.55).bytes
    20
    """
    if target is None or not math.isfinite(target):
        return None
    sign = 1 if higher_is_better else -1
    return next((p for p in points if p.score is not None and sign * p.score >= sign * target), None)
