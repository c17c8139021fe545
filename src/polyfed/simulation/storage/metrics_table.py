"""Builds a table of the metrics of one round, from the round's record in `metrics.jsonl`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polyfed.core.evaluation.metric_names import split_metric_column
from polyfed.core.io.text.row_table import RowTable


def build_metrics_table(
    record: Mapping[str, Any], client_ids: Iterable[str], num_examples: Mapping[str, int], metric_names: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns a round's metrics as dicts by client (numeric ids by number), then their means.

    Each has `simulated_seconds`, the time at the end of the round, if the run simulates time.

    Args:
        record: of the round.
        client_ids: of all clients; one that was not evaluated has None in all columns. If the round evaluated some alone
            (`evaluated` in its record), the table is of these, and the row of means says how many of how many.
        num_examples: numbers of training examples, of the clients where they are known.
        metric_names: the metrics; the first decides.

    >>> record = {"clients": {"10": {"r2": 0.5}, "9": {"r2": 0.7, "val_r2": 0.6}}, "summary": {"r2": {"mean": 0.6}}}
    >>> for row in build_metrics_table(record, ["10", "9"], {"9": 4}, ["r2"]): print(row)
    {'client': '9', 'r2': 0.7, 'loss': None, 'val_r2': 0.6, 'num_examples': 4}
    {'client': '10', 'r2': 0.5, 'loss': None, 'val_r2': None, 'num_examples': None}
    {'client': 'mean', 'r2': 0.6, 'loss': None, 'val_r2': None, 'num_examples': None}
    """
    sample = record.get("evaluated")
    if sample is not None:
        client_ids = [client for client, row in record["clients"].items() if row.keys() & {"loss", *metric_names}]
    metrics = {client: record["clients"].get(client, {}) for client in _sort_ids(client_ids)}
    columns = {name for values in metrics.values() for name in values}
    parts = (split_metric_column(name, metric_names) for name in columns)
    other_networks = sorted({part[0] for part in parts if part is not None and part[0]})
    names = [
        f"{part}{name}"
        for part in dict.fromkeys(["", "val_", "global_", *other_networks])
        for name in (*metric_names, "loss")
        if f"{part}{name}" in columns or not part
    ]
    rows: list[dict[str, Any]] = []
    for client, values in metrics.items():
        row = {"client": client, **{n: values.get(n) for n in names}, "num_examples": num_examples.get(client)}
        rows.append(row)
    means = {n: record["summary"].get(n, {}).get("mean") for n in names}
    counts = [num_examples[client] for client in metrics if client in num_examples]
    total = sum(counts) / len(rows) if rows and len(counts) == len(rows) else None
    sizes = {} if sample is None else {"evaluated": sample["clients"], "of": sample["of"]}
    rows.append({"client": "mean", **means, "num_examples": total, **sizes})
    time = {"simulated_seconds": record["simulated_seconds"]} if "simulated_seconds" in record else {}
    return RowTable({**row, **time} for row in rows)


def find_metric_names(records: Sequence[Mapping[str, Any]], first: str | None = None) -> list[str]:
    """Returns the names of the metrics in the records of a run, first the metric by which rounds are compared.

    Other columns are the same metrics with a prefix: one that a loss has, too.

    >>> find_metric_names([{"summary": {"f1": {}, "balanced_f1": {}, "loss": {}, "val_f1": {}, "val_loss": {}}}])
    ['f1', 'balanced_f1']
    >>> find_metric_names([{"summary": {"log_loss": {}, "loss": {}}}])
    ['log_loss']
    """
    columns = list(dict.fromkeys(name for record in records for name in record["summary"]))
    prefixes = [
        name.removesuffix("loss") for name in columns if name.endswith("_loss") and not name.endswith("log_loss")
    ]
    names = [name for name in columns if name != "loss" and not name.startswith(tuple(prefixes))]
    return sorted(names, key=lambda name: name != first)


def _sort_ids(client_ids: Iterable[str]) -> list[str]:
    ids = sorted(set(client_ids))
    try:
        return sorted(ids, key=float)
    except ValueError:
        return ids
