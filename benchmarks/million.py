"""Measures what a federation of 10^2 to 10^6 clients costs when its clients are made as they are drawn.

For each method and number of clients, in a process of its own: seconds until round 1, seconds of a round (the median after
the first, without evaluation; of the clock, and of the processor, which other programs hardly change), peak memory, bytes
of the checkpoints and seconds of saving one. Clients are those of `SyntheticClients`, 100 a round; 100 are evaluated at
the end. With `--source parquet` they are rows of a file, eight for each user; with `--source tweets` eight tweets of
Sentiment140 for each user, drawn at random. With `--resume-at` a run is also killed (kill -9) in the middle and resumed,
and its predictions are compared bit for bit. Rows of `--out` stay unless they are measured again.

Where other programs compute too, also the processor's seconds vary, by up to a half. `--pair` therefore measures two sizes
in turns in one process, three runs of the small one around two of the large one, and takes the fastest round of each.

    python benchmarks/million.py --clients 1e2,1e3,1e4,1e5,1e6 --resume-at 1e6 --out benchmarks/results/million.json
    python benchmarks/million.py --source tweets --tweets ../shared/data/sentiment140-100k --methods fedavg,fedrep
    python benchmarks/million.py --methods fedavg --clients 1e6 --rounds 3
    python benchmarks/million.py --pair 1e3,1e6 --methods fedavg,pfedhn --rounds 10 --out benchmarks/results/million.json
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "fedrep": ("fedrep", {}),
    "flha_ghn": ("flha_ghn", {"head": "factored"}),
    "ca_fedpnas": (
        "ca_fedpnas",
        {
            "channels": 4,
            "base_cells": 1,
            "base_nodes": 1,
            "personal_nodes": 1,
            "finetune_epochs": 0,
            "operations": ("sep_conv_3", "skip"),
            "personal_operations": ("sep_conv_3", "skip"),
        },
    ),
    "pfedhn": ("pfedhn", {"embedding_dim": 32}),
    "pfedhn plain": ("pfedhn", {"embedding_dim": 32, "hn_momentum": 0.0, "hn_weight_decay": 0.0}),
    "pfedla": ("pfedla", {"neighbours": 10, "hidden": 10}),
    "fedhenn": ("fedhenn", {"rank": 8, "sketch": True, "rad_size": 64}),
}
"""What is measured: label -> name and fields. One whose fields this version does not have is left out, and said."""
LIMITS = {"start_seconds": 20.0, "peak_mb": 2000.0, "growth_of_round": 1.2}
COHORT, EVALUATED, PUBLIC = 100, 100, 64
TWEETS_EACH, TOKENS, LENGTH = 8, 2_000, 25
IMAGES = {"ca_fedpnas"}  # brings networks for images


def build_method(label: str) -> Any:
    """Builds a method of `METHODS`; raises a `TypeError` if this version does not have its fields."""
    from polyfed.algorithms import get

    name, fields = METHODS[label]
    return get(name)(lr=0.05, local_steps=2, batch_size=16, **fields)


def build_mlp(features: int, classes: int) -> Any:
    """Builds the network of the clients: one hidden layer of 32 units."""
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, classes))


def build_source(label: str, number: int, kind: str, folder: Path) -> Any:
    """Builds a source of `number` clients: "synthetic", "parquet" with eight rows each, dealt at random, or "tweets"."""
    from polyfed.data import ParquetClients, SyntheticClients

    if kind == "tweets":
        return TweetUsers(number, Path((folder / "tweets.txt").read_text()))
    if kind == "parquet":
        return ParquetClients(
            write_parquet(number, folder), client_column="user", inputs=[f"x{k}" for k in range(16)], target="label",
            model=partial(build_mlp, 16, 4), cache_dir=folder,
        )  # fmt: skip
    shape = (1, 8, 8) if label in IMAGES else (16,)
    model = None if label in IMAGES else partial(build_mlp, 16, 4)
    return SyntheticClients(number, shape=shape, examples=(16, 48), model=model)


def build_token_mean() -> Any:
    """Builds a network that classifies tweets by the mean of their tokens' vectors."""
    from torch import nn

    return nn.Sequential(nn.EmbeddingBag(TOKENS, 16), nn.Linear(16, 2))


class TweetUsers:
    """A source of `number` users who wrote eight tweets each, drawn at random from Sentiment140, with replacement."""

    def __init__(self, number: int, path: Path) -> None:
        from polyfed.data.sources.published.tweets import Sentiment140

        self.ids = [f"u{place:07d}" for place in range(number)]
        self.train = Sentiment140(path=str(path), vocabulary_size=TOKENS, length=LENGTH).load().train

    def manifest(self) -> Any:
        """Returns the numbers of training tweets: all but two of each user's."""
        from polyfed.data import SourceManifest

        return SourceManifest([TWEETS_EACH - 2] * len(self.ids), fingerprint=f"{len(self.train)} tweets")

    def client(self, id: str) -> Any:
        """Makes a user with six tweets to train on and two to test."""
        import numpy as np

        import polyfed as pf

        rows = np.random.default_rng(int(id[1:])).integers(0, len(self.train), TWEETS_EACH)
        x, y = self.train.x[rows], self.train.labels[rows]
        return pf.Client(id, build_token_mean, (x[:-2], y[:-2]), (x[-2:], y[-2:]))


def write_parquet(number: int, folder: Path) -> Path:
    """Writes the rows of `number` clients in random order to a file, unless it is there; returns its path."""
    import numpy as np
    import pyarrow
    import pyarrow.parquet

    file = folder / f"rows-{number}.parquet"
    if file.is_file():
        return file
    generator = np.random.default_rng(0)
    writer = None
    for rows in np.array_split(generator.permutation(8 * number), max(1, 8 * number // 500_000)):
        label = generator.integers(0, 4, len(rows))
        columns = {"user": np.char.mod("u%07d", rows // 8), "label": label}
        noise = generator.normal(0, 1, (len(rows), 16)).astype(np.float32)
        columns |= {f"x{k}": noise[:, k] + (label == k % 4) for k in range(16)}
        part = pyarrow.table(columns)
        writer = pyarrow.parquet.ParquetWriter(file, part.schema) if writer is None else writer
        writer.write_table(part)
    assert writer is not None
    writer.close()
    return file


def measure(label: str, number: int, rounds: int, kind: str, resumes: bool, folder: Path) -> dict[str, Any]:
    """Runs a method over `number` clients in this process, and returns what it cost."""
    import torch

    import polyfed as pf

    torch.set_num_threads(1)
    method = build_method(label)
    begun = time.perf_counter()
    source = build_source(label, number, kind, folder)
    made = time.perf_counter() - begun
    clock: list[float] = []
    processor: list[float] = []

    class Clock(pf.Callback):
        def on_start(self, earlier_records: Any) -> None:
            clock.append(time.perf_counter())
            processor.append(time.process_time())

        def on_round(self, record: Any) -> None:
            clock.append(time.perf_counter())
            processor.append(time.process_time())

    cohort, saving = min(COHORT, number), time_saves()
    public = draw_public(method, source)
    words: dict[str, Any] = {
        "rounds": rounds, "clients_per_round": cohort, "evaluate_clients": min(EVALUATED, number), "evaluate_every": rounds,
        "checkpoint_every": rounds, "workers": 0, "public": public, "quiet": True, "seed": 1,
    }  # fmt: skip
    out = folder / f"run-{label}-{number}"
    shutil.rmtree(out, ignore_errors=True)
    started = time.perf_counter()
    run = pf.federate(source, method, out=out, callbacks=[Clock()], **words)
    lengths, cpu_lengths = ([after - before for before, after in pairwise(times)] for times in (clock, processor))
    found = {
        "method": label, "clients": number, "rounds": rounds, "source": kind,
        "source_seconds": made, "start_seconds": clock[0] - started,
        "round_seconds": statistics.median(lengths[1:-1] or lengths), "evaluated_round_seconds": lengths[-1],
        "round_cpu_seconds": statistics.median(cpu_lengths[1:-1] or cpu_lengths),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "save_seconds": max(saving), **measure_checkpoint(out),
    }  # fmt: skip
    if resumes:
        found["resumes_to_same_bits"] = resumes_to_same_bits(label, number, kind, folder, run, words)
    shutil.rmtree(out, ignore_errors=True)
    return found


def measure_pair(label: str, numbers: list[int], rounds: int, kind: str, folder: Path) -> dict[str, Any]:
    """Runs a method over two numbers of clients in turns in this process; returns the fastest round of each, in seconds of
    the processor, without the first and the last, and the ratio."""
    import torch

    import polyfed as pf

    torch.set_num_threads(1)
    method = build_method(label)
    sources = {number: build_source(label, number, kind, folder) for number in numbers}
    lengths: dict[int, list[float]] = {number: [] for number in numbers}
    for number in [numbers[0], numbers[1]] * 2 + numbers[:1]:
        clock: list[float] = []
        pf.federate(
            sources[number], method, rounds=rounds, clients_per_round=min(COHORT, number), evaluate_clients=1,
            evaluate_every=rounds, checkpoint_every=rounds, workers=0, quiet=True, seed=1,
            public=draw_public(method, sources[number]), callbacks=[partial(add_processor_time, clock)],
        )  # fmt: skip
        lengths[number] += [after - before for before, after in pairwise(clock)][:-1]
    fastest = [min(lengths[number]) for number in numbers]
    return {
        "method": label, "source": kind, "clients": numbers, "rounds": rounds, "fastest_round_cpu_seconds": fastest,
        "ratio": fastest[1] / fastest[0],
    }  # fmt: skip


def add_processor_time(times: list[float], record: Mapping[str, Any]) -> None:
    """Adds the seconds of the processor so far to `times`, after a round."""
    times.append(time.process_time())


def draw_public(method: Any, source: Any) -> Any:
    """Draws public examples for a method that needs them; None for the others."""
    import torch

    if "public_data" not in method.requires:
        return None
    if isinstance(source, TweetUsers):
        return source.train.x[:PUBLIC]
    return torch.randn((PUBLIC, 16), generator=torch.Generator().manual_seed(0))


def time_saves() -> list[float]:
    """Has every checkpoint timed that this process saves from now on; returns the list that gets the seconds."""
    from polyfed.simulation.callbacks.checkpoint import CheckpointSaver

    seconds, save = [0.0], CheckpointSaver.save_newest_state

    def save_and_time(self: CheckpointSaver) -> None:
        begun = time.perf_counter()
        save(self)
        seconds.append(time.perf_counter() - begun)

    CheckpointSaver.save_newest_state = save_and_time  # type: ignore[method-assign]
    return seconds


def measure_checkpoint(out: Path) -> dict[str, float]:
    """Returns the bytes of all that a run keeps to be resumed from."""
    files = [path for path in (out / "checkpoint").rglob("*") if path.is_file()]
    return {"checkpoint_mb": sum(path.stat().st_size for path in files) / 2**20}


def resumes_to_same_bits(
    label: str, number: int, kind: str, folder: Path, whole: Any, words: Mapping[str, Any]
) -> bool:
    """Runs the method again in a process that is killed after half of its rounds, resumes it here, and returns whether the
    clients' predictions are those of the whole run."""
    import torch

    import polyfed as pf

    out = folder / f"killed-{label}-{number}"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, __file__, "--killed", json.dumps([label, number, words["rounds"], kind, str(folder)])]
    done = subprocess.run(command, check=False)
    assert done.returncode == -9, f"the run that is to be killed ended with {done.returncode}"
    resumed = pf.resume(out, clients=build_source(label, number, kind, folder), public=words["public"], quiet=True)
    clients = [client for client, row in whole.history[-1]["clients"].items() if "loss" in row]
    same = all(torch.equal(whole.predictions(c).outputs, resumed.predictions(c).outputs) for c in clients)
    shutil.rmtree(out, ignore_errors=True)
    return same and whole.history[-1]["summary"] == resumed.history[-1]["summary"]


def run_until_killed(label: str, number: int, rounds: int, kind: str, folder: Path) -> None:
    """Runs a method, saving each round, until this process kills itself after half of the rounds."""
    import torch

    import polyfed as pf

    torch.set_num_threads(1)
    method, source = build_method(label), build_source(label, number, kind, folder)

    def kill_after_half(record: Mapping[str, Any]) -> None:
        if record["round"] == max(1, rounds // 2) + 1:
            os.kill(os.getpid(), 9)

    pf.federate(
        source, method, rounds=rounds, clients_per_round=min(COHORT, number),
        evaluate_clients=min(EVALUATED, number), evaluate_every=rounds, checkpoint_every=1, workers=0,
        quiet=True, public=draw_public(method, source),
        seed=1, out=folder / f"killed-{label}-{number}", callbacks=[kill_after_half],
    )  # fmt: skip


def measure_in_child(what: str, words: list[Any], folder: Path) -> dict[str, Any]:
    """Measures in a process of its own, so that peak memory is that of one run; returns the error if it failed."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, what, json.dumps([*words, str(folder)])]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode or not result.is_file():
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"method": words[0], "clients": words[1], "source": words[3], "error": lines[-1]}
    return dict(json.loads(result.read_text()))


def is_available(label: str) -> bool:
    """Returns whether this version has the method with these fields."""
    try:
        build_method(label)
    except (TypeError, ValueError):
        return False
    return True


def judge(rows: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> list[str]:
    """Returns a sentence for each limit of `LIMITS` that a method does not keep; the growth of a round is that of `pairs`
    where it was measured so."""
    sentences = []
    seconds = {
        (row["method"], row["source"], row["clients"]): row["round_cpu_seconds"]
        for row in rows
        if "round_cpu_seconds" in row
    }
    ratios = {
        (method, source, number): length / seconds[method, source, 1_000]
        for (method, source, number), length in seconds.items()
        if (method, source, 1_000) in seconds and number > 1_000
    }
    ratios |= {(pair["method"], pair["source"], pair["clients"][1]): pair["ratio"] for pair in pairs if "ratio" in pair}
    for row in rows:
        for name in ("start_seconds", "peak_mb"):
            if row.get(name, 0.0) > LIMITS[name]:
                sentences.append(
                    f"{row['method']} with {row['clients']} clients: {name} {row[name]:.1f}, at most {LIMITS[name]}"
                )
    for (method, _, number), ratio in ratios.items():
        if ratio > LIMITS["growth_of_round"]:
            sentences.append(f"{method} with {number} clients: a round takes {ratio:.2f} times one with 1,000")
    return sentences


def main() -> None:
    """Measures what the options ask for, prints a row for each run, and writes all to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--clients", default="1e2,1e3,1e4,1e5,1e6")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--source", choices=["synthetic", "parquet", "tweets"], default="synthetic")
    parser.add_argument("--tweets", type=Path, help="the folder of Sentiment140 for --source tweets")
    parser.add_argument("--pair", help="two numbers of clients, measured in turns in one process in place of --clients")
    parser.add_argument("--resume-at", default="", help="numbers of clients at which a run is killed and resumed")
    parser.add_argument("--folder", type=Path, help="for data and runs; default: a temporary one")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    numbers = [int(float(text)) for text in options.clients.split(",")]
    resumed = {int(float(text)) for text in options.resume_at.split(",") if text}
    labels = [label for label in options.methods.split(",") if is_available(label)]
    left_out = [label for label in options.methods.split(",") if label not in labels]
    rows: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if options.source == "tweets":
            (folder / "tweets.txt").write_text(str(options.tweets.resolve()))
        for label in labels:
            if options.pair:
                pair = [int(float(text)) for text in options.pair.split(",")]
                pairs.append(measure_in_child("--pair", [label, pair, options.rounds, options.source], folder))
                print(json.dumps(pairs[-1]), flush=True)
                continue
            for number in numbers:
                words = [label, number, options.rounds, options.source, number in resumed]
                rows.append(measure_in_child("--child", words, folder))
                print(json.dumps(rows[-1]), flush=True)
    for sentence in [
        *(f"{label} is left out: this version has no such fields" for label in left_out),
        *judge(rows, pairs),
    ]:
        print(sentence)
    if options.out is not None:
        earlier = json.loads(options.out.read_text()) if options.out.is_file() else {}
        lists = {"runs": [*earlier.get("runs", []), *rows], "pairs": [*earlier.get("pairs", []), *pairs]}
        newest = {
            name: list({(row["method"], row.get("source"), str(row["clients"])): row for row in of}.values())
            for name, of in lists.items()
        }
        content = {"cohort": COHORT, "evaluated": EVALUATED, "limits": LIMITS, **newest}
        options.out.write_text(json.dumps(content, indent=1) + "\n")


CHILDREN: Mapping[str, Callable[..., Any]] = {"--child": measure, "--pair": measure_pair, "--killed": run_until_killed}

if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in CHILDREN and sys.argv[2].startswith("["):
        *child_words, child_folder = json.loads(sys.argv[2])
        measured = CHILDREN[sys.argv[1]](*child_words, Path(child_folder))
        (Path(child_folder) / "result.json").write_text(json.dumps(measured))
    else:
        main()
