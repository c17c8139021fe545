"""Whether a comparison goes on with the runs of one before: what is in both must be the same, and more may be asked for."""

from collections.abc import Mapping
from typing import Any

_OF_READING = ("reading", "title", "references")  # how results are read and headed; no run knows of them
_MAY_GROW = ("methods", "evaluated", "skipped", "fingerprints")  # by label or seed


def conflict(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns the first thing of the description `before` that `now` contradicts, in words; empty if finished runs stay what
    they are.

    Title, references, further methods and further seeds at the end change nothing of finished runs.

    >>> conflict({"seeds": [0], "references": True}, {"seeds": [0, 1], "references": False})
    ''
    >>> conflict({"methods": {"local": {"lr": 0.1}}}, {"methods": {"local": {"lr": 0.2}, "fedavg": {}}})
    'methods.local.lr was 0.1 and is now 0.2'
    """
    return first_difference(_comparable(before, before), _comparable(now, before))


def _comparable(description: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What of a description must be as it was `before`."""
    kept = {key: value for key, value in description.items() if key not in _OF_READING}
    for key in _MAY_GROW:
        if isinstance(kept.get(key), Mapping) and isinstance(before.get(key), Mapping):
            kept[key] = {label: value for label, value in kept[key].items() if label in before[key]}
    seeds, first_seeds = kept.get("seeds"), before.get("seeds")
    if isinstance(seeds, list | tuple) and isinstance(first_seeds, list | tuple) and before.get("resplit") is None:
        kept["seeds"] = list(seeds)[: len(first_seeds)]  # the first one is that of the search
        if len(seeds) > len(first_seeds) and "same_clients" in before:
            kept["same_clients"] = before.get("same_clients")  # which follows from the fingerprints
    if isinstance(kept.get("experiment"), Mapping) and isinstance(before.get("experiment"), Mapping):
        kept["experiment"] = _comparable(kept["experiment"], before["experiment"])
    return kept


def first_difference(before: Any, now: Any, place: str = "") -> str:
    """Returns the first thing in which two descriptions differ, in words; empty if they are the same."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in (*before, *(key for key in now if key not in before)):
            inner = f"{place}.{key}" if place else str(key)
            if key not in now or key not in before:
                return f"{inner} is {'new' if key in now else 'gone'}"
            if difference := first_difference(before[key], now[key], inner):
                return difference
        return ""
    return "" if before == now else f"{place} was {before!r} and is now {now!r}"
