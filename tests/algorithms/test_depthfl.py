"""DepthFL: the first layers of one model, with a classifier after each depth. Identities, rounds by hand, learning."""

import math
from functools import partial

import pytest
import torch
from halves import OPTIONS, begin, mixed, play, run
from plain_torch import LOCAL, assert_tensors_near, copy_of, draw_network, load, record_run, sgd, unequal_clients
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.algorithms import DepthFL, FedAvg
from polyfed.testing import small_clients


class Deep(nn.Module):
    """As many blocks as its depth, with a classifier after each."""

    def __init__(self, depth, dtype=None):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6 if k == 0 else 8, 8, dtype=dtype) for k in range(depth))
        self.classifiers = nn.ModuleList(nn.Linear(8, 3, dtype=dtype) for _ in range(depth))

    def exits(self, x):
        found = []
        for block, classifier in zip(self.blocks, self.classifiers, strict=True):
            x = torch.tanh(block(x))
            found.append(classifier(x))
        return found

    def forward(self, x):
        return torch.stack(self.exits(x)).mean(0)


DEPTHS = {depth: partial(Deep, depth) for depth in (1, 2, 3)}


def family(depths=(1, 2, 3), classes=None):
    return [
        pf.Client(c.id, DEPTHS[depth], c.train, c.test, c.val)
        for c, depth in zip(mixed(classes=classes), depths, strict=True)
    ]


def equal(found, fedavg):
    for i in fedavg.federation.clients:
        one, other = found.model(i).state_dict(), fedavg.model(i).state_dict()
        assert all(torch.equal(one[name], other[name]) for name in other)
    assert found.history[-1]["train_loss"] == fedavg.history[-1]["train_loss"]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.one_case
def test_with_one_depth_and_one_classifier_it_is_fedavg_bit_for_bit(weighted):
    """With BatchNorm and dropout; and for a network whose only classifier is an exit."""
    for clients in (small_clients(), family((1, 1, 1))):
        options = {**OPTIONS, "weighted": weighted}
        equal(run(DepthFL(**options), clients, rounds=3), run(FedAvg(**options), clients, rounds=3))


def outputs(p, x):
    found = []
    for k in range(sum(name.startswith("blocks") and name.endswith("bias") for name in p)):
        x = torch.tanh(x @ p[f"blocks.{k}.weight"].T + p[f"blocks.{k}.bias"])
        found.append(x @ p[f"classifiers.{k}.weight"].T + p[f"classifiers.{k}.bias"])
    return found


def kl(teacher, student):
    return (teacher * (teacher.log() - student.log())).sum(1).mean()


@pytest.mark.parametrize(("weighted", "distill"), [(False, 1.0), (True, 0.5), (True, 0.0)])
@pytest.mark.one_case
def test_rounds_of_three_depths_in_plain_torch_are_the_same(weighted, distill, monkeypatch):
    """Two of three clients a round; layers that none of them has stay. With momentum and weight decay."""
    factories = [partial(Deep, depth, torch.float64) for depth in (2, 3, 1)]
    clients = unequal_clients(*factories)
    method = DepthFL(**LOCAL, weighted=weighted, distill=distill, rampup=0.6)
    recorded = record_run(monkeypatch, method, clients, rounds=5, clients_per_round=2)
    theta, lonely = copy_of(draw_network(factories[1])), 0
    for number, (cohort, minibatches) in enumerate(recorded.rounds):
        w, sent = distill * math.exp(-5 * (1 - min(number, 3) / 3) ** 2), []  # grows over 3 of 5 rounds
        for i in cohort:
            network = factories[int(i[-1])]()
            load(network, {name: theta[name] for name in network.state_dict()})
            optimizer, depth = sgd(network.parameters()), len(network.blocks)
            for x, y in minibatches[i]:
                z = network.exits(x)
                loss = sum(F.cross_entropy(one, y) for one in z)
                for k in range(depth):
                    for j in range(depth):
                        if j != k:
                            loss = loss + w / (depth - 1) * kl(z[j].detach().softmax(1), z[k].softmax(1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            sent.append((len(clients[int(i[-1])].train) if weighted else 1, copy_of(network)))
        for name in theta:
            who = [(n, tree[name]) for n, tree in sent if name in tree]
            lonely += not who
            if who:
                theta[name] = sum(n * tensor for n, tensor in who) / sum(n for n, _ in who)
    assert lonely > 0
    assert_tensors_near(recorded.run.last.state["model"], theta)


def test_layers_that_nobody_of_the_round_has_keep_their_value():
    method = DepthFL(**OPTIONS)
    before = play(method, family())[1]["model"]
    after = play(method, family(), rounds=2, skip={"client-2"})[1]["model"]
    kept = {name for name in after if torch.equal(after[name], before[name])}
    assert kept == {f"{part}.2.{kind}" for part in ("blocks", "classifiers") for kind in ("weight", "bias")}


def test_the_evaluated_network_returns_the_mean_of_its_classifiers():
    clients = family()
    found = run(DepthFL(**OPTIONS), clients)
    for c in clients:
        network = found.model(c.id)
        p = {name: found.last.state["model"][name] for name in network.state_dict()}
        torch.testing.assert_close(network(c.test.x), torch.stack(outputs(p, c.test.x)).mean(0))


def test_the_weight_of_distillation_grows_and_stays():
    method = DepthFL(distill=2.0, rampup=0.5)
    weights = [method.distillation_weight(number, 20) for number in range(1, 21)]
    assert weights[0] == pytest.approx(2 * math.exp(-5))
    assert weights[5] == pytest.approx(2 * math.exp(-5 / 4))
    assert weights[:11] == sorted(set(weights))
    assert weights[10:] == [2.0] * 10
    assert DepthFL(rampup=0.0).distillation_weight(1, 20) == 1.0


def test_distillation_brings_classifiers_together():
    spread = []
    for distill in (0.0, 5.0):
        clients = family((3, 3, 3))
        method = DepthFL(lr=0.1, batch_size=8, distill=distill, rampup=0.0)
        state = play(method, clients, rounds=5)[1]
        z = [one.softmax(1) for one in outputs(state["model"], clients[0].test.x)]
        spread.append(sum(float(kl(a, b)) for a in z for b in z))
    assert spread[1] < 0.5 * spread[0]


@pytest.mark.thorough
def test_a_deep_client_learns_a_class_that_only_shallow_ones_have():
    """Through the layers and the first classifier, which all train: the loss on a class that it has never seen."""
    test = small_clients()[2].test
    deep = mixed(classes=[(0, 1)] * 3)[2]
    deep = pf.Client(deep.id, DEPTHS[3], deep.train, deep.test, deep.val)
    losses = []
    for others in (family((1, 1, 1))[:2], []):
        outputs_of_deep = run(DepthFL(lr=0.2, batch_size=8), [*others, deep], rounds=10).model(deep.id)(test.x)
        losses.append(F.cross_entropy(outputs_of_deep[test.y == 2], test.y[test.y == 2]).item())
    assert losses[0] < losses[1] - 0.5


def test_tensors_of_one_name_and_another_shape_are_layers_of_their_own():
    def net(width):
        return lambda: nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))

    clients = [pf.Client(c.id, net(w), c.train, c.test, c.val) for c, w in zip(mixed(), (4, 8, 8), strict=True)]
    federation, state, _ = begin(DepthFL(**OPTIONS), clients)
    assert set(state["model"]) == {
        "0.weight", "0.bias", "2.weight", "2.bias", "0.weight (4, 6)", "0.bias (4,)", "2.weight (3, 4)",
    }  # fmt: skip
    message = DepthFL().dispatch(state, federation.client_info("client-0", 1))
    assert {n: tuple(t.shape) for n, t in message.tensors["model"].items()} == {
        n: tuple(t.shape) for n, t in net(4)().state_dict().items()
    }
    run(DepthFL(**OPTIONS), clients)


@pytest.mark.parametrize("wrong", [{"distill": -1.0}, {"rampup": 1.5}])
def test_wrong_fields_are_refused(wrong):
    with pytest.raises(pf.UserError, match=f"DepthFL: {next(iter(wrong))} must be"):
        DepthFL(**wrong)
