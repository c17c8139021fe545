"""What a page needs of run directories and of comparisons: runs of one method that differ in their seed alone are a line,
and lines that answer the same question (the same data, clients and networks) are a setting."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np

from polyfed.comparison import directory as comparison
from polyfed.core.errors import UserError
from polyfed.report.answers import read_answers, read_mean
from polyfed.report.records import DIGITS, Told, mean, read_rounds, read_run, updates_of
from polyfed.report.scale import Scale, scale_of
from polyfed.simulation.runs.directory import BASELINES, changes, read_config, read_manifest

_LOCAL = "local"
# Where it ran, and how often it was looked at, does not change what was asked.
_ASIDE = {
    "algorithm", "baselines", "seed", "rounds", "clients_per_round", "engine", "workers", "ray_address", "gpus_per_worker",
    "device", "evaluate_every", "checkpoint_every", "on_error", "min_replies",
    "compress", "compress_down",
}  # fmt: skip


@final
@dataclass(frozen=True, eq=False)
class Line:
    """A method with its settings: one run a seed, at least one.

    Attributes:
        label: the method's name; where several lines have it, what tells them apart is added.
        statistics: what a comparison has computed; empty without one.
    """

    label: str
    runs: tuple[Told, ...]
    statistics: Mapping[str, Any]

    @cached_property
    def means(self) -> tuple[float, ...]:
        """The mean over clients of each run."""
        return tuple(mean(list(run.final.values())) for run in self.runs)

    @cached_property
    def course(self) -> Mapping[str, tuple[float, ...]]:
        """By round that all runs have evaluated: `rounds`, and over the runs `megabytes` and `seconds` (means), `mean`,
        `low` and `high` (of the mean score)."""
        tables = [{point[0]: point for point in run.curve} for run in self.runs]
        rounds = sorted(set.intersection(*(set(table) for table in tables)))
        found: dict[str, list[float]] = {name: [] for name in ("rounds", "megabytes", "seconds", "mean", "low", "high")}
        for number in rounds:
            here = np.array([table[number] for table in tables])
            scores = here[~np.isnan(here[:, 1]), 1].tolist()
            found["rounds"].append(number)
            found["megabytes"].append(float(here[:, 2].mean()))
            found["seconds"].append(float(here[:, 3].mean()))
            found["mean"].append(mean(scores))
            found["low"].append(min(scores, default=math.nan))
            found["high"].append(max(scores, default=math.nan))
        return {name: tuple(values) for name, values in found.items()}


@final
@dataclass(frozen=True, eq=False)
class Gain:
    """What a participant's score gains over training alone, positive where it is better, whichever way the score counts: the
    mean over seeds, and the lowest and highest of them."""

    client: str
    mean: float
    low: float
    high: float


@final
@dataclass(frozen=True, eq=False)
class Setting:
    """Lines of the same question; training alone comes last where there is one.

    Attributes:
        title: what the data are.
        scale: the score of all lines.
        same_clients: whether an id is the same client with the same data in each seed. Otherwise each client of each seed
            is a participant of its own.
        lines: at least one.
        results: the content of `comparison.json`; empty without one.
        reference: label of the line that trains alone, which gains are over; None if there is none.
    """

    title: str
    scale: Scale
    same_clients: bool
    lines: tuple[Line, ...]
    results: Mapping[str, Any]
    reference: str | None

    @property
    def local(self) -> Line | None:
        """Training alone; None if that was not run."""
        return next((line for line in self.lines if line.label == self.reference), None)

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(sorted({run.seed for line in self.lines for run in line.runs}))

    @cached_property
    def clients(self) -> tuple[str, ...]:
        """Ids, ascending."""
        return tuple(sorted({client for line in self.lines for run in line.runs for client in run.final}))

    def participant(self, client: str, seed: int) -> str:
        """The name under which the scores of a client of a seed are shown."""
        return client if self.same_clients or len(self.seeds) == 1 else f"{client}, seed {seed}"

    @cached_property
    def common(self) -> tuple[int, ...]:
        """Seeds with a mean score of every line that has one at all: means over other seeds do not stand side by side."""
        scored = [
            {run.seed for run, value in zip(line.runs, line.means, strict=True) if value == value}
            for line in self.lines
        ]
        return tuple(sorted(set.intersection(*filter(None, scored)) if any(scored) else ()))

    def counted(self, line: Line) -> list[Told]:
        """The runs whose means are shown: of the common seeds; all where there is none."""
        return [run for run in line.runs if run.seed in self.common or not self.common]

    def mean(self, line: Line) -> float:
        """Over clients and the counted runs; of a finished comparison what it says."""
        if self.results:
            found = line.statistics["mean"]
            return math.nan if found is None else round(found, DIGITS)
        return mean([value for run, value in zip(line.runs, line.means, strict=True) if run in self.counted(line)])

    def rank(self, line: Line) -> float:
        """Higher for a better mean, whichever way the score counts; lowest of all without one."""
        found = self.mean(line)
        return -math.inf if math.isnan(found) else self.scale.better(found)

    @cached_property
    def leader(self) -> Line | None:
        """The best of the methods beside training alone; None if there is no other with a mean."""
        others = [line for line in self.lines if line is not self.local and self.rank(line) > -math.inf]
        named = [line for line in others if line.label == (self.results.get("leader") or self.results.get("best"))]
        return max(named or others, key=self.rank, default=None)

    def scores(self, line: Line) -> dict[str, float]:
        """Of each participant, its score; the mean over the counted seeds where it is in several. NaN without any."""
        found: dict[str, list[float | None]] = {}
        for run in self.counted(line) if self.same_clients else line.runs:
            for client, value in run.final.items():
                found.setdefault(self.participant(client, run.seed), []).append(value)
        return {name: mean(values) for name, values in sorted(found.items())}

    def gains(self, line: Line) -> list[Gain]:
        """Of each participant, largest first, each seed against the local run of that seed; whoever lacks one of the scores
        is left out. Empty without local runs."""
        if self.local is None or line is self.local:
            return []
        alone = {run.seed: run.final for run in self.local.runs}
        found: dict[str, list[float]] = {}
        for run in line.runs:
            for client, value in run.final.items():
                base = alone.get(run.seed, {}).get(client)
                if value is not None and base is not None:
                    found.setdefault(self.participant(client, run.seed), []).append(self.scale.better(value - base))
        gains = [Gain(name, mean(values), min(values), max(values)) for name, values in found.items()]
        return sorted(gains, key=lambda gain: (-gain.mean, gain.client))


def gather(folders: Sequence[Path]) -> tuple[list[Setting], list[str]]:
    """Settings of run directories with their baselines, and of comparisons; and a sentence about each run left out.

    Raises:
        UserError: a folder is neither, or none of its runs has been evaluated yet.
    """
    settings: list[Setting] = []
    notes: list[str] = []
    told: dict[Path, Told] = {}
    for folder in folders:
        compared = (folder / comparison.DESCRIPTION).exists()
        if compared and (folder / comparison.RESULTS).exists():
            settings.append(_compared(folder, notes))
            continue
        read = {path: read_run(path) for path in _runs(folder)}
        known = {path: run for path, run in read.items() if run is not None}
        if not known:
            raise UserError(
                f"{folder} has no evaluated round yet; go on with it: polyfed {'compare' if compared else 'resume'} {folder}"
            )
        notes += [sentence for path in known for sentence in changes(path)]
        notes += [f"{path} has no evaluated round yet and is left out" for path in read if path not in known]
        if compared:
            notes.append(f"The comparison is not finished; go on with it: polyfed compare {folder}")
            settings.append(_comparing(folder, list(known.values())))
        else:
            told |= known
    questions: dict[str, list[Told]] = {}
    for run in told.values():
        questions.setdefault(_question(run), []).append(run)
    return [*settings, *(_setting(runs) for runs in questions.values())], notes


def _runs(folder: Path) -> Iterator[Path]:
    """A run directory and its baselines, or the runs that an unfinished comparison has so far."""
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


def _question(run: Told) -> str:
    """Equal for runs whose scores may stand side by side."""
    kept = {key: value for key, value in run.config.items() if key not in _ASIDE}
    if "data" not in kept and run.folder is not None:  # the clients were made in Python
        kept["fingerprint"] = read_manifest(run.folder).get("data_fingerprint")
    return json.dumps([run.scale.name, sorted(run.final), kept], sort_keys=True, default=str)


def _setting(runs: Sequence[Told]) -> Setting:
    methods: dict[str, list[Told]] = {}
    for run in runs:
        key = json.dumps(_fields(run), sort_keys=True, default=str)
        if run.seed in {other.seed for other in methods.get(key, ())}:
            key += str(run.folder)  # the same run twice, in two folders
        methods.setdefault(key, []).append(run)
    groups = [tuple(sorted(group, key=lambda run: run.seed)) for group in methods.values()]
    lines = [Line(_label(group, groups), group, {}) for group in groups]
    lines.sort(key=lambda line: line.runs[0].method == _LOCAL)
    dealt = "data" in runs[0].config  # by a draw from the seed
    alone = next((line.label for line in lines if line.runs[0].method == _LOCAL), None)
    return Setting(_title(runs[0].config), runs[0].scale, not dealt, tuple(lines), {}, alone)


def _fields(run: Told) -> dict[str, Any]:
    return {
        **run.config["algorithm"],
        "rounds": run.config.get("rounds"),
        "clients_per_round": run.config.get("clients_per_round"),
        **{way: run.config.get(way, "none") for way in ("compress", "compress_down")},
    }


def _label(group: Sequence[Told], groups: Sequence[Sequence[Told]]) -> str:
    name = group[0].method
    alike = [_fields(other[0]) for other in groups if other[0].method == name]
    own = _fields(group[0])
    if len(alike) == 1:
        return name
    if sum(other == own for other in alike) > 1:
        return f"{name} ({group[0].folder})"
    return f"{name} ({', '.join(f'{key} {own[key]}' for key in own if any(o.get(key) != own[key] for o in alike))})"


def _title(config: Mapping[str, Any]) -> str:
    data = config.get("data")
    if not isinstance(data, Mapping):
        return "clients made in Python"
    partition = dict(data.get("partition") or {})
    name = partition.pop("name", "")
    told = ", ".join(f"{key} {value}" for key, value in partition.items() if isinstance(value, int | float | str))
    return f"{data.get('name', 'data')}, {name}" + (f" ({told})" if told else "")


def _comparing(folder: Path, runs: Sequence[Told]) -> Setting:
    """The setting of a comparison that is not finished, of the runs that it has."""
    known = comparison.read_description(folder)
    labels: dict[str, list[Told]] = {}
    for run in runs:
        labels.setdefault(run.folder.parent.name if run.folder else run.method, []).append(run)
    lines = [Line(label, tuple(sorted(found, key=lambda run: run.seed)), {}) for label, found in labels.items()]
    lines.sort(key=lambda line: line.label == known.get("reference"))
    return Setting(
        str(known.get("title", folder.name)), runs[0].scale, bool(known.get("same_clients")), tuple(lines), {},
        known.get("reference"),
    )  # fmt: skip


def _compared(folder: Path, notes: list[str]) -> Setting:
    """The setting of a finished comparison; of each run that cannot be looked into there is a note."""
    content = comparison.read(folder).results
    try:
        told = {name: content.get(f"score_{name}") for name in ("label", "unit")}
        scale = scale_of(content["score"], {**told, "higher_is_better": content.get("higher_is_better")})
        lines = [
            Line(label, runs, method["statistics"])
            for label, method in content["methods"].items()
            if (runs := tuple(_compared_runs(folder, content, scale, method, notes)))
        ]
        _ = [content[name] for name in ("notes", "verdicts", "skipped", "best", "best_by", "tuning")]
        _ = [content[name]["sentence"] for name in ("budget", "target")]
        _ = [read_answers(content), read_mean(content)]
        lines.sort(key=lambda line: line.label == content["reference"])
        alike = bool(content["same_clients"])
        found = Setting(content["title"], scale, alike, tuple(lines), content, content["reference"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(
            f"{folder / comparison.RESULTS} is damaged ({type(error).__name__}: {error}); make it again: polyfed compare "
            f"{folder}"
        ) from error
    if not lines:
        raise UserError(f"no method of {folder} has an evaluated round within the budget; read it with a larger one: "
                        f"polyfed compare {folder} --budget steps")  # fmt: skip
    return found


def _compared_runs(
    folder: Path, content: Mapping[str, Any], scale: Scale, method: Mapping[str, Any], notes: list[str]
) -> Iterator[Told]:
    for seed, run in sorted(method["runs"].items(), key=lambda item: int(item[0])):
        if run["round"] is None:
            continue
        path = None if run["path"] is None else folder / run["path"]
        known = path is not None and (path / "config.yaml").exists()
        config: dict[str, Any] = {}
        if path is not None and known:
            try:
                config = read_config(path)
                notes += changes(path)
            except UserError as error:  # the scores are in the results
                notes.append(f"{error}. Only its scores are shown.")
                known = False
        curve = tuple(
            (int(number), math.nan if score is None else float(score), moved / 2**20, float(seconds))
            for number, score, moved, seconds in run["curve"]
        )
        try:
            norms, warnings = updates_of(read_rounds(path / "metrics.jsonl") if path is not None and known else ())
        except UserError:  # `changes` tells of it
            norms, warnings = {}, ()
        yield Told(
            path if known else None, config, method["name"], int(seed), scale, content["rounds"], curve[-1][0], run["round"],
            run["scores"], curve, norms=norms, warnings=warnings, hides_updates=config.get("secure") is True,
        )  # fmt: skip
