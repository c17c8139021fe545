"""Six methods on digits with four architectures, three seeds: `polyfed compare` timed, killed half-way and gone on with.

    python benchmarks/compare.py --out benchmarks/results/compare_digits.json

Runs benchmarks/compare_digits.yaml as a user would, prints the table and the wall-clock seconds, and writes the content of
`comparison.json` with `measured` added. With --killed the same comparison runs again, is killed (SIGKILL) when half of
its runs are finished, and goes on; the script fails unless both have the same results but for the seconds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
COMPARE = [sys.executable, "-m", "polyfed", "compare"]


def without_seconds(value, at=""):
    """The results without what a clock has measured."""
    if isinstance(value, dict):
        return {key: without_seconds(item, key) for key, item in value.items() if key != "seconds"}
    if isinstance(value, list) and at == "curve":
        return [point[:3] for point in value]
    return [without_seconds(item) for item in value] if isinstance(value, list) else value


def finished_runs(out):
    return len(list(out.glob("*/seed-*/models/*-007.safetensors")))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--killed", action="store_true")
    parser.add_argument("--out")
    given, options = parser.parse_known_args()
    # The runs that are compared, all of their rounds, and nothing else: a search would be most of what is timed.
    plain = ["--tune", "none", "--no_references", "--budget", "steps"]
    words = [str(HERE / "compare_digits.yaml"), "--seeds", given.seeds, *plain, *options]
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        start, load = time.perf_counter(), os.getloadavg()[0]
        subprocess.run([*COMPARE, *words, "--out", str(whole)], check=True)
        seconds, spent = time.perf_counter() - start, os.times()
        content = json.loads((whole / "comparison.json").read_text())
        runs = len(content["methods"]) * len(content["seeds"])
        cores = len(os.sched_getaffinity(0))
        measured = {"seconds": round(seconds, 1), "runs": runs, "cores": cores, "load_before": load}
        measured |= {"core_seconds": round(spent.children_user + spent.children_system, 1), "options": options}
        print(f"{runs} runs in {seconds:.0f} s on {cores} cores, load before {load:.1f}: {measured}")
        if given.killed:
            process = subprocess.Popen([*COMPARE, *words, "--out", str(killed), "--quiet"])
            while finished_runs(killed) < runs // 2:
                time.sleep(0.05)
            process.kill()
            process.wait()
            subprocess.run([*COMPARE, str(killed), "--quiet"], check=True)
            again = json.loads((killed / "comparison.json").read_text())
            measured["same_after_kill"] = without_seconds(again) == without_seconds(content)
            assert measured["same_after_kill"], "a comparison that was killed and gone on with has other results"
            print("killed half-way and gone on with: the same results")
    if given.out:
        Path(given.out).write_text(json.dumps({**content, "measured": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
