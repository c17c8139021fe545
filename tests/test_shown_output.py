"""What the how-to pages say that a command or a piece of code prints is what it prints.

README, the landing page, the tutorial and docs/compare.md are held by tests/test_story.py.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from polyfed.cli.main import main

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
OF_THE_STORY = {"index.md", "tutorial.md", "compare.md"}
HELD_HERE = {"data.md": 1, "privacy.md": 1, "tabular.md": 1, "configuration.md": 1, "deploy.md": 3}
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$|((?:^    [^\n]*\n)+)", flags=re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\w)")
NEAR = 0.05  # other processors round differently, which training amplifies: a score may move by some patients


def outputs_of(page):
    """Pairs of the block of commands or of Python before an output that a page shows, and this output."""
    blocks = [(kind, text or indented) for kind, text, indented in BLOCK.findall((DOCS / page).read_text("utf-8"))]
    return [(before[1], after[1]) for before, after in pairwise(blocks) if after[0] == "{ .text .output }"]


def arguments_of(block):
    """The arguments of the one `polyfed` command of a block."""
    (line,) = re.findall(r"^ *polyfed (.*)$", block, flags=re.MULTILINE)
    return shlex.split(line, comments=True)


def check_same(shown, printed, near=NEAR):
    """Checks that both have the same words, and numbers that are near."""
    texts = [" ".join(re.sub(r"[-━─┏┓┳┡┩╇└┘┴├┤┼╭╮]+", "-", text).split()) for text in (shown, printed)]
    words, printed_words = (" ".join(NUMBER.sub("#", text).split()) for text in texts)
    assert words == printed_words
    numbers, printed_numbers = ([float(number) for number in NUMBER.findall(text)] for text in texts)
    assert printed_numbers == pytest.approx(numbers, abs=near, rel=near)


def run_python(block, capsys, monkeypatch, tmp_path):
    """Runs a piece of code of a page in this process, as a module of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shown_example.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    capsys.readouterr()
    try:
        __import__("shown_example")
    finally:
        sys.modules.pop("shown_example", None)
    return capsys.readouterr().out


def test_every_output_that_a_page_shows_is_held_by_a_test():
    shown = {str(path.relative_to(DOCS)): len(outputs_of(path.relative_to(DOCS))) for path in DOCS.rglob("*.md")}
    assert {page: count for page, count in shown.items() if count and page not in OF_THE_STORY} == HELD_HERE


def test_the_page_about_data_shows_what_its_command_prints(capsys):
    ((block, shown),) = outputs_of("data.md")
    assert main(arguments_of(block)) == 0
    check_same(shown, capsys.readouterr().out, near=0)


def test_the_page_about_privacy_shows_what_its_code_prints(capsys, monkeypatch, tmp_path):
    ((block, shown),) = outputs_of("privacy.md")
    check_same(shown, run_python(block, capsys, monkeypatch, tmp_path), near=1e-4)


def test_the_page_about_tables_shows_what_its_code_prints(capsys, monkeypatch, tmp_path):
    ((block, shown),) = outputs_of("tabular.md")
    check_same(shown, run_python(block, capsys, monkeypatch, tmp_path))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:columns that had one value")  # goes to stderr, which the page does not show
@pytest.mark.filterwarnings("ignore:chol is 0 at")
def test_the_page_about_configuration_shows_what_its_command_prints(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    ((block, shown),) = outputs_of("configuration.md")
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    (tmp_path / "config.yaml").write_text(re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0])
    assert main([*arguments_of(block), "--quiet"]) == 0
    check_same(shown, capsys.readouterr().out, near=5)


def plain(text, folder):
    """The text without folders, dates, versions and room on the disk."""
    text = text.replace(f"{folder}{os.sep}", "").replace(f"polyfed {sys.argv[0]}", "polyfed")
    text = re.sub(r"\d{4}-\d\d-\d\d", "DATE", text)
    return re.sub(r"(?<= )\d+\.\d+\.\d+\S*(?=,| )|\d+\.\d+ GiB|port \d+", "#", text)


def test_the_page_about_deployment_shows_what_the_doctor_prints(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("polyfed.deploy.trial.project._write_catalogue", lambda path: path.write_text("{}"))
    _, _, (block, shown) = outputs_of("deploy.md")
    assert main(["flower", "init", "federation", "--sites", "north,south"]) == 0
    Path("federation/certificates/server.pem").unlink()
    capsys.readouterr()
    assert main(arguments_of(block)) == 1
    printed = plain(capsys.readouterr().out, tmp_path).splitlines()
    assert len(shown.splitlines()) == len(printed)
    for line, printed_line in zip(plain(shown, tmp_path).splitlines(), printed, strict=True):
        if not line.startswith("ok     port"):  # which something else may use here
            assert line == printed_line


@pytest.mark.slow
def test_the_page_about_deployment_shows_what_a_trial_prints(tmp_path):
    """A real SuperLink and two SuperNodes; the run's table has the same numbers but for rounding."""
    (commands, table), (health, healthy), _ = outputs_of("deploy.md")
    init, up, run = (shlex.split(line, comments=True) for line in commands.splitlines() if "polyfed flower" in line)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100"}
    polyfed = [sys.executable, "-m", "polyfed"]

    def printed_by(words):
        done = subprocess.run(
            [*polyfed, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    printed_by(init[1:])
    log = tmp_path / "up.log"
    with log.open("w") as output:
        trial = subprocess.Popen([*polyfed, *up[1:]], cwd=tmp_path, env=environment, stdout=output, stderr=output)
    try:
        began = time.monotonic()
        while "SuperNodes of north, south run" not in log.read_text():
            assert trial.poll() is None, log.read_text()
            assert time.monotonic() < began + 120, log.read_text()
            time.sleep(0.5)
        found = printed_by(run[1:])
        check_same(table, found[found.index("round 10") :].rpartition("\n/")[0] + "\n")
        found = re.sub(r"(?<=answered )\d+(?= s ago)", "3", printed_by(arguments_of(health)))
        shown = re.sub(r"(?<=answered )\d+(?= s ago)", "3", healthy)
        assert found.replace(f"{tmp_path}{os.sep}", "").splitlines() == shown.splitlines()
    finally:
        trial.send_signal(signal.SIGINT)
        trial.wait(60)
