"""From the runs of a comparison to its results: the mapping that `polyfed.comparison.directory` documents."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from polyfed.comparison.convergence import advice, judge
from polyfed.comparison.crossed import LEVEL
from polyfed.comparison.curves import Point, curve, first_reaching, within
from polyfed.comparison.directory import FORMAT
from polyfed.comparison.evidence import Evidence
from polyfed.comparison.reading import Budget, Reading
from polyfed.comparison.rivals import add_gains, name_of, rivalry, scores_of
from polyfed.comparison.tallies import add_statistics, mean_of
from polyfed.comparison.verdicts import answers, covers, notes, told_budget, told_target, verdicts
from polyfed.core.metrics import Metric
from polyfed.simulation.losses import pooled, validation_losses

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
        references: scores that are no method's, and `left_out`, what is not among them, see `polyfed.comparison.beside`.
        alone: of a simple model, seed and client, its outputs on the client's test examples.
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
    left_out: Sequence[str] = ()
    alone: Callable[[str, int, str], Tensor | None] = lambda name, seed, client: None
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
    means_of = {label: mean_of([run["mean"] for run in runs[label].values()]) for label in labels}
    stopped = any(description["methods"][label].get("patience") is not None for label in labels)
    best_by, ranks = _ranking(labels, runs, means_of, 1 if metric.higher_is_better else -1, fitted=stopped)
    target = means_of.get(reference) if reading.target is None else reading.target
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
    content["references"] = {name: dict(one) for name, one in (of.references or {}).items()}
    content["left_out"] = list(of.left_out)
    evidence = _evidence(content, of, [label for label in labels if means_of[label] is not None])
    unclear = add_statistics(content, evidence)
    add_gains(content, evidence, metric)
    content["convergence"] = {label: _convergence(label, of) for label in labels}
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
    by_class = metric.parts is None and description["task"] != "regression"  # few examples of one class limit the score
    content["answers"], content["mean_answer"] = answers(
        content, leader, why_not, rivalry(content, evidence, leader), metric, by_class=by_class)  # fmt: skip
    content["verdicts"] = verdicts(content, content["answers"], content["mean_answer"])
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
    sizes = {seed: {c: row.get("val", 1) for c, row in rows.items()} for seed, rows in of.data.items()}
    losses = [(validation_losses(history), sizes.get(str(seed), {}))
              for (name, seed), history in of.histories.items() if name == label]  # fmt: skip
    curves: list[Sequence[tuple[int, float]]] = [found for one, number in losses if (found := pooled(one, number))]
    kind, tuning = "validation loss", of.description.get("tuning") or {}
    if not curves:
        searched = tuning.get("losses", {}).get(label)
        curves = [[(int(number), float(loss)) for number, loss in searched]] if searched else []
    if not curves:
        kind = "training loss"
        curves = [[(r["round"], r["train_loss"]) for r in h if r.get("train_loss") is not None] for h in histories]
    helps = advice(tuning.get("methods", {}).get(label))
    course = judge(curves, kind, helps)
    return {"converged": course.converged, "sentence": course.sentence, "advice": helps}


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
        helps = {label: content["convergence"][label]["advice"] for label in late}
        each = (
            [f"{label}: {words}" for label, words in helps.items()]
            if len(set(helps.values())) > 1
            else [helps[late[0]]]
        )
        found.append(f"Not converged: {', '.join(late)}. No answer is given over or with these methods. What helps: "
                     f"{'; '.join(each)}. Or name a budget (--budget steps) if that is the question.")  # fmt: skip
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
        **({"rounds": own} if (own := of.histories[label, seed][-1].get("rounds")) and at is not None else {}),
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
    labels: Sequence[str], runs: Mapping[str, Mapping[str, Any]], means_of: Mapping[str, float | None], sign: int, *,
    fitted: bool,
) -> tuple[str, dict[str, float]]:  # fmt: skip
    """By what the best is chosen, and that score of each method that has one; higher is better. Validation scores do not
    choose where training was `fitted` to these examples."""
    tested = {label: sign * mean for label in labels if (mean := means_of[label]) is not None}
    validated = {
        label: sign * value
        for label in tested
        if (value := mean_of([run["validation"] for run in runs[label].values()])) is not None
    }
    chosen = not fitted and tested and validated.keys() == tested.keys()
    return ("validation", validated) if chosen else ("test", tested)


# -- statistics -------------------------------------------------------------------------------------------------------


def _evidence(content: Mapping[str, Any], of: Material, scored: Sequence[str]) -> Evidence:
    """Of the methods with scores, and of what sites have alone."""
    methods = content["methods"]
    seeds, fixed = content["seeds"], content["same_clients"] and not content["resplit"]
    rounds = {label: {int(s): run["round"] for s, run in methods[label]["runs"].items()} for label in methods}

    def outputs(label: str, seed: int, client: str) -> Tensor | None:
        if label in rounds:
            return of.outputs(label, seed, client, rounds[label][seed])
        return of.alone(name_of(label), seed, client)

    own = {label: {int(s): run["scores"] for s, run in methods[label]["runs"].items()} for label in scored}
    return Evidence(
        metric=of.metric,
        seeds=seeds,
        scores={**own, **scores_of(content["references"])},
        outputs=outputs,
        targets=lambda client: of.targets(seeds[0], client),  # type: ignore[misc]
        fixed=fixed,
        named=content["same_clients"],
        sizes={int(s): {c: (row["train"], row["test"]) for c, row in sizes.items()} for s, sizes in of.data.items()},
    )
