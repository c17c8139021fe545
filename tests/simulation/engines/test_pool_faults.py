"""The pool under load and abuse: messages that fill pipes, deaths in the middle of a reply, abandoned calls."""

import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg, Local
from polyfed.core.errors import UserError
from polyfed.models import ModelSpec
from polyfed.simulation.engines.factory import build_engine, unpicklable_client_error
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.engines.pool import PoolEngine
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.testing import SmallNet, assert_runs_equal, small_clients


@contextmanager
def at_most(seconds):
    """A deadlock becomes an error."""

    def stop(*_):
        raise TimeoutError(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True, kw_only=True)
class LongLog(FedAvg):
    """Keeps a private list that is far larger than a pipe, and no private tensor."""

    def local_update(self, message, client_state, client, seed):
        reply, client_state = super().local_update(message, client_state, client, seed)
        return reply, {**client_state, "log": [0.123456789] * 40_000}


def big_clients(number=6):
    return [pf.Client(c.id, wide, c.train, c.test) for c in small_clients(number)]


def wide():
    return nn.Sequential(nn.Linear(6, 40_000), nn.Linear(40_000, 3))


@pytest.mark.slow
def test_private_lists_larger_than_a_pipe_do_not_block():
    with at_most(60):
        run = pf.federate(big_clients(), LongLog(), rounds=3, workers=2)
    assert len(run.last.client_states["client-0"]["log"]) == 40_000


class ManyTensors(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(())) for _ in range(6000)])
        self.layer = nn.Linear(6, 20_000)
        self.out = nn.Linear(20_000, 3)

    def forward(self, x):
        return self.out(self.layer(x)) * self.scales[0]


@pytest.mark.slow
def test_thousands_of_small_tensors_do_not_block():
    clients = [pf.Client(c.id, ManyTensors, c.train, c.test) for c in small_clients(6)]
    with at_most(100):
        pf.federate(clients, FedAvg(batch_size=0), rounds=2, workers=2, evaluate_every=2)


def test_a_worker_that_dies_in_the_middle_of_its_reply_is_replaced(tmp_path, monkeypatch):
    parent, marker, original = os.getpid(), tmp_path / "died", Connection._send

    def send(self, buffer, *arguments):
        if os.getpid() != parent and len(buffer) > 100_000 and not marker.exists():
            marker.touch()
            original(self, bytes(buffer)[:50_000])
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, buffer, *arguments)

    monkeypatch.setattr(Connection, "_send", send)
    with pytest.warns(RuntimeWarning, match="died .signal SIGKILL.*attempt 1 of 2"):
        run = pf.federate(big_clients(3), FedAvg(), rounds=1, workers=1)
    assert marker.exists()
    assert [f["retried"] for f in run.history[0]["failures"]] == [True]


def test_an_abandoned_call_gives_no_stale_results():
    clients = small_clients(4)
    federation = Federation({c.id: c for c in clients}, FedAvg(), Settings())
    start = Checkpoint(0, FedAvg().server_init(federation.server_context()), {})
    down = FedAvg().dispatch(start.state, federation.client_info("client-0", 1))
    tasks = [federation.build_task("local", c.id, 1, down, start) for c in clients]
    engine = PoolEngine(FedAvg(), clients, torch.device("cpu"), 2)
    try:
        first = engine.run(tasks)
        next(first)
        first.close()
        replies = {r.task.client: r.reply.scalars["num_examples"] for r in engine.run(tasks)}
    finally:
        engine.close()
    assert replies == {c.id: len(c.train) for c in clients}


@dataclass(frozen=True, kw_only=True)
class Unkeepable(FedAvg):
    """Private state of types that no checkpoint keeps."""

    kind: str = "numpy"

    def local_update(self, message, client_state, client, seed):
        reply, _ = super().local_update(message, client_state, client, seed)
        return reply, {"seen": np.float32(3) if self.kind == "numpy" else (1, 2)}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["numpy", "tuple"])
def test_state_that_cannot_be_kept_is_refused_everywhere_alike(kind, workers):
    with pytest.raises(pf.ClientError, match=r"the private state at 'seen' is a (float32|tuple); keep dicts"):
        pf.federate(small_clients(), Unkeepable(kind=kind), rounds=1, workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_reply_with_something_else_than_tensors(workers):
    @dataclass(frozen=True, kw_only=True)
    class Odd(FedAvg):
        def local_update(self, message, client_state, client, seed):
            reply, client_state = super().local_update(message, client_state, client, seed)
            return pf.Message({"model": {**reply.tensors["model"], "head.bias": [1.0]}}, reply.scalars), client_state

    with pytest.raises(pf.ClientError, match=r"'head.bias' is a list, not a tensor"):
        pf.federate(small_clients(), Odd(), rounds=1, workers=workers)


def test_where_processes_cannot_be_forked_lambdas_run_in_this_process(monkeypatch):
    monkeypatch.setattr("polyfed.simulation.engines.factory.can_fork", lambda device: False)
    clients = [pf.Client(c.id, lambda: SmallNet(), c.train, c.test) for c in small_clients()]
    with pytest.raises(UserError, match=r"cannot be sent to another process .*engine='inprocess'"):
        build_engine("pool", Local(), clients, torch.device("cpu"), 2)
    with pytest.warns(RuntimeWarning, match="so all clients run in this process"):
        engine = build_engine("auto", Local(), clients, torch.device("cpu"), 2)
    assert isinstance(engine, InProcessEngine)
    assert (
        unpicklable_client_error([pf.Client("a", ModelSpec("mlp", {}, (6,), 3), clients[0].train, clients[0].test)])
        is None
    )


class Drawing(nn.Module):
    """Draws random numbers in evaluation too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x + 0.5 * torch.randn(x.shape))


class Counting(nn.Module):
    """Keeps a non-persistent buffer, a counter and a frozen layer, all changed by training."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(6), persistent=False)
        self.steps = 0

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
            self.steps += 1
            if self.steps > 2:
                self.layer.weight.requires_grad_(False)
        return self.out(torch.tanh(self.layer(x - self.mean)) * (1 + 0.01 * self.steps))


class Caching(nn.Module):
    """Caches a tensor at its first forward pass, as position encodings do, and uses it with a parameter."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale, self.grid = nn.Linear(6, 3), nn.Parameter(torch.ones(6)), None

    def forward(self, x):
        if self.grid is None:
            self.grid = torch.linspace(0.5, 1.5, 6).sqrt()
        return self.layer(x * (self.grid * self.scale))


@pytest.mark.thorough
@pytest.mark.parametrize("network", [Drawing, Counting, Caching])
def test_what_a_network_keeps_beside_its_weights_does_not_reach_the_next_client(network):
    clients = [pf.Client(c.id, network, c.train, c.test) for c in small_clients(4)]
    state = torch.random.get_rng_state()
    runs = [pf.federate(clients, FedAvg(lr=0.1, batch_size=8), rounds=2, workers=w) for w in (0, 0, 1, 2)]
    assert torch.equal(state, torch.random.get_rng_state())
    for run in runs[1:]:
        assert_runs_equal(runs[0], run)


class Viewing(nn.Module):
    """Reshapes by `view` after a convolution, as most tutorials do."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 4, 3), nn.Linear(144, 3)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        return self.out(x.view(x.size(0), -1))


def test_networks_that_need_the_default_layout_keep_it():
    x, y = torch.randn(36, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(36) % 3
    clients = [pf.Client(f"c{k}", Viewing, (x[k:30:2], y[k:30:2]), (x[30:], y[30:])) for k in range(2)]
    for workers in (0, 2):
        run = pf.federate(clients, FedAvg(), rounds=1, workers=workers)
        assert run.table()[0]["loss"] is not None
