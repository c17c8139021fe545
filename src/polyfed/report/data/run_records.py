"""What a run directory tells of its run. The rounds in `metrics.jsonl` are checked, so that a damaged file is told and not
taken for a run that has not begun."""

import json
import math
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from polyfed.core.errors import UserError
from polyfed.core.evaluation.evaluate import DEFAULT_METRIC
from polyfed.core.evaluation.metrics import METRICS
from polyfed.core.io.atomic_files import MAX_ROUNDS_BYTES, read_text_file
from polyfed.report.data.score_format import ScoreFormat, score_format_of
from polyfed.simulation.monitoring.update_norms import NORM, norms_by_client
from polyfed.simulation.storage.directory import read_config, read_manifest

DIGITS = 12  # after the point, of means and differences of scores; what is beyond is rounding

_TOTALS = ("bytes_down_total", "bytes_up_total")
_SECONDS = ("seconds_clients", "seconds_server")  # runs of early versions have none


@final
@dataclass(frozen=True, eq=False)
class RunRecord:
    """A run.

    Attributes:
        folder: its directory; None of a comparison that was never written.
        config: its configuration; what is known of it.
        method: name of the algorithm.
        score_format: the score that decides.
        planned_rounds: how many were wanted.
        rounds_done: how many there are.
        scored_round: the round whose scores count, the last evaluated one or that within the budget of a comparison.
        score_by_client: each client's score after `scored_round`; None where it is not defined.
        learning_curve: (round, mean score, megabytes up and down of 2^20 bytes, seconds) of each evaluated round; NaN is not
            defined.
        failure_count: replies that were lost.
        update_norms: by round, what each client's update had as its norm; runs of early versions have none.
        warnings: sentences about its rounds.
        uses_secure_sums: whether replies were parts of secure sums.
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
    learning_curve: tuple[tuple[int, float, float, float], ...]
    failure_count: int = 0
    update_norms: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    uses_secure_sums: bool = False

    @property
    def score_name(self) -> str:
        """The name of the score."""
        return self.score_format.name

    @property
    def megabytes_and_seconds(self) -> tuple[float, float]:
        """Megabytes and seconds up to `scored_round`."""
        last_point = next(point for point in reversed(self.learning_curve) if point[0] == self.scored_round)
        return last_point[2], last_point[3]


def mean_of_defined(values: Sequence[float | None]) -> float:
    """Of the values that there are, rounded so that equal means are equal; NaN if there are none.

    >>> mean_of_defined([1.0, None, 2.0]), mean_of_defined([]), mean_of_defined([0.1, 0.2, -0.3])
    (1.5, nan, 0.0)
    """
    defined = [value for value in values if value is not None and not math.isnan(value)]
    return round(math.fsum(defined) / len(defined), DIGITS) + 0.0 if defined else math.nan


def read_run_record(folder: Path) -> RunRecord | None:
    """What a run directory tells; None if no round has been evaluated.

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
        name for name in (score_fields.get("name"), deciding_metric, *DEFAULT_METRIC.values()) if isinstance(name, str)
    ]
    records = read_rounds(folder / "metrics.jsonl", score_names)
    names = {name for record in records for row in record["clients"].values() for name in row}
    score = next((name for name in score_names if name in names), None)
    if score is None:
        return None
    score_format = score_format_of(score, score_fields if score_fields.get("name") == score else None)
    curve, seconds, final = [], 0.0, {}
    for record in records:
        # Without the evaluation, as comparisons count it.
        seconds += record.get("seconds_clients", math.nan) + record.get("seconds_server", math.nan)
        if evaluate_client_with_outputs := {
            client: row[score] for client, row in record["clients"].items() if score in row
        }:
            final = evaluate_client_with_outputs
            megabytes = (record["bytes_down_total"] + record["bytes_up_total"]) / 2**20
            curve.append(
                (record["round"], mean_of_defined(list(evaluate_client_with_outputs.values())), megabytes, seconds)
            )
    last_round = records[-1]["round"]
    try:
        seed, rounds = int(config.get("seed", 0)), int(config.get("rounds", last_round))
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"seed and rounds in {folder / 'config.yaml'} must be whole numbers: {error}") from error
    failures = sum(len(record.get("failures", ())) for record in records)
    norms, warnings = norms_and_warnings(records)
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
    )


def norms_and_warnings(
    records: Sequence[Mapping[str, Any]],
) -> tuple[dict[int, dict[str, float]], tuple[str, ...]]:
    """By round the norm of each client's update, and the warnings about the rounds; early versions have neither."""
    norms = {record["round"]: round_norms for record in records if (round_norms := norms_by_client(record))}
    return norms, tuple(sentence for record in records for sentence in record.get("warnings", ()))


def _deciding_metric(config: Mapping[str, Any]) -> str | None:
    """The first of the metrics that a run was asked for; None where it was not asked for any."""
    metrics = config.get("metrics")
    first = metrics[0] if isinstance(metrics, list) and metrics else metrics
    if isinstance(first, str) and ":" in first:  # one of the user's, which is called by the last word of `module:name`
        return first.replace(":", ".").rpartition(".")[2]
    return first if isinstance(first, str) else None


def read_rounds(path: Path, score_names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The rounds; none if there is no file yet. A last line that was cut off while it was written does not count.

    Args:
        path: `metrics.jsonl` of a run.
        score_names: names of scores that must be numbers, beside those of polyfed.

    Raises:
        UserError: the file cannot be read, or a line of it is not a round.
    """
    try:
        text = read_text_file(path, MAX_ROUNDS_BYTES, errors="replace")
    except FileNotFoundError:
        return []
    lines = text.rstrip().split("\n") if text.strip() else []
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            # Half a round, or the zeros that some file systems leave after a power cut.
            if number == len(lines) and not text.endswith("\n") and line.startswith(("{", "\0")):
                break
            error_text = "it is not JSON"
        else:
            error_text = _round_error(record, {*METRICS, *score_names, NORM})
        if error_text:
            raise UserError(
                f"{path}, line {number}, is damaged: {error_text}; put back a copy of the file from before, or make "
                "the run again"
            )
        records.append(record)
    return records


def _round_error(record: Any, score_names: Set[str]) -> str:
    """What is wrong with a round; empty for a sound one."""
    if not isinstance(record, Mapping):
        return "it is no round"
    number = record.get("round")
    if not isinstance(number, int) or isinstance(number, bool):
        return f"its round is {_short_json(number)}" if "round" in record else "it has no round"
    for name in (*_TOTALS, *_SECONDS):
        if name not in record and name in _TOTALS:
            return f"round {number} has no {name}"
        if not _is_number(record.get(name, 0)):
            return f"{name} of round {number} is {_short_json(record[name])}, which is no number"
    if "clients" not in record:
        return f"round {number} has no clients"
    clients = record["clients"]
    if not isinstance(clients, Mapping) or not all(isinstance(row, Mapping) for row in clients.values()):
        return f"the clients of round {number} are no mapping from ids to values"
    for client, row in clients.items():
        for score in sorted(score_names & row.keys()):
            if row.get(score) is not None and not _is_number(row[score]):
                return (
                    f"{score} of client {client!r} in round {number} is {_short_json(row[score])}, which is no number"
                )
    for name in ("failures", "warnings"):
        if not isinstance(record.get(name, []), list):
            return f"the {name} of round {number} are no list"
    texts = all(isinstance(sentence, str) for sentence in record.get("warnings", []))
    return "" if texts else f"a warning of round {number} is no text"


def _is_number(value: Any) -> bool:
    """Whether it is a number that fits a float; JSON has no infinities, and true is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _short_json(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
