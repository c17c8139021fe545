"""Implements `polyfed flower`: creates a project for a deployment to real sites, tries it on this machine, submits
runs, and shows their state.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from rich.console import Console

from polyfed.cli.commands.terminal import PlainTable, print_json
from polyfed.core.errors import RoundError, RunInterrupt, UserError, check_extra_installed
from polyfed.core.io.atomic_files import read_text_file
from polyfed.core.io.text.terminal_text import sanitise_for_terminal
from polyfed.deploy.trial import local_trial as trials
from polyfed.deploy.trial.project import DeploymentProject, create_project, parse_site_names_or_count
from polyfed.simulation.storage.directory import (
    check_can_become_run_directory,
    read_config,
    read_manifest,
    read_metrics,
    read_start_time,
)
from polyfed.simulation.storage.run_files import RunFiles

_MAX_REASON_LENGTH = 500  # characters of Flower's reason for the end of a run
_STATUS_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "nodes": ("node-id", "status", "online-at", "offline-at"), "runs": ("run-id", "status", "elapsed"),
}  # fmt: skip


class NewestRun(TypedDict):
    """Describes the last round of the newest run of a deployment."""

    directory: str
    round: int
    rounds: int | None
    failures: list[dict[str, str]]
    """Holds `client`, `phase` and `reason` of each failure of the round."""
    warnings: list[str]
    sites: dict[str, dict[str, Any]]
    """Maps each site to its metrics, bytes and seconds of the round."""


class DeploymentStatus(TypedDict):
    """Describes what `polyfed flower status DIR --json` prints."""

    format: int
    project: str
    trial_port: int | None
    """The port of the SuperLink of a trial on this machine; None if none runs."""
    nodes: list[dict[str, Any]] | None
    """Flower's rows of the connected sites; None if the SuperLink does not answer, as of `runs`."""
    runs: list[dict[str, Any]] | None
    reasons: dict[str, str]
    """Says for `nodes` and `runs` why the SuperLink does not answer."""
    newest_run: NewestRun | None


def require_flower() -> None:
    """Raises a `UserError` if the package Flower is not installed."""
    check_extra_installed("flwr", "flower", "polyfed flower")


def write_flower_project(folder: Path, sites: str) -> None:
    """Writes the folders and files of a deployment for the given sites, and prints what the user should do next."""
    require_flower()
    project = create_project(folder, parse_site_names_or_count(sites))
    print(
        f"{project.path} is ready for {', '.join(project.read_site_names())}; its README.md describes the next steps:"
    )
    print(f"  polyfed flower up {folder}       a trial of it on this machine, until Ctrl-C")
    print(f"  polyfed flower run {folder}      the run, in another terminal")


def run_local_trial(folder: Path, sites: str | None, port: int, node_config: str) -> None:
    """Runs the server and all sites of a deployment on this machine, until Ctrl-C or SIGTERM ends it."""
    require_flower()
    project = DeploymentProject(folder.resolve())
    names = project.read_site_names() if sites is None else parse_site_names_or_count(sites)
    trials.raise_keyboard_interrupt_on_signals()
    print(f"starting the SuperLink, and SuperNodes of {', '.join(names)}", file=sys.stderr, flush=True)
    try:
        with trials.start_trial(project, names, port, node_config) as trial:
            started_text = f"the SuperLink listens on 127.0.0.1:{port}, SuperNodes of {', '.join(names)} run"
            print(f"{started_text}; logs are in {trial.folder}; Ctrl-C ends them", file=sys.stderr, flush=True)
            while True:
                trial.restart_ended_supernodes()
                time.sleep(1.0)
    except KeyboardInterrupt:
        raise RunInterrupt("the trial has ended") from None


def submit_run_and_follow_log(
    folder: Path,
    *,
    out: Path | None = None,
    resume: Path | None = None,
    allow_disclosure: bool = False,
    changes: Sequence[str] = (),
    connection: str = "fed",
) -> None:
    """Submits a run to the deployed server, prints its log on standard error, and a table at the end.

    Args:
        folder: the project.
        out: run directory; None takes the next free one below `folder`/runs.
        resume: continue the run in this directory instead.
        allow_disclosure: whether the server may learn weights or architectures.
        changes: values of the configuration to replace, such as "rounds=3".
        connection: name of Flower's connection to a SuperLink; a running trial takes its own.
    """
    require_flower()
    if resume is not None and changes:
        raise UserError(f"--set has no effect on a resumed run; its configuration is {resume}/config.yaml")
    project = DeploymentProject(folder.resolve())
    running = trials.read_running_trial(project)
    if running is None:
        _check_connection_of_flower(connection, folder)
    config, changed = (
        _flatten_configuration(project.read_server_configuration()),
        dict(_parse_change(word) for word in changes),
    )
    if changed.get("algorithm.name", config.get("algorithm.name")) != config.get("algorithm.name"):
        # Another method begins with its own defaults.
        config = {key: value for key, value in config.items() if not key.startswith("algorithm.")}
    config = project.resolve_paths(config | changed)
    target = (resume or out or _next_run_folder(project)).resolve()
    if resume is None:
        check_can_become_run_directory(target)
    config |= {"out": str(target), "resume": resume is not None}
    if allow_disclosure:
        config["allow-disclosure"] = True
    if running is not None:
        config["sites"] = ",".join(running["sites"])
    if resume is None:  # Flower would ask all sites first, and show a traceback
        from polyfed.deploy.server.server_config import check_server_configuration  # which imports torch

        check_server_configuration(config)
    rounds = RunFiles.read(target).planned_rounds if resume is not None else config.get("rounds")
    planned_rounds = rounds if isinstance(rounds, int) else 0
    home = trials.trial_folder_of(project) / "home" if running is not None else None
    with tempfile.TemporaryDirectory() as temporary:
        app = Path(temporary) / "app"
        shutil.copytree(project.app_folder, app, ignore=shutil.ignore_patterns("__pycache__"))
        _write_app_configuration(app / "pyproject.toml", config)
        run_id = _follow_run_and_get_id(app, connection, home)
    status = _describe_end_of_run(home, connection, run_id)
    records = read_metrics(target / "metrics.jsonl")
    if status or not records:
        consent = " --allow-disclosure" if allow_disclosure else ""
        raise RoundError(_unfinished_run_message(f"{folder}{consent}", target, records, planned_rounds, status))
    Console().print(_last_round_table(target, records))
    print(f"{target}")


def _check_connection_of_flower(connection: str, folder: Path) -> None:
    """Raises a `UserError` if Flower's readable configuration lacks this connection to a SuperLink."""
    file = Path(os.environ.get("FLWR_HOME") or "~/.flwr").expanduser() / "config.toml"
    try:
        connections = tomllib.loads(read_text_file(file)).get("superlink")
    except FileNotFoundError:
        connections = {}
    except (OSError, ValueError, UserError):
        return
    if connection not in (connections if isinstance(connections, Mapping) else {}):
        raise UserError(
            f"no trial of {folder} runs on this machine, and {file} has no connection [superlink.{connection}] to a server; "
            f"for a trial type `polyfed flower up {folder}` in another terminal, and wait until it says that the SuperLink "
            f"listens; for a server at another place see step 2 of {folder}/README.md"
        )


def _unfinished_run_message(
    words: object, target: Path, records: Sequence[Mapping[str, Any]], planned_rounds: int, status: str
) -> str:
    """Describes a run that ended early; `words` are those of its command that a resumed run needs too.

    Its first round may be in a checkpoint before its record is written.
    """
    rounds_done = records[-1]["round"] if records else 0
    can_resume = bool(records) or any((target / "checkpoint").glob("round-*"))
    resume_hint = f"; continue it with `polyfed flower run {words} --resume {target}`" if can_resume else ""
    return f"the run has ended after {rounds_done} of {planned_rounds} rounds ({status}); its log is above{resume_hint}"


def _follow_run_and_get_id(app: Path, connection: str, home: Path | None) -> str:
    """Runs Flower's command, copies its output to standard error, and returns the run's identifier.

    Ctrl-C leaves the run to the server.

    Returns:
        The identifier; "" if no run was started.
    """
    command = [trials.find_flwr_command(), "run", str(app), connection, "--stream"]
    environment, run_id = trials.flower_environment(home, {"PYTHONUNBUFFERED": "1"}), ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, errors="replace") as process:
        for line in process.stdout or ():
            print(line, end="", file=sys.stderr, flush=True)
            started = re.search(r"started run (\d+)", line)
            run_id = run_id or (started[1] if started else "")
    return run_id


def _describe_end_of_run(home: Path | None, connection: str, run_id: str) -> str:
    """Returns why Flower does not consider a run completed; "" if it does.

    Flower's command ends with status 0 also after a run that failed.
    """
    if not run_id:
        return "no run was started"
    answer = trials.run_flwr(home, ["list", connection, "--format", "json"])
    try:
        row = next(row for row in json.loads(answer.stdout)["runs"] if row["run-id"] == run_id)
        status, details = str(row["status"]), str(row.get("status-details") or "")
    except (ValueError, KeyError, TypeError, StopIteration):
        return "the SuperLink does not answer"
    reason = " ".join(details.removeprefix("ServerApp failed with exception: ").split())[:_MAX_REASON_LENGTH]
    return "" if status == "finished:completed" else sanitise_for_terminal(reason or status)


def _flatten_configuration(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= (
            _flatten_configuration(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{key}": value}
        )
    return flat


def _parse_change(word: str) -> tuple[str, Any]:
    """Parses KEY=VALUE, with the value as in TOML; text needs no quotes.

    >>> _parse_change("rounds=3"), _parse_change("algorithm.name=fedavg")
    (('rounds', 3), ('algorithm.name', 'fedavg'))
    """
    key, separator, text = word.partition("=")
    if not separator:
        raise UserError(f"--set takes KEY=VALUE, got {word!r}")
    try:
        return key.strip(), tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), text.strip()


def _write_app_configuration(file: Path, config: Mapping[str, Any]) -> None:
    """Writes the configuration of one run into the app's copy."""
    import tomli_w  # comes with Flower

    content = tomllib.loads(read_text_file(file))
    content["tool"]["flwr"]["app"]["config"] = dict(config)
    file.write_text(tomli_w.dumps(content), encoding="utf-8")


def _next_run_folder(project: DeploymentProject) -> Path:
    """Returns the next free folder for a run."""
    return next(path for n in range(1, 100_000) if not (path := project.path / "runs" / f"run-{n}").exists())


def _last_round_table(out: Path, records: Sequence[Mapping[str, Any]]) -> PlainTable:
    """Builds a table of the metrics and bytes of the last round, one row a site."""
    last, sites = records[-1], read_manifest(out).get("sites", [])
    names = sorted(
        {name for values in last["clients"].values() for name in values} - {"bytes_down", "bytes_up", "seconds"}
    )
    hint = (
        ""
        if names
        else "; sites disclose no scores (--node-config 'disclose=\"accuracy\"'); each has its metrics.jsonl"
    )
    table = PlainTable(title=f"round {last['round']}{hint}", title_justify="left", box=None, pad_edge=False)
    for column in ("site", *names, "MB down", "MB up"):
        table.add_column(column, justify="left" if column == "site" else "right")
    for site in sites:
        values = last["clients"].get(site, {})
        cells = [f"{values[n]:.4f}" if isinstance(values.get(n), float) else str(values.get(n, "–")) for n in names]
        table.add_row(site, *cells, *(f"{values.get(f'bytes_{way}', 0) / 2**20:.3f}" for way in ("down", "up")))
    return table


def show_deployment_status(folder: Path, connection: str = "fed", *, as_json: bool = False) -> None:
    """Prints the connected sites of a deployment, its runs, and the last round of the newest run; or the same as JSON."""
    require_flower()
    status = describe_deployment_status(folder, connection)
    if as_json:
        print_json(status)
        return
    console = Console()
    print(f"trial: {'SuperLink on port ' + str(status['trial_port']) if status['trial_port'] else 'none runs'}")
    for reason in dict.fromkeys(status["reasons"].values()):
        keys = ", ".join(key for key in _STATUS_COLUMNS if status["reasons"].get(key) == reason)
        print(sanitise_for_terminal(f"{keys}: the SuperLink does not answer ({reason})"))
    for key, columns in _STATUS_COLUMNS.items():
        rows: list[dict[str, Any]] | None = status[key]  # type: ignore[literal-required]
        if rows is None:
            continue
        table = PlainTable(title=key, title_justify="left", box=None, pad_edge=False)
        for column in columns:
            table.add_column(column)
        for row in rows:
            table.add_row(*(str(row.get(column, "")) for column in columns))
        console.print(table)
    show_newest_run(DeploymentProject(folder.resolve()).path / "runs", console)


def describe_deployment_status(folder: Path, connection: str = "fed") -> DeploymentStatus:
    """Returns the connected sites of a deployment, its runs, and the last round of the newest run."""
    project = DeploymentProject(folder.resolve())
    running = trials.read_running_trial(project)
    home = trials.trial_folder_of(project) / "home" if running is not None else None
    status: DeploymentStatus = {
        "format": 1, "project": str(folder), "trial_port": None if running is None else int(running["port"]),
        "nodes": None, "runs": None, "reasons": {}, "newest_run": _describe_newest_run(project.path / "runs"),
    }  # fmt: skip
    arguments = {"nodes": ["supernode", "list", connection], "runs": ["list", connection]}
    try:
        if running is None:
            _check_connection_of_flower(connection, folder)
    except UserError as error:  # Flower would say it in four sentences, after seconds
        return {**status, "reasons": dict.fromkeys(arguments, str(error))}
    for key, flower_arguments in arguments.items():
        process = trials.run_flwr(home, [*flower_arguments, "--format", "json"])
        try:
            status[key] = [dict(row) for row in json.loads(process.stdout)[key]]  # type: ignore[literal-required]
        except (ValueError, KeyError, TypeError):
            status["reasons"][key] = " ".join((process.stderr or process.stdout).split())[:200]
    return status


def _describe_newest_run(runs_folder: Path) -> NewestRun | None:
    newest = _read_newest_run(runs_folder)
    if newest is None:
        return None
    out, records = newest
    last = records[-1]
    return {
        "directory": str(out), "round": last["round"], "rounds": read_config(out).get("rounds"),
        "failures": [
            {name: str(failure[name]) for name in ("client", "phase", "reason")} for failure in last.get("failures", ())
        ],
        "warnings": _recent_warnings(records),
        "sites": {site: dict(values) for site, values in last["clients"].items()},
    }  # fmt: skip


def _recent_warnings(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the warnings of the last rounds, in which none about the same site is repeated."""
    from polyfed.simulation.monitoring.update_directions import WARNED_ROUNDS  # which imports torch

    return [str(sentence) for record in records[-WARNED_ROUNDS:] for sentence in record.get("warnings", ())]


def _read_newest_run(runs_folder: Path) -> tuple[Path, list[dict[str, Any]]] | None:
    """Returns the newest run directory in a folder and its records; None if no run has finished a round."""
    files = [path for path in runs_folder.glob("*/metrics.jsonl") if path.is_file()]
    newest = max(files, key=lambda path: read_start_time(path.parent), default=None)
    records = [] if newest is None else [dict(record) for record in RunFiles.read(newest.parent).history]
    return None if newest is None or not records else (newest.parent, records)


def show_newest_run(runs_folder: Path, console: Console) -> None:
    """Prints the newest run's last round, failures, warnings and metrics; nothing without a run.

    The norm of each update is printed where the server sees single updates.
    """
    from polyfed.simulation.monitoring.update_directions import update_bound_sentences  # which imports torch

    newest = _read_newest_run(runs_folder)
    if newest is None:
        return
    out, records = newest
    config = read_config(out)
    print(sanitise_for_terminal(f"{out}: round {records[-1]['round']} of {config.get('rounds')}"))
    for failure in records[-1].get("failures", ()):
        print(sanitise_for_terminal(f"  {failure['client']}, {failure['phase']}: {failure['reason']}"))
    for sentence in _recent_warnings(records):
        print(sanitise_for_terminal(f"  warning: {sentence}"))
    if config.get("secure") is True:
        print("  secure sums hide the norms of single updates")
    for sentence in update_bound_sentences(records[-1]):
        print(sanitise_for_terminal(f"  {sentence}"))
    console.print(_last_round_table(out, records))
