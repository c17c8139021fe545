"""Decides whether a comparison may continue an earlier one in the same directory, by the differences of their
descriptions."""

from collections.abc import Mapping
from typing import Any

from polyfed.simulation.storage.integrity import COLUMNS_CHANGED

_OF_READING = ("reading", "failed", "title", "references", "skipped")  # what is said of results; no run knows of it
_MAY_GROW = ("methods", "evaluated", "fingerprints", "columns")  # by label or seed


def find_invalidating_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Names the first changed setting that makes finished runs invalid; None if they stay valid.

    Title, references, methods that do not suit the clients, further methods and further seeds at the end change nothing of
    finished runs.

    >>> find_invalidating_change({"seeds": [0], "references": True}, {"seeds": [0, 1], "references": False})
    >>> find_invalidating_change({"methods": {"local": {"lr": 0.1}}}, {"methods": {"local": {"lr": 0.2}, "fedavg": {}}})
    'methods.local.lr was 0.1 and is now 0.2'
    """
    return find_first_difference(_select_comparable_part(before, before), _select_comparable_part(after, before))


def _select_comparable_part(description: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a description that must be the same as in `before`."""
    without = (*_OF_READING, *({"columns"} - before.keys()))  # which were not described at first
    comparable = {key: value for key, value in description.items() if key not in without}
    for key in _MAY_GROW:
        if isinstance(comparable.get(key), Mapping) and isinstance(before.get(key), Mapping):
            comparable[key] = {label: value for label, value in comparable[key].items() if label in before[key]}
    seeds, first_seeds = comparable.get("seeds"), before.get("seeds")
    if isinstance(seeds, list | tuple) and isinstance(first_seeds, list | tuple) and before.get("resplit") is None:
        comparable["seeds"] = list(seeds)[: len(first_seeds)]  # the first one is that of the search
        if len(seeds) > len(first_seeds) and "same_clients" in before:
            comparable["same_clients"] = before.get("same_clients")  # which follows from the fingerprints
    if isinstance(comparable.get("experiment"), Mapping) and isinstance(before.get("experiment"), Mapping):
        comparable["experiment"] = _select_comparable_part(comparable["experiment"], before["experiment"])
    return comparable


def find_first_difference(before: Any, after: Any, place: str = "") -> str | None:
    """Returns a text that names the first place at which two nested descriptions differ; None if they are the same.

    >>> find_first_difference({"metrics": [{"name": "auc", "unit": ""}]}, {"metrics": [{"name": "dice", "unit": ""}]})
    'metrics was auc and is now dice'
    >>> find_first_difference({"metrics": ["auc", "f1", "mcc"]}, {"metrics": ["auc", "mcc", "f1"]})
    >>> find_first_difference({"metrics": ["auc", "f1"]}, {"metrics": ["f1", "auc"]})
    "metrics was ['auc', 'f1'] and is now ['f1', 'auc'] (the first decides)"
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in (*before, *(key for key in after if key not in before)):
            inner = f"{place}.{key}" if place else str(key)
            if key not in after or key not in before:
                return f"{inner} is {'new' if key in after else 'gone'}"
            if key == "metrics" and _decide_alike(before[key], after[key]):
                continue
            if difference := find_first_difference(before[key], after[key], inner):
                return difference
        return None
    if before == after:
        return None
    if place.startswith("columns."):
        return f"{COLUMNS_CHANGED} than when it began"
    texts = _join_names(before), _join_names(after)
    if None in texts or texts[0] == texts[1]:
        texts = repr(before), repr(after)
    decides = " (the first decides)" if place.endswith("metrics") and len(before or ()) > 1 else ""
    return f"{place} was {texts[0]} and is now {texts[1]}{decides}"


def _decide_alike(before: Any, after: Any) -> bool:
    """Returns whether two lists have the same metrics, and first the same one, which decides."""
    if not (isinstance(before, list | tuple) and isinstance(after, list | tuple)):
        return False
    return before[:1] == after[:1] and sorted(map(str, before)) == sorted(map(str, after))


def _join_names(entries: Any) -> str | None:
    """Returns the names of a list of entries that have one, such as metrics; None of anything else."""
    if not isinstance(entries, list | tuple) or not all(
        isinstance(entry, Mapping) and "name" in entry for entry in entries
    ):
        return None
    return ", ".join(str(entry["name"]) for entry in entries) or "none"
