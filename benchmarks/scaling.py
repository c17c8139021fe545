"""What grows with the number of clients: the server's state, a round's bytes and seconds, checkpoints and memory.

    nice -n 5 python benchmarks/scaling.py --out benchmarks/results/scaling.json [--methods pfedla,fedhenn] [--plot docs/scaling.png]

N clients with 4 training images of 8×8 and a network of 2,410 weights, one local step. For each method and N two runs, each
in a process of its own that is ended when it takes too long or too much memory: "everyone" is round 1 with all N clients, and
"ten" goes on from its checkpoint with 10 clients a round, which is what a server has once all have taken part. Where
"everyone" does not end, "ten" begins anew ("cold"). Nobody is evaluated. docs/scaling.md tells what was found.
"""

import argparse
import json
import math
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import psutil
import torch

import polyfed as pf
from polyfed.data.examples import as_examples
from polyfed.federation import play
from polyfed.models import ModelSpec
from polyfed.rounds import Federation
from polyfed.runs import checkpoint
from polyfed.runs.directory import RunDirectory
from polyfed.runs.progress import Progress
from polyfed.runs.results import one_thread
from polyfed.settings import Settings

CLIENTS = (10, 100, 1_000, 10_000)
COHORT, ROUNDS = 10, 4  # clients and rounds of "ten"; the first round is not counted
SECONDS, BYTES = 90, 4 * 10**9  # a run's limits
POOL, WIDTH, IMAGE, CLASSES = 64, 32, 64, 10  # public examples, hidden units, numbers of an image, classes
TINY = {"weights": IMAGE * WIDTH + WIDTH + WIDTH * CLASSES + CLASSES, "layers": 2, "features": WIDTH, "pool": POOL}
CNN = {"weights": 582_026, "layers": 4, "features": 512, "pool": 5_000}  # cnn_582k of the papers; FedHeNN's L
STEP = {"local_steps": 1, "batch_size": 4}


@dataclass(frozen=True)
class Case:
    """A method: its name and fields; bytes of tensors in the server's state and bytes a round (down, up) for N clients, B
    of them in the round, a network n (see `TINY`); powers of N in these bytes and in the server's seconds (B fixed)."""

    name: str
    state: Callable[[int, dict], float]
    traffic: Callable[[int, int, dict], tuple[float, float]]
    power: int
    fields: dict[str, Any] = field(default_factory=dict)
    everyone_to: int = 10_000


def copies(n, b, net):
    return 4 * b * net["weights"], 4 * b * net["weights"]


def pfedla(hidden):
    def state(n, net):
        trunk = 100 + (100 * hidden + hidden) + 2 * (hidden**2 + hidden)
        return 4 * n * (net["weights"] + trunk + net["layers"] * n * (hidden + 1))

    return state


def pfedhn(dim):
    def state(n, net):
        entries = int(1 + n / 4) if dim is None else dim
        network = n * entries + (entries + 1) * 100 + 3 * (100**2 + 100) + net["weights"] * 101
        return 2 * 4 * network  # and as much momentum

    return state


def representations(rank):
    def state(n, net):
        return 4 * n * net["pool"] * (min(rank, net["features"]) if rank else net["features"])

    def traffic(n, b, net):
        width = min(rank, net["features"]) if rank else net["features"]
        target = min(rank, n * width) if rank else n * width
        return 4 * b * net["pool"] * (target + IMAGE), 4 * b * net["pool"] * width

    return state, traffic


def hypernetwork(numbers):
    return lambda n, net: 4 * numbers, lambda n, b, net: (4 * b * numbers, 4 * b * numbers)


BODY = IMAGE * WIDTH + WIDTH
_GHN, _FACTORED, _SUPERNET = hypernetwork(47_974), hypernetwork(23_870), hypernetwork(2_000)  # replaced when measured
CASES = {
    "fedavg": Case("fedavg", lambda n, net: 4 * net["weights"], copies, 0),
    "fedrep": Case("fedrep", lambda n, net: 4 * BODY, lambda n, b, net: (4 * b * BODY, 4 * b * BODY), 0),
    "pfedla": Case("pfedla", pfedla(100), copies, 2),
    "pfedla hidden=10": Case("pfedla", pfedla(10), copies, 2, {"hidden": 10}),
    "pfedhn": Case("pfedhn", pfedhn(None), copies, 2),
    "pfedhn embedding_dim=32": Case("pfedhn", pfedhn(32), copies, 1, {"embedding_dim": 32}),
    "fedfomo": Case(
        "fedfomo",
        lambda n, net: 4 * net["weights"] * (n + 1) + 8 * n * min(5, n - 1),
        lambda n, b, net: (4 * b * min(5, n - 1) * net["weights"], 4 * b * net["weights"]),
        1,
    ),
    "fedhenn": Case("fedhenn", *representations(None), 1, {"rad_size": POOL, "rad_batch": 16, "lr": 0.01}),
    "fedhenn rank=8": Case("fedhenn", *representations(8), 1, {"rad_size": POOL, "rad_batch": 16, "lr": 0.01, "rank": 8}),
    "flha_ghn": Case("flha_ghn", *_GHN, 0, everyone_to=1_000),
    "flha_ghn head=factored": Case("flha_ghn", *_FACTORED, 0, {"head": "factored"}, everyone_to=1_000),
    "ca_fedpnas": Case(
        "ca_fedpnas", *_SUPERNET, 0, {"channels": 4, "base_cells": 1, "personal_cells": 1}, everyone_to=100
    ),
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


@final
class Enough(Exception):
    """Ends the run before the last round, which would evaluate everyone; the round before is saved."""


@final
class Watch(Progress):
    """Notes when rounds end, and ends the run after so many."""

    def __init__(self, rounds):
        self.rounds, self.seen, self.times, self.peak = rounds, [], [], 0

    def start(self, title, rounds, done):
        self.times.append(time.perf_counter())

    def client(self, phase, done, total):
        pass

    def round(self, record):
        self.times.append(time.perf_counter())
        self.seen.append(record)
        if len(self.seen) == self.rounds:
            self.peak = peak_bytes()
            raise Enough

    def say(self, sentence):
        pass

    def stop(self):
        pass



def one_run(label, number, sample, folder, start):
    """Plays the rounds of one run: what was measured. `start` is the run directory to go on from, or None."""
    case = CASES[label]
    algorithm = pf.algorithms.get(case.name)(**{**STEP, **case.fields})
    clients, public = federation(number)
    began, baseline = time.perf_counter(), peak_bytes()
    watch = Watch(1 if sample == number and start is None else ROUNDS)
    options = {"rounds": 10**6, "sample": sample, "evaluate_every": 10**6, "checkpoint_every": 10**6, "engine": "inprocess",
               "workers": 0}  # fmt: skip
    try:
        if start is None:
            pf.federate(clients, algorithm, public=public, out=folder, progress=watch, **options)
        else:
            pool = as_examples(public, "public", labelled=False)
            everyone = Federation({c.id: c for c in clients}, algorithm, Settings(**options), pool)
            past, _ = checkpoint.load(Path(start) / "checkpoint")
            began = time.perf_counter()
            with one_thread():
                play(everyone, past, [], RunDirectory.create(folder), watch)
    except Enough:
        ended = time.perf_counter()
    (saved,) = Path(folder, "checkpoint").glob("round-*")
    sizes = {file.name: file.stat().st_size for file in saved.iterdir()}
    counted = watch.seen[1:] or watch.seen
    walls = [b - a for a, b in zip(watch.times, watch.times[1:], strict=False)][-len(counted) :]

    def middle(values):
        return float(f"{statistics.median(values):.4g}")

    return {
        "seconds_server": middle(r["seconds_server"] for r in counted),
        "seconds_clients": middle(r["seconds_clients"] for r in counted),
        "seconds_round": middle(walls),
        "seconds_beside": middle(w - r["seconds"] for w, r in zip(walls, counted, strict=True)),
        "seconds_setup": middle([watch.times[0] - began]),
        "seconds_checkpoint": middle([ended - watch.times[-1]]),
        "bytes_down": middle(r["bytes_down"] for r in counted),
        "bytes_up": middle(r["bytes_up"] for r in counted),
        "bytes_server_state": sizes["server.safetensors"],
        "bytes_private_states": sum(size for name, size in sizes.items() if name.startswith("client-")),
        "bytes_checkpoint": sum(sizes.values()),
        "rss_before": baseline,
        "rss_rounds": watch.peak,
        "rss_with_checkpoint": peak_bytes(),
    }


def in_child(*what):
    """The same in a forked process: what was measured, or {"stopped": why}."""
    context = multiprocessing.get_context("fork")  # packages are imported once; nothing else has run in this process
    ours, theirs = context.Pipe(duplex=False)

    def run():
        try:
            theirs.send(one_run(*what))
        except BaseException as error:
            theirs.send({"stopped": f"failed: {type(error).__name__}: {error}"[:300]})

    child = context.Process(target=run)
    child.start()
    began, peak, watched = time.monotonic(), 0, psutil.Process(child.pid)
    while not ours.poll(0.05):
        peak = max(peak, watched.memory_info().rss)
        reason = "memory" if peak > BYTES else "time" if time.monotonic() - began > SECONDS else None
        if reason:
            child.kill()
            child.join()
            return {"stopped": reason, "rss_seen": peak, "seconds": round(time.monotonic() - began)}
    found = ours.recv()
    child.join()
    return found


# -- all of them ---------------------------------------------------------------------------------------------------------


def measure(label, number, repeat, tell=print):
    """Points of one method and N."""
    points, case = [], CASES[label]

    def point(phase, found):
        points.append({"method": label, "clients": number, "phase": phase, **found})
        short = {k: v for k, v in found.items() if not k.startswith("rss")} | {"peak": found.get("rss_with_checkpoint")}
        tell(label, number, phase, json.dumps(short), flush=True)

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


def exponent(points, key, phases):
    """The power of N between the two largest N that were measured, and these."""
    values: dict[int, list[float]] = {}
    for p in points:
        if p["phase"] in phases and p.get(key):
            values.setdefault(p["clients"], []).append(p[key])
    known = sorted(values)[-2:]
    if len(known) < 2:
        return None
    low, high = (min(values[n]) for n in known)
    return {"from": known[0], "to": known[1], "power": round(math.log10(high / low) / math.log10(known[1] / known[0]), 2)}


def summary(points):
    """Powers of N, and what the formulas say of the same and of more clients."""
    found = {}
    for label, case in CASES.items():
        own = [p for p in points if p["method"] == label]
        if not own:
            continue
        ten = [p["phase"] for p in own if p["phase"].startswith("ten")]
        warm = ("ten",) if "ten" in ten and "fedpnas" not in label and "flha" not in label else ("ten", "ten, cold")
        powers = {
            key: exponent(own, key, phases)
            for key, phases in {
                "seconds_server": warm, "seconds_beside": warm, "bytes_down": warm, "bytes_server_state": warm,
                "bytes_private_states": warm, "seconds_checkpoint": warm,
            }.items()
        }  # fmt: skip
        powers["seconds_server, everyone"] = exponent(own, "seconds_server", ("everyone",))
        checks = [
            {"clients": p["clients"], "measured": p["bytes_server_state"],
             "formula": round(case.state(p["clients"], TINY))}
            for p in own if p["phase"] == "ten" and "bytes_server_state" in p
        ]  # fmt: skip
        ahead = {}
        for name, net in {"2,410 weights": TINY, "582k CNN": CNN}.items():
            for n in (1_000, 10_000, 100_000, 10_000_000):
                down, up = case.traffic(n, COHORT, net)
                ahead[f"{name}, {n}"] = {"bytes_server_state": case.state(n, net), "bytes_down": down, "bytes_up": up}
        found[label] = {"powers": powers, "state": checks, "computed": ahead}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="results of other methods in it are kept")
    parser.add_argument("--methods", default=",".join(CASES), help="labels, separated by commas")
    parser.add_argument("--clients", default=",".join(map(str, CLIENTS)))
    parser.add_argument("--repeat", type=int, default=2, help='of "ten"')
    given = parser.parse_args()
    points = json.loads(given.out.read_text())["points"] if given.out and given.out.exists() else []
    with tempfile.TemporaryDirectory() as folder:  # what is imported at first use is imported here, once
        for label in ("fedavg", "flha_ghn"):
            one_run(label, 2, 2, f"{folder}/{label}", None)
    for label in given.methods.split(","):
        for number in map(int, given.clients.split(",")):
            new = measure(label, number, given.repeat)
            points = [p for p in points if (p["method"], p["clients"]) != (label, number)] + new
            if given.out:
                content = {
                    "cores": os.cpu_count(), "busy": True, "limits": {"seconds": SECONDS, "rss_bytes": BYTES},
                    "cohort": COHORT, "network": TINY, "points": points, "summary": summary(points),
                }  # fmt: skip
                given.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
