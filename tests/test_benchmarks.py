"""What the scripts of benchmarks/ import is there; real learning on Fashion-MNIST, compared with a bare PyTorch loop
(benchmarks/accuracy.py)."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "examples"])
def test_what_scripts_import_of_polyfed_is_there(folder):
    """They are not run by the fast tests, and names move."""
    scripts = sorted((ROOT / folder).rglob("*.py"))
    assert scripts
    for script in scripts:
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "polyfed":
                module = importlib.import_module(node.module)
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")


@pytest.mark.slow
def test_accuracy_after_five_rounds_is_that_of_the_bare_loop():
    """20 clients × 1,000 images, the 582k CNN; the script fails if they are more than half a point apart."""
    command = [sys.executable, str(BENCHMARKS / "accuracy.py"), "--seeds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same order of minibatches: at most" in done.stdout
