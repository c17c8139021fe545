"""FedProto, FedGH, FedTGP and FD, in which clients send means over their examples of each class: identities, and each part
by an explicit loop."""

import pytest
import torch
import torch.nn.functional as F
from halves import OPTIONS, begin, features, mixed, network, plain, play, run, short
from torch import nn

import polyfed as pf
from polyfed.algorithms import FD, FedGH, FedProto, FedTGP, Local
from polyfed.algorithms.base.heads.class_means import class_means_from_sums, class_means_with_weights
from polyfed.algorithms.prototypes.fedtgp import largest_distance_between_classes
from polyfed.core.algorithm import Message
from polyfed.core.examples.examples import Examples
from polyfed.core.nn.module_cache import initial_state
from polyfed.testing import small_clients

# -- without the shared term they are Local ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [FedProto(**OPTIONS, lam=0, evaluate="head"), FedTGP(**OPTIONS, lam=0, evaluate="head"), FD(**OPTIONS, gamma=0)],
    ids=lambda m: type(m).__name__,
)
@pytest.mark.one_case
def test_without_the_shared_term_it_is_local_bit_for_bit(method):
    assert_as_local(run(method, mixed()))


def test_fedgh_whose_head_is_never_replaced_is_local_bit_for_bit(monkeypatch):
    monkeypatch.setattr(FedGH, "dispatch", lambda self, state, who: Message({}, {"lr": self.lr}))
    assert_as_local(run(FedGH(**OPTIONS, first_head="architecture"), mixed()))


def assert_as_local(found):
    local = run(Local(**OPTIONS), mixed())
    for mine, alone in zip(found.history, local.history, strict=True):
        assert mine["train_loss"] == alone["train_loss"]
        for i, row in alone["clients"].items():
            assert (mine["clients"][i]["accuracy"], mine["clients"][i]["loss"]) == (row["accuracy"], row["loss"])
    for i in local.federation.clients:
        states = [r.model(i).state_dict() for r in (found, local)]
        assert all(torch.equal(t, states[1][n]) for n, t in states[0].items())


@pytest.mark.slow  # the round in plain torch is a second round
@pytest.mark.parametrize("method", [FedProto, FedGH, FedTGP, FD])
def test_the_shared_term_matters_from_the_second_round_on(method):
    """In round 1 the server has nothing to send."""
    alone = [run(Local(**OPTIONS), mixed(), rounds=n).last.client_states["client-0"]["model"] for n in (1, 2)]
    made = method(**OPTIONS, **({"first_head": "architecture"} if method is FedGH else {}))
    found = [run(made, mixed(), rounds=n).last.client_states["client-0"]["model"] for n in (1, 2)]
    assert all(torch.equal(t, alone[0][n]) for n, t in found[0].items())
    assert not torch.equal(found[1]["0.weight"], alone[1]["0.weight"])


# -- class means ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FedProto, FedGH, FedTGP, FD])
@pytest.mark.one_case
def test_means_are_those_of_the_network_that_training_ended_with(method):
    """Not gathered over the epoch while weights move, and in evaluation mode."""
    clients = mixed(classes=[(0, 1), (1, 2), (0, 1, 2)])
    _, _, own, replies = play(method(**OPTIONS), clients)
    for c in clients:
        net = network(c, own[c.id])
        with torch.no_grad():
            rows = net.eval()(c.train.x).softmax(1) if method is FD else features(net, c.train.x)
        means, present = class_means_from_sums(replies[c.id].tensors["classes"])
        for label in range(3):
            here = c.train.y == label
            assert bool(present[label]) == bool(here.any())
            expected = rows[here].mean(0) if here.any() else torch.zeros(rows.shape[1])
            torch.testing.assert_close(means[label], expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_fedprotos_prototypes_by_an_explicit_loop(weighted):
    """Plain, the mean over the clients that have the class; weighted, the mean over all examples of the class."""
    clients = mixed(classes=[(0, 1), (1, 2), (0, 1, 2)])
    method = FedProto(**OPTIONS, weighted=weighted)
    _, state, own, _ = play(method, clients)
    for label in range(3):
        members = []
        for c in clients:
            rows = features(network(c, own[c.id]), c.train.x[c.train.y == label])
            if len(rows):
                members.append(rows if weighted else rows.mean(0, keepdim=True))
        torch.testing.assert_close(state["prototypes"]["means"][label], torch.cat(members).mean(0))
    assert state["prototypes"]["present"].tolist() == [True] * 3
    assert method.scalars_needed == ({"num_examples"} if weighted else frozenset())


def test_a_class_that_nobody_of_a_round_has_keeps_its_prototype():
    clients, method = mixed(classes=[(0, 1), (1,), (0, 2)]), FedProto(**OPTIONS)
    _, before, _, _ = play(method, clients)
    _, after, _, _ = play(method, clients, rounds=2, skip={"client-2"})
    assert torch.equal(after["prototypes"]["means"][2], before["prototypes"]["means"][2])
    assert not torch.equal(after["prototypes"]["means"][1], before["prototypes"]["means"][1])
    assert after["prototypes"]["present"].tolist() == [True] * 3


def test_the_nearest_prototype_decides_and_the_loss_is_that_of_the_distances():
    clients = mixed(classes=[(0, 1), (0, 1), (0, 1)])
    found = run(FedProto(**OPTIONS), clients, rounds=2)
    prototypes = found.last.state["prototypes"]["means"][:2]
    assert found.last.state["prototypes"]["present"].tolist() == [True, True, False]
    for c in clients:
        rows = features(network(c, found.last.client_states[c.id]), c.test.x)
        squared = torch.stack([(rows - p).square().sum(1) for p in prototypes], 1)
        record = found.history[-1]["clients"][c.id]
        assert record["accuracy"] == float((squared.argmin(1) == c.test.y).double().mean())
        outputs = found.model(c.id)(c.test.x)
        assert not (outputs.argmax(1) == 2).any()  # there is no prototype of it
        here = c.test.y < 2
        expected = F.cross_entropy(-squared[here], c.test.y[here])
        torch.testing.assert_close(F.cross_entropy(outputs[here], c.test.y[here]), expected)
        head = run(FedProto(**OPTIONS, evaluate="head"), clients, rounds=2)
        assert record["head_accuracy"] == head.history[-1]["clients"][c.id]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("method", [FedProto(**OPTIONS), FD(**OPTIONS)], ids=["fedproto", "fd"])
def test_sums_are_enough_for_the_server(method):
    plain_sums, secure = (run(method, mixed(), secure=s).last.client_states for s in (False, True))
    for i, own in plain_sums.items():
        torch.testing.assert_close(own["model"], secure[i]["model"], rtol=1e-3, atol=1e-4)


# -- FedGH ---------------------------------------------------------------------------------------------------------


def test_fedghs_head_is_trained_and_replaces_the_clients():
    """The authors' code steps the optimiser of another network, so that its head stays as it was drawn."""
    clients, method = mixed(), FedGH(**OPTIONS, evaluate="global")
    _, state, _, replies = play(method, clients)
    means = torch.cat([r.tensors["classes"]["sums"] for r in replies.values()])
    labels = torch.arange(3).repeat(3)
    first = FedGH(**OPTIONS, server_lr=1e-12, server_epochs=1)
    _, drawn, _, _ = play(first, clients)
    losses = [F.cross_entropy(means @ s["head"]["weight"].T + s["head"]["bias"], labels) for s in (drawn, state)]
    assert losses[1] < losses[0] - 0.1
    found = run(method, clients, rounds=2)
    for c in clients:
        net, head = found.model(c.id), found.last.state["head"]
        assert torch.equal(net[-1].weight, head["weight"])
        assert torch.equal(net[0].weight, found.last.client_states[c.id]["model"]["0.weight"])
        record = found.history[-1]["clients"][c.id]
        trained = network(c, found.last.client_states[c.id]).eval()
        assert record["trained_accuracy"] == float((trained(c.test.x).argmax(1) == c.test.y).double().mean())
    assert torch.equal(initial_state(short, 3)["0.weight"], begin(method, clients)[2]["client-0"]["model"]["0.weight"])


# -- FedTGP --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fedtgp_keeps_classes_apart_by_the_margin():
    """Its prototypes are nearer to the clients' means of their class than to any other, and further apart than averages."""
    clients = plain(mixed())
    _, state, _, replies = play(FedTGP(**OPTIONS, server_epochs=200, server_lr=0.05), clients)
    means = torch.cat([r.tensors["classes"]["sums"] for r in replies.values()])
    distances = torch.cdist(means, state["prototypes"]["means"])
    assert (distances.argmin(1) == torch.arange(3).repeat(3)).all()
    averaged = means.reshape(3, 3, 8).mean(0)
    apart, before = (torch.pdist(points).min() for points in (state["prototypes"]["means"], averaged))
    assert apart > 1.5 * before


def test_a_class_that_was_never_sent_has_no_prototype():
    _, state, _, _ = play(FedTGP(**OPTIONS), mixed(classes=[(0,), (0, 2), (2,)]))
    assert state["prototypes"]["present"].tolist() == [True, False, True]
    assert largest_distance_between_classes(Examples(torch.ones(2, 4), torch.tensor([1, 1])), 3) == 0.0


# -- what is refused -----------------------------------------------------------------------------------------------


def test_networks_and_tasks_that_do_not_suit_are_named():
    def no_bias():
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3, bias=False))

    def narrow():
        return nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))

    def more():
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))

    def with_(*factories):
        return [pf.Client(c.id, m, c.train, c.test) for c, m in zip(small_clients(), factories, strict=False)]

    for method in (FedProto(), FedGH(), FedTGP()):
        with pytest.raises(
            pf.UserError, match=f"{type(method).__name__}: the last linear layer of the network of 'client-0', '1'"
        ):
            run(method, with_(no_bias, short))
        with pytest.raises(pf.UserError, match="last layer of 'client-1' takes 7 numbers, that of 'client-0' 8"):
            run(method, with_(short, narrow))
    assert run(FedProto(evaluate="head"), with_(no_bias, no_bias), rounds=1).table()
    for method in (FedProto(evaluate="head"), FD()):
        with pytest.raises(
            pf.UserError, match=r"class means of 'client-0' and 'client-1' differ.*same number of outputs"
        ):
            run(method, with_(short, more))
    data = torch.randn(9, 6), torch.randn(9)
    numbers = [pf.Client("a", lambda: nn.Linear(6, 1), data, data, task="regression")]
    for method in (FedProto(), FedGH(), FedTGP(), FD()):
        with pytest.raises(pf.UserError, match="needs one class per example, but the task of 'a' is regression"):
            run(method, numbers)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FedProto(lam=-1), "lam must be at least 0"),
        (lambda: FedProto(buffers="average"), "buffers must be 'local'"),
        (lambda: FedTGP(margin=-1), "margin must be at least 0"),
        (lambda: FedGH(server_epochs=0), "server_epochs must be at least 1"),
        (lambda: FD(gamma=-0.1), "gamma must be at least 0"),
        (lambda: FD(weighted=True), "weighted must be false"),
    ],
)
def test_fields_out_of_range_are_refused(build, message):
    with pytest.raises(pf.UserError, match=message):
        build()


def test_weights_that_no_client_can_have_are_refused():
    clients, method = mixed(), FedProto(**OPTIONS)
    federation, state, _, replies = play(method, clients)
    good = replies["client-0"].tensors["classes"]
    for weights, why in (
        (-good["weights"], "between 0 and 1"),
        (3 * good["weights"], "between 0 and 1"),
        (torch.ones(2), "sums of 3"),
    ):
        bad = Message({"classes": {**good, "weights": weights}})
        assert why in federation.reply_error(bad, state, Message())
    values, labels = torch.randn(5, 2), torch.tensor([0, 0, 1, 1, 1])
    shares = class_means_with_weights(values, labels, 3, weighted=True)["weights"]
    assert shares.tolist() == pytest.approx([0.4, 0.6, 0.0])
