"""What a round makes of each field, where the method's parts are proved elsewhere: that they are put together rightly."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY, FedBN, PerFedAvg, PFedHN, PFedLA, PFedMe
from polyfed.core.algorithm import ClientInfo, Message
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import initial_state
from polyfed.core.state_dict import iter_tensors
from polyfed.simulation.engines.base import Engine
from polyfed.simulation.engines.factory import build_engine
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.training_round import run_phase
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.testing import small_clients


def test_the_rounds_clip_and_schedule_are_those_of_the_fields():
    options = {"lr": 0.1, "local_steps": 2, "batch_size": 8, "hn_momentum": 0.0, "hn_weight_decay": 0.0, "hn_lr": 1.0}
    start, moved = {}, {}
    for clip in (None, 1e-6):
        method = PFedHN(hn_clip=clip, **options)
        run = pf.federate(small_clients(), method, rounds=1, workers=0)
        federation = run.federation
        start = method.server_init(federation.server_context())["network"]
        after = run.last.state["network"]
        squares = [
            float((a - b).double().square().sum())
            for a, b in zip(iter_tensors(after), iter_tensors(start), strict=True)
        ]
        moved[clip] = sum(squares) ** 0.5
    assert 0 < moved[1e-6] <= 3.1e-6 < moved[None]  # the sum of three clients' gradients of norm 1e-6
    method = PFedHN(schedule="exponential", decay=0.5, **options)
    state = method.server_init(federation.server_context())
    told = [method.dispatch(state, federation.client_info("client-0", t)).scalars["lr"] for t in (1,)]
    later = method.dispatch(state, ClientInfo("client-0", 2, 3, federation.client_info("client-0", 1).architecture))
    assert [*told, later.scalars["lr"]] == pytest.approx([0.1, 0.05])


def in_double(factory):
    clients = small_clients()
    return [pf.Client(c.id, factory, (c.train.x.double(), c.train.y), (c.test.x.double(), c.test.y)) for c in clients]


def with_dropout():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)).double()


def with_state():
    """Spectral normalisation moves a buffer in each forward pass in training."""
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("factory", [with_dropout, with_state])
def test_hessian_free_steps_do_not_depend_on_delta(factory):
    """The two passes of the difference differ in nothing but ±δ: else their noise would be divided by 2δ."""
    client = in_double(factory)[0]
    names = {name for name, _ in factory().named_parameters()}
    down = Message({"model": {n: t for n, t in initial_state(factory, 0).items() if n in names}}, {"lr": 1.0})

    def step(variant, delta=1e-3):
        method = PerFedAvg(variant=variant, delta=delta, alpha=0.3, batch_size=0, local_steps=1)
        with exclusive_single_torch_thread_with_grad():
            reply, _ = method.local_update(down, {}, client, 5)
        return torch.cat([reply.tensors["model"][n].flatten() for n in sorted(names)])

    first_order, coarse, fine = step("fo"), step("hf", 1e-2), step("hf", 1e-5)
    assert (fine - first_order).norm() > 1e-3
    assert (coarse - fine).norm() < 0.02 * (fine - first_order).norm()


def test_pfedme_begins_each_round_at_w():
    """What the client had as θ_i in earlier rounds has no say."""
    clients = small_clients()
    run = pf.federate(clients, PFedMe(lr=0.05, batch_size=8), rounds=2, workers=0)
    method, client = run.federation.algorithm, clients[0]
    down = method.dispatch(run.last.state, ClientInfo(client.id, 3, 3))
    own = dict(run.last.client_states[client.id])
    assert "model" in own
    without = {group: value for group, value in own.items() if group != "model"}
    with exclusive_single_torch_thread_with_grad():
        replies = [method.local_update(down, private, client, 4)[0].tensors["model"] for private in (own, without)]
    assert all(torch.equal(replies[0][name], replies[1][name]) for name in replies[0])


class OwnNorm(nn.Module):
    """A norm layer of a class that nobody knows."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.scale * x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt()


def test_fedbn_takes_norm_layers_by_name():
    def factory():
        return nn.Sequential(nn.Linear(6, 8), OwnNorm(), nn.ReLU(), nn.Linear(8, 3))

    clients = [pf.Client(c.id, factory, c.train, c.test) for c in small_clients()]
    run = pf.federate(clients, FedBN(norms=("1",), lr=0.1, batch_size=8), rounds=2, workers=0)
    assert set(run.last.state["model"]) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    scales = [run.model(c.id)[1].scale for c in clients]
    assert not torch.equal(scales[0], scales[1])
    with pytest.raises(pf.UserError, match="no such module"):
        pf.federate(clients, FedBN(norms=("norm",)), rounds=1, workers=0)
    with pytest.raises(pf.UserError, match="norms must be a list of module names, or none, got 'bn'"):
        FedBN(norms="bn")


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("heur_pfedla", {"k": 1.5}, "k must be a whole number, got 1.5"),
        ("heur_pfedla", {"k": "all"}, "k must be a whole number, got 'all'"),
        ("heur_pfedla", {"k": True}, "k must be a whole number, got True"),
        ("pfedla", {"hn_lr": "a"}, "hn_lr must be a number, got 'a'"),
        ("pfedme", {"k": 2.5}, "k must be a whole number, got 2.5"),
        ("fedfomo", {"num_models": 2.5}, "num_models must be a whole number, got 2.5"),
        ("fedavg", {"local_epochs": 1.5}, "local_epochs must be a whole number, got 1.5"),
        ("fedavg", {"weighted": 1}, "weighted must be true or false, got 1"),
        ("pfedhn", {"embedding_dim": 2.0}, "embedding_dim must be a whole number, got 2.0"),
    ],
)
def test_numbers_of_another_kind_are_refused(name, fields, message):
    with pytest.raises(pf.UserError, match=message):
        REGISTRY[name](**fields)


def test_messages_do_not_outlive_their_block(monkeypatch):
    """After a phase the personal models that were sent for it are gone."""
    method = PFedLA(lr=0.05, evaluate_trained=False)
    clients = small_clients(6)
    federation = Federation({c.id: c for c in clients}, method, Settings(rounds=1))
    at = Checkpoint(0, method.server_init(federation.server_context()), {})
    engine = build_engine("inprocess", method, clients, torch.device("cpu"), 0)
    monkeypatch.setattr(Engine, "max_block_bytes", 1)
    monkeypatch.setattr("polyfed.algorithms.hypernetworks.pfedla._BLOCK", 1)
    found = run_phase(federation, engine, "evaluate", list(federation.clients), 1, at, SilentProgress())
    assert len(found.results) == 6
    assert not list(iter_tensors([result.task.message.tensors for result in found.results.values()]))
