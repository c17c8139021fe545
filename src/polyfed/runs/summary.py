"""From the histories of the runs of a comparison to its results: the mapping that `polyfed.runs.comparison` documents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, final

import numpy as np

from polyfed.errors import UserError, nearest
from polyfed.runs.statistics import (
    FEWEST_EXAMPLES,
    MANY,
    Point,
    against_best,
    against_one,
    curve,
    first_reaching,
    interval,
    smallest_p,
    verdict,
    within,
)

FORMAT = 1
KINDS = ("steps", "bytes", "seconds")
_NAMED = 8  # clients that a sentence lists
Scores = Mapping[str, float | None]
Histories = Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]


@final
@dataclass(frozen=True)
class Budget:
    """What is equal for all methods at the compared round.

    Args:
        kind: "steps", all rounds with the same local training; "bytes", down and up; or "seconds", of clients and server.
        limit: how many bytes or seconds; None takes what the cheapest run spends in all its rounds.

    Raises:
        UserError: an unknown kind, or a limit that is not positive.
    """

    kind: str = "steps"
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"unknown budget {self.kind!r}; {nearest(self.kind, KINDS)}")
        if self.limit is not None and (self.kind == "steps" or not self.limit > 0):
            raise UserError(f"a budget is 'steps', or bytes or seconds with a positive limit, got {self}")

    def __str__(self) -> str:
        return self.kind if self.limit is None else f"{self.kind}={self.limit:g}"

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """From "steps", "bytes", "seconds", "bytes=5e6", "seconds=30".

        >>> Budget.parse("bytes=5e6")
        Budget(kind='bytes', limit=5000000.0)
        """
        kind, equals, limit = str(text).partition("=")
        try:
            return cls(kind, float(limit) if equals else None)
        except UserError:
            raise
        except ValueError:
            raise UserError(
                f"the limit of a budget must be a number, as in {kind}=1000000, got {str(text)!r}"
            ) from None


@final
@dataclass(frozen=True)
class Reading:
    """How results are read: the budget, and the mean score to be reached (None: what the reference reaches)."""

    budget: Budget = Budget()
    target: float | None = None


def summarise(
    description: Mapping[str, Any],
    data: Mapping[str, Mapping[str, Any]],
    class_names: Sequence[str] | None,
    histories: Histories,
    reading: Reading,
    *,
    on_disk: bool,
) -> dict[str, Any]:
    """The content of `comparison.json`.

    Args:
        description: the content of `comparison.yaml`.
        data: by seed, as text, and client: examples for training and test, and per class.
        histories: the objects of `metrics.jsonl` of each run.
        reading: budget and target.
        on_disk: whether the runs have directories.
    """
    score, labels, reference = description["score"], list(description["methods"]), description["reference"]
    curves = {run: curve(history, score) for run, history in histories.items()}
    limit = _limit(reading.budget, curves)
    chosen = {run: within(points, reading.budget.kind, limit) for run, points in curves.items()}
    runs = {
        label: {str(s): _run(label, s, score, histories, curves, chosen, on_disk) for s in description["seeds"]}
        for label in labels
    }
    means = {label: _mean([run["mean"] for run in runs[label].values()]) for label in labels}
    best_by, ranks = _ranking(labels, runs, means)
    target = means.get(reference) if reading.target is None else reading.target
    for label, seed in curves:
        reached = first_reaching(curves[label, seed], target)
        runs[label][str(seed)]["to_target"] = (
            None if reached is None else {"round": reached.round, "bytes": reached.bytes, "seconds": reached.seconds}
        )
    content: dict[str, Any] = {"format": FORMAT}
    content |= {name: description[name] for name in ("title", "task", "score")}
    content |= {"rounds": description["settings"]["rounds"], "seeds": list(description["seeds"])}
    content |= {"clients": sorted(next(iter(data.values()))), "same_clients": description["same_clients"]}
    content |= {"class_names": None if class_names is None else list(class_names), "data": data}
    content["budget"] = {"kind": reading.budget.kind, "limit": limit, "told": _told_budget(reading.budget, limit)}
    content["target"] = {"score": target, "told": _told_target(reading.target, reference)}
    content |= {
        "reference": reference,
        "best": max(ranks, key=ranks.__getitem__) if ranks else None,
        "best_by": best_by,
    }
    content["methods"] = {
        label: {
            "name": description["methods"][label]["name"],
            "fields": {k: v for k, v in description["methods"][label].items() if k != "name"},
            "evaluated": description["evaluated"].get(label, ""),
            "runs": runs[label],
        }
        for label in labels
    }
    _add_statistics(content)
    content |= {"left_out": dict(description["left_out"]), "failed": dict(description.get("failed", {}))}
    contenders = {label: rank for label, rank in ranks.items() if label != reference}
    leader = max(contenders, key=contenders.__getitem__) if contenders else None
    content["verdicts"] = _verdicts(content, leader)
    content["notes"] = _notes(content)
    content["tuning"] = description.get("tuning")
    return content


def _run(
    label: str, seed: int, score: str, histories: Histories, curves: Mapping[tuple[str, int], Sequence[Point]],
    chosen: Mapping[tuple[str, int], Point | None], on_disk: bool,
) -> dict[str, Any]:  # fmt: skip
    at = chosen[label, seed]
    record = None if at is None else histories[label, seed][at.round - 1]
    rows = {} if record is None else record["clients"]
    validation = None if record is None else record["summary"].get(f"val_{score}", {}).get("mean")
    return {
        "path": f"{label}/seed-{seed}" if on_disk else None,
        "round": None if at is None else at.round,
        "scores": {client: row.get(score) for client, row in rows.items()},
        "mean": None if at is None else at.score,
        "validation": validation,
        "bytes": None if at is None else at.bytes,
        "seconds": None if at is None else at.seconds,
        "curve": [[p.round, p.score, p.bytes, p.seconds] for p in curves[label, seed]],
    }


def _limit(budget: Budget, curves: Mapping[tuple[str, int], Sequence[Point]]) -> float | None:
    if budget.kind == "steps" or budget.limit is not None:
        return budget.limit
    spent = [getattr(points[-1], budget.kind) for points in curves.values() if points]
    return min((amount for amount in spent if amount > 0), default=None)


def _ranking(
    labels: Sequence[str], runs: Mapping[str, Mapping[str, Any]], means: Mapping[str, float | None]
) -> tuple[str, dict[str, float]]:
    """By what the best is chosen, and that score of each method that has one."""
    tested = {label: mean for label in labels if (mean := means[label]) is not None}
    validated = {
        label: value
        for label in tested
        if (value := _mean([run["validation"] for run in runs[label].values()])) is not None
    }
    return ("validation", validated) if tested and validated.keys() == tested.keys() else ("test", tested)


def _add_statistics(content: dict[str, Any]) -> None:
    """The `statistics` of each method, and what tests over so many clients can find."""
    methods, reference, best = content["methods"], content["reference"], content["best"]
    per_client = {label: _client_means(method["runs"], content["clients"]) for label, method in methods.items()}
    scored = {label: scores for label, scores in per_client.items() if any(v is not None for v in scores.values())}
    common = [c for c in content["clients"] if all(scores[c] is not None for scores in scored.values())]
    table = {label: [scores[c] for c in common] for label, scores in scored.items()}
    over_reference = against_one(table, reference) if reference in table else {}  # type: ignore[arg-type]
    over_best = against_best(table, best) if best in table else {}  # type: ignore[arg-type]
    content["tests"] = {
        "clients": len(common),
        "smallest_p": smallest_p(len(common)),
        "told": _told_tests(len(common), len(over_reference), len(table)),
    }
    for label, method in methods.items():
        runs = list(method["runs"].values())
        base = None if reference is None or label == reference else list(methods[reference]["runs"].values())
        per_seed = [run["mean"] for run in runs]
        spread = None if None in per_seed else interval(per_seed)
        gains = None if base is None else [_mean_gain(run, other) for run, other in zip(runs, base, strict=True)]
        gain_spread = None if gains is None or None in gains else interval(gains)  # type: ignore[arg-type]
        told = {"bytes": [run["bytes"] for run in runs], "seconds": [run["seconds"] for run in runs]}
        reached = [run["to_target"] for run in runs if run["to_target"] is not None]
        clients = {c: _of_client(content, c, runs, base, per_client[label][c]) for c in content["clients"]}
        losers = [c for c, found in clients.items() if found["gain"] is not None and found["gain"] < 0]
        method["statistics"] = {
            "mean": _mean(per_seed),
            "interval": None if spread is None else [spread.low, spread.high],
            "interval_by": None if spread is None else spread.by,
            **{
                name: _mean([_quantile(run, q) for run in runs]) for name, q in (("worst", 0), ("p10", 10), ("p90", 90))
            },
            "gain": None if gains is None else _mean(gains),
            "gain_interval": None if gain_spread is None else [gain_spread.low, gain_spread.high],
            "losers": None if base is None else len(losers),
            "p_reference": _p(over_reference.get(label)),
            "p_best": _p(over_best.get(label)),
            "rounds": [run["round"] for run in runs],
            **{name: _mean(values) for name, values in told.items()},
            "to_target": {
                "reached": len(reached),
                **{
                    name: _mean([at[name] for at in reached]) if len(reached) == len(runs) else None
                    for name in ("round", "bytes", "seconds")
                },
            },
            "clients": clients,
        }


def _of_client(
    content: Mapping[str, Any], client: str, runs: Sequence[Mapping[str, Any]],
    base: Sequence[Mapping[str, Any]] | None, mean: float | None,
) -> dict[str, Any]:  # fmt: skip
    found: dict[str, Any] = {"mean": mean, "gain": None, "gain_interval": None, "verdict": None}
    if base is None:
        return found
    pairs = [(run["scores"].get(client), other["scores"].get(client)) for run, other in zip(runs, base, strict=True)]
    gains = [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]
    if len(gains) < len(pairs):
        return found
    spread = interval(gains) if content["same_clients"] else None
    found["gain"] = fmean(gains)
    found["gain_interval"] = None if spread is None else [spread.low, spread.high]
    if spread is not None:
        tested = min(sets[client]["test"] for sets in content["data"].values())
        found["verdict"] = verdict(gains, tested if content["score"] == "accuracy" else None)
    return found


def _client_means(runs: Mapping[str, Any], clients: Sequence[str]) -> dict[str, float | None]:
    return {c: _mean([run["scores"].get(c) for run in runs.values()]) for c in clients}


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean, or None if one of the values is not defined: means of other seeds would be compared."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _mean_gain(run: Mapping[str, Any], other: Mapping[str, Any]) -> float | None:
    ours, theirs = run["scores"], other["scores"]
    gains = [ours[c] - theirs[c] for c in ours if ours[c] is not None and theirs.get(c) is not None]
    return fmean(gains) if gains else None


def _quantile(run: Mapping[str, Any], percent: float) -> float | None:
    known = [value for value in run["scores"].values() if value is not None]
    return float(np.percentile(known, percent)) if known else None


def _p(found: Any) -> dict[str, float] | None:
    return None if found is None else {"p": found.p, "holm": found.holm}


def points(low: float, high: float) -> str:
    """Two shares as percentage points, in words.

    >>> points(0.041, 0.06)
    '4.1 to 6.0 points'
    """
    return f"{100 * low:.1f} to {100 * high:.1f} points"


def _verdicts(content: Mapping[str, Any], leader: str | None) -> list[str]:
    """What the intervals of the best method beside the reference support, in words."""
    reference = content["reference"]
    if leader is None or reference is None:
        return []
    found = content["methods"][leader]["statistics"]
    if found["gain_interval"] is None:
        return []
    low, high = found["gain_interval"]
    if low > 0:
        told = [f"{leader} gains {points(low, high)} over {reference}, mean over clients"]
    elif high < 0:
        told = [f"{leader}, the best of the others, loses {points(-high, -low)} against {reference}: train alone"]
    else:
        told = [f"{leader} against {reference}: {points(low, high)}, mean over clients, includes 0; these "
                f"{len(content['seeds'])} seeds do not tell them apart"]  # fmt: skip
    clients = found["clients"]
    for client, of_client in sorted(clients.items(), key=lambda item: -(item[1]["gain"] or 0.0)):
        if of_client["verdict"] == "gains":
            told.append(f"{client} gains {points(*of_client['gain_interval'])} with {leader}")
        elif of_client["verdict"] == "loses":
            low, high = of_client["gain_interval"]
            told.append(f"{client} loses {points(-high, -low)} with {leader}: let it keep its own model")
    if unsure := [client for client, of_client in clients.items() if of_client["verdict"] == "open"]:
        named = ", ".join(unsure[:_NAMED]) + (f" and {len(unsure) - _NAMED} more" if len(unsure) > _NAMED else "")
        told.append(f"nothing can be said of {named}")
    return told


def _notes(content: Mapping[str, Any]) -> list[str]:
    seeds, notes = len(content["seeds"]), []
    if seeds == 1:
        notes.append("one seed gives no interval and no verdict: give at least three")
    elif seeds < MANY:
        notes.append(f"intervals over {seeds} seeds are Student's, which holds what varies about evenly to both sides")
    if not content["same_clients"] and seeds > 1:
        notes.append("each seed deals the data anew, so that a client's name stands for other data and there are no "
                     "verdicts client by client; --same_data deals them once")  # fmt: skip
    if content["same_clients"] and seeds > 1 and content["score"] == "accuracy":
        notes.append(f"a client's verdict needs {FEWEST_EXAMPLES} of its test examples to change sides, whatever its "
                     "interval; each verdict by itself is wrong in one of 20 cases")  # fmt: skip
    if content["best_by"] == "test" and len(content["methods"]) > 2:
        notes.append("the best was chosen on the test examples on which it is reported, which flatters it a little; with "
                     "validation examples (--data.val_fraction) it is chosen on those")  # fmt: skip
    return notes


def _told_budget(budget: Budget, limit: float | None) -> str:
    if budget.kind == "steps":
        return "each method after all its rounds, with equal local training"
    if limit is None:
        return "each method after all its rounds: nothing was sent"
    amount = f"{limit / 2**20:.2f} MB" if budget.kind == "bytes" else f"{limit:.1f} s of clients and server"
    whose = "" if budget.limit is not None else ", what the cheapest run spends in all"
    return f"each run at its last evaluated round within {amount}{whose}"


def _told_target(asked: float | None, reference: str | None) -> str:
    if asked is not None:
        return "asked for"
    return "no method trains alone" if reference is None else f"what {reference} reaches at the compared round"


def _told_tests(clients: int, others: int, methods: int) -> str:
    pairs = methods * (methods - 1) // 2
    least = smallest_p(clients)
    return (
        f"Wilcoxon over {clients} clients cannot give less than p = {least:.2g}, after Holm's correction "
        f"{min(1.0, least * max(others, 1)):.2g} against the reference and {min(1.0, least * max(pairs, 1)):.2g} against "
        "the best, where all pairs count"
    )
