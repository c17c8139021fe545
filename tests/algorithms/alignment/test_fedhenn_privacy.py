"""What FedHeNN shows a site of the others, and what a curious server can ask of a site."""

import dataclasses

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FedHeNN, FedHeNNHomo
from polyfed.alignment.alignment_target import mean_kernel_features, triangular_kernel_factor
from polyfed.core.algorithm import Message
from polyfed.core.examples.as_examples import as_examples
from polyfed.core.seeds import torch_generator
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.testing import small_clients

PUBLIC = as_examples((torch.randn(40, 6, generator=torch_generator(8)), torch.zeros(40, dtype=torch.int64)))
OPTIONS = {"local_epochs": 1, "rad_size": 20, "rad_batch": 8, "eta0": 1.0, "lr": 0.05}


def parts(number=4, rows=30, width=5):
    generator = torch_generator(3)
    return [torch.randn(rows, width, generator=generator).relu() for _ in range(number)]


@pytest.mark.parametrize("rows", [12, 30])
def test_the_joint_form_has_the_same_kernel_and_separates_nobody(rows):
    """Among the features as they were, every site's columns stand as they are; of the joint form no column is one's, nor do
    any of its columns span what a site has. It depends on the kernel alone."""
    known = parts(rows=rows)
    features = mean_kernel_features(known, [0.25] * 4)
    found = triangular_kernel_factor(features)
    torch.testing.assert_close(found @ found.T, features @ features.T, rtol=1e-4, atol=1e-5)
    rotation = torch.linalg.qr(torch.randn(20, 20, generator=torch_generator(5))).Q
    torch.testing.assert_close(triangular_kernel_factor(features @ rotation), found, rtol=1e-3, atol=1e-3)
    for a in known:
        for column in (0.5 * a).T:
            assert torch.cosine_similarity(features.T, column[None]).abs().max() > 0.9999
            assert torch.cosine_similarity(found.T[1:], column[None]).abs().max() < 0.98


def federation(kind, **fields):
    clients = {c.id: c for c in small_clients()}
    return Federation(clients, kind(**OPTIONS, **fields), Settings(rounds=4), PUBLIC)


def second_round(at, change):
    """What a client does when the server's second message is changed."""
    method, client = at.algorithm, at.clients["client-0"]
    state = method.server_init(at.server_context())
    _, own = method.local_update(
        method.dispatch(state, at.client_info(client.id, 1)), method.client_init(client, 0), client, 1
    )
    down = method.dispatch(state, at.client_info(client.id, 2))
    tensors = {group: dict(tree) for group, tree in down.tensors.items()}
    change(tensors)
    return method.local_update(Message(tensors, down.scalars), own, client, 2)


def test_other_public_examples_in_a_later_round_are_refused():
    def swap(tensors):
        x = tensors["public"]["x"].clone()
        x[0, 0] += 0.001
        tensors["public"]["x"] = x

    with pytest.raises(pf.UserError, match="the public examples are not those of the first round"):
        second_round(federation(FedHeNN), swap)
    second_round(federation(FedHeNN), lambda tensors: None)


@pytest.mark.parametrize(("kind", "group"), [(FedHeNN, "public"), (FedHeNNHomo, "rad")])
def test_public_examples_far_from_the_clients_own_are_refused(kind, group):
    """±1000·e_i read the weights of a first layer off its outputs."""

    def probe(tensors):
        tensors[group] = {**tensors[group], "x": 1000.0 * torch.eye(6).repeat(7, 1)[: len(tensors[group]["x"])]}

    with pytest.raises(
        pf.UserError, match=r"client 'client-0': the public examples go from 0 to 1000, its own inputs from"
    ):
        second_round(federation(kind), probe)


def test_representations_are_declared_to_disclose_weights():
    """The weights of one hidden layer follow from what it makes of known examples, by least squares: a site is asked."""
    assert FedHeNN().discloses >= {"representations", "weights"}
    assert dataclasses.replace(FedHeNN(), share="weights").discloses == {"architecture", "weights"}
    layer, x = torch.nn.Linear(6, 8), PUBLIC.x
    made = layer(x).detach()
    solved = torch.linalg.lstsq(torch.cat([x, torch.ones(40, 1)], 1), made).solution
    torch.testing.assert_close(solved[:6].T, layer.weight.detach(), rtol=1e-3, atol=1e-4)
