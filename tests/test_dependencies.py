"""What the code imports is what `pyproject.toml` declares: the core for everyone, extras behind `check_extra`."""

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import polyfed

SOURCE = Path(polyfed.__file__).parent
PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = {"yaml": "pyyaml", "PIL": "pillow", "sklearn": "scikit-learn"}
BROUGHT = {
    "IPython": "torch",  # never imported but in a notebook, which has it
    "huggingface_hub": "datasets", "markupsafe": "jinja2", "packaging": "matplotlib", "threadpoolctl": "scikit-learn",
}  # fmt: skip


@cache
def texts():
    """Each file of the package and what is in it."""
    return {file: file.read_text(encoding="utf-8") for file in sorted(SOURCE.rglob("*.py"))}


def distribution(package):
    return DISTRIBUTIONS.get(package, package.replace("_", "-"))


def names(requirements):
    return {re.match(r"[\w.-]+", one)[0] for one in requirements}


CORE = names(PROJECT["dependencies"])
EXTRAS = {extra: names(of) for extra, of in PROJECT["optional-dependencies"].items()}


@cache
def third_party():
    """Top-level packages that are neither polyfed nor Python's own, with one file each that imports them."""
    found = {
        package: file.name
        for file, text in texts().items()
        for package in re.findall(r"^ *(?:import|from(?=.* import )) (\w+)", text, re.MULTILINE)
    }
    return {package: file for package, file in found.items() if package not in {*sys.stdlib_module_names, "polyfed"}}


def test_every_package_that_is_imported_is_declared():
    declared = CORE | set().union(*(EXTRAS[extra] for extra in EXTRAS if extra not in ("dev", "docs")))
    for package, file in third_party().items():
        assert BROUGHT.get(package, distribution(package)) in declared, (package, file)
    assert {"torch", "yaml", "datasets", "ray"} <= third_party().keys()


def test_the_core_is_small():
    """What one data source, one option or one engine needs is an extra."""
    wanted = (
        "torch numpy safetensors jsonargparse docstring-parser pyyaml rich jinja2 matplotlib pillow scikit-learn scipy "
        "pyarrow"
    )
    assert set(wanted.split()) == CORE


def test_every_extra_that_an_error_names_installs_the_package():
    calls = [
        node
        for text in texts().values()
        if "check_extra_installed(" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "check_extra_installed"
    ]
    pairs = {tuple(a.value if isinstance(a, ast.Constant) else None for a in call.args[:2]) for call in calls}
    assert len(pairs) >= 6
    for package, extra in pairs - {(None, "tracking")}:  # tensorboard or mlflow
        assert distribution(package) in EXTRAS[extra], (package, extra)
    assert EXTRAS["tracking"] == {"tensorboard", "mlflow"}


# Tests of ONNX have packages that record what they are asked.
@pytest.mark.parametrize("extra", sorted(set(EXTRAS) - {"dev", "export"}))
def test_the_tests_have_every_extra(extra):
    (of_polyfed,) = (one for one in PROJECT["optional-dependencies"]["dev"] if one.startswith("polyfed["))
    assert extra in re.findall(r"[\w-]+", of_polyfed.partition("[")[2])
