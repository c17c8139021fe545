"""Seconds a round on a GPU and on the CPU cores of the same machine, with a bare loop of torch on the GPU beside them.

    python benchmarks/gpu.py --out benchmarks/results/gpu.json          about two minutes on a GPU

Random images: only speed and memory are measured. A figure is the median of the rounds after the first. `bare` trains the
same networks on the same number of minibatches, with the data on the GPU, and averages them: what polyfed adds is the
difference. TF32 is as torch has it by default (on for convolutions, off for products of matrices).
"""

import argparse
import json
import os
import platform
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from workloads import cpu_name

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.models import ModelSpec

GRAY, COLOUR = (1, 28, 28), (3, 32, 32)
PARTS = {  # clients, examples a client, minibatch, networks (one for all, or one after the other)
    "cnn_582k": (10, 512, 64, [ModelSpec("cnn_582k", {}, GRAY, 10)]),
    "resnet18": (4, 256, 64, [ModelSpec("resnet18", {}, COLOUR, 10)]),
    "small cnn, 100 clients": (100, 64, 16, [ModelSpec("cnn_small", {"channels": (8, 16), "hidden": 32}, GRAY, 10)]),
    "four architectures": (
        4, 256, 64, [ModelSpec(name, {}, COLOUR, 10) for name in ("resnet18", "flha_arch1", "flha_arch2", "flha_arch3")],
    ),
    "3-D U-Net": (2, 16, 2, [ModelSpec("unet3d", {"width": 8, "depth": 2}, (1, 32, 32, 32), 2)]),
}  # fmt: skip


def examples_of(spec, number, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(number, *spec.input_shape, generator=draw)
    if len(spec.input_shape) == 4:
        return x, (x[:, 0] > 0.5).long()
    return x, torch.arange(number) % 10


def clients_of(part):
    number, examples, _, specs = PARTS[part]
    task = "segmentation" if part == "3-D U-Net" else "classification"
    return [
        pf.Client(
            f"site-{k:03}",
            specs[k % len(specs)],
            examples_of(specs[k % len(specs)], examples, k),
            examples_of(specs[k % len(specs)], 8, 10**6 + k),
            task=task,
        )
        for k in range(number)
    ]


def polyfed_seconds(part, method, device, rounds, public=None, **options):
    """Median seconds of the rounds after the first but the last, which is evaluated; and the GPU's peak in MB."""
    fields = {"lr": 0.01, "batch_size": PARTS[part][2], "local_epochs": 1}
    engine = options.pop("engine", "auto")
    workers = options.pop("workers", "auto")
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = pf.federate(
        clients_of(part), REGISTRY[method](**fields, **options), rounds=rounds, device=device, engine=engine,
        workers=workers, evaluate_every=10**6, public=public, quiet=True,
    )  # fmt: skip
    found = {"seconds": statistics.median(record["seconds"] for record in run.history[1:-1])}
    if device != "cpu":
        found["peak_mb"] = round(torch.cuda.max_memory_allocated() / 1e6, 1)
    return found


def bare_seconds(part, rounds, device="cuda"):
    """The same number of steps of SGD in plain torch, and the mean of the networks."""
    number, _, batch, specs = PARTS[part]
    data = [(c.id, *c.train.batch(torch.arange(len(c.train)))) for c in clients_of(part)]
    data = [(x.to(device), y.to(device)) for _, x, y in data]
    network = specs[0]().to(device)
    state = {name: value.clone() for name, value in network.state_dict().items()}
    seconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start, replies = time.perf_counter(), []
        for x, y in data:
            network.load_state_dict(state)
            network.train()
            optimiser = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
            order = torch.randperm(len(x), device=device)
            for first in range(0, len(x), batch):
                rows = order[first : first + batch]
                optimiser.zero_grad(set_to_none=True)
                torch.nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
                optimiser.step()
            replies.append({name: value.clone() for name, value in network.state_dict().items()})
        state = {
            name: torch.stack([reply[name].float() for reply in replies]).mean(0).to(value.dtype)
            for name, value in state.items()
        }
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    assert number == len(data)
    return {"seconds": statistics.median(seconds[1:])}


def same_bits():
    """Share of values in the saved networks that two runs on the GPU have in common, by network."""
    found = {}
    for part in ("cnn_582k", "resnet18"):
        runs = [
            pf.federate(
                clients_of(part)[:2], REGISTRY["fedavg"](lr=0.01, batch_size=64, local_epochs=1), rounds=2,
                device="cuda", quiet=True,
            )
            for _ in range(2)
        ]  # fmt: skip
        one, two = (run.model("site-000").state_dict() for run in runs)
        equal = sum(int((one[name] == two[name]).sum()) for name in one)
        found[part] = equal / sum(value.numel() for value in one.values())
    return found


def measurements(rounds):
    public = torch.rand(256, *COLOUR, generator=torch.Generator().manual_seed(5))
    many, four, volumes = "small cnn, 100 clients", "four architectures", "3-D U-Net"
    radius = {"public": public, "rad_size": 128, "rad_batch": 64}
    gpu = {"engine": "inprocess", "workers": 0}
    for part in ("cnn_582k", "resnet18", many):
        yield f"{part}, bare loop, GPU", partial(bare_seconds, part, rounds)
    on_gpu = [
        ("cnn_582k, fedavg, GPU", "cnn_582k", "fedavg", gpu),
        ("cnn_582k, fedavg, GPU, bf16", "cnn_582k", "fedavg", {**gpu, "precision": "bf16"}),
        ("resnet18, fedavg, GPU", "resnet18", "fedavg", gpu),
        ("resnet18, fedavg, GPU, bf16", "resnet18", "fedavg", {**gpu, "precision": "bf16"}),
        ("resnet18, pfedla, GPU", "resnet18", "pfedla", gpu),
        (f"{many}, fedavg, GPU", many, "fedavg", gpu),
        (f"{many}, fedavg, GPU, cohort", many, "fedavg", {"engine": "cohort", "workers": 0}),
        (f"{four}, flha_ghn, GPU", four, "flha_ghn", gpu),
        (f"{four}, fedhenn, GPU", four, "fedhenn", {**gpu, **radius}),
        (f"{volumes}, fedavg, GPU", volumes, "fedavg", gpu),
    ]
    for name, part, method, options in on_gpu:
        yield name, partial(polyfed_seconds, part, method, "cuda", rounds + 1, **options)
    on_cpu = [("cnn_582k", "fedavg"), (many, "fedavg"), (volumes, "fedavg"), ("resnet18", "fedavg"), (four, "flha_ghn")]
    for part, method in on_cpu:
        yield f"{part}, {method}, CPU cores", partial(polyfed_seconds, part, method, "cpu", 3)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=200.0, help="seconds after which no further figure is begun")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begun, figures = time.perf_counter(), {}
    about = {
        "gpu": torch.cuda.get_device_name(0),
        "cpu": f"{cpu_name()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for name, measure in measurements(options.rounds):
        if time.perf_counter() - begun > options.limit:
            figures[name] = {"left out": "no time"}
            continue
        try:
            figures[name] = measure()
        except Exception as error:  # a figure that fails is reported, the others are still wanted
            figures[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
        print(name, figures[name], flush=True)
        if options.out:
            options.out.write_text(json.dumps({"about": about, "rounds": options.rounds, "figures": figures}, indent=1))
    try:
        bits = same_bits()
    except Exception as error:
        bits = f"{type(error).__name__}: {error}"[:500]
    if options.out:
        found = {"about": about, "rounds": options.rounds, "figures": figures, "equal values of two runs": bits}
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
