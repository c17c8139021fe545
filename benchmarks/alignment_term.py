"""FedHeNN's term at every minibatch against the paper's once an epoch, and what each computes.

    python benchmarks/alignment_term.py --path FOLDER_OF_CIFAR10 [--seeds 0,1,2,3,4,5] [--kinds homo,hetero]
        [--out benchmarks/results/alignment_term.json]

The setting is `fedhenn_table2` at scale cpu (20 clients of 100 images of CIFAR-10, two classes each), with 30 of its 50
rounds. Once an epoch the term is of the whole RAD, 500 images; at every minibatch, four an epoch, of 64 of them. The forms
of one seed have the same clients, networks, minibatches and RADs. Recorded are accuracy on the clients' own test images,
mean over clients, of personal and global models; the mean CKA of any two clients' networks on 256 test images that nobody
trains or is aligned on; and the floating-point operations of one client's round, counted by torch.

What is in the file already is not computed again.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from papers_cells import interval
from torch.utils.flop_counter import FlopCounterMode

import polyfed as pf
from polyfed.alignment import compute_representations
from polyfed.alignment.pairwise_cka import mean_pairwise_cka
from polyfed.cli.commands.options import configuration_parser, recipes
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.simulation import experiment as experiments
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings

ROUNDS = 30
FORMS = {
    "minibatch": {"term": "minibatch"},
    "epoch": {"term": "epoch", "rad_batch": 0},
    "no term": {"eta0": 0.0},
}
MEASURED = ("minibatch", "epoch")
SCORES = ("accuracy", "global", "cohort", "cka")


def setting(kind, path, seed):
    config = recipes.read_recipe("fedhenn_table2").configuration("cpu", f"cifar10-100-2-{kind}")
    words = ["--data.path", path, "--data.global-test", "256", "--rounds", str(ROUNDS), "--evaluate-every", str(ROUNDS),
             "--checkpoint-every", str(ROUNDS), "--seed", str(seed)]  # fmt: skip
    experiment = experiments.build_experiment(configuration_parser.parse_configuration(words, config, "alignment_term"))
    return experiment, experiments.load_participants(experiment)


def measure(method, experiment, people):
    settings = experiment.settings
    run = pf.federate(
        people.clients, method, rounds=ROUNDS, seed=settings.seed, clients_per_round=settings.clients_per_round,
        evaluate_every=ROUNDS, public=people.public, workers=0, progress=SilentProgress(),
    )  # fmt: skip
    last, unseen = run.table()[-1], people.clients[0].global_test
    parts = [compute_representations(run.model(client.id), unseen) for client in people.clients]
    return {
        "accuracy": last["accuracy"], "global": last.get("server_accuracy"), "cohort": last.get("cohort_accuracy"),
        "cka": mean_pairwise_cka(parts),
    }  # fmt: skip


def operations(method, people):
    """Of each of the first five clients' second rounds, which have a term, by client."""
    clients = {client.id: client for client in people.clients}
    at = Federation(clients, method, Settings(rounds=2, seed=0), people.public)
    state, counted = method.server_init(at.server_context()), {}
    with exclusive_single_torch_thread_with_grad():
        for number in (1, 2):
            replies = {}
            for client in people.clients[:5]:
                down = method.dispatch(state, at.client_info(client.id, number))
                with FlopCounterMode(display=False) as counter:
                    replies[client.id], _ = method.local_update(down, method.client_init(client, 0), client, number)
                counted[client.id] = counter.get_total_flops()
            state = method.aggregate(state, replies, at.server_context())
    return counted


def compared(found):
    """How far once an epoch is ahead, by seed with Student's interval."""
    gains = {}
    for kind, forms in found["kinds"].items():
        one, other = (forms[form]["runs"] for form in ("epoch", "minibatch"))
        seeds = [seed for seed in one if seed in other]
        gains[kind] = {}
        for score in SCORES:
            pairs = [(one[seed][score], other[seed][score]) for seed in seeds]
            if seeds and None not in pairs[0]:
                gains[kind][score] = interval([a - b for a, b in pairs])
    return gains


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True)
    parser.add_argument("--seeds", default="0,1,2,3,4,5")
    parser.add_argument("--kinds", default="homo,hetero")
    parser.add_argument("--out", default="benchmarks/results/alignment_term.json")
    given = parser.parse_args()
    file = Path(given.out)
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"rounds": ROUNDS, "kinds": {}}
    for seed in given.seeds.split(","):
        for kind in given.kinds.split(","):
            forms, ready = found["kinds"].setdefault(kind, {}), None
            for form, changes in FORMS.items():
                known = forms.setdefault(form, {"fields": changes, "runs": {}})
                if ("operations" in known or seed != "0") and (seed in known["runs"] or form not in MEASURED):
                    continue
                ready = ready or setting(kind, given.path, seed)
                method = replace(ready[0].algorithm, **changes)
                if "operations" not in known:
                    known["operations"] = operations(method, ready[1])
                if form in MEASURED:
                    known["runs"][seed] = measure(method, *ready)
                    print(kind, form, seed, known["runs"][seed], flush=True)
                found["epoch_less_minibatch"] = compared(found) if set(MEASURED) <= set(forms) else {}
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
