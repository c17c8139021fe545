"""How many steps of local training a second: a bare loop, in process, the pool, many clients at once, and `auto`.

    python benchmarks/cohorts.py --out benchmarks/results/cohorts.json      about three minutes
    python benchmarks/cohorts.py --networks mlp cnn --clients 100 --pfl /tmp/pfl/bin/python

Networks: an MLP 64-64-32-10 and a CNN with 2 convolutions on 8×8 inputs, an LSTM on 25 tokens, all three at batch 8 with 5
local epochs on 100 examples (65 steps a client); the 582k CNN on 28×28 images at batch 32 with 1 epoch on 64 (2 steps).
Random data: only speed is measured. A round is FedAvg's training phase: tasks in, replies out.

Two rates: by the clock, and by processor seconds of all processes, which other programs' work stretches less. Engines take
turns, and the best of `--repeats` counts. Of rates that do not depend on the number of clients, since they are computed one
after the other, those above `--alone` clients are measured with so many.
"""

import argparse
import copy
import json
import os
import platform
import subprocess
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from workloads import cpu_name

import polyfed as pf
from polyfed.core.examples.examples import Examples
from polyfed.core.machine.threads import num_usable_cores
from polyfed.models import ModelSpec
from polyfed.simulation.engines.benchmark import MIN_CLIENTS, MIN_SPEEDUP, benchmark_engines
from polyfed.simulation.engines.cohort import CohortEngine
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.engines.pool import PoolEngine
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings


def mlp():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    )  # fmt: skip


SMALL = {"batch_size": 8, "local_epochs": 5}
NETWORKS = {  # network, form of an example, examples a client, options
    "mlp": (mlp, (64,), 100, SMALL),
    "cnn": (ModelSpec("cnn_small", {"channels": (8, 16), "hidden": 32}, (1, 8, 8), 10), (1, 8, 8), 100, SMALL),
    "cnn_small": (ModelSpec("cnn_small", {}, (1, 8, 8), 10), (1, 8, 8), 100, SMALL),
    "lstm": (
        ModelSpec("lstm", {"vocabulary": 500, "embedding": 16, "hidden": 32, "fc": 16}, (25,), 2), None, 100, SMALL,
    ),
    "cnn_582k": (ModelSpec("cnn_582k", {}, (1, 28, 28), 10), (1, 28, 28), 64, {"batch_size": 32, "local_epochs": 1}),
}  # fmt: skip
CPU = torch.device("cpu")


def clients_of(name, number):
    model, form, images, _ = NETWORKS[name]
    generator = torch.Generator().manual_seed(1)
    if form is None:
        x = torch.randint(1, 500, (number * images, 25), generator=generator)
    else:
        x = torch.randn(number * images, *form, generator=generator)
    y = torch.randint(0, 2 if form is None else 10, (number * images,), generator=generator)
    found = []
    for k in range(number):
        mine = Examples(x, y, index=torch.arange(k * images, (k + 1) * images))
        found.append(pf.Client(f"c{k:04}", model, mine, mine.select(torch.arange(8))))
    return found


class Bare:
    """The loop that one writes by hand, in the layout in which polyfed trains."""

    def __init__(self, method, people):
        self._method, self._people = method, people

    def run(self, tasks):
        made = self._people[0].model().to(memory_format=torch.channels_last)
        for client in self._people[: len(tasks)]:
            model = copy.deepcopy(made).train()
            optimizer = torch.optim.SGD(model.parameters(), lr=self._method.lr)
            for _ in range(self._method.local_epochs):
                for rows in torch.randperm(len(client.train)).split(self._method.batch_size):
                    x, y = client.train.batch(rows)
                    x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
            yield {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def close(self):
        pass


def seconds_of_processor(engine):
    """Of this process and of the engine's workers."""
    found = time.process_time()
    for pid in getattr(engine, "worker_pids", ()):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def rates_of_pfl(python, name, number, repeats):
    """Steps a second and steps a processor second."""
    script, source = Path(__file__).with_name("cohorts_pfl.py"), Path(pf.__file__).parents[1]
    found = subprocess.run(
        [python, script, name, str(number), "--rounds", str(repeats)], check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(source)},
    )  # fmt: skip
    return json.loads(found.stdout.splitlines()[-1])


def measured(name, number, repeats, alone, pfl=None):
    people = clients_of(name, number)
    method = pf.algorithms.FedAvg(lr=0.01, **NETWORKS[name][3])
    federation = Federation({c.id: c for c in people}, method, Settings(rounds=2))
    start, workers = federation.initial_checkpoint(), num_usable_cores()

    def tasks(ids):
        return [task for block in federation.build_task_blocks("local", ids, 1, start) for task in block]

    size = method.batch_size
    steps = method.local_epochs * -(-len(people[0].train) // size)
    few = people[:alone]
    engines = {
        "bare": (Bare(method, few), few),
        "inprocess": (InProcessEngine(method, few, CPU), few),
        "pool": (PoolEngine(method, few, CPU, workers), few),
        "cohort": (CohortEngine(method, people, CPU), people),
        "pool of cohorts": (PoolEngine(method, people, CPU, workers, uses_cohorts=True), people),
    }
    best = {engine: [float("inf"), float("inf")] for engine in engines}
    try:
        for repeat in range(repeats + 1):  # the first one builds what is kept, by few clients, and does not count
            for key, (engine, who) in engines.items():
                given = tasks([client.id for client in (who if repeat else who[: max(alone, 4 * workers)])])
                clock, processor = time.perf_counter(), seconds_of_processor(engine)
                for result in engine.run(given):
                    assert getattr(result, "failure", None) is None, result.failure
                took = [time.perf_counter() - clock, seconds_of_processor(engine) - processor]
                if repeat:
                    best[key] = [min(old, new / (len(who) * steps)) for old, new in zip(best[key], took, strict=True)]
    finally:
        for engine, _ in engines.values():
            engine.close()
    by_clock, by_processor = ({key: round(1 / took[i]) for key, took in best.items()} for i in range(2))
    if pfl is not None:
        by_clock["pfl-research"], by_processor["pfl-research"] = rates_of_pfl(pfl, name, min(alone, number), repeats)
    choice = benchmark_engines(Settings(engine="auto"), method, people, CPU, tasks)
    chosen = "pool of cohorts" if choice.uses_cohorts else "pool"
    return {
        "network": name,
        "clients": number,
        "steps a client": steps,
        "steps a second": by_clock,
        "steps a processor second": by_processor,
        "cohort over inprocess": {
            "clock": round(best["inprocess"][0] / best["cohort"][0], 2),
            "processor": round(best["inprocess"][1] / best["cohort"][1], 2),
        },
        "auto takes": chosen,
        "auto measured": next(iter((choice.gains or {}).values()), None),
        "auto over best other": {
            "clock": round(min(took[0] for key, took in best.items() if key != chosen) / best[chosen][0], 2),
            "processor": round(min(took[1] for key, took in best.items() if key != chosen) / best[chosen][1], 2),
        },
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--clients", nargs="*", type=int, default=[10, 100, 1000])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--alone", type=int, default=20)
    parser.add_argument("--pfl", metavar="PYTHON", help="a Python with pfl-research, see cohorts_pfl.py")
    parser.add_argument("--out", type=Path, help="rows of other networks or numbers of clients in this file stay")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name in asked.networks:
        for number in asked.clients:
            if name == "cnn_582k" and number > 100:
                continue  # gigabytes of images, and nothing to be gained on a CPU
            row = measured(name, number, asked.repeats, asked.alone, asked.pfl)
            found.append({**row, "load": round(os.getloadavg()[0], 1), "cpu": cpu_name()})
            print(json.dumps(found[-1]), flush=True)
            if asked.out:
                write(asked.out, found)


def write(out, found):
    """Adds rows to the results."""
    before = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
    rows = {(row["network"], row["clients"]): row for row in [*before, *found]}
    facts = {
        "cores": num_usable_cores(),
        "python": platform.python_version(), "torch": torch.__version__,
        "auto": {"at least clients": MIN_CLIENTS, "gain": MIN_SPEEDUP},
        "pfl-research": "0.6.0" if all("pfl-research" in row["steps a second"] for row in rows.values()) else
        "0.6.0 in those rows that have it; it was not installed for the others",
        "rows": [rows[key] for key in sorted(rows, key=lambda key: (list(NETWORKS).index(key[0]), key[1]))],
    }  # fmt: skip
    out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
