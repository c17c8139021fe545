"""Draws the number of examples per class and client, and saves figures."""

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import expand_user_path, write_file_atomically


def save_figure(figure: Any, path: str | Path) -> None:
    """Writes a matplotlib figure to a file, always the same bytes for the same figure.

    Args:
        figure: with a canvas of its own.
        path: the file; its suffix, .png or .svg, is the format.

    Raises:
        UserError: another suffix, or a path that cannot be written.
    """
    from matplotlib import rc_context

    path = resolve_picture_path(path)
    # No date, and ids from a fixed salt, so that the bytes are the same each time.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    buffer = io.BytesIO()
    try:
        with rc_context({"svg.hashsalt": "polyfed"}):
            figure.savefig(buffer, format=path.suffix[1:], dpi=120, metadata=metadata)
        write_file_atomically(path, buffer.getvalue(), private=False)
    except OSError as error:
        raise UserError(f"cannot write the picture {str(path)!r} ({error.strerror})") from error


def resolve_picture_path(path: str | Path) -> Path:
    """Returns the path of a picture with "~" expanded.

    Raises:
        UserError: the name does not end in .png or .svg.
    """
    file = expand_user_path(path, "the picture")
    if file.suffix not in (".png", ".svg"):
        raise UserError(f"a picture must end in .png or .svg, got {str(path)!r}")
    return file


def draw_class_counts(
    counts: NDArray[Any], class_names: Sequence[str], path: str | Path, *, unseen: int = 0, clients: Sequence[str] = ()
) -> None:
    """Draws the number of examples per class and client as a heat map and writes it to a file.

    Args:
        counts: shape (num_clients, num_classes), as from `class_counts`.
        class_names: one per class.
        path: the picture to write; its suffix, .png or .svg, is the format.
        unseen: number of last clients that take no part; a line divides them from the others.
        clients: their names; without them they are numbered.

    Raises:
        UserError: shapes that do not fit, another suffix, or a path that cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = resolve_picture_path(path)
    if counts.ndim != 2 or 0 in counts.shape or counts.shape[1] != len(class_names):
        raise UserError(
            f"counts of shape {counts.shape} do not fit {len(class_names)} classes (num_clients, num_classes)"
        )
    number, classes = counts.shape
    # Cells stay readable up to about 60 of a kind; beyond that the picture stops growing and labels thin out.
    short_names = [_shorten_name(name) for name in clients]
    height = 1.5 + 0.3 * min(classes, 60) + 0.09 * max(map(len, short_names), default=0)
    figure = Figure(figsize=(2.5 + 0.35 * min(number, 60), height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    picture = axes.imshow(counts.T, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
    axes.set_xlabel("client")
    if unseen:
        axes.axvline(number - unseen - 0.5, color="red", linestyle="--", linewidth=1.5)
        axes.set_title("unseen clients on the right of the line", fontsize=9)
    axes.set_ylabel("class")
    columns = range(0, number, -(-number // 60))
    axes.set_xticks(columns)
    if short_names:
        axes.set_xticklabels([short_names[i] for i in columns], rotation=90)
    steps = range(0, classes, -(-classes // 60))
    axes.set_yticks(steps, [class_names[i] for i in steps])
    if number * classes <= 300:
        bright = counts.max() / 2
        for i, row in enumerate(counts):
            for j, value in enumerate(row):
                colour = "black" if value > bright else "white"
                axes.text(i, j, str(value), ha="center", va="center", color=colour, fontsize=7)
    figure.colorbar(picture, label="examples")
    with warnings.catch_warnings():
        # matplotlib draws letters that its font lacks as boxes; the printed table shows them.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        save_figure(figure, path)


def _shorten_name(name: str) -> str:
    """Returns a name shortened to 24 characters, with "$" escaped, which would start a formula in matplotlib."""
    return (name if len(name) <= 24 else f"{name[:23]}…").replace("$", r"\$")
