"""Computes the entry `statistics` of each method in `comparison.json`: means, gains over the reference method, costs."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from polyfed.comparison.statistics.estimate import CONFIDENCE_LEVEL, Estimate
from polyfed.comparison.statistics.evidence import Evidence, MethodEvidence, clip_interval_to_metric_range
from polyfed.core.evaluation.metric import Metric

_DIGITS = 12  # digits after the decimal point of a difference; what is beyond is rounding error


def add_method_statistics(content: dict[str, Any], evidence: Evidence) -> list[str]:
    """Adds `statistics` to each method; returns the ids of clients without a confidence interval."""
    methods, reference = content["methods"], content["reference"]
    scored = [label for label in methods if label in evidence.scores]
    evidence_by_label = evidence.estimate_scores_and_gains(
        scored, reference if reference in scored else None, content["best"]
    )
    for label, method in methods.items():
        method["statistics"] = _method_statistics(
            content, evidence.metric, label, evidence_by_label.get(label, MethodEvidence(None))
        )
    client_estimates = [
        method_evidence.gain_by_client
        for method_evidence in evidence_by_label.values()
        if method_evidence.gain_by_client
    ]
    clients = content["clients"] if evidence.has_same_data else ()
    return [c for c in clients if client_estimates and all(c in row and row[c] is None for row in client_estimates)]


def _method_statistics(
    content: Mapping[str, Any], metric: Metric, label: str, method_evidence: MethodEvidence
) -> dict[str, Any]:
    methods, reference = content["methods"], content["reference"]
    runs = list(methods[label]["runs"].values())
    base = None if reference is None or label == reference else list(methods[reference]["runs"].values())
    sign = 1 if metric.higher_is_better else -1
    gains = (
        None if base is None else [_mean_gain(run, base_run, sign) for run, base_run in zip(runs, base, strict=True)]
    )
    costs = {"bytes": [run["bytes"] for run in runs], "seconds": [run["seconds"] for run in runs]}
    reached = [run["to_target"] for run in runs if run["to_target"] is not None]
    clients = {
        c: _client_statistics(content, c, runs, base, sign, method_evidence.gain_by_client.get(c), metric)
        for c in content["clients"]
    }
    gained = _participant_gains(content, clients, runs, base, sign)
    worst = (("worst", 0), ("p10", 10), ("p90", 90)) if sign > 0 else (("worst", 100), ("p10", 90), ("p90", 10))
    return {
        "mean": mean_if_all_defined([run["mean"] for run in runs]),
        "interval": clip_interval_to_metric_range(method_evidence.mean_score, metric, is_difference=False),
        **{name: mean_if_all_defined([_percentile_of_scores(run, q) for run in runs]) for name, q in worst},
        "gain": None if gains is None else mean_if_all_defined(gains),
        "gain_interval": clip_interval_to_metric_range(method_evidence.gain_over_reference, metric, is_difference=True),
        "gain_per_seed": gains,
        "losers": sum(gain < 0 for gain in gained) if gained else None,
        "participants": len(gained) if gained else None,
        "p_reference": _p_value(method_evidence.gain_over_reference),
        "p_best": _p_value(method_evidence.gain_over_best),
        "rounds": [run["round"] for run in runs],
        **{name: mean_if_all_defined(values) for name, values in costs.items()},
        "to_target": {
            "reached": len(reached),
            **{
                name: mean_if_all_defined([at[name] for at in reached]) if len(reached) == len(runs) else None
                for name in ("round", "bytes", "seconds")
            },
        },
        "clients": clients,
    }


def _client_statistics(
    content: Mapping[str, Any], client: str, runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]] | None,
    sign: int, estimate: Estimate | None, metric: Metric,
) -> dict[str, Any]:  # fmt: skip
    tested = min(sizes[client]["test"] for sizes in content["data"].values() if client in sizes)
    entry: dict[str, Any] = {"mean": mean_if_all_defined([run["scores"].get(client) for run in runs]), "gain": None,
                             "gain_interval": None, "p": None, "verdict": None, "test_examples": tested}  # fmt: skip
    if base is None:
        return entry
    pairs = [
        (run["scores"].get(client), base_run["scores"].get(client)) for run, base_run in zip(runs, base, strict=True)
    ]
    gains = [
        round(sign * (ours - theirs), _DIGITS) for ours, theirs in pairs if ours is not None and theirs is not None
    ]
    if estimate is None and len(gains) < len(pairs):
        return entry
    gain = fmean(gains) if gains or estimate is None else estimate.value
    entry |= {
        "gain": round(gain, _DIGITS),
        "gain_interval": clip_interval_to_metric_range(estimate, metric, is_difference=True),
    }
    entry["p"] = _p_value(estimate)
    if content["same_clients"]:
        decided = estimate is not None and len(runs) > 1 and estimate.p <= 1 - CONFIDENCE_LEVEL
        entry["verdict"] = ("gains" if estimate.low > 0 else "loses") if decided and estimate else "undecided"
    return entry


def _participant_gains(
    content: Mapping[str, Any], clients: Mapping[str, Mapping[str, Any]], runs: Sequence[Mapping[str, Any]],
    base: Sequence[Mapping[str, Any]] | None, sign: int,
) -> list[float]:  # fmt: skip
    """Returns the gains of all participants.

    A participant is a client, with its mean over seeds; or a client and seed, where a client id names other data with
    each seed.
    """
    if base is None:
        return []
    if content["same_clients"]:
        return [entry["gain"] for entry in clients.values() if entry["gain"] is not None]
    return [gain for run, base_run in zip(runs, base, strict=True) for gain in _client_gains(run, base_run, sign)]


def _client_gains(run: Mapping[str, Any], base_run: Mapping[str, Any], sign: int) -> list[float]:
    ours, theirs = run["scores"], base_run["scores"]
    return [
        round(sign * (ours[c] - theirs[c]), _DIGITS) for c in ours if ours[c] is not None and theirs.get(c) is not None
    ]


def mean_if_all_defined(values: Sequence[float | None]) -> float | None:
    """Returns the mean of the values; None if any of them is None, since means over different seeds cannot be compared."""
    defined = [value for value in values if value is not None]
    return fmean(defined) if defined and len(defined) == len(values) else None


def mean_validation_score(record: Mapping[str, Any], metric: Metric, few: Sequence[str]) -> float | None:
    """Returns the mean over clients of the validation score in the record of a round; None if it is not defined.

    Args:
        record: of `metrics.jsonl`.
        metric: whose score is meant.
        few: clients with so few validation examples of a class that they are left out of a score within classes.

    >>> from polyfed.core.evaluation.metrics import METRICS
    >>> row = {"a": {"val_auc": 0.75}, "b": {"val_auc": 0.0}}
    >>> mean_validation_score({"clients": row, "summary": {"val_auc": {"mean": 0.375}}}, METRICS["auc"], ["b"])
    0.75
    """
    name = f"val_{metric.name}"
    mean: float | None = record["summary"].get(name, {}).get("mean")
    if mean is None or metric.per_example is not None or not few:
        return mean
    scores = [row[name] for c, row in record["clients"].items() if c not in few and row.get(name) is not None]
    return fmean(scores) if scores else mean


def _mean_gain(run: Mapping[str, Any], base_run: Mapping[str, Any], sign: int) -> float | None:
    gains = _client_gains(run, base_run, sign)
    return round(fmean(gains), _DIGITS) if gains and run["mean"] is not None and base_run["mean"] is not None else None


def _percentile_of_scores(run: Mapping[str, Any], percent: float) -> float | None:
    defined = [value for value in run["scores"].values() if value is not None]
    return float(np.percentile(defined, percent)) if defined else None


def _p_value(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.p
