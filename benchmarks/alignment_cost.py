"""What FedHeNN's term costs: seconds of a local step, and memory, with 0 to all 5,000 rows of the RAD, and with an RBF
kernel; and the least that it can cost with 256 rows: their pass through the network, forward and back, and forward alone.

    python benchmarks/alignment_cost.py --out benchmarks/results/alignment_cost.json

The paper's homogeneous network (64 channels) on 32×32 RGB images (random bytes: neither time nor memory depends on them),
batch 32, one thread, a K̄ of ten clients' features of width 64, made in the process that is measured. Each number comes from
a process of its own; memory is its peak resident set, above that of the same process without the term ("local").
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from polyfed.algorithms import FedHeNN
from polyfed.alignment import AlignmentTarget, mean_kernel_features, mean_rbf_kernel
from polyfed.alignment.representations import representation_module_name
from polyfed.core.algorithm import Client
from polyfed.core.examples.examples import Examples, Normalise
from polyfed.core.seeds import torch_generator
from polyfed.core.training.loop import fit
from polyfed.models import ModelSpec

RAD, BATCH = 5000, 32


def one(rad_batch, steps, kernel):
    """Seconds of a step (the median) and peak memory in MB of this process; `rad_batch` None is without the term."""
    torch.set_num_threads(1)
    generator = torch_generator(0)
    prepare = Normalise((0.5,) * 3, (0.25,) * 3)
    x = torch.randint(256, (RAD, 3, 32, 32), generator=generator, dtype=torch.uint8)
    pool = Examples(x, torch.zeros(RAD, dtype=torch.int64), transform=prepare)
    train = pool.select(torch.arange(BATCH))
    factory = ModelSpec("cnn_fedhenn_homo", {}, (3, 32, 32), 10)
    model, client = factory(), Client("client", factory, train, train)
    method = FedHeNN(
        rad_batch=rad_batch or 0, batch_size=BATCH, local_steps=1, kernel="rbf" if kernel == "rbf" else "linear"
    )
    parts, weights, term = [torch.randn(RAD, 64, generator=generator) for _ in range(10)], [0.1] * 10, None
    if rad_batch is not None and kernel in ("linear", "rbf"):
        if kernel == "rbf":
            target = AlignmentTarget(mean_rbf_kernel(parts, weights, method.sigma), method.sigma)
        else:
            target = AlignmentTarget(mean_kernel_features(parts, weights))
        term = method._alignment_term(
            model, client, representation_module_name(model, train), target, (pool, torch.arange(RAD)), 1.0, 0
        )
    seconds = []
    for k in range(steps + 1):  # the first one warms up
        start = time.perf_counter()
        if kernel in ("pass", "forward"):  # of the rows alone
            with torch.set_grad_enabled(kernel == "pass"):
                model = model.to(memory_format=torch.channels_last)  # as `fit` has it
                out = model(pool.batch(torch.arange(rad_batch))[0].contiguous(memory_format=torch.channels_last))
            if kernel == "pass":
                out.sum().backward()
        else:
            fit(model, train, method, lr=0.01, seed=k, penalty=term)
        seconds.append(time.perf_counter() - start)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": statistics.median(seconds[1:]), "mb": memory}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--one", nargs=2, type=int, help="rad_batch (-1: local) and steps, in this process")
    parser.add_argument("--kernel", default="linear", help="of --one")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(None if given.one[0] < 0 else given.one[0], given.one[1], given.kernel)))
        return
    found = {}
    for name, rad_batch, steps, kernel in (
        ("local", -1, 20, "linear"),
        ("48", 48, 20, "linear"),
        ("64", 64, 20, "linear"),
        ("256", 256, 7, "linear"),
        ("256, the pass alone", 256, 7, "pass"),
        ("256, forward alone", 256, 7, "forward"),
        ("1000", 1000, 3, "linear"),
        ("5000", 0, 2, "linear"),
        ("256 rbf", 256, 7, "rbf"),
        ("5000 rbf", 0, 2, "rbf"),
    ):
        words = [sys.executable, __file__, "--one", str(rad_batch), str(steps), "--kernel", kernel]
        found[name] = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        more = found[name]["mb"] - found["local"]["mb"]
        print(f"| {name} | {found[name]['seconds']:.3f} s | {more:+.0f} MB |", flush=True)
    if given.out:
        Path(given.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
