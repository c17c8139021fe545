"""What a graph hypernetwork costs: time and memory of generating weights, and bytes of a message, for the four ResNets.

    python benchmarks/generation.py --out benchmarks/results/generation.json

One thread. Per width and head: numbers of the GHN for the catalogue of the four architectures and MB (2^20 bytes) one way;
per architecture, milliseconds of generating its weights, of doing so and going back to the GHN's gradient, and of a
training step (batch 32 of 3×32×32) without and with the GHN. Peak memory is that of a process of its own which generates
ResNet-18's weights and their gradient, less what it had before the GHN was built.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from polyfed.core.seeds import torch_generator
from polyfed.core.tree import num_bytes
from polyfed.graphs import LayerCatalogue, extract
from polyfed.hypernetworks.generated import GeneratedNetwork
from polyfed.hypernetworks.ghn import GHN, Form, create, tensors_of_graph
from polyfed.models import build

NETWORKS = ("resnet18", "flha_arch1", "flha_arch2", "flha_arch3")
SHAPE = (3, 32, 32)


def milliseconds(work, repetitions):
    work()
    start = time.perf_counter()
    for _ in range(repetitions):
        work()
    return 1000 * (time.perf_counter() - start) / repetitions


def models(width):
    return {name: build(name, SHAPE, 10, width=width) for name in NETWORKS}


def assembled(width, head):
    networks = models(width)
    graphs = {name: extract(network, torch.zeros(2, *SHAPE)) for name, network in networks.items()}
    form = Form(LayerCatalogue.of(graphs.values()), head=head)
    tensors = create(form, "kaiming", seed=0)
    ghn = GHN(form)
    ghn.load_state_dict(tensors)
    made = {
        name: GeneratedNetwork(ghn, networks[name], tensors_of_graph(graphs[name], form.catalogue, torch.device("cpu")))
        for name in NETWORKS
    }
    return made, num_bytes(tensors), sum(tensor.numel() for tensor in tensors.values())


def measure(width, head, repetitions):
    made, size, numbers = assembled(width, head)
    x, y = torch.randn(32, *SHAPE, generator=torch_generator(0)), torch.arange(32) % 10
    x = x.contiguous(memory_format=torch.channels_last)
    found = {"numbers": numbers, "mb": size / 2**20, "networks": {}}
    for name, network in made.items():
        network.model.to(memory_format=torch.channels_last)
        plain = sum(p.numel() for p in network.model.parameters())

        def generate(network=network):
            with torch.no_grad():
                network.weights()

        def both(network=network):
            torch.autograd.backward([w.sum() for w in network.weights().values()])

        def step(module=network):
            torch.autograd.backward(F.cross_entropy(module(x), y))

        def alone(module=network.model):
            torch.autograd.backward(F.cross_entropy(module(x), y))

        without = milliseconds(alone, repetitions)
        network.model.requires_grad_(False)
        found["networks"][name] = {
            "parameters": plain,
            "generate_ms": milliseconds(generate, repetitions),
            "generate_and_back_ms": milliseconds(both, repetitions),
            "step_without_ms": without,
            "step_with_ms": milliseconds(step, repetitions),
        }
    return found


def peak(width, head):
    """MB of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--peak", str(width), head],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def print_peak(width, head):
    import psutil

    process = psutil.Process()
    GHN(Form(LayerCatalogue.of([extract(build("resnet18", SHAPE, 10, width=2), torch.zeros(2, *SHAPE))])))  # imports
    before = process.memory_info().rss
    made, *_ = assembled(width, head)
    network = made["resnet18"]
    torch.autograd.backward([w.sum() for w in network.weights().values()])
    print((process.memory_info().rss - before) / 2**20)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--out")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.peak:
        print_peak(int(given.peak[0]), given.peak[1])
        return
    results = []
    print(
        "| width | head | numbers | MB one way | peak MB | network | generate ms | and back | step ms | with the GHN |"
    )
    print("|---" * 10 + "|")
    for width in given.widths:
        for head in ("mlp", "factored"):
            found = measure(width, head, repetitions=10 if width < 64 else 3)
            found |= {"width": width, "head": head, "peak_mb": peak(width, head)}
            results.append(found)
            for name, row in found["networks"].items():
                times = " | ".join(f"{row[k]:.1f}" for k in list(row)[1:])
                print(f"| {width} | {head} | {found['numbers']:,} | {found['mb']:.1f} | {found['peak_mb']:.0f} | "
                      f"{name} | {times} |", flush=True)  # fmt: skip
    if given.out:
        Path(given.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
