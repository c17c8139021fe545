"""What a graph hypernetwork costs: time and memory of generating weights, and bytes of a message, for the four ResNets.

    python benchmarks/generation.py --out benchmarks/results/generation.json

One thread. Per width and head: numbers of the GHN for the catalogue of the four architectures and MB (2^20 bytes) one way;
per architecture, milliseconds of generating its weights, of doing so and going back to the GHN's gradient, and of a
training step (batch 32 of 3×32×32) without and with the GHN. Peak memory is the most that the allocator had given out at one
time while ResNet-18's weights were generated and a gradient of their size went back: the network, the GHN, the GHN's
gradient, and all that is made on the way. It is also given over network and GHN (goal: at most 3). Times are the
processor's, the least of several; "load" is the machine's: above 1, other programs ran.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from polyfed.core.seeds import torch_generator
from polyfed.core.serialization import safetensors_num_bytes
from polyfed.graphs import LayerCatalogue, extract
from polyfed.hypernetworks.generated_network import GeneratedNetwork
from polyfed.hypernetworks.ghn import GHN, GHNConfig, graph_to_tensors
from polyfed.hypernetworks.ghn_start import init_ghn_params
from polyfed.models import build

NETWORKS = ("resnet18", "flha_arch1", "flha_arch2", "flha_arch3")
SHAPE = (3, 32, 32)


def milliseconds(work, repetitions):
    """Least of several, by the processor's clock."""
    work()
    found = []
    for _ in range(repetitions):
        start = time.process_time()
        work()
        found.append(1000 * (time.process_time() - start))
    return min(found)


def models(width):
    return {name: build(name, SHAPE, 10, width=width) for name in NETWORKS}


def assembled(width, head, rank):
    networks = models(width)
    graphs = {name: extract(network, torch.zeros(2, *SHAPE)) for name, network in networks.items()}
    form = GHNConfig(LayerCatalogue.from_graphs(graphs.values()), head=head, rank=rank)
    tensors = init_ghn_params(form, "kaiming", seed=0)
    ghn = GHN(form)
    ghn.load_state_dict(tensors)
    made = {
        name: GeneratedNetwork(ghn, networks[name], graph_to_tensors(graphs[name], form.catalogue, torch.device("cpu")))
        for name in NETWORKS
    }
    return made, safetensors_num_bytes(tensors), sum(tensor.numel() for tensor in tensors.values())


def measure(width, head, rank, repetitions):
    made, size, numbers = assembled(width, head, rank)
    x, y = torch.randn(32, *SHAPE, generator=torch_generator(0)), torch.arange(32) % 10
    x = x.contiguous(memory_format=torch.channels_last)
    found = {"numbers": numbers, "mb": size / 2**20, "networks": {}}
    for name, network in made.items():
        network.model.to(memory_format=torch.channels_last)
        plain = sum(p.numel() for p in network.model.parameters())

        def generate(network=network):
            with torch.no_grad():
                network.generate_weights()

        gradients = [torch.randn_like(p) for p in network.generate_weights().values()]  # dense, as a network's are

        def both(network=network, gradients=gradients):
            network.ghn.zero_grad()
            torch.autograd.backward(list(network.generate_weights().values()), gradients)

        def step(module=network):
            module.zero_grad()
            torch.autograd.backward(F.cross_entropy(module(x), y))

        def alone(module=network.model):
            module.zero_grad()
            torch.autograd.backward(F.cross_entropy(module(x), y))

        without = milliseconds(alone, repetitions)
        network.model.zero_grad()
        network.model.requires_grad_(False)
        if name == "resnet18":
            held, most = peak(network)
            found |= {"held_mb": held / 2**20, "peak_mb": (held + most) / 2**20, "peak_over_held": (held + most) / held}
        found["networks"][name] = {
            "parameters": plain,
            "generate_ms": milliseconds(generate, repetitions),
            "generate_and_back_ms": milliseconds(both, repetitions),
            "step_without_ms": without,
            "step_with_ms": milliseconds(step, repetitions),
        }
    return found


class Spent(torch.autograd.Function):
    """A network that uses up its weights: in its backward pass each is given back as soon as its gradient is there."""

    @staticmethod
    def forward(ctx, *weights):
        ctx.weights = [weight.detach() for weight in reversed(weights)]
        return torch.zeros(())

    @staticmethod
    def backward(ctx, slope):
        return tuple(torch.ones_like(ctx.weights.pop()) for _ in range(len(ctx.weights)))


def peak(network):
    """The network and the GHN, and the most that was allocated next to them, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        Spent.apply(*network.generate_weights().values()).backward()
    network.ghn.zero_grad()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return sum(parameter.nbytes for parameter in network.parameters()), most


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32], help="of the factored heads")
    parser.add_argument("--out")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    print(
        "| width | head | numbers | MB one way | peak MB | over both | network | generate ms | and back | step ms | GHN |"
    )
    print("|---" * 11 + "|")
    for width in given.widths:
        for head, rank in (("mlp", given.ranks[0]), *(("factored", rank) for rank in given.ranks)):
            found = measure(width, head, rank, repetitions=20 if width < 64 else 6)
            found |= {
                "width": width,
                "head": head if head == "mlp" else f"factored, rank {rank}",
                "load": round(os.getloadavg()[0], 1),
            }
            results.append(found)
            for name, row in found["networks"].items():
                times = " | ".join(f"{row[k]:.1f}" for k in list(row)[1:])
                print(f"| {width} | {found['head']} | {found['numbers']:,} | {found['mb']:.1f} | {found['peak_mb']:.0f} | "
                      f"{found['peak_over_held']:.2f} | {name} | {times} |", flush=True)  # fmt: skip
    if given.out:
        Path(given.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
