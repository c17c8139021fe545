"""Defines the schemas of the two files that a comparison writes: `comparison.json` (`ComparisonResults`) and
`comparison.yaml` (`ComparisonDescription`).

Scores are fractions as in `metrics.jsonl` (0.81, not 81); None means "not defined". Gains are positive where the method is
better, whichever way the score counts. A field that is not `Required` may be missing: it is not needed to show the
results. Files are checked against these types when they are read.
"""

from collections.abc import Mapping
from typing import Any, Literal, NotRequired, Required, TypedDict

from polyfed.comparison.storage.gain_entries import (
    ClientTestCountsEntry,
    GainEntry,
    IntervalEnds,
    RandomEffectsGainEntry,
    Score,
)
from polyfed.core.io.values.validation import validation_error

AnswerWord = Literal["join", "stay", "undecided"]


class AnswerEntry(TypedDict, total=False):
    """Holds the answer to the question whether to join the federation, for one client or for the mean over clients."""

    client: Required[str | None]
    """None for the mean over clients."""
    answer: Required[AnswerWord]
    method: str | None
    gain: Score
    """Gain over the best that the client has alone."""
    interval: IntervalEnds
    test_examples: int | None
    over: str | None
    """The best that the client has alone, such as "ridge"; the gain is over it."""
    over_words: str
    """The same in words, such as "the best alone, ridge regression"."""
    rarest: int | None
    """Test examples of the rarest class, where they limit the score."""
    basis: str
    """Describes the data behind the answer: "120 test examples, 4 of the rarer class"."""
    gains: dict[str, GainEntry]
    """Gains over each model that the client has alone, by its name."""
    clients: tuple[int, int]
    """Counts the clients that the mean is over, and all clients; only of the mean."""
    sentence: str | None


class ClientSizesEntry(TypedDict, total=False):
    """Holds the numbers of a client's training, validation and test examples."""

    train: int
    val: int
    test: int
    classes: Required[list[int] | None]
    """Training examples per class."""
    rarest: tuple[int, int] | None
    """Number and class of the test examples of the rarest class."""
    val_rarest: int
    """Validation examples of the rarest class, where they are so few that the client does not choose among methods."""
    groups: tuple[int, int]
    """Numbers of groups (patients, say) of the training and of the test examples, where examples have groups."""


class TargetReachedEntry(TypedDict, total=False):
    """Holds the first evaluated round at which a run reaches the target score, and what the run had cost by then."""

    round: Required[float]
    bytes: float
    seconds: float


class RunEntry(TypedDict, total=False):
    """Holds the scores and costs of one run, which is one method with one seed."""

    path: Required[str | None]
    """The run directory, relative to the comparison's; None if the run was kept in memory."""
    round: Required[int | None]
    """The compared round; None if no evaluated round is within the budget."""
    rounds: dict[str, int]
    """Each client's own last round, only where each client stops alone; `round` is then the last of them."""
    scores: Required[dict[str, Score]]
    """Holds the values by client id, at the compared round; empty if no round is compared."""
    mean: Score
    """Mean over clients; None if a client lacks a score that another method has."""
    validation: Score
    """Mean validation score at the compared round; None without validation examples."""
    bytes: Score
    """Bytes down and up to the compared round."""
    seconds: Score
    """Seconds of clients and server, without evaluation, to the compared round."""
    curve: Required[list[tuple[int, Score, float, float]]]
    """Every evaluated round, also beyond the budget: (round, mean score, bytes, seconds)."""
    to_target: TargetReachedEntry | None
    """None if the run does not reach the target."""


class MeanTargetReachedEntry(TypedDict, total=False):
    """Holds the mean round and costs to the target score; None unless all seeds reach it."""

    reached: Required[int]
    """Number of seeds that reach the target."""
    round: Required[Score]
    bytes: Required[Score]
    seconds: Required[Score]


class ClientStatisticsEntry(TypedDict, total=False):
    """Holds a client's mean score and gain, with p-value and intervals for all clients at once."""

    mean: Score
    gain: Score
    gain_interval: IntervalEnds
    p: Score
    test_examples: int | None
    verdict: Literal["gains", "loses", "undecided"] | None
    """None for the reference itself, and for clients that differ between seeds or lack a score."""


class MethodStatisticsEntry(TypedDict, total=False):
    """Holds a method's mean score, gains and costs, averaged over the seeds."""

    mean: Required[Score]
    interval: IntervalEnds
    """Over seeds and test examples, of this method alone."""
    worst: Score
    """Over clients, mean over seeds, as are `p10` and `p90`; `p10` is near the worst."""
    p10: Score
    p90: Score
    gain: Score
    """Over the reference."""
    gain_interval: IntervalEnds
    """Holds together with the intervals of the other methods."""
    gain_per_seed: list[Score] | None
    losers: int | None
    """Participants whose score is worse than the reference's."""
    participants: float | None
    """Clients, mean over seeds; the clients of each seed if they differ."""
    p_reference: Score
    """p of the mean gain over the reference, corrected for the number of methods."""
    p_best: Score
    """p against the best, corrected for all pairs of methods; None for the best itself."""
    rounds: list[int | None]
    """The compared round of each seed."""
    bytes: Score
    """Mean over seeds, as are `seconds`."""
    seconds: Score
    to_target: MeanTargetReachedEntry
    clients: dict[str, ClientStatisticsEntry]


class MethodEntry(TypedDict, total=False):
    """Holds a compared method with its hyper-parameters, runs and statistics."""

    name: Required[str]
    """Name in the registry, or of the class."""
    fields: dict[str, Any]
    """All hyper-parameters."""
    evaluated: str
    """The network that is scored, where fields decide it; mostly empty."""
    runs: Required[dict[str, RunEntry]]
    """Holds the values by seed, written as text."""
    statistics: Required[MethodStatisticsEntry]


class ConvergenceEntry(TypedDict, total=False):
    """Holds whether a method's loss had stopped falling at the end of its runs; None if that cannot be judged."""

    converged: Required[bool | None]
    sentence: Required[str]
    advice: str
    """Says what helps."""
    evaluated_rounds: int
    """Counts the rounds from which it was judged."""


class ReferenceEntry(TypedDict, total=False):
    """Holds scores of a simple model on each client's data, or of a network on all clients' data."""

    sentence: Required[str]
    alone: bool
    """True if each client has it alone; then it is a rival of the leader."""
    scores: Required[dict[str, Score]]
    mean: Score
    runs: dict[str, dict[str, Score]]
    """Scores by seed and client."""
    interval: IntervalEnds
    gain: Score
    gain_interval: IntervalEnds
    clients: dict[str, GainEntry]


class MethodTuningEntry(TypedDict, total=False):
    """Holds the hyper-parameters that the search tried for one method, and those that it chose."""

    chosen: Required[dict[str, Any]]
    diverged: list[dict[str, Any]]
    """Chosen fields whose runs diverged."""
    runs: Required[int]
    tried: list[dict[str, Any]]
    """Each with its "fields", "loss" and "validation" score."""
    by_client: dict[str, dict[str, Any]]
    """Holds the choice of each client of `local`."""
    rounds: dict[str, int]
    """The number of rounds that each client of `local` chose."""


class TuningEntry(TypedDict, total=False):
    """Holds the hyper-parameter search of a comparison, for all methods."""

    sentence: Required[str]
    by: str
    """The quantity that decided, such as "validation loss"."""
    edge: list[str]
    """Fields whose best value was at the edge of the search, such as "lr of fedavg"."""
    methods: Required[dict[str, MethodTuningEntry]]


class BudgetEntry(TypedDict, total=False):
    """Holds the budget, the rule that decides at which round each run is compared."""

    kind: str
    """One of "best", "steps", "bytes" and "seconds"."""
    limit: Score
    sentence: Required[str]


class TargetEntry(TypedDict, total=False):
    """Holds the mean score that a run should reach (the target)."""

    score: Score
    """Mean of the reference's scores unless a target was given."""
    sentence: Required[str]


class ComparisonResults(TypedDict, total=False):
    """Describes the content of `comparison.json`, which is written when all runs are finished."""

    format: int
    """Version of the format, 2."""
    title: Required[str]
    """A name for headings."""
    task: str | dict[str, Any]
    """Name of the clients' task, or its name and options."""
    score: Required[str]
    """Name of the metric that decides."""
    score_label: str
    score_unit: str
    """"%" for shares, else empty."""
    higher_is_better: bool
    level: float
    """Confidence level of all intervals of gains together."""
    rounds: Required[int]
    """Rounds of each run."""
    seeds: Required[list[int]]
    clients: list[str]
    """Sorted ids, the same in each seed."""
    same_clients: Required[bool]
    """True if an id is the same participant in each seed; only then does each client have an answer."""
    resplit: int | None
    """Number of times that each client's examples were split again, one seed each."""
    folds: int
    """Folds of a cross-validation, of which each seed is one; missing without one."""
    fold_repeats: int
    """Number of times that the folds were drawn."""
    most_repeats: int
    """How often at most, if it stops when the mean's answer is decided."""
    tested: dict[str, ClientTestCountsEntry]
    """Holds the examples that all folds together test, by client id."""
    site_model: RandomEffectsGainEntry | None
    """Holds the gains of sites as a mean and a deviation of each; None with few sites."""
    class_names: list[str] | None
    data: dict[str, dict[str, ClientSizesEntry]]
    """Holds the values by seed and client id."""
    budget: Required[BudgetEntry]
    target: Required[TargetEntry]
    reference: Required[str | None]
    """Label of the method that trains alone; gains are over it."""
    best: Required[str | None]
    """Label of the best mean; None if no method has one."""
    best_by: Required[str]
    """Examples that it was chosen on, "validation" or "test"."""
    leader: str | None
    """The best converged method other than the reference; answers are about it."""
    answers: list[AnswerEntry] | None
    mean_answer: AnswerEntry | None
    verdicts: Required[list[str]]
    """The sentences of the answers."""
    covers: list[str]
    """Sentences on what is estimated, and what is not covered."""
    warnings: list[str]
    """Sentences for the top of the page."""
    convergence: dict[str, ConvergenceEntry]
    references: dict[str, ReferenceEntry]
    left_out: list[str]
    """Sentences on references that were not fitted."""
    predictions: bool
    """False if the compared rounds' predictions were not kept; then there are no intervals."""
    methods: Required[dict[str, MethodEntry]]
    """Holds the methods by label, in the order of the table; the label also names the folder."""
    skipped: Required[dict[str, str]]
    """Says for each method that was left out why it does not suit the clients."""
    failed: dict[str, str]
    """Says for each failed method why its run failed."""
    notes: Required[list[str]]
    """Sentences on what else to bear in mind."""
    tuning: Required[TuningEntry | None]
    computed_from: str
    """SHA-256 hash of the description and all runs' metrics; missing if the runs were kept in memory."""


class ExperimentEntry(TypedDict):
    """Holds the configuration from which the clients of a comparison can be built again.

    `config` is checked where it is used.
    """

    config: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    same_data: bool
    resplit: int | None
    references: bool
    folds: NotRequired[int]
    stop_when_decided: NotRequired[list[int]]
    unasked: NotRequired[list[str]]


class CriteriaEntry(TypedDict, total=False):
    """Holds the budget and the target score with which the results of a comparison were last computed."""

    budget: str
    target: Score


class ComparisonDescription(TypedDict, total=False):
    """Describes `comparison.yaml`: every setting that changes the results."""

    title: str
    seeds: list[int]
    experiment: ExperimentEntry | None
    reading: CriteriaEntry
    """Holds the budget and the target by which the results are read."""
    search: dict[str, list[Any] | str] | None
    searched_at: str
    """The budget that a search chose for; "best" if it is missing."""
    trials: int | None
    reference: str | None
    same_clients: bool
    folds: int
    failed: dict[str, str]
    """The error of each method if all failed."""
    most_repeats: int
    """How often the folds are drawn at most, if that stops when the answer is decided."""


def results_error(content: Mapping[str, Any]) -> str:
    """Returns why `content` is no valid `comparison.json`; "" if it is.

    Checks all types, and that labels, seeds and rounds refer to something in it.
    """
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
