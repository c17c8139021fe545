"""Seconds a round on workloads W1 and W2: the bare loop, polyfed in process, and polyfed's pool, measured in one run.

    python benchmarks/speed.py --out benchmarks/results/speed.json
    python benchmarks/speed.py --workloads W2 --out benchmarks/results/speed.json     # W1's figures in the file stay

Each figure is the median of 3 repetitions (5 for W2), taken in turn (bare, in process, pool, bare, ...) so that a slow
phase of a shared machine hits all alike; a repetition is the median of its rounds after the first; ratios are taken within
a repetition. Run it on an idle machine. `--bf16` measures that precision, too; a processor without instructions for it takes
several times as long as with float32.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import platform
import statistics
import time
from pathlib import Path

import bare
import torch
from workloads import METHOD, MODEL, PATH, W1, W2, arrays_of, clients_of, cpu_name

import polyfed as pf
from polyfed.core.nn.module_cache import initial_state
from polyfed.core.training.precision import check_precision

HALVES = "bare loop, half of the clients in each of 2 processes, channels-last"


def fresh_model():
    model = MODEL()
    model.load_state_dict(initial_state(MODEL, 0))
    return model


def bare_seconds(workload, arrays, rounds, channels_last):
    sample = None if workload.clients_per_round == 1.0 else workload.clients_per_round
    seconds = bare.federate(
        fresh_model(), arrays, rounds, lr=0.01, batch_size=32, channels_last=channels_last, clients_per_round=sample
    )
    return statistics.median(seconds[1:] or seconds)


def halves_seconds(workload, arrays, rounds):
    """Seconds of the slower of two processes that have half of a round's clients each and exchange nothing: what no two
    workers can beat on these two cores."""
    share = (workload.clients if workload.clients_per_round == 1.0 else workload.clients_per_round) // 2
    half = dataclasses.replace(workload, clients_per_round=share)
    with multiprocessing.get_context("fork").Pool(2) as processes:
        given = (half, arrays, rounds, True)
        return max(processes.starmap(bare_seconds, [given, given], chunksize=1))


def polyfed_seconds(workload, clients, rounds, workers, evaluate, method=METHOD):
    """Median seconds of the rounds after the first, without (or with) evaluation of all clients."""
    run = pf.federate(
        clients,
        method,
        rounds=rounds,
        clients_per_round=workload.clients_per_round,
        workers=workers,
        evaluate_every=1 if evaluate else 10**6,
    )
    records = run.history[1:] if evaluate else run.history[1:-1]  # the last round is always evaluated
    return statistics.median(record["seconds"] for record in records)


def forward_seconds(arrays):
    """Seconds of one thread for the outputs of all test images, 128 at a time: what no evaluation can do without."""
    model, x = fresh_model().to(memory_format=torch.channels_last).eval(), arrays.to(memory_format=torch.channels_last)
    with torch.no_grad():
        model(x[:128])
        start = time.perf_counter()
        for first in range(0, len(x), 128):
            model(x[first : first + 128])
        return time.perf_counter() - start


def ratios_of(times):
    """Medians of the ratios within each repetition, whose measurements lie seconds apart."""

    def paired(one, other, combine):
        return statistics.median(map(combine, times[one]["all"], times[other]["all"]))

    two = "polyfed, 2 workers"
    return {
        "in process / bare loop with the same thread and layout (target 1.05)": paired(
            "polyfed, in process", "bare loop, 1 thread, channels-last", lambda a, b: a / b
        ),
        "1 worker / 2 workers (target 1.9 on W1, 1.8 on W2)": paired("polyfed, 1 worker", two, lambda a, b: a / b),
        "bare loop / half of it in each of two processes at once": paired(
            "bare loop, 1 thread, channels-last", HALVES, lambda a, b: a / b
        ),
        "seconds that evaluating all clients adds": paired(f"{two}, all clients evaluated", two, lambda a, b: a - b),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=PATH)
    parser.add_argument("--workloads", nargs="*", default=["W1", "W2"], choices=["W1", "W2"])
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = {}
    bf16 = dataclasses.replace(METHOD, precision="bf16")
    if options.bf16:
        check_precision("bf16", torch.device("cpu"))
    plan = ((W1, 3, options.repeat), (W2, 15, 2 * options.repeat - 1))
    for workload, rounds, repeat in (part for part in plan if part[0].name in options.workloads):
        clients, _ = clients_of(workload, options.path)
        arrays = arrays_of(clients)
        candidates = {
            "bare loop, 1 thread": lambda w=workload, a=arrays, r=rounds: bare_seconds(w, a, r, False),
            "bare loop, 1 thread, channels-last": lambda w=workload, a=arrays, r=rounds: bare_seconds(w, a, r, True),
            HALVES: lambda w=workload, a=arrays, r=rounds: halves_seconds(w, a, r),
            "polyfed, in process": lambda w=workload, c=clients, r=rounds: polyfed_seconds(w, c, r, 0, False),
            "polyfed, 1 worker": lambda w=workload, c=clients, r=rounds: polyfed_seconds(w, c, r, 1, False),
            "polyfed, 2 workers": lambda w=workload, c=clients, r=rounds: polyfed_seconds(w, c, r, 2, False),
            "polyfed, 2 workers, all clients evaluated": lambda w=workload, c=clients, r=rounds: polyfed_seconds(
                w, c, r, 2, True
            ),
        }
        tests = torch.cat([c.test.batch(torch.arange(len(c.test)))[0] for c in clients])
        candidates["forward pass of all test images, 1 thread"] = lambda t=tests: forward_seconds(t)
        if options.bf16:
            candidates["polyfed, 2 workers, bf16"] = lambda w=workload, c=clients, r=rounds: polyfed_seconds(
                w, c, r, 2, False, bf16
            )
        times = {name: [] for name in candidates}
        for _ in range(repeat):
            for name, measure in candidates.items():
                times[name].append(measure())
        for name, values in times.items():
            rounded = [round(v, 3) for v in values]
            print(f"{workload.name}  {name:70s} {statistics.median(values):7.3f} s a round   {rounded}", flush=True)
        measured[workload.name] = {name: {"median": statistics.median(v), "all": v} for name, v in times.items()}
    ratios = {name: ratios_of(times) for name, times in measured.items()}
    print(json.dumps(ratios, indent=1))
    if options.out:
        known = json.loads(options.out.read_text()) if options.out.exists() else {}
        host = {"date": time.strftime("%Y-%m-%d"), "cpu": cpu_name(), "cores": os.cpu_count()}
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        fresh = {name: {**host, **versions, "seconds": measured[name], "ratios": ratios[name]} for name in measured}
        options.out.write_text(json.dumps(dict(sorted({**known, **fresh}.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
