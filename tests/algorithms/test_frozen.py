"""Parameters that are not trained neither travel nor are kept, and every method trains as if they were constants."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.core.errors import ClientError, UserError
from polyfed.core.methods.declared_words import MODEL_REQUIREMENTS
from polyfed.core.nn.module_cache import (
    build_module,
    cached_module,
    copy_trained_weights_and_buffers,
    fill_module,
    frozen_parameters,
    initial_state,
)
from polyfed.core.seeds import torch_generator
from polyfed.core.serialization import safetensors_num_bytes, serialize_state
from polyfed.core.state_dict import iter_tensors
from polyfed.simulation.checks.requirements import check_networks_run
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.checkpoints.checkpoint import Checkpoint
from polyfed.testing import assert_runs_equal, example_of, small_clients, without_durations

METHODS = [n for n, m in REGISTRY.items() if m.requires & MODEL_REQUIREMENTS and "adapters" not in m.requires]


class Backbone(nn.Module):
    """A linear layer of fixed values, as parameters that are not trained or as a buffer that is not in the state dict."""

    def __init__(self, as_buffer, seed):
        super().__init__()
        generator = torch_generator(seed)
        for name, shape in {"weight": (8, 6), "bias": (8,)}.items():
            value = torch.randn(shape, generator=generator)
            if as_buffer:
                self.register_buffer(name, value, persistent=False)
            else:
                setattr(self, name, nn.Parameter(value, requires_grad=False))

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class Tuned(nn.Module):
    """What is trained begins with values of its own, so that the draw of an architecture does not matter."""

    def __init__(self, as_buffer=False, seed=3):
        super().__init__()
        self.backbone = Backbone(as_buffer, seed)
        self.norm, self.mid, self.head = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 3)
        generator = torch_generator(5)
        with torch.no_grad():
            for layer in (self.mid, self.head):
                for parameter in layer.parameters():
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))

    def forward(self, x):
        return self.head(torch.tanh(self.mid(torch.tanh(self.norm(self.backbone(x))))))


def of_buffers():
    return Tuned(as_buffer=True)


def other_backbone():
    return Tuned(seed=4)


def with_models(*factories):
    given = small_clients(len(factories))
    return [pf.Client(c.id, f, c.train, c.test, c.val) for c, f in zip(given, factories, strict=True)]


def made(name):
    return example_of(name).build(momentum=0.5, local_epochs=1)


def played(method, factory, rounds=2):
    """The run of three clients, and all tensors that travelled or were kept after each round."""
    public = torch.randn(24, 6, generator=torch_generator(1)) if "public_data" in method.requires else None
    run = pf.federate(with_models(*[factory] * 3), method, rounds=rounds, clients_per_round=2, workers=0, public=public)
    down = run.federation.algorithm.dispatch(run.last.state, run.federation.client_info("client-0", rounds))
    held = {"server": run.last.state, "clients": run.last.client_states, "down": down.tensors}
    return run, without_names(held, set(run.federation.client_registry.architectures.values()))


def without_names(held, architectures):
    """The same without the names of architectures, which are others for another class."""
    if not isinstance(held, dict):
        return held
    return {"network" if k in architectures else k: without_names(v, architectures) for k, v in held.items()}


GENERATING = {"flha_ghn", "pfedhn"}  # whose random numbers follow from graph and name of the architecture
SLOW = {"fedavg_ft", "fedbn", "pfedla", "heur_pfedla", "fedfomo", "local", "per_fedavg", "fedhenn_homo", "fedavg_kd"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in METHODS if n not in GENERATING]
)
def test_a_frozen_part_is_a_constant(name):
    """The same method on the network whose frozen part is a buffer outside the state dict: every number is the same."""
    frozen, constant = (played(made(name), factory) for factory in (Tuned, of_buffers))
    assert serialize_state(frozen[1]) == serialize_state(constant[1])
    assert without_durations(frozen[0].history) == without_durations(constant[0].history)
    models = (run.model("client-0") for run, _ in (frozen, constant))
    model, other = (getattr(m, "network", getattr(m, "own", m)) for m in models)  # without what is around it
    for tensor, expected in zip(model.backbone.parameters(), Tuned().backbone.parameters(), strict=True):
        assert torch.equal(tensor, expected)
    assert {n for n in model.state_dict() if n.startswith("backbone")} == {"backbone.weight", "backbone.bias"}
    for n, tensor in other.state_dict().items():
        assert torch.equal(model.state_dict()[n], tensor)


def test_a_hypernetwork_does_not_make_what_is_frozen():
    run, held = played(REGISTRY["flha_ghn"](lr=0.05, momentum=0.5, batch_size=8, depth=1, latent=4, hidden=4), Tuned)
    kept = {name for own in held["clients"].values() for part in own.values() for name in part}
    assert "norm.running_mean" in kept
    assert not {name for name in kept if name.startswith("backbone")}
    model = run.model("client-0")
    assert torch.equal(model.backbone.weight, Tuned().backbone.weight)
    assert not torch.equal(model.mid.weight, Tuned().mid.weight)


def test_only_what_is_trained_travels():
    run, held = played(made("fedavg"), Tuned, rounds=1)
    sent = {name: tensor for name, tensor in build_module(Tuned, 0).state_dict().items() if "backbone" not in name}
    rows = [row for row in run.history[-1]["clients"].values() if "bytes_up" in row]
    size = safetensors_num_bytes({f"model/{name}": tensor for name, tensor in sent.items()})
    assert [(row["bytes_down"], row["bytes_up"]) for row in rows] == [(size, size)] * 2
    assert held["server"]["model"].keys() == sent.keys()


def test_a_checkpoint_and_an_export(tmp_path):
    """A checkpoint holds what is trained; the file of a model is whole, so that it can be loaded by itself."""
    import safetensors.torch

    clients = with_models(Tuned, Tuned)
    run = pf.federate(clients, made("local"), rounds=1, workers=0, out=tmp_path / "run")
    assert not any("backbone" in name for own in run.last.client_states.values() for name in own["model"])
    alone = Tuned(seed=9)
    alone.load_state_dict(safetensors.torch.load_file(tmp_path / "run" / "models" / "client-0.safetensors"))
    assert torch.equal(alone.backbone.weight, Tuned().backbone.weight)
    again = pf.resume(tmp_path / "run", clients=clients)
    assert without_durations(again.history) == without_durations(run.history)


def test_other_backbones_are_refused_where_one_is_needed():
    two = with_models(Tuned, other_backbone)
    with pytest.raises(UserError, match=r"'client-1' and 'client-0' differ in frozen parameters .* same pretrained"):
        pf.federate(two, made("fedavg"), rounds=1, workers=0)
    pf.federate(two, made("local"), rounds=1, workers=0)
    run = pf.federate(two, made("pfedhn"), rounds=1, workers=0)
    assert torch.equal(run.model("client-1").backbone.weight, other_backbone().backbone.weight)


def test_a_fingerprint_of_the_frozen_part():
    one, same, other, none = (
        cached_module(f).architecture for f in (Tuned, lambda: Tuned(), other_backbone, of_buffers)
    )
    assert one == same != other
    assert one.partition("-")[0] == other.partition("-")[0]
    assert "-" not in none


def test_a_frozen_part_that_is_drawn_does_not_depend_on_the_runs_seed():
    def drawn():
        net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
        net[0].requires_grad_(False)
        return net

    runs = [pf.federate(with_models(drawn, drawn), made("fedavg"), rounds=1, seed=seed, workers=0) for seed in (0, 1)]
    first, second = (run.model("client-0") for run in runs)
    assert torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[1].weight, second[1].weight)


def test_a_network_that_is_frozen_otherwise_each_time_is_refused():
    count = iter(range(99))

    with pytest.raises(UserError, match=r"other frozen parameters .* each time it is built"):
        check_networks_run(with_models(lambda: Tuned(seed=next(count))))


def test_a_network_that_changes_its_frozen_part_is_named():
    class Moving(Tuned):
        def forward(self, x):
            if self.training:
                with torch.no_grad():
                    self.backbone.bias.mul_(0.9)
            return super().forward(x)

    with pytest.raises(ClientError, match=r"changed its parameter 'backbone.bias' itself.* into a buffer"):
        pf.federate(with_models(Moving), made("local"), rounds=1, workers=0)


def test_a_scratch_module_takes_no_frozen_parameters():
    net, whole = cached_module(Tuned), build_module(other_backbone, 0).state_dict()
    with pytest.raises(ValueError, match=r"unknown \['backbone.bias', 'backbone.weight'\]"):
        fill_module(net.module, whole)
    fill_module(net.module, initial_state(Tuned, 0))
    assert (
        copy_trained_weights_and_buffers(net.module).keys()
        == initial_state(Tuned, 0).keys()
        == whole.keys() - set(net.frozen)
    )
    fresh = fill_module(build_module(Tuned, 0), whole)  # a file with a whole network
    assert torch.equal(fresh.backbone.weight, whole["backbone.weight"])
    with pytest.raises(ValueError, match="missing"):
        fill_module(build_module(Tuned, 0), {n: t for n, t in whole.items() if n != "backbone.bias"})
    net.module.requires_grad_(False)
    assert list(frozen_parameters(net.module)) == ["backbone.weight", "backbone.bias"]
    net.restore_all_but_weights()


def test_the_server_cannot_send_a_backbone():
    (client,) = with_models(Tuned)
    method = made("fedavg")
    federation = Federation({client.id: client}, method, Settings(rounds=1))
    state = method.server_init(federation.server_context())
    assert all(t.shape != (8, 6) for t in iter_tensors(state))
    down = method.dispatch(state, federation.client_info(client.id, 1))
    hostile = pf.Message({"model": {**down.tensors["model"], "backbone.weight": torch.zeros(8, 6)}}, down.scalars)
    with pytest.raises(ValueError, match="unknown"):
        method.local_update(hostile, {}, client, 0)
    assert isinstance(federation.initial_checkpoint(), Checkpoint)


@pytest.mark.slow
def test_workers_of_a_pool_build_the_same_frozen_part():
    def drawn():
        net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
        net[0].requires_grad_(False)
        return net

    runs = [pf.federate(with_models(drawn, drawn), made("fedavg"), rounds=2, workers=workers) for workers in (0, 2)]
    assert_runs_equal(*runs)
