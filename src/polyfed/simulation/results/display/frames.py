"""Builds pandas frames of the scores of a run or a comparison, where pandas is installed."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from polyfed.core.errors import UserError


def build_frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Any:
    """Returns a pandas `DataFrame` with these rows.

    Args:
        rows: dicts.
        columns: names of the first columns; those that occur in the rows besides follow them.

    Raises:
        UserError: pandas is not installed.
    """
    if find_spec("pandas") is None:
        raise UserError(
            "to_frame() needs the package pandas, which is not installed: pip install pandas; table() and history need none"
        )
    names = list(dict.fromkeys([*columns, *(name for row in rows for name in row)]))
    return import_module("pandas").DataFrame([dict(row) for row in rows], columns=names)


def list_scores_by_round(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a dict for each client and round: round, client, scores, losses, any `simulated_seconds`.

    >>> list_scores_by_round([{"round": 1, "clients": {"b": {"loss": 0.5}, "a": {"loss": 0.2}}}])
    [{'round': 1, 'client': 'b', 'loss': 0.5}, {'round': 1, 'client': 'a', 'loss': 0.2}]
    """
    return [
        {
            "round": record["round"],
            "client": client,
            **({"simulated_seconds": record["simulated_seconds"]} if "simulated_seconds" in record else {}),
            **scores,
        }
        for record in history
        for client, scores in record["clients"].items()
    ]
