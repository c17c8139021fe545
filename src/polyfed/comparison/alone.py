"""Clients that train alone end alone: each at its own best round."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.algorithms import Local
from polyfed.comparison.choices import capped, drawn, first, smoothed_lowest
from polyfed.comparison.plans import Method, Plan, Played
from polyfed.core.evaluation import summarise
from polyfed.simulation.losses import lowest, pooled, validation_losses

History = Sequence[Mapping[str, Any]]


def own_rounds(history: History, sizes: Mapping[str, int]) -> dict[str, int]:
    """By client the round of its lowest loss, as `polyfed.comparison.choices` counts it; that of all clients for who has no
    validation examples. Empty where nobody has any.

    Args:
        history: the objects of `metrics.jsonl` of a run.
        sizes: validation examples by client.

    >>> rows = [{"a": {"val_loss": loss}, "b": {"loss": 1.0}} for loss in (0.9, 0.5, 0.4, 0.5, 0.9)]
    >>> own_rounds([{"round": t, "clients": row} for t, row in enumerate(rows, 1)], {"a": 10})
    {'a': 3, 'b': 3}
    """
    losses = validation_losses(history)
    everyone = pooled(capped(losses, {client: first(own) for client, own in losses.items()}), sizes)
    common = lowest(everyone)
    if common is None:
        return {}
    found = {}
    for client in sorted({c for record in history for c in record["clients"]}):
        curve = drawn(losses[client], sizes.get(client, 0), everyone) if client in losses else []
        place = smoothed_lowest(curve)
        found[client] = common if place is None else place[1]
    return found


def rounds_of_each(
    plan: Plan, methods: Mapping[str, Method], runs: Mapping[tuple[str, int], Played], data: Mapping[str, Any],
    searched: Mapping[str, Any] | None,
) -> dict[tuple[str, int], dict[str, int]]:  # fmt: skip
    """By label and seed of methods whose clients train alone, the round at which each client is compared. Where predictions
    after that round were not kept, which is so where they are very large, all end with the run."""
    found: dict[tuple[str, int], dict[str, int]] = {}
    for (label, seed), run in runs.items():
        if plan.reading.budget.asked or not isinstance(methods[label], Local):
            continue
        rounds: dict[str, int] | None = None
        if searched is not None and "rounds" in searched:
            rounds = searched["methods"][label].get("rounds")
        else:
            rounds = own_rounds(run.history, {c: row["val"] for c, row in data[str(seed)].items()})
        if rounds and all(run.outputs(c, n) is not None for c, n in rounds.items()):
            found[label, seed] = rounds
    return found


def ended(history: History, rounds: Mapping[str, int]) -> list[dict[str, Any]]:
    """The history of a run whose clients end each at its round, and stay as they are then.

    Args:
        history: the objects of `metrics.jsonl`, of which none is changed.
        rounds: by client, an evaluated round.

    >>> rows = [{"a": {"auc": 0.5}, "b": {"auc": 0.5}}, {"a": {"auc": 0.75}, "b": {"auc": 1.0}}]
    >>> history = [{"round": t, "clients": row, "summary": {"auc": {}}} for t, row in enumerate(rows, 1)]
    >>> [record["summary"]["auc"]["mean"] for record in ended(history, {"a": 2, "b": 1})]
    [0.5, 0.625]
    """
    names = sorted({name for record in history for name in record["summary"]})
    of_round = {record["round"]: record["clients"] for record in history if record["summary"]}
    changed = []
    for record in history:
        if not record["summary"]:
            changed.append(dict(record))
            continue
        rows = {}
        for client, row in record["clients"].items():
            last = of_round.get(min(record["round"], rounds.get(client, record["round"])), {}).get(client, row)
            rows[client] = {**row, **{name: last.get(name) for name in names}}
        scores = {client: {name: row[name] for name in names} for client, row in rows.items()}
        changed.append({**record, "clients": rows, "summary": summarise(scores, {})})
    if changed:
        changed[-1] |= {"best_round": max(rounds.values()), "rounds": dict(rounds)}
    return changed
