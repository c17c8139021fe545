"""pFedLA's server: large tensors in parts, many clients in blocks, retained and shared layers, checkpoints, divergence."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import HeurPFedLA, PFedLA
from polyfed.algorithms.hypernetworks import pfedla
from polyfed.core.algorithm import ClientInfo, ServerContext
from polyfed.core.serialization import deserialize_state, serialize_state
from polyfed.hypernetworks import layer_aggregation
from polyfed.testing import SmallNet, small_clients

OPTIONS = {"lr": 0.05, "local_epochs": 2, "batch_size": 8, "momentum": 0.5}


def federate(method, clients=None, **options):
    return pf.federate(clients or small_clients(), method, **({"rounds": 3, "workers": 0} | options))


def random_models(shapes, number=3):
    generator = torch.Generator().manual_seed(1)
    return [
        {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()} for _ in range(number)
    ]


@pytest.mark.parametrize("chunk", [1, 8, 2**20])
def test_products_do_not_depend_on_how_tensors_are_cut(monkeypatch, chunk):
    monkeypatch.setattr(layer_aggregation, "_CHUNK", chunk)
    shapes, layers = {"w": (5, 7), "b": (5,), "v": (3,)}, {"one": ["w", "b"], "two": ["v"]}
    models, replies = random_models(shapes), random_models(shapes, 2)
    alpha = torch.rand(2, 2, 3, dtype=torch.float64)
    mixed = layer_aggregation.mix_models_by_layer(models, alpha, layers)
    products = layer_aggregation.inner_products_with_updates(models, alpha, replies, layers)
    for i in range(2):
        for position, names in enumerate(layers.values()):
            for name in names:
                expected = sum(alpha[i, position, j] * models[j][name] for j in range(3))
                torch.testing.assert_close(mixed[i][name], expected)
            for j in range(3):
                by_hand = sum((models[j][n] * (replies[i][n] - mixed[i][n])).sum() for n in names)
                torch.testing.assert_close(products[i, position, j], by_hand)


def test_messages_of_several_blocks_are_those_of_one(monkeypatch):
    method = HeurPFedLA(**OPTIONS)
    state = federate(method).last.state
    everyone = [ClientInfo(client, 2, 3) for client in state["clients"]]
    whole = list(method.dispatch_all(state, everyone))
    monkeypatch.setattr(pfedla, "_BLOCK", 1)
    for one, other in zip(whole, method.dispatch_all(state, everyone), strict=True):
        assert one.tensors["model"].keys() == other.tensors["model"].keys()
        for name, tensor in one.tensors["model"].items():
            torch.testing.assert_close(tensor, other.tensors["model"][name])


def test_heurpfedla_learns_from_what_the_client_began_with():
    """Δθ_i = θ_i − {Heurθ̄_i, θ_i^retain} (algorithm 2) of all layers, by autograd on the explicit graph of θ̄_i."""
    method = HeurPFedLA(k=1, hn_lr=1.0, **OPTIONS)
    state = federate(method).last.state
    double = {c: {n: t.double() for n, t in model.items()} for c, model in state["models"].items()}
    networks = {c: {n: t.double() for n, t in each.items()} for c, each in state["hypernetworks"].items()}
    state = {**state, "models": double, "hypernetworks": networks}
    generator = torch.Generator().manual_seed(0)
    for row, client in enumerate(state["clients"]):
        down = method.dispatch(state, ClientInfo(client)).tensors["model"]
        assert 0 < len(down) < len(double[client])
        begun = {**double[client], **down}
        after = {n: t + 0.1 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in begun.items()}
        leaves = {
            n: t.clone().requires_grad_()
            for n, t in layer_aggregation.stack_hypernetworks(list(networks.values())).items()
        }
        alpha = layer_aggregation.layer_aggregation_weights(
            {n: t[row : row + 1] for n, t in leaves.items()}, [row], "relu"
        )[0]
        mixed = {
            name: sum(alpha[layer, j] * double[c][name] for j, c in enumerate(state["clients"]))
            for layer, names in enumerate(state["layers"].values())
            for name in names
        }
        change = [after[name] - begun[name] for name in mixed]
        ascent = torch.autograd.grad(list(mixed.values()), list(leaves.values()), change)
        updated = pfedla.update_models_and_hypernetworks(state, {client: after}, method, k=1)["hypernetworks"]
        updated = layer_aggregation.stack_hypernetworks(list(updated.values()))
        for (name, before), step in zip(leaves.items(), ascent, strict=True):
            torch.testing.assert_close(updated[name], before + step, rtol=1e-9, atol=1e-12)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.second(self.first(x).tanh()).tanh())


@pytest.mark.parametrize("layer", ["module", "block", "tensor", "model"])
@pytest.mark.one_case
def test_a_shared_tensor_counts_once_in_the_layer_of_its_first_name(layer):
    clients = [pf.Client(c.id, Tied, c.train, c.test) for c in small_clients()]
    run = federate(PFedLA(layer=layer, hn_lr=5.0, **OPTIONS), clients)
    state = run.last.state
    (home,) = [name for name, names in state["layers"].items() if "first.weight" in names]
    assert not any("second.weight" in names for names in state["layers"].values())
    for message in PFedLA(layer=layer).dispatch_all(state, [ClientInfo(c) for c in state["clients"]]):
        assert message.tensors["model"].keys() == set(Tied().state_dict()) - {"second.weight"}
    replies = {c: {n: t + 0.1 for n, t in model.items()} for c, model in state["models"].items()}
    served = torch.zeros(3, len(state["layers"]), 3)
    models = [state["models"][c] for c in state["clients"]]
    products = layer_aggregation.inner_products_with_updates(models, served, list(replies.values()), state["layers"])
    position = list(state["layers"]).index(home)
    by_hand = sum(float((models[1][n] * replies["client-0"][n]).sum()) for n in state["layers"][home])
    assert products[0, position, 1].item() == pytest.approx(by_hand, rel=1e-4)


def test_a_checkpoint_holds_the_initial_model_once():
    initial = federate(PFedLA(**OPTIONS), rounds=1, clients_per_round=1).last.state
    data = serialize_state(initial)
    model = sum(t.nbytes for t in initial["models"]["client-0"].values())
    heads = sum(t.nbytes for network in initial["hypernetworks"].values() for t in network.values())
    assert len(data) < heads + 2 * model + 20_000  # the trained client's, and the one that the other two share
    again = deserialize_state(data)["models"]
    shared = {id(model["head.weight"]) for model in again.values()}
    assert len(shared) == 2


def test_a_rate_that_is_too_large_is_named():
    with pytest.raises(pf.UserError, match=r"hypernetworks have diverged.*lower hn_lr, which is 1e\+38"):
        federate(PFedLA(hn_lr=1e38, **OPTIONS))


def test_files_of_others_in_analysis_are_left_alone(tmp_path):
    out = tmp_path / "run"
    federate(PFedLA(**OPTIONS), out=out)
    (out / "analysis" / "round-2-plot.npz").write_bytes(b"mine")
    pf.resume(out, clients=small_clients(), workers=0)
    assert (out / "analysis" / "round-2-plot.npz").read_bytes() == b"mine"


def test_the_schedule_reaches_the_clients():
    method = PFedLA(schedule="exponential", decay=0.5, lr=0.4)
    state = federate(method, rounds=1).last.state
    told = [method.dispatch(state, ClientInfo("client-0", t, 3)).scalars["lr"] for t in (1, 2, 3)]
    assert told == pytest.approx([0.4, 0.2, 0.1])


def test_buffers_stay_with_the_client():
    run = federate(PFedLA(**OPTIONS))
    names = set(run.last.state["models"]["client-0"])
    assert names == {name for name, _ in SmallNet().named_parameters()}
    means = [run.model(f"client-{k}").body[1].running_mean for k in range(3)]
    assert not torch.allclose(means[0], means[1])


@pytest.mark.parametrize("number", [3, 10, 40])
def test_weights_do_not_depend_on_who_else_is_asked(number):
    """Bit for bit: the server finds out which layers a client retained by computing its weights again."""
    sizes = layer_aggregation.HypernetworkSizes(number, 5, 100, 100)
    networks = layer_aggregation.stack_hypernetworks(
        [layer_aggregation.init_aggregation_hypernetwork(f"client-{k}", sizes, seed=1) for k in range(number)]
    )
    together = layer_aggregation.layer_aggregation_weights(networks, range(number), "relu")
    for size in (1, 2, number - 1):
        part = layer_aggregation.layer_aggregation_weights(
            {n: t[:size] for n, t in networks.items()}, range(size), "relu"
        )
        assert torch.equal(part, together[:size])


def test_hypernetworks_are_stacked_a_few_at_a_time_with_the_same_bits(monkeypatch):
    """With 1,000 clients a stack of all would take as much memory again as they do."""
    method = PFedLA(**OPTIONS)
    state = federate(method).last.state
    clients, networks = state["clients"], list(state["hypernetworks"].values())
    assert [range(3)[few] for few, _ in pfedla.iterate_hypernetworks(state, clients, method)] == [range(3)]
    replies = {client: {n: t + 0.1 for n, t in state["models"][client].items()} for client in clients}
    alpha, after = (
        pfedla.compute_aggregation_weights(state, clients, method),
        pfedla.update_models_and_hypernetworks(state, replies, method),
    )

    monkeypatch.setattr(layer_aggregation, "_STACKED", 2 * sum(tensor.numel() for tensor in networks[0].values()))
    groups = list(pfedla.iterate_hypernetworks(state, clients, method))
    assert [(few, len(own)) for few, own in groups] == [(slice(0, 2), 2), (slice(2, 4), 1)]
    assert torch.equal(pfedla.compute_aggregation_weights(state, clients, method), alpha)
    again = pfedla.update_models_and_hypernetworks(state, replies, method)
    for client, before in zip(clients, networks, strict=True):
        for name, tensor in after["hypernetworks"][client].items():
            assert torch.equal(again["hypernetworks"][client][name], tensor)
        assert not torch.equal(before["heads.bias"], after["hypernetworks"][client]["heads.bias"])


def test_hypernetworks_of_clients_that_have_not_taken_part_are_drawn_when_needed():
    """They are N² numbers, which neither the server nor its checkpoints need to hold."""
    method = PFedLA(**OPTIONS)
    everyone = small_clients()
    first = pfedla.init_server_state(
        ServerContext(7, 3, tuple(ClientInfo(c.id) for c in everyone), model=everyone[0].model), method
    )
    assert first["hypernetworks"] == {}
    (_, drawn), (_, again) = (next(pfedla.iterate_hypernetworks(first, first["clients"], method)) for _ in range(2))
    for one, other in zip(drawn, again, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    sizes = layer_aggregation.HypernetworkSizes(3, len(first["layers"]), method.embedding_dim, method.hidden)
    assert sum(tensor.numel() for tensor in drawn[0].values()) == sizes.num_parameters
    assert not any(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0] if name != "heads.bias")

    held = {**first, "hypernetworks": dict(zip(first["clients"], drawn, strict=True))}
    assert torch.equal(
        pfedla.compute_aggregation_weights(first, first["clients"], method),
        pfedla.compute_aggregation_weights(held, first["clients"], method),
    )
    replies = {"client-1": {n: t + 0.1 for n, t in first["models"]["client-1"].items()}}
    drawing, holding = (
        pfedla.update_models_and_hypernetworks(state, replies, method)["hypernetworks"] for state in (first, held)
    )
    assert list(drawing) == ["client-1"]
    for name, tensor in holding["client-1"].items():
        assert torch.equal(drawing["client-1"][name], tensor)
