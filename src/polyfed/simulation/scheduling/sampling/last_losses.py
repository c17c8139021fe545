"""Collects each client's latest training loss from the records of rounds."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any


def update_last_losses(state: dict[str, Any], history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Reads new records; returns clients' latest training losses, and stores them in `state`.

    >>> state = {}
    >>> update_last_losses(state, [{"clients": {"north": {"train_loss": 0.5}, "south": {}}}])
    {'north': 0.5}
    >>> state["records"]
    1
    """
    losses: dict[str, float] = state.setdefault("losses", {})
    new_records = history[state.get("records", 0) :]
    if new_records and not state.get("records") and _replies_lack_losses(new_records):
        warnings.warn(
            "the sampler reads training losses, and the clients that took part sent none, so that it draws as if nobody had "
            "trained; let sites send them (disclose='train_loss'), or take another sampler",
            RuntimeWarning,
            stacklevel=2,
        )
    for record in new_records:
        losses.update({i: row["train_loss"] for i, row in record["clients"].items() if "train_loss" in row})
    state["records"] = len(history)
    return losses


def _replies_lack_losses(records: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether clients have replied, and none of them with a training loss."""
    replied = any(record.get("replied") for record in records)
    return replied and not any("train_loss" in row for record in records for row in record["clients"].values())
