"""What grows with the number of clients: the server's state, a round's bytes and seconds, checkpoints and memory.

    nice -n 5 python benchmarks/scaling.py --out benchmarks/results/scaling.json [--methods pfedla,fedhenn] [--clients 300]

N clients with 4 training images of 8×8 and a network of 2,410 weights, one local step. For each method and N two kinds of
runs, each in a process of its own that is ended when it takes too long or too much memory: "everyone" is round 1 with all N
clients; "ten" goes on from its checkpoint with 10 a round, which is what a server has once all have taken part. Where
"everyone" is not run or does not end, "ten" begins anew ("cold"). Nobody is evaluated. See docs/scaling.md.

Where the folder of temporary files is a disk, `seconds_checkpoint` is mostly its waiting for each client's file; the results
are from TMPDIR=/dev/shm.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import re
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import psutil
import torch

import polyfed as pf
from polyfed.core.examples.as_examples import as_examples
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.models import ModelSpec
from polyfed.simulation.federate import run_remaining_rounds
from polyfed.simulation.monitoring.progress import Progress
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.checkpoints import checkpoint
from polyfed.simulation.storage.checkpoints.state_store import STORE_FILE
from polyfed.simulation.storage.directory import RunDirectory

CLIENTS = (10, 100, 1_000, 10_000)
COHORT, ROUNDS = 10, 4  # clients and rounds of "ten"; the first round is not counted
SECONDS, BYTES = 90, 4 * 10**9  # of processor time (a busy machine) and memory: a run's limits
POOL, WIDTH, IMAGE, CLASSES = 64, 32, 64, 10  # public examples, hidden units, numbers of an image, classes
TINY = {"weights": IMAGE * WIDTH + WIDTH + WIDTH * CLASSES + CLASSES, "body": IMAGE * WIDTH + WIDTH, "layers": 2,
        "features": WIDTH, "pool": POOL, "image": IMAGE, "ghn": 69_494, "factored": 34_326, "supernet": 25_634}  # fmt: skip
"""A network's weights, those below its head, layers, width of its representation; public examples and numbers in one;
numbers in the GHN, with factored heads too, and in FedPNAS's supernet (here the small one of `CASES`)."""
CNN = {"weights": 582_026, "body": 576_896, "layers": 4, "features": 512, "pool": 5_000, "image": 784, "ghn": 9_924_868,
       "factored": 670_644, "supernet": 194_000}  # fmt: skip
"""The same of cnn_582k, FedHeNN's L = 5,000 (paper) and the supernet by its defaults."""
STEP = {"local_steps": 1, "batch_size": 4}


@dataclass(frozen=True)
class Case:
    """A method.

    Attributes: `name` and `fields` of it; bytes of tensors in the server's `state` with N clients that have all taken part,
    and a network (see `TINY`); `traffic`, bytes down and up of a round with B of them; `power` of N in the server's
    seconds for B clients; up to which N "everyone" is run; whether the state `fills` only as clients take part.
    """

    name: str
    state: Callable[[int, dict], float]
    traffic: Callable[[int, int, dict], tuple[float, float]]
    power: int
    everyone_to: int = 1_000
    fills: bool = False
    fields: dict[str, Any] = field(default_factory=dict)


def copies(part="weights"):
    """B copies of something, down and up."""
    return lambda n, b, net: (4 * b * net[part], 4 * b * net[part])


def once(part="weights"):
    """One copy, whatever N is."""
    return lambda n, net: 4 * net[part]


def pfedla(hidden):
    """A model, an embedding, a trunk and a head with N outputs a layer, for each client."""

    def state(n, net):
        trunk = 100 + (100 * hidden + hidden) + 2 * (hidden**2 + hidden)
        return 4 * n * (net["weights"] + trunk + net["layers"] * n * (hidden + 1))

    return state


def pfedla_neighbours(k, hidden):
    """For each client a model, an embedding, rows and biases, and k positions; one trunk."""

    def state(n, net):
        neighbours = min(k, n)
        trunk = (100 * hidden + hidden) + 2 * (hidden**2 + hidden)
        return 4 * (n * (net["weights"] + 100 + net["layers"] * (hidden + neighbours)) + trunk) + 8 * n * neighbours

    return state


def pfedhn(dim):
    """Embeddings, a trunk, heads with 100 inputs for each weight; as much momentum; how many steps an embedding has had."""

    def state(n, net):
        entries = int(1 + n / 4) if dim is None else dim
        return 8 * (n * (entries + 1) + (entries + 1) * 100 + 3 * (100**2 + 100) + net["weights"] * 101)

    return state


def asked(n, b, net):
    """FedFomo: five models down, one and a request up."""
    return 4 * b * min(5, n - 1) * net["weights"], b * (4 * net["weights"] + 8 * min(5, n - 1))


def fedhenn(rank):
    """State and traffic: A_j of the whole pool by each client; K̄'s factor has the columns of all. X are 64 examples."""

    def width(net):
        return min(rank or net["features"], net["features"])

    def state(n, net):
        return 4 * net["pool"] * (n * width(net) + net["image"])

    def traffic(n, b, net):
        columns = min(rank or n * width(net), n * width(net))
        down = 4 * b * net["pool"] * (columns + net["image"]) + 4 * b * net["pool"]  # int32 rows, and the pool itself
        return down, 4 * b * net["pool"] * width(net)

    return state, traffic


def sketched(rank):
    """State: the pool, and one matrix."""
    return lambda n, net: 4 * net["pool"] * (net["image"] + rank)


ALIGNING = {"rad_size": POOL, "rad_batch": 16, "lr": 0.01}
SMALL = {"channels": 4, "base_cells": 1, "personal_cells": 1}
CASES = {
    "fedavg": Case("fedavg", once(), copies(), 0, 10_000),
    "fedrep": Case("fedrep", once("body"), copies("body"), 0),
    "pfedla": Case("pfedla", pfedla(100), copies(), 2),
    "pfedla hidden=10": Case("pfedla", pfedla(10), copies(), 2, fields={"hidden": 10}),
    "pfedla neighbours=8": Case("pfedla", pfedla_neighbours(8, 100), copies(), 0, fields={"neighbours": 8}),
    "pfedhn": Case("pfedhn", pfedhn(None), copies(), 1, 10_000, fills=True),
    "pfedhn embedding_dim=32": Case("pfedhn", pfedhn(32), copies(), 0, fills=True, fields={"embedding_dim": 32}),
    "fedfomo": Case(
        "fedfomo", lambda n, net: 4 * net["weights"] * (n + 1) + 8 * n * min(5, n - 1), asked, 1, fills=True
    ),
    "fedhenn": Case("fedhenn", *fedhenn(None), 1, 3_000, True, ALIGNING),
    "fedhenn rank=8": Case("fedhenn", *fedhenn(8), 1, 1_000, True, {**ALIGNING, "rank": 8}),
    "fedhenn rank=8 sketch": Case(
        "fedhenn", sketched(8), fedhenn(8)[1], 0, 10_000, True, {**ALIGNING, "rank": 8, "sketch": True}
    ),
    "flha_ghn": Case("flha_ghn", once("ghn"), copies("ghn"), 0, fields={"head": "auto"}),
    "flha_ghn head=factored": Case("flha_ghn", once("factored"), copies("factored"), 0, fields={"head": "factored"}),
    "ca_fedpnas": Case("ca_fedpnas", once("supernet"), copies("supernet"), 0, 10, fields=SMALL),
}


# -- one run, in a process of its own ------------------------------------------------------------------------------------


def peak_bytes():
    """This process's peak resident memory. (`ru_maxrss` would count what the parent had.)"""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def federation(number):
    """Clients that share one store, and public examples."""
    generator = torch.Generator().manual_seed(0)
    spec = ModelSpec("mlp", {"hidden": [WIDTH]}, (1, 8, 8), CLASSES)
    x, y = torch.randn(6 * number, 1, 8, 8, generator=generator), torch.arange(6 * number) % CLASSES
    y[::6] = CLASSES - 1  # FedPNAS takes the number of classes from the labels
    rows = [slice(6 * k, 6 * k + 6) for k in range(number)]
    clients = [pf.Client(f"c{k:07d}", spec, (x[r][:4], y[r][:4]), (x[r][4:], y[r][4:])) for k, r in enumerate(rows)]
    return clients, torch.randn(POOL, 1, 8, 8, generator=generator)


def middle(values):
    """The median with four digits."""
    return float(f"{statistics.median(values):.4g}")


@final
class EnoughError(Exception):
    """Ends the run before the last round, which would evaluate everyone; the round before is saved."""


@final
class Watch(Progress):
    """Notes when rounds end, tells of it, and ends the run after so many."""

    def __init__(self, rounds, tell):
        self.rounds, self.tell, self.seen, self.times = rounds, tell, [], []

    def start(self, title, rounds, rounds_done):
        self.times.append(time.perf_counter())

    def show_clients_done(self, phase, clients_done, total):
        pass

    def finish_round(self, record):
        self.times.append(time.perf_counter())
        self.seen.append(record)
        self.tell(self.found())
        if len(self.seen) == self.rounds:
            raise EnoughError

    def found(self):
        """Medians over the rounds, the first left out where there are several."""
        counted = self.seen[1:] or self.seen
        walls = [after - before for before, after in itertools.pairwise(self.times)][-len(counted) :]
        beside = [wall - record["seconds"] for wall, record in zip(walls, counted, strict=True)]
        keys = ("seconds_server", "seconds_clients", "bytes_down", "bytes_up")
        known = {key: middle(record[key] for record in counted) for key in keys}
        whole = {"seconds_round": middle(walls), "seconds_beside": middle(beside)}
        return {"rounds": len(self.seen), **known, **whole, "rss_rounds": peak_bytes()}

    def say(self, sentence):
        pass

    def stop(self):
        pass


def one_run(label, number, sample, folder, start, tell):
    """Plays the rounds of one run: what was measured. `start` is the run directory to go on from, or None."""
    case = CASES[label]
    algorithm = pf.algorithms.get(case.name)(**{**STEP, **case.fields})
    clients, public = federation(number)
    began, baseline = time.perf_counter(), peak_bytes()
    watch = Watch(1 if sample == number and start is None else ROUNDS, tell)
    options = {"rounds": 10**6, "clients_per_round": sample, "evaluate_every": 10**6,
               "checkpoint_every": 10**6, "engine": "inprocess",
               "workers": 0}  # fmt: skip
    try:
        if start is None:
            pf.federate(clients, algorithm, public=public, out=folder, progress=watch, **options)
        else:
            pool = as_examples(public, "public", labelled=False)
            everyone = Federation({c.id: c for c in clients}, algorithm, Settings(**options), pool)
            past, _ = checkpoint.load_newest_checkpoint(Path(start) / "checkpoint")
            began = time.perf_counter()
            with exclusive_single_torch_thread_with_grad():
                run_remaining_rounds(everyone, past, [], RunDirectory.create(folder), watch)
    except EnoughError:
        ended = time.perf_counter()
    (saved,) = Path(folder, "checkpoint").glob("round-*")
    sizes = {file.name: file.stat().st_size for file in saved.iterdir()}
    parts = bytes_by_part(Path(folder, "checkpoint", STORE_FILE))
    return {
        **watch.found(),
        "seconds_setup": middle([watch.times[0] - began]),
        "seconds_checkpoint": middle([ended - watch.times[-1]]),
        "bytes_server_state": sizes["server.safetensors"] + sum(size for part, size in parts.items() if part),
        "bytes_private_states": parts.get("", 0),
        "bytes_checkpoint": sum(sizes.values()) + sum(parts.values()),
        "rss_before": baseline,
        "rss_with_checkpoint": peak_bytes(),
    }


def bytes_by_part(store):
    """Bytes of the states in the store: the private ones under "", and those of each group of the server's state."""
    query = (
        "SELECT part, sum(length(data)) FROM states JOIN pieces ON id >= first AND id < first + pieces "
        "WHERE until IS NULL GROUP BY part"
    )
    with closing(sqlite3.connect(store)) as connection:
        return dict(connection.execute(query))


def in_child(*what):
    """The same in a forked process: what was measured, or {"stopped": why}."""
    context = multiprocessing.get_context("fork")  # packages are imported once; nothing else has run in this process
    ours, theirs = context.Pipe(duplex=False)

    def run():
        try:
            theirs.send(one_run(*what, theirs.send))
        except BaseException as error:
            theirs.send({"stopped": f"{type(error).__name__}: {error}"[:300]})
        theirs.send(None)

    child = context.Process(target=run)
    child.start()
    began, found, watched = time.monotonic(), {}, psutil.Process(child.pid)
    while True:
        if ours.poll(0.05):
            new = ours.recv()
            if new is None:
                child.join()
                return found
            found |= new
            continue
        rss, cpu = watched.memory_info().rss, sum(watched.cpu_times()[:2])
        late = cpu > SECONDS or time.monotonic() - began > 4 * SECONDS
        if rss > BYTES or late:
            child.kill()
            child.join()
            return {**found, "stopped": "memory" if rss > BYTES else "time", "rss_seen": rss, "cpu_seconds": round(cpu)}


# -- all of them ---------------------------------------------------------------------------------------------------------


def measure(label, number, repeat, tell=print):
    """Points of one method and N."""
    points, case = [], CASES[label]

    def point(phase, found):
        points.append({"method": label, "clients": number, "phase": phase, **found})
        tell(label, number, phase, json.dumps(found), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        start = None
        if number <= case.everyone_to:
            point("everyone", found := in_child(label, number, number, f"{folder}/everyone", None))
            start = None if "stopped" in found else f"{folder}/everyone"
        for k in range(repeat):
            phase = "ten" if start else "ten, cold"
            point(phase, found := in_child(label, number, min(COHORT, number), f"{folder}/ten-{k}", start))
            if "stopped" in found:
                break
    return points


def largest(points, key):
    """N -> the smaller of the repeated values, for points that have one."""
    values: dict[int, float] = {}
    for p in points:
        if p.get(key):
            values[p["clients"]] = min(p[key], values.get(p["clients"], math.inf))
    return dict(sorted(values.items()))


def power(values):
    """The power of N between the two largest N."""
    if len(values) < 2:
        return None
    (few, low), (many, high) = list(values.items())[-2:]
    return {"from": few, "to": many, "power": round(math.log(high / low) / math.log(many / few), 2)}


GROWING = ("seconds_server", "seconds_beside", "bytes_down", "bytes_server_state", "bytes_private_states")


def summary(points):
    """Powers of N as measured, the formulas beside what was measured, and what they say of more clients."""
    found = {}
    for label, case in CASES.items():
        own = [p for p in points if p["method"] == label]
        filled = [p for p in own if p["phase"] == "ten" or (p["phase"] == "ten, cold" and not case.fills)]
        powers = {key: power(largest(filled, key)) for key in GROWING}
        everyone = [p for p in own if p["phase"] == "everyone"]
        powers["seconds_server, everyone"] = power(largest(everyone, "seconds_server"))
        checks = [
            {"clients": n, "measured": size, "formula": round(case.state(n, TINY))}
            for n, size in largest([p for p in own if p["phase"] == "ten"], "bytes_server_state").items()
        ]
        server = list(largest(filled, "seconds_server").items())[-1:]
        computed = {}
        for n in (1_000, 10_000, 100_000, 10_000_000):
            seconds = {} if not server else {"seconds_server": server[0][1] * (n / server[0][0]) ** case.power}
            for name, net in {"2,410 weights": TINY, "582k CNN": CNN}.items():
                down, up = case.traffic(n, COHORT, net)
                sizes = {"bytes_server_state": case.state(n, net), "bytes_down": down, "bytes_up": up}
                computed[f"{name}, {n}"] = {**sizes, **(seconds if net is TINY else {})}
        found[label] = {"powers": powers, "state": checks, "computed": computed}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="results of other methods in it are kept")
    parser.add_argument(
        "--methods", default=",".join(CASES), help="labels, separated by commas; none writes the summary again"
    )
    parser.add_argument("--clients", default=",".join(map(str, CLIENTS)))
    parser.add_argument("--repeat", type=int, default=2, help='of "ten"')
    given = parser.parse_args()
    points = json.loads(given.out.read_text())["points"] if given.out and given.out.exists() else []
    with tempfile.TemporaryDirectory() as folder:  # what is imported at first use is imported here, once
        for label in ("fedavg", "flha_ghn"):
            one_run(label, 2, 2, f"{folder}/{label}", None, lambda found: None)
    for label in filter(None, given.methods.split(",")):
        for number in map(int, given.clients.split(",")):
            new = measure(label, number, given.repeat)
            points = [p for p in points if (p["method"], p["clients"]) != (label, number)] + new
            write(given.out, points)
    write(given.out, points)


def write(path, points):
    """Points and what follows from them, if there is a place for it."""
    if path:
        order = {label: place for place, label in enumerate(CASES)}
        points = sorted(points, key=lambda p: (order[p["method"]], p["clients"]))
        limits = {"cpu_seconds": SECONDS, "seconds": 4 * SECONDS, "rss_bytes": BYTES}
        parts = json.loads(path.read_text()).get("parts", {}) if path.exists() else {}  # scaling_parts.py's
        content = {"cores": os.cpu_count(), "limits": limits, "cohort": COHORT, "network": TINY, "points": points,
                   "summary": summary(points), "parts": parts}  # fmt: skip
        path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
