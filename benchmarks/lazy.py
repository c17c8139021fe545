"""Peak memory and seconds of pictures that stay encoded against pictures in memory.

    python benchmarks/lazy.py --out benchmarks/results/lazy.json

20,000 JPEG pictures of 224×224 pixels (smooth colours with noise, 2 sites and 10 classes) in a folder. Each way is a
process of its own: it loads the folder (with as many threads as there are cores, in both ways), and then takes every picture
once, on one thread, in batches of 32 in random order, as an epoch does. Memory is the largest resident size of the process,
without that of `import torch, polyfed.data`.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAYS = ("memory", "lazy")


def make(folder, number, size):
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for i in range(number):
        place = folder / f"site{i % 2}" / f"class{i % 10}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(draw.integers(0, 256, (7, 7, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC), np.int16)
        noisy = smooth + draw.integers(-12, 13, (size, size, 1))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(place / f"{i:05d}.jpg", quality=90)


def measure(folder, way, size):
    import torch

    from polyfed.data.sources.folders import ImageFolder

    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    pool = ImageFolder(str(folder), size, layout="site/class", lazy=way == "lazy").load()
    loaded = time.perf_counter()
    order = torch.randperm(len(pool.train), generator=torch.Generator().manual_seed(0))
    total = 0.0
    for rows in order.split(32):
        total += float(pool.train.batch(rows)[0].sum())
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "seconds_to_load": round(loaded - start, 2), "seconds_per_pass": round(done - loaded, 2),
        "peak_mib": round(peak / 1024), "num_images": len(order), "sum": total,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--folder", type=Path, help="of the pictures; made if it is not there, and kept")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.way:
        print(json.dumps(measure(asked.folder, asked.way, asked.size)))
        return
    with tempfile.TemporaryDirectory() as spare:
        folder = asked.folder or Path(spare) / "pictures"
        if not folder.exists():
            make(folder, asked.images, asked.size)
        encoded = sum(file.stat().st_size for file in folder.rglob("*.jpg"))
        found = {}
        for way in WAYS:
            command = [sys.executable, __file__, "--way", way, "--folder", str(folder), "--size", str(asked.size)]
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
            found[way] = json.loads(done.stdout)
    sums = [found[way].pop("sum") for way in WAYS]
    # The two measure mean and spread of pixels on other numbers of pictures.
    assert abs(sums[0] - sums[1]) < 0.02 * asked.images * 3 * asked.size**2, sums
    result = {
        "encoded_mib": round(encoded / 2**20), "decoded_mib": round(asked.images * 3 * asked.size**2 / 2**20), **found,
        "python": platform.python_version(), "cores": os.cpu_count(),
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
