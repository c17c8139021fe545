"""The counts of the attacks on files again: `python tests/hostile/count.py [SECONDS] [SEED] [CASES] [KIND ...]`, of each
kind of file at most so many seconds and cases."""

import sys
import tempfile
from pathlib import Path

from fuzz import table

if __name__ == "__main__":
    seconds, seed, cases = (*map(float, sys.argv[1:4]), *(20, 0, 10**9)[len(sys.argv[1:4]) :])
    with tempfile.TemporaryDirectory() as folder:
        rows = table(Path(folder) / "files", seconds, int(seed), int(cases), tuple(sys.argv[4:]))
    sys.exit(any(found.failures for found in rows.values()))
