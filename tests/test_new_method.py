"""`tools/new_method.py` begins methods that pass the contract, on every base."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from polyfed.testing import AlgorithmContract, example_of
from polyfed.testing.disclosure_audit import collect_facts_declared_as_revealed, find_revealed_facts
from tests.few_cases import few

ROOT = Path(__file__).parent.parent


def load(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load("new_method", ROOT / "tools" / "new_method.py")


class Contract(AlgorithmContract):
    """The suite, called by hand."""


def files(base="Averaging", **words):
    return tool.build_files(
        **{"name": "zeta", "family": "submodels", "base_name": base, "title": "Zeta", "paper": "A 2026"} | words
    )


@pytest.mark.parametrize("base", few(list(tool.BASES), {"BodyAndHeadMethod"}))
def test_a_new_method_passes_the_contract(base, tmp_path, monkeypatch):
    """Its server sees no private state and nothing undeclared, and a run has metrics of the network that it returns."""
    texts = files(base)
    assert list(texts) == [
        "src/polyfed/algorithms/submodels/zeta.py",
        "docs/methods/zeta.md",
        "tests/algorithms/test_zeta.py",
    ]
    (tmp_path / "zeta_method.py").write_text(texts["src/polyfed/algorithms/submodels/zeta.py"], encoding="utf-8")
    method = example_of(load("zeta_method", tmp_path / "zeta_method.py").Zeta).build(momentum=0.5)
    contract = Contract()
    contract.test_metrics_are_complete_and_of_the_returned_network(method)
    contract.test_private_state_is_not_sent(method)
    contract.test_single_client_runs(method)
    assert find_revealed_facts(method) <= collect_facts_declared_as_revealed(method)
    monkeypatch.setattr("polyfed.algorithms.Zeta", type(method), raising=False)
    (tmp_path / "zeta_tests.py").write_text(texts["tests/algorithms/test_zeta.py"], encoding="utf-8")
    load("zeta_tests", tmp_path / "zeta_tests.py").test_without_a_rate_it_keeps_the_first_networks()


@pytest.mark.parametrize("base", tool.BASES)
@pytest.mark.one_case
def test_what_is_written_is_formatted_and_short(base, tmp_path):
    for place, text in files(base).items():
        assert max(map(len, text.splitlines())) <= 150 if place.endswith(".md") else 125, place
        if place.endswith(".py"):
            (tmp_path / Path(place).name).write_text(text, encoding="utf-8")
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    for command in (["check", "--select", "F,E,W,I,D1", "--per-file-ignores", "test_*:D"], ["format", "--check"]):
        words = [sys.executable, "-m", "ruff", *command, *config, str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"name": "FedX"}, "a method's name is of small letters"),
        ({"name": "class"}, "a method's name is of small letters"),
        ({"family": "zoo"}, "no family 'zoo'; there are adapters, alignment, "),
        ({"base": "Sum"}, "no base 'Sum'; there are Averaging, "),
        ({"title": "FedAvg"}, "the class needs a new name"),
        ({"name": "fedavg", "family": "global_model", "title": "Fedavg"}, "fedavg.py is there already"),
    ],
)
def test_what_cannot_be_begun_is_refused(words, sentence):
    with pytest.raises(SystemExit, match=sentence):
        files(**words)


@pytest.mark.slow
def test_a_new_method_is_in_every_list_and_passes_all_that_is_asked_of_a_method(tmp_path):
    """In a copy of the repository, by the commands of the guide."""
    for part in ("src", "tests", "tools", "docs", "benchmarks"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in [
        *ROOT.glob("*.md"),
        *ROOT.glob("*.toml"),
        *ROOT.glob("*.py"),
        ROOT / "mkdocs.yml",
        ROOT / "CITATION.cff",
    ]:
        shutil.copy(file, tmp_path)
    words = [sys.executable, "tools/new_method.py", "zeta", "--family", "personalised", "--base", "BodyAndHeadMethod"]
    environment = {"PYTHONPATH": str(tmp_path / "src"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    for command in (words, [sys.executable, "tools/check_method.py", "zeta", "-n", "0"]):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert " failed" not in done.stdout
    assert "`zeta`" in (tmp_path / "docs/methods.md").read_text(encoding="utf-8")
    recipe = yaml.safe_load((tmp_path / "src/polyfed/cli/recipes/leaderboard.yaml").read_text(encoding="utf-8"))
    assert "zeta" in recipe["baselines"]
    assert "zeta" not in recipe["variants"]["architectures"]["baselines"]
