"""Draws docs/quickstart.png from the run directory of `polyfed run` (the quickstart recipe).

python docs/draw_quickstart.py runs/quickstart-... docs/quickstart.png
"""

import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def last_accuracies(run):
    """Client -> accuracy after the last round."""
    record = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return {client: row["accuracy"] for client, row in record["clients"].items()}


def draw(run, picture):
    """Bars of accuracy alone and together, per client and in the mean."""
    found = {
        "alone (local)": last_accuracies(run / "baselines" / "local"),
        "together (flha_ghn)": last_accuracies(run),
        "together (fedhenn)": last_accuracies(run / "baselines" / "fedhenn"),
    }
    names = [*found["alone (local)"], "mean"]
    bars = {label: [*values.values(), np.mean(list(values.values()))] for label, values in found.items()}
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = np.arange(len(names)) + np.r_[np.zeros(len(names) - 1), 0.5]
    for i, ((label, values), colour) in enumerate(zip(bars.items(), ("#9aa5b1", "#1f6feb", "#e8833a"), strict=True)):
        drawn = axes.bar(places + (i - 1) * 0.29, values, width=0.27, label=label, color=colour)
        axes.bar_label(drawn, fmt="%.2f", fontsize=6, padding=2)
    axes.set_xticks(places, names)
    axes.set_ylim(0, 1.18)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.set_ylabel("test accuracy")
    axes.set_title(
        "Eight clients, 40 handwritten digits each, four different networks; 20 rounds", loc="left", fontsize=11
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="upper right", fontsize=9)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
