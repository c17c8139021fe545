"""Builds the learning curve of a run (score, bytes and seconds after each evaluated round) and selects points on it."""

import math
from collections.abc import Mapping, Sequence
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

    Seconds are those of clients and server; evaluation is not counted as a cost of the method.

    >>> rounds = [{"round": t, "bytes_down_total": t, "bytes_up_total": t, "seconds_clients": 1.0, "seconds_server": 0.5,
    ...     "summary": {"accuracy": {"mean": t / 4}} if t == 2 else {}} for t in (1, 2)]
    >>> build_learning_curve(rounds, "accuracy")
    [CurvePoint(round=2, score=0.5, bytes=4, seconds=3.0)]
    """
    points, seconds = [], 0.0
    for record in history:
        seconds += record["seconds_clients"] + record["seconds_server"]
        if record["summary"]:
            mean = record["summary"].get(score, {}).get("mean")
            moved = record["bytes_down_total"] + record["bytes_up_total"]
            points.append(CurvePoint(record["round"], mean, moved, round(seconds, 4)))
    return points


def mean_metric_by_round(history: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Returns (round, mean over clients) of a metric for each evaluated round that has it.

    >>> mean_metric_by_round([{"round": 2, "summary": {"val_loss": {"mean": 0.5}}}, {"round": 3, "summary": {}}], "val_loss")
    [(2, 0.5)]
    """
    return [(r["round"], r["summary"][name]["mean"]) for r in history if name in r["summary"]]


def last_point_within_budget(points: Sequence[CurvePoint], kind: str, limit: float | None) -> CurvePoint | None:
    """Returns the last evaluated round up to which at most `limit` bytes or seconds were spent; without a limit, the last
    one. None if there is none.

    >>> last_point_within_budget([CurvePoint(1, 0.5, 10, 1.0), CurvePoint(2, 0.6, 20, 2.0)], "bytes", 15).round
    1
    """
    inside = [p for p in points if limit is None or getattr(p, kind) <= limit]
    return inside[-1] if inside else None


def first_point_reaching_target(
    points: Sequence[CurvePoint], target: float | None, *, higher_is_better: bool = True
) -> CurvePoint | None:
    """Returns the first evaluated round whose mean score is at least as good as `target`; None if no round is.

    >>> first_point_reaching_target([CurvePoint(1, 0.5, 10, 1.0), CurvePoint(2, 0.6, 20, 2.0)], 0.55).bytes
    20
    """
    if target is None or not math.isfinite(target):
        return None
    sign = 1 if higher_is_better else -1
    return next((p for p in points if p.score is not None and sign * p.score >= sign * target), None)
