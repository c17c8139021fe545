"""Eq. 2 of FedPNAS through all operations (`gradient="full"`) and through the one that was drawn ("chosen", the default): is
CA-FedPNAS ahead of CA-FedDSNAS with it?

    R=benchmarks/results/search_gradient.json
    python benchmarks/search_gradient.py cosine --out $R
    python benchmarks/search_gradient.py rates digits --out $R
    python benchmarks/search_gradient.py table digits --out $R
    F=/usr/share/datasets/fashion-mnist
    python benchmarks/search_gradient.py rates fashion-mnist --rounds 12 --images 200 --path $F --out $R
    python benchmarks/search_gradient.py table fashion-mnist --rounds 12 --images 200 --path $F --out $R
    python benchmarks/search_gradient.py show --out $R

Clients and methods are those of recipe `fedpnas_effects` at scale `cpu` (five clients, images turned by 0 and ±90 degrees),
with `--rounds`, the same for all forms. `rates` tries learning rates of the samplers for both methods with seeds that the
table does not have, and `table` takes for a form the one with the best mean over both; without such trials it takes
polyfed's default. "adapted" is after the epoch of adaptation that CA-FedPNAS has, for CA-FedDSNAS, too; "server" is what
came from the server. `cosine` compares the two gradients on the same draws, and counts evaluations of operations. What
`--out` has is not repeated. Differences have 95 % intervals of Student's t over seeds, in pairs.
"""

import argparse
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from papers_cells import interval
from torch import nn

import polyfed as pf
from polyfed.algorithms import CAFedDSNAS, FedDSNAS, registry_name
from polyfed.cli.commands.options import configuration_parser, recipes
from polyfed.core.seeds import temporary_rng_seed
from polyfed.simulation import experiment as experiments
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.results.architecture_transfer import score_after_adaptation

METHODS, FORMS = ("ca_feddsnas", "ca_fedpnas"), ("chosen", "full")
RATES, RATE_SEEDS, SEEDS = (0.01, 0.05, 0.2), (100, 101), (3, 4, 5, 6, 7, 8)
DEFAULT = 0.05  # polyfed's, of "chosen"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["cosine", "rates", "table", "show"])
    parser.add_argument("data", nargs="?", default="digits", choices=["digits", "fashion-mnist"])
    parser.add_argument("--path", help="folder of Fashion-MNIST")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--images", type=int, help="training images a client of Fashion-MNIST, 400 if not given")
    parser.add_argument("--forms", default="chosen,full", help="one of them, or both")
    parser.add_argument("--seeds", help="numbers with commas between them, instead of the stage's")
    parser.add_argument("--out", default="benchmarks/results/search_gradient.json")
    arguments = parser.parse_args()
    out = Path(arguments.out)
    results = json.loads(out.read_text()) if out.exists() else {}
    if arguments.stage == "cosine":
        results["cosine"] = {name: compare_gradients(name) for name in ("feddsnas", "ca_feddsnas")}
        write(results, out)
        print(json.dumps(results["cosine"], indent=1))
    elif arguments.stage != "show":
        train_all(arguments, results, out)
    show(results)


def train_all(arguments, results, out):
    """Runs what is missing, seed by seed, so that a stop leaves whole seeds."""
    rates = arguments.stage == "rates"
    seeds = map(int, arguments.seeds.split(",")) if arguments.seeds else RATE_SEEDS if rates else SEEDS
    images = f", {arguments.images} images" if arguments.images else ""
    setting = f"{arguments.data}{images}, {arguments.rounds} rounds"
    for seed in seeds:
        experiment = experiment_of(arguments, seed)
        participants = experiments.load_participants(experiment)
        for form in arguments.forms.split(","):
            for rate in RATES if rates else (best_rate(results.get("rates", {}).get(setting, {}), form),):
                for method in (experiment.baselines["ca_feddsnas"], experiment.algorithm):
                    key = f"{registry_name(method)}, {form}, {rate:g}"
                    runs = results.setdefault(arguments.stage, {}).setdefault(setting, {}).setdefault(key, {})
                    if str(seed) not in runs:
                        searching = replace(method, gradient=form, sampler_lr=rate)
                        runs[str(seed)] = score(searching, participants.clients, arguments.rounds, seed)
                        write(results, out)
                        print(setting, key, seed, runs[str(seed)], flush=True)


def best_rate(runs, form):
    """That with the best mean accuracy of both methods over the seeds that all rates have; polyfed's default where none was
    tried."""
    tried = {key: seeds for key, seeds in runs.items() if f", {form}, " in key}
    if not tried:
        return DEFAULT
    common = set.intersection(*(set(seeds) for seeds in tried.values()))
    means = {}
    for key, seeds in tried.items():
        means.setdefault(float(key.rpartition(", ")[2]), []).extend(seeds[s]["adapted"] for s in common)
    return max(means, key=lambda rate: fmean(means[rate]))


def experiment_of(arguments, seed):
    """The recipe's, with this seed."""
    words = ["--data.path", arguments.path] if arguments.path else []
    words += ["--data.examples_per_client", str(arguments.images)] if arguments.images else []
    config = recipes.read_recipe("fedpnas_effects").configuration("cpu", arguments.data)
    return experiments.build_experiment(
        configuration_parser.parse_configuration([*words, "--seed", str(seed)], config, "search_gradient")
    )


def score(method, clients, rounds, seed):
    """Mean accuracy over clients after the last round: of what the method evaluates, and after an epoch of adaptation."""
    run = pf.federate(
        clients, method, rounds=rounds, seed=seed, workers=0, evaluate_every=rounds, progress=SilentProgress()
    )
    accuracy = run.history[-1]["summary"]["accuracy"]["mean"]
    if method.finetune_epochs:
        return {"adapted": accuracy, "server": run.history[-1]["summary"]["server_accuracy"]["mean"]}
    return {
        "adapted": fmean(score_after_adaptation(run, client.id)["accuracy"] for client in clients),
        "server": accuracy,
    }


def compare_gradients(name, draws=60):
    """Of the samplers' gradients on the same draws: the cosine of "chosen" and "full" draw by draw and of their means, the
    ratio of their lengths, and how many operations an edge evaluates in each form, forward and for the gradient."""
    method = {"feddsnas": FedDSNAS, "ca_feddsnas": CAFedDSNAS}[name](channels=8)
    with temporary_rng_seed(0):
        network, x, y = method.plan(1, 10)().train(), torch.randn(48, 1, 8, 8), torch.arange(48) % 10
    samplers = [p for n, p in network.named_parameters() if ".samplers." in n]
    calls, slopes = Counter(), {form: [] for form in FORMS}
    edges = [edge for cell, _ in network.cells() for edge in cell.operations]
    for operation in (o for edge in edges for o in edge.values()):
        operation.register_forward_hook(lambda *_: calls.update([network.gradient]))
    for form in FORMS:
        network.gradient = form
        for draw in range(draws):
            with temporary_rng_seed(draw):
                loss = nn.functional.cross_entropy(network(x), y)
            found = torch.autograd.grad(loss, samplers, allow_unused=True)
            flat = [torch.zeros_like(p) if g is None else g for p, g in zip(samplers, found, strict=True)]
            slopes[form].append(torch.cat([g.flatten().double() for g in flat]))
    one, other = (torch.stack(slopes[form]) for form in FORMS)
    cosine = nn.functional.cosine_similarity
    return {
        "cosine of a draw": round(cosine(one, other).mean().item(), 3),
        f"cosine of the means of {draws} draws": round(cosine(one.mean(0), other.mean(0), dim=0).item(), 3),
        "length of chosen over full": round((one.norm(dim=1) / other.norm(dim=1)).mean().item(), 3),
        "evaluations an edge": {form: round(calls[form] / draws / len(edges), 2) for form in FORMS},
    }


def show(results):
    """Means, and differences in pairs of seeds."""
    for stage in ("rates", "table"):
        for setting, runs in results.get(stage, {}).items():
            print(f"\n{stage}: {setting}")
            for key, seeds in runs.items():
                scores = {name: [100 * seeds[s][name] for s in seeds] for name in ("adapted", "server")}
                print(f"| {key} | " + " | ".join(f"{fmean(v):.1f}" for v in scores.values()) + f" | {len(seeds)} |")
            if stage == "table":
                show_differences(runs)


def show_differences(runs):
    """CA-FedPNAS less CA-FedDSNAS in every pair of forms, CA-FedDSNAS adapted, too, and as it came from the server."""
    of = {key.rpartition(", ")[0]: seeds for key, seeds in runs.items()}
    pairs = [("ca_fedpnas, " + a, "ca_feddsnas, " + b) for a in FORMS for b in FORMS]
    pairs += [(f"{m}, full", f"{m}, chosen") for m in METHODS]
    for one, other in pairs:
        common = sorted(of.get(one, {}).keys() & of.get(other, {}).keys(), key=int)
        for rival in ("adapted", "server") if "ca_fedpnas" in one and "ca_feddsnas" in other else ("adapted",):
            differences = [100 * (of[one][s]["adapted"] - of[other][s][rival]) for s in common]
            if len(differences) > 1:
                found = interval(differences)
                bounds = f"{found['low']:+.1f} to {found['high']:+.1f}, {len(common)} seeds"
                print(f"{one} less {other} ({rival}): {found['gain']:+.1f} ({bounds})")


def write(results, out):
    """Puts the file in place as a whole."""
    part = out.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(out)


if __name__ == "__main__":
    main()
