"""From the runs of a comparison to its results: the mapping that `polyfed.comparison.directory` documents."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, final

import numpy as np
from torch import Tensor

from polyfed.comparison.convergence import judge
from polyfed.comparison.crossed import LEVEL, Estimate
from polyfed.comparison.curves import Point, curve, first_reaching, means, within
from polyfed.comparison.directory import FORMAT
from polyfed.comparison.evidence import Evidence, Found, span
from polyfed.comparison.reading import Budget, Reading
from polyfed.comparison.verdicts import answers, covers, notes, told_budget, told_target, verdicts
from polyfed.core.metrics import Metric

_DIGITS = 12  # after the point, of differences: what is beyond is rounding, and decides no gain or loss
Run = tuple[str, int]
Histories = Mapping[Run, Sequence[Mapping[str, Any]]]


def no_outputs(label: str, seed: int, client: str, round_number: int) -> Tensor | None:
    """For results whose predictions were not kept."""
    return None


@final
@dataclass(frozen=True, eq=False)
class Material:
    """What results are made of.

    Attributes:
        description: the content of `comparison.yaml`.
        data: by seed, as text, and client: examples for training and test, and per class.
        class_names: one per class, or None.
        histories: the objects of `metrics.jsonl` of each run.
        metric: which decides.
        outputs: of method, seed, client and round on the client's test examples; None where they were not kept.
        targets: of the test examples of a client at a seed.
        references: scores that are no method's, see `polyfed.comparison.references`.
        paths: of the runs that have directories, from that of the comparison.
    """

    description: Mapping[str, Any]
    data: Mapping[str, Mapping[str, Any]]
    class_names: Sequence[str] | None
    histories: Histories
    metric: Metric
    outputs: Callable[[str, int, str, int], Tensor | None] = no_outputs
    targets: Callable[[int, str], Tensor] | None = None
    references: Mapping[str, Any] | None = None
    paths: Mapping[Run, str] = field(default_factory=dict)


def summarise(of: Material, reading: Reading) -> dict[str, Any]:
    """The content of `comparison.json`."""
    description, metric = of.description, of.metric
    labels, reference = list(description["methods"]), description["reference"]
    curves = {run: curve(history, metric.name) for run, history in of.histories.items()}
    limit = _limit(reading.budget, curves)
    chosen = {run: _compared(run, of, reading.budget, limit, points) for run, points in curves.items()}
    runs = {
        label: {str(s): _run(label, s, of, curves[label, s], chosen[label, s]) for s in description["seeds"]}
        for label in labels
    }
    lost = _without_score(runs)
    for where, of_seed in lost:
        runs[where][of_seed] |= {"mean": None, "validation": None}
    mean_of = {label: _mean([run["mean"] for run in runs[label].values()]) for label in labels}
    stopped = any(description["methods"][label].get("patience") is not None for label in labels)
    best_by, ranks = _ranking(labels, runs, mean_of, 1 if metric.higher_is_better else -1, fitted=stopped)
    target = mean_of.get(reference) if reading.target is None else reading.target
    for label, seed in curves:
        alone = runs[reference][str(seed)]["mean"] if reference is not None else None
        sought = alone if reading.target is None else target
        reached = None if (label, str(seed)) in lost else first_reaching(
            curves[label, seed], sought, higher_is_better=metric.higher_is_better)  # fmt: skip
        runs[label][str(seed)]["to_target"] = (
            None if reached is None else {"round": reached.round, "bytes": reached.bytes, "seconds": reached.seconds}
        )
    content: dict[str, Any] = {"format": FORMAT}
    content |= {name: description[name] for name in ("title", "task")}
    content |= {"score": metric.name, "score_label": metric.label, "score_unit": metric.unit}
    content |= {"higher_is_better": metric.higher_is_better, "level": LEVEL}
    content |= {"rounds": description["settings"]["rounds"], "seeds": list(description["seeds"])}
    content |= {"clients": sorted(next(iter(of.data.values()))), "same_clients": description["same_clients"]}
    content |= {"resplit": description.get("resplit")}
    content |= {"class_names": None if of.class_names is None else list(of.class_names), "data": of.data}
    validated = any(point is not None and _is_chosen(run, of) for run, point in chosen.items())
    kind, asked = reading.budget.kind, reading.budget.limit is not None
    content["budget"] = {
        "kind": kind,
        "limit": limit,
        "sentence": told_budget(kind, limit, asked=asked, validated=validated),
    }
    content["target"] = {"score": target, "sentence": told_target(reading.target, reference)}
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
    unclear = _add_statistics(content, of, [label for label in labels if mean_of[label] is not None])
    content["convergence"] = {label: _convergence(label, of) for label in labels}
    content["references"] = dict(of.references or {})
    content["predictions"] = any(
        of.outputs(label, int(s), client, run["round"]) is not None
        for label, method in content["methods"].items()
        for s, run in method["runs"].items()
        for client in list(run["scores"])[:1]
    )
    content |= {"skipped": dict(description["skipped"]), "failed": dict(description.get("failed", {}))}
    content["tuning"] = description.get("tuning")
    leader, why_not = _leader(content, ranks, reading.budget)
    content["leader"] = leader
    content["answers"], content["mean_answer"] = answers(content, leader, why_not)
    content["verdicts"] = verdicts(content["answers"], content["mean_answer"])
    content |= {"covers": covers(content), "warnings": _warnings(content, reading.budget)}
    content["notes"] = notes(content, lost, unclear)
    return content


# -- which round ------------------------------------------------------------------------------------------------------


def _compared(run: Run, of: Material, budget: Budget, limit: float | None, points: Sequence[Point]) -> Point | None:
    if budget.kind != "best":
        return within(points, budget.kind, limit)
    number = _chosen_round(run, of)
    return next((p for p in points if p.round == number), points[-1] if points else None)


def _chosen_round(run: Run, of: Material) -> int | None:
    """By the search, for clients whose validation examples were held out for it alone; else by the run's own."""
    searched: int | None = (of.description.get("tuning") or {}).get("rounds", {}).get(run[0])
    own: int | None = of.histories[run][-1].get("best_round") if of.histories[run] else None
    return own if searched is None else searched


def _is_chosen(run: Run, of: Material) -> bool:
    return _chosen_round(run, of) is not None


def _limit(budget: Budget, curves: Mapping[Run, Sequence[Point]]) -> float | None:
    if budget.kind in ("best", "steps") or budget.limit is not None:
        return budget.limit
    spent = [getattr(points[-1], budget.kind) for points in curves.values() if points]
    return min((amount for amount in spent if amount > 0), default=None)


def _convergence(label: str, of: Material) -> dict[str, Any]:
    """Whether the method had done learning: by the validation loss of its runs, of the search, or else the training loss."""
    histories = [history for (name, _), history in of.histories.items() if name == label]
    curves = [found for history in histories if (found := means(history, "val_loss"))]
    kind = "validation loss"
    if not curves:
        searched = (of.description.get("tuning") or {}).get("losses", {}).get(label)
        curves = [[(int(number), float(loss)) for number, loss in searched]] if searched else []
    if not curves:
        kind = "training loss"
        curves = [[(r["round"], r["train_loss"]) for r in h if r.get("train_loss") is not None] for h in histories]
    course = judge(curves, kind)
    return {"converged": course.converged, "sentence": course.sentence}


def _leader(content: Mapping[str, Any], ranks: Mapping[str, float], budget: Budget) -> tuple[str | None, str]:
    """The best method that may be compared with the reference, and why nothing is decided."""
    reference, convergence = content["reference"], content["convergence"]
    contenders = {label: rank for label, rank in ranks.items() if label != reference}
    if budget.asked or reference is None:
        ready = contenders
    else:
        ready = {label: rank for label, rank in contenders.items() if convergence[label]["converged"] is not False}
    leader = max(ready or contenders, key=(ready or contenders).__getitem__, default=None)
    if reference is None or leader is None:
        return leader, ""
    if not budget.asked and convergence[reference]["converged"] is False:
        return leader, f"{reference} had not converged"
    if not ready:
        return leader, f"{leader} had not converged"
    return leader, "one seed" if len(content["seeds"]) == 1 else ""


def _warnings(content: Mapping[str, Any], budget: Budget) -> list[str]:
    """What a reader must know before anything else."""
    found = []
    if content["tuning"] is None:
        found.append(
            "The methods were not tuned (--tune none): a gain may be that of a learning rate that suits one method better."
        )
    if len(content["seeds"]) == 2:
        found.append("Two seeds say little of what another seed would give, so that intervals are many times as wide as "
                     "with five: give more (--seeds 0,1,2,3,4, or --resplit 5).")  # fmt: skip
    late = [label for label, one in content["convergence"].items() if one["converged"] is False]
    if late and not budget.asked:
        found.append(f"Not converged: {', '.join(late)}. No answer is given over or with these methods; give more rounds, "
                     "or name a budget (--budget steps) if that is the question.")  # fmt: skip
    elif late:
        found.append(f"Not converged within this budget: {', '.join(late)}.")
    if content["tuning"] is not None and (edge := content["tuning"].get("edge")):
        found.append(
            f"The best value was at the edge of what was tried: {', '.join(edge)}. Try values beyond (--tune)."
        )
    return found


# -- scores -----------------------------------------------------------------------------------------------------------


def _run(label: str, seed: int, of: Material, points: Sequence[Point], at: Point | None) -> dict[str, Any]:
    record = None if at is None else of.histories[label, seed][at.round - 1]
    rows = {} if record is None else record["clients"]
    validation = None if record is None else record["summary"].get(f"val_{of.metric.name}", {}).get("mean")
    return {
        "path": of.paths.get((label, seed)),
        "round": None if at is None else at.round,
        "scores": {client: row.get(of.metric.name) for client, row in rows.items()},
        "mean": None if at is None else at.score,
        "validation": validation,
        "bytes": None if at is None else at.bytes,
        "seconds": None if at is None else at.seconds,
        "curve": [[p.round, p.score, p.bytes, p.seconds] for p in points],
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


def _ranking(
    labels: Sequence[str], runs: Mapping[str, Mapping[str, Any]], mean_of: Mapping[str, float | None], sign: int, *,
    fitted: bool,
) -> tuple[str, dict[str, float]]:  # fmt: skip
    """By what the best is chosen, and that score of each method that has one; higher is better. Validation scores do not
    choose where training was `fitted` to these examples."""
    tested = {label: sign * mean for label in labels if (mean := mean_of[label]) is not None}
    validated = {
        label: sign * value
        for label in tested
        if (value := _mean([run["validation"] for run in runs[label].values()])) is not None
    }
    chosen = not fitted and tested and validated.keys() == tested.keys()
    return ("validation", validated) if chosen else ("test", tested)


# -- statistics -------------------------------------------------------------------------------------------------------


def _add_statistics(content: dict[str, Any], of: Material, scored: Sequence[str]) -> list[str]:
    """The `statistics` of each method; returns clients without an interval."""
    methods, reference = content["methods"], content["reference"]
    seeds, fixed = content["seeds"], content["same_clients"] and not content["resplit"]
    rounds = {label: {int(s): run["round"] for s, run in methods[label]["runs"].items()} for label in methods}
    evidence = Evidence(
        metric=of.metric,
        seeds=seeds,
        scores={label: {int(s): run["scores"] for s, run in methods[label]["runs"].items()} for label in scored},
        outputs=lambda label, seed, client: of.outputs(label, seed, client, rounds[label][seed]),
        targets=lambda client: of.targets(seeds[0], client),  # type: ignore[misc]
        fixed=fixed,
        named=content["same_clients"],
        sizes={int(s): {c: (row["train"], row["test"]) for c, row in sizes.items()} for s, sizes in of.data.items()},
    )
    found = evidence.of(scored, reference if reference in scored else None, content["best"])
    for label, method in methods.items():
        method["statistics"] = _statistics(content, of.metric, label, found.get(label, Found(None)))
    named = [one.clients for one in found.values() if one.clients]
    return (
        [c for c in content["clients"] if named and all(c in row and row[c] is None for row in named)] if fixed else []
    )


def _statistics(content: Mapping[str, Any], metric: Metric, label: str, found: Found) -> dict[str, Any]:
    methods, reference = content["methods"], content["reference"]
    runs = list(methods[label]["runs"].values())
    base = None if reference is None or label == reference else list(methods[reference]["runs"].values())
    sign = 1 if metric.higher_is_better else -1
    gains = None if base is None else [_mean_gain(run, other, sign) for run, other in zip(runs, base, strict=True)]
    told = {"bytes": [run["bytes"] for run in runs], "seconds": [run["seconds"] for run in runs]}
    reached = [run["to_target"] for run in runs if run["to_target"] is not None]
    clients = {c: _of_client(content, c, runs, base, sign, found.clients.get(c), metric) for c in content["clients"]}
    gained = _gained(content, clients, runs, base, sign)
    worst = (("worst", 0), ("p10", 10), ("p90", 90)) if sign > 0 else (("worst", 100), ("p10", 90), ("p90", 10))
    return {
        "mean": _mean([run["mean"] for run in runs]),
        "interval": span(found.mean, metric, difference=False),
        **{name: _mean([_quantile(run, q) for run in runs]) for name, q in worst},
        "gain": None if gains is None else _mean(gains),
        "gain_interval": span(found.gain, metric, difference=True),
        "gain_per_seed": gains,
        "losers": sum(gain < 0 for gain in gained) if gained else None,
        "participants": len(gained) if gained else None,
        "p_reference": _p(found.gain),
        "p_best": _p(found.against_best),
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
    content: Mapping[str, Any], client: str, runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]] | None,
    sign: int, estimate: Estimate | None, metric: Metric,
) -> dict[str, Any]:  # fmt: skip
    tested = min(sizes[client]["test"] for sizes in content["data"].values() if client in sizes)
    found: dict[str, Any] = {"mean": _mean([run["scores"].get(client) for run in runs]), "gain": None,
                             "gain_interval": None, "p": None, "verdict": None, "test_examples": tested}  # fmt: skip
    if base is None:
        return found
    pairs = [(run["scores"].get(client), other["scores"].get(client)) for run, other in zip(runs, base, strict=True)]
    gains = [
        round(sign * (ours - theirs), _DIGITS) for ours, theirs in pairs if ours is not None and theirs is not None
    ]
    if len(gains) < len(pairs):
        return found
    found |= {"gain": round(fmean(gains), _DIGITS), "gain_interval": span(estimate, metric, difference=True)}
    found["p"] = _p(estimate)
    if content["same_clients"]:
        decided = estimate is not None and len(runs) > 1 and estimate.p <= 1 - LEVEL
        found["verdict"] = ("gains" if estimate.low > 0 else "loses") if decided and estimate else "undecided"
    return found


def _gained(
    content: Mapping[str, Any], clients: Mapping[str, Mapping[str, Any]], runs: Sequence[Mapping[str, Any]],
    base: Sequence[Mapping[str, Any]] | None, sign: int,
) -> list[float]:  # fmt: skip
    """What participants gain: clients, mean over seeds; the clients of each seed where a name stands for other data."""
    if base is None:
        return []
    if content["same_clients"]:
        return [found["gain"] for found in clients.values() if found["gain"] is not None]
    return [gain for run, other in zip(runs, base, strict=True) for gain in _gains(run, other, sign)]


def _gains(run: Mapping[str, Any], other: Mapping[str, Any], sign: int) -> list[float]:
    ours, theirs = run["scores"], other["scores"]
    return [
        round(sign * (ours[c] - theirs[c]), _DIGITS) for c in ours if ours[c] is not None and theirs.get(c) is not None
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean, or None if one of the values is not defined: means of other seeds would be compared."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _mean_gain(run: Mapping[str, Any], other: Mapping[str, Any], sign: int) -> float | None:
    gains = _gains(run, other, sign)
    return round(fmean(gains), _DIGITS) if gains and run["mean"] is not None and other["mean"] is not None else None


def _quantile(run: Mapping[str, Any], percent: float) -> float | None:
    known = [value for value in run["scores"].values() if value is not None]
    return float(np.percentile(known, percent)) if known else None


def _p(found: Estimate | None) -> float | None:
    return None if found is None else found.p
