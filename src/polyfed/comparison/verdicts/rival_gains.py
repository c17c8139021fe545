"""Estimates the gain of the best federated method over what a client can have without federation: its own network or a
simple model."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.comparison.statistics.evidence import (
    Evidence,
    GainsOverBestRival,
    ScoresByMethod,
    clip_interval_to_metric_range,
)
from polyfed.core.evaluation.metric import Metric


def bracketed_simple_model_name(name: str) -> str:
    """Returns the name of a simple model in brackets, such as "(ridge)", so that it never equals a method's label.

    >>> bracketed_simple_model_name("ridge")
    '(ridge)'
    """
    return f"({name})"


def name_of_method_or_reference(key: str) -> str:
    """Returns the name to show: "(ridge)" without brackets, a method's label unchanged.

    >>> name_of_method_or_reference("(ridge)"), name_of_method_or_reference("local")
    ('ridge', 'local')
    """
    return key[1:-1] if key.startswith("(") else key


def collect_local_simple_model_scores(references: Mapping[str, Any]) -> ScoresByMethod:
    """Returns `{key: {seed: {client: score}}}` of the simple models fitted by clients alone."""
    return {
        bracketed_simple_model_name(name): {int(seed): scores for seed, scores in entry["runs"].items()}
        for name, entry in references.items()
        if entry.get("alone")
    }


def leader_gain_over_local_alternatives(
    content: Mapping[str, Any], evidence: Evidence, leader: str | None
) -> GainsOverBestRival:
    """Estimates the leader's gain over the best alternative without federation, mean and by client.

    Args:
        content: `comparison.json`, with statistics.
        evidence: of the methods and the alternatives.
        leader: label of the method; None without one.
    """
    reference = content["reference"]
    if leader is None or reference not in evidence.scores or leader not in evidence.scores:
        return GainsOverBestRival(None, {})
    scored_clients = evidence.clients_scored_with_every_seed(leader, reference)
    simple = [
        key
        for key in _simple_model_keys(content)
        if set(scored_clients) <= set(evidence.clients_scored_with_every_seed(leader, key))
    ]
    methods = [label for label in evidence.scores if label != reference and label in content["methods"]]
    return evidence.gain_over_best_rival(leader, [reference, *simple], max(1, len(methods)))


def add_gains_of_references_over_local(content: Mapping[str, Any], evidence: Evidence, metric: Metric) -> None:
    """Adds to each simple model its gain over training alone, with simultaneous intervals."""
    simple, reference = _simple_model_keys(content), content["reference"]
    evidence_by_key = (
        evidence.estimate_scores_and_gains([*simple, reference], reference, None)
        if simple and reference in evidence.scores
        else {}
    )
    for key in simple if evidence_by_key else ():
        key_evidence = evidence_by_key[key]
        entry = {
            "interval": clip_interval_to_metric_range(key_evidence.mean_score, metric, is_difference=False),
            "gain": None if key_evidence.gain_over_reference is None else key_evidence.gain_over_reference.value,
            "gain_interval": clip_interval_to_metric_range(
                key_evidence.gain_over_reference, metric, is_difference=True
            ),
        }
        clients = {
            client: {
                "gain": estimate.value,
                "gain_interval": clip_interval_to_metric_range(estimate, metric, is_difference=True),
            }
            for client, estimate in key_evidence.gain_by_client.items()
            if estimate is not None
        }
        content["references"][name_of_method_or_reference(key)] |= {**entry, "clients": clients}


def _simple_model_keys(content: Mapping[str, Any]) -> Sequence[str]:
    return [bracketed_simple_model_name(name) for name, entry in content["references"].items() if entry.get("alone")]
