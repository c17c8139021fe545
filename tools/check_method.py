"""Runs every test that concerns one method: `make check METHOD=fedgen`.

    python tools/check_method.py fedgen [more arguments for pytest]

The lists are brought up to date first. Then follow the method's own tests (`tests/algorithms/test_NAME.py`), and of each
test that loops over all methods what is of this one: the contract, page, defaults, checkpoints, hostile replies, traffic,
frozen parameters, structured inputs, small networks, the leaderboard's recipe and the number of lines.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def files_of(name: str) -> list[str]:
    """Returns the test files that loop over the registry, and the method's own."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        str(file.relative_to(ROOT))
        for file in files
        if file.stem == f"test_{name}" or "REGISTRY" in (text := file.read_text(encoding="utf-8")) or "METHODS" in text
    ]


def main() -> int:
    """Runs the command."""
    names = [word for word in sys.argv[1:] if not word.startswith("-")][:1]
    if not names:
        raise SystemExit("which method? make check METHOD=fedavg")
    (name,) = names
    lists = [sys.executable, str(ROOT / "tools" / "update_lists.py")]
    if (status := subprocess.run([*lists, name], cwd=ROOT, check=False).returncode) != 0:
        return status
    if not list((ROOT / "tests" / "algorithms").glob(f"test_{name}*.py")):
        missing = f"tests/algorithms/test_{name}.py"
        print(f"{missing} is missing: write what is true of {name} and of no other method", file=sys.stderr)
    more = [word for word in sys.argv[1:] if word != name]
    command = [sys.executable, "-m", "pytest", "-q", "--method", name, "--dist", "load", *more, *files_of(name)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
