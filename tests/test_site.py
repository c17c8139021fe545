"""The documentation site: complete, true to the code, and built without a warning."""

import dataclasses
import inspect
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import polyfed
from polyfed.algorithms import REGISTRY, base
from polyfed.algorithms.base.averaging import Averaging
from polyfed.cli.main import main
from polyfed.comparison.storage.comparison_directory import load_comparison
from polyfed.core.algorithm import Algorithm
from polyfed.core.methods.capabilities import (
    BringsNetwork,
    ResolvesAutoFields,
    TrainsAuxiliaryNetwork,
    ValidatesNetworks,
    WrapsNetwork,
)
from polyfed.core.methods.declared_words import TRAITS, NewDisclosure
from polyfed.core.training.config import LocalTraining
from polyfed.testing import AlgorithmContract

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
METHODS = sorted((DOCS / "methods").glob("*.md"))
OF_THE_PAPERS = [
    DOCS / "methods" / f"{name}.md"
    for name in ("flha_ghn", "fedhenn", "fedhenn_homo", "pfedla", "heur_pfedla", "fedpnas")
]
NOTES = sorted((ROOT / "benchmarks" / "notes").glob("*.md"))
MADE = {"benchmarks.md", *(f"benchmarks/{note.name}" for note in NOTES)}  # by the site itself


@pytest.fixture(scope="module")
def blocks():
    sys.path.insert(0, str(DOCS))
    try:
        import site_blocks
    finally:
        sys.path.remove(str(DOCS))
    return site_blocks


def page_of(name):
    return DOCS / "methods" / f"{name.removeprefix('ca_')}.md"


def nav_files():
    found = []

    def walk(entry):
        if isinstance(entry, str):
            found.append(entry)
        else:
            for inner in entry.values() if isinstance(entry, dict) else entry:
                walk(inner)

    walk(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    return found


def python_of(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.lists
def test_every_document_is_in_the_navigation_and_every_entry_is_a_document():
    documents = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert set(nav_files()) == documents | MADE
    assert len(nav_files()) == len(set(nav_files()))


def test_nothing_of_a_page_is_fetched_from_elsewhere():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert config["theme"]["font"] is False
    assert config["use_directory_urls"] is False
    assert config["strict"] is True
    assert not {"analytics"} & {*config, *config["extra"]}
    assert all((DOCS / script).is_file() for script in config.get("extra_javascript", ()))


@pytest.mark.parametrize("name", REGISTRY)
def test_a_methods_page_has_every_mark_and_section(name):
    text = page_of(name).read_text(encoding="utf-8")
    for kind in ("facts", "defaults", "results"):
        assert f"\n<!-- {kind} {name} -->\n" in text
    headings = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    differs = ["Where this differs from the paper"] if page_of(name) in OF_THE_PAPERS else []
    assert headings == ["When to use it", "Equation", "Defaults", "Details", *differs, "What proves it", "Results"]


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_a_methods_page_begins_with_what_a_reader_asks(path):
    """What it does, when to take it and when not, what it costs, and a line that runs it, before any detail."""
    opening, _, when = path.read_text(encoding="utf-8").partition("\n## Equation\n")[0].partition("## When to use it\n")
    assert len(opening.split("\n\n")[1].split()) < 50
    answers = re.findall(r"^- \*\*(Use it if|Not if|Cost)\*\*", when, flags=re.MULTILINE)
    assert answers == ["Use it if", "Not if", "Cost"]
    first = when.partition("<!-- facts ")[0]
    assert len(first.split()) < 160
    assert re.search(r"^(polyfed run|algorithm:) ", first, flags=re.MULTILINE)


@pytest.mark.parametrize("path", OF_THE_PAPERS, ids=lambda path: path.stem)
def test_every_deviation_from_a_paper_has_a_reason_and_an_effect(path):
    text = path.read_text(encoding="utf-8").partition("## Where this differs from the paper\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    assert rows[0][1:3] == ["polyfed", "why"]
    assert len(rows) > 5
    assert all(len(row) == 4 and all(row) for row in rows[2:])


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_a_methods_page_in_the_repository_is_filled_and_up_to_date(path, blocks):
    text = path.read_text(encoding="utf-8")
    assert text == blocks.filled(text), f"{path.name} is out of date: run python docs/fill_methods.py"


def test_a_page_that_is_not_filled_is_found(blocks):
    text = METHODS[0].read_text(encoding="utf-8")
    assert blocks.filled(text.replace("| field | default |", "| another | default |")) == text  # whatever stood there
    empty = "a\n<!-- defaults local -->\n<!-- end -->\nb\n"
    assert blocks.filled(empty) != empty
    assert blocks.filled(blocks.filled(empty)) == blocks.filled(empty)
    assert blocks.without_marks(blocks.filled(empty)).endswith("`privacy`.\n\nb\n")


@pytest.mark.parametrize("name", REGISTRY)
def test_defaults_on_a_methods_page_are_those_of_its_class(name, blocks):
    """Read back from the page: each field that differs from local training's, with the class's default."""
    text = blocks.without_marks(page_of(name).read_text(encoding="utf-8"))
    assert "<!--" not in text
    section = text.split("## Defaults")[1].split("## Details")[0]
    if f"### `{name}`" in section:
        section = section.split(f"### `{name}`")[1].split("### ")[0]
    shown = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", section, flags=re.MULTILINE))
    shown |= dict(re.findall(r"[:,] `(\w+): ([^`]*)`", section))  # with the meaning in docs/defaults.md
    shared = {field.name: field.default for field in dataclasses.fields(LocalTraining)}
    for field in dataclasses.fields(REGISTRY[name]):
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.name in shown:
            assert shown.pop(field.name) == str(value)
        else:
            assert value == shared[field.name]
            assert f"`{field.name}`" in section
    assert shown == {}


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_the_tests_that_a_page_names_are_there(path):
    named = re.findall(r"`(tests/[\w/.]+)::(\w+)`", path.read_text(encoding="utf-8"))
    assert len(named) >= 2
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{path.name} names {file}::{test}"


def form(text):
    """The text without its figures and its line breaks."""
    return " ".join(re.sub(r"-?\d+\.\d+", "#", text).split())


def figures(text):
    return re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", text)


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_figures_in_results_are_those_of_the_benchmarks(path):
    results = [DOCS / "results.md", *sorted((DOCS / "results").glob("*.md"))]
    gains = (DOCS / "leaderboard" / "federations.md", *sorted((DOCS / "multicentre").glob("*.md")))
    pages = (*NOTES, *results, *gains)  # all are made from committed results
    measured = {figure for page in pages for figure in figures(page.read_text(encoding="utf-8"))}
    text = path.read_text(encoding="utf-8").split("## Results")[1]
    assert [figure for figure in figures(text) if figure not in measured] == []


def test_rows_of_results_are_the_methods_own_beside_local_and_fedavg(blocks):
    shown = blocks.results("pfedla")
    rows = [row for row in shown.splitlines() if row.startswith(("| `", "| **`"))]
    names = {re.match(r"\| \**`(\w+)", row)[1] for row in rows}
    assert names == {"local", "fedavg", "pfedla"}
    text = "".join(note.read_text(encoding="utf-8") for note in NOTES)
    assert all(row in text for row in rows)
    assert "| **10** (chosen on validation)" in shown  # a row without a name belongs to the one before
    assert "Fashion-MNIST:\n\n| |" in blocks.results("fedpnas")  # what a table is of
    assert "No script" in blocks.results("fedrolex")
    assert "](../images/examples_pfedla.svg)" in shown
    assert "examples_" not in blocks.results("local")  # which is in the curves of others


@pytest.mark.parametrize(
    "path", [*METHODS, *(DOCS / "api").glob("*.md")], ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_links_of_pages_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
        assert target.startswith("http") or (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.lists
def test_modules_and_names_of_the_reference_are_there():
    """`::: polyfed.x.y` names something that can be imported, and every public name of polyfed is named."""
    named = []
    for path in (DOCS / "api").glob("*.md"):
        named += re.findall(r"^::: (polyfed[\w.]*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for name in named:
        found = polyfed
        for part in name.split(".")[1:]:
            if not hasattr(found, part):
                __import__(f"{found.__name__}.{part}")
            found = getattr(found, part)
        assert inspect.ismodule(found) or found.__doc__, name
    assert {f"polyfed.{name}" for name in polyfed.__all__} <= set(named)
    assert {f"polyfed.algorithms.{kind.__name__}" for kind in REGISTRY.values()} <= set(named)


GUIDE_TO_METHODS = [DOCS / "add_a_method.md", *sorted((DOCS / "add_a_method").glob("*.md"))]


def test_an_author_of_a_method_imports_from_one_place():
    """The guide's methods need no other module of polyfed, and each name of that place is an import from below."""
    code = "\n".join(block for page in GUIDE_TO_METHODS for block in python_of(page))
    places = set(re.findall(r"^(?:from|import) (polyfed[\w.]*)", code, flags=re.MULTILINE))
    assert places == {"polyfed", "polyfed.algorithms.base", "polyfed.testing"}
    assert sorted(set(base.__all__)) == sorted(base.__all__)
    assert [name for name in base.__all__ if not hasattr(base, name)] == []
    assert "base" in dir(polyfed.algorithms)
    for package, name in ((polyfed, "Averaging"), (polyfed.algorithms, "fit")):
        with pytest.raises(AttributeError, match=rf"did you mean polyfed\.algorithms\.base\.{name}\?"):
            getattr(package, name)


def test_completion_offers_what_is_public():
    for package in (polyfed.algorithms, polyfed.data, polyfed.models, polyfed.tasks):
        offered = {name for name in dir(package) if not name.startswith("_")}
        assert offered - set(package.__all__) <= {"base", "lora"}


@pytest.mark.slow
def test_the_method_that_is_added_passes_its_tests(tmp_path):
    code = "\n".join(block for page in GUIDE_TO_METHODS for block in python_of(page))
    (tmp_path / "test_median.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_median.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    contract = [name for name in dir(AlgorithmContract) if name.startswith("test_")]
    methods, own = (
        len(re.findall(word, code, flags=re.MULTILINE)) for word in (r"\(AlgorithmContract\):$", r"^def test_")
    )
    assert methods == 2
    assert own >= 6
    assert f"{methods * len(contract) + own} passed" in done.stdout


def test_the_guide_has_every_rarer_member_and_every_base(blocks):
    """What a method may derive from or override is in the tables of the guide."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in GUIDE_TO_METHODS)
    members = [
        name
        for name in [*vars(Algorithm), *vars(Averaging)]
        if not name.startswith("_") and callable(getattr(Averaging, name))
    ]
    mixins = [WrapsNetwork, ValidatesNetworks, TrainsAuxiliaryNetwork, ResolvesAutoFields, BringsNetwork, NewDisclosure]
    bases = [
        kind.__name__
        for file in sorted((ROOT / "src/polyfed/algorithms/base").rglob("*.py"))
        for kind in vars(import_module(".".join(file.relative_to(ROOT / "src").with_suffix("").parts))).values()
        if inspect.isclass(kind) and kind.__module__.endswith(file.stem) and kind.__name__.endswith("Method")
    ]
    assert {"LocalPartMethod", "AveragedHeadMethod"} <= set(bases)
    names = {*members, *bases, *(kind.__name__ for kind in mixins), *TRAITS, "card", "published"} - {
        "running_aggregate"
    }
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", text)) == []


WANDB = """
def init(project, config): print("wandb", project, config)
def log(numbers, step):
    assert all(isinstance(value, float | int) for value in numbers.values())
    print("wandb", step, "mean/accuracy" in numbers and "accuracy/VA" in numbers, numbers["megabytes"] > 0)
def finish(): print("wandb finished")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("tabular.md", "mean   accuracy 1.0"),
        ("metrics.md", ""),
        ("notebook.md", "not decided  mean over sites "),
        ("callbacks.md", "wandb 20 True True\nwandb finished\nstopped by StopEarly after round "),
    ],
)
def test_the_code_of_a_page_runs(page, printed, tmp_path):
    (tmp_path / "page.py").write_text("\n".join(python_of(DOCS / page)), encoding="utf-8")
    (tmp_path / "wandb.py").write_text(WANDB, encoding="utf-8")
    command = [sys.executable, "-W", "error", "page.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


@pytest.mark.slow
def test_the_tutorial_runs_as_it_stands(tmp_path, capsys, monkeypatch):
    """Its code without a warning, its answers consistent with their intervals, its commands accepted."""
    text = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    (tmp_path / "tutorial.py").write_text("\n".join(python_of(DOCS / "tutorial.md")), encoding="utf-8")
    command = [sys.executable, "-W", "error", "tutorial.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sites = ("Cleveland", "Hungary", "Switzerland", "VA")
    assert "fedavg needs one architecture, but the 4 clients have 2" in done.stdout
    scores = dict(re.findall(r"^(\w+) +AUC (\d\.\d+)  accuracy \d", done.stdout, flags=re.MULTILINE))
    assert list(scores) == [*sites, "mean"]
    assert float(scores["mean"]) > 0.6  # 0.5 is chance
    comparison = load_comparison(tmp_path / "runs" / "hospitals")
    assert str(comparison) in done.stdout
    told = comparison.results
    assert told["warnings"] == []
    assert {answer["client"] for answer in told["answers"]} == set(sites)
    for answer in (told["mean_answer"], *told["answers"]):
        low, high = answer["interval"]
        assert {"join": low > 0, "stay": high < 0, "undecided": low <= 0 <= high}[answer["answer"]]
    assert told["references"]["majority"]["mean"] == 0.5  # the AUC of one answer for all
    shown = re.findall(r"```\{ \.text \.output \}\n(.*?)```", text, flags=re.DOTALL)
    assert len(shown) == 7
    for block in (*shown[:4], shown[5]):  # the others have answers and counts, which need not be the same elsewhere
        assert form(block) in form(done.stdout), block
    monkeypatch.chdir(tmp_path)
    for line in re.findall(r"^polyfed report runs/hospitals.*", text, flags=re.MULTILINE):
        assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    page = (tmp_path / "runs" / "hospitals" / "report.html").read_text(encoding="utf-8")
    assert "Should each site join?" in page
    assert "Subgroups by sex" in page

    (tmp_path / "patients.csv").write_text("outcome,hospital,age\n" + "yes,north,50\nno,south,60\n" * 20)
    commands = re.findall(r"^polyfed (?:run|compare).*", text.replace("\\\n", " "), flags=re.MULTILINE)
    assert len(commands) == 3
    for line in commands:
        assert main([*shlex.split(line)[1:], "--print-config"]) == 0, capsys.readouterr().err
    fewer = ["--rounds", "1", "--tune", "none", "--quiet", "--out", "runs/fewer"]
    assert main(["compare", "quickstart", "--folds", "2", *fewer]) == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_the_command_of_a_methods_page_is_accepted(path, capsys, tmp_path, monkeypatch):
    """Or its experiment, where the clients' networks differ."""
    monkeypatch.chdir(tmp_path)
    networks = "def tuned():\n    return torch.nn.Linear(64, 10)\n\n\nshallow = deep = tuned\n"
    (tmp_path / "my_code.py").write_text(f"import torch\n\n\n{networks}", encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    lines = re.findall(r"^polyfed .*", text.replace("\\\n", " "), flags=re.MULTILINE)
    for content in re.findall(r"^```yaml\n(algorithm: .*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        (tmp_path / "experiment.yaml").write_text(content, encoding="utf-8")
        lines.append(f"polyfed run {(tmp_path / 'experiment.yaml').as_posix()}")
    (line,) = lines
    assert main([*shlex.split(line)[1:], "--print_config"]) == 0, capsys.readouterr().err


def test_lists_are_indented_as_the_site_needs_it(blocks):
    """An item's table, code and nested list, whatever the width of its mark; nothing outside of lists is touched."""
    text = (
        "1. a\n\n   | x |\n   - b\n\n         code\n\ntext\n\n    code - c\n"
        "```\n- d\n\n  e\n```\n- f\n  ```\n  g\n  ```\n\nh"
    )
    wanted = (
        "1. a\n\n    | x |\n\n    - b\n\n            code\n\ntext\n\n    code - c\n"
        "```\n- d\n\n  e\n```\n\n- f\n    ```\n    g\n    ```\n\nh"
    )
    assert blocks.four_spaces(text) == wanted
    assert blocks.four_spaces("a\n- b\n- c\n\n  d\n- e") == "a\n\n- b\n- c\n\n    d\n\n- e"
