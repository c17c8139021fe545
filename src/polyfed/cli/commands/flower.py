"""`polyfed flower`: a project for a deployment over Flower, a trial of it on this machine, runs, and how they stand."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from polyfed.cli.commands.terminal import Table
from polyfed.cli.commands.words import flag, number, take, take_all
from polyfed.core.errors import Interrupted, RoundError, UserError, check_extra, nearest
from polyfed.core.files import read_text_file, user_path
from polyfed.core.text import clean
from polyfed.deploy import trial as trials
from polyfed.deploy.project import Project, create, names_of
from polyfed.simulation.runs.directory import read_config, read_manifest, read_metrics

_OPTIONS = {
    "init": {"sites"}, "up": {"sites", "port", "node-config", "loss"}, "run": {"out", "resume", "connection"},
    "status": {"connection"}, "doctor": {"port", "address"},
}  # fmt: skip


def main(words: list[str]) -> None:
    """Carries out `polyfed flower`; see its help.

    Raises:
        UserError: words that do not fit.
    """
    kind = words.pop(0) if words else ""
    if kind not in _OPTIONS:
        raise UserError(f"polyfed flower takes a command, got {kind or 'nothing'!r}; {nearest(kind, _OPTIONS)}")
    given = {name: take(words, f"--{name}") for name in sorted(set().union(*_OPTIONS.values()))}
    changes, allowed = take_all(words, "--set"), flag(words, "--allow-disclosure")
    used = {name for name, value in given.items() if value is not None}
    used |= {name for name, value in {"set": changes, "allow-disclosure": allowed}.items() if value}
    suits = _OPTIONS[kind] | ({"set", "allow-disclosure"} if kind == "run" else set())
    if unsuited := sorted(used - suits):
        raise UserError(f"polyfed flower {kind} has no --{unsuited[0]}; polyfed flower --help tells what it has")
    if len(words) != 1 or words[0].startswith("-"):
        raise UserError(f"polyfed flower {kind} takes one folder, got {' and '.join(words) or 'none'}")
    folder = user_path(words[0], "the project")
    if kind == "init":
        init(folder, given["sites"] or "4")
    elif kind == "up":
        port = number("--port", given["port"] or "8000", int, "a number")
        loss = "" if given["loss"] is None else f' loss="{given["loss"]}"'
        up(folder, given["sites"], port, f"{given['node-config'] or ''}{loss}")
    elif kind == "doctor":
        from polyfed.cli.commands import doctor

        doctor.run(folder, number("--port", given["port"] or "8000", int, "a number"), given["address"])
    elif kind == "run":
        out, resume = (
            None if given[name] is None else user_path(str(given[name]), f"--{name}") for name in ("out", "resume")
        )
        run(
            folder, out=out, resume=resume, allow_disclosure=allowed, changes=changes,
            connection=given["connection"] or "fed",
        )  # fmt: skip
    else:
        status(folder, given["connection"] or "fed")


def check_installed() -> None:
    """Raises a `UserError` if Flower is missing."""
    check_extra("flwr", "flower", "polyfed flower")


def init(folder: Path, sites: str) -> None:
    """Writes a project."""
    check_installed()
    project = create(folder, names_of(sites))
    print(f"{project.path} is ready for {', '.join(project.sites())}; its README.md tells how to go on:")
    print(f"  polyfed flower up {folder}       a trial of it on this machine, until Ctrl-C")
    print(f"  polyfed flower run {folder}      the run, in another terminal")


def up(folder: Path, sites: str | None, port: int, node_config: str) -> None:
    """Runs SuperLink and SuperNodes on this machine until Ctrl-C or SIGTERM."""
    check_installed()
    project = Project(folder.resolve())
    names = project.sites() if sites is None else names_of(sites)
    trials.stop_on_signals()
    try:
        with trials.trial(project, names, port, node_config) as trial:
            told = f"the SuperLink listens on 127.0.0.1:{port}, SuperNodes of {', '.join(names)} run"
            print(f"{told}; logs are in {trial.folder}; Ctrl-C ends them", file=sys.stderr, flush=True)
            while True:
                trial.watch()
                time.sleep(1.0)
    except KeyboardInterrupt:
        raise Interrupted("the trial has ended") from None


def run(
    folder: Path,
    *,
    out: Path | None = None,
    resume: Path | None = None,
    allow_disclosure: bool = False,
    changes: Sequence[str] = (),
    connection: str = "fed",
    console: Console | None = None,
) -> None:
    """Submits a run to the SuperLink, shows its log on standard error, and prints its table at the end.

    Args:
        folder: the project.
        out: run directory; None takes the next free one below `folder`/runs.
        resume: go on with the run in this directory instead.
        allow_disclosure: whether the server may learn weights or architectures.
        changes: words of the configuration with other values, as "rounds=3".
        connection: which of Flower's connections to SuperLinks; that of a running trial wins.
    """
    check_installed()
    if resume is not None and changes:
        raise UserError(f"--set has no effect on a run that goes on; its configuration is {resume}/config.yaml")
    project = Project(folder.resolve())
    running = trials.read_trial(project)
    config, changed = _flat(project.configuration()), dict(_change(word) for word in changes)
    if changed.get("algorithm.name", config.get("algorithm.name")) != config.get("algorithm.name"):
        # Another method begins with its own defaults.
        config = {key: value for key, value in config.items() if not key.startswith("algorithm.")}
    config |= changed
    target = (resume or out or _fresh(project)).resolve()
    config |= {"out": str(target), "resume": resume is not None}
    if allow_disclosure:
        config["allow-disclosure"] = True
    if running is not None:
        config["sites"] = ",".join(running["sites"])
    wanted = int(read_config(target)["rounds"]) if resume is not None else int(config.get("rounds", 0))
    home = trials.folder_of(project) / "home" if running is not None else None
    with tempfile.TemporaryDirectory() as temporary:
        app = Path(temporary) / "app"
        shutil.copytree(project.app, app, ignore=shutil.ignore_patterns("__pycache__"))
        _configure(app / "pyproject.toml", config)
        command = [trials.program("flwr"), "run", str(app), connection, "--stream"]
        status = _streamed(command, trials.environment(home))
    records = read_metrics(target / "metrics.jsonl")
    if not records or records[-1]["round"] < wanted:
        raise RoundError(_unfinished(folder, target, records, wanted, status))
    (console or Console()).print(_table(target, records))
    print(f"{target}")


def _unfinished(folder: Path, target: Path, records: Sequence[Mapping[str, Any]], wanted: int, status: int) -> str:
    """Of a run that ended early. Its first round may be in a checkpoint, and its record not yet written."""
    done = records[-1]["round"] if records else 0
    kept = bool(records) or any((target / "checkpoint").glob("round-*"))
    again = f"; go on with `polyfed flower run {folder} --resume {target}`" if kept else ""
    return f"the run has ended after {done} of {wanted} rounds (flwr: {status}); its log is above{again}"


def _streamed(command: Sequence[str], own: Mapping[str, str]) -> int:
    """Runs Flower's command with its output on standard error. Ctrl-C leaves the run to the server."""
    with subprocess.Popen(command, stdout=sys.stderr, env=dict(own)) as process:
        return process.wait()


def _flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return flat


def _change(word: str) -> tuple[str, Any]:
    """A word of the configuration and its value, written as in TOML; text needs no quotes.

    >>> _change("rounds=3"), _change("algorithm.name=fedavg")
    (('rounds', 3), ('algorithm.name', 'fedavg'))
    """
    key, found, text = word.partition("=")
    if not found:
        raise UserError(f"--set takes KEY=VALUE, got {word!r}")
    try:
        return key.strip(), tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), text.strip()


def _configure(file: Path, config: Mapping[str, Any]) -> None:
    """Writes the configuration of one run into the app's copy."""
    import tomli_w  # comes with Flower

    content = tomllib.loads(read_text_file(file))
    content["tool"]["flwr"]["app"]["config"] = dict(config)
    file.write_text(tomli_w.dumps(content), encoding="utf-8")


def _fresh(project: Project) -> Path:
    """The next free folder for a run."""
    return next(path for n in range(1, 100_000) if not (path := project.path / "runs" / f"run-{n}").exists())


def _table(out: Path, records: Sequence[Mapping[str, Any]]) -> Table:
    """What the sites disclosed of the last round."""
    last, sites = records[-1], read_manifest(out).get("sites", [])
    names = sorted(
        {name for values in last["clients"].values() for name in values} - {"bytes_down", "bytes_up", "seconds"}
    )
    table = Table(title=f"round {last['round']}", title_justify="left", box=None, pad_edge=False)
    for column in ("site", *names, "MB down", "MB up"):
        table.add_column(column, justify="left" if column == "site" else "right")
    for site in sites:
        values = last["clients"].get(site, {})
        shown = [f"{values[n]:.4f}" if isinstance(values.get(n), float) else str(values.get(n, "–")) for n in names]
        table.add_row(site, *shown, *(f"{values.get(f'bytes_{way}', 0) / 2**20:.3f}" for way in ("down", "up")))
    return table


def status(folder: Path, connection: str = "fed", console: Console | None = None) -> None:
    """Prints which nodes are connected, which runs there are, and how the newest run directory stands."""
    check_installed()
    console = console or Console()
    project = Project(folder.resolve())
    running = trials.read_trial(project)
    home = trials.folder_of(project) / "home" if running is not None else None
    print(f"trial: {'SuperLink on port ' + str(running['port']) if running else 'none runs'}")
    for words, key, columns in (
        (["supernode", "list", connection], "nodes", ("node-id", "status", "online-at", "offline-at")),
        (["list", connection], "runs", ("run-id", "status", "elapsed")),
    ):
        done = trials.flwr(home, [*words, "--format", "json"])
        try:
            rows = json.loads(done.stdout)[key]
        except (ValueError, KeyError, TypeError):
            print(
                clean(f"{key}: the SuperLink does not answer ({' '.join((done.stderr or done.stdout).split())[:200]})")
            )
            continue
        table = Table(title=key, title_justify="left", box=None, pad_edge=False)
        for column in columns:
            table.add_column(column)
        for row in rows:
            table.add_row(*(str(row.get(column, "")) for column in columns))
        console.print(table)
    show_newest(project.path / "runs", console)


def show_newest(runs: Path, console: Console) -> None:
    """Prints how the newest run directory of a folder stands: its last round, failures and warnings of it, and what the
    sites disclosed, with the norm of each update where the server sees single ones."""
    found = sorted(runs.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    if not found or not (records := read_metrics(found[-1])):
        return
    config = read_config(found[-1].parent)
    print(clean(f"{found[-1].parent}: round {records[-1]['round']} of {config.get('rounds')}"))
    for failure in records[-1]["failures"]:
        print(clean(f"  {failure['client']}, {failure['phase']}: {failure['reason']}"))
    for sentence in records[-1].get("warnings", ()):
        print(clean(f"  warning: {sentence}"))
    if config.get("secure") is True:
        print("  secure sums hide the norms of single updates")
    console.print(_table(found[-1].parent, records))
