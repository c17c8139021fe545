"""FLHA-GHN's Fig. 3 from the runs of its Table 6: a client with an architecture that took no part, epoch by epoch.

    python benchmarks/papers.py run flha/table6 --runs runs/papers
    python benchmarks/unseen.py runs/papers/flha-table6 --out benchmarks/results/unseen_fashion_mnist.json \
        --plot benchmarks/results/unseen_fashion_mnist.png

The recipe `flha_table6_fig3` at scale `cpu`: see its `reduced` sentence. Per architecture left out, means over seeds: share
of its parameters that is generated; accuracy on its own test images as generated, after the epoch on the head, after E
epochs of training all of it from there and from scratch; and for each seed the first epoch after which the warm start has
what training from scratch has after E. `--plot` draws the last seed's curves.
"""

import argparse
import json
import re
import statistics
from pathlib import Path

from polyfed.cli.commands.options.recipes import read_recipe
from polyfed.data.plot import save_figure
from polyfed.report.figures.generation import draw_warm_start_curves
from polyfed.simulation.experiment import build_experiment, load_participants
from polyfed.simulation.results.unseen_clients import compare_with_scratch, compute_warm_start, load_trained_server
from polyfed.simulation.storage.directory import read_config

RECIPE = "flha_table6_fig3"


def left_out(folder, epochs):
    """The curves of the run's unseen client, and figures of them."""
    [client] = load_participants(build_experiment(read_config(folder))).unseen
    server = load_trained_server(folder)
    start = compute_warm_start(server, client)
    curves = compare_with_scratch(server, start, epochs)
    return curves, {
        "seed": int(re.search(r"seed(\d+)$", folder.name).group(1)),
        "network": client.model.name,
        "coverage": start.coverage,
        "generated": start.before["accuracy"],
        "head": start.after["accuracy"],
        "warm": curves.warm,
        "scratch": curves.scratch,
        "reached": curves.epochs_to_match_scratch,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out")
    parser.add_argument("--plot")
    given = parser.parse_args()
    results, drawn = {}, {}
    print(
        "| left out | generated % | as generated | after the head | warm, E epochs | scratch, E epochs | reached after |"
    )
    print("|---" * 7 + "|")
    for variant in read_recipe(RECIPE).variants:
        runs = []
        for folder in sorted(given.runs.glob(f"{RECIPE}-{variant}-seed*")):
            curves, found = left_out(folder, given.epochs)
            runs.append(found)
        if not runs:
            raise SystemExit(f"no runs of {RECIPE} {variant} in {given.runs}; papers.py run flha/table6 makes them")
        results[variant], drawn[runs[0]["network"]] = runs, curves
        cells = [f"{100 * statistics.mean(run[key] for run in runs):.1f}" for key in ("coverage", "generated", "head")]
        cells += [f"{100 * statistics.mean(run[key][-1] for run in runs):.1f}" for key in ("warm", "scratch")]
        reached = ", ".join("never" if run["reached"] is None else str(run["reached"]) for run in runs)
        print(f"| {runs[0]['network']} | {' | '.join(cells)} | {reached} |", flush=True)
    if given.out:
        content = {"recipe": RECIPE, "epochs": given.epochs, "skipped": results}
        Path(given.out).write_text(json.dumps(content, indent=1) + "\n")
    if given.plot:
        save_figure(draw_warm_start_curves(drawn), given.plot)


if __name__ == "__main__":
    main()
