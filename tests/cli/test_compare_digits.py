"""The comparison of docs/report.md and benchmarks/notes/sites.md: six methods, killed half-way, ends as if it was not."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_six_methods_on_digits_with_four_architectures_killed_half_way():
    """benchmarks/compare.py fails if the comparison that was killed and gone on with has other results."""
    script = Path(__file__).parents[2] / "benchmarks" / "compare.py"
    done = subprocess.run(
        [sys.executable, str(script), "--killed", "--seeds", "0,1", "--rounds", "2"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "12 runs in" in done.stdout
    assert "killed half-way and gone on with: the same results" in done.stdout
