"""Processor seconds of what was found to grow with the number of clients, part by part; added to scaling.py's results.

    nice -n 5 python benchmarks/scaling_parts.py --out benchmarks/results/scaling.json

The processor's time, of one thread, since the machine of the results was busy. docs/scaling.md tells what each part is.
"""

import argparse
import json
import time
from pathlib import Path

import scaling
import torch

import polyfed as pf
from polyfed.alignment.pairwise_cka import mean_pairwise_cka
from polyfed.core.algorithm import Message
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.serialization import deserialize_state, serialize_state
from polyfed.simulation.rounds.client_registry import ClientRegistry
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint


def seconds(do):
    began = time.process_time()
    do()
    return round(time.process_time() - began, 4)


def started(label, number, clients_per_round=scaling.COHORT):
    """A method's federation and its first state."""
    case, (clients, _) = scaling.CASES[label], scaling.federation(number)
    method = pf.algorithms.get(case.name)(**{**scaling.STEP, **case.fields})
    federation = Federation({c.id: c for c in clients}, method, Settings(clients_per_round=clients_per_round))
    return federation, method.server_init(federation.server_context())


def server_half(label, number):
    """Messages to ten clients and the aggregation of what they would reply; of two rounds the second."""
    federation, state = started(label, number)
    method, who = federation.algorithm, [federation.client_info(i, 1) for i in federation.sample_round_clients(1)]
    for _ in range(2):
        began = time.process_time()
        downs = {info.id: down for info, down in zip(who, method.dispatch_all(state, who), strict=True)}
        spent = time.process_time() - began
        group = "delta" if label.startswith("pfedhn") else "model"
        moved = {i: {n: t + 0.01 for n, t in down.tensors["model"].items()} for i, down in downs.items()}
        replies = {i: Message({group: tree}) for i, tree in moved.items()}
        began = time.process_time()
        state = method.aggregate(state, replies, None)
        spent += time.process_time() - began
    return round(spent, 4)


def blocks(number):
    """`Federation.tasks` for everyone beside `dispatch_all` alone, which it goes through."""
    federation, state = started("pfedhn embedding_dim=32", number, 1.0)
    who = [federation.client_info(i, 1) for i in federation.client_registry.ids]
    alone = seconds(lambda: list(federation.algorithm.dispatch_all(state, who)))
    whole = seconds(
        lambda: list(federation.build_task_blocks("local", federation.client_registry.ids, 1, Checkpoint(0, state, {})))
    )
    return {"dispatch_all": alone, "tasks": whole}


def asked(number):
    """FedFomo: its messages to everyone, and one client's choice of whom to ask for."""
    federation, state = started("fedfomo", number, 1.0)
    method, who = federation.algorithm, [federation.client_info(i, 1) for i in federation.client_registry.ids]
    everyone = seconds(lambda: list(method.dispatch_all(state, who)))
    liked, generator = torch.zeros(number, dtype=torch.float64), torch.Generator().manual_seed(0)
    return {"messages": everyone, "one choice": seconds(lambda: method._choose(liked, 3, 0.3, generator))}


def cohort(number):
    """The draw of ten from so many, of whom the loop has the ids alone."""
    told = ClientRegistry(tuple(f"c{k:08d}" for k in range(number)), "classification")
    everyone = Federation({}, pf.algorithms.FedAvg(), Settings(clients_per_round=scaling.COHORT), remote_clients=told)
    return seconds(lambda: everyone.sample_round_clients(1))


def header(number):
    """A checkpoint's description of so many models of four tensors, bytes; and seconds to write and read it."""
    names = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
    state = {"models": {f"c{k:07d}": {name: torch.zeros(1) for name in names} for k in range(number)}}
    kept = []
    writing = seconds(lambda: kept.append(serialize_state(state)))
    reading = seconds(lambda: deserialize_state(kept[0]))
    return {"bytes": int.from_bytes(kept[0][:8], "little"), "encode": writing, "decode": reading}


def largest_header():
    """What safetensors says to a description beyond 100 MB."""
    try:
        serialize_state({"w": torch.zeros(1), "names": "x" * 100_000_000})
    except Exception as error:  # a type of the library that it does not promise
        return str(error)
    return "accepted"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    halves = {"pfedla": (125, 250, 500, 1_000), "pfedhn": (2_500, 5_000, 10_000),
              "pfedhn embedding_dim=32": (2_500, 10_000)}  # fmt: skip
    parts = {}
    with exclusive_single_torch_thread_with_grad():
        blocks(10)  # what is imported at first use
        for label, numbers in halves.items():
            parts[f"server half, {label}"] = {n: server_half(label, n) for n in numbers}
        parts["tasks for everyone"] = {n: blocks(n) for n in (1_000, 2_000, 4_000, 8_000)}
        parts["mean_similarity of 64 examples"] = {
            n: seconds(lambda n=n: mean_pairwise_cka([torch.randn(64, 32) for _ in range(n)]))
            for n in (300, 1_000, 3_000)
        }
        parts["fedfomo"] = {n: asked(n) for n in (1_000, 4_000)}
        parts["cohort"] = {n: cohort(n) for n in (10_000, 100_000, 1_000_000)}
        parts["checkpoint of models"] = {n: header(n) for n in (2_000, 4_000, 8_000)}
        parts["checkpoint with more than 100 MB of description"] = largest_header()
    print(json.dumps(parts, indent=1))
    if given.out:
        content = json.loads(given.out.read_text()) if given.out.exists() else {"points": []}
        given.out.write_text(json.dumps({**content, "parts": parts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
