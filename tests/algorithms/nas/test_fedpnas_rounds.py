"""Whole rounds of FedPNAS and FedDSNAS against algorithms 1 and 2 in plain torch: eq. 2, eq. 3 and the two passes of section
3.2, on the same Gumbel noise."""

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from polyfed.algorithms import CAFedDSNAS, CAFedPNAS, FedDSNAS, FedPNAS
from polyfed.core.algorithm import Client, ClientInfo, DataSpec, ServerContext
from polyfed.core.seeds import torch_generator
from polyfed.nas import sampling
from polyfed.nas.supernet import Network
from tests.few_cases import few

SPACE = {
    "channels": 3, "base_cells": 1, "base_nodes": 1, "personal_nodes": 2,
    "operations": ("sep_conv_3", "max_pool_3", "skip"), "personal_operations": ("sep_conv_3", "skip"),
}  # fmt: skip
TRAINING = {
    "optimizer": "sgd",
    "lr": 0.3,
    "batch_size": 0,
    "local_epochs": 3,
    "buffers": "average",
    "finetune_epochs": 0,
}
ETA = 0.4


def clients():
    found = []
    for k in range(2):
        generator = torch_generator(k)
        x, y = torch.randn(8 + 4 * k, 1, 6, 6, generator=generator), torch.arange(8 + 4 * k) % 3
        found.append(Client(f"client-{k}", None, (x, y), (x[:3], y[:3])))
    return found


@pytest.fixture
def noise(monkeypatch):
    """All Gumbel noise that is drawn, in order."""
    drawn, draw = [], sampling.gumbel_noise_like

    def recorded(like):
        drawn.append(draw(like))
        return drawn[-1]

    monkeypatch.setattr(sampling, "gumbel_noise_like", recorded)
    return drawn


def logits_of(network, x, noise, temperature, gradient):
    """Algorithm 2, edge by edge: v_j = Σ_i Z_ijᵀ·O_ij(v_i), Z one-hot by this noise with the softmax's gradient (eq. 2).
    "chosen" leaves out the terms of all operations whose Z[k] is 0."""
    previous = skip = network.base["stem"](x)
    for cell, sampler in network.cells_with_samplers():
        perturbed = sampler.logits + noise.pop(0)
        soft = F.softmax(perturbed / temperature, -1)
        values = [previous] if cell.plan.inputs == 1 else [previous, cell.skip(skip)]
        for j in range(cell.plan.inputs, cell.plan.inputs + cell.plan.nodes):
            node = 0.0
            for number, (i, to) in enumerate(cell.plan.edges):
                chosen = int(perturbed[number].argmax())
                for k, operation in enumerate(cell.operations[number].values() if to == j else ()):
                    if k == chosen or gradient == "full":
                        node = node + (float(k == chosen) + soft[number, k] - soft[number, k].detach()) * operation(
                            values[i]
                        )
            values.append(node)
        previous, skip = values[-1], previous
    return network.personal["classifier"](previous.mean((2, 3)))


def local_update(network, client, noise, temperature, gradient, meta):
    """CLIENTUPDATE of algorithm 1, in place: three whole batches, each with one step of SGD."""
    x, y = client.train.x, client.train.labels
    personal = {n for n, _ in network.named_parameters() if n.startswith("personal.")}

    def slopes(module):
        module.zero_grad()
        F.cross_entropy(logits_of(module, x, noise, temperature, gradient), y).backward()
        used = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        return {n: g for n, g in used.items() if g.abs().max() > 0}

    for _ in range(TRAINING["local_epochs"]):
        ahead, first = copy.deepcopy(network), {}
        if meta:
            first = slopes(network)
            with torch.no_grad():
                for name, parameter in ahead.named_parameters():
                    if name in personal and name in first:
                        parameter -= ETA * first[name]
        second = slopes(ahead)
        both = personal & first.keys() & second.keys()
        alpha = sum((first[n] * second[n]).sum() for n in both)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if name in second:
                    parameter -= TRAINING["lr"] * (second[name] - (ETA * alpha * first[name] if name in both else 0.0))


@pytest.mark.parametrize(
    ("method", "gradient"),
    few(list(product([FedDSNAS, FedPNAS], ["chosen", "full"])), {(FedPNAS, "full")}),
)
def test_two_rounds_are_algorithm_1_in_plain_torch(method, gradient, noise):
    """Both clients' updates, and their mean with weights 1/M, whatever their sizes."""
    meta = {"eta": ETA} if method is FedPNAS else {}
    searching = method(**SPACE, **TRAINING, **meta, gradient=gradient, sampler_lr=None, temperature=0.8)
    who = tuple(ClientInfo(c.id) for c in clients())
    state = searching.server_init(ServerContext(0, 2, who, data_spec=DataSpec((1, 6, 6), 3)))
    theta = searching.supernet_plan(1, 3)().train()
    theta.load_state_dict({**theta.state_dict(), **state["base"], **state["personal"]})
    for number in (1, 2):
        temperature, replies, trained = searching.temperature_at(number, 2), {}, []
        for client in clients():
            noise.clear()
            down = searching.dispatch(state, ClientInfo(client.id, number, 2))
            replies[client.id], _ = searching.local_update(down, {}, client, 5)
            trained.append(copy.deepcopy(theta))
            local_update(trained[-1], client, list(noise), temperature, gradient, bool(meta))
        state = searching.aggregate(state, replies, None)
        with torch.no_grad():
            for name, parameter in theta.named_parameters():
                parameter.copy_(sum(one.get_parameter(name) for one in trained) / 2)
                found = state[name.partition(".")[0]][name]
                assert torch.allclose(found, parameter, rtol=1e-4, atol=2e-5), (number, name)


def logits_by_image(network, x, noise, temperature):
    """Algorithm 2 with section 3.3's samplers: each image has its own operations by this noise, and those that chose the
    same one go through it together. Z has the softmax's gradient for the chosen operation."""
    previous = skip = network.base["stem"](x)
    for cell, sampler in network.cells_with_samplers():
        perturbed = sampler(sampling.pool_to_8x8(x), previous) + noise.pop(0)
        soft, chosen = F.softmax(perturbed / temperature, -1), perturbed.argmax(-1)
        values = [previous] if cell.plan.inputs == 1 else [previous, cell.skip(skip)]
        for j in range(cell.plan.inputs, cell.plan.inputs + cell.plan.nodes):
            images = [0.0] * len(x)
            for number in (n for n, (_, end) in enumerate(cell.plan.edges) if end == j):
                value = values[cell.plan.edges[number][0]]
                for k, operation in enumerate(cell.operations[number].values()):
                    rows = [row for row in range(len(x)) if chosen[row, number] == k]
                    for row, out in zip(rows, operation(value[rows]) if rows else (), strict=True):
                        z = 1 + soft[row, number, k] - soft[row, number, k].detach()
                        images[row] = images[row] + z * out
            values.append(torch.stack(images))
        previous, skip = values[-1], previous
    return network.personal["classifier"](previous.mean((2, 3)))


@pytest.mark.parametrize("method", few([CAFedDSNAS, CAFedPNAS], [CAFedPNAS]))
def test_a_step_with_an_architecture_for_each_image_is_that_of_plain_torch(method, noise, monkeypatch):
    """The two passes of section 3.2 with the outer product as a matrix, where samplers see the image."""
    shown, forward = [], Network.forward
    monkeypatch.setattr(Network, "forward", lambda self, x: shown.append(x.clone()) or forward(self, x))
    generator = torch_generator(7)
    x, y = torch.randn(10, 1, 16, 16, generator=generator), torch.arange(10) % 3
    client = Client("a", None, (x, y), (x[:3], y[:3]))
    meta = {"eta": ETA} if method is CAFedPNAS else {}
    options = {**TRAINING, "local_epochs": 1, "temperature": 0.7, "sampler_lr": None}
    searching = method(**SPACE, **options, **meta)
    state = searching.server_init(ServerContext(0, 2, (ClientInfo("a"),), data_spec=DataSpec((1, 16, 16), 3)))
    for name, tensor in (item for group in state.values() for item in group.items()):
        if ".samplers." in name:  # they start at zero, where the image makes no difference
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
    theta = searching.supernet_plan(1, 3)().train()
    theta.load_state_dict({**theta.state_dict(), **state["base"], **state["personal"]})
    reply, _ = searching.local_update(searching.dispatch(state, ClientInfo("a", 1, 2)), {}, client, 5)
    order = [next(row for row in range(10) if torch.equal(x[row], image)) for image in shown[0]]
    draws = [one.double() for one in noise]
    theta.double()

    def slopes(network):
        loss = F.cross_entropy(logits_by_image(network, x[order].double(), draws, 0.7), y[order])
        return torch.autograd.grad(loss, list(network.parameters()), allow_unused=True)

    names, ahead, first = [name for name, _ in theta.named_parameters()], copy.deepcopy(theta), None
    if meta:
        first = dict(zip(names, slopes(theta), strict=True))
        with torch.no_grad():
            for name, parameter in ahead.named_parameters():
                if name.startswith("personal.") and first[name] is not None:
                    parameter -= ETA * first[name]
    step = dict(zip(names, slopes(ahead), strict=True))
    if first is not None:
        both = [n for n in names if n.startswith("personal.") and first[n] is not None and step[n] is not None]
        g, tilde = (torch.cat([one[n].flatten() for n in both]) for one in (first, step))
        corrected = tilde - ETA * torch.outer(g, g) @ tilde
        for name, part in zip(both, corrected.split([step[n].numel() for n in both]), strict=True):
            step[name] = part.view_as(step[name])
    trained = {**reply.tensors["base"], **reply.tensors["personal"]}
    for name, parameter in theta.named_parameters():
        after = parameter.detach() if step[name] is None else parameter.detach() - TRAINING["lr"] * step[name]
        assert float((trained[name] - after).abs().max()) < 1e-5, name
    assert not draws
