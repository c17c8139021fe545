"""What one first head for all clients gives LG-FedAvg and FedGH where architectures differ: accuracy after 5 to 50 rounds.

    python benchmarks/first_heads.py --out benchmarks/results/first_heads.json

Six clients of scikit-learn's digits (Dirichlet 0.5, half of the digits to test on), three networks of two hidden layers (24,
32 or 40, then 16), SGD at 0.1, minibatches of 16, one epoch a round. Each seed deals the digits anew and draws all weights.
"before" is `first_head="architecture"`, each architecture's own draw of the head, "after" is the default, one head for all.

Printed: accuracy in %, mean over clients and seeds ± standard deviation over seeds, and the difference with its interval of
95 %, Student's, over paired seeds.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from scipy import stats

import polyfed as pf
from polyfed.algorithms import FedGH, LGFedAvg
from polyfed.data import SOURCES, Dirichlet, Split, make_clients
from polyfed.models import ModelSpec
from polyfed.simulation.monitoring.progress import SilentProgress

HIDDEN, ROUNDS = ((24, 16), (32, 16), (40, 16)), (5, 10, 20, 50)
OPTIONS = {"lr": 0.1, "batch_size": 16, "local_epochs": 1}
METHODS = {"lg_fedavg": (LGFedAvg, ""), "fedgh": (FedGH, ""), "fedgh, the server's head": (FedGH, "global_")}
STARTS = {"before": "architecture", "after": "form"}


def clients(seed):
    pool = SOURCES["digits"]().load()
    data, _ = make_clients(pool, Split(clients=6, test_fraction=0.5), Dirichlet(0.5), seed=seed)
    nets = [ModelSpec("mlp", {"hidden": hidden}, pool.input_shape, pool.num_outputs) for hidden in HIDDEN]
    return [pf.Client(d.id, nets[k % len(nets)], d.train, d.test) for k, d in enumerate(data)]


def courses(members, seed):
    """Accuracy at each of ROUNDS, by method and start."""
    found = {}
    for kind in dict.fromkeys(kind for kind, _ in METHODS.values()):
        for start, way in STARTS.items():
            method = kind(first_head=way, **OPTIONS)
            run = pf.federate(
                members, method, rounds=max(ROUNDS), seed=seed, evaluate_every=5, workers=0, progress=SilentProgress()
            )  # fmt: skip
            for name, (other, prefix) in METHODS.items():
                if other is kind:
                    found[f"{name}, {start}"] = [
                        statistics.fmean(c[f"{prefix}accuracy"] for c in run.history[n - 1]["clients"].values())
                        for n in ROUNDS
                    ]
    return found


def difference(before, after):
    """Of two lists over the same seeds, in points, with its interval of 95 %."""
    gaps = [100 * (b - a) for a, b in zip(before, after, strict=True)]
    half = float(stats.t.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / len(gaps) ** 0.5
    mean = statistics.fmean(gaps)
    return {key: round(value, 2) for key, value in (("value", mean), ("low", mean - half), ("high", mean + half))}


def table(by_seed):
    """Scores and differences by method, and the lines of a table."""
    rows, lines = (
        {},
        [f"\n| method | first head |{''.join(f' {n} |' for n in ROUNDS)}", "|---" * (2 + len(ROUNDS)) + "|"],
    )
    for name in METHODS:
        scores = {
            start: [[seed[f"{name}, {start}"][k] for seed in by_seed] for k in range(len(ROUNDS))] for start in STARTS
        }
        gaps = [difference(*pair) for pair in zip(*scores.values(), strict=True)]
        rows[name] = gaps
        for start, way in STARTS.items():
            shown = (f" {100 * statistics.fmean(s):.1f} ± {100 * statistics.stdev(s):.1f} |" for s in scores[start])
            lines.append(f"| `{name}` | {way} |{''.join(shown)}")
        lines.append(
            f"| | difference |{''.join(' {value:+.1f} ({low:+.1f} to {high:+.1f}) |'.format(**g) for g in gaps)}"
        )
    return rows, lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", default="first_heads.json", help="results; seeds that are there are not run again")
    given = parser.parse_args()
    torch.set_num_threads(1)
    file = Path(given.out)
    by_seed = json.loads(file.read_text())["seeds"] if file.exists() else []
    for seed in range(len(by_seed), given.seeds):
        found = courses(clients(seed), seed)
        by_seed.append({name: [round(score, 5) for score in scores] for name, scores in found.items()})
        differences = table(by_seed)[0] if seed else {}
        content = {"rounds": ROUNDS, "hidden": HIDDEN, **OPTIONS, "differences": differences, "seeds": by_seed}
        file.write_text(json.dumps(content, indent=1) + "\n")
        print(f"seed {seed} done", flush=True)
    print("\n".join(table(by_seed)[1]))


if __name__ == "__main__":
    main()
