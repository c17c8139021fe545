"""Start-up time and memory.

    python benchmarks/footprint.py --out benchmarks/results/footprint.json

Start-up: seconds from the start of the process `polyfed run fedavg_digits` to the end of its first round. Memory: peak PSS
(proportional set size, shared pages counted once) of the whole process tree with 500 clients of Fashion-MNIST (60,000
images) on two workers, sampled every 50 ms.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from workloads import PATH


def tree_pss(process):
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += member.memory_full_info().pss
        except psutil.Error:
            continue  # it has just ended
    return total


def seconds_to_first_round(folder):
    out = Path(folder) / "run"
    start = time.perf_counter()
    command = [sys.executable, "-m", "polyfed", "run", "fedavg_digits", "--rounds", "1", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "round 1/1" in line:
                seconds = time.perf_counter() - start
                break
        process.communicate()
    return seconds


def peak_memory(folder, path):
    command = [
        sys.executable, "-m", "polyfed", "run", "--data", "fashion_mnist", "--data.path", path, "--data.clients", "500",
        "--data.partition", "iid", "--model", "cnn_582k", "--rounds", "3", "--clients_per_round", "0.1", "--workers", "2",
        "--out", str(Path(folder) / "memory"), "--quiet",
    ]  # fmt: skip
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                peak = max(peak, tree_pss(watched))
            except psutil.NoSuchProcess:
                break
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"the run failed with status {process.returncode}")
    return peak


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=PATH)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    starts = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            starts.append(seconds_to_first_round(folder))
    print(f"start to the end of the first round: {statistics.median(starts):.2f} s of {[round(s, 2) for s in starts]}")
    with tempfile.TemporaryDirectory() as folder:
        peak = peak_memory(folder, options.path)
    print(f"500 clients of Fashion-MNIST on 2 workers: peak PSS {peak / 2**30:.2f} GiB ({peak / 1e9:.2f} GB)")
    if options.out:
        content = {"seconds_to_first_round": starts, "peak_pss_bytes_500_clients": peak}
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
