"""Reads and writes the directory of a comparison: `comparison.yaml` describes what is compared, `comparison.json` holds
the results.

The directory holds one run directory per method and seed, `METHOD/seed-K` (`METHOD/FIELDS/seed-K` where the best of a
search diverged), `comparison.yaml`, which is written before the first run, and `comparison.json`, which is written when all
runs are finished. `polyfed.comparison.storage.results_schema` defines both files.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, final

import yaml

from polyfed.comparison.planning.budget import Budget, ResultCriteria
from polyfed.comparison.storage.continuation import find_first_difference, find_invalidating_change
from polyfed.comparison.storage.results_schema import ComparisonDescription, results_error
from polyfed.comparison.verdicts.answer_lines import build_answer_lines
from polyfed.comparison.verdicts.summary import comparison_html, plot_comparison
from polyfed.comparison.verdicts.warning_sentences import describe_omissions
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.atomic_files import (
    create_private_folder_if_missing,
    expand_user_path,
    read_file,
    write_file_atomically,
)
from polyfed.core.io.text.advice import keep_advice_for_python
from polyfed.core.io.text.number_format import count_with_noun
from polyfed.core.io.text.row_table import RowTable
from polyfed.core.io.text.site_words import say_sites_of
from polyfed.core.io.values.keyword_names import suggest_attributes
from polyfed.core.io.values.validation import parse_json, validation_error
from polyfed.core.machine.package_versions import package_versions
from polyfed.simulation.results.across_sites.cross_site_scores import (
    CrossSiteScores,
    average_cross_site,
    read_cross_site,
)
from polyfed.simulation.results.display.frames import build_frame
from polyfed.simulation.storage.directory import (
    describe_changed_files_of_run,
    is_left_by_a_start,
    read_config,
    read_manifest,
    read_metrics,
    to_plain_values,
)
from polyfed.simulation.storage.directory_lock import lock_directory
from polyfed.simulation.storage.page_file import write_page_of
from polyfed.simulation.storage.paths import safe_file_name

if TYPE_CHECKING:
    from polyfed.core.algorithm import Client
    from polyfed.simulation.results.saved_run import SavedRun

DESCRIPTION, RESULTS = "comparison.yaml", "comparison.json"
RESULTS_FORMAT = 2  # of the results


@suggest_attributes
@final
@dataclass(frozen=True)
class Comparison:
    """Holds the results of a comparison of several methods on the same clients: scores, gains and conclusions.

    Attributes:
        results: the results, as `polyfed.comparison.storage.results_schema.ComparisonResults` describes them.
        out: the directory; None if the comparison was kept in memory.
    """

    results: Mapping[str, Any]
    out: Path | None = None

    def __repr__(self) -> str:
        seeds = count_with_noun(len(self.results["seeds"]), "seed")
        out = None if self.out is None else str(self.out)
        return f"Comparison({', '.join(self.results['methods']) or 'a plan, nothing trained'}; {seeds}, out={out!r})"

    def __str__(self) -> str:
        """Returns warnings, a line for each answer, and sentences on what was left out or failed."""
        warnings, heading, answers, omissions = self._texts
        return "\n".join([*warnings, *filter(None, [heading]), *answers, *omissions])

    def _repr_html_(self) -> str:
        warnings, heading, answers, omissions = self._texts
        texts = {"Before you rely on this:": warnings, f"{heading or 'Answers'}:": answers, "Left out:": omissions}
        return comparison_html(repr(self), texts, self.results, self.table())

    @property
    def _texts(self) -> tuple[list[str], str, list[str], list[str]]:
        """Returns warnings, the heading and lines of answers (without a heading sentences), and what was left out."""
        lines = build_answer_lines(self.results)
        heading, *answers = ["", *self.verdicts] if lines is None or len(lines.rows) == 1 else lines.to_text()
        texts = self.results.get("warnings", ()), answers, describe_omissions(self.results)
        warnings, answers, omissions = ([self._word_for_python(text) for text in group] for group in texts)
        return list(dict.fromkeys(warnings)), heading, answers, [text for text in omissions if text not in warnings]

    def _word_for_python(self, text: str) -> str:
        return say_sites_of(self.results.get("clients") or (), keep_advice_for_python(text))

    def to_frame(self) -> Any:
        """Returns the scores of the comparison as a pandas `DataFrame`.

        A row per method, seed and client, at the compared round; columns `method`, `seed`, `client`, `round`, and the
        score by its name. `pandas.DataFrame(found.table())` has a row per method.

        Raises:
            UserError: pandas is not installed.
        """
        score = self.results.get("score", "score")
        rows = [
            {"method": label, "seed": int(seed), "client": client, "round": run["round"], score: value}
            for label, method in self.results["methods"].items()
            for seed, run in method["runs"].items()
            for client, value in run["scores"].items()
        ]
        return build_frame(rows, ["method", "seed", "client", "round", score])

    def plot(self, *, ax: Any = None) -> Any:
        """Draws mean gains over training alone with intervals, or mean scores; returns matplotlib axes.

        Args:
            ax: axes to draw into; None makes new ones.

        Raises:
            UserError: no method has a score.
        """
        return plot_comparison(self.results, self.table(), ax)

    def report(self, out: str | Path | None = None, *, images_of: "Sequence[Client] | None" = None) -> Path:
        """Writes the comparison's HTML page, as the command `polyfed report` does, and returns its path.

        Args:
            out: the page; None for `report.html` in the comparison's directory.
            images_of: clients of a segmentation, as they were compared; the page then has test images of each, truth and
                prediction, which are their data. None for no images.

        Raises:
            UserError: the comparison was kept in memory, or the page cannot be written.
        """
        return write_page_of(self.out, out, images_of)

    @property
    def answers(self) -> Sequence[str]:
        """Returns sentences on whom joining helps, as far as intervals decide, and what was left out."""
        return list(map(self._word_for_python, (*self.results["verdicts"], *describe_omissions(self.results))))

    @property
    def verdicts(self) -> Sequence[str]:
        """Returns the answers without what was left out, failed or could not be judged."""
        return list(self.results["verdicts"])

    @property
    def skipped(self) -> Mapping[str, str]:
        """Returns `{method label: reason}` for each method that was not run because it does not suit the clients."""
        return dict(self.results["skipped"])

    @property
    def failed(self) -> Mapping[str, str]:
        """Returns `{method label: error message}` for each method with a run that failed."""
        return dict(self.results.get("failed", {}))

    def cross_site(self, method: str) -> CrossSiteScores:
        """Returns one method's scores of every model on every client's test examples, mean over runs.

        Raises:
            UserError: there is no such method, or its runs have no such scores.
        """
        runs = self._runs_of(method).values()
        folders = [self.out / run["path"] for run in runs if self.out is not None and run["path"] is not None]
        parts = [part for folder in folders if (part := read_cross_site(folder)) is not None]
        if not parts or len(parts) < len(runs):
            raise UserError(
                f"the runs of {method} have no scores of every client's model at every client; compare with "
                "cross_site=True and out=... from the beginning, or use run.cross_site()"
            )
        return average_cross_site(parts)

    def run(self, method: str, seed: int | None = None) -> "SavedRun":
        """Returns one of the compared runs, with its networks and predictions, as in `comparison.run("fml").table()`.

        Args:
            method: its label in the comparison.
            seed: None for the first one.

        Raises:
            UserError: no such method or seed, or the comparison was kept in memory.
        """
        runs = self._runs_of(method)
        key = next(iter(runs)) if seed is None else str(seed)
        if key not in runs:
            raise UserError(f"{method} has no run with seed={seed!r}; choices: {', '.join(runs)}")
        if self.out is None or runs[key]["path"] is None:
            raise UserError("the runs of this comparison were kept in memory; compare with out=DIR")
        from polyfed.simulation.results.saved_run import load_run

        return load_run(self.out / runs[key]["path"])

    def _runs_of(self, method: str) -> Mapping[str, Any]:
        methods: Mapping[str, Any] = self.results["methods"]
        if method not in methods:
            raise UserError(f"no method {method!r} in this comparison; {did_you_mean(method, methods)}")
        return methods[method]["runs"]  # type: ignore[no-any-return]

    def table(self) -> list[dict[str, Any]]:
        """Returns a dict of scores and costs for each method, None where undefined; `print` shows them in columns.

        Columns: `method`; `mean` over clients and seeds with its interval `low`, `high`; `worst` client, `p10` and `p90`;
        `gain` over training alone with `gain_low`, `gain_high`; `losers`, the number of clients that lose by joining; the
        corrected `p_reference` and `p_best`; `megabytes` (2^20 bytes) and `seconds` of a run.
        """
        rows = RowTable()
        for label, method in self.results["methods"].items():
            statistics = method["statistics"]
            low, high = statistics["interval"] or (None, None)
            gain_low, gain_high = statistics["gain_interval"] or (None, None)
            rows.append(
                {
                    "method": label,
                    "mean": statistics["mean"],
                    "low": low,
                    "high": high,
                    **{name: statistics[name] for name in ("worst", "p10", "p90")},
                    "gain": statistics["gain"],
                    "gain_low": gain_low,
                    "gain_high": gain_high,
                    **{name: statistics[name] for name in ("losers", "p_reference", "p_best")},
                    "megabytes": None if statistics["bytes"] is None else statistics["bytes"] / 2**20,
                    "seconds": statistics["seconds"],
                }
            )
        return rows


def load_comparison(folder: str | Path) -> Comparison:
    """Loads the results of a finished comparison from its directory.

    Raises:
        UserError: `folder` holds no comparison, or one that is unfinished or damaged.
    """
    folder = expand_user_path(folder, "the folder of the comparison")
    path = folder / RESULTS
    if not (Path(folder) / DESCRIPTION).exists():
        raise UserError(f"{folder} is not the directory of a comparison: it has no {DESCRIPTION}")
    if not path.is_file():
        raise UserError(f"the comparison in {folder} is not finished; go on with it: {command_to_continue(folder)}")
    try:
        content = parse_json(read_file(path))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
        if content.get("format") == RESULTS_FORMAT and (error_text := results_error(content)):
            raise ValueError(error_text)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); make it again: polyfed compare {folder}") from error
    if content.get("format") != RESULTS_FORMAT:
        raise UserError(
            f"{path} has format {content.get('format')}, this version of polyfed reads {RESULTS_FORMAT}; make it again: "
            f"polyfed compare {folder}"
        )
    return Comparison(content, Path(folder))


def load_unchanged_comparison(folder: Path) -> Comparison | None:
    """Loads a finished comparison of which no method failed and no run is newer; None if there is something to do.

    Answers on runs of another version of polyfed are computed again, since that may compute them otherwise.
    """
    try:
        comparison = load_comparison(folder)
        methods = comparison.results["methods"].values()
        runs = [folder / str(run["path"]) for method in methods for run in method["runs"].values()]
        version_by_run = {run: read_manifest(run).get("versions", {}).get("polyfed") for run in runs}
        if {*version_by_run.values()} != {package_versions()["polyfed"]}:
            return None
        files = [folder / DESCRIPTION, *(run / "metrics.jsonl" for run in runs)]
        is_newest = max(file.stat().st_mtime_ns for file in files) <= (folder / RESULTS).stat().st_mtime_ns
    except (UserError, OSError):
        return None
    return comparison if is_newest and not comparison.failed else None


def write_comparison_results(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes `comparison.json` atomically: a reader finds the old or the new file."""
    write_file_atomically(folder / RESULTS, json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False).encode())


def read_description(folder: str | Path) -> dict[str, Any]:
    """Returns the content of `comparison.yaml`, which describes a comparison, from its directory.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = expand_user_path(folder, "the folder of the comparison") / DESCRIPTION
    if not path.is_file():
        raise UserError(f"{folder} is not the directory of a comparison: it has no {DESCRIPTION}")
    content = read_config(path)
    if error_text := validation_error(content, ComparisonDescription):
        raise UserError(f"{path} is damaged: {error_text}; give the whole command again with another out=... (--out)")
    return content


def command_to_continue(folder: str | Path) -> str:
    """Returns the command that continues a comparison, or the call where its clients were made in Python."""
    is_from_python = read_description(folder).get("experiment") is None
    return f"polyfed.compare(clients, ..., out={str(folder)!r})" if is_from_python else f"polyfed compare {folder}"


def parse_result_criteria(description: Mapping[str, Any]) -> ResultCriteria:
    """Returns the last budget and target in the content of `comparison.yaml`."""
    stored = description.get("reading") or {}
    return ResultCriteria(Budget.from_text(stored.get("budget", "best")), stored.get("target"))


def lock_comparison(folder: Path) -> IO[str]:
    """Creates the directory of a comparison if it does not exist, and locks it until the returned file is closed.

    Raises:
        UserError: the folder holds something else, cannot be written, or another process is writing to it.
    """
    check_can_hold_comparison(folder)
    try:
        if not folder.exists():
            create_private_folder_if_missing(folder, parents=True)
        return lock_directory(folder)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another out=... (--out)") from error


def write_description(folder: Path, description: Mapping[str, Any], criteria: ResultCriteria) -> None:
    """Writes the description of a comparison to `comparison.yaml`.

    Raises:
        UserError: `folder` holds a comparison of something else.
    """
    content = to_plain_values(description, "comparison")
    if (folder / DESCRIPTION).exists():
        before = read_description(folder)
        if differs := find_invalidating_change(before, content):
            raise UserError(
                f"{folder} holds a comparison of something else: {differs}; choose another out=... (--out), or "
                "ask for what it holds"
            )
    content["reading"] = {"budget": str(criteria.budget), "target": criteria.target}
    write_file_atomically(folder / DESCRIPTION, yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode())


def check_can_hold_comparison(folder: Path) -> None:
    """Raises a `UserError` if a folder holds something that is not a comparison; creates nothing."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another out=... (--out)")
    is_comparison = (folder / DESCRIPTION).exists()
    if not is_comparison and folder.exists() and not all(is_left_by_a_start(e.name) for e in folder.iterdir()):
        raise UserError(f"{folder} is not empty and holds no comparison; choose another out=... (--out)")


def load_history_if_finished(
    folder: Path, rounds: int, client_ids: Sequence[str], seed: int, method: Mapping[str, Any], data_fingerprint: str
) -> list[dict[str, Any]] | None:
    """Returns the records of a finished run, one per round; None if rounds, models or predictions are missing.

    Args:
        folder: the run directory.
        rounds, client_ids, seed: settings of the run that belongs there.
        method: the method with its fields, as in `config.yaml`.
        data_fingerprint: the fingerprint of the clients, as in `manifest.json`.

    Raises:
        UserError: the folder holds another run, or its configuration is damaged.
    """
    if not (folder / "config.yaml").exists():
        return None
    config = read_config(folder)
    stored_run = {"seed": config.get("seed"), "algorithm": config.get("algorithm"), "rounds": config.get("rounds")}
    expected_run = {"seed": seed, "algorithm": dict(method), "rounds": rounds}
    manifest = read_manifest(folder)
    stored_fingerprint = manifest.get("data_fingerprint", data_fingerprint)  # one that is lost is not another
    if differs := find_first_difference(
        {**stored_run, "clients": stored_fingerprint}, {**expected_run, "clients": data_fingerprint}
    ):
        raise UserError(
            f"{folder} does not hold the run that belongs there: {differs}; remove it, or choose another out=... (--out)"
        )
    if changed := describe_changed_files_of_run(folder, include_outputs=False):
        raise UserError(f"{changed[0]}. A comparison reads finished runs: make this one again by removing {folder}")
    history = read_metrics(folder / "metrics.jsonl")
    if manifest and not manifest.get("files"):
        return None  # it was stopped while it wrote models and predictions
    stopped_round = manifest.get("stopped", {}).get("round", rounds)  # where a callback stopped it
    if [record["round"] for record in history] != list(range(1, int(stopped_round) + 1)):
        return None
    if not all(isinstance(record.get(part), dict) for record in history for part in ("clients", "summary")):
        return None
    if describe_changed_files_of_run(folder):
        return None  # models or predictions, which are written again
    models = [folder / "models" / f"{safe_file_name(client)}.safetensors" for client in client_ids]
    return history if all(path.is_file() and path.stat().st_size > 0 for path in models) else None
