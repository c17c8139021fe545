"""The types of what a comparison writes, as `polyfed.comparison.directory` documents it: what is read is checked by them.

What may be missing is of an earlier version, or not needed to show the results.
"""

from collections.abc import Mapping
from typing import Any, Literal, Required, TypedDict

from polyfed.core.typed import conforms

Score = float | None
Span = tuple[float, float] | None
Kind = Literal["join", "stay", "undecided"]


class Over(TypedDict, total=False):
    """A gain over what a client has alone, or of that over training alone."""

    gain: Score
    interval: Span
    gain_interval: Span


class Answer(TypedDict, total=False):
    """What is said to a client, or of the mean."""

    client: Required[str | None]
    answer: Required[Kind]
    method: str | None
    gain: Score
    interval: Span
    test_examples: int | None
    over: str | None
    rarest: int | None
    basis: str
    gains: dict[str, Over]
    sentence: str | None


class Dealt(TypedDict, total=False):
    """How many examples a client has."""

    train: int
    val: int
    test: int
    classes: Required[list[int] | None]
    rarest: tuple[int, int] | None


class Reached(TypedDict, total=False):
    """When a run reaches the target."""

    round: Required[float]
    bytes: float
    seconds: float


class Played(TypedDict, total=False):
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
    to_target: Reached | None


class Counted(TypedDict, total=False):
    """When runs reach the target, on average."""

    reached: Required[int]
    round: Required[Score]
    bytes: Required[Score]
    seconds: Required[Score]


class Gained(TypedDict, total=False):
    """Of a client over seeds."""

    mean: Score
    gain: Score
    gain_interval: Span
    p: Score
    test_examples: int | None
    verdict: Literal["gains", "loses", "undecided"] | None


class Statistics(TypedDict, total=False):
    """Of a method."""

    mean: Required[Score]
    interval: Span
    worst: Score
    p10: Score
    p90: Score
    gain: Score
    gain_interval: Span
    gain_per_seed: list[float] | None
    losers: int | None
    participants: float | None
    p_reference: Score
    p_best: Score
    rounds: list[int | None]
    bytes: Score
    seconds: Score
    to_target: Counted
    clients: dict[str, Gained]


class Method(TypedDict, total=False):
    """A compared method."""

    name: Required[str]
    fields: dict[str, Any]
    evaluated: str
    runs: Required[dict[str, Played]]
    statistics: Required[Statistics]


class Course(TypedDict, total=False):
    """Whether a method had converged."""

    converged: Required[bool | None]
    sentence: Required[str]
    advice: str


class Reference(TypedDict, total=False):
    """What a client has alone, or all data pooled."""

    sentence: Required[str]
    alone: bool
    scores: Required[dict[str, Score]]
    mean: Score
    runs: dict[str, dict[str, Score]]
    interval: Span
    gain: Score
    gain_interval: Span
    clients: dict[str, Over]


class Tuned(TypedDict, total=False):
    """The search of one method."""

    chosen: Required[dict[str, Any]]
    diverged: list[dict[str, Any]]
    runs: Required[int]
    tried: list[dict[str, Any]]
    by_client: dict[str, dict[str, Any]]
    rounds: dict[str, int]


class Tuning(TypedDict, total=False):
    """A search."""

    sentence: Required[str]
    by: str
    edge: list[str]
    methods: Required[dict[str, Tuned]]


class Told(TypedDict, total=False):
    """A sentence."""

    sentence: Required[str]


class Target(TypedDict, total=False):
    """The score to reach."""

    score: Score
    sentence: Required[str]


class Results(TypedDict, total=False):
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
    data: dict[str, dict[str, Dealt]]
    budget: Required[Told]
    target: Required[Target]
    reference: Required[str | None]
    best: Required[str | None]
    best_by: Required[str]
    leader: str | None
    answers: list[Answer] | None
    mean_answer: Answer | None
    verdicts: Required[list[str]]
    covers: list[str]
    warnings: list[str]
    convergence: dict[str, Course]
    references: dict[str, Reference]
    left_out: list[str]
    predictions: bool
    methods: Required[dict[str, Method]]
    skipped: Required[dict[str, str]]
    failed: dict[str, str]
    notes: Required[list[str]]
    tuning: Required[Tuning | None]


class Experiment(TypedDict):
    """How the clients of a comparison are made; what is in `config` is checked where it is used."""

    config: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    same_data: bool
    resplit: int | None
    references: bool


class Reading(TypedDict, total=False):
    """How results were last read."""

    budget: str
    target: Score


class Description(TypedDict, total=False):
    """`comparison.yaml`."""

    choices: str
    title: str
    seeds: list[int]
    experiment: Experiment | None
    reading: Reading
    search: dict[str, list[Any] | str] | None
    searched_at: str
    trials: int | None
    reference: str | None
    same_clients: bool


def check_results(content: Mapping[str, Any]) -> str:
    """What is wrong with the content of a `comparison.json`, as half a sentence; empty if nothing is: all types, and names
    that stand for something else in it."""
    if wrong := conforms(content, Results):
        return wrong
    methods, seeds = content["methods"], {str(seed) for seed in content["seeds"]}
    if not seeds:
        return "it has no seeds"
    for name in ("reference", "best", "leader"):
        if content.get(name) is not None and content[name] not in methods:
            return f"{name} is {content[name]!r}, which is none of the methods"
    if strange := sorted(content.get("data", {}).keys() - seeds):
        return f"data has {strange[0]!r}, which is none of the seeds"
    for seed, clients in content.get("data", {}).items():
        if len({len(one["classes"]) for one in clients.values() if one["classes"]}) > 1:
            return f"data.{seed} counts another number of classes for one client than for another"
    for label, method in methods.items():
        if content["target"].get("score") is not None and "to_target" not in method["statistics"]:
            return f"methods.{label}.statistics has no to_target"
        if strange := sorted(method["runs"].keys() - seeds):
            return f"methods.{label}.runs has {strange[0]!r}, which is none of the seeds"
        for seed, run in method["runs"].items():
            place = f"methods.{label}.runs.{seed}"
            numbers = [point[0] for point in run["curve"]]
            if numbers != sorted(set(numbers)):
                return f"{place}.curve is not in the order of rounds"
            if run["round"] is not None and run["round"] not in numbers:
                return f"{place}.round is {run['round']}, which is not in its curve"
    return ""
