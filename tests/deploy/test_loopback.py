"""Flower for real: a SuperLink and SuperNodes with TLS and keys on loopback, processes that are killed, and strangers."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

import polyfed as pf
from polyfed.algorithms import FML, PFedLA
from polyfed.core.errors import RoundError
from polyfed.deploy.trial import local_trial as trials
from polyfed.deploy.trial.project import (
    DeploymentProject,
    create_project,
    write_site_key_pair,
    write_trial_certificates,
)
from polyfed.simulation.storage.directory import read_manifest, read_metrics
from polyfed.testing import small_clients, without_durations

pytestmark = pytest.mark.slow

NUMBERS = [f"{p}{m}" for p in ("", "val_", "generated_", "trained_", "trained_val_") for m in ("accuracy", "loss")]
DISCLOSE = f'disclose="{",".join(["num_examples", "train_loss", *NUMBERS])}" '
SMALL_SITE = """
import os, time
import polyfed.deploy.site.site_task as at_site
from polyfed.testing import small_clients

NAME = os.environ["POLYFED_SITE"]
read_private_state = at_site.read_private_state

def slow(*words):
    if os.path.exists("%s/slow-" + NAME):
        time.sleep(float(open("%s/slow-" + NAME).read()))
    return read_private_state(*words)

at_site.read_private_state = slow

def client():
    return {c.id: c for c in small_clients(4)}[NAME]
"""


@pytest.fixture
def port():
    """One that is free, with room for the SuperNodes above it."""
    for number in range(18000, 60000, 50):
        if not any(trials._is_port_open(n) for n in range(number, number + 8)):
            return number
    raise AssertionError("no free port")


@pytest.fixture
def small(tmp_path):
    """A project of the library's small clients; a file slow-NAME in its folder makes a site wait before it works."""
    project = create_project(tmp_path / "federation", ["client-0", "client-1"])
    configuration = project.app_folder / "pyproject.toml"
    configuration.write_text(configuration.read_text().replace("secure = true", "secure = false"))
    project.site_file.write_text(SMALL_SITE % (project.path, project.path))
    (project.path / "server" / "server.py").write_text("from polyfed.testing import SmallNet as model\n")
    return project


def command(*words):
    return subprocess.run(
        [str(Path(sys.executable).parent / "polyfed"), "flower", *words],
        capture_output=True, text=True, timeout=900, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def online(project):
    """SuperNodes that the SuperLink calls online."""
    return len(re.findall(r" online ", command("status", str(project.path)).stdout))


def pfedla(project, *more, **words):
    given = {
        "algorithm.name": "pfedla", "algorithm.lr": 0.05, "seed": 3, "file": str(project.path / "server" / "server.py"),
        **words,
    }  # fmt: skip
    given |= {"algorithm.local_epochs": 1, "algorithm.batch_size": 32}
    changes = [f"{name}={json.dumps(value)}" for name, value in given.items()]
    return command("run", str(project.path), "--allow-disclosure", *more, *(f"--set={w}" for w in changes))


def simulated(rounds, number=2):
    method = PFedLA(lr=0.05, local_epochs=1, batch_size=32)
    return pf.federate(small_clients(number), method, rounds=rounds, seed=3, workers=0)


@pytest.fixture
def watched(small, port):
    """The project, while its trial runs and SuperNodes that end are started again."""
    with trials.start_trial(small, small.read_site_names(), port, DISCLOSE + "allow-disclosure=true") as trial:
        stop = threading.Event()

        def watch():
            while not stop.wait(1.0):
                trial.restart_ended_supernodes()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield small, trial
        finally:
            stop.set()
            thread.join()


def same_models(project, out, run):
    folder = read_manifest(out)["deployment"]
    for client in run.federation.clients:
        (file,) = (project.path / "trial" / "sites" / client / folder / "models").glob("*.safetensors")
        ours, theirs = safetensors.torch.load_file(file), run.model(client).state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), client


def test_a_project_as_it_is_written_learns_and_gives_the_bits_of_a_simulation(tmp_path, port):
    """`polyfed flower init`, `up`, `run`, `status` and `health`, each as README of the project has them; two sites with
    different networks, and secure sums, for which nobody has to consent."""
    folder = tmp_path / "federation"
    assert command("init", str(folder), "--sites", "north,south").returncode == 0
    program = [str(Path(sys.executable).parent / "polyfed"), "flower", "up", str(folder), "--port", str(port)]
    words = [*program, "--node-config", DISCLOSE.strip()]  # numbers, to compare them with a simulation
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as up:
        try:
            assert up.stderr.readline() == "starting the SuperLink, and SuperNodes of north, south\n"
            assert "SuperNodes of north, south run" in up.stderr.readline()
            done = command("run", str(folder), "--set", "rounds=3")
            assert done.returncode == 0, done.stderr[-3000:]
            assert "north" in done.stdout
            told = command("status", str(folder))
            assert told.returncode == 0
            assert len(re.findall(r" online ", told.stdout)) == 2
            assert "round 3 of 3" in told.stdout
            told = command("health", str(folder))
            assert told.returncode == 0, told.stdout
            assert (
                len(re.findall(r"^ok +(?:north|south): waits for a task; .* answered \d+ s ago$", told.stdout, re.M))
                == 2
            )
            again = command("up", str(folder), "--port", str(port))
            assert (again.returncode, "is running" in again.stderr) == (2, True)
        finally:
            up.send_signal(signal.SIGTERM)
            assert up.wait(60) == 130
    assert not [n for n in range(port, port + 3) if trials._is_port_open(n)], "a process still listens"
    clients = _clients_of(DeploymentProject(folder), ["north", "south"])
    method = FML(lr=0.05, local_epochs=2, batch_size=16, robust="clip")  # the bound that a new project has
    run = pf.federate(clients, method, rounds=3, workers=0, secure=True)
    found = read_metrics(folder / "runs" / "run-1" / "metrics.jsonl")
    # Sites disclose these two scores, and a secure sum tells no loss of the training.
    scores = [
        [[record["summary"][name] for name in ("accuracy", "loss")] for record in h] for h in (found, run.history)
    ]
    assert scores[0] == scores[1]
    assert [record["bytes_up_total"] for record in found] == [record["bytes_up_total"] for record in run.history]
    same_models(DeploymentProject(folder), folder / "runs" / "run-1", run)


def _clients_of(project, names):
    code = "import os, sys, torch\nsys.path.insert(0, os.environ['SITE'])\nimport site_of_test\n"
    shutil.copy(project.site_file, project.path / "site" / "site_of_test.py")
    code += "c = site_of_test.client()\ntorch.save([c.train.x, c.train.y, c.test.x, c.test.y], sys.argv[1])\n"
    clients = []
    from polyfed.models import ModelSpec

    for position, name in enumerate(names):
        own = {**os.environ, "SITE": str(project.path / "site"), "POLYFED_SITE": name, "POLYFED_SITES": ",".join(names)}
        file = project.path / f"{name}.pt"
        subprocess.run([sys.executable, "-c", code, str(file)], env=own, check=True)
        x, y, xt, yt = torch.load(file)
        spec = ModelSpec(("flha_arch1", "flha_arch2")[position % 2], {"width": 8}, (1, 8, 8), 10)
        clients.append(pf.Client(name, spec, (x, y), (xt, yt)))
    return clients


def test_asynchronous_rounds_do_not_wait_for_a_slow_site(watched):
    """It takes 15 s for a reply; meanwhile the other site goes on, and the slow reply is then used too."""
    project, _ = watched
    (project.path / "slow-client-0").write_text("2")  # so that twelve rounds take longer than that
    (project.path / "slow-client-1").write_text("15")
    out = project.path / "runs" / "asynchronous"
    settings = {
        "algorithm.name": "fedavg", "algorithm.lr": 0.05, "file": str(project.path / "server" / "server.py"),
        "rounds": 12, "evaluate-every": 12, "asynchronous.rule": "fedbuff", "asynchronous.buffer": 1,
    }  # fmt: skip
    changes = [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]
    done = command("run", str(project.path), "--allow-disclosure", "--out", str(out), *changes)
    assert done.returncode == 0, done.stderr[-3000:]
    records = read_metrics(out / "metrics.jsonl")
    fast, slow = ([r["clients"][f"client-{k}"] for r in records if f"client-{k}" in r["clients"]] for k in (0, 1))
    fast, slow = ([row for row in rows if "bytes_up" in row] for rows in (fast, slow))
    print("update seconds:", [row["update_seconds"] for row in fast], [row["update_seconds"] for row in slow])
    print("staleness:", [row["staleness"] for row in slow])
    assert len(fast) > 2 * len(slow) > 0
    assert max(row["update_seconds"] for row in fast) < 15 <= min(row["update_seconds"] for row in slow)
    assert all(row["staleness"] > 0 for row in slow)
    assert all("accuracy" in row for row in records[-1]["clients"].values())
    assert all(not record["failures"] for record in records)


def test_a_supernode_that_is_killed_in_a_round_is_taken_back(watched):
    """Killed while its site works: the round goes on without it, and it is back in a later one, with its private state."""
    project, trial = watched
    (project.path / "slow-client-1").write_text("4")
    out = project.path / "runs" / "killed"

    has_ended = threading.Event()

    def kill():
        while not (out / "metrics.jsonl").exists():
            if has_ended.wait(0.2):  # without a round
                return
        time.sleep(3.0)
        os.killpg(trial.processes[2].popen.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    done = pfedla(project, "--out", str(out), rounds=16, **{"round-seconds": 90.0})  # it starts within some of them
    has_ended.set()
    thread.join()
    assert done.returncode == 0, done.stderr[-3000:]
    records = read_metrics(out / "metrics.jsonl")
    failed = [record["round"] for record in records if any(f["client"] == "client-1" for f in record["failures"])]
    print("rounds without client-1:", failed, records[failed[0] - 1]["failures"] if failed else "")
    assert failed, "the SuperNode was not missed"
    assert not records[-1]["failures"], "it did not come back"
    assert all("client-0" not in str(record["failures"]) for record in records)


def test_a_superlink_that_is_killed_costs_the_rounds_since_the_checkpoint_only(watched):
    """SIGKILL in round 3, a new SuperLink on its database, and `--resume`: the metrics of the run that was not stopped."""
    project, trial = watched
    out = project.path / "runs" / "killed"
    link = trial.processes[0]
    (project.path / "slow-client-1").write_text("2")

    has_ended = threading.Event()

    def kill():
        while len(read_metrics(out / "metrics.jsonl")) < 2:
            if has_ended.wait(0.2):  # without two rounds
                return
        time.sleep(1.0)
        os.killpg(link.popen.pid, signal.SIGKILL)
        link.popen.wait()
        link.popen = trials._open_process(link.command, link.log, link.environment)

    thread = threading.Thread(target=kill)
    thread.start()
    done = pfedla(project, "--out", str(out), rounds=6)
    has_ended.set()
    thread.join()
    assert done.returncode == 1
    assert f"continue it with `polyfed flower run {project.path} --allow-disclosure --resume {out}`" in done.stderr
    assert 2 <= len(read_metrics(out / "metrics.jsonl")) < 6
    deadline = time.monotonic() + 120
    while online(project) < 2:
        assert time.monotonic() < deadline, "the SuperNodes did not come back"
    again = command("run", str(project.path), "--allow-disclosure", "--resume", str(out))
    assert again.returncode == 0, again.stderr[-3000:]
    whole = simulated(6)
    assert without_durations(read_metrics(out / "metrics.jsonl")) == without_durations(whole.history)
    same_models(project, out, whole)


SENTENCES = {
    "not registered": "[code: 2004] Failed to activate SuperNode",
    "no key": "SuperNode authentication is enabled",
    "plaintext": "Failed to initialize the connection to the SuperLink",
    "unknown authority": "CERTIFICATE_VERIFY_FAILED",
}


def test_strangers_are_refused(watched, tmp_path, port):
    """By the SuperLink: a key that is not registered, no key, plaintext, an unknown authority. By polyfed: a registered key
    whose site claims another name."""
    project, trial = watched
    link, node = f"127.0.0.1:{port}", list(trial.processes[1].command)
    write_site_key_pair(tmp_path / "other.key")
    write_trial_certificates(tmp_path / "unknown")
    where = [*node[:4], "--superlink", link]
    authority = ["--root-certificates", str(project.certificates_folder / "ca.crt")]
    cases = {
        "not registered": [*where, *authority, "--auth-supernode-private-key", str(tmp_path / "other.key")],
        "no key": [*where, *authority],
        "plaintext": [*where, "--insecure"],
        "unknown authority": [
            *where, "--root-certificates", str(tmp_path / "unknown" / "ca.crt"),
            "--auth-supernode-private-key", str(project.certificates_folder / "client-0.key"),
        ],
    }  # fmt: skip
    for case, words in cases.items():
        own = trials.flower_environment(tmp_path / "home" / case)
        Path(own["FLWR_HOME"]).mkdir(parents=True)
        began = time.monotonic()
        # Into a file: a pipe would be held open by a child of the SuperNode, which outlives it.
        with (
            (tmp_path / "log").open("w") as log,
            subprocess.Popen(
                [*words, "--max-retries", "1"], env=own, stdout=log, stderr=log, start_new_session=True
            ) as done,
        ):
            try:
                done.wait(120)
            finally:
                with contextlib.suppress(ProcessLookupError):  # it has ended, and so have its children
                    os.killpg(done.pid, signal.SIGKILL)
        told = (tmp_path / "log").read_text()
        print(f"{case}: exit {done.returncode} after {time.monotonic() - began:.1f} s")
        assert done.returncode != 0, case
        assert SENTENCES[case] in told, f"{case}: {told[-800:]}"
    assert online(project) == 2

    # A registered key that says it is another site: the name of the key counts.
    os.killpg(trial.processes[1].popen.pid, signal.SIGTERM)
    trial.processes[1].command = [word.replace('client-id="client-0"', 'client-id="client-1"') for word in node]
    out = project.path / "runs" / "thief"
    time.sleep(20)
    done = pfedla(project, "--out", str(out), rounds=1, **{"join-seconds": 60.0})
    assert done.returncode == 1
    assert "says that it is 'client-1', but is registered as 'client-0'; it stays out" in done.stderr
    assert not out.exists()


def test_a_site_that_hangs_is_left_behind(watched):
    """Our own time limit ends the wait: Flower's is twelve hours."""
    project, _ = watched
    out = project.path / "runs" / "hangs"
    (project.path / "slow-client-1").write_text("0")

    def hang():
        while not (out / "metrics.jsonl").exists():
            time.sleep(0.2)
        (project.path / "slow-client-1").write_text("600")

    thread = threading.Thread(target=hang)
    thread.start()
    done = pfedla(project, "--out", str(out), rounds=3, **{"round-seconds": 60.0})
    thread.join()
    assert done.returncode == 0, done.stderr[-3000:]
    records = read_metrics(out / "metrics.jsonl")
    assert [bool(record["failures"]) for record in records] == [False, True, True]
    assert "no reply within 60 s" in str(records[1]["failures"])
    assert all(record["seconds"] < 200 for record in records)


def test_a_superlink_that_ends_is_reported(small, port):
    with trials.start_trial(small, small.read_site_names(), port) as trial:
        os.killpg(trial.processes[0].popen.pid, signal.SIGKILL)
        trial.processes[0].popen.wait()
        with pytest.raises(RoundError, match="the SuperLink has ended"):
            trial.restart_ended_supernodes()
