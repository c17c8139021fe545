"""Logs each number of `metrics.jsonl` to TensorBoard or MLflow, round by round (pip install 'polyfed[tracking]').

TensorBoard's files go to `tensorboard/` in the run directory. MLflow is configured by its own environment variables
(MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME); `mlflow.json` names its run. A resumed run continues there: no round is
logged twice, and rounds that ran without tracking are added.
"""

import importlib
import json
import os
import re
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, final

from polyfed.core.errors import UserError, check_extra_installed, did_you_mean
from polyfed.core.io.atomic_files import (
    create_private_folder_if_missing,
    expand_user_path,
    read_file,
    write_file_atomically,
)
from polyfed.core.io.values.validation import parse_json, validation_error
from polyfed.simulation.monitoring.progress import Progress, build_terminal_progress
from polyfed.simulation.storage.directory import read_config, read_metrics

TENSORBOARD_FOLDER = "tensorboard"  # folder of the run directory
MLFLOW_LINK_FILE = "mlflow.json"  # file of the run directory that names MLflow's run
_EXPERIMENT = "polyfed"
_MARK = "seconds"  # every round has it; logged last, so that a round with it is complete
# MLflow's limits: metrics and parameters per batch, length of a parameter's text.
_METRICS, _PARAMS, _LENGTH = 1000, 100, 6000


class Logger(ABC):
    """Logs the numbers of one run to a tracking service such as MLflow; subclasses define how."""

    def check_reachable(self) -> None:
        """Raises an error if the tracking service cannot be reached; called before anything is computed."""
        return

    @abstractmethod
    def open_and_get_last_logged_round(self, folder: Path, title: str, rounds_done: int) -> int:
        """Opens a run's log before the round after `rounds_done`; returns the last round that it holds."""

    @abstractmethod
    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Logs the numbers of one round, given as `{name: number}`."""

    @abstractmethod
    def close(self, *, finished: bool) -> None:
        """Closes the log; `finished` says whether the run completed all rounds."""


@final
class TensorBoard(Logger):
    """Logs a run's numbers to TensorBoard's event files in the run directory, for `tensorboard --logdir`."""

    def open_and_get_last_logged_round(self, folder: Path, title: str, rounds_done: int) -> int:
        """Opens the event files, and removes rounds after `rounds_done`; returns the last round in them."""
        has_events = any((folder / TENSORBOARD_FOLDER).glob("events.*"))
        last_logged = min(rounds_done, self._last_logged_round(folder / TENSORBOARD_FOLDER)) if has_events else 0
        create_private_folder_if_missing(folder / TENSORBOARD_FOLDER)
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(folder / TENSORBOARD_FOLDER), purge_step=last_logged + 1 if has_events else None)
        return last_logged

    @staticmethod
    def _last_logged_round(folder: Path) -> int:
        reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
        events = reader(str(folder), size_guidance={"scalars": 0}).Reload()
        return max((e.step for e in events.Scalars(_MARK)), default=0) if _MARK in events.Tags()["scalars"] else 0

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Writes each number of the round as a scalar to disk at once, since a killed run would lose buffered numbers."""
        for name, value in sorted(values.items(), key=_is_mark):
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self, *, finished: bool) -> None:
        """Closes the event files."""
        self._writer.close()


@final
class MLflow(Logger):
    """Logs a run's numbers to one run on an MLflow server, with the run's configuration as its parameters."""

    def check_reachable(self) -> None:
        """Raises an error if the MLflow server does not answer when asked for the experiment."""
        self._mlflow = importlib.import_module("mlflow")
        self._entities, self._client = importlib.import_module("mlflow.entities"), self._mlflow.MlflowClient()
        self._client.get_experiment_by_name(_experiment_name())

    def open_and_get_last_logged_round(self, folder: Path, title: str, rounds_done: int) -> int:
        """Opens the run of `mlflow.json`, or creates one; returns the last round that it holds."""
        run_id = self._existing_run_id(folder)
        if run_id is not None:
            self._id = run_id
            self._client.update_run(self._id, status="RUNNING")
            return max((m.step for m in self._client.get_metric_history(self._id, _MARK)), default=0)
        experiment_id = ensure_mlflow_experiment(self._client)
        tags = {"polyfed.method": title, "polyfed.directory": str(folder.resolve())}
        self._id = self._client.create_run(experiment_id, tags=tags, run_name=str(folder)).info.run_id
        write_file_atomically(folder / MLFLOW_LINK_FILE, json.dumps({"run_id": self._id}).encode())
        parameters = [
            self._entities.Param(_mlflow_name(k), str(v)[:_LENGTH])
            for k, v in _flatten_mappings(read_config(folder), ".")
        ]
        for part in _split_into_batches(parameters, _PARAMS):
            self._client.log_batch(self._id, params=part)
        return 0

    def _existing_run_id(self, folder: Path) -> str | None:
        """Returns the run id of `mlflow.json`; None without one, or if the server no longer has the run."""
        try:
            run_id = read_mlflow_run_id(folder)
            if run_id is not None:
                self._client.get_run(run_id)
        except self._mlflow.MlflowException:
            return None
        return run_id

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Logs each number as an MLflow metric, with the round as its step."""
        timestamp_ms = int(1000 * time.time())
        ordered = sorted(values.items(), key=_is_mark)
        metrics = [self._entities.Metric(_mlflow_name(name), value, timestamp_ms, round) for name, value in ordered]
        for part in _split_into_batches(metrics, _METRICS):
            self._client.log_batch(self._id, metrics=part)

    def close(self, *, finished: bool) -> None:
        """Marks the MLflow run as finished, or as killed if rounds are missing."""
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


def _experiment_name() -> str:
    return os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)


def ensure_mlflow_experiment(client: Any) -> str:
    """Returns the id of polyfed's experiment, which it creates if missing; `client` is an `MlflowClient`."""
    experiment = client.get_experiment_by_name(_experiment_name())
    return str(experiment.experiment_id if experiment else client.create_experiment(_experiment_name()))


def read_mlflow_run_id(folder: Path) -> str | None:
    """Returns the MLflow run's id in `mlflow.json`; None if that is missing or damaged."""
    try:
        link = parse_json(read_file(folder / MLFLOW_LINK_FILE))
    except (OSError, ValueError):
        return None
    return None if validation_error(link, _Link) else str(link["run_id"])


class _Link(TypedDict):
    """Describes the content of `mlflow.json`."""

    run_id: str


def _is_mark(item: tuple[str, float]) -> bool:
    return item[0] == _MARK


LOGGERS: Mapping[str, type[Logger]] = {"tensorboard": TensorBoard, "mlflow": MLflow}
"""Loggers by name, which is also the name of the package that they need."""


@final
class TrackingProgress(Progress):
    """Logs each round of a run to tracking services, and passes all events to another progress display.

    A logger that fails is dropped for the rest of the run, with a warning: a server that is down should not end a
    federation.

    Args:
        loggers: name -> logger.
        folder: the run directory.
        display: shows the run to the user.
    """

    def __init__(self, loggers: Mapping[str, Logger], folder: Path, display: Progress) -> None:
        self._loggers, self._folder, self._display = dict(loggers), folder, display
        self._open: dict[str, tuple[Logger, int]] = {}
        self._rounds = self._last_round = 0

    def start(self, title: str, rounds: int, rounds_done: int) -> None:
        """Opens the loggers, and logs those earlier rounds that are missing in them."""
        self._display.start(title, rounds, rounds_done)
        self._rounds, self._last_round = rounds, rounds_done
        records = [record for record in read_metrics(self._folder / "metrics.jsonl") if record["round"] <= rounds_done]
        for name, logger in self._loggers.items():
            try:
                self._open[name] = logger, logger.open_and_get_last_logged_round(self._folder, title, rounds_done)
            except Exception as error:
                self._drop_logger(name, error)
        for record in records:
            self._log(record)

    def show_clients_done(self, phase: str, clients_done: int, total: int) -> None:
        """Passes to the display how many clients have finished."""
        self._display.show_clients_done(phase, clients_done, total)

    def finish_round(self, record: Mapping[str, Any]) -> None:
        """Logs the numbers of the round, and passes its record to the display."""
        self._display.finish_round(record)
        self._last_round = record["round"]
        self._log(record)

    def say(self, sentence: str) -> None:
        """Passes the sentence to the display."""
        self._display.say(sentence)

    def stop(self) -> None:
        """Closes the loggers, and stops the display."""
        for name, (logger, _) in list(self._open.items()):
            try:
                logger.close(finished=self._last_round == self._rounds)
            except Exception as error:
                self._drop_logger(name, error)
        self._open.clear()
        self._display.stop()

    def _log(self, record: Mapping[str, Any]) -> None:
        values = flatten_numbers(record)
        for name, (logger, last) in list(self._open.items()):
            if record["round"] > last:
                try:
                    logger.log(record["round"], values)
                except Exception as error:
                    self._drop_logger(name, error)

    def _drop_logger(self, name: str, error: Exception) -> None:
        self._open.pop(name, None)
        text = f"not tracked with {name} from here on: {_first_line(error)}; polyfed resume adds what is missing"
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def build_tracker(names: str | Sequence[str], out: str | Path, display: Progress | None = None) -> Progress:
    """Builds a display that also logs to "tensorboard" or "mlflow".

    For `federate(..., out=out, progress=build_tracker("tensorboard", out))`.

    Args:
        names: "tensorboard" or "mlflow", or several, as a list or separated by commas.
        out: the run directory.
        display: shows the run too; None shows a bar on a terminal and nothing elsewhere.

    Raises:
        UserError: an unknown name, a package that is not installed, or a server that cannot be reached.
    """
    loggers = {name: LOGGERS[name]() for name in validate_logger_names(names)}
    for name, logger in loggers.items():
        try:
            logger.check_reachable()
        except Exception as error:  # of any type that the package raises
            raise UserError(f"cannot track with {name}: {_first_line(error)}") from error
    return TrackingProgress(
        loggers,
        expand_user_path(out, "out"),
        build_terminal_progress(prints_lines=False) if display is None else display,
    )


def validate_logger_names(names: str | Sequence[str]) -> list[str]:
    """Returns the named tracking services as a list.

    Raises:
        UserError: a name is unknown, or its package is not installed.
    """
    logger_names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    for name in logger_names:
        if name not in LOGGERS:
            raise UserError(f"cannot track with {name!r}; {did_you_mean(name, LOGGERS)}")
        check_extra_installed(name, "tracking", f"--logger {name}")
    return logger_names


def list_loggers_of_run(out: str | Path) -> list[str]:
    """Returns the names of the tracking services to which a run was logged before."""
    return [
        name
        for name, mark in (("tensorboard", TENSORBOARD_FOLDER), ("mlflow", MLFLOW_LINK_FILE))
        if (expand_user_path(out, "out") / mark).exists()
    ]


def flatten_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Flattens a record to `{path: number}`, with entries such as "summary/accuracy/mean".

    >>> flatten_numbers({"round": 3, "train_loss": None, "summary": {"accuracy": {"mean": 0.5}}, "failures": []})
    {'round': 3.0, 'summary/accuracy/mean': 0.5}
    """
    kinds = int | float
    return {
        name: float(v) for name, v in _flatten_mappings(record, "/") if isinstance(v, kinds) and not isinstance(v, bool)
    }


def _flatten_mappings(content: Mapping[str, Any], separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path, value) for every value in nested mappings."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flatten_mappings(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".;") or type(error).__name__


def _mlflow_name(name: str) -> str:
    """Replaces the characters of a name that MLflow does not accept.

    >>> _mlflow_name("clients/Zürich #3/accuracy")
    'clients/Z_rich _3/accuracy'
    """
    return re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name)


def _split_into_batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[i : i + size] for i in range(0, len(items), size))
