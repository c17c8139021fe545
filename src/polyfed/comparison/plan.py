"""Describes a comparison before it runs: clients, methods, seeds, settings and search."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from polyfed.algorithms import Local
from polyfed.comparison.execution.runs_display import RunsDisplay, SilentRunsDisplay
from polyfed.comparison.planning.budget import Budget, ResultCriteria
from polyfed.comparison.planning.client_set import ClientSet
from polyfed.comparison.planning.evaluation_panel import EvaluationPanel
from polyfed.comparison.statistics.estimate import ALPHA
from polyfed.comparison.storage.comparison_directory import DESCRIPTION, RESULTS
from polyfed.core.algorithm import Algorithm
from polyfed.core.errors import UserError
from polyfed.core.io.values.number_checks import MAX_RUNS, check_whole_number
from polyfed.data.partitioning.folds import Folds
from polyfed.simulation.callbacks.callback import Callback
from polyfed.simulation.monitoring.progress import Progress
from polyfed.simulation.rounds.replies.regional_sums import supports_regions
from polyfed.simulation.settings import Settings

Method = Algorithm[Any, Any]
TUNING_FOLDER = "tuning"  # folder of the runs of a search
_RESERVED_NAMES = (DESCRIPTION, RESULTS, TUNING_FOLDER)
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,80}")


@final
@dataclass(frozen=True)
class ComparisonPlan:
    """Describes a comparison before it runs: clients, methods, seeds, settings and search.

    Args:
        title: for headings.
        methods: label -> method; methods that the clients do not suit are left out.
        unasked: labels of default methods that nobody asked for: no sentence says that they are left out where the clients
            have several architectures.
        seeds: of the runs; the clients of each round, weights and batches derive from them, the same for every method.
        settings: of every run, except for the seed.
        build_client_set: returns the clients, and what belongs to them, for a seed.
        criteria: budget and target.
        search_budget: the budget by whose rounds a search compares what it tried. A directory keeps it, however its results
            are read later.
        out: the directory; None keeps all in memory.
        parallel_runs: runs at once, or "auto".
        experiment: the configuration from which the clients can be built again; None for clients made in Python.
        search_space: field -> values or range to search on validation examples, see module `tuning`; None for no search.
        num_trials: how many runs a method has in the search by Optuna; None tries every combination of values.
        quiet: whether no progress is shown.
        progress: the display that the user gave, or a notebook's; None shows progress on standard error.
        metrics: as `polyfed.core.evaluation.metrics.resolve_metrics` takes them; the first decides.
        num_resplits: number of times that training and test examples are split again, one seed each; None for none.
        folds: the cross-validation of which each run is a fold; None for none.
        stop_when_decided: whether the folds are drawn again only until the mean's answer is decided.
        most_repeats: how often at most, which module `sequential_looks` sets; None without such looks.
        is_later_look: whether a look came before, which has said what holds for all.
        alpha: the error rate of intervals.
        forecast_only: whether only a pilot is run.
        with_references: whether simple models and a network on all data pooled are compared with the methods.
        callbacks: the user's callbacks, called in each run that is compared, not in the runs of a search.
        display: shows how far the runs are.
        panel: the clients that all runs evaluate.

    Raises:
        UserError: no seeds or repeated ones, or a label that cannot be a folder's name.
    """

    title: str
    methods: Mapping[str, Method]
    seeds: tuple[int, ...]
    settings: Settings
    build_client_set: Callable[[int], ClientSet]
    criteria: ResultCriteria = field(default_factory=ResultCriteria)
    out: Path | None = None
    parallel_runs: int | Literal["auto"] = "auto"
    experiment: Mapping[str, Any] | None = None
    search_space: Mapping[str, Sequence[Any] | str] | None = None
    num_trials: int | None = None
    quiet: bool = False
    progress: Progress | None = None
    metrics: tuple[Any, ...] = ()
    num_resplits: int | None = None
    folds: Folds | None = None
    stop_when_decided: bool = False
    most_repeats: int | None = None
    is_later_look: bool = False
    alpha: float = ALPHA
    forecast_only: bool = False
    with_references: bool = False
    search_budget: Budget = field(default_factory=Budget)
    callbacks: tuple[Callback, ...] = ()
    unasked: frozenset[str] = frozenset()
    display: RunsDisplay = field(default_factory=SilentRunsDisplay)
    panel: EvaluationPanel = field(default_factory=EvaluationPanel)

    def describe_search(self) -> dict[str, Any] | None:
        """Returns the search space as it is written to a file; None without a search."""
        if self.search_space is None:
            return None
        return {k: v if isinstance(v, str) else list(v) for k, v in self.search_space.items()}

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"seeds must be different whole numbers, at least one, got {list(self.seeds)}")
        for seed in self.seeds:
            dataclasses.replace(self.settings, seed=seed)  # which checks it
        for label in self.methods:
            if not isinstance(label, str) or not _LABEL.fullmatch(label):
                raise UserError(f"a method's label must be a word of letters, digits, '_', '.' and '-', got {label!r}")
            if label in _RESERVED_NAMES:
                raise UserError(f"{label!r} is a name in the directory, and cannot be a method's label; choose another")
        if self.settings.cross_site and self.out is None:
            raise UserError("cross_site=True keeps its matrices in the run directories; give out=...")
        if self.stop_when_decided and (self.folds is None or self.folds.repeats < 2):
            raise UserError(
                "stop_when_decided draws folds again until the mean's answer is decided; give folds=5 "
                "(--folds 5) and at least fold_repeats=2 (--fold-repeats 2)"
            )
        if self.parallel_runs != "auto":
            check_whole_number("parallel, unless it is 'auto',", self.parallel_runs, 1, MAX_RUNS)

    def describe_seed(self, seed: int) -> str:
        """Returns what a seed stands for: "seed 3", "split 4 of 5", or "fold 4 of 5" with the repeat."""
        position = self.seeds.index(seed) if seed in self.seeds else None
        if position is None or (self.folds is None and self.num_resplits is None):
            return f"seed {seed}"
        if self.folds is None:
            return f"split {position + 1} of {len(self.seeds)}"
        repeat, fold = divmod(position, self.folds.number)
        repeat_text = f", repeat {repeat + 1}" if self.folds.repeats > 1 else ""
        return f"fold {fold + 1} of {self.folds.number}{repeat_text}"


def settings_of_method(settings: Settings, method: Method) -> Settings:
    """Returns the settings for one method: training alone sends nothing, and only means are summed by region."""
    alone = isinstance(method, Local)
    return dataclasses.replace(
        settings,
        secure=settings.secure and not alone,
        regions=settings.regions if supports_regions(method) else None,
        asynchronous=None if alone else settings.asynchronous,
    )
