"""The pictures of docs/leaderboard.md: the gain of each method over training alone, and its rank in each federation."""

from statistics import fmean, stdev

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.stats import t as student

from polyfed.data.plot import save_figure

COLOURS = {"better": "#1a7f37", "not decided": "#8c959f", "worse": "#cf222e"}


def gain_over_federations(gains):
    """Returns the mean of a method's gains over federations, in points, and its 95 % interval: Student's, with federations
    as the units; without an interval for fewer than three.

    >>> [round(value, 2) for value in gain_over_federations([0.01, 0.02, 0.03])]
    [2.0, -0.48, 4.48]
    """
    points = [100 * gain for gain in gains]
    middle = fmean(points)
    if len(points) < 3:
        return middle, None, None
    half = student.ppf(0.975, len(points) - 1) * stdev(points) / len(points) ** 0.5
    return middle, middle - half, middle + half


def side_of_zero(low, high):
    """Returns whether an interval is "better" than 0, "worse", or "not decided"."""
    return "better" if low > 0 else "worse" if high < 0 else "not decided"


def draw_gains(file, gains):
    """Draws the mean gain of each method with its interval, and a small dot for each federation."""
    figure = Figure(figsize=(8, 1 + 0.2 * len(gains)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, found in enumerate(gains.values()):
        middle, low, high = gain_over_federations(found)
        axes.plot([100 * gain for gain in found], [row] * len(found), "o", markersize=2.5, color="#8c959f", alpha=0.6)
        colour = "#8c959f" if low is None else COLOURS[side_of_zero(low, high)]
        if low is not None:
            axes.plot([low, high], [row, row], color=colour, linewidth=2)
        axes.plot(middle, row, "D", markersize=4.5, color=colour)
    for kind, colour in COLOURS.items():
        axes.plot([], [], "D-", color=colour, markersize=4.5, label=kind)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(gains)), list(gains), fontsize=8)
    axes.set_ylim(len(gains) - 0.5, -0.5)
    axes.set_xlabel(
        "gain over training alone in points: mean over federations with 95 % interval; dots: each federation"
    )
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1), fontsize=8)
    file.parent.mkdir(exist_ok=True)
    save_figure(figure, file)


def draw_ranks(file, columns, rows):
    """Draws the rank of each method (`rows`: its cells) in each federation (`columns`).

    Args:
        rows: method -> for each federation its share of the way from first to last, and the text of the cell; or None.
    """
    figure = Figure(figsize=(1.6 + 0.75 * len(columns), 1.8 + 0.26 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shares = [[cell[0] if cell else float("nan") for cell in cells] for cells in rows.values()]
    axes.imshow(shares, cmap="RdYlBu_r", vmin=0, vmax=1, aspect="auto")
    for row, cells in enumerate(rows.values()):
        for column, cell in enumerate(cells):
            if cell:
                dark = abs(cell[0] - 0.5) > 0.32  # the map is dark at both ends
                colour = "white" if dark else "black"
                axes.text(column, row, cell[1], ha="center", va="center", fontsize=8, color=colour, fontweight="bold")
    axes.set_xticks(range(len(columns)), columns, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.set_title("rank by mean score: blue is the best of a federation, red the last", fontsize=8, loc="left")
    file.parent.mkdir(exist_ok=True)
    save_figure(figure, file)
