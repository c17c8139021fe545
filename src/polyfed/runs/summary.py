"""From the histories of the runs of a comparison to its results: the mapping that `polyfed.runs.comparison` documents."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, final

import numpy as np

from polyfed.errors import UserError, nearest
from polyfed.runs.statistics import (
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
from polyfed.runs.verdicts import notes, told_budget, told_target, told_tests, verdicts, within_scale

FORMAT = 1
KINDS = ("steps", "bytes", "seconds")
_DIGITS = 12  # after the point, of differences: what is beyond is rounding, and decides no gain or loss
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
        if self.limit is not None and (self.kind == "steps" or not 0 < self.limit < math.inf):
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
    """How results are read: the budget, and the mean score to be reached (None: what the reference reaches with the same
    seed).

    Raises:
        UserError: a target that is no score.
    """

    budget: Budget = Budget()
    target: float | None = None

    def __post_init__(self) -> None:
        if self.target is not None and not (isinstance(self.target, int | float) and -math.inf < self.target <= 1):
            raise UserError(f"a target is a mean score, a share such as 0.8 and not 80, got {self.target!r}")


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
    lost = _without_score(runs)
    for where, of_seed in lost:
        runs[where][of_seed] |= {"mean": None, "validation": None}
    means = {label: _mean([run["mean"] for run in runs[label].values()]) for label in labels}
    best_by, ranks = _ranking(labels, runs, means)
    target = means.get(reference) if reading.target is None else reading.target
    for label, seed in curves:
        alone = runs[reference][str(seed)]["mean"] if reference is not None else None
        sought = alone if reading.target is None else target
        reached = None if (label, str(seed)) in lost else first_reaching(curves[label, seed], sought)
        runs[label][str(seed)]["to_target"] = (
            None if reached is None else {"round": reached.round, "bytes": reached.bytes, "seconds": reached.seconds}
        )
    content: dict[str, Any] = {"format": FORMAT}
    content |= {name: description[name] for name in ("title", "task", "score")}
    content |= {"rounds": description["settings"]["rounds"], "seeds": list(description["seeds"])}
    content |= {"clients": sorted(next(iter(data.values()))), "same_clients": description["same_clients"]}
    content |= {"class_names": None if class_names is None else list(class_names), "data": data}
    content["budget"] = {
        "kind": reading.budget.kind,
        "limit": limit,
        "told": told_budget(reading.budget.kind, limit, asked=reading.budget.limit is not None),
    }
    content["target"] = {"score": target, "told": told_target(reading.target, reference)}
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
    content["verdicts"] = verdicts(content, leader, len(contenders))
    content["notes"] = notes(content, lost)
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


def _without_score(runs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[tuple[str, str], list[str]]:
    """By label and seed, clients for whom the run has no score and another method's run has one. Its mean would be over
    other clients, and the better for it."""
    found = {}
    for seed in next(iter(runs.values()), {}):
        known = {c for by_seed in runs.values() for c, value in by_seed[seed]["scores"].items() if value is not None}
        for label, by_seed in runs.items():
            scores = by_seed[seed]["scores"]
            if scores and (without := sorted(c for c in known if scores.get(c) is None)):
                found[label, seed] = without
    return found


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
        "told": told_tests(len(common), len(over_reference), len(table)),
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
        gained = _gained(content, clients, runs, base)
        method["statistics"] = {
            "mean": _mean(per_seed),
            "interval": spread and list(within_scale(spread, content["score"], 0.0)),
            "interval_by": None if spread is None else spread.by,
            **{
                name: _mean([_quantile(run, q) for run in runs]) for name, q in (("worst", 0), ("p10", 10), ("p90", 90))
            },
            "gain": None if gains is None else _mean(gains),
            "gain_interval": gain_spread and list(within_scale(gain_spread, content["score"], -1.0)),
            "gain_per_seed": gains,
            "losers": sum(gain < 0 for gain in gained) if gained else None,
            "participants": len(gained) if gained else None,
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
    gains = [round(ours - theirs, _DIGITS) for ours, theirs in pairs if ours is not None and theirs is not None]
    if len(gains) < len(pairs):
        return found
    spread = interval(gains) if content["same_clients"] else None
    found["gain"] = round(fmean(gains), _DIGITS)
    found["gain_interval"] = spread and list(within_scale(spread, content["score"], -1.0))
    if spread is not None:
        tested = min(sets[client]["test"] for sets in content["data"].values())
        found["verdict"] = verdict(gains, tested if content["score"] == "accuracy" else None)
    return found


def _gained(
    content: Mapping[str, Any], clients: Mapping[str, Mapping[str, Any]], runs: Sequence[Mapping[str, Any]],
    base: Sequence[Mapping[str, Any]] | None,
) -> list[float]:  # fmt: skip
    """What participants gain: clients, mean over seeds; the clients of each seed where a name stands for other data."""
    if base is None:
        return []
    if content["same_clients"]:
        return [found["gain"] for found in clients.values() if found["gain"] is not None]
    return [gain for run, other in zip(runs, base, strict=True) for gain in _gains(run, other)]


def _gains(run: Mapping[str, Any], other: Mapping[str, Any]) -> list[float]:
    ours, theirs = run["scores"], other["scores"]
    return [round(ours[c] - theirs[c], _DIGITS) for c in ours if ours[c] is not None and theirs.get(c) is not None]


def _client_means(runs: Mapping[str, Any], clients: Sequence[str]) -> dict[str, float | None]:
    return {c: _mean([run["scores"].get(c) for run in runs.values()]) for c in clients}


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean, or None if one of the values is not defined: means of other seeds would be compared."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _mean_gain(run: Mapping[str, Any], other: Mapping[str, Any]) -> float | None:
    gains = _gains(run, other)
    return round(fmean(gains), _DIGITS) if gains and run["mean"] is not None and other["mean"] is not None else None


def _quantile(run: Mapping[str, Any], percent: float) -> float | None:
    known = [value for value in run["scores"].values() if value is not None]
    return float(np.percentile(known, percent)) if known else None


def _p(found: Any) -> dict[str, float] | None:
    return None if found is None else {"p": found.p, "holm": found.holm}
