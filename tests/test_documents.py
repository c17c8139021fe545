"""What README, CONTRIBUTING and the examples show does run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from polyfed.algorithms import REGISTRY
from polyfed.cli import main

ROOT = Path(__file__).parent.parent


def python_blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)


def run(*arguments, cwd):
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.slow  # .ci/run has it
def test_own_data_example(tmp_path):
    done = run("-W", "error", str(ROOT / "examples" / "own_data.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'client': 'mean'" in done.stdout
    code = [line for line in (ROOT / "examples" / "own_data.py").read_text().splitlines() if line.strip()]
    assert len([line for line in code if not line.startswith(("import", "from", '"'))]) <= 15


@pytest.mark.slow
def test_any_network_example(tmp_path):
    """Networks in the form of MobileNetV2 and DenseNet join a federation with the zoo's; each learns."""
    done = run("-W", "error", str(ROOT / "examples" / "any_network.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("100% of the weights generated") == 3
    accuracies = re.findall(r"(\w+): accuracy ([0-9.]+)", done.stdout)
    assert [name for name, _ in accuracies] == ["north", "south", "west", "mean"]
    assert all(float(accuracy) > 0.4 for _, accuracy in accuracies)  # 0.1 is chance


@pytest.mark.slow  # .ci/run has it
def test_readme_example(tmp_path):
    (block,) = python_blocks("README.md")
    (tmp_path / "example.py").write_text(block)
    done = run("example.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'client': 'mean'" in done.stdout


def test_readme_commands(tmp_path, monkeypatch, capsys):
    """Each `polyfed` line is accepted; `run` and `compare` print their configuration instead of running."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [shlex.split(line, comments=True)[1:] for line in re.findall(r"^polyfed .*", text, flags=re.MULTILINE)]
    known = {"run", "resume", "report", "compare", "data", "list", "graph", "warmstart"}
    assert {command[0] for command in commands} == known
    assert main(["run", "fedavg_digits", "--rounds", "1", "--quiet", "--workers", "0", "--out", "runs/prox"]) == 0
    small = ["--algorithm", "flha_ghn", "--model", "flha_small", "--model.width", "8", "--data", "digits"]
    few = ["--data.clients", "2", "--data.examples_per_client", "20", "--rounds", "1", "--quiet", "--workers", "0"]
    assert main(["run", *small, *few, "--out", "runs/ghn"]) == 0
    (tmp_path / "config.yaml").write_text((tmp_path / "runs/prox/config.yaml").read_text())
    for command in commands:
        assert main([*command, *(["--print_config"] if command[0] in ("run", "compare") else [])]) == 0, (
            command,
            capsys.readouterr().err,
        )


@pytest.mark.slow
def test_commands_and_example_of_comparisons(tmp_path, monkeypatch, capsys):
    """The lines of docs/compare.md, on few data and rounds."""
    monkeypatch.chdir(tmp_path)
    small = ["--data.clients", "3", "--data.examples_per_client", "20", "--rounds", "2", "--workers", "0"]
    assert main(["run", "fedavg_digits", *small, "--quiet", "--out", "first"]) == 0
    (tmp_path / "config.yaml").write_text((tmp_path / "first/config.yaml").read_text())
    text = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    lines = [shlex.split(line, comments=True)[1:] for line in re.findall(r"^polyfed .*", text, flags=re.MULTILINE)]
    assert [line[1] for line in lines] == [
        "fedavg_digits",
        "fedavg_digits",
        "config.yaml",
        "runs/choice",
        "runs/choice",
    ]
    for line in lines:
        given = [] if line[1] == "runs/choice" else small
        assert main([*line, *given, "--quiet"]) == 0, (line, capsys.readouterr().err)
    (block,) = python_blocks("docs/compare.md")
    clients = "from polyfed.testing import small_clients\nclients = small_clients(3)\n"
    block = block.replace("rounds=50", "rounds=2").replace("runs/choice", "runs/python")
    (tmp_path / "example.py").write_text(clients + block + "assert found.table() and found.content['format'] == 2\n")
    done = run("-W", "error", "example.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_contributing_example_passes_the_contract(tmp_path):
    (tmp_path / "test_trimmed.py").write_text("\n".join(python_blocks("CONTRIBUTING.md")))
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_trimmed.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "10 passed" in done.stdout


@pytest.mark.parametrize("document", ["README.md", "docs/methods.md"])
def test_every_method_is_in_the_documents(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    assert [name for name in REGISTRY if f"`{name}`" not in text] == []


def test_defaults_are_those_of_the_code_and_each_has_its_provenance():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import tabulate_defaults
    finally:
        sys.path.pop(0)
    assert (ROOT / "docs" / "defaults.md").read_text(encoding="utf-8") == tabulate_defaults.table(), (
        "docs/defaults.md is out of date: run python docs/tabulate_defaults.py"
    )
    fields = [(method, *field) for method in REGISTRY for field in tabulate_defaults.own_fields(method)]
    assert [(method, name) for method, name, _, text in fields if not tabulate_defaults.provenance(text)] == []


def test_links_between_documents_lead_somewhere():
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name} links to {target}"
