"""The `statistics` of each method of a comparison: means, gains over the method that trains alone, costs."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from polyfed.comparison.crossed import LEVEL, Estimate
from polyfed.comparison.evidence import Evidence, Found, span
from polyfed.core.metrics import Metric

_DIGITS = 12  # after the point, of differences: what is beyond is rounding, and decides no gain or loss


def add_statistics(content: dict[str, Any], evidence: Evidence) -> list[str]:
    """The `statistics` of each method; returns clients without an interval."""
    methods, reference = content["methods"], content["reference"]
    scored = [label for label in methods if label in evidence.scores]
    found = evidence.of(scored, reference if reference in scored else None, content["best"])
    for label, method in methods.items():
        method["statistics"] = _statistics(content, evidence.metric, label, found.get(label, Found(None)))
    named = [one.clients for one in found.values() if one.clients]
    clients = content["clients"] if evidence.fixed else ()
    return [c for c in clients if named and all(c in row and row[c] is None for row in named)]


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
        "mean": mean_of([run["mean"] for run in runs]),
        "interval": span(found.mean, metric, difference=False),
        **{name: mean_of([_quantile(run, q) for run in runs]) for name, q in worst},
        "gain": None if gains is None else mean_of(gains),
        "gain_interval": span(found.gain, metric, difference=True),
        "gain_per_seed": gains,
        "losers": sum(gain < 0 for gain in gained) if gained else None,
        "participants": len(gained) if gained else None,
        "p_reference": _p(found.gain),
        "p_best": _p(found.against_best),
        "rounds": [run["round"] for run in runs],
        **{name: mean_of(values) for name, values in told.items()},
        "to_target": {
            "reached": len(reached),
            **{
                name: mean_of([at[name] for at in reached]) if len(reached) == len(runs) else None
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
    found: dict[str, Any] = {"mean": mean_of([run["scores"].get(client) for run in runs]), "gain": None,
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


def mean_of(values: Sequence[float | None]) -> float | None:
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
