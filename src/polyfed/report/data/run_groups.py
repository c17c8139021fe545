"""Groups runs that can be compared: runs that differ only in their seed are one method, and methods on the same data,
clients and networks are one group."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from polyfed.comparison.storage import comparison_directory as comparison
from polyfed.core.errors import UserError
from polyfed.core.io.text.number_format import count_with_noun
from polyfed.report.data.answers import parse_answer_for_mean_over_sites, parse_site_answers
from polyfed.report.data.run_records import (
    DIGITS,
    ClientGain,
    LearningCurvePoint,
    RunRecord,
    advise_continuation,
    find_simulated_seconds,
    mean_of_defined,
    norms_and_warnings_of_rounds,
    read_run_record,
    read_undamaged_round_records,
)
from polyfed.report.data.score_format import ScoreFormat, score_format_of
from polyfed.simulation.settings import EXECUTION_FIELDS, SCHEDULING_FIELDS, read_scheduling
from polyfed.simulation.storage.directory import BASELINES, describe_changed_files_of_run, read_config, read_manifest

_LOCAL = "local"
# Where it ran, and how often it was looked at, does not change what was asked.
_IGNORED_SETTINGS = {
    "algorithm", "baselines", "seed", "rounds", "clients_per_round", *EXECUTION_FIELDS,
    "evaluate_every", "checkpoint_every", "on_error", "min_replies", "compress", "compress_down", *SCHEDULING_FIELDS,
}  # fmt: skip


@final
@dataclass(frozen=True, eq=False)
class MethodRuns:
    """Holds the runs of one method with the same settings: one run per seed, and at least one run.

    Attributes:
        label: the method's name; where several lines have it, what tells them apart is added.
        statistics: what a comparison has computed; empty without one.
    """

    label: str
    runs: tuple[RunRecord, ...]
    statistics: Mapping[str, Any]

    @cached_property
    def mean_score_by_run(self) -> tuple[float, ...]:
        """Returns for each run, in the order of `runs`, the mean score over clients."""
        return tuple(mean_of_defined(list(run.score_by_client.values())) for run in self.runs)

    @cached_property
    def learning_curve_columns(self) -> Mapping[str, tuple[float, ...]]:
        """Returns the learning curve over the rounds that all runs of the method have evaluated, as {column: values}.

        Columns: `rounds`; `megabytes` and `seconds` (means over runs); `mean`, `low` and `high` of the mean score.
        """
        tables = [{point[0]: point for point in run.learning_curve} for run in self.runs]
        rounds = sorted(set.intersection(*(set(table) for table in tables)))
        columns: dict[str, list[float]] = {n: [] for n in ("rounds", "megabytes", "seconds", "mean", "low", "high")}
        for number in rounds:
            points = np.array([table[number] for table in tables])
            scores = points[~np.isnan(points[:, 1]), 1].tolist()
            columns["rounds"].append(number)
            columns["megabytes"].append(float(points[:, 2].mean()))
            columns["seconds"].append(float(points[:, 3].mean()))
            columns["mean"].append(mean_of_defined(scores))
            columns["low"].append(min(scores, default=math.nan))
            columns["high"].append(max(scores, default=math.nan))
        return {name: tuple(values) for name, values in columns.items()}


@final
@dataclass(frozen=True, eq=False)
class RunGroup:
    """Holds the methods run on the same data, clients and networks; training on own data only comes last.

    Attributes:
        title: what the data are.
        score_format: the score of all lines.
        same_clients: whether an id is the same client with the same data in each seed. Otherwise each client of each seed
            is a participant of its own.
        methods: at least one.
        comparison_results: the content of `comparison.json`; empty without one.
        local_label: label of the line that trains alone, which gains are over; None if there is none.
        progress: of an unfinished comparison how many of its runs are done, such as "13 of 15 runs"; else empty.
        repeat: what each of several runs of a method is called, "fold" or "seed".
    """

    title: str
    score_format: ScoreFormat
    same_clients: bool
    methods: tuple[MethodRuns, ...]
    comparison_results: Mapping[str, Any]
    local_label: str | None
    progress: str = ""
    repeat: str = "seed"

    def name_on_page(self, label: str) -> str:
        """Returns a method's label, or "training alone"."""
        return "training alone" if label == self.local_label else label

    @property
    def local_method(self) -> MethodRuns | None:
        """Returns the runs of the method with which each client trains on its own data only; None if it was not run."""
        return next((method for method in self.methods if method.label == self.local_label), None)

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """Returns the seeds of all runs of the group, in ascending order."""
        return tuple(sorted({run.seed for method in self.methods for run in method.runs}))

    @cached_property
    def clients(self) -> tuple[str, ...]:
        """Returns the ids of all clients in the group's runs, in ascending order."""
        return tuple(sorted({name for method in self.methods for run in method.runs for name in run.score_by_client}))

    def client_name_with_seed(self, client: str, seed: int) -> str:
        """Returns a client's name on the page: its id, and the seed if seeds have different clients."""
        return client if self.same_clients or len(self.seeds) == 1 else f"{client}, seed {seed}"

    @cached_property
    def common_seeds(self) -> tuple[int, ...]:
        """Returns the seeds for which every method has a mean score; methods without any scores do not count."""
        scored_seeds = [
            {run.seed for run, value in zip(method.runs, method.mean_score_by_run, strict=True) if value == value}
            for method in self.methods
        ]
        return tuple(sorted(set.intersection(*filter(None, scored_seeds)) if any(scored_seeds) else ()))

    def runs_of_common_seeds_or_all(self, method: MethodRuns) -> list[RunRecord]:
        """Returns the method's runs with the seeds that all methods have; all of its runs if there are none."""
        return [run for run in method.runs if run.seed in self.common_seeds or not self.common_seeds]

    def mean_score(self, method: MethodRuns) -> float:
        """Returns the method's mean score over clients and over the seeds that all methods have; NaN if undefined."""
        if self.comparison_results:
            stored_mean = method.statistics["mean"]
            return math.nan if stored_mean is None else round(stored_mean, DIGITS)
        counted = self.runs_of_common_seeds_or_all(method)
        return mean_of_defined([mean_of_defined(list(run.score_by_client.values())) for run in counted])

    def ranking_key(self, method: MethodRuns) -> float:
        """Returns a sort key for a method: the better its mean score, the higher; minus infinity without one."""
        mean_score = self.mean_score(method)
        return -math.inf if math.isnan(mean_score) else self.score_format.positive_if_better(mean_score)

    @cached_property
    def best_method_besides_local(self) -> MethodRuns | None:
        """Returns the best method by mean score, except training on own data only; None if there is no other."""
        others = [m for m in self.methods if m is not self.local_method and self.ranking_key(m) > -math.inf]
        stated_label = self.comparison_results.get("leader") or self.comparison_results.get("best")
        stated = [method for method in others if method.label == stated_label]
        return max(stated or others, key=self.ranking_key, default=None)

    def mean_score_by_participant(self, method: MethodRuns) -> dict[str, float]:
        """Returns {client's name on the page: score over all folds, or mean over common seeds}; NaN if undefined."""
        if fold_scores := self._fold_statistics(method, "mean"):
            return {client: fold_scores.get(client, math.nan) for client in self.clients}
        values_by_name: dict[str, list[float | None]] = {}
        for run in self.runs_of_common_seeds_or_all(method) if self.same_clients else method.runs:
            for client, value in run.score_by_client.items():
                values_by_name.setdefault(self.client_name_with_seed(client, run.seed), []).append(value)
        return {name: mean_of_defined(values) for name, values in sorted(values_by_name.items())}

    def _fold_statistics(self, method: MethodRuns, name: str) -> dict[str, float]:
        """Returns a stored number of each client over all folds together; an empty dict without folds."""
        clients = method.statistics.get("clients", {}) if self.comparison_results.get("folds") else {}
        return {client: entry[name] for client, entry in clients.items() if entry.get(name) is not None}

    def gains_over_local(self, method: MethodRuns) -> list[ClientGain]:
        """Computes each client's gain over training alone with the same seed, the largest first.

        Clients without one of the scores are left out.
        """
        if self.local_method is None or method is self.local_method:
            return []
        local_scores = {run.seed: run.score_by_client for run in self.local_method.runs}
        fold_gains = self._fold_statistics(method, "gain")
        gains_by_name: dict[str, list[float]] = {}
        for run in method.runs:
            for client, value in run.score_by_client.items():
                base = local_scores.get(run.seed, {}).get(client)
                if value is not None and base is not None:
                    gains_by_name.setdefault(self.client_name_with_seed(client, run.seed), []).append(
                        self.score_format.positive_if_better(value - base)
                    )
        gains = [
            ClientGain(name, fold_gains.get(name, mean_of_defined(values)), min(values), max(values))
            for name, values in gains_by_name.items()
        ]
        return sorted(gains, key=lambda gain: (-gain.mean, gain.client))


@final
class RunGroups(NamedTuple):
    """Holds groups of comparable runs, and a sentence about each run that was left out or is not finished."""

    groups: list[RunGroup]
    notes: list[str]


def read_run_groups(folders: Sequence[Path]) -> RunGroups:
    """Reads runs and comparisons, and groups runs with comparable scores.

    Baselines in a run directory are read too. Returns the groups, and a sentence on each run that was left out.

    Raises:
        UserError: a folder is neither, or none of its runs has been evaluated yet.
    """
    groups, notes = list[RunGroup](), list[str]()
    run_by_folder: dict[Path, RunRecord] = {}
    for folder in folders:
        is_comparison = (folder / comparison.DESCRIPTION).exists()
        if is_comparison and (folder / comparison.RESULTS).exists():
            groups.append(_finished_comparison_group(folder, notes))
            continue
        run_by_path = {path: read_run_record(path) for path in _run_directories(folder)}
        scored_runs = {path: run for path, run in run_by_path.items() if run is not None}
        if not scored_runs:
            raise UserError(f"{folder} has no evaluated round yet; {advise_continuation(folder)}")
        notes += [sentence for path in scored_runs for sentence in describe_changed_files_of_run(path)]
        notes += [
            f"{path} has no evaluated round yet and is left out" for path in run_by_path if path not in scored_runs
        ]
        if is_comparison:
            notes.append(f"The comparison is not finished; {advise_continuation(folder)}")
            groups.append(_unfinished_comparison_group(folder, list(scored_runs.values()), notes))
        else:
            run_by_folder |= scored_runs
    runs_by_question: dict[str, list[RunRecord]] = {}
    for run in run_by_folder.values():
        runs_by_question.setdefault(_comparability_key(run), []).append(run)
    return RunGroups([*groups, *(_group_runs(runs) for runs in runs_by_question.values())], notes)


def _run_directories(folder: Path) -> Iterator[Path]:
    """Yields the run directories in a folder: a run and its baselines, or an unfinished comparison's runs."""
    if (folder / comparison.DESCRIPTION).exists():
        yield from sorted(path.parent for path in folder.glob("*/seed-*/config.yaml"))
        return
    if not (folder / "config.yaml").exists():
        raise UserError(
            f"{folder} is not a run directory: it has no config.yaml (nor {comparison.DESCRIPTION}, of a comparison)"
        )
    yield folder
    if (folder / BASELINES).is_dir():
        yield from sorted(path.parent for path in (folder / BASELINES).glob("*/config.yaml"))


def _comparability_key(run: RunRecord) -> str:
    """Returns a text that is equal for two runs exactly if their scores may be compared."""
    shared_settings = {key: value for key, value in run.config.items() if key not in _IGNORED_SETTINGS}
    if "data" not in shared_settings and run.folder is not None:  # the clients were made in Python
        shared_settings["fingerprint"] = read_manifest(run.folder).get("data_fingerprint")
    question = [run.score_format.name, sorted(run.score_by_client), shared_settings]
    return json.dumps(question, sort_keys=True, default=str)


def _group_runs(runs: Sequence[RunRecord]) -> RunGroup:
    runs_by_method: dict[str, list[RunRecord]] = {}
    for run in runs:
        key = json.dumps(_method_settings(run), sort_keys=True, default=str)
        if run.seed in {earlier_run.seed for earlier_run in runs_by_method.get(key, ())}:
            key += str(run.folder)  # the same run twice, in two folders
        runs_by_method.setdefault(key, []).append(run)
    groups = [tuple(sorted(group, key=lambda run: run.seed)) for group in runs_by_method.values()]
    method_list = [MethodRuns(_method_label(group, groups), group, {}) for group in groups]
    method_list.sort(key=lambda method: method.runs[0].method == _LOCAL)
    is_same = "data" not in runs[0].config  # which are assigned by a draw from the seed
    local_label = next((method.label for method in method_list if method.runs[0].method == _LOCAL), None)
    return RunGroup(_data_title(runs[0].config), runs[0].score_format, is_same, tuple(method_list), {}, local_label)


def _method_settings(run: RunRecord) -> dict[str, Any]:
    return {
        **run.config["algorithm"],
        "rounds": run.config.get("rounds"),
        "clients_per_round": run.config.get("clients_per_round"),
        **{way: run.config.get(way, "none") for way in ("compress", "compress_down")},
        **read_scheduling(run.config),
    }


def _method_label(group: Sequence[RunRecord], groups: Sequence[Sequence[RunRecord]]) -> str:
    name = group[0].method
    alike = [_method_settings(candidate[0]) for candidate in groups if candidate[0].method == name]
    settings = _method_settings(group[0])
    if len(alike) == 1:
        return name
    if sum(candidate == settings for candidate in alike) > 1:
        return f"{name} ({group[0].folder})"
    differing = [f"{key} {settings[key]}" for key in settings if any(o.get(key) != settings[key] for o in alike)]
    return f"{name} ({', '.join(differing)})"


def _data_title(config: Mapping[str, Any]) -> str:
    data = config.get("data")
    if not isinstance(data, Mapping):
        return "clients made in Python"
    partition = dict(data.get("partition") or {})
    name = partition.pop("name", "")
    if name == "natural":
        return f"{data.get('name', 'data')}, sites by column {partition.get('column')}"
    parameters = ", ".join(f"{key} {value}" for key, value in partition.items() if isinstance(value, int | float | str))
    return f"{data.get('name', 'data')}, {name}" + (f" ({parameters})" if parameters else "")


def _unfinished_comparison_group(folder: Path, runs: Sequence[RunRecord], notes: list[str]) -> RunGroup:
    """Builds the group of an unfinished comparison from the seeds that all methods finished; all runs without one.

    A note on what it shows is appended to `notes`.
    """
    description = comparison.read_description(folder)
    runs_by_label: dict[str, list[RunRecord]] = {}
    finished_runs = [run for run in runs if run.rounds_done >= run.planned_rounds]
    for run in sorted(finished_runs or runs, key=lambda run: run.seed):
        runs_by_label.setdefault(run.folder.parent.name if run.folder else run.method, []).append(run)
    seeds = set.intersection(*({run.seed for run in label_runs} for label_runs in runs_by_label.values()))
    repeat = "fold" if description.get("folds") else "seed"
    if seeds:
        notes.append(f"Compared on the {count_with_noun(len(seeds), repeat)} that all methods below have.")
    methods = [
        MethodRuns(label, tuple(run for run in label_runs if not seeds or run.seed in seeds), {})
        for label, label_runs in runs_by_label.items()
    ]
    methods.sort(key=lambda line: line.label == description.get("reference"))
    planned = len(description.get("methods") or runs_by_label) * len(description.get("seeds") or seeds)
    title, same_clients = str(description.get("title", folder.name)), bool(description.get("same_clients"))
    return RunGroup(title, runs[0].score_format, same_clients, tuple(methods), {}, description.get("reference"),
                    f"{len(finished_runs)} of {planned} runs", repeat)  # fmt: skip


def _finished_comparison_group(folder: Path, notes: list[str]) -> RunGroup:
    """Builds the group of a finished comparison; appends to `notes` a sentence for each run that cannot be read."""
    results = comparison.load_comparison(folder).results
    try:
        score_fields = {name: results.get(f"score_{name}") for name in ("label", "unit")}
        score_fields["higher_is_better"] = results.get("higher_is_better")
        score_format = score_format_of(results["score"], score_fields)
        methods = [
            MethodRuns(label, runs, method["statistics"])
            for label, method in results["methods"].items()
            if (runs := tuple(_runs_of_comparison(folder, results, score_format, method, notes)))
        ]
        _ = [results[name] for name in ("notes", "verdicts", "skipped", "best", "best_by", "tuning")]
        _ = [results[name]["sentence"] for name in ("budget", "target")]
        _ = [parse_site_answers(results), parse_answer_for_mean_over_sites(results)]
        methods.sort(key=lambda line: line.label == results["reference"])
        same_clients = bool(results["same_clients"])
        title, repeat = results["title"], "fold" if results.get("folds") else "seed"
        group = RunGroup(title, score_format, same_clients, tuple(methods), results, results["reference"], "", repeat)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(
            f"{folder / comparison.RESULTS} is damaged ({type(error).__name__}: {error}); make it again: polyfed compare "
            f"{folder}"
        ) from error
    if not methods:
        raise UserError(f"no method of {folder} has an evaluated round within the budget; read it with a larger one: "
                        f"polyfed compare {folder} --budget steps")  # fmt: skip
    return group


def _runs_of_comparison(
    folder: Path, results: Mapping[str, Any], score_format: ScoreFormat, method: Mapping[str, Any], notes: list[str]
) -> Iterator[RunRecord]:
    for seed, run in sorted(method["runs"].items(), key=lambda item: int(item[0])):
        if run["round"] is None:
            continue
        path = None if run["path"] is None else folder / run["path"]
        has_directory = path is not None and (path / "config.yaml").exists()
        config: dict[str, Any] = {}
        if path is not None and has_directory:
            try:
                config = read_config(path)
                notes += describe_changed_files_of_run(path)
            except UserError as error:  # the scores are in the results
                notes.append(f"{error}. Only its scores are shown.")
                has_directory = False
        curve = tuple(
            LearningCurvePoint(int(number), math.nan if score is None else float(score), moved / 2**20, float(seconds))
            for number, score, moved, seconds in run["curve"]
        )
        records = read_undamaged_round_records(path if has_directory else None)  # the notes name a damage
        norms, warnings = norms_and_warnings_of_rounds(records)
        yield RunRecord(
            path if has_directory else None, config, method["name"], int(seed), score_format, results["rounds"],
            curve[-1][0], run["round"], run["scores"], curve, update_norms=norms, warnings=warnings,
            uses_secure_sums=config.get("secure") is True, simulated_seconds=find_simulated_seconds(records, run["round"]),
        )  # fmt: skip
