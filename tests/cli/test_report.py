"""`polyfed report`: scores of runs and baselines, and what each method adds to the page."""

import re

import pytest

from polyfed.cli.main import main

TINY = [
    "--data.examples_per_client", "20", "--data.clients", "2", "--rounds", "1", "--workers", "0", "--quiet",
]  # fmt: skip
SPACE = [
    "--algorithm.channels", "4", "--algorithm.base_cells", "1", "--algorithm.base_nodes", "1",
    "--algorithm.personal_nodes", "1", "--algorithm.operations", "[skip, max_pool_3]",
]  # fmt: skip


@pytest.fixture
def polyfed(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder: status, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def polyfed(*words):
        capsys.readouterr()
        status = main(words)
        return status, *capsys.readouterr()

    polyfed.here = tmp_path
    return polyfed


@pytest.mark.slow
def test_operations_of_a_search_and_a_baseline(polyfed):
    words = ["--data", "digits", "--algorithm", "fedpnas", *SPACE, *TINY, "--baselines", "[local]", "--out", "a"]
    assert polyfed("run", *words)[0] == 0
    before = {path: path.read_bytes() for path in (polyfed.here / "a").rglob("*") if path.is_file()}
    status, out, _ = polyfed("report", "a")
    assert status == 0
    assert all(path.read_bytes() == content for path, content in before.items())
    page = (polyfed.here / "a" / "report.html").read_text(encoding="utf-8")
    section = page[page.index("Conflicts with the federated gradient") :]
    assert re.search(r"[012] of 2 sites have a gradient that contradicts the federated one", section)
    assert "Not shown" not in page
    firsts = re.findall(r"^│ ([\w-]+)", out, re.MULTILINE)
    assert firsts[:4] == ["fedpnas", "local", "client-000", "client-001"]
    assert "most probable operation of each edge" in out
    assert "c(k-1) → 0" in out
    assert "base cell 1" in out and "personal cell 1" in out  # noqa: PT018
    assert set(re.findall(r'<img alt="The cells of ([\w-]+)', page)) == {"client-000", "client-001"}
    assert "personal cell 1 of client-001: probability of each operation at each edge" in page
    assert not (polyfed.here / "a" / "report").exists()


@pytest.mark.slow
def test_pictures_of_other_methods(polyfed):
    assert polyfed("run", "--data", "digits", "--algorithm", "pfedla", *TINY, "--out", "b")[0] == 0
    aligned = ["--data.public_fraction", "0.1", "--algorithm.rad_size", "40", "--algorithm.rad_batch", "20"]
    assert polyfed("run", "--data", "digits", "--algorithm", "fedhenn", *aligned, *TINY, "--out", "c")[0] == 0
    status, out, _ = polyfed("report", "b", "c")
    assert status == 0
    assert re.search(r"fedhenn: mean CKA between two clients: \d\.\d\d before, \d\.\d\d after", out)
    page = (polyfed.here / "b" / "report.html").read_text(encoding="utf-8")
    assert "CKA of two sites&#x27; representations after training" in page
    assert "Weights of layer fc1 after round 1, site by site" in page
    assert "Not shown" not in page
    assert not list(polyfed.here.glob("*/report"))


def test_what_is_refused(polyfed):
    status, _, err = polyfed("report", "nothing")
    assert (status, "nothing does not exist" in err) == (2, True)
    assert polyfed("report")[0] == 2
    assert polyfed("report", "--help")[0] == 0


def test_quiet_prints_the_path_alone_and_no_command_replaces_a_file_of_others(polyfed):
    words = ["--data", "digits", "--algorithm", "local", *TINY, "--out", "a"]
    assert polyfed("run", *words)[0] == 0
    status, out, _ = polyfed("report", "a", "-q", "--out", "page.html")
    assert (status, out) == (0, "Everything on one page: page.html\n")
    assert polyfed("report", "a", "-q", "--out", "page.html")[0] == 0, "a page of its own is made again"
    (polyfed.here / "page.html").write_text("<!doctype html>mine")
    for command in (["report", "a"], ["look", "digits", "--data.clients", "2"]):
        status, _, err = polyfed(*command, "--out", "page.html")
        assert (status, err) == (2, "polyfed: page.html exists; choose another --out\n")
    assert (polyfed.here / "page.html").read_text() == "<!doctype html>mine"
    assert polyfed("report", "a", "-q")[0] == 0
    assert polyfed("data", "digits", "--data.clients", "2", "--quiet")[1] == ""
    assert polyfed("-V")[1] == polyfed("--version")[1]
