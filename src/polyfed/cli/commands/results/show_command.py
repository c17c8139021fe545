"""Implements `polyfed show`: prints what a directory holds of a run or a comparison, finished or not, without importing
torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Required, TypedDict

from rich.console import Console

from polyfed.cli.commands.compare.answer_lines import print_answers
from polyfed.cli.commands.run.run_tables import print_end_of_run
from polyfed.cli.commands.terminal import PlainTable, print_json, print_line
from polyfed.comparison.storage.comparison_directory import DESCRIPTION, RESULTS, load_comparison, read_description
from polyfed.core.errors import UserError
from polyfed.core.io.text.number_format import count_with_noun, format_bytes
from polyfed.core.io.text.site_words import client_heading
from polyfed.simulation.storage.directory import BASELINES, check_directory_exists
from polyfed.simulation.storage.run_files import RunFiles

JSON_FORMAT = 1
"""Sets the number that `--json` writes as `format`; it grows when a field is taken away or changes its meaning."""


class ShownDirectory(TypedDict, total=False):
    """Describes what `polyfed show DIR --json` prints. Scores are fractions as in `metrics.jsonl`, None is "not defined"."""

    format: Required[int]
    kind: Required[Literal["run", "comparison"]]
    directory: Required[str]
    finished: Required[bool]
    methods: Required[list[str]]
    """Lists a run's main method and then its baselines, or the methods of a comparison."""
    table: Required[list[dict[str, Any]]]
    """Holds a row for each client and one for the mean (runs), or a row for each method (finished comparisons)."""
    score_label: Required[str]
    """The name of the score that decides, in words; empty where it is not known."""
    score_unit: Required[str]
    """"%" where scores are shares, which are shown in per cent; else empty."""
    files: Required[dict[str, str]]
    """Maps the name of each file in the directory to its path."""
    next: Required[list[str]]
    """Commands with which to go on."""
    warnings: Required[list[str]]
    rounds_done: int
    """Counts the finished rounds; only of runs, as are `rounds` and `score`."""
    rounds: int | None
    score: dict[str, Any] | None
    """The name of the metric that decides, and its mean over clients."""
    runs: list[dict[str, Any]]
    """Holds `path`, `rounds_done` and `finished` of each run of a comparison that was begun."""
    planned_runs: int
    search_runs_done: int
    """Counts the finished runs of the search for learning rates, whose number is not known before."""
    answers: list[dict[str, Any]]
    """Holds the answer for each client of a finished comparison, as in `comparison.json`."""
    sentences: list[str]
    """The answers in words."""
    left_out: dict[str, str]
    failed: dict[str, str]


def describe_directory(folder: Path) -> ShownDirectory:
    """Returns the content of a directory of a run or a comparison, for `polyfed show`.

    Raises:
        UserError: the folder holds neither, or a file is damaged.
    """
    check_directory_exists(folder)
    if (folder / DESCRIPTION).is_file():
        return _describe_comparison(folder)
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} holds neither a run (config.yaml) nor a comparison ({DESCRIPTION})")
    return _describe_run(folder)


def show_directory(folder: Path, *, as_json: bool = False, console: Console | None = None) -> None:
    """Prints what a directory holds: answers, a table, where things are, and how to go on; or the same as JSON.

    Raises:
        UserError: the folder holds neither a run nor a comparison, or a file is damaged.
    """
    content = describe_directory(folder)
    if as_json:
        print_json(content)
        return
    console = console or Console()
    print_line(console, _state_sentence(content), style="bold")
    is_run = content["kind"] == "run"
    if content["table"] and (not is_run or _has_other_scores(content)):
        console.print(_build_table(content))
    for kind in ("left_out", "failed"):
        for label, reason in content.get(kind, {}).items():  # type: ignore[attr-defined]
            print_line(console, f"{kind.replace('_', ' ')} {label}: {reason}")
    for name, path in content["files"].items():
        print_line(console, f"{name}: {path}")
    if "answers" in content:
        print_answers(load_comparison(folder).results, None, console, max_sites=None)
    else:
        for sentence in content["warnings"]:
            print_line(console, sentence, style="yellow")
    if is_run and content["table"]:
        print_end_of_run(folder, console)
        if content["finished"]:
            return
    for command in content["next"]:
        print_line(console, f"go on: {command}", style="cyan")


def _has_other_scores(content: ShownDirectory) -> bool:
    """Returns whether a run has scores other than the one that decides, its loss, and those of validation examples."""
    names = [name for name in content["table"][0] if name not in ("client", "num_examples", "simulated_seconds")]
    return sum(not name.endswith("loss") and not name.startswith("val_") for name in names) > 1


def _describe_run(folder: Path) -> ShownDirectory:
    run, name = RunFiles.read(folder), str(folder)
    score = run.manifest.get("score") or {}
    evaluated = any(record["summary"] for record in run.history)
    baselines = sorted(path.parent.name for path in (folder / BASELINES).glob("*/config.yaml"))
    texts = [*(run.manifest.get("data_warnings") or ()), *(t for r in run.history for t in r.get("warnings", ()))]
    commands = [f"polyfed {'resume' if run.manifest and not run.is_finished else 'report'} {name}"]
    if run.is_finished and "data" in run.config:
        commands.append(f"polyfed compare {name}")
    if not run.manifest:
        texts.insert(0, f"{folder / 'manifest.json'} is missing or damaged: it says whether the run has ended, and the "
                        "score that decides with its unit; put back a copy of it, which polyfed resume needs")  # fmt: skip
    return {
        "format": JSON_FORMAT, "kind": "run", "directory": name, "finished": run.is_finished,
        "methods": [run.method, *baselines], "table": run.table() if evaluated else [],
        "files": _find_paths(folder, ("config.yaml", "metrics.jsonl", "models", "predictions", BASELINES, "report.html")),
        "score_label": str(score.get("label") or ""), "score_unit": str(score.get("unit") or ""),
        "next": commands, "warnings": list(dict.fromkeys(map(str, texts))),
        "rounds_done": len(run.history), "rounds": run.planned_rounds,
        "score": None if run.score is None else {"name": run.score[0], "mean": run.score[1]},
    }  # fmt: skip


def _describe_comparison(folder: Path) -> ShownDirectory:
    name, description = str(folder), read_description(folder)
    finished, runs = (folder / RESULTS).is_file(), []
    for path in sorted(folder.glob("*/**/seed-*/config.yaml")):
        run = RunFiles.read(path.parent)
        place = path.parent.relative_to(folder).as_posix()
        if not place.startswith("tuning/"):
            runs.append({"path": place, "rounds_done": len(run.history), "finished": run.is_finished})
    content: ShownDirectory = {
        "format": JSON_FORMAT, "kind": "comparison", "directory": name, "finished": finished,
        "methods": [str(label) for label in description.get("methods") or {}], "table": [],
        "score_label": "", "score_unit": "",
        "files": _find_paths(folder, (DESCRIPTION, RESULTS, "report.html")), "next": [], "warnings": [], "runs": runs,
        "planned_runs": len(description.get("methods") or {}) * len(description.get("seeds") or ()),
        "search_runs_done": sum(RunFiles.read(path.parent).is_finished for path in folder.glob("tuning/**/config.yaml")),
    }  # fmt: skip
    if failed := description.get("failed"):
        content["failed"] = failed
        return content
    if not finished:
        in_python = description.get("experiment") is None
        again = f"polyfed.compare(clients, ..., out={name!r}) in Python, where its clients were made"
        content["next"] = [again if in_python else f"polyfed compare {name}"]
        return content
    comparison = load_comparison(folder)
    results = comparison.results
    content["methods"], content["table"] = [str(label) for label in results["methods"]], comparison.table()
    content["warnings"] = list(map(str, results["warnings"]))
    content["score_label"], content["score_unit"] = str(results["score_label"]), str(results["score_unit"])
    content["answers"] = [dict(answer) for answer in results.get("answers") or ()]
    content["sentences"] = list(results["verdicts"])
    content["left_out"], content["failed"] = dict(comparison.skipped), dict(comparison.failed)
    content["next"] = [f"polyfed report {name}"]
    return content


def _find_paths(folder: Path, names: Sequence[str]) -> dict[str, str]:
    return {name: str(folder / name) for name in names if (folder / name).exists()}


def _state_sentence(content: ShownDirectory) -> str:
    state = "finished" if content["finished"] else "not finished"
    if content["kind"] == "run":
        means = content["table"][-1] if content["table"] else {}
        sample = f"; {means['evaluated']} of {means['of']} clients evaluated" if "evaluated" in means else ""
        rounds = f"{content['rounds_done']} of {content['rounds']} rounds"
        return f"run of {', '.join(content['methods'])}, {state}: {rounds}{sample}"
    done = sum(run["finished"] for run in content["runs"])
    search = "" if content["finished"] else f", and {count_with_noun(content['search_runs_done'], 'run')} of the search"
    planned_runs = max(len(content["runs"]), 0 if content["finished"] else content["planned_runs"])
    return f"comparison of {', '.join(content['methods'])}, {state}: {done} of {planned_runs} runs are done{search}"


def _build_table(content: ShownDirectory) -> PlainTable:
    """Builds the table for the terminal, of columns that fit a line; `--json` has all."""
    unit, rows = content["score_unit"], content["table"]
    title = " in ".join(filter(None, (content["score_label"] or "scores", unit)))
    table = PlainTable(title=title, title_justify="left")
    if content["kind"] == "run":
        heading = client_heading([row["client"] for row in rows[:-1]])
        scores = [name for name in rows[0] if name not in ("client", "num_examples") and not name.endswith("loss")]
        formatted_rows = [
            {
                {"num_examples": "trained on", "client": heading}.get(name, name): f"{row[name]:.0f}"
                if name == "num_examples" and row[name] is not None
                else _format_value(row[name], unit if name in scores else "")
                for name in rows[0]
                if not name.startswith("val_")
            }
            for row in rows
        ]
    else:
        word = client_heading(answer["client"] for answer in content["answers"])
        formatted_rows = [
            {
                "method": row["method"], "mean": _format_value(row["mean"], unit),
                "95 % interval": f"{_format_value(row['low'], unit)} to {_format_value(row['high'], unit)}",
                f"worst {word}": _format_value(row["worst"], unit), "over training alone": _format_value(row["gain"], unit),
                "traffic": "–" if row["megabytes"] is None else format_bytes(2**20 * row["megabytes"]),
            }
            for row in rows
        ]  # fmt: skip
    for position, name in enumerate(formatted_rows[0]):
        table.add_column(name, justify="right" if position else "left")
    for cells in formatted_rows:
        table.add_row(*cells.values())
    return table


def _format_value(value: Any, unit: str = "") -> str:
    if not isinstance(value, float):
        return "–" if value is None else str(value)
    return f"{100 * value:.1f}" if unit == "%" else f"{value:.3f}"
