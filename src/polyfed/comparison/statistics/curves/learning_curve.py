"""Builds a run's learning curve with its costs in bytes and seconds, and finds the round at which the run is compared."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final


@final
@dataclass(frozen=True)
class CurvePoint:
    """Describes an evaluated round: the mean score, and the bytes and seconds spent by then."""

    round: int
    score: float | None
    bytes: int
    seconds: float


def build_learning_curve(history: Sequence[Mapping[str, Any]], metric_name: str) -> list[CurvePoint]:
    """Returns a `CurvePoint` with mean score and costs so far for each evaluated round.

    Seconds are those of clients and server: evaluation is not counted.

    >>> rounds = [{"round": t, "bytes_down_total": t, "bytes_up_total": t, "seconds_clients": 1.0, "seconds_server": 0.5,
    ...     "summary": {"accuracy": {"mean": t / 4}} if t == 2 else {}} for t in (1, 2)]
    >>> build_learning_curve(rounds, "accuracy")
    [CurvePoint(round=2, score=0.5, bytes=4, seconds=3.0)]
    """
    return [
        CurvePoint(record["round"], record["summary"].get(metric_name, {}).get("mean"), moved, round(seconds, 4))
        for record, moved, seconds in iterate_records_with_costs_so_far(history)
        if record["summary"]
    ]


@final
class RecordWithCosts(NamedTuple):
    """Holds the record of a round, and the bytes and seconds that the run had spent by the end of that round."""

    record: Mapping[str, Any]
    bytes_so_far: int
    seconds_so_far: float


def iterate_records_with_costs_so_far(history: Sequence[Mapping[str, Any]]) -> Iterator[RecordWithCosts]:
    """Yields each round's record with the bytes and seconds spent by its end.

    Seconds are those of clients and server, without evaluation; NaN for records of early versions, which have none.
    """
    seconds = 0.0
    for record in history:
        seconds += record.get("seconds_clients", math.nan) + record.get("seconds_server", math.nan)
        yield RecordWithCosts(record, record["bytes_down_total"] + record["bytes_up_total"], seconds)


def last_point_within_budget(points: Sequence[CurvePoint], cost_name: str, limit: float | None) -> CurvePoint | None:
    """Returns the last point of at most `limit` bytes or seconds (None: any); None without one.

    >>> last_point_within_budget([CurvePoint(1, 0.5, 10, 1.0), CurvePoint(2, 0.6, 20, 2.0)], "bytes", 15).round
    1
    """
    inside = [p for p in points if limit is None or getattr(p, cost_name) <= limit]
    return inside[-1] if inside else None


def first_point_reaching_target(
    points: Sequence[CurvePoint], target: float | None, *, higher_is_better: bool = True
) -> CurvePoint | None:
    """Returns the first point whose mean score is as good as `target`; None without one.

    >>> first_point_reaching_target([CurvePoint(1, 0.5, 10, 1.0), CurvePoint(2, 0.6, 20, 2.0)], 0.55).bytes
    20
    """
    if target is None or not math.isfinite(target):
        return None
    sign = 1 if higher_is_better else -1
    return next((p for p in points if p.score is not None and sign * p.score >= sign * target), None)
