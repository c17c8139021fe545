"""Fits the reference models of a comparison for every seed: simple models on each client's own data, and a network on
the pooled data of all clients.

Simple models are fitted again for each split of the data, on the examples that the client's network may use. A method
is therefore compared with them as with training alone: on the same test examples, paired example by example.
"""

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from statistics import fmean
from typing import Any, final

from torch import Tensor

from polyfed.algorithms import Local
from polyfed.comparison.execution.process_pool import default_parallel_runs, run_in_processes
from polyfed.comparison.plan import ComparisonPlan, Method
from polyfed.comparison.references.reference_models import (
    ReferenceModel,
    fit_client_references,
    fit_pooled_references,
    train_pooled_reference,
)
from polyfed.core.algorithm import Client
from polyfed.core.errors import ClientError, RoundError, UserError
from polyfed.core.evaluation.metric import Metric
from polyfed.core.serialization import deserialize_state, serialize_state

_SLOW_IMPORTS = ("sklearn.ensemble", "sklearn.linear_model", "sklearn.model_selection")  # of a second
Scores = dict[str, float | None]


@final
@dataclass(frozen=True, eq=False)
class FittedReferences:
    """Holds scores and outputs of reference models: simple ones, and a network on pooled data.

    Attributes:
        references: the entry `references` of `comparison.json`, before statistics.
        outputs: name -> seed -> client id -> outputs on the client's test examples, for the models that a client has
            alone.
        left_out: sentences about models that were not fitted.
    """

    references: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Mapping[int, Mapping[str, Tensor]]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def fit_references(
    plan: ComparisonPlan, methods: Mapping[str, Method], fingerprint_by_seed: Mapping[str, str]
) -> FittedReferences:
    """Fits simple models on each client's data, and a network on all data; returns scores and outputs.

    Args:
        plan: the plan of the comparison.
        methods: the compared methods; the pooled networks are trained as `Local` among them is.
        fingerprint_by_seed: seed, as text -> fingerprint of the clients. Seeds with the same data share one fit.
    """
    metric, first = plan.metrics[0], plan.seeds[0]
    seed_of = {fingerprint_by_seed[str(seed)]: seed for seed in reversed(plan.seeds)}  # the first seed with these data
    distinct_seeds = [seed for seed in plan.seeds if seed_of[fingerprint_by_seed[str(seed)]] == seed]
    plan.display.show_stage("simple models of each site alone", len(distinct_seeds))
    fitted = _fit_all_seeds(plan, distinct_seeds)
    common_names = [
        name
        for name in fitted[distinct_seeds[0]]["models"]
        if all(name in seed_fit["models"] for seed_fit in fitted.values())
    ]
    outputs = {
        name: {
            seed: _unpack_outputs(fitted[seed_of[fingerprint_by_seed[str(seed)]]]["models"][name])
            for seed in plan.seeds
        }
        for name in common_names
    }
    runs = {name: dict[str, Scores]() for name in common_names}
    for seed in distinct_seeds:
        targets = {c.id: c.test.labels.cpu() for c in plan.panel.select(plan.build_client_set(seed).clients)}
        for name in common_names:
            scores = {c: _score_or_none(metric, outputs[name][seed][c], target) for c, target in targets.items()}
            runs[name] |= {
                str(same_data_seed): scores
                for same_data_seed in plan.seeds
                if fingerprint_by_seed[str(same_data_seed)] == fingerprint_by_seed[str(seed)]
            }
    references = {
        name: {
            "sentence": fitted[distinct_seeds[0]]["sentences"][name],
            "alone": True,
            "runs": by_seed,
            **_mean_scores(by_seed),
        }
        for name, by_seed in runs.items()
    }
    left_out = tuple(dict.fromkeys(sentence for seed_fit in fitted.values() for sentence in seed_fit["left_out"]))
    pooled_models, sentences = _fit_pooled_models(plan, methods)
    once = (
        f"; on the data of the first {'seed' if plan.folds is None else 'fold'} alone"
        if len(distinct_seeds) > 1
        else ""
    )
    for pooled in pooled_models:
        clients = plan.panel.select(plan.build_client_set(first).clients)
        first_scores = {c.id: _score_or_none(metric, pooled.outputs[c.id], c.test.labels.cpu()) for c in clients}
        references[pooled.name] = {
            "sentence": pooled.sentence + once,
            "alone": False,
            **_mean_scores({str(first): first_scores}),
        }
    return FittedReferences(references, outputs, (*left_out, *sentences))


def _fit_pooled_models(plan: ComparisonPlan, methods: Mapping[str, Method]) -> tuple[list[ReferenceModel], list[str]]:
    """Fits models to the first seed's data of all sites; returns them, and sentences on what was left out."""
    client_set, first = plan.build_client_set(plan.seeds[0]), plan.seeds[0]
    if client_set.source is not None:
        sentence = "No network was trained on the data of all clients pooled: a source makes its clients one at a time."
        return [], [sentence]
    local_method = next((method for method in methods.values() if isinstance(method, Local)), None)
    plan.display.show_stage("one network on the data of all sites")
    pooled_models = fit_pooled_references(client_set.clients, seed=first)
    if local_method is None:
        return pooled_models, []
    try:
        network = train_pooled_reference(client_set.clients, local_method, rounds=plan.settings.rounds, seed=first)
    except (ClientError, RoundError, UserError) as error:  # the methods' runs are worth more than this one
        return pooled_models, [f"One network on the data of all sites is not among the references: {error}."]
    return [*([] if network is None else [network]), *pooled_models], []


def _fit_all_seeds(plan: ComparisonPlan, seeds: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Fits the simple models for each seed; returns packed outputs, sentences, and what was left out."""
    clients = len(plan.build_client_set(seeds[0]).ids)
    processes = default_parallel_runs(plan.settings, clients) if plan.parallel_runs == "auto" else plan.parallel_runs
    fit_by_seed: dict[int, dict[str, Any]] = {}

    def tasks() -> Iterator[tuple[int, Callable[[], Any]]]:
        for seed in seeds:
            yield seed, partial(_fit_one_seed, plan.panel.select(plan.build_client_set(seed).clients), plan.seeds[0])

    if processes > 1 and any(
        model.library for model in plan.build_client_set(seeds[0]).clients[0].task.simple_models()
    ):
        for module in _SLOW_IMPORTS:  # once here, and not again in each process
            import_module(module)
    for seed, seed_fit in run_in_processes(tasks(), min(processes, len(seeds))):
        fit_by_seed[seed] = seed_fit
        how_far = f" ({len(fit_by_seed)} of {len(seeds)} splits)" if len(seeds) > 1 else ""
        plan.display.finish_step(f"simple models of each site alone: done{how_far}")
    return {seed: fit_by_seed[seed] for seed in seeds}


def _fit_one_seed(clients: Sequence[Client], seed: int) -> dict[str, Any]:
    """Fits the simple models of all clients; returns plain data, which passes between processes as JSON."""
    models, left_out = fit_client_references(clients, seed=seed)
    packed = {
        model.name: base64.b64encode(serialize_state({c.encode().hex(): o for c, o in model.outputs.items()})).decode()
        for model in models
    }
    return {"models": packed, "sentences": {model.name: model.sentence for model in models}, "left_out": left_out}


def _unpack_outputs(text: str) -> dict[str, Tensor]:
    return {
        bytes.fromhex(client).decode(): outputs for client, outputs in deserialize_state(base64.b64decode(text)).items()
    }


def _score_or_none(metric: Metric, outputs: Tensor, targets: Tensor) -> float | None:
    score = metric(outputs, targets)  # no method has an AUC at a client whose test examples are all of one class
    return score if math.isfinite(score) else None


def _mean_scores(runs: Mapping[str, Scores]) -> dict[str, Any]:
    """Returns each client's mean score over the seeds, and the mean of the seeds' means over clients that have a score."""
    by_client: dict[str, list[float | None]] = {}
    for scores in runs.values():
        for client, score in scores.items():
            by_client.setdefault(client, []).append(score)
    means = [fmean(defined) for scores in runs.values() if (defined := [s for s in scores.values() if s is not None])]
    mean_by_client = {
        c: fmean(defined)
        for c, seed_scores in by_client.items()
        if len(defined := [s for s in seed_scores if s is not None]) == len(seed_scores)
    }
    return {"scores": {c: mean_by_client.get(c) for c in by_client}, "mean": fmean(means) if means else None}
