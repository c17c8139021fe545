"""What a site has without joining, beside training its network alone: whether a method, or a simple model, is better."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.comparison.evidence import Evidence, Rivalry, Scores, span
from polyfed.core.metrics import Metric


def key_of(name: str) -> str:
    """The name of a simple model among labels of methods, none of which looks like it.

    >>> key_of("ridge")
    '(ridge)'
    """
    return f"({name})"


def name_of(key: str) -> str:
    """The name of what a site has without joining: a simple model, or the method that trains alone.

    >>> name_of("(ridge)"), name_of("local")
    ('ridge', 'local')
    """
    return key[1:-1] if key.startswith("(") else key


def scores_of(references: Mapping[str, Any]) -> Scores:
    """Of what each site has alone, by key, seed and client."""
    return {
        key_of(name): {int(seed): scores for seed, scores in one["runs"].items()}
        for name, one in references.items()
        if one.get("alone")
    }


def rivalry(
    content: Mapping[str, Any], evidence: Evidence, leader: str | None
) -> tuple[Rivalry | None, dict[str, Rivalry | None]]:
    """What the leading method gains over the best that sites have alone: in the mean, and each client.

    Args:
        content: of `comparison.json`, with statistics.
        evidence: of the methods and of what sites have alone.
        leader: label of the method; None without one.
    """
    reference = content["reference"]
    if leader is None or reference not in evidence.scores or leader not in evidence.scores:
        return None, {}
    scored = evidence.clients_of(leader, reference)
    simple = [key for key in _simple(content) if set(scored) <= set(evidence.clients_of(leader, key))]
    methods = [label for label in evidence.scores if label != reference and label in content["methods"]]
    return evidence.over(leader, [reference, *simple], max(1, len(methods)))


def add_gains(content: Mapping[str, Any], evidence: Evidence, metric: Metric) -> None:
    """Puts into `references` what each simple model gains over training alone, with intervals that hold for all of them."""
    simple, reference = _simple(content), content["reference"]
    found = evidence.of([*simple, reference], reference, None) if simple and reference in evidence.scores else {}
    for key in simple if found else ():
        own = found[key]
        told = {
            "interval": span(own.mean, metric, difference=False),
            "gain": None if own.gain is None else own.gain.value,
            "gain_interval": span(own.gain, metric, difference=True),
        }
        clients = {
            client: {"gain": one.value, "gain_interval": span(one, metric, difference=True)}
            for client, one in own.clients.items()
            if one is not None
        }
        content["references"][name_of(key)] |= {**told, "clients": clients}


def _simple(content: Mapping[str, Any]) -> Sequence[str]:
    return [key_of(name) for name, one in content["references"].items() if one.get("alone")]
