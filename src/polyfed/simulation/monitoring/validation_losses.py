"""Computes validation losses over the rounds of a run: for each client, and pooled over all validation examples."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

LossCurve = Sequence[tuple[int, float]]  # (round, loss), in the order of rounds


def validation_losses_by_client(history: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Returns each client's finite mean validation losses from the records of a run, as `{client id: {round: loss}}`.

    Args:
        history: the records of `metrics.jsonl`.

    >>> validation_losses_by_client([{"round": 2, "clients": {"a": {"val_loss": 0.5}, "b": {"val_loss": None}}}])
    {'a': {2: 0.5}}
    """
    losses: dict[str, dict[int, float]] = {}
    for record in history:
        for client, row in record["clients"].items():
            loss = row.get("val_loss")
            if loss is not None and math.isfinite(loss):
                losses.setdefault(client, {})[record["round"]] = loss
    return losses


def pool_losses(
    losses_by_client: Mapping[str, Mapping[int, float]], num_validation: Mapping[str, int]
) -> list[tuple[int, float]]:
    """Returns (round, mean loss over all validation examples) for rounds in which all clients have one.

    Args:
        losses_by_client: client id -> round -> loss.
        num_validation: client id -> number of validation examples; a missing client counts as one example.

    >>> pool_losses({"a": {1: 1.0, 2: 0.5}, "b": {1: 0.0, 2: 0.0}}, {"a": 1, "b": 3})
    [(1, 0.25), (2, 0.125)]
    """
    if not losses_by_client:
        return []
    weights = {client: num_validation.get(client, 1) for client in losses_by_client}
    total = sum(weights.values())
    common = sorted(set.intersection(*(set(rounds) for rounds in losses_by_client.values())))
    return [(t, math.fsum(weights[c] * rounds[t] for c, rounds in losses_by_client.items()) / total) for t in common]


def round_of_lowest_loss(curve: LossCurve) -> int | None:
    """Returns the first round of the lowest loss in (round, loss) pairs; None for none.

    >>> round_of_lowest_loss([(1, 0.5), (2, 0.25), (3, 0.25)])
    2
    """
    return min(curve, key=lambda point: (point[1], point[0]))[0] if curve else None


def round_of_lowest_pooled_loss(history: Sequence[Mapping[str, Any]], num_validation: Mapping[str, int]) -> int | None:
    """Returns the first round of the lowest pooled validation loss; None without a loss.

    A round in which a client lacks the loss that it had before is never better.

    >>> rows = [{"a": {"val_loss": loss}, "b": {"val_loss": 1.0}} for loss in (0.5, 0.25, None)]
    >>> round_of_lowest_pooled_loss([{"round": n, "clients": row} for n, row in enumerate(rows, 1)], {"a": 2, "b": 1})
    2
    """
    best: Mapping[str, Any] | None = None
    for record in history:
        current_losses = validation_losses_by_client([record])
        best_losses = {} if best is None else validation_losses_by_client([best])
        if current_losses.keys() > best_losses.keys():
            best = record
        elif best is not None and current_losses.keys() == best_losses.keys():
            (_, current_loss), (_, best_loss) = (
                pool_losses(losses, num_validation)[0] for losses in (current_losses, best_losses)
            )
            best = record if current_loss < best_loss else best
    return None if best is None else int(best["round"])
