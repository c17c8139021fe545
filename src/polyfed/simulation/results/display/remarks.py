"""Says in a few words and in sentences which clients failed in a run, and of what its rounds warn."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.core.io.text.number_format import count_with_noun

_MOST_LINES = 8


def summarise_remarks(history: Sequence[Mapping[str, Any]]) -> str:
    """Returns which clients failed, and how many warnings a run has, with a comma before each; empty if there are none.

    >>> lost = {"client": "north", "phase": "local", "reason": "out of range", "retried": False}
    >>> summarise_remarks([{"round": 1, "failures": [lost], "warnings": ["round 1: 'south' is far away"]}])
    ", 'north' failed, 1 warning"
    """
    failed, warnings = list(failures_by_client(history)), len(_rounds_by_warning(history))
    parts = [f"{failed[0]!r} failed" if len(failed) == 1 else f"{len(failed)} clients failed"] if failed else []
    parts += [count_with_noun(warnings, "warning")] if warnings else []
    return "".join(f", {part}" for part in parts)


def list_remarks(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a sentence for each client that failed, with its last reason, and for each warning; eight at most.

    >>> lost = {"client": "north", "phase": "local", "reason": "out of range", "retried": False}
    >>> list_remarks([{"round": k, "failures": [lost], "warnings": [f"round {k}: 'south' is far away"]} for k in (1, 2)])
    ["client 'north' failed in 2 of 2 rounds: out of range", "round 2 (and 1 other): 'south' is far away"]
    """
    total = count_with_noun(len(history), "round")
    sentences = [
        f"client {client!r} failed in {len(reasons)} of {total}: {list(reasons.values())[-1]}"
        for client, reasons in failures_by_client(history).items()
    ]
    for text, rounds in _rounds_by_warning(history).items():
        others = f" (and {count_with_noun(len(rounds) - 1, 'other')})" if len(rounds) > 1 else ""
        sentences.append(f"round {rounds[-1]}{others}: {text}")
    hidden = len(sentences) - _MOST_LINES
    return (
        sentences if hidden <= 0 else [*sentences[:_MOST_LINES], f"and {hidden} more: the records in history have all"]
    )


def failures_by_client(history: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, str]]:
    """Returns `{client: {round: reason}}` of failures that were not repeated with success."""
    reasons_by_client: dict[str, dict[int, str]] = {}
    for record in history:
        for failure in record.get("failures", ()):
            if not failure.get("retried"):
                reasons_by_client.setdefault(failure["client"], {})[record["round"]] = failure["reason"]
    return reasons_by_client


def _rounds_by_warning(history: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Returns `{text: rounds}`; texts that differ only in numbers are one, the last."""
    rounds_by_kind: dict[str, tuple[str, list[int]]] = {}
    for record in history:
        for sentence in record.get("warnings", ()):
            text = re.sub(r"^round \d+: ", "", sentence)
            kind = re.sub(r"(?<![\w'-])[-+]?\d[\d.e+-]*", "#", text)  # a client's name keeps its number
            rounds_by_kind[kind] = text, [*rounds_by_kind.get(kind, ("", []))[1], record["round"]]
    return dict(rounds_by_kind.values())
