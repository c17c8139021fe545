"""The counts of the attacks on files again: `python tests/hostile/count.py [SECONDS OF EACH KIND] [SEED]`."""

import sys
import tempfile
from pathlib import Path

from fuzz import table

if __name__ == "__main__":
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as folder:
        rows = table(Path(folder) / "files", seconds, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    sys.exit(any(found.failures for found in rows.values()))
