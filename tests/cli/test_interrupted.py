"""Runs stopped by Ctrl-C, by kill -9 at any moment, by damage on the disk: resumed, they end as if they were not."""

import errno
import json
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from polyfed.cli.main import main
from polyfed.core.io.atomic_files import append_line_and_flush
from polyfed.testing import without_durations

RUN = [sys.executable, "-m", "polyfed", "run", "fedavg_digits", "--rounds", "8"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    subprocess.run([*RUN, "--out", str(out), "--quiet"], check=True, capture_output=True)
    return out


def assert_same_outcome(one: Path, other: Path):
    for part in (Path(), Path("baselines/local")):
        histories = [
            without_durations([json.loads(line) for line in (out / part / "metrics.jsonl").read_text().splitlines()])
            for out in (one, other)
        ]
        assert histories[0] == histories[1]
        names = [sorted(p.name for p in (out / part / "models").glob("*.safetensors")) for out in (one, other)]
        assert names[0] == names[1]
        assert len(names[0]) == 6
        for name in names[0]:
            ours, theirs = (safetensors.torch.load_file(out / part / "models" / name) for out in (one, other))
            assert all(torch.equal(ours[tensor], theirs[tensor]) for tensor in ours)


def resume(out):
    return subprocess.run(
        [sys.executable, "-m", "polyfed", "resume", str(out), "--quiet"], capture_output=True, text=True, check=False
    )


def start(out):
    """A run that takes Ctrl-C, as from a terminal: a shell has its background jobs, and all that they start, ignore it."""
    return subprocess.Popen(
        [*RUN, "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


@pytest.mark.slow  # .ci/run has it
def test_ctrl_c_saves_the_run_and_says_how_to_go_on(tmp_path, whole):
    out = tmp_path / "run"
    process = start(out)
    for line in process.stderr:
        if "round 3/8" in line:
            break
    process.send_signal(signal.SIGINT)
    rest = process.communicate()[1]
    assert process.returncode == 130
    last = rest.strip().splitlines()[-1]
    assert re.fullmatch(rf"polyfed: interrupted; \d of 8 rounds are saved: continue with `polyfed resume {out}`", last)
    done = resume(out)
    assert done.returncode == 0, done.stderr
    assert_same_outcome(whole, out)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_kill_9_at_any_moment(tmp_path, whole, seed):
    """Killed again and again, after random times, until a resume comes through."""
    out, rng = tmp_path / "run", random.Random(seed)
    process = start(out)
    while not (out / "config.yaml").exists():
        time.sleep(0.01)
    time.sleep(rng.uniform(0.1, 1.5))
    process.kill()
    process.communicate()
    again = subprocess.Popen(
        [sys.executable, "-m", "polyfed", "resume", str(out), "--quiet"], stdout=subprocess.DEVNULL
    )
    time.sleep(rng.uniform(2.0, 3.5))
    again.kill()
    again.wait()
    done = resume(out)
    assert done.returncode == 0, done.stderr
    assert_same_outcome(whole, out)


@pytest.mark.slow
def test_a_corrupted_checkpoint_is_told_and_the_one_before_it_used(tmp_path, whole):
    out = tmp_path / "run"
    process = start(out)
    for line in process.stderr:
        if "round 5/8" in line:
            break
    process.kill()
    process.communicate()
    newest = max((out / "checkpoint").glob("round-*"))
    server = newest / "server.safetensors"
    server.write_bytes(server.read_bytes()[:-5])
    done = resume(out)
    assert done.returncode == 0, done.stderr
    assert f"checkpoint {newest} is damaged (server.safetensors does not match its checksum)" in done.stderr
    assert_same_outcome(whole, out)


@pytest.mark.slow
def test_resume_of_a_finished_run_changes_nothing(tmp_path, whole):
    before = {p: p.read_bytes() for p in whole.rglob("*") if p.is_file() and p.suffix in (".jsonl", ".safetensors")}
    done = resume(whole)
    assert done.returncode == 0, done.stderr
    assert "mean" in done.stdout
    assert all(p.read_bytes() == data for p, data in before.items())


@pytest.mark.slow
def test_a_baseline_that_was_stopped_before_it_had_a_configuration_starts_again(tmp_path, whole):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "baselines" / "local")
    (out / "baselines" / "local").mkdir()
    for name in (".lock", ".partial-config.yaml", "manifest.json"):
        (out / "baselines" / "local" / name).touch()
    done = resume(out)
    assert done.returncode == 0, done.stderr
    assert_same_outcome(whole, out)


@pytest.mark.slow
def test_a_run_that_was_stopped_before_it_had_a_configuration_starts_again(tmp_path, whole):
    out = tmp_path / "run"
    out.mkdir()
    for name in (".lock", "manifest.json"):
        (out / name).touch()
    assert "is not a run directory: it has no config.yaml" in resume(out).stderr
    subprocess.run([*RUN, "--out", str(out), "--quiet"], check=True, capture_output=True)
    assert_same_outcome(whole, out)


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Rows of two sites, in a folder whose name a shell would divide."""
    folder = tmp_path / "zwei Häuser"
    folder.mkdir()
    monkeypatch.chdir(folder)
    rows = [f"{site},{k % 7},{k % 2}" for site in ("north", "south") for k in range(40)]
    Path("rows.csv").write_text("\n".join(["site,a,y", *rows]))
    return ["rows.csv", "--data.site", "site", "--data.target", "y", "--rounds", "2", "--quiet"]


def stop_in(patch, folder, when):
    """Ctrl-C, or a full disk, where the run in a folder appends its first record."""

    def append(path, line):
        if path.parent == folder:
            raise when
        append_line_and_flush(path, line)

    patch.setattr("polyfed.simulation.storage.directory.append_line_and_flush", append)


@pytest.mark.parametrize("when", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")], ids=repr)
@pytest.mark.one_case
def test_a_run_stopped_in_a_baseline_goes_on_with_all_of_it(tables, capsys, monkeypatch, when):
    with monkeypatch.context() as patch:
        stop_in(patch, Path("a b/baselines/local"), when)
        assert main(["run", *tables, "--baselines", "[local,fedprox]", "--out", "a b"]) in (1, 130)
    command = re.search(r"with `(polyfed resume .*)`", capsys.readouterr().err)[1]
    assert shlex.split(command) == ["polyfed", "resume", "a b"]
    assert main([*shlex.split(command)[1:], "--quiet"]) == 0
    assert sorted(path.parent.name for path in Path("a b").rglob("models")) == ["a b", "fedprox", "local"]


@pytest.mark.parametrize(
    ("place", "when"),
    [
        ("build_results", KeyboardInterrupt()),
        ("write_comparison_results", OSError(errno.ENOSPC, "No space left on device")),
    ],
    ids=repr,
)
@pytest.mark.one_case
def test_a_comparison_stopped_after_its_last_run_is_not_lost(tables, capsys, monkeypatch, place, when):
    def stop(*_):
        raise when

    with monkeypatch.context() as patch:
        patch.setattr(f"polyfed.comparison.compare.{place}", stop)
        assert main(["compare", *tables, "--tune", "none", "--folds", "2", "--parallel", "1", "--out", "a b"]) in (
            1,
            130,
        )
    command = re.search(r"with `(polyfed compare .*)`", capsys.readouterr().err)[1]
    assert main([*shlex.split(command)[1:], "--quiet"]) == 0
    assert "not decided" in capsys.readouterr().out


def test_a_comparison_without_its_description_is_not_to_be_gone_on_with(tables, capsys, monkeypatch):
    def fill(path, *_):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("polyfed.comparison.storage.comparison_directory.write_file_atomically", fill)
    assert main(["compare", *tables, "--tune", "none", "--folds", "2", "--out", "a b"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "polyfed: No space left on device: a b/comparison.yaml"
