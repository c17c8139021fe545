"""How much pFedLA depends on what its hypernetworks start from: Table 3's k = 0 on CIFAR-10 with further draws of them.

    python benchmarks/pfedla_draws.py --data FOLDER [--draws 6] [--runs runs/draws]

Everything else of a run stays as it is: data, networks, minibatches. A client counts as stuck if what the server would send
it scores more than 6 points below the client's own network after local training, at the end. Results are in
results/pfedla_draws.json; runs that are there are not repeated.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean, stdev

from workloads import cpu_name

from polyfed.algorithms.hypernetworks import pfedla
from polyfed.cli.commands.papers import reproduce_command
from polyfed.cli.commands.papers.reproduce_command import ReproduceOptions
from polyfed.simulation.storage.directory import read_metrics

RESULTS = Path(__file__).parent / "results" / "pfedla_draws.json"
SEEDS, GAP = (0, 1, 2), 0.06


def measured(draw, given):
    """The clients' accuracy by seed, as sent and after local training, of one draw; 0 is what polyfed draws."""
    drawn = pfedla.init_aggregation_hypernetwork
    pfedla.init_aggregation_hypernetwork = (
        (lambda who, sizes, seed: drawn(f"{who}, draw {draw}", sizes, seed)) if draw else drawn
    )
    out = f"{given.runs}/{draw}"
    wanted = ReproduceOptions(scale="cpu", variant="cifar10-k0", seeds=",".join(map(str, SEEDS)), out=out)
    try:
        reproduce_command.reproduce_table_or_list_papers(
            ["pfedla", "table3", "--data.path", given.data], wanted, quiet=True
        )
    finally:
        pfedla.init_aggregation_hypernetwork = drawn
    found = {}
    for seed in SEEDS:
        rows = read_metrics(Path(out) / f"pfedla_table3-cifar10-k0-seed{seed}" / "metrics.jsonl")[-1][
            "clients"
        ].values()
        found[seed] = {name: [row[name] for row in rows] for name in ("accuracy", "trained_accuracy")}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--draws", type=int, default=6)
    parser.add_argument("--runs", default="runs/draws")
    given = parser.parse_args()
    by_draw = [measured(draw, given) for draw in range(given.draws)]
    runs = [run for of in by_draw for run in of.values()]
    stuck = [
        trained - sent > GAP
        for run in runs
        for sent, trained in zip(run["accuracy"], run["trained_accuracy"], strict=True)
    ]
    means = [[fmean(run["accuracy"]) for run in of.values()] for of in by_draw]
    content = {
        "cpu": cpu_name(), "mean": fmean(map(fmean, means)),
        "spread_over_draws": fmean(stdev(of) for of in zip(*means, strict=True)),
        "stuck": sum(stuck), "clients": len(stuck), "draws": by_draw,
    }  # fmt: skip
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print({key: value for key, value in content.items() if key != "draws"})


if __name__ == "__main__":
    main()
