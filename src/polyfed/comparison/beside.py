"""What stands beside the methods of a comparison: models that each site has alone, and all data pooled.

Simple models are fitted again for each dealing of the data, on the examples that a site's network may use, so that a method
is compared with them as with training alone: on the same test examples, example by example.
"""

import base64
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, final

from torch import Tensor

from polyfed.algorithms import Local
from polyfed.comparison.plans import Method, Plan
from polyfed.comparison.references import alternatives, pooled_reference
from polyfed.comparison.several import at_once, side_by_side
from polyfed.core.algorithm import Client
from polyfed.core.metrics import Metric
from polyfed.core.tree import decode, encode

Scores = dict[str, float | None]


@final
@dataclass(frozen=True, eq=False)
class Beside:
    """Attributes:
    references: the `references` of `comparison.json`, before statistics.
    outputs: name -> seed -> client -> outputs on the client's test examples, of what each site has alone.
    left_out: sentences on what is not among them.
    """

    references: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Mapping[int, Mapping[str, Tensor]]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def fit_beside(plan: Plan, methods: Mapping[str, Method], data: Mapping[str, str]) -> Beside:
    """Fits what a site has alone, and trains on all data pooled.

    Args:
        plan: of the comparison.
        methods: as they are compared; the pooled networks are trained as `Local` among them is.
        data: a fingerprint of the clients by seed, as text. Seeds with the same data share one fit.
    """
    metric, first = plan.metrics[0], plan.seeds[0]
    seed_of = {data[str(seed)]: seed for seed in reversed(plan.seeds)}  # the first seed with these data
    dealt = [seed for seed in plan.seeds if seed_of[data[str(seed)]] == seed]
    fitted = _fitted(plan, dealt)
    named = [name for name in fitted[dealt[0]]["models"] if all(name in one["models"] for one in fitted.values())]
    outputs = {
        name: {seed: _unpacked(fitted[seed_of[data[str(seed)]]]["models"][name]) for seed in plan.seeds}
        for name in named
    }
    runs = {name: dict[str, Scores]() for name in named}
    for seed in dealt:
        targets = {c.id: c.test.labels.cpu() for c in plan.cast(seed).clients}
        for name in named:
            scores = {c: _known(metric, outputs[name][seed][c], target) for c, target in targets.items()}
            runs[name] |= {str(other): scores for other in plan.seeds if data[str(other)] == data[str(seed)]}
    told = {
        name: {"sentence": fitted[dealt[0]]["sentences"][name], "alone": True, "runs": of, **_means(of)}
        for name, of in runs.items()
    }
    left_out = tuple(dict.fromkeys(sentence for one in fitted.values() for sentence in one["left_out"]))
    clients = plan.cast(first).clients
    alone = next((method for method in methods.values() if isinstance(method, Local)), None)
    pooled = None if alone is None else pooled_reference(clients, alone, rounds=plan.settings.rounds, seed=first)
    if pooled is not None:
        of_first = {c.id: _known(metric, pooled.outputs[c.id], c.test.labels.cpu()) for c in clients}
        once = "; on the data of the first seed alone" if len(dealt) > 1 else ""
        told["pooled"] = {"sentence": pooled.sentence + once, "alone": False, **_means({str(first): of_first})}
    return Beside(told, outputs, left_out)


def _fitted(plan: Plan, seeds: Sequence[int]) -> dict[int, dict[str, Any]]:
    """By seed: the packed outputs of each simple model, sentences about them, and what was left out."""
    clients = len(plan.cast(seeds[0]).clients)
    processes = at_once(plan.settings, clients) if plan.parallel == "auto" else plan.parallel
    found: dict[int, dict[str, Any]] = {}

    def tasks() -> Iterator[tuple[int, Callable[[], Any]]]:
        for seed in seeds:
            yield seed, partial(_fit, plan.cast(seed).clients, plan.seeds[0])

    for seed, one in side_by_side(tasks(), min(processes, len(seeds))):
        found[seed] = one
        if not plan.quiet:
            how_far = f" ({len(found)} of {len(seeds)} dealings)" if len(seeds) > 1 else ""
            print(f"simple models of each site alone: done{how_far}", file=sys.stderr, flush=True)
    return {seed: found[seed] for seed in seeds}


def _fit(clients: Sequence[Client], seed: int) -> dict[str, Any]:
    models, left_out = alternatives(clients, seed=seed)
    packed = {
        one.name: base64.b64encode(encode({c.encode().hex(): o for c, o in one.outputs.items()})).decode()
        for one in models
    }
    return {"models": packed, "sentences": {one.name: one.sentence for one in models}, "left_out": left_out}


def _unpacked(text: str) -> dict[str, Tensor]:
    return {bytes.fromhex(client).decode(): outputs for client, outputs in decode(base64.b64decode(text)).items()}


def _known(metric: Metric, outputs: Tensor, targets: Tensor) -> float | None:
    score = metric(outputs, targets)  # a site of one class has no AUC by any method
    return score if math.isfinite(score) else None


def _means(runs: Mapping[str, Scores]) -> dict[str, Any]:
    """Of each client, over the seeds; and over the clients of each seed that have a score."""
    by_client: dict[str, list[float | None]] = {}
    for scores in runs.values():
        for client, score in scores.items():
            by_client.setdefault(client, []).append(score)
    means = [fmean(known) for scores in runs.values() if (known := [s for s in scores.values() if s is not None])]
    own = {c: fmean(known) for c, of in by_client.items() if len(known := [s for s in of if s is not None]) == len(of)}
    return {"scores": {c: own.get(c) for c in by_client}, "mean": fmean(means) if means else None}
