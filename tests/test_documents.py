"""What README, the guides and the examples show does run."""

import ast
import re
import shlex
import subprocess
import sys
import tomllib
import unicodedata
from pathlib import Path

import pandas
import pytest
import torch
import yaml

import polyfed
from polyfed.algorithms import REGISTRY
from polyfed.cli.commands.papers.paper_tables import find_table
from polyfed.cli.main import main
from tests.few_cases import few

ROOT = Path(__file__).parent.parent


def python_blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)


def run(*arguments, cwd):
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def test_readme_code_for_a_frame(tmp_path, monkeypatch):
    """It runs after its example's imports, on a pandas frame with texts."""
    (code,) = re.findall(r"```py\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    sites, sexes, outcomes = ["north", "south", "west"] * 20, ["f", "m"] * 30, ["no", "no", "no", "yes", "yes"] * 12
    ages = [row * row % 61 for row in range(60)]
    frame = pandas.DataFrame({"age": ages, "sex": sexes, "hospital": sites, "outcome": outcomes})
    monkeypatch.chdir(tmp_path)
    exec(code.replace("rounds=20", "rounds=2"), {"pf": polyfed, "nn": torch.nn, "frame": frame})  # noqa: S102
    assert (tmp_path / "handover" / "network.ts").is_file()


@pytest.mark.slow  # .ci/run has it
def test_own_data_example(tmp_path):
    done = run("-W", "error", str(ROOT / "examples" / "own_data.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^mean +0\.\d", done.stdout, flags=re.MULTILINE)
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


def table_of(printed):
    """Site -> accuracy, by method, of the tables that two examples print."""
    (_, *sites), *lines = (line.split() for line in printed.splitlines())
    return {name: dict(zip(sites, map(float, scores), strict=True)) for name, *scores in lines}


@pytest.mark.slow
def test_multimodal_example(tmp_path):
    """Every method runs on both kinds of networks, and those that see the record too are better."""
    done = run("-W", "error", str(ROOT / "examples" / "multimodal.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = table_of(done.stdout)
    assert list(found) == ["local", "fedhenn", "fedavg_kd", "flha_ghn"]
    for scores in found.values():
        assert min(scores["north"], scores["south"]) > max(scores["east"], scores["west"]) > 0.4


@pytest.mark.slow
def test_transformers_example(tmp_path):
    pytest.importorskip("transformers")
    done = run(str(ROOT / "examples" / "transformers_text.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = table_of(done.stdout)
    assert list(found) == ["local", "fedhenn"]
    assert all(accuracy > 0.7 for scores in found.values() for accuracy in scores.values())  # 0.5 is chance


def test_readme_commands(tmp_path, monkeypatch, capsys):
    """Each `polyfed` line of the use cases is accepted; what would take long prints its configuration or help instead."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [shlex.split(line, comments=True)[1:] for line in re.findall(r"^polyfed .*", text, flags=re.MULTILINE)]
    assert {command[0] for command in commands} == {
        "compare", "look", "reproduce", "flower", "list",
    }  # fmt: skip
    rows = [
        f"{age},{age % 2},{hospital},{age - 10},{age // 2 % 2}"
        for hospital, first in (("north", 20), ("south", 60))
        for age in range(first, first + 20)
    ]
    (tmp_path / "patients.csv").write_text("\n".join(["age,outcome,hospital,days,died", *rows]))
    (tmp_path / "scans").mkdir()
    assert main(["run", "quickstart", "--rounds", "1", "--quiet", "--workers", "0", "--out", "runs/heart"]) == 0
    for command in [*commands, ["resume", "runs/heart"]]:
        if command[0] == "reproduce":
            continue  # tests/cli/papers/test_reproduce.py runs each
        shortened = ["--print_config"] if command[0] in ("run", "compare") else []
        assert main([*command, *shortened]) == 0, (command, capsys.readouterr().err)


def test_commands_of_the_faq_are_accepted(tmp_path, monkeypatch, capsys):
    """Those of its first table; runs and comparisons print their configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_code.py").write_text("def wide(num_classes): ...\ntuned = focal = cost = wide\n")
    text = (ROOT / "docs/faq.md").read_text(encoding="utf-8").partition("\n## My run")[0]
    (table,) = re.findall(r"`TABLE` stands for `([^`]+)`", text)
    commands = [shlex.split(one.replace("TABLE", table))[1:] for one in re.findall(r"`(polyfed [^`]+)`", text)]
    asked = [command for command in commands if command[0] in ("run", "compare")]
    assert len(asked) >= 10
    for command in asked:
        assert main([*command, "--print-config"]) == 0, (command, capsys.readouterr().err)
    assert {command[0] for command in commands} == {"run", "compare", "export", "predict", "report"}
    sys.modules.pop("my_code", None)


@pytest.mark.lists
def test_readme_counts_the_methods():
    found = re.search(r"polyfed has (\d+)\s+methods", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert found is not None
    assert int(found[1]) == len(REGISTRY)


def test_readme_names_a_table_that_can_be_reproduced():
    (line,) = re.findall(r"^polyfed reproduce .*", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    _, _, paper, table, *_ = shlex.split(line, comments=True)
    assert find_table(paper, table)


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
        "-o",
        "fedavg_digits",
        "fedavg_digits",
        "config.yaml",
        "runs/choice",
        "runs/choice",
    ]
    for line in lines:
        options = {"runs/choice": [], "-o": small[4:]}.get(line[1], small)
        assert main([*line, *options, "--quiet"]) == 0, (line, capsys.readouterr().err)
    (block,) = python_blocks("docs/compare.md")
    clients = "from polyfed.testing import small_clients\nclients = small_clients(3)\n"
    block = block.replace("rounds=50", "rounds=2").replace("runs/choice", "runs/python")
    check = "assert comparison.table() and comparison.results['format'] == 2\n"
    (tmp_path / "example.py").write_text(clients + block + check)
    done = run("-W", "error", "example.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


SUBJECTS = sorted(page.stem for page in (ROOT / "docs").glob("*.md") if page.with_suffix("").is_dir())


@pytest.mark.parametrize("name", [name for name in SUBJECTS if name not in ("leaderboard", "methods", "results")])
def test_a_long_subject_has_a_short_page_and_pages_that_begin_with_a_question(name):
    """The first page is read in ten minutes, and leads to each of the others."""
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 1700
    for page in (ROOT / "docs" / name).glob("*.md"):
        assert f"]({name}/{page.name}" in text
        title, first, *_ = page.read_text(encoding="utf-8").split("\n\n")
        assert title.startswith("# ")
        assert "?" in title + first, f"{page.name} begins with: {first}"


@pytest.mark.lists
@pytest.mark.parametrize(
    "page",
    few(
        [
            "networks",
            "tasks",
            "tasks/survival",
            "tasks/tokens",
            "tasks/own_loss",
            "tasks/own_task",
            "tasks/segmentation",
            "security/bad_site",
            "scaling",
            "data/several_inputs",
        ],
        ["networks", "data/several_inputs"],
    ),
)
def test_the_examples_of_a_page_run_as_they_stand(page):
    namespace = {"__name__": "my_tasks"}
    torch.manual_seed(0)  # examples draw data
    for block in python_blocks(f"docs/{page}.md"):
        exec(compile(block, f"docs/{page}.md", "exec"), namespace)  # noqa: S102  # the page's own code
        assert namespace["run"].history[-1]["train_loss"] < namespace["run"].history[0]["train_loss"]


@pytest.mark.parametrize("page", ["data", "export", pytest.param("look", marks=pytest.mark.slow)])
def test_short_examples_of_a_page_can_be_pasted(page, tmp_path, monkeypatch):
    """In their order, without anything before them; the last of look.md takes a row of the reader's own table."""
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in python_blocks(f"docs/{page}.md") if "predict(" not in block]
    code = (
        "\n".join(blocks).replace("rounds=20", "rounds=2").replace('out="runs/c"', 'out="runs/c", seeds=2, tune="none"')
    )
    assert code
    exec(compile(code, f"docs/{page}.md", "exec"), {"__name__": "pasted"})  # noqa: S102  # the page's own code


def test_there_is_one_guide_to_a_method():
    """docs/add_a_method.md, whose code tests/test_site.py runs."""
    assert python_blocks("CONTRIBUTING.md") == []
    assert "docs/add_a_method.md" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.lists
def test_every_method_is_in_the_documents():
    text = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    assert [name for name in REGISTRY if f"`{name}`" not in text] == []


@pytest.mark.lists
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
    assert [
        (method, name) for method, name, value, text in fields if not tabulate_defaults.provenance(value, text)
    ] == []


def anchors_of(document):
    """The anchors of a page's headings that the site and GitHub write alike, and of its `<a id="...">`."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = [re.sub(r"\]\([^)]*\)", "", title) for title in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)]
    plain = (unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode().lower() for title in titles)
    of_site = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip()) for title in plain}
    of_github = {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}
    return (of_site & of_github) | set(re.findall(r'<a id="([\w-]+)">', text))


def test_links_between_documents_lead_somewhere():
    """To a file, and to a heading in it; headings of the reference are made by the site."""
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
    anchors = {document.resolve(): anchors_of(document) for document in documents}
    for document in documents:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", document.read_text(encoding="utf-8")):
            if target.startswith("http"):
                continue
            page = (document.parent / target).resolve() if target else document.resolve()
            assert page.exists(), f"{document.name} links to {target}"
            if anchor and page in anchors and page.parent.name != "api":
                assert anchor in anchors[page], f"{document.name} links to {target}#{anchor}"


def test_the_citation_is_of_this_version():
    """The fields that the format 1.2.0 requires, and no identifier that nobody has given."""
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(found)
    assert found["cff-version"] == "1.2.0"
    assert all(set(author) == {"name"} for author in found["authors"])  # an organisation
    assert not {"doi", "identifiers"} & set(found)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (found["version"], found["license"]) == (project["version"], project["license"].split(" AND "))


def test_the_map_of_the_code_has_its_packages_and_files():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    packages = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", text, flags=re.MULTILINE)
    layout = ast.parse((ROOT / "tests" / "test_layout.py").read_text(encoding="utf-8"))
    (known,) = (
        ast.literal_eval(node.value)
        for node in layout.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "ROOMS"
    )
    assert tuple(packages) == known
    source = ROOT / "src" / "polyfed"
    bases = (source, source.parent, source / "simulation", ROOT)
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", text)
    assert len(named) > 10
    missing = [file for file in named if not any((base / file).exists() for base in bases)]
    assert [file for file in missing if "NAME" not in file] == []


def test_no_two_lines_of_the_changelog_begin_alike():  # merges double them
    lines = re.findall(r"^- .*", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    beginnings = [line[:30] for line in lines]
    assert [line for line in lines if beginnings.count(line[:30]) > 1] == []


def test_the_landing_page_leads_to_every_how_to_and_says_how_to_cite():
    """In one click; the pages below another are a second one."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    (guides,) = [entry["How-to"] for entry in config["nav"] if "How-to" in entry]
    pages = [page if isinstance(page, str) else page[0] for entry in guides for page in entry.values()]
    assert [page for page in [*pages, "security.md"] if f"]({page}" not in text] == []
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    cited = {**{name: citation[name] for name in ("title", "version")}, "license": " AND ".join(citation["license"])}
    for field, value in cited.items():
        assert re.search(rf"^  {field} += {{{re.escape(value)}}}", text, flags=re.MULTILINE)
    assert citation["repository-code"] in text
