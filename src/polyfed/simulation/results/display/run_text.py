"""Writes a run as text: a line about it, the scores of its clients, which clients failed, and what its rounds warn of."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.core.io.text.number_format import count_with_noun
from polyfed.core.io.text.row_table import RowTable
from polyfed.simulation.checks.clients.undefined_scores import explain_undefined_score
from polyfed.simulation.results.display.remarks import list_remarks, summarise_remarks
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.sources.source_clients import SourceClients

_MOST_ROWS = 20  # of the table


def run_line(federation: Federation, history: Sequence[Mapping[str, Any]], out: Path | None) -> str:
    """Returns one line about a run, with the mean score of its last round and nothing of its data."""
    metric, last = federation.metrics[0], history[-1] if history else {}
    summary, sample = last.get("summary") or {}, last.get("evaluated")
    mean = summary.get(metric.name, {}).get("mean")
    scored = f"{metric.name} {mean:.3g}" if mean is not None else "not evaluated"
    if summary and mean is None:
        clients = () if isinstance(federation.clients, SourceClients) else tuple(federation.clients.values())
        scored = f"{metric.name} not defined{explain_undefined_score(metric, clients)}"
    evaluated = "" if sample is None else f" ({sample['clients']} evaluated)"
    return (
        f"Run({type(federation.algorithm).__name__}, "
        f"{count_with_noun(len(federation.client_registry.ids), 'client')}{evaluated}, "
        f"{count_with_noun(len(history), 'round')}, {scored}{summarise_remarks(history)}, "
        f"out={None if out is None else str(out)!r})"
    )


def run_text(heading: str, table: Sequence[dict[str, Any]], history: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text that `print` shows of a run.

    Args:
        heading: one line about the run.
        table: a row per client and one of means, as `Run.table` returns them; of many clients the first are shown.
        history: the records of the run.

    >>> print(run_text("Run(FedAvg)", [{"client": "north", "auc": 0.8125}, {"client": "mean", "auc": 0.8125}], []))
    Run(FedAvg)
    client    auc
    north   0.812
    mean    0.812
    """
    rows = list(table)
    hidden = rows[_MOST_ROWS - 1 : -1]
    note = f"and {count_with_noun(len(hidden), 'client')} more: run.table() has all" if hidden else ""
    scores = str(RowTable([*rows[: _MOST_ROWS - 1], *rows[-1:]] if hidden else rows))
    return "\n".join(filter(None, [heading, scores, note, *list_remarks(history)]))
