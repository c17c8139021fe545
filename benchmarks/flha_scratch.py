"""Training from scratch in FLHA-GHN's Table 6 and Fig. 7: its rate, and the column "from scratch".

    python benchmarks/flha_scratch.py rates --data.path /usr/share/datasets/fashion-mnist
    python benchmarks/flha_scratch.py table6 --rate 0.03 --data.path ... [--seeds 0,1,2]

The unseen clients of recipes flha_table6_fig3 and flha_fig7 at scale cpu train for 20 epochs from the run's common draw, as
in `polyfed warmstart`; that needs no trained hypernetwork. `rates` takes seeds that the tables do not have.
Written to benchmarks/results/flha_scratch.json: accuracy on an unseen client's own test images in percent, by seed.
`table6` gives the column at one rate, by architecture and seed.
"""

import argparse
import json
from pathlib import Path

from polyfed.cli.commands.options import configuration_parser
from polyfed.cli.commands.options.recipes import read_recipe
from polyfed.core.nn.module_cache import initial_state
from polyfed.simulation.experiment import build_experiment, load_participants
from polyfed.simulation.results.unseen_clients import training_curve

FILE = Path(__file__).parent / "results" / "flha_scratch.json"
PLACES = [*(("flha_table6_fig3", f"without-arch{k}") for k in range(4)), ("flha_fig7", None)]
RATES, SEEDS, EPOCHS = (0.03, 0.1, 0.01, 0.3), (100, 101), 20


def scratch(recipe, variant, rate, seed, path):
    """Accuracy of the unseen client at the end of training from scratch, in percent."""
    words = ["--data.name", "fashion_mnist", "--data.path", path, "--seed", str(seed)]
    experiment = build_experiment(
        configuration_parser.parse_configuration(
            words, read_recipe(recipe).configuration("cpu", variant), "flha_scratch.py"
        )
    )
    (client,) = load_participants(experiment).unseen
    start = initial_state(client.model, seed)
    curve = training_curve(client, start, experiment.algorithm, EPOCHS, lr=rate, seed=seed, device="cpu")
    return 100 * curve[-1]["accuracy"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rates", "table6"])
    parser.add_argument("--data.path", dest="path", required=True, metavar="FOLDER")
    parser.add_argument("--rate", type=float)
    parser.add_argument("--seeds", default="0,1,2")
    given = parser.parse_args()
    rates, seeds = ((given.rate,), map(int, given.seeds.split(","))) if given.what == "table6" else (RATES, SEEDS)
    found = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for seed in seeds:
        for recipe, variant in PLACES:
            for rate in rates:
                place = found.setdefault(variant or recipe, {}).setdefault(str(rate), {})
                if str(seed) not in place:
                    place[str(seed)] = scratch(recipe, variant, rate, seed, given.path)
                    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                print(variant or recipe, rate, seed, place[str(seed)], flush=True)


if __name__ == "__main__":
    main()
