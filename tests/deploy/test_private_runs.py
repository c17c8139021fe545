"""Deployments that train with privacy: each site keeps its own budget, in one process and in processes of their own."""

import json
import os
import signal
import time

import pytest

from polyfed.algorithms import FedAvg
from polyfed.core.errors import UserError
from polyfed.deploy.privacy.ledger import read_ledger
from polyfed.deploy.trial import local_trial as trials
from polyfed.deploy.trial.project import create_project
from polyfed.simulation.storage.directory import read_metrics

from .conftest import MemoryGrid
from .private_sites import people
from .test_loopback import command, port  # noqa: F401

NETWORK = """
from torch import nn

def model():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
"""


def spent(tmp_path):
    files = sorted((tmp_path / "sites").glob("*/state/privacy.json"))
    return [sum(read_ledger(file).private_steps["data"].values()) for file in files]


@pytest.mark.thorough
@pytest.mark.parametrize("secure", [False, True])
def test_a_deployment_trains_with_privacy(run, secure_grid, secure_play, nodes, tmp_path, secure):
    file = tmp_path / "plain.py"
    file.write_text(NETWORK)
    words = {
        "algorithm.privacy.target_epsilon": 8.0,
        "rounds": 2,
        "algorithm.batch_size": 8,
        "on-error": "raise",
        "file": str(file),
    }
    budget = {"max-epsilon": 8.01, "disclose": "num_examples,accuracy,val_accuracy"}

    def play(out):
        if secure:
            return secure_play(secure_grid(people(), **budget), FedAvg(lr=0.05), out=out, **words)
        return run(grid=MemoryGrid(nodes(people(), **budget)), out=out, **words)

    found = play("run")
    assert all("epsilon" not in record for record in found.history), "the server does not know it"
    assert all(row["accuracy"] >= 0 for row in found.history[-1]["clients"].values())
    assert all("train_loss" not in row for row in found.history[-1]["clients"].values())
    assert spent(tmp_path) == [6, 8, 8], "steps of two rounds"
    site_records = (tmp_path / "sites" / "client-0" / "state").glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in next(iter(site_records)).read_text().splitlines()]
    assert 7.9 < max(line.get("epsilon", 0) for line in lines) <= 8.0
    with pytest.raises(UserError, match=r"client-0.* would spend more than the budget"):
        play("again")


SITE = """
import os
import polyfed as pf
from polyfed.testing import small_clients
from torch import nn

NAME = os.environ["POLYFED_SITE"]

def network():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

def client():
    found = {c.id: c for c in small_clients(3)}[NAME]
    return pf.Client(found.id, network, found.train, found.test)
"""
NAMES = ["client-0", "client-1", "client-2"]


@pytest.mark.slow
def test_three_sites_of_their_own_processes_keep_their_budgets_over_kills_and_runs(tmp_path, port):  # noqa: F811
    """Real SuperNodes with secure sums: one is killed and starts again, and a second run is refused by name."""
    project = create_project(tmp_path / "federation", NAMES)
    project.site_file.write_text(SITE)
    server = project.path / "server" / "server.py"
    server.write_text(NETWORK)
    settings = ['algorithm.name="fedavg"', "algorithm.lr=0.05", "algorithm.batch_size=8", "secure=true", "rounds=3",
                "algorithm.privacy.target_epsilon=8.0", f'file="{server}"']  # fmt: skip
    words = [str(project.path), *(f"--set={setting}" for setting in settings)]
    budget = 'max-epsilon=8.5 disclose="num_examples,accuracy" secure=true secure-threshold=2 '

    def books():
        return [read_ledger(project.path / "trial" / "sites" / name / "privacy.json").private_steps for name in NAMES]

    with trials.start_trial(project, NAMES, port, budget) as trial:
        first = command("run", *words, "--out", str(project.path / "runs" / "run-1"))
        assert first.returncode == 0, first.stderr[-3000:]
        spent = books()
        os.kill(trial.processes[1].popen.pid, signal.SIGKILL)
        trial.processes[1].popen.wait()
        deadline = time.monotonic() + 90
        while trial.processes[1].popen.poll() is not None and time.monotonic() < deadline:
            trial.restart_ended_supernodes()
            time.sleep(0.5)
        second = command("run", *words, "--out", str(project.path / "runs" / "run-2"))
        assert second.returncode != 0
        assert "would spend more than the budget (max-epsilon) of each example of its data set" in second.stderr
        assert books() == spent, "a run that is refused spends nothing"
    steps = [sum(page["data"].values()) for page in spent]
    assert steps == [9, 12, 12]
    records = read_metrics(project.path / "runs" / "run-1" / "metrics.jsonl")
    assert [record["failures"] for record in records] == [[], [], []]
    for name in NAMES:
        lines = next((project.path / "trial" / "sites" / name).glob("*/metrics.jsonl")).read_text().splitlines()
        assert 7.9 < max(json.loads(line).get("epsilon", 0) for line in lines) <= 8.0
