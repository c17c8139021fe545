"""`polyfed reproduce` with runs side by side, stopped by Ctrl-C and by kill -9: the same command ends as if it was not."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from polyfed.simulation.storage.directory import read_metrics

# Two cores whatever the machine has, so that runs go side by side.
TWO_CORES = """
import sys
from polyfed.comparison.execution import process_pool
process_pool.num_usable_cores = lambda: 2
from polyfed.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
WORDS = ["pfedla", "table1", "--scale", "smoke", "--variant", "fashion_mnist-10", "--rounds", "12", "--seeds", "0,1"]
WORDS += ["--baselines", "[local,fedavg,fedprox]"]


@contextmanager
def started(out):
    """In a group of its own, as from a terminal; a shell has its background jobs ignore Ctrl-C. At the end it is gone."""
    with subprocess.Popen(
        [sys.executable, "-c", TWO_CORES, "reproduce", *WORDS, "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()  # as a failed test leaves it; its children leave with it


def finish(out):
    with started(out) as process:
        _, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    return told, [cell | {"runs": None} for cell in json.loads((out / "reproduce.json").read_text())["cells"]]


def runs(out):
    found = [*out.glob("*/metrics.jsonl"), *out.glob("*/baselines/*/metrics.jsonl")]  # folders below come and go
    return [path.parent for path in found]


def wait_for_runs(process, out, number):
    while len(runs(out)) < number:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


def wait_until_nobody_is_left(group):
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("a run goes on, though the command is gone")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    told, cells = finish(tmp_path_factory.mktemp("whole") / "table")
    assert "8 runs, 2 at once" in told
    return cells


@pytest.mark.slow  # .ci/run has it
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_while_two_runs_go_on(tmp_path, whole, number):
    out = tmp_path / "table"
    with started(out) as process:
        wait_for_runs(process, out, 4)  # two are complete, two are not
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # a terminal sends it to all
        else:
            process.kill()
        _, told = process.communicate(timeout=60)
    wait_until_nobody_is_left(process.pid)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    if number == signal.SIGINT:
        assert told.endswith("polyfed: interrupted; the complete rounds are saved; the same command continues\n")
    assert not (out / "reproduce.json").exists()
    rounds = {run: len(read_metrics(run / "metrics.jsonl")) for run in runs(out)}
    finished = {run: (run / "metrics.jsonl").read_bytes() for run, number in rounds.items() if number == 12}
    assert finished
    assert len(finished) < len(rounds)

    told, cells = finish(out)
    assert f"[{8 - len(finished)}/{8 - len(finished)}]" in told  # no more than what was missing
    assert cells == whole
    assert all((run / "metrics.jsonl").read_bytes() == content for run, content in finished.items())


@pytest.mark.slow
def test_a_run_that_is_killed_is_named_and_the_others_are_saved(tmp_path, whole):
    out = tmp_path / "table"
    with started(out) as process:
        wait_for_runs(process, out, 2)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
        os.kill(int(children[0]), signal.SIGKILL)
        _, told = process.communicate(timeout=60)
    wait_until_nobody_is_left(process.pid)
    assert process.returncode == 1
    assert "died (exit status -9); the same command goes on from what is saved" in told
    assert finish(out)[1] == whole
