"""FLHA-GHN's Table 6 and Fig. 3 at the scale of one machine: one architecture left out, then warm start against scratch.

    python benchmarks/unseen.py --data fashion_mnist --data.path /usr/share/datasets/fashion-mnist \
        --out benchmarks/results/unseen_fashion_mnist.json --plot benchmarks/results/unseen_fashion_mnist.png

The recipe `flha_table6_fig3` at scale `cpu`: see its `reduced` sentence. Per architecture left out, means over seeds: share
of its parameters that is generated; accuracy on its own test images as generated, after the epoch on the head, after E
epochs of training all of it from there and from scratch; and for each seed the first epoch after which the warm start has
what training from scratch has after E. Further options are those of `polyfed run`; `--plot` draws the last seed's curves.
"""

import argparse
import json
import statistics
from pathlib import Path

import polyfed as pf
from polyfed.cli.commands import options
from polyfed.cli.commands.recipes import load_recipe, read
from polyfed.data.plot import save_figure
from polyfed.report.generation import draw_curves
from polyfed.simulation import experiment as experiments
from polyfed.simulation.runs.progress import Silent
from polyfed.simulation.unseen import Server, compare_curves, warmstart

RECIPE = "flha_table6_fig3"


def leave_out(variant, given, seed):
    config = load_recipe(RECIPE, "cpu", variant)
    config.pop("description")
    experiment = experiments.from_config(options.parse(["--seed", str(seed), *given.options], config, "unseen.py"))
    found, settings = experiments.participants(experiment), experiment.settings
    run = pf.federate(
        found.clients, experiment.algorithm, rounds=settings.rounds, seed=seed, evaluate_every=settings.rounds,
        progress=Silent(),
    )  # fmt: skip
    server = Server(experiment.algorithm, run.last.state, settings, run.last.round)
    start = warmstart(server, found.unseen[0])
    curves = compare_curves(server, start, given.epochs)
    return curves, {
        "network": found.unseen[0].model.name,
        "coverage": start.coverage,
        "participants": run.table()[-1]["accuracy"],
        "generated": start.before["accuracy"],
        "head": start.after["accuracy"],
        "warm": curves.warm,
        "scratch": curves.scratch,
        "reached": curves.reached,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out")
    parser.add_argument("--plot")
    given, given.options = parser.parse_known_args()
    results, drawn = {}, {}
    print(
        "| left out | generated % | as generated | after the head | warm, E epochs | scratch, E epochs | reached after |"
    )
    print("|---" * 7 + "|")
    for variant in read(RECIPE).variants:
        runs = []
        for seed in range(given.seeds):
            curves, found = leave_out(variant, given, seed)
            runs.append(found)
        results[variant], drawn[runs[0]["network"]] = runs, curves
        cells = [f"{100 * statistics.mean(run[key] for run in runs):.1f}" for key in ("coverage", "generated", "head")]
        cells += [f"{100 * statistics.mean(run[key][-1] for run in runs):.1f}" for key in ("warm", "scratch")]
        reached = " ".join("never" if run["reached"] is None else str(run["reached"]) for run in runs)
        print(f"| {runs[0]['network']} | {' | '.join(cells)} | {reached} |", flush=True)
        if given.out:
            head = {"recipe": RECIPE, "epochs": given.epochs, "options": given.options}
            Path(given.out).write_text(json.dumps({**head, "skipped": results}, indent=1) + "\n")
    if given.plot:
        save_figure(draw_curves(drawn), given.plot)


if __name__ == "__main__":
    main()
