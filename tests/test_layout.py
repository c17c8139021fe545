"""Rules of the code base that no type checker knows: who may import whom, and what a start may cost."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import polyfed

SOURCE = Path(polyfed.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
HEAVY = (
    "datasets",
    "kornia",
    "sklearn",
    "matplotlib",
    "torch_geometric",
    "pandas",
    "scipy",
    "pyarrow",
    "PIL",
    "flwr",
    "ray",
)


def name(file):
    return str(file.relative_to(SOURCE))


@cache
def imported(file):
    """Modules that a file imports, at its top or in a function; `from a import b` gives a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(file)}: relative import"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def users_of(package):
    return {
        name(file)
        for file in FILES
        if any(module == package or module.startswith(f"{package}.") for module in imported(file))
    }


def test_methods_do_not_know_where_they_run():
    """The engines run methods; a method knows neither them nor the loop, the run directory or the command line."""
    for package in ("engines", "federation", "rounds", "runs", "commands", "cli"):
        users = users_of(f"polyfed.{package}")
        assert not {user for user in users if user.startswith("algorithms/")}, package


@pytest.mark.parametrize(
    ("package", "allowed"),
    {
        "polyfed.cli": {"__main__.py"},
        "polyfed.commands": {"cli.py", "commands/", "federation.py", "comparison.py"},
        "polyfed.testing": set(),
        "polyfed.engines.pool": {"engines/"},
        "flwr": {"engines/flower.py"},
        "ray": {"engines/ray.py"},
    }.items(),
)
def test_only_these_import(package, allowed):
    users = users_of(package)
    assert {u for u in users if not any(u.startswith(a) for a in allowed)} == set()


def test_lower_layers_do_not_import_higher_ones():
    for low in ("data/", "models/"):
        for package in ("algorithms", "engines", "federation", "rounds", "runs", "commands", "training"):
            assert not {user for user in users_of(f"polyfed.{package}") if user.startswith(low)}, (low, package)


def test_fit_is_the_only_training_loop():
    """`x.step()` occurs once, in `training.fit`."""
    steps = []
    for file in FILES:
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                steps += [
                    (name(file), function.name)
                    for node in ast.walk(function)
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step"
                ]
    assert steps == [("training.py", "fit")]


def test_the_library_stands_on_its_own():
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        assert "../shared" not in text, name(file)
        assert "/work/" not in text, name(file)


def test_files_are_short():
    for file in [*FILES, *Path(__file__).parent.rglob("*.py")]:
        assert len(file.read_text(encoding="utf-8").splitlines()) < 400, file


QUICKSTART = """
import sys
import polyfed
heavy = set({heavy!r})
assert not heavy & set(sys.modules), ("import polyfed", heavy & set(sys.modules))
from polyfed.commands import experiment, options, recipes, running
config = recipes.load_recipe("quickstart")
config.pop("description")
found = experiment.participants(experiment.from_config(options.parse([], config, "polyfed run")))
running._check(experiment.from_config(options.parse([], config, "polyfed run")), found)
assert len(found.clients) == 8
assert not heavy & set(sys.modules), ("quickstart", heavy & set(sys.modules))
"""


def test_nothing_heavy_is_imported_for_the_quickstart():
    """Each of these costs up to seconds; whoever needs one imports it where it is used."""
    code = QUICKSTART.format(heavy=HEAVY)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
