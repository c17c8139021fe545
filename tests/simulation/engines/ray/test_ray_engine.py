"""Ray: the same bits as in this process, workers and nodes that die, what travels how often, and what users are told.

Networks of these tests are local, so that they travel by value: workers cannot import test files.
"""

import importlib
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from torch import nn

import polyfed as pf
from polyfed.algorithms import FLHAGHN, CAFedPNAS, FedAvg, FedHeNN, Local, PFedLA
from polyfed.core.errors import UserError
from polyfed.core.seeds import torch_generator
from polyfed.models import ModelSpec
from polyfed.simulation.engines.ray import object_store
from polyfed.simulation.engines.ray import ray_engine as engine_module
from polyfed.simulation.engines.ray.ray_engine import RayEngine
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.testing import SmallNet, assert_runs_equal, small_clients

QUIET = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}


@pytest.fixture
def shared():
    """A Ray that is there before the engine comes, and stays."""
    ray.init(address="local", num_cpus=2, **QUIET)
    yield
    assert ray.is_initialized()
    ray.shutdown()


def federate(clients, method, **options):
    return pf.federate(clients, method, **({"rounds": 2, "seed": 3} | options))


def on_ray(clients, method, **options):
    return federate(clients, method, engine="ray", **({"workers": 2} | options))


def tasks_of(clients, method):
    federation = Federation({c.id: c for c in clients}, method, Settings())
    start = Checkpoint(0, method.server_init(federation.server_context()), {})
    downs = method.dispatch_all(start.state, [federation.client_info(c.id, 1) for c in clients])
    return [
        federation.build_task("local", client, 1, down, start)
        for client, down in zip(federation.clients, downs, strict=True)
    ]


@pytest.mark.slow
def test_a_ray_of_our_own_starts_computes_the_same_and_ends(capfd):
    """With networks that cannot be pickled, and private data larger than what travels with the list of clients."""
    wide = [pf.Client(c.id, lambda: SmallNet(), c.train, c.test) for c in small_clients(4)]
    method = FedAvg(lr=0.05, momentum=0.9, batch_size=8)
    run = on_ray(wide, method, clients_per_round=3)
    assert not ray.is_initialized()
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
    assert_runs_equal(run, federate(wide, method, clients_per_round=3, workers=0))


def image_clients():
    """As in the tests of FedPNAS."""
    generator = torch_generator(7)
    patterns = torch.randn(3, 1, 8, 8, generator=generator)
    for k in range(3):
        y = torch.arange(20 + 3 * k) % 3
        x = patterns[y] + 0.5 * torch.randn(len(y), 1, 8, 8, generator=generator)
        yield f"client-{k}", (x[6:], y[6:]), (x[:6], y[:6])


def federations():
    train = {"lr": 0.05, "batch_size": 8}
    nets = [SmallNet, lambda: nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))]
    mixed = [pf.Client(c.id, nets[k % 2], c.train, c.test) for k, c in enumerate(small_clients(4))]
    public = torch.randn(40, 6, generator=torch_generator(8))
    specs = [ModelSpec(name, {"width": 4, "norm": "batch"}, (1, 8, 8), 3) for name in ("flha_arch1", "flha_arch2")]
    layers = [pf.Client(name, specs[k % 2], *sets) for k, (name, *sets) in enumerate(image_clients())]
    small = {"channels": 4, "base_cells": 1, "base_nodes": 1, "personal_nodes": 1, "operations": ("sep_conv_3", "skip"),
             "personal_operations": ("sep_conv_3", "skip")}  # fmt: skip
    images = [pf.Client(name, None, *sets) for name, *sets in image_clients()]
    return {
        "fedavg": (small_clients(4), FedAvg(**train, momentum=0.9, schedule="cosine"), {"clients_per_round": 0.5}),
        "fedhenn": (mixed, FedHeNN(**train, rad_size=20, rad_batch=8, eta0=1.0), {"public": public}),
        "flha_ghn": (layers, FLHAGHN(**train, clip_norm=5.0), {}),
        "pfedla": (small_clients(4), PFedLA(**train), {}),
        "ca_fedpnas": (images, CAFedPNAS(lr=0.02, batch_size=16, **small), {}),
    }


@pytest.mark.slow
def test_every_method_computes_the_same_as_in_this_process(shared, tmp_path):
    for name, (clients, method, options) in federations().items():
        run = on_ray(clients, method, out=tmp_path / name, **options)
        assert_runs_equal(run, federate(clients, method, out=tmp_path / f"{name}-alone", workers=0, **options))
        for client in clients:
            files = [tmp_path / folder / "models" / f"{client.id}.safetensors" for folder in (name, f"{name}-alone")]
            assert files[0].read_bytes() == files[1].read_bytes()
    clients, method, _ = federations()["fedavg"]
    resumed = pf.resume(tmp_path / "fedavg", clients=clients, engine="inprocess")
    assert resumed.history[-1]["round"] == 2


@pytest.mark.slow
def test_data_and_messages_are_put_once(shared, monkeypatch):
    """Clients share a store, which is one object; and so is what all of them receive."""
    put = []
    original = ray.put

    def counting(value):
        put.append(value)
        return original(value)

    monkeypatch.setattr(engine_module.ray, "put", counting)
    x, y = torch.randn(1000, 500), torch.arange(1000) % 3
    everything = pf.data.Examples(x, y)
    clients = [
        pf.Client(f"c{k}", lambda: nn.Linear(500, 3), everything.select(torch.arange(k, 1000, 9)), (x[:9], y[:9]))
        for k in range(6)
    ]
    engine = RayEngine(FedAvg(), clients, 2)
    try:
        large, (_, placed, *_) = put
        assert large.data.nbytes == x.nbytes
        assert sum(kept.data.nbytes for client in placed for kept in client.sets[0][1:3]) < 10 * y.nbytes
        assert len({id(client.sets[0][1]) for client in placed}) == 1
        tasks = tasks_of(clients, FedAvg())
        for number in (3, 4):
            assert {result.failure for result in engine.run(tasks)} == {None}
            assert len(put) == number
    finally:
        engine.close()


def dying(folder, times, parent):
    """A network that ends its process in training, so many times, if it is in a worker."""

    class Dying(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = SmallNet()

        def forward(self, x):
            died = len(list(folder.iterdir()))
            if self.training and os.getpid() != parent and died < times:
                (folder / str(died)).touch()
                os._exit(7)
            return self.inner(x)

    return Dying


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced_and_its_client_tried_again(request, tmp_path, capfd):
    def clients(times):
        (tmp_path / str(times)).mkdir()
        others = small_clients(4)
        network = dying(tmp_path / str(times), times, os.getpid())
        return [*others, pf.Client("killer", network, others[0].train, others[0].test)]

    once = clients(1)
    told = r"round 1, client 'killer': worker process \d+ on node [\d.]+ died \(.*\), phase 'local', attempt 1 of 2"
    with pytest.warns(RuntimeWarning, match=told):
        run = on_ray(once, Local(lr=0.05))
    assert "".join(capfd.readouterr()) == ""  # Ray has a paragraph on it
    assert [f["retried"] for f in run.history[0]["failures"]] == [True]
    run.history[0]["failures"].clear()
    assert_runs_equal(run, federate(once, Local(lr=0.05), workers=0))

    request.getfixturevalue("shared")
    with pytest.warns(RuntimeWarning, match=r"attempt [12] of 2"):
        run = on_ray(clients(2), Local(lr=0.05), on_error="skip")
    reasons = [f["reason"] for f in run.history[0]["failures"] if not f["retried"]]
    assert any(reason.startswith("its worker process died 2 times, last by ") for reason in reasons)
    assert "train_loss" in run.history[1]["clients"]["killer"]
    with (
        pytest.warns(RuntimeWarning, match=r"attempt [12] of 2"),
        pytest.raises(pf.ClientError, match=r"client 'killer', phase 'local': its worker process died 2 times"),
    ):
        on_ray(clients(3), Local(lr=0.05))


@pytest.mark.slow
def test_an_abandoned_call_gives_no_stale_results_and_close_kills(shared):
    clients = small_clients(4)
    engine = RayEngine(FedAvg(), clients, 2)
    tasks = tasks_of(clients, FedAvg())
    try:
        first = engine.run(tasks)
        next(first)
        first.close()
        replies = {r.task.client: r.reply.scalars["num_examples"] for r in engine.run(tasks)}
        pids = engine.worker_pids
    finally:
        engine.close()
    assert replies == {c.id: len(c.train) for c in clients}
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.slow
def test_a_node_that_is_killed_in_the_middle_of_a_round(tmp_path, monkeypatch):
    """Two nodes with a core each; one goes, and what it worked on is done by the other. Data are objects by themselves."""
    monkeypatch.setattr(object_store, "_LARGE", 0)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    marker, parent = tmp_path / "begun", os.getpid()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")  # at the node that stays
        victim = cluster.add_node(num_cpus=1)

        class Slow(nn.Module):
            """Its first training on the node that will die takes for ever."""

            def __init__(self):
                super().__init__()
                self.inner, self.victim = SmallNet(), victim_id

            def forward(self, x):
                if self.training and os.getpid() != parent and not marker.exists():
                    import ray

                    if ray.get_runtime_context().get_node_id() == self.victim:
                        marker.touch()
                        time.sleep(600)
                return self.inner(x)

        victim_id = victim.node_id
        clients = [pf.Client(c.id, Slow, c.train, c.test) for c in small_clients(6)]

        def kill():
            while not marker.exists():
                time.sleep(0.05)
            cluster.remove_node(victim, allow_graceful=False)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        method = FedAvg(lr=0.05, batch_size=8)
        with pytest.warns(RuntimeWarning, match=r"worker process \d+ on node .* died \(.*\), phase 'local', attempt 1"):
            run = on_ray(clients, method, rounds=3, ray_address=cluster.address)
        killer.join(10)
        assert marker.exists()
        retried = [f["retried"] for record in run.history for f in record["failures"]]
        assert retried == [True]
        for record in run.history:
            record["failures"].clear()
        assert_runs_equal(run, federate(clients, method, rounds=3, workers=0))
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_what_cannot_be_sent_or_read_is_said(shared, tmp_path, monkeypatch):
    lock = threading.Lock()
    unsendable = [pf.Client(c.id, lambda: (lock, SmallNet())[1], c.train, c.test) for c in small_clients(2)]
    with pytest.raises(UserError, match=r"cannot be sent to Ray's workers: TypeError: .*lock"):
        on_ray(unsendable, FedAvg())

    (tmp_path / "only_here.py").write_text(
        "from polyfed.testing import SmallNet\n\n\ndef build():\n    return SmallNet()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)  # after Ray has started, so that its workers do not look there
    build = importlib.import_module("only_here").build
    clients = [pf.Client(c.id, build, c.train, c.test) for c in small_clients(2)]
    with pytest.raises(
        UserError, match=r"worker of Ray cannot read the clients: .*'only_here'.* importable on every node"
    ):
        on_ray(clients, FedAvg())


@pytest.mark.slow
def test_no_cluster_at_the_address(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")  # what "auto" looks for first
    for address in ("auto", "127.0.0.1:9", "127.0.0.1:99999", "nowhere.invalid:6379"):
        with pytest.raises(UserError, match=f"ray_address='{address}': no Ray answers there"):
            on_ray(small_clients(2), FedAvg(), ray_address=address)


@pytest.mark.slow
def test_a_token_that_ray_misses_is_asked_for(tmp_path):
    """In a process of its own, since Ray reads once how it lets in."""
    code = """
import polyfed as pf
from polyfed.testing import small_clients
try:
    pf.federate(small_clients(2), pf.algorithms.FedAvg(), rounds=1, engine="ray", ray_address="127.0.0.1:{}")
except pf.UserError as error:
    print(error)
"""
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        own = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
        words = [sys.executable, "-c", code.format(somebody.getsockname()[1])]
        done = subprocess.run(words, env=own, capture_output=True, text=True, timeout=120, check=True)
    assert "no authentication token was found" in done.stdout
    assert "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here too" in done.stdout


@pytest.mark.slow
def test_no_gpu_on_this_machine():
    with pytest.raises(UserError, match="gpus_per_worker=1000, but Ray finds no such GPU on this machine"):
        on_ray(small_clients(2), FedAvg(), gpus_per_worker=1000)
    assert not ray.is_initialized()


def test_importing_polyfed_does_not_import_ray():
    code = "import sys, polyfed, polyfed.simulation.engines; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_missing_ray_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"needs the package ray, which is not installed: pip install 'polyfed\[ray\]'"):
        on_ray(small_clients(2), FedAvg(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("tensor", [
    torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last), torch.randn(6, 2).t(), torch.randn(9)[::2],
    torch.tensor(3), torch.empty(0, 4), torch.ones(1).expand(5, 3), torch.tensor([True, False]),
    torch.randn(3).to(torch.bfloat16), torch.randn(1, 3, requires_grad=True), torch.arange(100)[7:9],
])  # fmt: skip
def test_tensors_come_back_as_they_were(tensor):
    kept = object_store.flatten_tensor(tensor)
    for copy in (True, False):
        again = object_store.unflatten_tensor(kept, copy=copy)
        assert torch.equal(again, tensor)
        assert again.dtype == tensor.dtype
        if tensor.is_contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor.t().is_contiguous():
            assert again.stride() == tensor.stride()
    assert kept.data.nbytes == tensor.numel() * tensor.element_size()
