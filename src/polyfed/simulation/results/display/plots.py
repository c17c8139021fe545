"""Draws learning curves and gains with matplotlib, into axes of the caller or new ones."""

from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.text.number_format import NumberUnit

_FEW = 8  # clients up to which each has a line with its name
_ROW_HEIGHT = 0.25  # inches, of an interval with its name


def plot_learning_curves(
    history: Sequence[Mapping[str, Any]], metric: str, unit: NumberUnit, title: str, ax: Any = None
) -> Any:
    """Draws a score of each client by round, and the mean over clients; returns the matplotlib axes.

    Args:
        history: the records of a run.
        metric: a column of the clients' scores, such as "accuracy", "val_auc" or "loss".
        unit: of the score; a share is drawn in per cent.
        title: of the axes.
        ax: axes to draw into; None makes new ones.

    Raises:
        UserError: no evaluated round has a score of this name.
    """
    evaluated = [record for record in history if record["clients"]]
    names = {name for record in evaluated for scores in record["clients"].values() for name in scores}
    if metric not in names:
        raise UserError(f"no round of this run has the score {metric!r}; {did_you_mean(str(metric), names)}")
    ax, scale = ax if ax is not None else _build_axes(), 100 if unit == "%" else 1
    clients = sorted({client for record in evaluated for client in record["clients"]})
    for client in clients:
        points = [(record["round"], record["clients"].get(client, {}).get(metric)) for record in evaluated]
        defined = [(number, scale * value) for number, value in points if value is not None]
        label = client if len(clients) <= _FEW else None
        ax.plot(*zip(*defined, strict=True), linewidth=1, alpha=0.6, label=label) if defined else None
    means = [(r["round"], scale * s["mean"]) for r in evaluated if (s := r["summary"].get(metric)) is not None]
    if means:
        ax.plot(*zip(*means, strict=True), color="black", linewidth=2, label="mean over clients")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set(xlabel="round", ylabel=f"{metric} ({unit})" if unit == "%" else metric, title=title)
    ax.legend()
    return ax


def plot_intervals(
    entries: Sequence[tuple[str, float, Sequence[float] | None]],
    unit: NumberUnit,
    label: str,
    title: str,
    *,
    draws_zero_line: bool,
    ax: Any = None,
) -> Any:
    """Draws values with their intervals, one below another, and returns the matplotlib axes.

    Args:
        entries: name, value, and the two ends of its interval or None.
        unit: of the values; shares are drawn in per cent, and their differences in points.
        label: of the axis of values.
        title: of the axes.
        draws_zero_line: whether to draw a line at zero, for differences.
        ax: axes to draw into; None makes new ones.
    """
    ax, scale = ax if ax is not None else _build_axes(len(entries)), 100 if unit == "%" else 1
    for position, (_, value, interval) in enumerate(entries):
        if interval is not None:
            ax.plot([scale * end for end in interval], [position, position], color="tab:blue", linewidth=2)
        ax.plot([scale * value], [position], "o", color="tab:blue")
    if draws_zero_line:
        ax.axvline(0, color="grey", linewidth=1)
    ax.set(xlabel=label, title=title, yticks=range(len(entries)), yticklabels=[name for name, *_ in entries])
    ax.invert_yaxis()
    return ax


def _build_axes(num_rows: int = 0) -> Any:
    from matplotlib import pyplot  # imported late: a second, which only a plot should cost

    width, height = pyplot.rcParams["figure.figsize"]
    return pyplot.subplots(layout="constrained", figsize=(width, max(height, _ROW_HEIGHT * num_rows)))[1]
