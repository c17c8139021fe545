"""Compares each client that trains on its own data only at the round that is best for this client."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.algorithms import Local
from polyfed.comparison.execution.training_runs import FinishedRun
from polyfed.comparison.plan import ComparisonPlan, Method
from polyfed.comparison.tuning.ranking import (
    cap_losses,
    first_loss,
    lowest_smoothed_loss,
    shrink_client_loss_to_pooled_loss,
)
from polyfed.core.evaluation.evaluate import summarise_clients
from polyfed.simulation.monitoring.validation_losses import (
    pool_losses,
    round_of_lowest_loss,
    validation_losses_by_client,
)

History = Sequence[Mapping[str, Any]]


def lowest_loss_round_by_client(history: History, num_validation: Mapping[str, int]) -> dict[str, int]:
    """Returns `{client: round of its lowest validation loss}`, losses averaged with neighbours.

    A client without validation examples gets the round of the lowest pooled loss.

    Args:
        history: the records of `metrics.jsonl` of a run.
        num_validation: client id -> number of validation examples.

    Returns:
        client id -> round; empty if no client has validation examples.

    >>> rows = [{"a": {"val_loss": loss}, "b": {"loss": 1.0}} for loss in (0.9, 0.5, 0.4, 0.5, 0.9)]
    >>> lowest_loss_round_by_client([{"round": t, "clients": row} for t, row in enumerate(rows, 1)], {"a": 10})
    {'a': 3, 'b': 3}
    """
    losses = validation_losses_by_client(history)
    pooled_curve = pool_losses(
        cap_losses(losses, {client: first_loss(client_losses) for client, client_losses in losses.items()}),
        num_validation,
    )
    pooled_lowest = round_of_lowest_loss(pooled_curve)
    if pooled_lowest is None:
        return {}
    best_rounds = {}
    for client in sorted({c for record in history for c in record["clients"]}):
        curve = (
            shrink_client_loss_to_pooled_loss(losses[client], num_validation.get(client, 0), pooled_curve)
            if client in losses
            else []
        )
        lowest_point = lowest_smoothed_loss(curve)
        best_rounds[client] = pooled_lowest if lowest_point is None else lowest_point.round
    return best_rounds


def select_compared_rounds_of_local_runs(
    plan: ComparisonPlan,
    methods: Mapping[str, Method],
    runs: Mapping[tuple[str, int], FinishedRun],
    sizes_by_seed: Mapping[str, Any],
    tuning_entry: Mapping[str, Any] | None,
) -> dict[tuple[str, int], dict[str, int]]:
    """Returns `{(label, seed): {client: compared round}}` for runs in which clients train alone.

    Args:
        plan: the plan of the comparison; with a fixed budget the result is empty.
        methods: label -> method.
        runs: (label, seed) -> finished run.
        sizes_by_seed: seed -> client id -> numbers of examples.
        tuning_entry: the search result as in `comparison.json`; None without a search.

    Returns:
        (label, seed) -> client id -> round. A run is missing if predictions of one of these rounds were not kept, as when
            they are very large: its clients are all compared at the end of the run.
    """
    rounds_by_run: dict[tuple[str, int], dict[str, int]] = {}
    for (label, seed), run in runs.items():
        if plan.criteria.budget.determines_compared_round or not isinstance(methods[label], Local):
            continue
        rounds: dict[str, int] | None = None
        if tuning_entry is not None and "rounds" in tuning_entry:
            rounds = tuning_entry["methods"][label].get("rounds")
        else:
            sizes = sizes_by_seed[str(seed)]
            rounds = lowest_loss_round_by_client(run.history, {c: row["val"] for c, row in sizes.items()})
            rounds = {c: n for c, n in rounds.items() if c in sizes}  # those that are evaluated
        if rounds and all(run.test_outputs(c, n) is not None for c, n in rounds.items()):
            rounds_by_run[label, seed] = rounds
    return rounds_by_run


def freeze_history_after(history: History, last_round_by_client: Mapping[str, int]) -> list[dict[str, Any]]:
    """Returns records as if each client had stopped after its round in `last_round_by_client`.

    Args:
        history: the records of `metrics.jsonl`; they are not changed.
        last_round_by_client: client id -> an evaluated round.

    >>> rows = [{"a": {"auc": 0.5}, "b": {"auc": 0.5}}, {"a": {"auc": 0.75}, "b": {"auc": 1.0}}]
    >>> history = [{"round": t, "clients": row, "summary": {"auc": {}}} for t, row in enumerate(rows, 1)]
    >>> [record["summary"]["auc"]["mean"] for record in freeze_history_after(history, {"a": 2, "b": 1})]
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
            last_row = of_round.get(min(record["round"], last_round_by_client.get(client, record["round"])), {}).get(
                client, row
            )
            rows[client] = {**row, **{name: last_row.get(name) for name in names}}
        scores = {client: {name: row[name] for name in names} for client, row in rows.items()}
        changed.append({**record, "clients": rows, "summary": summarise_clients(scores, {})})
    if changed:
        changed[-1] |= {"best_round": max(last_round_by_client.values()), "rounds": dict(last_round_by_client)}
    return changed
