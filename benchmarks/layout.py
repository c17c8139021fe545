"""Training speed of the zoo's convolutional networks in PyTorch's default layout and in channels-last, one thread.

    python benchmarks/layout.py --out benchmarks/results/layout.json

Images a second, forward, backward and SGD step at batch 32; best of 3 repetitions each, in turn. polyfed uses
channels-last for every network with 2-d convolutions that takes it (polyfed/layout.py); this says whether that pays.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from polyfed.core.nn.module_cache import build_module
from polyfed.models import ModelSpec

CASES = [
    ("cnn_small", {}, (1, 8, 8)),
    ("cnn_582k", {}, (1, 28, 28)),
    ("cnn_pfedla", {}, (1, 28, 28)),
    ("cnn_pfedla", {"batch_norm": True}, (3, 32, 32)),
    ("cnn_fedhenn", {"level": 5}, (3, 32, 32)),
    ("cnn_fedhenn_homo", {}, (3, 32, 32)),
    ("resnet18", {"width": 16}, (3, 32, 32)),
    ("flha_small", {"width": 16}, (3, 32, 32)),
    ("vit", {}, (3, 32, 32)),
]


def images_a_second(spec, layout, steps):
    model = build_module(spec, 0).to(memory_format=layout)
    x = torch.randn(32, *spec.input_shape).contiguous(memory_format=layout)
    y = torch.arange(32) % spec.num_classes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    start = time.perf_counter()
    for step in range(steps + 2):
        if step == 2:
            start = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return 32 * steps / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name, arguments, shape in CASES:
        spec = ModelSpec(name, arguments, shape, 10)
        label = f"{name} {arguments or ''} {shape}"
        speeds = {"default": [], "channels-last": []}
        for _ in range(3):
            speeds["default"].append(images_a_second(spec, torch.contiguous_format, 12))
            speeds["channels-last"].append(images_a_second(spec, torch.channels_last, 12))
        found[label] = {layout: round(max(values)) for layout, values in speeds.items()}
        ratio = found[label]["channels-last"] / found[label]["default"]
        print(f"{label:45s} {found[label]}  ratio {ratio:.2f}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
