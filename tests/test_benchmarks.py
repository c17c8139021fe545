"""Real learning on Fashion-MNIST, beside a bare PyTorch loop written without polyfed (benchmarks/accuracy.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.slow
def test_accuracy_after_five_rounds_is_that_of_the_bare_loop():
    """20 clients × 1,000 images, the 582k CNN; the script fails if they are more than half a point apart."""
    command = [sys.executable, str(BENCHMARKS / "accuracy.py"), "--seeds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same order of minibatches: at most" in done.stdout
