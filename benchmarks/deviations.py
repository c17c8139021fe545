"""What polyfed's readings of the four papers change: each option that differs from a paper, or that a paper leaves open,
against polyfed's default, on scikit-learn's digits.

    R=benchmarks/results/deviations.json
    python benchmarks/deviations.py pfedla,pfedla_norm,pfedla_similarity,fedhenn,flha,fedpnas --out $R
    python benchmarks/deviations.py show --out $R

Settings: `pfedla` ten clients of four classes and 40 training images, 40 rounds of 5 epochs; `pfedla_norm` the same with
BatchNorm; `pfedla_similarity` the same with weights from the similarity of models, as in Fig. 1; `fedhenn` and `flha` the
eight clients and four networks of recipe `digits`, 20 and 30 rounds; `fedpnas` the five clients of recipe `fedpnas_effects`,
images turned by 0 and ±90 degrees, 12 rounds. A seed draws data, networks and minibatches, and is the same for all forms of
a setting. Accuracy after the last round, mean over clients, in percent; differences from the default have Student's
interval of 95 % over paired seeds. Rates are those of the setting for all forms, unless a form names one. What `--out` has
is not repeated. The default of `fedpnas` is that of `search_gradient.py`, the same runs.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from first_heads import difference

import polyfed as pf
from polyfed.algorithms import FLHAGHN
from polyfed.cli.commands.options import configuration_parser, recipes
from polyfed.simulation import experiment as experiments
from polyfed.simulation.monitoring.progress import SilentProgress

DIGITS = [
    "--data.name", "digits", "--data.test-fraction", "0.6", "--data.partition.balanced", "true",
    "--model.name", "cnn_small",
]  # fmt: skip
SETTINGS = {  # recipe, scale, variant, options of the command line, rounds, seeds, changes of the method for all forms
    "pfedla": ("pfedla_table1", "cpu", "fashion_mnist-10", DIGITS, 40, range(6), {}),
    "pfedla_norm": ("pfedla_table1", "cpu", "fashion_mnist-10", [*DIGITS, "--model.norm", "batch"], 40, range(6), {}),
    "pfedla_similarity": ("pfedla_table1", "cpu", "fashion_mnist-10", DIGITS, 40, range(6), {"weights": "similarity"}),
    "fedhenn": ("digits", None, None, [], 20, range(6), {}),
    "flha": ("digits", None, None, [], 30, range(6), {}),
    "fedpnas": ("fedpnas_effects", "cpu", "digits", [], 12, range(3, 9), {}),
}
FORMS = {
    "pfedla": {
        "default": {},
        "softmax": {"normalise": "softmax"},
        "softmax, hn_lr 10": {"normalise": "softmax", "hn_lr": 10.0},
    },
    "pfedla_norm": {"default": {}, "buffers recompute": {"buffers": "recompute"}},
    "pfedla_similarity": {"default": {}, "cosine": {"similarity": "cosine"}},
    "fedhenn": {
        "default": {},
        "f(t) constant": {"growth": "constant"},
        "f(t) linear": {"growth": "linear"},
        "no momentum, twice the rate": {"momentum": 0.0, "lr": 0.1},
        "batches of 10": {"batch_size": 10},
        "RAD half of the pool": {"rad_size": 135},
        "representations reduced to 16": {"rank": 16},
    },
    "flha": {
        "default": {},
        "buffers recompute": {"buffers": "recompute"},
        "no clipping, rate 0.03": {"clip_norm": None, "lr": 0.03},
        "no clipping, rate 0.01": {"clip_norm": None, "lr": 0.01},
        "no refinement": {"refine_epochs": 0},
    },
    "fedpnas": {
        "default": {},
        "temperature to 0.01": {"temperature_end": 0.01},
        "mean of edges": {"join": "mean"},
        "one rate": {"sampler_lr": None},
        "running statistics": {"buffers": "local"},
    },
}
FLHA = {"lr": 0.1, "batch_size": 16}  # the rate of heads.py


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", help="with commas between them, or show")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "deviations.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    if arguments.settings != "show":
        for setting in arguments.settings.split(","):
            train_all(setting, results, arguments.out)
    show(results)


def train_all(setting, results, out):
    """Runs what is missing, seed by seed, so that a stop leaves whole seeds."""
    recipe, scale, variant, words, rounds, seeds, common = SETTINGS[setting]
    for seed in seeds:
        config = (
            {key: value for key, value in recipes.load_recipe_configuration(recipe).items() if key != "description"}
            if scale is None
            else recipes.read_recipe(recipe).configuration(scale, variant)
        )
        experiment = experiments.build_experiment(
            configuration_parser.parse_configuration([*words, "--seed", str(seed)], config, "deviations")
        )
        participants = experiments.load_participants(experiment)
        method = FLHAGHN(**FLHA) if setting == "flha" else experiment.algorithm
        for form, changes in FORMS[setting].items():
            runs = results.setdefault(setting, {}).setdefault(form, {})
            if str(seed) not in runs:
                runs[str(seed)] = measure(replace(method, **common, **changes), participants, rounds, seed)
                out.write_text(json.dumps(results, indent=1) + "\n")
                print(setting, form, seed, runs[str(seed)], flush=True)


def measure(method, participants, rounds, seed):
    """Accuracy, or None if training diverges."""
    try:
        run = pf.federate(
            participants.clients, method, rounds=rounds, seed=seed, public=participants.public, evaluate_every=rounds,
            workers=0, progress=SilentProgress(),
        )  # fmt: skip
    except pf.ClientError as error:
        print(error)
        return None
    return round(run.table()[-1]["accuracy"], 5)


def show(results):
    for setting, forms in results.items():
        for form, runs in forms.items():
            seeds = [seed for seed in runs if None not in (runs[seed], forms["default"].get(seed))]
            theirs, ours = ([forms[one][seed] for seed in seeds] for one in ("default", form))
            gap = difference(theirs, ours) if form != "default" and len(seeds) > 1 else ""
            mean = f"{100 * statistics.fmean(ours):.1f} %" if ours else "diverged"
            print(f"{setting}, {form}: {mean} ({len(seeds)} of {len(runs)} seeds) {gap}")


if __name__ == "__main__":
    main()
