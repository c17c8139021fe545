"""Collects each client's latest training loss from the records of rounds."""

from collections.abc import Mapping, Sequence
from typing import Any


def update_last_losses(state: dict[str, Any], history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Reads the records that a sampler has not seen yet, and returns each client's latest training loss, which it also
    stores in the sampler's state.

    >>> state = {}
    >>> update_last_losses(state, [{"clients": {"north": {"train_loss": 0.5}, "south": {}}}])
    {'north': 0.5}
    >>> state["records"]
    1
    """
    losses: dict[str, float] = state.setdefault("losses", {})
    for record in history[state.get("records", 0) :]:
        losses.update({i: row["train_loss"] for i, row in record["clients"].items() if "train_loss" in row})
    state["records"] = len(history)
    return losses
