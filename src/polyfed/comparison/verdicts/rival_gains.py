"""Estimates, and names, the gain of the best federated method over what a client can have without federation: its own
network or a simple model."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.comparison.statistics.evidence import (
    Evidence,
    GainsOverBestRival,
    ScoresByMethod,
    clip_interval_to_metric_range,
)
from polyfed.core.evaluation.metric import Metric
from polyfed.core.tasks.task import TaskSpec
from polyfed.core.tasks.task_lookup import get_task, registered_tasks


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


def describe_local_alternative(name: str, reference: str | None, task: TaskSpec) -> str:
    """Describes in words what a client has without federation: its network, or a simple model, on its own data alone.

    >>> [describe_local_alternative(name, "local", "regression") for name in ("ridge", "local")]
    ['ridge regression alone', 'training alone']
    """
    if name == reference:
        return "training alone"
    constant = get_task(task).constant_model()
    if constant is not None and name == constant.name:
        return constant.words
    simple_models = (model for kind in (*registered_tasks(), get_task(task)) for model in kind.simple_models())
    labels = {model.name: model.label for model in simple_models if not model.is_trees}
    return f"{labels.get(name, name.replace('_', ' '))} alone"


def describe_best_alternative(
    answer: Mapping[str, Any], reference: str | None, task: TaskSpec, *, is_brief: bool = False
) -> str:
    """Describes in words what an answer's gain is over: one alternative, or the best of several.

    The interval of a gain over the best of several is not that of the gain over the one that was best in the test data.

    Args:
        answer: an entry of `answers` in `comparison.json`, or `mean_answer`.
        is_brief: for a line or a card instead of a sentence.

    >>> answer = {"client": "a", "over": "ridge", "gains": {"ridge": {}, "local": {}}}
    >>> describe_best_alternative(answer, "local", "regression")
    'the best that it has alone, ridge regression'
    >>> describe_best_alternative(answer, "local", "regression", is_brief=True)
    'the best alone, ridge regression'
    """
    name = describe_local_alternative(answer["over"], reference, task)
    if len(answer.get("gains") or ()) < 2:
        return name
    owner = "they have" if answer["client"] is None else "it has"
    model = name if answer["over"] == reference else name.removesuffix(" alone")
    return f"the best alone, {model}" if is_brief else f"the best that {owner} alone, {model}"


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
