"""Prints how many examples of each class every client has, for `polyfed data`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Required, TypedDict

import numpy as np
from rich.console import Console

from polyfed.cli.commands.terminal import PlainTable, print_json, print_line
from polyfed.core.algorithm import Client
from polyfed.core.io.text.site_words import client_heading
from polyfed.data import draw_class_counts
from polyfed.data.look.counts import MIN_COUNT
from polyfed.data.sources.table_file import parse_column_names
from polyfed.data.tabular.columns import sorted_unique_texts
from polyfed.data.tabular.preprocessing import TablePreprocessor
from polyfed.simulation.experiment import Experiment, load_participants

_MAX_CLIENTS = 40


class ShownClient(TypedDict, total=False):
    """Describes one client in what `polyfed data --json` prints."""

    client: Required[str]
    train: Required[int]
    test: Required[int]
    unseen: Required[bool]
    classes: Required[list[int] | None]
    """Training examples of each class or label; None where targets are not counted, or examples are fewer than five."""


def show_class_counts(experiment: Experiment, plot: Path | None, *, as_json: bool = False, quiet: bool = False) -> None:
    """Prints clients' training examples by class or label, as table or JSON, and draws them to `plot`.

    For regression it prints their number, and the mean and standard deviation of their targets. Of clients with fewer than
    `MIN_COUNT` training examples it prints the number alone.

    Raises:
        UserError: a picture that cannot be written.
    """
    console = Console(quiet=quiet)
    experiment_data = load_participants(experiment)
    task = experiment_data.pool.task
    names = task.count_names(experiment_data.pool.class_names)
    all_clients, participant_count = (
        (*_sorted_by_name(experiment_data.clients), *_sorted_by_name(experiment_data.unseen)),
        len(experiment_data.clients),
    )
    target = getattr(experiment.source, "target", "")  # one column or several
    outcome = f" (outcome: {', '.join(parse_column_names(target))})" if target else ""
    table = PlainTable(title=f"training examples {task.counts_title}{outcome}", title_justify="left")
    table.add_column(client_heading([client.id for client in all_clients]))
    for name in (*names, "all", "test"):
        table.add_column(name, justify="right")
    counts = {
        c.id: (task.class_counts(c.train.labels, len(names)) or ()) if len(c.train) >= MIN_COUNT else ()
        for c in all_clients
    }
    for position, client in enumerate(all_clients[:_MAX_CLIENTS]):
        cells = [str(n) if n else "·" for n in counts[client.id]]
        mark = " (unseen client)" if position >= participant_count else ""
        if len(client.train) < MIN_COUNT:  # they would be the rows themselves
            cells = ["–"] * len(names)
        elif task.has_target_moments:
            cells = [f"{mean:.4g} ± {spread:.2g}" for mean, spread in _target_moments(client)]
        table.add_row(f"{client.id}{mark}", *cells, str(len(client.train)), str(len(client.test)))
    # Drawn first: if the picture cannot be written, there is an error and nothing else.
    has_counts = any(counts.values())
    if has_counts and plot is not None:
        drawn_counts = np.array([counts[c.id] or [0] * len(names) for c in all_clients])
        draw_class_counts(drawn_counts, names, plot, unseen=len(experiment_data.unseen),
                         clients=[c.id for c in all_clients])  # fmt: skip
    if as_json:
        client_entries: list[ShownClient] = [
            {
                "client": client.id, "train": len(client.train), "test": len(client.test),
                "unseen": position >= participant_count, "classes": list(map(int, counts[client.id])) or None,
            }
            for position, client in enumerate(all_clients)
        ]  # fmt: skip
        class_names, partition = list(map(str, names)), str(experiment_data.partition_fingerprint)
        print_json({"format": 1, "class_names": class_names, "partition": partition, "clients": client_entries})
        return
    console.print(table)
    if len(all_clients) > _MAX_CLIENTS:
        print_line(console, f"and {len(all_clients) - _MAX_CLIENTS} more (--json has all)")
    if has_counts and plot is not None:
        print_line(console, f"drawn in {plot}")


def _sorted_by_name(clients: Sequence[Client]) -> list[Client]:
    """Returns the clients sorted by name; names that are numbers are sorted as numbers."""
    place = {name: position for position, name in enumerate(sorted_unique_texts([client.id for client in clients]))}
    return sorted(clients, key=lambda client: place[client.id])


def _target_moments(client: Client) -> list[tuple[float, float]]:
    """Returns the mean and standard deviation of each target of a client's training examples, in the unit of the data."""
    y, transform = client.train.labels.double(), client.train.transform
    y = transform.unscale_outputs(y).double() if isinstance(transform, TablePreprocessor) else y
    return list(zip(y.mean(0).tolist(), y.std(0, correction=0).tolist(), strict=True))
