"""The picture of a partition: classes × clients; and how pictures are written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from polyfed.errors import UserError


def save_figure(figure: Any, path: str | Path) -> None:
    """Writes a matplotlib figure; the same figure gives the same bytes.

    Args:
        figure: with a canvas of its own.
        path: the picture; its ending, .png or .svg, is the format.

    Raises:
        UserError: another ending, or a place that cannot be written.
    """
    from matplotlib import rc_context

    path = picture_path(path)
    # Without a date and with ids that do not change.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        with rc_context({"svg.hashsalt": "polyfed"}):
            figure.savefig(path, dpi=120, metadata=metadata)
    except OSError as error:
        raise UserError(f"cannot write the picture {str(path)!r} ({error.strerror})") from error


def picture_path(path: str | Path) -> Path:
    """The path of a picture.

    Raises:
        UserError: it does not end in .png or .svg.
    """
    if Path(path).suffix not in (".png", ".svg"):
        raise UserError(f"a picture must end in .png or .svg, got {str(path)!r}")
    return Path(path)


def draw_class_table(counts: NDArray[Any], class_names: Sequence[str], path: str | Path, *, newcomers: int = 0) -> None:
    """Draws how many examples of each class each client has, as a heat map.

    Args:
        counts: shape (num_clients, num_classes), as from `class_counts`.
        class_names: one per class.
        path: the picture to write; its ending, .png or .svg, is the format.
        newcomers: how many of the last clients take no part; a line divides them from the others.

    Raises:
        UserError: shapes that do not fit, another ending, or a place that cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = picture_path(path)
    if counts.ndim != 2 or 0 in counts.shape or counts.shape[1] != len(class_names):
        raise UserError(
            f"counts of shape {counts.shape} do not fit {len(class_names)} classes (num_clients, num_classes)"
        )
    clients, classes = counts.shape
    # Cells stay readable up to about 60 of a kind; beyond that the picture stops growing and labels thin out.
    figure = Figure(figsize=(2.5 + 0.35 * min(clients, 60), 1.5 + 0.3 * min(classes, 60)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    picture = axes.imshow(counts.T, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
    axes.set_xlabel("client")
    if newcomers:
        axes.axvline(clients - newcomers - 0.5, color="red", linestyle="--", linewidth=1.5)
        axes.set_title("newcomers on the right of the line", fontsize=9)
    axes.set_ylabel("class")
    axes.set_xticks(range(0, clients, -(-clients // 60)))
    steps = range(0, classes, -(-classes // 60))
    axes.set_yticks(steps, [class_names[i] for i in steps])
    if clients * classes <= 300:
        bright = counts.max() / 2
        for i, row in enumerate(counts):
            for j, value in enumerate(row):
                colour = "black" if value > bright else "white"
                axes.text(i, j, str(value), ha="center", va="center", color=colour, fontsize=7)
    figure.colorbar(picture, label="examples")
    save_figure(figure, path)
