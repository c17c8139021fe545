"""How long a user waits before anything happens: answers of the command line, imports, the first round, the installation.

    python benchmarks/start.py --out benchmarks/results/start.json              seconds, each the mean of three
    python benchmarks/start.py --out benchmarks/results/start.json --install    and of `make demo` in a fresh clone

Each figure is of new processes, started one after the other on a machine that does nothing else; one start that is not
counted comes first, so that files are in memory. `processor` is the time that they spent computing, on all cores together,
which a busy machine lengthens less. The first round ends when `metrics.jsonl` has its first line.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

POLYFED = [sys.executable, "-m", "polyfed"]
ANSWERS = {  # words -> exit status
    "--help": 0,
    "--version": 0,
    "list": 0,
    "list algorithms": 0,
    "list data": 0,
    "list models": 0,
    "list recipes": 0,
    "run --help": 0,
    "rnu": 2,
    "run --roundz 3": 2,
    "run quikstart": 2,
    "run --algorithm.muu 3": 2,
    "compare quickstart --algorithm fedavgg": 2,
}
IMPORTS = {
    "import torch": "import torch",
    "import torch, polyfed": "import torch, polyfed",
    "import torch, and every public name of polyfed": "import torch; from polyfed import *",
}
ROOT = Path(__file__).parents[1]


def seconds_of(command, status=0):
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - start
    assert done.returncode == status, (command, done.returncode, done.stderr)
    return seconds


def first_round():
    """Seconds from the start of `polyfed run` to the first line of metrics.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        start = time.perf_counter()
        process = subprocess.Popen(
            [*POLYFED, "run", "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            while not ((lines := out / "metrics.jsonl").exists() and "\n" in lines.read_text(encoding="utf-8")):
                assert process.poll() is None, "the run ended before its first round"
                time.sleep(0.01)
            return time.perf_counter() - start
        finally:
            process.terminate()
            process.wait()


def several(measure, number):
    measure()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = [measure() for _ in range(number)]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"mean": statistics.fmean(found), "low": min(found), "high": max(found), "processor": spent / number}


def installation():
    """`make demo`, then what `make test` installs besides, in a fresh clone of the last commit."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "polyfed"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

        def make(target):
            start = time.perf_counter()
            subprocess.run(["make", target], cwd=clone, env=environment, stdout=subprocess.DEVNULL, check=True)
            return time.perf_counter() - start

        def megabytes():
            files = (path for path in (clone / ".venv").rglob("*") if path.is_file() and not path.is_symlink())
            return sum(path.stat().st_size for path in files) / 2**20

        found = {"core": make(".venv/.core"), "megabytes_core": megabytes(), "demo": make("demo")}
        found["demo"] += found["core"]
        return found | {"dev": make(".venv/.dev"), "megabytes_dev": megabytes()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--number", type=int, default=3)
    parser.add_argument("--install", action="store_true")
    asked = parser.parse_args()
    seconds = {
        f"polyfed {words}": several(lambda w=words, s=status: seconds_of([*POLYFED, *w.split()], s), asked.number)
        for words, status in ANSWERS.items()
    }
    for name, code in IMPORTS.items():
        seconds[name] = several(lambda c=code: seconds_of([sys.executable, "-c", c]), asked.number)
    seconds["polyfed run, to the end of the first round"] = several(first_round, asked.number)
    before = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    content = {
        "seconds": seconds,
        "installation": installation() if asked.install else before.get("installation"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print("| | seconds | lowest | highest | processor |\n|---|---|---|---|---|")
    for name, one in seconds.items():
        print(f"| `{name}` | {' | '.join(f'{one[key]:.2f}' for key in ('mean', 'low', 'high', 'processor'))} |")
    if content["installation"]:
        print("\n" + ", ".join(f"{name} {value:.0f}" for name, value in content["installation"].items()))


if __name__ == "__main__":
    main()
