"""The long-lived site process behind a real SuperLink: killed in a round, beside a site on Flower's own SuperNode, idle."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from polyfed.deploy.trial import local_trial as trials
from polyfed.simulation.storage.directory import read_metrics
from polyfed.testing import without_durations

from .test_loopback import DISCLOSE, pfedla, port, same_models, simulated, small, watched  # noqa: F401

pytestmark = pytest.mark.slow


def worker_of(node):
    """The site process of a SuperNode."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent, words = stat.read_text().rpartition(")")[2].split()[1], (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == node and b"polyfed.deploy.worker" in words:
            return int(stat.parent.name)
    return None


def cpu_seconds(process):
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def test_a_site_process_that_is_killed_in_a_round_costs_that_round(watched):  # noqa: F811
    """The server is told at once, the next message is answered by a new process, and the node is never away. Idle, the
    processes of a site take next to no processor time."""
    project, trial = watched
    (project.path / "slow-client-1").write_text("3")
    out, node = project.path / "runs" / "killed", trial.processes[2].popen.pid
    killed = []

    def kill():
        while not (out / "metrics.jsonl").exists():
            time.sleep(0.1)
        time.sleep(2.0)
        killed.append(worker_of(node))
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    done = pfedla(project, "--out", str(out), rounds=5)
    thread.join()
    assert done.returncode == 0, done.stderr[-3000:]
    records = read_metrics(out / "metrics.jsonl")
    failures = [failure for record in records for failure in record["failures"]]
    assert {failure["client"] for failure in failures} == {"client-1"}
    assert "Flower reports error 8: the site's process has ended (signal 9)" in failures[0]["reason"]
    failed = {record["round"] for record in records if record["failures"]}
    assert 1 <= len(failed) <= 2, "training and evaluation may be of two rounds"
    assert not records[-1]["failures"]
    assert max(record["seconds"] for record in records) < 60, "Flower itself notices a death after a minute"
    assert worker_of(node) not in (None, killed[0])
    time.sleep(30)
    both = [node, worker_of(node)]
    before = sum(map(cpu_seconds, both))
    time.sleep(15)
    assert sum(map(cpu_seconds, both)) - before < 0.03 * 15


def test_flowers_own_supernode_and_ours_in_one_federation(small, port, monkeypatch):  # noqa: F811
    """The bits of a simulation; and what the server's app holds is not even fetched by ours."""
    plain = trials._start_process

    def start(name, command, folder, more):
        own = {"POLYFED_SITE_PROCESS": "off"} if name == "client-0" else {}
        return plain(name, command, folder, {**more, **own})

    monkeypatch.setattr(trials, "_start_process", start)
    out = small.path / "runs" / "both"
    with trials.start_trial(small, small.read_site_names(), port, DISCLOSE + "allow-disclosure=true") as trial:
        done = pfedla(small, "--out", str(out), rounds=2)
        assert done.returncode == 0, done.stderr[-3000:]
        assert worker_of(trial.processes[1].popen.pid) is None
        assert worker_of(trial.processes[2].popen.pid) is not None
    run = simulated(2)
    assert without_durations(read_metrics(out / "metrics.jsonl")) == without_durations(run.history)
    same_models(small, out, run)
    homes = small.path / "trial" / "homes"
    assert list((homes / "client-0").rglob("client.py"))
    assert not list((homes / "client-1").rglob("*.py"))
