"""Defines `AvailabilityTrace`: in which intervals of simulated time a client is available."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from polyfed.core.errors import UserError
from polyfed.core.io.values.number_checks import is_number
from polyfed.simulation.scheduling.timing.device_files import (
    assign_entries_to_clients,
    load_device_text,
    parse_number,
    read_csv_rows,
    read_json_mapping,
)

_LONGEST_PERIOD, _SMALLEST_SHARE = 1e15, 1e-9  # beyond them simulated times are not finite numbers


@final
@dataclass(frozen=True)
class AvailabilityTrace:
    """Holds the intervals in which a client is available, in simulated seconds; they repeat after `period`.

    A client computes and sends only while it is available. An update that it has begun pauses until it comes back.

    Args:
        intervals: (start, end) of each interval, ascending, without overlap; end is not included.
        period: after so many seconds the intervals start again.

    Raises:
        UserError: no interval, or one that is empty, negative, or ends after the period.

    >>> trace = AvailabilityTrace(((0.0, 10.0), (30.0, 40.0)), period=100.0)
    >>> trace.is_available(5), trace.is_available(10), trace.next_available(12), trace.next_available(50)
    (True, False, 30.0, 100.0)
    >>> trace.finish_time(5.0, 8.0), trace.finish_time(5.0, 20.0)  # 5 s until 10, then 3 s from 30; another 5 s from 100
    (33.0, 105.0)
    """

    intervals: tuple[tuple[float, float], ...]
    period: float

    def __post_init__(self) -> None:
        if not self.intervals:
            raise UserError("a client must be available in some interval, got none")
        end = 0.0
        for interval in self.intervals:
            if not end <= interval[0] < interval[1] <= self.period < math.inf:
                raise UserError(
                    f"intervals must ascend, without overlap, within the period of {self.period:g} s, got "
                    f"{interval[0]:g} to {interval[1]:g} after {end:g}"
                )
            end = interval[1]
        share = sum(end - start for start, end in self.intervals) / self.period
        if self.period > _LONGEST_PERIOD or share < _SMALLEST_SHARE:
            raise UserError(
                f"a period is at most {_LONGEST_PERIOD:g} s, of which a client is available for at least a billionth, got "
                f"{self.period:g} s and a share of {share:g}"
            )

    def is_available(self, time: float) -> bool:
        """Returns True if the client is available at this time."""
        offset = time % self.period
        before = bisect_right(self.intervals, (offset, math.inf)) - 1
        return before >= 0 and offset < self.intervals[before][1]

    def next_available(self, time: float) -> float:
        """Returns the first time from `time` on at which the client is available."""
        if self.is_available(time):
            return time
        offset = time % self.period
        later = [start for start, _ in self.intervals if start > offset]
        return time - offset + (later[0] if later else self.period + self.intervals[0][0])

    def finish_time(self, start: float, seconds: float) -> float:
        """Returns when work of so many seconds ends that begins at `start` or once the client is available."""
        cycle, offset = start - start % self.period, start % self.period
        for begin, end in self.intervals:
            length = end - max(begin, offset)
            if length > 0 and seconds <= length:
                return cycle + max(begin, offset) + seconds
            seconds -= max(0.0, length)
        in_period = sum(end - begin for begin, end in self.intervals)
        full_periods = max(0, math.ceil(seconds / in_period) - 1)
        cycle += self.period * (1 + full_periods)
        seconds -= in_period * full_periods
        for begin, end in self.intervals:
            if seconds <= end - begin:
                return cycle + begin + seconds
            seconds -= end - begin
        return cycle + self.intervals[-1][1]  # what is left is rounding


def read_availability(value: Any, client_ids: Sequence[str]) -> Mapping[str, AvailabilityTrace]:
    """Reads the availability of each client.

    Args:
        value: `{client: [[start, end], ...]}`; or the path of a CSV file with the columns `client`, `start` and `end`, in
            seconds; or of FedScale's trace as JSON, `{client: {"active": [...], "inactive": [...], "finish_time": ...}}`.
            Mappings and CSV files repeat after their last end, FedScale's after each client's `finish_time`.
        client_ids: sorted.

    Raises:
        UserError: another form, or a client without a trace.
    """
    if isinstance(value, Mapping):
        return _traces_of_intervals(value, client_ids, "availability")
    text, place = load_device_text(value, "availability"), f"availability: {value!r}"
    if value.endswith(".json"):
        entries = read_json_mapping(text, value, "availability")
        traces = {client: _parse_fedscale_trace(entry, f"{place}, {client!r}") for client, entry in entries.items()}
        return assign_entries_to_clients(traces, client_ids, "availability")
    intervals: dict[str, list[list[float]]] = {}
    for line, row in read_csv_rows(text, ("client", "start", "end"), place):
        start, end = (parse_number(row[column], f"{place}, line {line}", column) for column in ("start", "end"))
        if not start < end:
            raise UserError(f"{place}, line {line}: start must be before end, got {start:g} and {end:g}")
        intervals.setdefault(row["client"], []).append([start, end])
    return _traces_of_intervals(intervals, client_ids, place)


def check_availability(value: Any) -> None:
    """Raises a `UserError` unless a setting is a path, or maps clients to lists of [start, end]; files are not opened."""
    if isinstance(value, str) and value.endswith((".csv", ".json")):
        return
    if isinstance(value, Mapping) and value:
        for client, intervals in value.items():
            _check_intervals(intervals, str(client))
        return
    raise UserError(f"availability must be a CSV or JSON file, or {{client: [[start, end], ...]}}, got {value!r}")


def _check_intervals(intervals: Any, client: str) -> None:
    if not isinstance(intervals, list | tuple) or not intervals:
        raise UserError(
            f"availability of client {client!r} must be a list of [start, end] in seconds from 0, at least one, got "
            f"{intervals!r}; leave a client that never takes part out of the federation"
        )
    for pair in intervals:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not (is_pair and all(map(_is_time, pair)) and pair[0] < pair[1]):
            raise UserError(
                f"availability of client {client!r} must be a list of [start, end] in seconds from 0, got {pair!r}"
            )


def _traces_of_intervals(
    intervals_by_client: Mapping[str, Any], client_ids: Sequence[str], place: str
) -> Mapping[str, AvailabilityTrace]:
    period = max(float(end) for intervals in intervals_by_client.values() for _, end in intervals)
    traces = {
        str(i): AvailabilityTrace(_merge_intervals(intervals), period) for i, intervals in intervals_by_client.items()
    }
    return assign_entries_to_clients(traces, client_ids, place)


def _merge_intervals(intervals: Sequence[Sequence[float]]) -> tuple[tuple[float, float], ...]:
    """Returns intervals in ascending order; those that touch or overlap become one."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((float(start), float(end)) for start, end in intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def _parse_fedscale_trace(entry: Any, place: str) -> AvailabilityTrace:
    """Builds the trace of an entry of FedScale's `client_behave_trace`.

    The client is active from each time in `active` to the one in `inactive` at the same position.
    """
    fields: dict[str, Any] = dict(entry) if isinstance(entry, Mapping) else {}
    starts, ends = fields.get("active"), fields.get("inactive")
    period: Any = fields.get("finish_time")
    if not (isinstance(starts, list) and isinstance(ends, list) and len(starts) == len(ends) > 0) or not all(
        map(_is_time, [*starts, *ends, period])
    ):
        raise UserError(
            f"{place} must have as many times in 'active' as in 'inactive', and a 'finish_time'; numbers of seconds"
        )
    pairs = [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
    try:
        return AvailabilityTrace(_merge_intervals(pairs), max(map(float, [period, *ends])))
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


def _is_time(value: Any) -> bool:
    return is_number(value) and 0 <= value < math.inf
