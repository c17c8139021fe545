"""How often does README's example in Python decide? Its code on ten dealings of the digits among the sites.

    python benchmarks/readme_example.py [NUMBER]

The code is README's, but for the order of the images, which each dealing shuffles anew, and for the seeds of training, five
others for each. The results are in results/readme_example.json; dealings that are there are not repeated.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "readme_example.json"
sys.path.insert(0, str(ROOT / "docs"))

from make_story import read_comparison, readme_code  # noqa: E402


def shuffled_code(seed):
    """README's code with other images at each site, and other seeds."""
    code = readme_code()
    for line, replaced in (
        (
            "rows = lambda",
            f"order = np.random.default_rng({seed}).permutation(len(x))\nx, y = x[order], y[order]\nrows = lambda",
        ),
        ("rounds=10, ", f"rounds=10, seeds=range({5 * seed}, {5 * seed + 5}), quiet=True, "),
    ):
        assert code.count(line) == 1
        code = code.replace(line, replaced)
    return f"import numpy as np\n{code}"


def measure_dealing(seed):
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "example.py").write_text(shuffled_code(seed))
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-W", "error", "example.py"], cwd=name, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = read_comparison(Path(name))
    return {
        "interval": found["mean_interval"],
        "answer": found["mean_answer"],
        "sites": {site: answer["answer"] for site, answer in found["answers"].items()},
        "means": found["means"],
        "seconds": time.monotonic() - began,
        "processor seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def main():
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for seed in range(int(sys.argv[1]) if sys.argv[1:] else 10):
        if str(seed) not in results:
            results[str(seed)] = measure_dealing(seed)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(seed, results[str(seed)]["interval"], results[str(seed)]["answer"], flush=True)


if __name__ == "__main__":
    main()
