"""FedMD and FedDF, in which networks learn their mean outputs on public examples: identities, and what travels."""

import dataclasses

import pytest
import torch
from halves import OPTIONS, mixed, normed, play, run, short
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg, FedDF, FedMD, Local
from polyfed.core.algorithm import Message
from polyfed.core.examples.examples import Examples
from polyfed.core.seeds import torch_generator


def public(number=30, width=6):
    return Examples(torch.randn(number, width, generator=torch_generator(8)), torch.zeros(number, dtype=torch.int64))


def unlike():
    """One that has four outputs."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def with_nets(*factories):
    return [pf.Client(c.id, f, c.train, c.test, c.val) for c, f in zip(mixed(), factories, strict=True)]


def assert_same_tensors(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


# -- FedMD ---------------------------------------------------------------------------------------------------------


def test_fedmd_without_digesting_is_local_bit_for_bit():
    found = run(FedMD(**OPTIONS, digest_epochs=0, public_size=20), mixed(), rounds=3, public=public())
    local = run(Local(**OPTIONS), mixed(), rounds=3)
    for i in local.federation.clients:
        assert_same_tensors(found.model(i).state_dict(), local.model(i).state_dict())
    assert found.history[-1]["train_loss"] == local.history[-1]["train_loss"]
    changed = run(FedMD(**OPTIONS, public_size=20), mixed(), rounds=2, public=public())
    assert changed.history[-1]["train_loss"] != local.history[1]["train_loss"]


def test_the_public_examples_travel_once_and_are_those_of_the_first_round():
    clients, pool = mixed(), public()
    for once in (True, False):
        method = FedMD(**OPTIONS, pool_once=once)
        federation, state, own, _ = play(method, clients, rounds=2, public=pool)
        down = method.dispatch(state, federation.client_info("client-0", 3))
        assert ("public" in down.tensors) is not once
        assert len(down.tensors["next"]["rows"]) == 30  # all, where there are fewer than asked for
        other = Message({**down.tensors, "public": {"x": pool.x + 0.1}}, down.scalars)
        with pytest.raises(pf.UserError, match="the public examples are not those of the first round"):
            method.local_update(other, own["client-0"], clients[0], 1)
        far = Message({**down.tensors, "public": {"x": pool.x * 1000}}, down.scalars)
        with pytest.raises(pf.UserError, match="the public examples go from"):
            method.local_update(far, method.client_init(clients[0], 3), clients[0], 1)
        if once:
            with pytest.raises(pf.UserError, match="lost them with its private state"):
                method.local_update(down, method.client_init(clients[0], 3), clients[0], 1)
    assert method.dispatch(state, federation.client_info("client-0", 3, "evaluate")).tensors == {}


def test_who_missed_a_round_learns_the_outputs_of_those_who_did_not():
    clients, pool, method = mixed(), public(), FedMD(**OPTIONS)
    _, state, _, replies = play(method, clients, rounds=2, skip={"client-2"}, public=pool)
    mean = sum(reply.tensors["outputs"]["logits"] for reply in replies.values()) / 2
    torch.testing.assert_close(state["outputs"]["logits"], mean, rtol=1e-5, atol=1e-5)
    assert state["done"] == 2
    assert state["holders"] == ["client-0", "client-1", "client-2"]


@pytest.mark.parametrize("method", [FedMD(**OPTIONS), FedDF(**OPTIONS)], ids=["fedmd", "feddf"])
def test_outputs_of_different_numbers_are_refused(method):
    with pytest.raises(pf.UserError, match="give all networks the same number of outputs"):
        run(method, with_nets(short, short, unlike), public=public())


# -- FedDF ---------------------------------------------------------------------------------------------------------


def test_feddf_without_distillation_is_fedavg_by_architecture_bit_for_bit():
    options = {**OPTIONS, "buffers": "average"}
    found = run(FedDF(**options, server_steps=0), mixed(), rounds=3, public=public())
    short_ones, other = [mixed()[0], mixed()[2]], [mixed()[1]]
    for clients in (short_ones, other):
        fedavg = run(FedAvg(**options), clients, rounds=3)
        for c in clients:
            assert_same_tensors(found.model(c.id).state_dict(), fedavg.model(c.id).state_dict())
    plain = run(FedDF(**options, server_steps=0, weighted=False), mixed(), rounds=2, public=public())
    fedavg = run(FedAvg(**options, weighted=False), short_ones, rounds=2)
    assert_same_tensors(plain.model("client-0").state_dict(), fedavg.model("client-0").state_dict())


@pytest.mark.thorough
def test_distillation_brings_the_outputs_of_both_architectures_together():
    """With BatchNorm and dropout too; and a model that nobody has trained in the round learns from the others'."""
    pool = public(200)

    def gap(steps, skip=()):
        method = FedDF(**OPTIONS, server_steps=steps)
        federation, state, _, _ = play(method, mixed(), rounds=2, skip=skip, public=pool)
        found = []
        for c, factory in (("client-0", short), ("client-1", normed)):
            net = factory()
            net.load_state_dict(method.dispatch(state, federation.client_info(c, 3)).tensors["model"])
            found.append(net.eval()(pool.x).softmax(1).detach())
        return float((found[0] - found[1]).abs().mean())

    assert gap(150) < 0.6 * gap(0)
    assert gap(150, skip={"client-1"}) < 0.6 * gap(0, skip={"client-1"})


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        (FedMD, {"digest_epochs": -1}, "digest_epochs must be at least 0"),
        (FedMD, {"digest_batch_size": -1}, "digest_batch_size must be at least 1"),
        (FedMD, {"public_size": 0}, "public_size must be at least 1"),
        (FedMD, {"distance": "l3"}, "unknown distance 'l3'"),
        (FedMD, {"buffers": "average"}, "buffers must be 'local'"),
        (FedDF, {"server_steps": -1}, "server_steps must be at least 0"),
        (FedDF, {"server_lr": 0.0}, "server_lr must be positive"),
        (FedDF, {"server_batch_size": -1}, "server_batch_size must be at least 1"),
        (FedDF, {"buffers": "local"}, "buffers must be 'average'"),
    ],
)
def test_fields_are_checked(method, fields, message):
    with pytest.raises(pf.UserError, match=message):
        method(**fields)


def test_public_rows_of_a_table_may_lack_values_where_the_clients_rows_do():
    values = [1.0, None, 3.0, 2.0, 4.0, 1.5] * 8
    rows = {
        "age": values,
        "crp": [2.0, 3.0, 1.0] * 16,
        "only_b": [1.0, 2.0] * 12 + [None, 1.0] * 12,
        "ill": [0, 1] * 24,
        "site": ["a"] * 24 + ["b"] * 24,
    }
    sites = pf.data.split_table(rows, "ill", "site", preprocess="federated", public_fraction=0.2)
    clients = sites.build_clients(lambda: nn.Linear(sites.num_features, 2))
    words = {"rounds": 1, "public": sites.public, "progress": False}
    assert pf.federate(clients, FedMD(lr=0.01, pool_once=False), **words).history
    with pytest.raises(pf.UserError, match=r"FedMD: public examples lack values.*set pool_once to false"):
        pf.federate(clients, "fedmd", **words)
    far = dataclasses.replace(sites.public, x=sites.public.x + 1e6)
    with pytest.raises(pf.ClientError, match="the public examples go from"):
        pf.federate(clients, FedMD(lr=0.01, pool_once=False), **{**words, "public": far})
