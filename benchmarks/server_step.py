"""Seconds and memory of pFedLA's server half alone.

    python benchmarks/server_step.py --out benchmarks/results/server_step.json
    python benchmarks/server_step.py --memory --out benchmarks/results/server_memory.json

N = 100 clients of the 582k-parameter CNN: the messages to the clients of a round, and the aggregation of their replies with
the update of their hypernetworks. No client trains; the replies are the messages plus noise. Five repetitions, the median.
"processor" are seconds of all cores together; "load" is the machine's: above 1, other programs ran.

Memory is the peak resident set of the process (MiB), with N = 1,000 clients of 2,410 weights: when torch and polyfed are
imported, after the initial state, after four rounds of ten clients, after messages to all, and both again when all clients
have taken part.
"""

import argparse
import json
import os
import resource
import statistics
import time
from pathlib import Path

import torch
from workloads import MODEL

from polyfed.algorithms import HeurPFedLA, PFedLA
from polyfed.core.algorithm import ClientInfo, Message, ServerContext
from polyfed.core.machine.allocator import make_malloc_keep_freed_memory
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad, num_usable_cores
from polyfed.models import ModelSpec

CLIENTS, REPETITIONS = 100, 5


def measure(method, cohort):
    everyone = tuple(ClientInfo(f"client-{n:03d}") for n in range(CLIENTS))
    state = method.server_init(ServerContext(0, 10, everyone, model=MODEL))
    noise = torch.Generator().manual_seed(0)
    seconds, processor = [], []
    for _ in range(REPETITIONS + 1):  # the first is not counted: all models are one tensor
        start, used = time.perf_counter(), time.process_time()
        downs = dict(zip(everyone, method.dispatch_all(state, everyone[:cohort]), strict=False))
        dispatched, used = time.perf_counter(), time.process_time() - used
        replies = {
            who.id: Message({"model": {n: t + 0.01 * torch.randn(t.shape, generator=noise) for n, t in model.items()}})
            for who, down in downs.items()
            for model in [{**state["models"][who.id], **down.tensors["model"]}]
        }
        replied, used = time.perf_counter(), used - time.process_time()
        state = method.aggregate(state, replies, None)
        seconds.append((dispatched - start, time.perf_counter() - replied))
        processor.append(used + time.process_time())
    dispatch, aggregate = (round(statistics.median(column), 3) for column in zip(*seconds[1:], strict=True))
    both = round(statistics.median(sum(pair) for pair in seconds[1:]), 3)
    used = round(statistics.median(processor[1:]), 3)
    return {"dispatch": dispatch, "aggregate": aggregate, "together": both, "processor": used}


def memory(clients=1000):
    """Peaks of this process, in MiB."""

    def peak(when):
        found[when] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

    everyone, found = tuple(ClientInfo(f"client-{n:03d}") for n in range(clients)), {}
    model, method, noise = ModelSpec("mlp", {"hidden": [32]}, (64,), 10), PFedLA(), torch.Generator().manual_seed(0)
    peak("imported")
    state = method.server_init(ServerContext(0, 10, everyone, model=model))
    peak("initial state")

    def rounds(numbers):
        nonlocal state
        for number in numbers:
            some = [everyone[(10 * number + k) % clients] for k in range(10)]
            replies = {}
            for who, down in zip(some, method.dispatch_all(state, some), strict=True):
                changed = {
                    n: t + 0.01 * torch.randn(t.shape, generator=noise) for n, t in down.tensors["model"].items()
                }
                replies[who.id] = Message({"model": changed})
            state = method.aggregate(state, replies, None)

    for after, numbers in {"four rounds of ten": range(4), "all have taken part": range(4, clients // 10 + 4)}.items():
        rounds(numbers)
        peak(after)
        for _ in method.dispatch_all(state, everyone):
            pass
        peak(f"{after}, messages to all")
    found["hypernetworks"] = sum(t.nbytes for n in state["hypernetworks"].values() for t in n.values()) >> 20
    return {"clients": clients, "parameters": 2410, "MiB": found}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--memory", action="store_true", help="of 1,000 clients, in this process")
    given = parser.parse_args()
    make_malloc_keep_freed_memory()  # as every engine does
    if given.memory:
        with exclusive_single_torch_thread_with_grad():
            results = memory()
        print(results)
        if given.out:
            Path(given.out).write_text(json.dumps(results, indent=1) + "\n")
        return
    results = {
        "cores": num_usable_cores(),
        "clients": CLIENTS,
        "parameters": 582026,
        "load": round(os.getloadavg()[0], 1),
    }
    with exclusive_single_torch_thread_with_grad():
        for name, method in {"pfedla": PFedLA(), "heur_pfedla": HeurPFedLA()}.items():
            for cohort in (10, 100):
                found = results[f"{name}, {cohort} of {CLIENTS} in the round"] = measure(method, cohort)
                print(
                    f"{name}, {cohort} of {CLIENTS} clients: " + ", ".join(f"{k} {v:.3f} s" for k, v in found.items())
                )
    if given.out:
        Path(given.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
