"""FLHA-GHN's heads: the paper's, factored, light and low-rank ones against each other, on the same clients.

    python benchmarks/heads.py --path /usr/share/datasets/fashion-mnist --out benchmarks/results/heads.json \\
        --federations digits,small --heads mlp,factored,factored-16,lowrank
    python benchmarks/heads.py --path /usr/share/datasets/fashion-mnist --out benchmarks/results/light_heads.json \\
        --federations quickstart,heart,small --heads factored,light
    python benchmarks/heads.py --path /usr/share/datasets/fashion-mnist --out benchmarks/results/light_forms.json \\
        --federations small --forms 32-51-16,32-16-16,8-16-16,4-16-16,8-8-16,4-16-8
    python benchmarks/heads.py --path DATA.parquet --out benchmarks/results/text_heads.json \\
        --federations text --heads factored,light,mlp,lowrank

Federations: the recipes `digits` (eight clients, four networks with up to 17 layers) and `quickstart` (four hospitals, MLPs
of 2 to 12 KiB; `heart` with one for all), and six clients of 200 training, 50 validation and 250 test images of
Fashion-MNIST with four convolutional networks, in three widths; `text`: six clients of 1,000 training, 100 validation and
500 test tweets of Sentiment140 with a transformer, an LSTM and a CNN over characters, each 16 and 24 wide, trained by Adam.
Each head has its own rate by the validation accuracy of three seeds: 0.01, 0.03 and 0.1 (Adam: 0.001, 0.003 and 0.01), then
twice those 1.8 times around the best. Where the file of results has these accuracies, they are not measured again. Then ten
seeds. With `--forms`, factored heads of these ranks, latent entries and hidden units, at one rate, three seeds. Printed:
accuracy of the last round, mean over clients ± standard deviation over seeds; the difference from the first head with its
interval of 95 %, for new seeds and new test examples (`polyfed.comparison.statistics.mrmc`); KiB each way of one client and
round; processor seconds of a run, on one thread.
"""

import argparse
import json
import statistics
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from text_networks import Convolutional, Recurrent, Transformer, load_tweets
from torch import nn

import polyfed as pf
from polyfed.algorithms import FLHAGHN
from polyfed.cli.commands.options import recipes
from polyfed.comparison.statistics.mrmc import estimate_mean_over_clients, estimate_variance_components
from polyfed.core.evaluation.metrics import METRICS
from polyfed.data.sources.published.vision import FashionMNIST
from polyfed.simulation.experiment import build_experiment, load_participants
from polyfed.simulation.monitoring.progress import SilentProgress

SIZES = {
    "small": (4, 32),
    "medium": (8, 128),
    "large": (16, 400),
}  # channels of the first layer, width of the hidden ones
HEADS: dict[str, dict[str, Any]] = {
    "mlp": {"head": "mlp"},
    "factored": {"head": "factored"},
    "factored-16": {"head": "factored", "rank": 16},
    "light": {"head": "light"},
    "lowrank": {"head": "lowrank"},
}
RATES, ADAM_RATES, BETWEEN = (
    (0.01, 0.03, 0.1),
    (0.001, 0.003, 0.01),
    0.1**0.25,
)  # coarse rates; then those on either side of the best
FORM_RATE = 0.03
CLIENTS, TRAIN, VAL, TEST = 6, 200, 50, 250
TUNING_SEEDS, SEEDS, ROUNDS = (0, 1, 2), tuple(range(10)), 20


def network(channels, hidden, *, deep, wide):
    layers = [nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(2 * channels, 2 * channels, 3, padding=1), nn.ReLU()] if deep else []
    layers += [nn.Flatten(), nn.Linear(98 * channels, hidden), nn.ReLU()]
    layers += [nn.Linear(hidden, hidden), nn.ReLU()] if wide else []
    return nn.Sequential(*layers, nn.Linear(hidden, 10))


TEXT_NETWORKS = (Transformer, partial(Recurrent, nn.LSTM), Convolutional)
TEXT_WIDTHS, TEXT_SIZES = (16, 24), [1000, 100, 500]
BATCHES = {
    "digits": {"batch_size": 16, "local_epochs": 2}, "quickstart": {"batch_size": 16}, "heart": {"batch_size": 16},
    "text": {"rounds": 12, "batch_size": 32, "optimizer": "adam", "clip_norm": 1.0},
}  # fmt: skip


def of_recipe(name):
    """The clients of a shipped recipe, with validation examples for the choice of the rate."""
    config = recipes.load_recipe_configuration(name)
    if name == "heart":
        config["model"] = {"name": "mlp", "hidden": [16]}
    config["data"].pop("missing", None)  # as it was measured: with cholesterol of 0 as it stands in the table
    if name == "digits":
        config["data"] |= {"val_fraction": 0.1, "public_fraction": 0.0}
    else:
        config["data"]["partition"] = {"name": "natural", "column": "hospital"}
    return load_participants(build_experiment({**config, "algorithm": {"name": "flha_ghn"}, "baselines": []})).clients


def clients(path, size):
    pool = FashionMNIST(path).load().train
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))
    found = []
    for k in range(CLIENTS):
        own = order[k * (TRAIN + VAL + TEST) :][: TRAIN + VAL + TEST]
        train, val, test = (pool.select(rows) for rows in own.split([TRAIN, VAL, TEST]))
        kind = {"deep": bool(k & 1), "wide": bool(k & 2)}
        found.append(pf.Client(f"client-{k}", lambda kind=kind: network(*SIZES[size], **kind), train, test, val))
    return found


def text_clients(path):
    x, y = load_tweets(path)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    found = []
    for k, (build, width) in enumerate(product(TEXT_NETWORKS, TEXT_WIDTHS)):
        rows = order[k * sum(TEXT_SIZES) :][: sum(TEXT_SIZES)].split(TEXT_SIZES)
        train, val, test = ((x[own], y[own]) for own in rows)
        found.append(pf.Client(f"client-{k}", lambda build=build, width=width: build(width), train, test, val))
    return found


def trained(members, head, lr, seed, batches):
    start = time.process_time()
    rounds, training = batches.get("rounds", ROUNDS), {key: batches[key] for key in batches if key != "rounds"}
    method = FLHAGHN(**HEADS[head], lr=lr, schedule="cosine", **training)
    run = pf.federate(
        members, method, rounds=rounds, seed=seed, evaluate_every=rounds, workers=0, progress=SilentProgress()
    )  # fmt: skip
    seconds, last = time.process_time() - start, run.history[-1]
    outputs = {client.id: run.predictions(client.id).outputs for client in members}
    mean = run.table()[-1]
    record = {
        "lr": lr, "seed": seed, "accuracy": mean["accuracy"], "val_accuracy": mean["val_accuracy"],
        "generated_accuracy": mean["generated_accuracy"], "seconds": round(seconds, 1),
        "kib": last["bytes_down_total"] / len(members) / rounds / 2**10,
    }  # fmt: skip
    return record, outputs


def tune_and_run(members, head, batches, known, show):
    """The runs of the tuning, and of the chosen rate by seed, with the outputs of the latter."""
    runs = {}

    def validation(lr):
        scores = []
        for seed in TUNING_SEEDS:
            if (lr, seed) not in runs:
                runs[lr, seed] = attempt(members, head, lr, seed, batches)
            scores.append(runs[lr, seed][0]["val_accuracy"])
        return statistics.mean(scores)

    rates = {float(lr): score for lr, score in known.items()} or {
        lr: validation(lr) for lr in (ADAM_RATES if "optimizer" in batches else RATES)
    }
    for _ in range(0 if known else 2):  # a second time, where the best is then at an edge
        best = max(rates, key=rates.__getitem__)
        rates |= {
            lr: validation(lr)
            for lr in (float(f"{best * BETWEEN:.2g}"), float(f"{best / BETWEEN:.2g}"))
            if not near(lr, rates)
        }
    rate = max(rates, key=rates.__getitem__)
    show(f"  {head}: validation " + ", ".join(f"{lr:g} {score:.3f}" for lr, score in sorted(rates.items())))
    final = [runs.get((rate, seed)) or attempt(members, head, rate, seed, batches) for seed in SEEDS]
    show(f"  {head}, lr {rate}: " + " ".join(f"{run['accuracy']:.3f}" for run, _ in final))
    return rates, [run for run, _ in final], [outputs for _, outputs in final]


def compare_forms(members, forms, batches):
    """Means over the seeds of the tuning, by form."""
    means = {}
    for form in forms:
        HEADS[form] = {
            "head": "factored",
            **dict(zip(("rank", "latent", "hidden"), map(int, form.split("-")), strict=True)),
        }
        runs = [attempt(members, form, FORM_RATE, seed, batches)[0] for seed in TUNING_SEEDS]
        keys = ("accuracy", "val_accuracy", "kib")
        means[form] = {key: round(statistics.mean(run[key] for run in runs), 3) for key in keys}
        print(form, means[form], flush=True)
    return means


def near(lr, rates):
    """Whether a rate was tried, up to rounding."""
    return any(abs(lr / other - 1) < 0.1 for other in rates)


def attempt(members, head, lr, seed, batches):
    """A run and its outputs; one that diverges has no accuracy."""
    try:
        return trained(members, head, lr, seed, batches)
    except pf.ClientError as error:
        return {"lr": lr, "seed": seed, "accuracy": 0.0, "val_accuracy": 0.0, "failed": str(error)[:100]}, None


def difference(members, head, reference):
    """Of the mean over clients, in points: a head less the first one."""
    components = [
        estimate_variance_components(
            METRICS["accuracy"], [o[c.id] for o in head], [o[c.id] for o in reference], c.test.labels
        )
        for c in members
    ]
    mean = estimate_mean_over_clients([site for site in components if site is not None])
    return {key: round(100 * getattr(mean, key), 2) for key in ("value", "low", "high")}


def row(federation, head, runs, gap):
    scores = [100 * run["accuracy"] for run in runs]
    kib, seconds = runs[0]["kib"], statistics.mean(run["seconds"] for run in runs)
    shown = f"{gap['value']:+.1f} ({gap['low']:+.1f} to {gap['high']:+.1f})" if gap else ""
    return (
        f"| {federation} | `{head}` | {runs[0]['lr']:g} | {statistics.mean(scores):.1f} ± {statistics.stdev(scores):.1f} "
        f"| {shown} | {kib:.0f} | {seconds:.0f} |"
    )


def load_clients(federation, path):
    if federation == "text":
        return text_clients(path)
    return of_recipe(federation) if federation in BATCHES else clients(path, federation)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--federations", default="digits,small", help=f"of {', '.join([*BATCHES, *SIZES])}")
    parser.add_argument(
        "--heads", default="mlp,factored", help=f"of {', '.join(HEADS)}; others are compared with the first"
    )
    parser.add_argument("--forms", help="as 8-16-16: rank, latent entries and hidden units of factored heads")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results, lines = {}, []
    if Path(options.out).exists():
        results = json.loads(Path(options.out).read_text())["federations"]
    for federation in options.federations.split(","):
        members, batches = load_clients(federation, options.path), BATCHES.get(federation, {"batch_size": 50})
        if options.forms:
            results[federation] = compare_forms(members, options.forms.split(","), batches)
            Path(options.out).write_text(json.dumps({"rate": FORM_RATE, "federations": results}, indent=1) + "\n")
            continue
        known, results[federation], reference = results.get(federation, {}), {}, None
        for head in options.heads.split(","):
            rates, runs, outputs = tune_and_run(
                members, head, batches, known.get(head, {}).get("validation", {}), lambda text: print(text, flush=True)
            )
            gap = difference(members, outputs, reference) if reference else None
            reference = reference or outputs
            results[federation][head] = {"validation": rates, "runs": runs, "difference": gap}
            lines.append(row(federation, head, runs, gap))
            print(lines[-1], flush=True)
            settings = {
                "clients": CLIENTS,
                "train": TRAIN,
                "val": VAL,
                "test": TEST,
                "rounds": ROUNDS,
                "text": dict(zip(("train", "val", "test"), TEXT_SIZES, strict=True)),
            }
            Path(options.out).write_text(json.dumps({**settings, "federations": results}, indent=1) + "\n")
    print("\n| federation | head | lr | accuracy | less the first's | KiB each way | s |\n" + "|---" * 7 + "|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
