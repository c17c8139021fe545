"""What whole runs at the papers' own length would take on one core: `paper_scale.py` runs them, this one measures a little
of their first rounds.

    python benchmarks/paper_scale_cost.py fedhenn fedpnas flha --data cifar10=FOLDER

The result is `results/paper_scale_cost.json`; docs/papers.md has it.

Local training is measured alone, in seconds of the processor and on one thread: of a client of each architecture, with few
steps (`STEPS`) in round 2, after a round that is not counted. Of two such measurements the difference is the cost of a step,
and what is left that of a client and round (messages, for FedHeNN the representations of the pool). FedHeNN is measured by
epochs, with and without its term, since that is computed once an epoch. What evaluations and the server take comes on top:
for FedPNAS an epoch of adaptation of each client every 25 rounds, for FLHA-GHN one of refinement every round.

Hours are for the method's own number of clients a round, local steps and rounds. Other work on the machine makes them
larger: caches are shared.
"""

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path

from paper_scale import PLANS, experiment_of
from workloads import cpu_name

from polyfed.algorithms import registry_name
from polyfed.cli.commands.run.run_command import load_checked_participants
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.seeds import derive_seed
from polyfed.simulation.rounds.federation import Federation

STEPS = {"fedpnas": (2, 8), "flha": (1, 2)}  # operations are drawn, so that few steps of a search differ
METHODS = {"flha": ("flha_ghn", "local")}  # fedavg_kd trains a teacher as long as local trains, and then students


def clients_to_time(people):
    """The first client of each architecture."""
    first = {}
    for client in people.clients:
        first.setdefault(client.model, client)
    return list(first.values())


def seconds_of(method, people, settings, clients):
    """Mean processor seconds of a client's local update in round 2."""
    federation = Federation({c.id: c for c in people.clients}, method, settings, people.public)
    state = method.server_init(federation.server_context())
    states = {c.id: method.client_init(c, settings.seed) for c in clients}
    for number in (1, 2):
        replies, taken = {}, 0.0
        for client in clients:
            message = method.dispatch(state, federation.client_info(client.id, number))
            begin = time.process_time()
            replies[client.id], states[client.id] = method.local_update(
                message, states[client.id], client, derive_seed(settings.seed, number, client.id)
            )
            taken += time.process_time() - begin
        state = method.aggregate(state, replies, federation.server_context())
    return taken / len(clients)


def steps_of_a_round(method, clients):
    """Local steps of a client in a round, mean over clients."""
    if method.local_steps:
        return method.local_steps
    return method.local_epochs * sum(math.ceil(len(c.train) / method.batch_size) for c in clients) / len(clients)


def cost(name, experiment, people, label):
    """Seconds of a client: for a step or an epoch, for the rest of a round, and hours of all rounds."""
    method = experiment.baselines.get(label, experiment.algorithm)
    settings, clients = experiment.settings, clients_to_time(people)

    def timed(one, among=clients):
        return seconds_of(one, people, settings, among)

    if name == "fedhenn":
        alone = replace(experiment.baselines["local"], local_epochs=1)
        epoch = timed(replace(alone, local_epochs=3)) / 3
        unit, units, fixed = "epoch", method.local_epochs, 0.0
        if label == "fedhenn":
            plain, aligned = (timed(replace(method, local_epochs=1, eta0=eta)) for eta in (0.0, method.eta0))
            fixed, epoch = max(0.0, plain - epoch), aligned - plain + epoch
    else:
        few, more = STEPS[name]
        low, high = (timed(replace(method, local_steps=n)) for n in (few, more))
        unit, units, epoch = "step", steps_of_a_round(method, people.clients), (high - low) / (more - few)
        fixed = max(0.0, low - few * epoch)
    number = (
        len(people.clients) * settings.clients_per_round
        if settings.clients_per_round <= 1
        else settings.clients_per_round
    )
    hours = settings.rounds * number * (fixed + units * epoch) / 3600
    return {
        "unit": unit, "seconds_a_unit": round(epoch, 3), "units_a_round": round(units, 1),
        "seconds_besides": round(fixed, 2), "clients_a_round": round(number), "rounds": settings.rounds,
        "hours": round(hours, 1),
    }  # fmt: skip


OUT = Path(__file__).parent / "results" / "paper_scale_cost.json"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=["fedhenn", "fedpnas", "flha"])
    parser.add_argument("--data", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--only", metavar="METHODS", help="with commas between")
    parser.add_argument("--out", type=Path, default=OUT, help="what is there is not repeated")
    given = parser.parse_args()
    folders, out = dict(part.split("=", 1) for part in given.data), given.out
    found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"processor": cpu_name()}
    for name in given.names:
        experiment = experiment_of(PLANS[name], folders["cifar10"], 0)
        people = load_checked_participants(experiment)
        known = {registry_name(experiment.algorithm), *experiment.baselines}
        for label in given.only.split(",") if given.only else METHODS.get(name, PLANS[name].methods):
            if label in known and label not in found.setdefault(name, {}):
                with exclusive_single_torch_thread_with_grad():
                    found[name][label] = cost(name, experiment, people, label)
                out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                print(name, label, found[name][label], flush=True)


if __name__ == "__main__":
    main()
