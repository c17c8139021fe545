"""What the commands do where a system is not Linux, as far as Linux can show it (`other_systems.py`)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parents[1]


def run_commands(system, folder, *commands):
    """The output of commands of one process, whose standard output has the encoding of a Windows terminal."""
    words = " + ".join(commands).split()
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252", "PYTHONPATH": str(ROOT / "src"), "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "other_systems.py", system, *words],
        cwd=folder, env=environment, capture_output=True, text=True, encoding="cp1252", timeout=600,
    )  # fmt: skip
    assert not done.returncode, done.stdout[-2000:] + done.stderr[-4000:]
    return dict(re.findall(r"^\$ polyfed (\S+).*\n((?:(?!\$ ).*\n?)*)", done.stdout, re.M))


@pytest.mark.parametrize("system", ["windows", "macos"])
def test_a_run_is_made_resumed_shown_and_exported(system, tmp_path):
    printed = run_commands(
        system, tmp_path, "run quickstart --rounds 2 --out run", "resume run", "report run", "show run --json",
        "list algorithms --json", "export run --client VA --out network",
    )  # fmt: skip
    assert "Hungary" in printed["run"]
    assert "Hungary" in printed["resume"]
    assert (tmp_path / "run" / "report.html").read_text("utf-8").count("Switzerland")
    assert json.loads(printed["show"])["format"] == 1
    assert json.loads(printed["list"])["format"] == 1
    assert "weights.safetensors" in printed["export"]


def test_a_comparison_is_made_and_shown_on_windows(tmp_path):
    printed = run_commands(
        "windows",
        tmp_path,
        "compare quickstart --rounds 2 --folds 2 --tune none --out both",
        "report both",
        "show both",
    )
    assert "Switzerland" in printed["compare"]
    assert "comparison of fml, local, finished" in printed["show"]
    assert "<svg" in (tmp_path / "both" / "report.html").read_text("utf-8")
