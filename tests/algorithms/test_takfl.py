"""TAKFL: identities, a round of the server in plain torch, and what it repairs on real digits."""

import functools

import pytest
import torch
import torch.nn.functional as F
from halves import OPTIONS, mixed, plain, play, run, short

import polyfed as pf
from polyfed.algorithms import TAKFL, FedAvg, FedDF
from polyfed.algorithms.distillation import takfl
from polyfed.core.seeds import torch_generator
from polyfed.data import SOURCES, ClassesPerClient, Split, make_clients
from polyfed.models import ModelSpec
from polyfed.testing import small_clients

PUBLIC = torch.randn(40, 6, generator=torch_generator(8)), torch.zeros(40, dtype=torch.int64)


def assert_close(one, other, **tolerance):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, **tolerance)


def test_without_steps_it_is_fedavg_by_architecture_bit_for_bit():
    found = run(TAKFL(**OPTIONS, server_steps=0), mixed(), public=PUBLIC)
    for ids in (("client-0", "client-2"), ("client-1",)):
        fedavg = run(FedAvg(**OPTIONS, buffers="average"), [c for c in mixed() if c.id in ids])
        for name, tensor in fedavg.last.state["model"].items():
            assert torch.equal(found.model(ids[0]).state_dict()[name], tensor)


def test_with_one_architecture_and_one_temperature_it_is_feddf():
    options = {**OPTIONS, "server_steps": 3, "server_lr": 0.01}
    feddf = run(FedDF(**options), plain(mixed()), public=PUBLIC)
    found = run(TAKFL(**options, temperature=1.0, gamma=0.0), plain(mixed()), public=PUBLIC)
    (theirs,), (own,) = feddf.last.state["model"].values(), found.last.state["model"].values()
    assert_close(theirs, own, rtol=1e-4, atol=1e-5)


def small():
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))


def two_kinds():
    """Two clients with 83 parameters and two with 43: the mean outputs of two are not those of their mean."""
    kinds = (short, small, short, small)
    return [pf.Client(c.id, kind, c.train, c.test, c.val) for c, kind in zip(small_clients(4), kinds, strict=True)]


@pytest.mark.parametrize("merge", ["equal", "size"])
def test_a_round_of_the_server_written_out_in_plain_torch_is_the_same(merge):
    """With all public examples in each of three steps by Adam; each teacher is the mean output of its clients."""
    clients = two_kinds()
    fields = {"lr": 0.1, "batch_size": 0, "local_steps": 3, "server_batch_size": 0, "server_lr": 0.02}
    method = TAKFL(**fields, server_steps=3, merge=merge, temperature=2.0, gamma=0.5, self_temperature=4.0)
    federation, averaged, _, replies = play(TAKFL(**fields, server_steps=0), clients, public=pf.Examples(*PUBLIC))
    _, state, _, _ = play(method, clients, public=pf.Examples(*PUBLIC))
    key_of = {c.id: federation.client_info(c.id, 1).architecture for c in clients}
    factories, x = {key_of[c.id]: c.model for c in clients}, PUBLIC[0]

    def filled(key, tree):
        net = factories[key]()
        net.load_state_dict(tree)
        return net

    def divergence(teacher, student, temperature):
        p = (teacher / temperature).softmax(1)
        return (p * (p.log() - F.log_softmax(student / temperature, 1))).sum(1).mean()

    teachers = {}
    for key in factories:
        nets = [filled(key, replies[i].tensors["model"]) for i in sorted(replies) if key_of[i] == key]
        teachers[key] = torch.stack([net(x) for net in nets]).mean(0).detach()
    sizes = {key: sum(p.numel() for p in factory().parameters()) for key, factory in factories.items()}
    for key, average in averaged["model"].items():
        first, merged = filled(key, average)(x).detach(), {name: tensor.clone() for name, tensor in average.items()}
        for teacher_key, teacher in teachers.items():
            student = filled(key, average)
            optimizer = torch.optim.Adam(student.parameters(), lr=0.02)
            for _ in range(3):
                optimizer.zero_grad()
                z = student(x)
                (4 * divergence(teacher, z, 2.0) + 0.5 * 16 * divergence(first, z, 4.0)).backward()
                optimizer.step()
            share = sizes[teacher_key] / sum(sizes.values()) if merge == "size" else 0.5
            for name, tensor in student.state_dict().items():
                merged[name] += share * (tensor - average[name])
        assert_close(merged, state["model"][key], rtol=1e-4, atol=2e-5)


def with_frozen_part():
    network = torch.nn.Sequential(torch.nn.Linear(6, 100), torch.nn.Tanh(), torch.nn.Linear(100, 3))
    network[0].requires_grad_(False)
    return network


def test_architectures_weigh_by_the_parameters_that_are_trained(monkeypatch):
    """83 and, beside 700 that are frozen, 303."""
    clients = [
        pf.Client(c.id, kind, c.train, c.test) for c, kind in zip(mixed(), [short, with_frozen_part] * 2, strict=False)
    ]
    shares = []
    monkeypatch.setattr(takfl, "add_task_vectors", lambda start, _, of: shares.append(sorted(of)) or start)
    play(TAKFL(**OPTIONS, server_steps=1, merge="size"), clients, public=pf.Examples(*PUBLIC))
    assert shares
    assert all(of == pytest.approx([83 / 386, 303 / 386]) for of in shares)


def test_counters_stay_those_of_the_average():
    """BatchNorm counts minibatches; statistics change with the students, counts do not."""
    none, three = (
        play(TAKFL(**OPTIONS, server_steps=steps, server_lr=0.01), mixed(), public=pf.Examples(*PUBLIC))[1]["model"]
        for steps in (0, 3)
    )
    (key,) = [key for key, tree in none.items() if "1.num_batches_tracked" in tree]
    assert three[key]["1.num_batches_tracked"].dtype == torch.int64
    assert torch.equal(three[key]["1.num_batches_tracked"], none[key]["1.num_batches_tracked"])
    assert not torch.equal(three[key]["1.running_mean"], none[key]["1.running_mean"])


@pytest.mark.parametrize(
    "wrong", [{"temperature": 0.0}, {"self_temperature": -1.0}, {"gamma": -0.1}, {"server_steps": -1}]
)
def test_wrong_fields_are_refused(wrong):
    with pytest.raises(pf.UserError, match=f"TAKFL: {next(iter(wrong))} must be"):
        TAKFL(**wrong)


# -- real digits ---------------------------------------------------------------------------------------------------


@functools.cache
def score(method):
    """Ten clients with 30 digits of three classes and two networks: on digits that are nobody's, after 8 rounds."""
    pool = SOURCES["digits"](common_test=0.3).load()
    split = Split(clients=10, examples_per_client=30, test_fraction=0.5, public_fraction=0.2, global_test=-1)
    data, public = make_clients(pool, split, ClassesPerClient(3), seed=0)
    nets = [ModelSpec("mlp", {"hidden": hidden}, pool.input_shape, pool.num_outputs) for hidden in ((32,), (64, 32))]
    clients = [pf.Client(d.id, nets[k % 2], d.train, d.test, None, d.global_test) for k, d in enumerate(data)]
    run = pf.federate(clients, method, rounds=8, evaluate_every=8, workers=0, public=public)
    return run.table()[-1]["global_accuracy"]


@pytest.mark.slow
def test_it_repairs_averages_of_models_that_drifted_apart():
    options = {"lr": 0.1, "local_epochs": 4, "batch_size": 10}
    averaged, distilled = (score(TAKFL(**options, server_steps=steps)) for steps in (0, 100))
    assert distilled > averaged + 0.15, (distilled, averaged)
