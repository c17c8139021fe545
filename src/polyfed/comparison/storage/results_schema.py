"""The types of what a comparison writes, as `polyfed.comparison.storage.comparison_directory` documents it: what is
read is checked by them.

What may be missing is of an earlier version, or not needed to show the results.
"""

from collections.abc import Mapping
from typing import Any, Literal, Required, TypedDict

from polyfed.core.io.validation import validation_error

Score = float | None
IntervalEnds = tuple[float, float] | None
AnswerWord = Literal["join", "stay", "undecided"]


class GainEntry(TypedDict, total=False):
    """A gain over what a client has alone, or of that over training alone."""

    gain: Score
    interval: IntervalEnds
    gain_interval: IntervalEnds


class AnswerEntry(TypedDict, total=False):
    """What is said to a client, or of the mean."""

    client: Required[str | None]
    answer: Required[AnswerWord]
    method: str | None
    gain: Score
    interval: IntervalEnds
    test_examples: int | None
    over: str | None
    rarest: int | None
    basis: str
    gains: dict[str, GainEntry]
    sentence: str | None


class ClientSizesEntry(TypedDict, total=False):
    """How many examples a client has."""

    train: int
    val: int
    test: int
    classes: Required[list[int] | None]
    rarest: tuple[int, int] | None


class TargetReachedEntry(TypedDict, total=False):
    """When a run reaches the target."""

    round: Required[float]
    bytes: float
    seconds: float


class RunEntry(TypedDict, total=False):
    """A run."""

    path: Required[str | None]
    round: Required[int | None]
    rounds: dict[str, int]
    scores: Required[dict[str, Score]]
    mean: Score
    validation: Score
    bytes: Score
    seconds: Score
    curve: Required[list[tuple[int, Score, float, float]]]
    to_target: TargetReachedEntry | None


class MeanTargetReachedEntry(TypedDict, total=False):
    """When runs reach the target, on average."""

    reached: Required[int]
    round: Required[Score]
    bytes: Required[Score]
    seconds: Required[Score]


class ClientStatisticsEntry(TypedDict, total=False):
    """Of a client over seeds."""

    mean: Score
    gain: Score
    gain_interval: IntervalEnds
    p: Score
    test_examples: int | None
    verdict: Literal["gains", "loses", "undecided"] | None


class MethodStatisticsEntry(TypedDict, total=False):
    """Of a method."""

    mean: Required[Score]
    interval: IntervalEnds
    worst: Score
    p10: Score
    p90: Score
    gain: Score
    gain_interval: IntervalEnds
    gain_per_seed: list[float] | None
    losers: int | None
    participants: float | None
    p_reference: Score
    p_best: Score
    rounds: list[int | None]
    bytes: Score
    seconds: Score
    to_target: MeanTargetReachedEntry
    clients: dict[str, ClientStatisticsEntry]


class MethodEntry(TypedDict, total=False):
    """A compared method."""

    name: Required[str]
    fields: dict[str, Any]
    evaluated: str
    runs: Required[dict[str, RunEntry]]
    statistics: Required[MethodStatisticsEntry]


class ConvergenceEntry(TypedDict, total=False):
    """Whether a method had converged."""

    converged: Required[bool | None]
    sentence: Required[str]
    advice: str


class ReferenceEntry(TypedDict, total=False):
    """What a client has alone, or all data pooled."""

    sentence: Required[str]
    alone: bool
    scores: Required[dict[str, Score]]
    mean: Score
    runs: dict[str, dict[str, Score]]
    interval: IntervalEnds
    gain: Score
    gain_interval: IntervalEnds
    clients: dict[str, GainEntry]


class MethodTuningEntry(TypedDict, total=False):
    """The search of one method."""

    chosen: Required[dict[str, Any]]
    diverged: list[dict[str, Any]]
    runs: Required[int]
    tried: list[dict[str, Any]]
    by_client: dict[str, dict[str, Any]]
    rounds: dict[str, int]


class TuningEntry(TypedDict, total=False):
    """A search."""

    sentence: Required[str]
    by: str
    edge: list[str]
    methods: Required[dict[str, MethodTuningEntry]]


class SentenceEntry(TypedDict, total=False):
    """A sentence."""

    sentence: Required[str]


class TargetEntry(TypedDict, total=False):
    """The score to reach."""

    score: Score
    sentence: Required[str]


class ComparisonResults(TypedDict, total=False):
    """`comparison.json`."""

    title: Required[str]
    task: Literal["classification", "multilabel", "regression"]
    score: Required[str]
    score_label: str
    score_unit: str
    higher_is_better: bool
    level: float
    rounds: Required[int]
    seeds: Required[list[int]]
    clients: list[str]
    same_clients: Required[bool]
    resplit: int | None
    class_names: list[str] | None
    data: dict[str, dict[str, ClientSizesEntry]]
    budget: Required[SentenceEntry]
    target: Required[TargetEntry]
    reference: Required[str | None]
    best: Required[str | None]
    best_by: Required[str]
    leader: str | None
    answers: list[AnswerEntry] | None
    mean_answer: AnswerEntry | None
    verdicts: Required[list[str]]
    covers: list[str]
    warnings: list[str]
    convergence: dict[str, ConvergenceEntry]
    references: dict[str, ReferenceEntry]
    left_out: list[str]
    predictions: bool
    methods: Required[dict[str, MethodEntry]]
    skipped: Required[dict[str, str]]
    failed: dict[str, str]
    notes: Required[list[str]]
    tuning: Required[TuningEntry | None]


class ExperimentEntry(TypedDict):
    """How the clients of a comparison are made; what is in `config` is checked where it is used."""

    config: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    same_data: bool
    resplit: int | None
    references: bool


class CriteriaEntry(TypedDict, total=False):
    """How results were last read."""

    budget: str
    target: Score


class ComparisonDescription(TypedDict, total=False):
    """`comparison.yaml`."""

    choices: str
    title: str
    seeds: list[int]
    experiment: ExperimentEntry | None
    reading: CriteriaEntry
    search: dict[str, list[Any] | str] | None
    searched_at: str
    trials: int | None
    reference: str | None
    same_clients: bool


def results_error(content: Mapping[str, Any]) -> str:
    """What is wrong with the content of a `comparison.json`, as half a sentence; empty if nothing is: all types, and names
    that stand for something else in it."""
    if type_error := validation_error(content, ComparisonResults):
        return type_error
    methods, seeds = content["methods"], {str(seed) for seed in content["seeds"]}
    if not seeds:
        return "it has no seeds"
    for name in ("reference", "best", "leader"):
        if content.get(name) is not None and content[name] not in methods:
            return f"{name} is {content[name]!r}, which is none of the methods"
    if unknown_seeds := sorted(content.get("data", {}).keys() - seeds):
        return f"data has {unknown_seeds[0]!r}, which is none of the seeds"
    for seed, clients in content.get("data", {}).items():
        if len({len(sizes["classes"]) for sizes in clients.values() if sizes["classes"]}) > 1:
            return f"data.{seed} counts another number of classes for one client than for another"
    for label, method in methods.items():
        if content["target"].get("score") is not None and "to_target" not in method["statistics"]:
            return f"methods.{label}.statistics has no to_target"
        if unknown_seeds := sorted(method["runs"].keys() - seeds):
            return f"methods.{label}.runs has {unknown_seeds[0]!r}, which is none of the seeds"
        for seed, run in method["runs"].items():
            place = f"methods.{label}.runs.{seed}"
            numbers = [point[0] for point in run["curve"]]
            if numbers != sorted(set(numbers)):
                return f"{place}.curve is not in the order of rounds"
            if run["round"] is not None and run["round"] not in numbers:
                return f"{place}.round is {run['round']}, which is not in its curve"
    return ""
