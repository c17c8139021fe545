"""Seconds of pFedLA's server half alone.

    python benchmarks/server_step.py --out benchmarks/results/server_step.json

N = 100 clients of the 582k-parameter CNN: the messages to the clients of a round, and the aggregation of their replies with
the update of their hypernetworks. No client trains; the replies are the messages plus noise. Five repetitions, the median.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
from workloads import MODEL

from polyfed.algorithms import HeurPFedLA, PFedLA
from polyfed.core.algorithm import ClientInfo, Message, ServerContext
from polyfed.core.threads import one_thread

CLIENTS, REPETITIONS = 100, 5


def measure(method, cohort):
    everyone = tuple(ClientInfo(f"client-{n:03d}") for n in range(CLIENTS))
    state = method.server_init(ServerContext(0, 10, everyone, model=MODEL))
    noise = torch.Generator().manual_seed(0)
    seconds = []
    for _ in range(REPETITIONS + 1):  # the first is not counted: all models are one tensor
        start = time.perf_counter()
        downs = dict(zip(everyone, method.dispatch_all(state, everyone[:cohort]), strict=False))
        dispatched = time.perf_counter()
        replies = {
            who.id: Message({"model": {n: t + 0.01 * torch.randn(t.shape, generator=noise) for n, t in model.items()}})
            for who, down in downs.items()
            for model in [{**state["models"][who.id], **down.tensors["model"]}]
        }
        replied = time.perf_counter()
        state = method.aggregate(state, replies, None)
        seconds.append((dispatched - start, time.perf_counter() - replied))
    dispatch, aggregate = (round(statistics.median(column), 3) for column in zip(*seconds[1:], strict=True))
    both = round(statistics.median(sum(pair) for pair in seconds[1:]), 3)
    return {"dispatch": dispatch, "aggregate": aggregate, "together": both}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    given = parser.parse_args()
    results = {"cores": os.cpu_count(), "clients": CLIENTS, "parameters": 582026}
    with one_thread():
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
