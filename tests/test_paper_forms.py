"""Each form of benchmarks/paper_forms.py does what the method pages say of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from polyfed.algorithms import CAFedPNAS, FedHeNN
from polyfed.algorithms.nas.supernet_method import supernet_of
from polyfed.alignment import compute_representations
from polyfed.core.algorithm import Client, ClientInfo, DataSpec, Message, ServerContext
from polyfed.core.examples.examples import Examples
from polyfed.core.nn.module_cache import copy_trained_weights_and_buffers
from polyfed.core.seeds import temporary_rng_seed, torch_generator
from polyfed.models import ModelSpec
from polyfed.nas.supernet import count_edge_operation_parameters
from polyfed.simulation.experiment import Participants

SPACE = {
    "channels": 3, "base_cells": 1, "base_nodes": 1, "personal_nodes": 1, "batch_size": 5, "finetune_epochs": 0,
    "operations": ("sep_conv_3", "max_pool_3", "skip"), "personal_operations": ("sep_conv_3", "sep_conv_5", "skip"),
}  # fmt: skip
HENN = {"local_epochs": 1, "batch_size": 5, "rad_size": 6, "rad_batch": 4, "eta0": 1.0}


@pytest.fixture
def forms(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import paper_forms

    return paper_forms


def clients(number=3, size=10):
    nets = [ModelSpec("mlp", {"hidden": (width, 4)}, (1, 6, 6), 2) for width in (5, 7)]
    members = []
    for k in range(number):
        generator = torch_generator(k)
        train, test = (torch.randn(n, 1, 6, 6, generator=generator) for n in (size, 8))
        members.append(Client(f"client-{k}", nets[k % 2], (train, torch.arange(size) % 2), (test, torch.arange(8) % 2)))
    return tuple(members)


def participants(members=None, pool=6):
    public = Examples(torch.randn(pool, 1, 6, 6, generator=torch_generator(9)), torch.zeros(pool, dtype=torch.int64))
    return Participants(members or clients(), (), public, None, {}, "")


# -- FedHeNN ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalise", [False, True])
def test_the_target_is_the_kernel_of_the_mean_representation(forms, normalise):
    a, b = (torch.randn(8, 4, generator=torch_generator(k)) for k in (1, 2))
    method, rows = forms.MeanOfRepresentations(**HENN, normalise=normalise), torch.tensor([5, 1, 2], dtype=torch.int32)
    sizes = [(x[rows] - x[rows].mean(0)).norm() if normalise else 1.0 for x in (a, b)]
    expected = (a[rows] / sizes[0] + b[rows] / sizes[1]) / 2
    torch.testing.assert_close(method._mean_kernel({"representations": {"x": a, "y": b}}, rows)["features"], expected)
    assert method._mean_kernel({"representations": {}}, rows) == {}


def test_the_first_target_is_of_the_networks_with_which_clients_begin(forms):
    method, members = forms.UntrainedNetworksCount(**HENN, share="weights"), clients()
    names = {net: str(k) for k, net in enumerate(dict.fromkeys(c.model for c in members))}
    infos = tuple(ClientInfo(c.id, architecture=names[c.model]) for c in members)
    public = participants().public
    server = ServerContext(4, 2, infos, architectures={name: net for net, name in names.items()}, public=public)
    state = method.server_init(server)
    for client in members:
        network = method.load_personal_network(method.client_init(client, 4), client)
        expected = compute_representations(network, public, batch_statistics=True)
        torch.testing.assert_close(state["representations"][client.id], expected)
    assert "target" in next(iter(method.dispatch_all(state, infos))).tensors
    without = FedHeNN(**HENN, share="weights")
    assert "target" not in next(iter(without.dispatch_all(without.server_init(server), infos))).tensors


def test_networks_are_trained_for_ten_more_epochs_before_tests_and_not_before_training(forms, monkeypatch):
    method, client = forms.TrainedOnBeforeTests(**HENN), clients()[0]
    state = method.client_init(client, 0)
    before = copy_trained_weights_and_buffers(method.personal_model(Message({}, {"lr": 0.1}), state, client, 0))
    assert all(torch.equal(before[name], state["model"][name]) for name in before)
    epochs, fit = [], forms.loop.fit
    monkeypatch.setattr(forms.loop, "fit", lambda *a, **k: epochs.append(a[2].local_epochs) or fit(*a, **k))
    after = copy_trained_weights_and_buffers(method.personal_model(Message(), state, client, 0))
    assert epochs == [10]
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_the_pool_is_of_the_clients_training_images_equally_many_of_each(forms):
    before = participants()
    after = forms.give_clients_images_as_pool(before, 0)
    images = [{tuple(x.flatten().tolist()) for x in client.train.x} for client in before.clients]
    pool = [tuple(x.flatten().tolist()) for x in after.public.x]
    assert len(set(pool)) == len(before.public)
    assert [sum(x in mine for x in pool) for mine in images] == [2, 2, 2]


def test_networks_are_drawn_and_not_dealt_in_turn(forms):
    before = participants(clients(8))
    draws = [[c.model for c in forms.draw_networks(before, seed).clients] for seed in range(4)]
    divided = [c.model for c in before.clients]
    assert divided not in draws
    assert len(set(map(tuple, draws))) == 4
    assert {net for draw in draws for net in draw} == set(divided)


def test_half_of_the_test_images_are_those_of_clients_with_half_of_the_training_images(forms):
    members = (*clients(2), *clients(3, 5)[2:])
    after = forms.test_on_half_too(participants(members), 0).clients
    assert [(len(c.train), len(c.test), len(c.global_test)) for c in after] == [(10, 8, 8), (10, 8, 8), (5, 8, 4)]
    assert [c.train for c in after] == [c.train for c in members]
    assert after[2].global_test.labels.tolist().count(0) == 2


def test_fewer_training_images_are_a_part_of_more(forms):
    before = participants()
    more, fewer = (forms.keep_training_images(*counts)(before, 0).clients for counts in ((8,), (8, 6)))
    for client, a, b in zip(before.clients, more, fewer, strict=True):
        rows = [{tuple(x.flatten().tolist()) for x in part.train.raw_inputs} for part in (client, a, b)]
        assert list(map(len, rows)) == [10, 8, 6]
        assert rows[2] < rows[1] < rows[0]
        assert b.test is client.test


# -- FedPNAS ----------------------------------------------------------------------------------------------------------


def message_of(method, round_number=1):
    infos = tuple(ClientInfo(c.id) for c in clients())
    state = method.server_init(ServerContext(0, 4, infos, data_spec=DataSpec((1, 6, 6), 2)))
    return method.dispatch(state, ClientInfo("client-0", round_number, 4))


def meta_gradient(method, seed):
    """The gradients of the two passes, by name, and the meta-gradient that the method makes of them."""
    client, passes = clients()[0], []
    network = supernet_of(method.load_supernet(message_of(method), {}, client)).train()

    def gradients():
        return {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}

    def loss_of(_):
        network.zero_grad(set_to_none=True)
        loss = F.cross_entropy(network(client.train.x[:2]), client.train.labels[:2])
        loss.backward()
        passes.append(gradients())
        return loss

    with temporary_rng_seed(seed):
        method.build_meta_gradient_function(network)(loss_of)
    return *passes, gradients()


def test_weights_that_only_the_first_pass_drew_step_by_equation_5(forms):
    default, form = (kind(**SPACE, eta=0.3) for kind in (CAFedPNAS, forms.EveryWeightSteps))
    steps = 0
    for seed in range(4):
        *_, expected = meta_gradient(default, seed)
        first, second, direction = meta_gradient(form, seed)
        both = {n for n in first.keys() & second.keys() if n.startswith("personal.")}
        alone = {n for n in first.keys() - second.keys() if n.startswith("personal.")}
        alpha = sum((first[n] * second[n]).sum() for n in both)
        for name in alone:
            torch.testing.assert_close(direction.pop(name), -0.3 * alpha * first[name])
        assert direction.keys() == expected.keys()
        assert all(torch.equal(direction[name], expected[name]) for name in expected)
        steps += len(alone)
    assert steps


def test_adams_moments_go_on(forms):
    """The first round is the default's; in the second the count of steps goes on, and with it all else differs."""
    client, replies = clients()[0], []
    for kind in (CAFedPNAS, forms.MomentsGoOn):
        method, state = kind(**SPACE), {}
        for round_number in (1, 2):
            reply, state = method.local_update(message_of(method, round_number), state, client, round_number)
            replies.append(reply.tensors["base"])
    assert all(torch.equal(replies[0][name], replies[2][name]) for name in replies[0])
    assert any(not torch.equal(replies[1][name], replies[3][name]) for name in replies[0])
    steps = {float(moment) for name, moment in state["moments"].items() if name.endswith(".2")}
    assert max(steps) == 2 * 2  # rounds, and minibatches of five of ten images


def test_the_first_cell_gets_the_image_itself(forms):
    method, client, inputs = forms.RawImage(**SPACE), clients()[0], []
    reply, _ = method.local_update(message_of(method), {}, client, 0)
    before = message_of(CAFedPNAS(**SPACE)).tensors["base"]
    assert any(not torch.equal(before[name], reply.tensors["base"][name]) for name in before if ".cells." in name)
    network = supernet_of(method.load_supernet(Message(reply.tensors, {"temperature": 1.0}), {}, client)).eval()
    network.base["cells"][0].register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[:2]))
    network(client.test.x)
    for part in inputs[0]:
        torch.testing.assert_close(part, client.test.x.expand(-1, 3, -1, -1), rtol=0, atol=0)


def test_the_base_stack_alone_reduces(forms):
    plans = [kind().supernet_plan(1, 10) for kind in (CAFedPNAS, forms.BaseStackAloneReduces)]
    assert [[cell.reduces for cell in plan.base + plan.personal] for plan in plans] == [
        [False, True, True, True],
        [False, True, True, False],
    ]


def test_the_form_with_32_edges_has_the_parameters_of_table_3(forms):
    plan = forms.FORMS["fedpnas"]["32 edges"].method(CAFedPNAS(channels=16)).supernet_plan(1, 10)
    assert count_edge_operation_parameters(plan) == 293_888
    assert sum(len(cell.edges) for cell in plan.base + plan.personal) == 32


def test_forms_with_fewer_images_take_as_many_minibatches(forms):
    default = CAFedPNAS(local_epochs=2)
    (counts,) = {int(np.ceil(179 / default.batch_size)) * default.local_epochs}
    assert forms.FORMS["fedpnas"]["2/3 of the images"].method(default) == replace(default, local_steps=counts)
