"""The pool of processes: what happens when workers die, and what they are sent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg, Local
from polyfed.models import ModelSpec
from polyfed.simulation.engines import pool
from polyfed.simulation.engines.base import sort_longest_first
from polyfed.simulation.engines.factory import build_engine_for_settings
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.engines.pool import PoolEngine
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.testing import SmallNet, assert_runs_equal, small_clients, without_durations

# What is proved here holds of the examples that were trained on.
pytestmark = pytest.mark.filterwarnings("ignore:test examples that are also training examples:UserWarning")


class Fatal(nn.Module):
    """Kills its own process with SIGKILL in training, once or always, if it is in a worker."""

    def __init__(self, marker: Path, always: bool):
        super().__init__()
        self.inner, self.marker, self.always, self.parent = SmallNet(), marker, always, os.getpid()

    def forward(self, x):
        if self.training and os.getpid() != self.parent and (self.always or not self.marker.exists()):
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner(x)


def federation_with(make_model, **options):
    clients = small_clients()
    # the killer has an architecture of its own so that it alone uses the fatal module
    bad = pf.Client("killer", make_model, clients[0].train, clients[0].test)
    return pf.federate([*clients, bad], Local(lr=0.05), rounds=2, workers=2, **options)


def test_killed_worker_is_replaced_and_its_client_tried_again(tmp_path):
    parent = os.getpid()

    def fatal(always):
        def build():
            module = Fatal(tmp_path / f"died-{always}", always)
            module.parent = parent
            return module

        return build

    with pytest.warns(RuntimeWarning, match=r"round 1, client 'killer': worker process \d+ died \(signal SIGKILL\)"):
        run = federation_with(fatal(False))
    assert (tmp_path / "died-False").exists()
    assert [f["retried"] for f in run.history[0]["failures"]] == [True]
    assert run.history[1]["failures"] == []
    assert run.table()[-2]["client"] == "killer"
    assert run.table()[-2]["loss"] is not None
    # a death changes no result: the file now exists, so this run has none
    assert_same_run_without_failures(run, federation_with(fatal(False)))

    with pytest.warns(RuntimeWarning, match=r"attempt [12] of 2"):
        run = federation_with(fatal(True), on_error="skip")
    reasons = [f["reason"] for f in run.history[0]["failures"] if f["client"] == "killer" and not f["retried"]]
    assert any("its worker process died 2 times, last by signal SIGKILL" in reason for reason in reasons)
    with (
        pytest.warns(RuntimeWarning, match=r"attempt [12] of 2"),
        pytest.raises(
            pf.ClientError, match=r"round 1, client 'killer', phase 'local': its worker process died 2 times"
        ),
    ):
        federation_with(fatal(True))


def assert_same_run_without_failures(one, other):
    for history in (one.history, other.history):
        for record in history:
            record["failures"] = []
    assert_runs_equal(one, other)


def test_workers_killed_from_outside_are_replaced():
    """`kill -9` of all workers while they are idle."""
    clients = small_clients()
    federation = Federation({c.id: c for c in clients}, FedAvg(), Settings())
    start = Checkpoint(0, FedAvg().server_init(federation.server_context()), {})
    down = FedAvg().dispatch(start.state, federation.client_info("client-0", 1))
    tasks = [federation.build_task("local", c.id, 1, down, start) for c in clients]
    engine = PoolEngine(FedAvg(), clients, torch.device("cpu"), 2)
    try:
        first = {r.task.client: r for r in engine.run(tasks)}
        before = engine.worker_pids
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        second = {r.task.client: r for r in engine.run(tasks)}
        assert not set(before) & set(engine.worker_pids)
        assert sum(len(r.incidents) for r in second.values()) == 2
        for client in first:
            a, b = first[client].reply.tensors["model"], second[client].reply.tensors["model"]
            assert all(torch.equal(a[n], b[n]) for n in a)
    finally:
        engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(engine.worker_pids[0] if engine.worker_pids else before[0], 0)


@pytest.mark.slow
def test_workers_leave_when_the_parent_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, time\n"
        "from polyfed.algorithms import FedAvg\n"
        "from polyfed.simulation.engines.pool import PoolEngine\n"
        "from polyfed.testing import small_clients\n"
        "engine = PoolEngine(FedAvg(), small_clients(), torch.device('cpu'), 2)\n"
        "print(*engine.worker_pids, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    pids = [int(p) for p in process.stdout.readline().split()]
    assert len(pids) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = SmallNet()

    def forward(self, x):
        if self.training and len(x) > 2:  # in round 1, not when the network is tried on two examples before
            raise ArithmeticError("the sensor is broken")
        return self.inner(x)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_says_round_client_and_phase(workers):
    clients = small_clients()
    bad = pf.Client("broken", Wrong, clients[0].train, clients[0].test)
    sentence = r"round 1, client 'broken', phase 'local': ArithmeticError: the sensor is broken"
    with pytest.raises(pf.ClientError, match=sentence) as caught:
        pf.federate([*clients, bad], Local(), rounds=1, workers=workers)
    assert (caught.value.round, caught.value.client, caught.value.phase) == (1, "broken", "local")
    assert "in forward" in caught.value.trace
    if workers == 0:
        assert isinstance(caught.value.__cause__, ArithmeticError)
    run = pf.federate([*clients, bad], Local(), rounds=2, workers=workers, on_error="skip")
    assert [f["client"] for f in run.history[1]["failures"]] == ["broken"]
    assert run.table()[0]["client"] == "broken"


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


class RaisesUnprintable(Wrong):
    def forward(self, x):
        if self.training and len(x) > 2:
            raise Unprintable
        return self.inner(x)


@pytest.mark.parametrize("engine", ["inprocess", "pool", "cohort"])
def test_an_exception_whose_text_cannot_be_formed_fails_its_client_alone(engine):
    clients = small_clients()
    bad = pf.Client("broken", RaisesUnprintable, clients[0].train, clients[0].test)
    run = pf.federate(
        [*clients, bad], Local(), rounds=1, workers=2 if engine == "pool" else 0, engine=engine, on_error="skip"
    )
    assert [(f["client"], f["reason"]) for f in run.history[0]["failures"]] == [("broken", "Unprintable")]


@pytest.mark.slow
def test_spawned_workers_give_the_same_result_as_forked():
    def clients():
        spec = ModelSpec("mlp", {"hidden": [8]}, (6,), 3)
        return [pf.Client(c.id, spec, c.train, c.test) for c in small_clients()]

    federation = Federation({c.id: c for c in clients()}, FedAvg(), Settings())
    start = Checkpoint(0, FedAvg().server_init(federation.server_context()), {})
    down = FedAvg().dispatch(start.state, federation.client_info("client-0", 1))
    tasks = [federation.build_task("local", c, 1, down, start) for c in federation.clients]
    found = []
    for method in ("fork", "spawn"):
        engine = PoolEngine(FedAvg(), clients(), torch.device("cpu"), 1, start_method=method)
        try:
            found.append({r.task.client: r.reply.tensors["model"] for r in engine.run(tasks)})
        finally:
            engine.close()
    for client, tree in found[0].items():
        assert all(torch.equal(tree[n], found[1][client][n]) for n in tree)


def test_a_tensor_that_all_clients_receive_is_sent_once_per_worker(monkeypatch):
    sent = []

    def counting(body, **options):
        data = original_encode(body, **options)
        sent.append(len(data))
        return data

    original_encode = pool.serialize_state
    monkeypatch.setattr(pool, "serialize_state", counting)
    big = [pf.Client(f"c{i}", lambda: nn.Linear(6, 3000), c.train, c.test) for i, c in enumerate(small_clients(6))]
    engine = PoolEngine(FedAvg(), big, torch.device("cpu"), 1)
    federation = Federation({c.id: c for c in big}, FedAvg(), Settings())
    start = Checkpoint(0, FedAvg().server_init(federation.server_context()), {})
    downs = [FedAvg().dispatch(start.state, federation.client_info(c.id, 1)) for c in big]
    try:
        tasks = [federation.build_task("local", c.id, 1, d, start) for c, d in zip(big, downs, strict=True)]
        assert sum(1 for _ in engine.run(tasks)) == 6
    finally:
        engine.close()
    assert sum(size > downs[0].nbytes for size in sent) == 1


def test_longest_clients_go_first():
    clients = {c.id: c for c in small_clients()}
    federation = Federation(clients, FedAvg(), Settings())
    start = Checkpoint(0, FedAvg().server_init(federation.server_context()), {})
    tasks = [
        federation.build_task("local", i, 1, FedAvg().dispatch(start.state, federation.client_info(i, 1)), start)
        for i in clients
    ]
    assert [t.client for t in sort_longest_first(tasks, clients)] == ["client-2", "client-1", "client-0"]


@pytest.mark.thorough
def test_results_do_not_depend_on_engines_for_a_convolutional_network_and_sampling():
    generator = torch.Generator().manual_seed(0)
    spec = ModelSpec("cnn_small", {"norm": "batch"}, (1, 8, 8), 4)
    clients = []
    for k in range(5):
        x, y = torch.randn(24 + k, 1, 8, 8, generator=generator), torch.arange(24 + k) % 4
        clients.append(pf.Client(f"c{k}", spec, (x, y), (x, y)))
    method = FedAvg(lr=0.05, momentum=0.9, batch_size=10, schedule="cosine")
    runs = [pf.federate(clients, method, rounds=3, clients_per_round=0.6, workers=w) for w in (0, 1, 2)]
    assert_runs_equal(runs[0], runs[1])
    assert_runs_equal(runs[0], runs[2])
    assert without_durations(runs[0].history)[0]["clients"]


@pytest.mark.parametrize(("cores", "clients", "workers"), [(4, 3, 3), (2, 3, 2), (2, 1, 0), (1, 3, 0)])
def test_by_default_each_core_has_a_worker_and_none_is_without_a_client(monkeypatch, cores, clients, workers):
    monkeypatch.setattr("polyfed.simulation.engines.factory.num_usable_cores", lambda: cores)
    engine = build_engine_for_settings(Settings(rounds=1), FedAvg(), small_clients(clients))
    try:
        assert isinstance(engine, PoolEngine if workers else InProcessEngine)
        assert len(getattr(engine, "worker_pids", [])) == workers
    finally:
        engine.close()


def test_no_worker_is_started_without_a_client():
    engine = build_engine_for_settings(Settings(rounds=1, workers=9), FedAvg(), small_clients(3))
    try:
        assert len(engine.worker_pids) == 3
    finally:
        engine.close()


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_where_a_worker_takes_seconds_to_start_there_is_none_by_default(monkeypatch, system):
    monkeypatch.setattr("polyfed.simulation.engines.factory.num_usable_cores", lambda: 4)
    monkeypatch.setattr("polyfed.simulation.engines.factory.sys", SimpleNamespace(platform=system))
    assert isinstance(build_engine_for_settings(Settings(rounds=1), FedAvg(), small_clients(3)), InProcessEngine)
