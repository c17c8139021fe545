"""Reads from a run directory what the HTML report shows of the run.

A damaged `metrics.jsonl` is an error, not a run that has not begun.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

from polyfed.comparison.statistics.curves.learning_curve import iterate_records_with_costs_so_far
from polyfed.comparison.storage.comparison_directory import DESCRIPTION, command_to_continue, read_description
from polyfed.core.errors import UserError
from polyfed.core.evaluation.metrics import METRICS, default_metric_names
from polyfed.core.io.values.number_checks import is_number, is_whole_number
from polyfed.report.data.score_format import ScoreFormat, score_format_of
from polyfed.simulation.monitoring.update_norms import NORM, norms_by_client
from polyfed.simulation.storage.directory import call_to_resume, read_config, read_manifest, read_metrics_text

DIGITS = 12  # after the point, of means and differences of scores; what is beyond is rounding

_TOTALS = ("bytes_down_total", "bytes_up_total")
_SECONDS = ("seconds_clients", "seconds_server")  # runs of early versions have none


@final
class LearningCurvePoint(NamedTuple):
    """Holds an evaluated round, its mean score, and the megabytes and seconds so far.

    Megabytes are up and down, of 2^20 bytes; a value that is not defined is NaN.
    """

    round_number: int
    mean_score: float
    megabytes: float
    seconds: float


@final
class RunCost(NamedTuple):
    """Holds the megabytes that the server and clients of a run have sent, and the seconds that the run has spent."""

    megabytes: float
    seconds: float


@final
class NormsAndWarnings(NamedTuple):
    """Holds the norm of each client's update, as {round: {client: norm}}, and the warnings of all rounds."""

    norms_by_round: dict[int, dict[str, float]]
    warnings: tuple[str, ...]


@final
@dataclass(frozen=True, eq=False)
class RunRecord:
    """Holds what the HTML report shows of one run: its configuration, scores, learning curve, traffic and warnings.

    Attributes:
        folder: the run directory; None for a run that was kept in memory.
        config: the run's configuration, as far as it is known.
        method: name of the algorithm.
        seed: the run's seed.
        score_format: the metric that decides, and how it is written.
        planned_rounds: number of rounds that were asked for.
        rounds_done: number of rounds that are done.
        scored_round: the round whose scores count: the last evaluated one, or the last within a comparison's budget.
        score_by_client: each client's score after `scored_round`; None where it is not defined.
        learning_curve: a point for each evaluated round.
        failure_count: number of replies that were lost.
        update_norms: by round and client, the norm of the update; runs of early versions have none.
        warnings: sentences about the rounds.
        data_warnings: sentences about the data.
        uses_secure_sums: whether the run used secure sums.
        evaluated: how many of how many clients were evaluated after `scored_round` (`clients`, `of`), and the interval of
            each mean over all clients (`mean_interval`); empty if all were.
        simulated_seconds: the simulated time after `scored_round`; None if the run simulated no time.
    """

    folder: Path | None
    config: Mapping[str, Any]
    method: str
    seed: int
    score_format: ScoreFormat
    planned_rounds: int
    rounds_done: int
    scored_round: int
    score_by_client: Mapping[str, float | None]
    learning_curve: tuple[LearningCurvePoint, ...]
    failure_count: int = 0
    update_norms: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    uses_secure_sums: bool = False
    data_warnings: tuple[str, ...] = ()
    evaluated: Mapping[str, Any] = field(default_factory=dict)
    simulated_seconds: float | None = None

    @property
    def cost_until_scored_round(self) -> RunCost:
        """Returns the megabytes sent and the seconds spent up to the round whose scores count (`scored_round`)."""
        last_point = next(point for point in reversed(self.learning_curve) if point[0] == self.scored_round)
        return RunCost(last_point[2], last_point[3])


@final
@dataclass(frozen=True, eq=False)
class ClientGain:
    """Holds a client's gain over training on its own data only: mean, lowest and highest over seeds."""

    client: str
    mean: float
    low: float
    high: float


def mean_of_defined(values: Sequence[float | None]) -> float:
    """Returns the mean of the values that are neither None nor NaN; NaN if there are no such values.

    The mean is rounded so that equal means are equal.

    >>> mean_of_defined([1.0, None, 2.0]), mean_of_defined([]), mean_of_defined([0.1, 0.2, -0.3])
    (1.5, nan, 0.0)
    """
    defined = [value for value in values if value is not None and not math.isnan(value)]
    return round(math.fsum(defined) / len(defined), DIGITS) + 0.0 if defined else math.nan


def read_run_record(folder: Path) -> RunRecord | None:
    """Reads what the HTML report shows of a run from its run directory; None if the run has evaluated no round.

    Raises:
        UserError: its configuration or a round is damaged.
    """
    config = read_config(folder)
    method = config.get("algorithm")
    if not isinstance(method, Mapping) or "name" not in method:
        raise UserError(f"{folder / 'config.yaml'} names no algorithm, so that it is not of a run")
    deciding_metric = _deciding_metric(config)
    stored_score = read_manifest(folder).get("score")
    score_fields = stored_score if isinstance(stored_score, Mapping) else {}
    score_names = [
        name for name in (score_fields.get("name"), deciding_metric, *default_metric_names()) if isinstance(name, str)
    ]
    records = read_checked_round_records(folder / "metrics.jsonl", score_names)
    names = {name for record in records for row in record["clients"].values() for name in row}
    score = next((name for name in score_names if name in names), None)
    if score is None:
        return None
    score_format = score_format_of(score, score_fields if score_fields.get("name") == score else None)
    curve, final, evaluated = [], {}, dict[str, Any]()
    for record, moved, seconds in iterate_records_with_costs_so_far(records):
        if scores := {client: row[score] for client, row in record["clients"].items() if score in row}:
            final, evaluated = scores, _sample_of_record(record)
            mean_score = mean_of_defined(list(scores.values()))
            curve.append(LearningCurvePoint(record["round"], mean_score, moved / 2**20, seconds))
    last_round = records[-1]["round"]
    try:
        seed, rounds = int(config.get("seed", 0)), int(config.get("rounds", last_round))
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"seed and rounds in {folder / 'config.yaml'} must be whole numbers: {error}") from error
    failures = sum(len(record.get("failures", ())) for record in records)
    norms, warnings = norms_and_warnings_of_rounds(records)
    return RunRecord(
        folder,
        config,
        str(method["name"]),
        seed,
        score_format,
        rounds,
        last_round,
        curve[-1][0],
        final,
        tuple(curve),
        failures,
        norms,
        warnings,
        config.get("secure") is True,
        data_warnings=_data_warnings(folder),
        evaluated=evaluated,
        simulated_seconds=find_simulated_seconds(records, curve[-1][0]),
    )


def _sample_of_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of evaluated and of all clients, with intervals of means; empty if all were evaluated."""
    sample = record.get("evaluated")
    if not isinstance(sample, Mapping) or not all(type(sample.get(name)) is int for name in ("clients", "of")):
        return {}
    intervals = sample.get("mean_interval")
    ends = {
        str(name): list(pair)
        for name, pair in (intervals.items() if isinstance(intervals, Mapping) else ())
        if isinstance(pair, list) and len(pair) == 2 and all(map(_is_number, pair))
    }
    return {"clients": sample["clients"], "of": sample["of"], "mean_interval": ends}


def read_undamaged_round_records(folder: Path | None) -> Sequence[Mapping[str, Any]]:
    """Returns the records of a run's rounds; none without a folder, or if they are damaged."""
    if folder is None:
        return ()
    try:
        return read_checked_round_records(folder / "metrics.jsonl")
    except UserError:
        return ()


def find_simulated_seconds(records: Sequence[Mapping[str, Any]], round_number: int) -> float | None:
    """Returns the simulated time after a round, in seconds; None if the run simulated no time.

    >>> find_simulated_seconds([{"round": 1, "simulated_seconds": 2.5}, {"round": 2, "simulated_seconds": 4.0}], 1)
    2.5
    """
    return next((record.get("simulated_seconds") for record in records if record["round"] == round_number), None)


def _data_warnings(folder: Path) -> tuple[str, ...]:
    texts = read_manifest(folder).get("data_warnings")
    return tuple(map(str, texts)) if isinstance(texts, list) else ()


def norms_and_warnings_of_rounds(records: Sequence[Mapping[str, Any]]) -> NormsAndWarnings:
    """Collects {round: {client: norm of update}} and all warnings from records.

    Both are empty for runs of early versions.
    """
    norms = {record["round"]: round_norms for record in records if (round_norms := norms_by_client(record))}
    warnings = tuple(sentence for record in records for sentence in record.get("warnings", ()))
    return NormsAndWarnings(norms, warnings)


def _deciding_metric(config: Mapping[str, Any]) -> str | None:
    """Returns the first metric in a run's configuration, by which it is judged; None if it names none."""
    metrics = config.get("metrics")
    first = metrics[0] if isinstance(metrics, list) and metrics else metrics
    if isinstance(first, str) and ":" in first:  # one of the user's, which is called by the last word of `module:name`
        return first.replace(":", ".").rpartition(".")[2]
    return first if isinstance(first, str) else None


def read_checked_round_records(path: Path, score_names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Reads a dict per round of `metrics.jsonl`, without a partly written last line; none if missing.

    Args:
        path: the file.
        score_names: names of scores that must be numbers, in addition to polyfed's metrics.

    Raises:
        UserError: the file cannot be read, or a line of it is not a round.
    """
    names, records = {*METRICS, *score_names, NORM}, []
    text = read_metrics_text(path)
    lines = text.rstrip().split("\n") if text.strip() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            # Half a record, or the zeros that some file systems leave after a power cut.
            is_cut_off = number == len(lines) and not text.endswith("\n") and line.startswith(("{", "\0"))
            if is_cut_off:
                break
            error: str | None = "it is not JSON"
        else:
            error = _round_error(record, names)
        if error:
            raise UserError(
                f"{path}, line {number}, is damaged: {error}; put back a copy of the file from before, or make the run "
                "again"
            )
        records.append(record)
    return records


def _round_error(record: Any, score_names: Set[str]) -> str | None:
    """Returns a text that says why `record` is not a valid record of a round; None if it is valid."""
    if not isinstance(record, Mapping):
        return "it is not a round"
    number = record.get("round")
    if not is_whole_number(number):
        return f"its round is {_short_json(number)}" if "round" in record else "it has no round"
    for name in (*_TOTALS, *_SECONDS):
        if name not in record and name in _TOTALS:
            return f"round {number} has no {name}"
        if not _is_number(record.get(name, 0)):
            return f"{name} of round {number} is {_short_json(record[name])}, which is not a number"
    if "clients" not in record:
        return f"round {number} has no clients"
    clients = record["clients"]
    if not isinstance(clients, Mapping) or not all(isinstance(row, Mapping) for row in clients.values()):
        return f"the clients of round {number} are not a mapping from ids to values"
    for client, row in clients.items():
        for score in sorted(score_names & row.keys()):
            if row.get(score) is not None and not _is_number(row[score]):
                return f"{score} of client {client!r} in round {number} is {_short_json(row[score])}, which is not a number"
    for name in ("failures", "warnings"):
        if not isinstance(record.get(name, []), list):
            return f"the {name} of round {number} are not a list"
    texts = all(isinstance(sentence, str) for sentence in record.get("warnings", []))
    return None if texts else f"a warning of round {number} is not text"


def _is_number(value: Any) -> bool:
    """Returns whether `value` is a number that a float can hold; False for NaN and for booleans."""
    return is_number(value) and abs(value) <= sys.float_info.max


def _short_json(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def advise_continuation(folder: Path) -> str:
    """Returns how to go on with a run or comparison without results; of one of which all methods failed what to change."""
    if not (folder / DESCRIPTION).exists():
        return f"go on with it: {call_to_resume(folder)}"
    if failed := read_description(folder).get("failed"):
        first = next(iter(failed.values()))
        return f"all methods that federate failed, the first so: {first}; change that, and give another out=... (--out)"
    return f"go on with it: {command_to_continue(folder)}"
