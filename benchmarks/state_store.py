"""How the states of many clients are best kept on disk: one SQLite file (what polyfed does), a file for each client, or
safetensors files of many clients.

    python benchmarks/state_store.py --out benchmarks/results/state_store.json              10^4, 10^5 and 10^6 clients
    python benchmarks/state_store.py --clients 10000 --rounds 3                              a quick look

A state is a head of 650 numbers in two tensors (2.6 kB). Measured for each way: writing all states once; then, a round,
reading the states of 100 clients drawn at random and writing them back so that they survive a loss of power; reading and
checking all of them once, as `resume` does; bytes on disk; the most memory that the process took. Medians over the rounds.
Each way runs in a new process. A file for each client is measured up to 10^5 clients. TMPDIR names the disk. Points of
`--out` stay unless they are measured again.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import random
import resource
import sqlite3
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from polyfed.core.io.atomic_files import flush_files_to_disk, write_file_atomically
from polyfed.core.serialization import deserialize_state, serialize_state
from polyfed.simulation.storage.checkpoints import state_store
from polyfed.simulation.storage.checkpoints.state_store import STORE_FILE, StateStore

COHORT, PER_SHARD, MOST_FILES = 100, 1_000, 100_000


def state(value):
    return {"weight": torch.full((10, 64), float(value)), "bias": torch.full((10,), float(value))}


def client_id(number):
    return f"client-{number:07d}"


class OneSQLiteFile:
    """The store of polyfed, as a run with a checkpoint after each round uses it; nothing stays in memory."""

    def __init__(self, folder):
        self.store, self.round = StateStore(folder / STORE_FILE), 0

    def write(self, numbers, value):
        states = ((client_id(number), state(value)) for number in numbers)
        kept = [self.round - 1, self.round] if self.round > 1 else [self.round]
        self.sums = self.store.write(self.round + 1, self.round, {"": states}, [], kept)
        self.round += 1

    def read(self, numbers):
        return [self.store.read("", client_id(number), self.round) for number in numbers]

    def check(self, number):
        self.store.check(self.round, self.sums)

    def close(self):
        self.store.close()


class FileForEachClient:
    """What polyfed did first: a safetensors file for each client, with its hash in a list."""

    def __init__(self, folder):
        self.folder, self.hashes = folder, {}

    def write(self, numbers, value):
        for number in numbers:
            data = serialize_state(state(value))
            self.hashes[number] = hashlib.sha256(data).hexdigest()
            (self.folder / client_id(number)).write_bytes(data)
        flush_files_to_disk([self.folder / client_id(number) for number in numbers])
        write_file_atomically(self.folder / "complete.json", json.dumps(self.hashes).encode())

    def read(self, numbers):
        return [deserialize_state((self.folder / client_id(number)).read_bytes()) for number in numbers]

    def check(self, number):
        for k in range(number):
            data = (self.folder / client_id(k)).read_bytes()
            assert hashlib.sha256(data).hexdigest() == self.hashes[k]

    def close(self):
        pass


class Shards:
    """Safetensors files of a thousand clients each: a round reads some tensors of many files, and writes these files."""

    def __init__(self, folder):
        self.folder = folder

    def path(self, shard):
        return self.folder / f"{shard}.safetensors"

    def write(self, numbers, value):
        by_shard = {}
        for number in numbers:
            by_shard.setdefault(number // PER_SHARD, []).append(number)
        for shard, members in by_shard.items():
            tensors = load_file(self.path(shard)) if self.path(shard).exists() else {}
            new = {f"{client_id(k)}/{name}": tensor for k in members for name, tensor in state(value).items()}
            save_file(tensors | new, self.path(shard))
        flush_files_to_disk([self.path(shard) for shard in by_shard])

    def read(self, numbers):
        states = []
        for number in numbers:
            with safe_open(self.path(number // PER_SHARD), "pt") as file:
                states.append({name: file.get_tensor(f"{client_id(number)}/{name}") for name in ("weight", "bias")})
        return states

    def check(self, number):
        for shard in range((number - 1) // PER_SHARD + 1):
            hashlib.sha256(self.path(shard).read_bytes()).hexdigest()

    def close(self):
        pass


WAYS = {"one SQLite file": OneSQLiteFile, "a file for each client": FileForEachClient, "files of 1,000": Shards}


def measure(way, number, rounds, pipe):
    state_store._CACHED_BYTES = 0
    draw, clock, found = random.Random(0), time.perf_counter, {"read": [], "write": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(WAYS[way](Path(folder))) as store,
    ):
        start = clock()
        store.write(range(number), 0)
        fill = clock() - start
        for k in range(1, rounds + 1):
            cohort = sorted(draw.sample(range(number), min(COHORT, number)))
            start = clock()
            states = store.read(cohort)
            found["read"].append(clock() - start)
            assert len(states) == len(cohort)
            start = clock()
            store.write(cohort, k)
            found["write"].append(clock() - start)
        assert all(float(one["bias"][0]) == rounds for one in store.read(cohort))
        start = clock()
        store.check(number)
        check = clock() - start
        store.close()
        size = sum(path.stat().st_size for path in Path(folder).rglob("*"))
    pipe.send(
        {
            "way": way,
            "clients": number,
            "seconds_fill": fill,
            "seconds_read_cohort": statistics.median(found["read"]),
            "seconds_write_cohort": statistics.median(found["write"]),
            "seconds_check": check,
            "bytes": size,
            "bytes_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[10**4, 10**5, 10**6])
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    points, context = [], multiprocessing.get_context("spawn")
    print("| way | clients | write all, s | read 100, ms | write 100, ms | check all, s | MB on disk | MB of memory |")
    print("|---|---|---|---|---|---|---|---|")
    for number in asked.clients:
        for way in WAYS:
            if way == "a file for each client" and number > MOST_FILES:
                continue
            ours, theirs = context.Pipe(duplex=False)
            child = context.Process(target=measure, args=(way, number, asked.rounds, theirs))
            child.start()
            theirs.close()
            points.append(p := ours.recv())
            child.join()
            print(
                f"| {way} | {number:,} | {p['seconds_fill']:.1f} | {1e3 * p['seconds_read_cohort']:.1f} | "
                f"{1e3 * p['seconds_write_cohort']:.1f} | {p['seconds_check']:.1f} | {p['bytes'] / 1e6:,.0f} | "
                f"{p['bytes_rss'] / 1e6:,.0f} |",
                flush=True,
            )
    if asked.out:
        earlier = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.is_file() else {}
        newest = {(point["way"], point["clients"]): point for point in [*earlier.get("points", []), *points]}
        machine = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version, "cores": os.cpu_count()}
        content = {**earlier, "points": list(newest.values()), **machine}
        asked.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
