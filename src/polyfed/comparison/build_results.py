"""Builds the results of a comparison from its finished runs, in the format that
`polyfed.comparison.storage.results_schema` describes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyfed.comparison.execution.fold_tests import FoldTestTargets
from polyfed.comparison.planning.budget import Budget, ResultCriteria
from polyfed.comparison.statistics.cross_validation.fold_evidence import CrossValidationEvidence
from polyfed.comparison.statistics.cross_validation.fold_statistics import (
    describe_folds,
    replace_run_means_by_fold_scores,
)
from polyfed.comparison.statistics.curves.convergence import (
    advice_if_loss_still_falls,
    describe_too_few_rounds,
    judge_convergence,
)
from polyfed.comparison.statistics.curves.learning_curve import (
    CurvePoint,
    build_learning_curve,
    first_point_reaching_target,
    last_point_within_budget,
)
from polyfed.comparison.statistics.estimate import ALPHA, CONFIDENCE_LEVEL
from polyfed.comparison.statistics.evidence import Evidence
from polyfed.comparison.statistics.method_statistics import (
    add_method_statistics,
    mean_if_all_defined,
    mean_validation_score,
)
from polyfed.comparison.storage.comparison_directory import RESULTS_FORMAT
from polyfed.comparison.verdicts.budget_sentences import budget_sentence, describe_target_source
from polyfed.comparison.verdicts.rival_gains import (
    add_gains_of_references_over_local,
    collect_local_simple_model_scores,
    leader_gain_over_local_alternatives,
    name_of_method_or_reference,
)
from polyfed.comparison.verdicts.site_model import build_random_effects_gain_entry
from polyfed.comparison.verdicts.verdict_sentences import (
    build_join_answers,
    describe_limits_of_results,
    describe_result_scope,
    verdict_sentences,
)
from polyfed.comparison.verdicts.warning_sentences import warning_sentences
from polyfed.core.evaluation.metric import Metric
from polyfed.core.tasks.task_lookup import get_task
from polyfed.simulation.monitoring.validation_losses import pool_losses, validation_losses_by_client

Run = tuple[str, int]
Histories = Mapping[Run, Sequence[Mapping[str, Any]]]


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class ResultInputs:
    """Holds what `build_results` computes results from: description, finished runs and predictions.

    Attributes:
        description: the content of `comparison.yaml`.
        client_sizes: by seed (as text) and client, the numbers of examples, and of training examples per class.
        class_names: one name per class, or None.
        histories: the records of `metrics.jsonl` of each run.
        metric: the metric that decides.
        outputs: returns the outputs of a method, seed, client and round on the client's test examples, or None.
        targets: returns the targets of a client's test examples at a seed.
        groups: returns the groups of the same examples, as numbers; None if each is a unit of its own.
        references: scores of simple models, see `polyfed.comparison.references.fit_references`.
        left_out: sentences on references that were not fitted.
        reference_outputs: returns the outputs of a simple model, seed and client on the client's test examples.
        data_warnings: sentences about the data, for the top of the page.
        paths: run directories, relative to the comparison's.
        fold_tests: the test examples of each fold, if the runs are folds.
        alpha: the error rate of intervals from folds.
        has_standardised_targets: whether the targets are those of a table, which are scaled.
    """

    description: Mapping[str, Any]
    client_sizes: Mapping[str, Mapping[str, Any]]
    class_names: Sequence[str] | None
    histories: Histories
    metric: Metric
    outputs: Callable[[str, int, str, int], Tensor | None] = lambda label, seed, client, round_number: None
    targets: Callable[[int, str], Tensor] | None = None
    references: Mapping[str, Any] | None = None
    left_out: Sequence[str] = ()
    reference_outputs: Callable[[str, int, str], Tensor | None] = lambda name, seed, client: None
    data_warnings: Sequence[str] = ()
    paths: Mapping[Run, str] = field(default_factory=dict)
    groups: Callable[[int, str], NDArray[np.int64] | None] = lambda seed, client: None
    fold_tests: FoldTestTargets | None = None
    alpha: float = ALPHA
    has_standardised_targets: bool = False


def build_results(inputs: ResultInputs, criteria: ResultCriteria) -> dict[str, Any]:
    """Computes the content of `comparison.json` from the runs, with this budget and target."""
    description, metric = inputs.description, inputs.metric
    labels, reference = list(description["methods"]), description["reference"]
    curves = {run: build_learning_curve(history, metric.name) for run, history in inputs.histories.items()}
    limit = _budget_limit(criteria.budget, curves)
    point_by_run = {run: _compared_point(run, inputs, criteria.budget, limit, points) for run, points in curves.items()}
    runs = {
        label: {
            str(s): _run_entry(label, s, inputs, curves[label, s], point_by_run[label, s]) for s in description["seeds"]
        }
        for label in labels
    }
    clients_without_score = _clients_without_score(runs)
    for where, of_seed in clients_without_score:
        runs[where][of_seed] |= {"mean": None, "validation": None}
    means_of = {label: mean_if_all_defined([run["mean"] for run in runs[label].values()]) for label in labels}
    stopped = any(description["methods"][label].get("patience") is not None for label in labels)
    best_by, ranks = _ranking_scores(
        labels, runs, means_of, 1 if metric.higher_is_better else -1, fitted_to_validation=stopped
    )
    target = means_of.get(reference) if criteria.target is None else criteria.target
    for label, seed in curves:
        reference_mean = runs[reference][str(seed)]["mean"] if reference is not None else None
        run_target = reference_mean if criteria.target is None else target
        reached = None if (label, str(seed)) in clients_without_score else first_point_reaching_target(
            curves[label, seed], run_target, higher_is_better=metric.higher_is_better)  # fmt: skip
        runs[label][str(seed)]["to_target"] = (
            None if reached is None else {"round": reached.round, "bytes": reached.bytes, "seconds": reached.seconds}
        )
    content = _describe_basis(inputs)
    validated = any(point is not None and _chosen_round(run, inputs) is not None for run, point in point_by_run.items())
    kind, has_limit = criteria.budget.kind, criteria.budget.limit is not None
    panel = dict(description.get("panel") or {})
    content |= {"panel": panel} if panel else {}
    content["budget"] = {
        "kind": kind,
        "limit": limit,
        "sentence": budget_sentence(kind, limit, has_limit=has_limit, has_validation_examples=validated),
    }
    content["target"] = {"score": target, "sentence": describe_target_source(criteria.target, reference)}
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
    content["references"] = {name: dict(entry) for name, entry in (inputs.references or {}).items()}
    content["left_out"] = list(inputs.left_out)
    evidence = _build_evidence(content, inputs, [label for label in labels if means_of[label] is not None])
    unclear = add_method_statistics(content, evidence)
    if evidence.folds is not None:
        replace_run_means_by_fold_scores(content, evidence.folds)
    add_gains_of_references_over_local(content, evidence, metric)
    content["convergence"] = {label: _convergence_entry(label, inputs) for label in labels}
    content["predictions"] = any(
        inputs.outputs(label, int(s), client, run["round"]) is not None
        for label, method in content["methods"].items()
        for s, run in method["runs"].items()
        for client in list(run["scores"])[:1]
    )
    content |= {"skipped": dict(description["skipped"]), "failed": dict(description.get("failed", {}))}
    content["tuning"] = description.get("tuning")
    leader, why_not = _leader_and_doubt(content, ranks, criteria.budget)
    content["leader"] = leader
    # Few examples of one class limit the score.
    by_class = metric.per_example is None and get_task(description["task"]).rarest_limits_score
    gains = leader_gain_over_local_alternatives(content, evidence, leader)
    best = None if gains.for_mean is None else gains.for_mean.best_rival
    widest = None if leader is None or best is None else evidence.find_client_that_widens_mean(leader, best)
    content["answers"], content["mean_answer"] = build_join_answers(
        content, leader, why_not, gains, metric, by_class=by_class, widest=widest
    )
    content["site_model"] = build_random_effects_gain_entry(content["mean_answer"], evidence, metric)
    content["verdicts"] = verdict_sentences(content, content["answers"], content["mean_answer"])
    content |= {
        "covers": [*([panel["sentence"]] if panel else ()), *describe_result_scope(content)],
        "warnings": warning_sentences(content, inputs.histories, inputs.data_warnings, criteria.budget),
    }
    content["notes"] = describe_limits_of_results(content, clients_without_score, unclear)
    return content


def _describe_basis(inputs: ResultInputs) -> dict[str, Any]:
    """Returns the entries on the comparison itself: its score, seeds, clients and data."""
    description, metric = inputs.description, inputs.metric
    in_deviations = inputs.has_standardised_targets and metric.name in ("mae", "rmse")
    return {
        "format": RESULTS_FORMAT,
        "title": description["title"],
        "task": description["task"],
        "score": metric.name,
        "score_label": f"{metric.label} (SD of the target)" if in_deviations else metric.label,
        "score_unit": metric.unit,
        "higher_is_better": metric.higher_is_better,
        "level": CONFIDENCE_LEVEL,
        "rounds": description["settings"]["rounds"],
        "seeds": list(description["seeds"]),
        "clients": sorted(next(iter(inputs.client_sizes.values()))),
        "same_clients": description["same_clients"],
        "resplit": description.get("resplit"),
        **describe_folds(inputs.fold_tests, description),
        "class_names": None if inputs.class_names is None else list(inputs.class_names),
        "data": inputs.client_sizes,
    }


# -- which round ------------------------------------------------------------------------------------------------------


def _compared_point(
    run: Run, inputs: ResultInputs, budget: Budget, limit: float | None, points: Sequence[CurvePoint]
) -> CurvePoint | None:
    if budget.kind != "best":
        return last_point_within_budget(points, budget.kind, limit)
    number = _chosen_round(run, inputs)
    return next((p for p in points if p.round == number), points[-1] if points else None)


def _chosen_round(run: Run, inputs: ResultInputs) -> int | None:
    """Returns the round chosen by the search if it held out validation examples of its own, else the run's best round."""
    search_round: int | None = (inputs.description.get("tuning") or {}).get("rounds", {}).get(run[0])
    run_round: int | None = inputs.histories[run][-1].get("best_round") if inputs.histories[run] else None
    return run_round if search_round is None else search_round


def _budget_limit(budget: Budget, curves: Mapping[Run, Sequence[CurvePoint]]) -> float | None:
    if budget.kind in ("best", "steps") or budget.limit is not None:
        return budget.limit
    spent = [getattr(points[-1], budget.kind) for points in curves.values() if points]
    return min((amount for amount in spent if amount > 0), default=None)


def _convergence_entry(label: str, inputs: ResultInputs) -> dict[str, Any]:
    """Judges whether a method had converged, by the validation loss of its runs or of the search, else the training loss."""
    histories = [history for (name, _), history in inputs.histories.items() if name == label]
    sizes = {seed: {c: row.get("val", 1) for c, row in rows.items()} for seed, rows in inputs.client_sizes.items()}
    losses = [(validation_losses_by_client(history), sizes.get(str(seed), {}))
              for (name, seed), history in inputs.histories.items() if name == label]  # fmt: skip
    curves: list[Sequence[tuple[int, float]]] = [
        pooled_curve
        for client_losses, num_examples in losses
        if (pooled_curve := pool_losses(client_losses, num_examples))
    ]
    kind, tuning = "validation loss", inputs.description.get("tuning") or {}
    if not curves:
        searched = tuning.get("losses", {}).get(label)
        curves = [[(int(num_examples), float(loss)) for num_examples, loss in searched]] if searched else []
    if not curves:
        kind = "training loss"
        curves = [[(r["round"], r["train_loss"]) for r in h if r.get("train_loss") is not None] for h in histories]
    advice_text = advice_if_loss_still_falls(tuning.get("methods", {}).get(label))
    course = judge_convergence(curves, kind, advice_text)
    return {**vars(course), "advice": advice_text}


def _leader_and_doubt(content: Mapping[str, Any], ranks: Mapping[str, float], budget: Budget) -> tuple[str | None, str]:
    """Returns the best method that may be compared with the reference, and why nothing is decided (may be empty)."""
    reference, convergence = content["reference"], content["convergence"]
    contenders = {label: rank for label, rank in ranks.items() if label != reference}
    ready = contenders
    if not budget.determines_compared_round and reference is not None:
        ready = {label: rank for label, rank in contenders.items() if convergence[label]["converged"] is not False}
    leader = max(ready or contenders, key=(ready or contenders).__getitem__, default=None)
    if reference is None or leader is None:
        return leader, ""
    if not budget.determines_compared_round and convergence[reference]["converged"] is False:
        return leader, f"{reference} had not converged"
    if not ready:
        return leader, f"{leader} had not converged"
    reasons = ["one seed"] if len(content["seeds"]) == 1 else []
    if not budget.determines_compared_round:
        reasons += describe_too_few_rounds([convergence[reference], convergence[leader]])
    return leader, " and ".join(reasons)


# -- scores -----------------------------------------------------------------------------------------------------------


def _run_entry(
    label: str, seed: int, inputs: ResultInputs, points: Sequence[CurvePoint], compared_point: CurvePoint | None
) -> dict[str, Any]:
    record = None if compared_point is None else inputs.histories[label, seed][compared_point.round - 1]
    rows = {} if record is None else record["clients"]
    few = [c for c, row in inputs.client_sizes[str(seed)].items() if "val_rarest" in row]
    validation = None if record is None else mean_validation_score(record, inputs.metric, few)
    return {
        "path": inputs.paths.get((label, seed)),
        "round": None if compared_point is None else compared_point.round,
        "scores": {
            client: row.get(inputs.metric.name)
            for client, row in rows.items()
            if client in inputs.client_sizes[str(seed)]  # others only trained
        },
        "mean": None if compared_point is None else compared_point.score,
        "validation": validation,
        "bytes": None if compared_point is None else compared_point.bytes,
        "seconds": None if compared_point is None else compared_point.seconds,
        "curve": [[p.round, p.score, p.bytes, p.seconds] for p in points],
        **(
            {"rounds": client_rounds}
            if (client_rounds := inputs.histories[label, seed][-1].get("rounds")) and compared_point is not None
            else {}
        ),
    }


def _clients_without_score(runs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[tuple[str, str], list[str]]:
    """Returns, for each run (label, seed), the clients that have no score in it but have one in another method's run.

    The run's mean would be over other clients, so it is not defined.
    """
    by_run = {}
    for seed in next(iter(runs.values()), {}):
        scored_clients = {
            c for by_seed in runs.values() for c, value in by_seed[seed]["scores"].items() if value is not None
        }
        for label, by_seed in runs.items():
            scores = by_seed[seed]["scores"]
            if scores and (without := sorted(c for c in scored_clients if scores.get(c) is None)):
                by_run[label, seed] = without
    return by_run


def _ranking_scores(
    labels: Sequence[str], runs: Mapping[str, Mapping[str, Any]], means_of: Mapping[str, float | None], sign: int, *,
    fitted_to_validation: bool,
) -> tuple[str, dict[str, float]]:  # fmt: skip
    """Returns which examples choose the best method, and each method's score on them, with higher as better.

    Validation examples do not choose if early stopping fitted training to them (`fitted_to_validation`).
    """
    tested = {label: sign * mean for label in labels if (mean := means_of[label]) is not None}
    validated = {
        label: sign * value
        for label in tested
        if (value := mean_if_all_defined([run["validation"] for run in runs[label].values()])) is not None
    }
    by_validation = not fitted_to_validation and tested and validated.keys() == tested.keys()
    return ("validation", validated) if by_validation else ("test", tested)


# -- statistics -------------------------------------------------------------------------------------------------------


def _build_evidence(content: Mapping[str, Any], inputs: ResultInputs, scored: Sequence[str]) -> Evidence:
    """Builds the evidence of the methods with scores and of the simple models."""
    methods = content["methods"]
    seeds, fixed = content["seeds"], content["same_clients"] and not (content["resplit"] or content.get("folds"))
    rounds = {label: {int(s): run["round"] for s, run in methods[label]["runs"].items()} for label in methods}

    def outputs(label: str, seed: int, client: str) -> Tensor | None:
        if label in rounds:
            return inputs.outputs(label, seed, client, rounds[label][seed])
        return inputs.reference_outputs(name_of_method_or_reference(label), seed, client)

    method_scores = {label: {int(s): run["scores"] for s, run in methods[label]["runs"].items()} for label in scored}
    tests, folds = inputs.fold_tests, None
    if tests is not None:
        folds = CrossValidationEvidence(
            inputs.metric, seeds, tests.design.number, outputs, tests.targets, tests.units, inputs.alpha
        )
    return Evidence(
        metric=inputs.metric,
        seeds=seeds,
        scores={**method_scores, **collect_local_simple_model_scores(content["references"])},
        outputs=outputs,
        targets=lambda client: inputs.targets(seeds[0], client),  # type: ignore[misc]
        has_same_data=fixed,
        has_same_clients=content["same_clients"],
        sizes={
            int(s): {c: tuple(row.get("groups") or (row["train"], row["test"])) for c, row in sizes.items()}
            for s, sizes in inputs.client_sizes.items()
        },
        groups=lambda client: inputs.groups(seeds[0], client),
        folds=folds,
        population=(inputs.description.get("panel") or {}).get("of"),
    )
