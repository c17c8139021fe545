"""What a patient's privacy costs, and whether joining still pays: scores against ε for training alone and four methods.

    python benchmarks/privacy_cost.py run heart --work DIR
    python benchmarks/privacy_cost.py run fashion_mnist --path /usr/share/datasets/fashion-mnist --work DIR
    python benchmarks/privacy_cost.py page

heart: the four hospitals of UCI Heart Disease (920 patients), one perceptron, five folds. fashion_mnist: six
clients of 400 training images with labels in unequal mixtures, one perceptron, five seeds. All methods at each ε (none, 8, 3
and 1; δ = 1e-5, an example is the unit) are compared with training alone without privacy: a model that stays at its site
need not be private, so that this is what a site gives up. Every method's learning rate is searched over the same values on
validation examples; the clipping norm is 1. The search's runs are not counted in ε. Results: results/privacy_cost.json;
`page` prints the tables of docs/privacy/cost.md. Runs that are in DIR are not repeated.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import polyfed as pf
from polyfed.core.algorithm import Algorithm
from polyfed.data import Dirichlet, Split, make_clients
from polyfed.data.sources.published.vision import FashionMNIST

RESULTS = Path(__file__).parent / "results" / "privacy_cost.json"
RATES = [0.03, 0.1, 0.3, 1.0, ...]
METHODS = {
    "local": pf.algorithms.Local, "fedavg": pf.algorithms.FedAvg, "fedavg_ft": pf.algorithms.FedAvgFT,
    "flha_ghn": pf.algorithms.FLHAGHN, "pfedla": pf.algorithms.PFedLA,
}  # fmt: skip


def heart(path: str | None) -> tuple[list[pf.Client], dict[str, Any]]:
    """The hospitals as clients, and what a comparison of them gets."""
    sites = pf.data.heart(drop="ca", val_fraction=0.15)
    build = pf.models.ModelSpec("mlp", {"hidden": (16,)}, (sites.num_features,), sites.num_outputs)
    clients = sites.build_clients({part.id: build for part in sites.client_data})
    return clients, {"rounds": 10, "folds": 5, "metrics": ["auc", "accuracy"]}


def fashion_mnist(path: str | None) -> tuple[list[pf.Client], dict[str, Any]]:
    """Six clients with 400 images to train on, and what a comparison of them gets."""
    split = Split(clients=6, examples_per_client=400, test_fraction=0.4, val_fraction=0.1)
    data, _ = make_clients(FashionMNIST(path).load(), split, Dirichlet(1.0), seed=0)
    build = pf.models.ModelSpec("mlp", {"hidden": (64,)}, (1, 28, 28), 10)
    clients = [pf.Client(part.id, build, part.train, part.test, part.val) for part in data]
    return clients, {"rounds": 15, "seeds": 5, "metrics": ["accuracy"]}


FEDERATIONS = {"heart": heart, "fashion_mnist": fashion_mnist}


def run(name: str, path: str | None, work: Path) -> None:
    clients, settings = FEDERATIONS[name](path)
    methods: dict[str, Algorithm] = {}
    for epsilon in (None, 8.0, 3.0, 1.0):
        privacy = None if epsilon is None else pf.Privacy(target_epsilon=epsilon)
        for method, kind in METHODS.items():
            label = method if epsilon is None else f"{method}-{epsilon:g}"
            methods[label] = kind(lr=0.1, local_epochs=1, batch_size=32, privacy=privacy)
    comparison = pf.compare(
        clients, methods, out=work / name, tune={"lr": RATES}, references=False, evaluate_every=settings["rounds"],
        budget="steps", parallel=1, workers=0, quiet=True, **settings,
    )  # fmt: skip
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[name] = {
        label: {"lr": entry["fields"]["lr"]}
        | {key: entry["statistics"][key] for key in ("mean", "interval", "gain", "gain_interval")}
        for label, entry in comparison.results["methods"].items()
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print_page()


def print_page() -> None:
    for name, entries in json.loads(RESULTS.read_text()).items():
        print(f"\n{name}\n\n| ε | " + " | ".join(f"`{method}`" for method in METHODS) + " |\n" + "|---" * 6 + "|")
        for epsilon in ("none", "8", "3", "1"):
            labels = [method if epsilon == "none" else f"{method}-{epsilon}" for method in METHODS]
            print(f"| {epsilon} | " + " | ".join(show(entries[key]) if key in entries else "" for key in labels) + " |")


def show(entry: dict[str, Any]) -> str:
    if entry["gain"] is None:
        return f"{100 * entry['mean']:.1f}"
    low, high = entry["gain_interval"]
    return f"{100 * entry['mean']:.1f}: {100 * entry['gain']:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("run")
    measuring.add_argument("federation", choices=FEDERATIONS)
    measuring.add_argument("--path", help="the folder of Fashion-MNIST")
    measuring.add_argument("--work", type=Path, required=True)
    commands.add_parser("page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "page":
        print_page()
    else:
        run(options.federation, options.path, options.work)


if __name__ == "__main__":
    main()
