"""What goes out with a release: metadata, links that work on PyPI, forms and workflows, one version everywhere."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import polyfed.simulation.storage.directory as directories
from polyfed.cli.commands.list_command import ListedChoices
from polyfed.cli.commands.results.show_command import JSON_FORMAT
from polyfed.comparison.storage.comparison_directory import RESULTS_FORMAT
from polyfed.core.errors import UserError
from polyfed.deploy.protocol.wire import PROTOCOL
from polyfed.graphs.catalogue import _FORMAT as CATALOGUE_FORMAT

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, REPOSITORY = CONFIG["project"], CONFIG["project"]["urls"]["Source"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read_yaml(file):
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def shown_on_pypi(text):
    """README as the build makes it, by the rules of pyproject.toml."""
    for rule in CONFIG["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    return text.replace("$HFPR_VERSION", PROJECT["version"])


def targets(text):
    return re.findall(r"\]\(([^)]+)\)|(?:src|href)=\"([^\"]+)\"", text)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[a](docs/x.md#y)", "[a](BLOB/docs/x.md#y)"),
        ("![a](docs/x.png)", "![a](RAW/docs/x.png)"),
        ("[![a](docs/x.png)](docs/x.md)", "[![a](RAW/docs/x.png)](BLOB/docs/x.md)"),
        ('<a href="LICENSE"><img src="docs/x.png"></a>', '<a href="BLOB/LICENSE"><img src="RAW/docs/x.png"></a>'),
        ("[a](https://x.org) [b](#c)", "[a](https://x.org) [b](#c)"),
    ],
)  # fmt: skip
def test_a_relative_link_leads_to_the_tag_of_the_version(written, shown):
    bases = {"BLOB": f"{REPOSITORY}/blob/v", "RAW": "https://raw.githubusercontent.com/polyfed/polyfed/v"}
    for word, base in bases.items():
        shown = shown.replace(word, f"{base}{PROJECT['version']}")
    assert shown_on_pypi(written) == shown


def test_each_link_of_readme_leads_somewhere_from_pypi_too():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    absolute = ["".join(pair) for pair in targets(shown_on_pypi(text))]
    assert [link for link in absolute if not link.startswith(("https://", "#"))] == []
    inside = [link for link in absolute if "/polyfed/polyfed/" in link and f"/v{PROJECT['version']}/" in link]
    assert len(inside) > 5
    for link in inside:
        path = link.partition(f"/v{PROJECT['version']}/")[2].partition("#")[0]
        assert (ROOT / path).exists(), link


def test_the_metadata_are_of_a_version_that_uploaders_know():
    built = CONFIG["tool"]["hatch"]["build"]["targets"]
    assert {built[name]["core-metadata-version"] for name in ("sdist", "wheel")} == {"2.4"}


def test_one_repository_is_named_everywhere():
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= PROJECT["urls"].keys()
    citation = read_yaml(ROOT / "CITATION.cff")
    assert citation["repository-code"] == REPOSITORY
    assert citation["url"] == PROJECT["urls"]["Documentation"]
    texts = [ROOT / "SECURITY.md", ROOT / "docs" / "versions.md", *FORMS, ROOT / "pyproject.toml"]
    links = [link for file in texts for link in re.findall(r"https://github\.com/[\w.-]+/[\w.-]+", file.read_text())]
    assert {*links} == {REPOSITORY}


def test_the_description_is_the_beginning_of_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r" \([^)]*\)", "", " ".join(readme.replace("**", "").split())).removeprefix("# polyfed ")
    assert text.startswith(f"{PROJECT['description']}.")
    assert f"site_description: {PROJECT['description']}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_one_version_is_named_everywhere():
    version = PROJECT["version"]
    assert read_yaml(ROOT / "CITATION.cff")["version"] == version
    (head,) = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith(f"## [{version}]")]
    date = re.search(r"\d{4}-\d\d-\d\d", head)  # none before the release
    assert read_yaml(ROOT / "CITATION.cff").get("date-released") == (date and date[0])
    assert ("unreleased" in head) == (date is None)


def test_the_changelog_says_each_thing_once():
    lines = [line for line in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines() if line.startswith("- ")]
    beginnings = [line[:30] for line in lines]
    assert [start for start in beginnings if beginnings.count(start) > 1] == []


def test_the_licence_covers_the_data_in_the_wheel():
    """SPDX: polyfed's own code, and the heart data, whose licence asks for attribution."""
    assert PROJECT["license"] == "Apache-2.0 AND CC-BY-4.0"
    licences = [(ROOT / file).read_text(encoding="utf-8") for file in PROJECT["license-files"]]
    assert "Apache License" in licences[0]
    assert "CC BY 4.0" in licences[1]


def test_the_notes_of_a_release_are_its_section_of_the_changelog(tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "notes", tmp_path / ".ci")
    sections = (
        "# Changelog\n\n## [1.1.0] (unreleased)\n- new\n\n## [1.0.0] 2026-12-01: the first\n- old [a](docs/a.md#b)\n"
    )
    (tmp_path / "CHANGELOG.md").write_text(sections)

    def notes_of(tag):
        return subprocess.run([tmp_path / ".ci" / "notes", tag], capture_output=True, text=True, check=False)

    assert notes_of("v1.0.0").stdout == f"- old [a]({REPOSITORY}/blob/v1.0.0/docs/a.md#b)\n"
    assert "1.1.0 is unreleased: give its date" in notes_of("v1.1.0").stderr
    assert "no section of 2.0.0" in notes_of("v2.0.0").stderr
    assert [notes_of(tag).returncode for tag in ("v1.0.0", "v1.1.0", "v2.0.0")] == [0, 1, 1]


def test_nothing_is_published_before_it_is_tested():
    jobs = read_yaml(ROOT / ".github/workflows/release.yml")["jobs"]
    assert (jobs["publish"]["needs"], jobs["announce"]["needs"]) == ("build", "publish")
    runs = [step.get("run", "") for step in jobs["build"]["steps"]]
    (check,) = [k for k, run in enumerate(runs) if "twine check --strict" in run]
    assert runs.index("bash .ci/run") < check


def test_the_formats_of_the_page_are_those_of_the_code():
    rows = dict(
        re.findall(
            r"^\| ([^|]+?)(?:,[^|]+)? \|[^|]+\| (\d+) \|$", (ROOT / "docs/versions.md").read_text(), re.MULTILINE
        )
    )
    assert int(rows["run directory"]) == directories.RUN_FORMAT
    assert int(rows["comparison"]) == RESULTS_FORMAT
    assert int(rows["output of `--json`"]) == JSON_FORMAT
    assert int(rows["catalogue of layer types"]) == CATALOGUE_FORMAT
    assert int(rows["messages between server and site"]) == PROTOCOL
    assert "format" in ListedChoices.__annotations__


def test_a_run_directory_of_a_newer_polyfed_is_refused(tmp_path):
    for content, accepted in (({"seed": 1}, True), ({"format": 1, "seed": 1}, True), ({"format": 2, "seed": 1}, False)):
        (tmp_path / "manifest.json").write_text(json.dumps(content))
        if accepted:
            assert directories.read_manifest(tmp_path) == content
        else:
            with pytest.raises(UserError, match="has format 2, and this polyfed reads 1; update polyfed"):
                directories.read_manifest(tmp_path)


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_have_few_rights_and_an_end(file):
    workflow = read_yaml(file)
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 120 for job in workflow["jobs"].values())
    for step in steps(workflow):
        assert ("uses" in step) != ("run" in step)
        assert "${{" not in step.get("run", ""), "what GitHub puts into a shell line could be a command"
        pinned = re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step.get("uses", f"a@{'0' * 40}"))
        assert pinned, "a tag may be moved: name the commit, with the version behind it as a comment"
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False
        script = re.match(r"(?:bash )?(\.ci/\w+)", step.get("run", ""))
        assert script is None or (ROOT / script[1]).stat().st_mode & 0o111


def test_no_system_changes_ends_of_lines():
    """As git on Windows does by default: bash reads no script with them."""
    assert "* -text" in (ROOT / ".gitattributes").read_text("utf-8").splitlines()
    assert not [file for file in (ROOT / ".ci").iterdir() if b"\r" in file.read_bytes()]


def test_ci_looks_at_every_python_the_lowest_versions_and_other_systems():
    jobs = read_yaml(ROOT / ".github/workflows/ci.yml")["jobs"]
    runs = {name: " ".join(step.get("run", "") for step in job["steps"]) for name, job in jobs.items()}
    assert ".ci/run" in runs["everything"]
    assert ".ci/lowest" in runs["lowest"]
    assert ".ci/smoke" in runs["smoke"]
    assert {system.partition("-")[0] for system in jobs["smoke"]["strategy"]["matrix"]["os"]} == {"macos", "windows"}
    pythons = {*jobs["pythons"]["strategy"]["matrix"]["python"], "3.11"}
    assert pythons == {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)}


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_forms_ask_for_no_data_and_can_be_filled_in(file):
    form = read_yaml(file)
    if file.stem == "config":
        assert all(link.keys() == {"name", "url", "about"} for link in form["contact_links"])
        return
    assert {"name", "description", "body"} <= form.keys()
    names = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(names) == len({*names}) > 0


@pytest.mark.parametrize("script", ["run", "wheel", "smoke", "lowest", "notes"])
def test_scripts_are_shell(script):
    subprocess.run(["bash", "-n", ROOT / ".ci" / script], check=True)
