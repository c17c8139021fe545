"""kNN-Per: FedAvg without neighbours, and their votes in plain torch."""

import pytest
import torch
from closed_forms import assert_equal

import polyfed as pf
from polyfed.algorithms import FedAvg, KNNPer
from polyfed.algorithms.personalised.mixtures.knn_per import _lam_of_lowest_loss
from polyfed.core.algorithm import Message
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import initial_state
from polyfed.testing import small_clients

OPTIONS = {"lr": 0.05, "batch_size": 8, "momentum": 0.5}


def net():
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))


def client(val=True):
    found = small_clients(2)[1]
    return pf.Client("one", net, found.train, found.test, found.val if val else None)


def personal(method, who):
    with exclusive_single_torch_thread_with_grad():
        return method.personal_model(Message({"model": initial_state(net, 0)}, {"lr": 0.1}), {}, who, 0)


def parts(who, k):
    """Probabilities of the neighbours and of the network on the test examples, in plain torch."""
    w = initial_state(net, 0)

    def phi(x):
        return torch.tanh(x @ w["0.weight"].T + w["0.bias"])

    shared = (phi(who.test.x) @ w["2.weight"].T + w["2.bias"]).softmax(1)
    own = torch.zeros_like(shared)
    for row, z in enumerate(phi(who.test.x)):
        d = (phi(who.train.x) - z).square().sum(1).sqrt()
        near = d.argsort()[:k]
        for i in near:
            own[row, who.train.y[i]] += torch.exp(-d[i]) / torch.exp(-d[near]).sum()
    return own, shared


def test_without_neighbours_it_is_fedavg_and_training_is_whatever_lambda_is():
    ours = pf.federate(small_clients(), KNNPer(lam=0.0, **OPTIONS), rounds=2, workers=0)
    theirs = pf.federate(small_clients(), FedAvg(**OPTIONS), rounds=2, workers=0)
    mixed = pf.federate(small_clients(), KNNPer(lam=0.7, **OPTIONS), rounds=2, workers=0)
    assert_equal(ours.last.state["model"], theirs.last.state["model"])
    assert_equal(mixed.last.state["model"], theirs.last.state["model"])
    for who in small_clients():
        a, b, c = (run.predictions(who.id).outputs for run in (ours, theirs, mixed))
        torch.testing.assert_close(a, b.log_softmax(1), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(c, a, atol=1e-3)
        last = ours.history[-1]["clients"][who.id]
        assert last["accuracy"] == theirs.history[-1]["clients"][who.id]["accuracy"]
        assert last["server_loss"] == theirs.history[-1]["clients"][who.id]["loss"]


@pytest.mark.parametrize(("k", "lam"), [(1, 1.0), (5, 0.3), (1000, 1.0)])
def test_the_votes_are_those_of_the_paper(k, lam):
    who = client()
    own, shared = parts(who, min(k, len(who.train)))
    found = predict(personal(KNNPer(k=k, lam=lam), who), who.test)
    torch.testing.assert_close(found.exp(), lam * own + (1 - lam) * shared, rtol=1e-4, atol=1e-6)
    assert bool(torch.isfinite(found).all())  # also where no neighbour has a class


def test_lambda_is_chosen_on_validation_examples_alone():
    who = client()
    network = personal(KNNPer(), who)
    at = {lam: predict(personal(KNNPer(lam=lam), who), who.val) for lam in (i / 10 for i in range(11))}
    losses = {lam: float(torch.nn.functional.nll_loss(outputs, who.val.y)) for lam, outputs in at.items()}
    assert network.lam.item() == pytest.approx(min(losses, key=losses.__getitem__))
    other = pf.Client("one", net, who.train, (who.test.x, (who.test.y + 1) % 3), who.val)
    assert torch.equal(personal(KNNPer(), other).lam, network.lam)
    assert personal(KNNPer(), client(val=False)).lam.item() == 0.5


def test_the_network_of_a_run_is_the_one_that_was_evaluated():
    run = pf.federate(small_clients(), KNNPer(**OPTIONS), rounds=1, workers=0)
    for who in small_clients():
        assert torch.equal(predict(run.model(who.id), who.test), run.predictions(who.id).outputs)


def test_a_network_with_examples_in_it_is_not_exported(tmp_path):
    run = pf.federate(small_clients(), KNNPer(**OPTIONS), rounds=1, workers=0, out=tmp_path / "run")
    for what in (run, tmp_path / "run"):
        with pytest.raises(pf.UserError, match="knn_per holds representations of the client's training examples"):
            pf.export_model(what, "client-0", tmp_path / "exported")


@pytest.mark.parametrize(("field", "value"), [("k", 0), ("lam", 1.5)])
def test_impossible_values_are_refused(field, value):
    with pytest.raises(pf.UserError, match=f"{field} must be .* got {value}"):
        KNNPer(**{field: value})


def test_lambda_has_the_bits_of_a_prediction_with_each_value():
    """The grid mixes the probabilities of one evaluation; each λ's loss equals that of the network with this λ."""
    who = client()
    val = who.train.select(torch.arange(len(who.train)).repeat(9))  # more than one batch
    network = personal(KNNPer(lam=0.5), who)
    losses = {}
    for step in range(11):
        network.lam.fill_(step / 10)
        losses[step / 10] = float(torch.nn.functional.nll_loss(predict(network, val), val.labels))
    assert _lam_of_lowest_loss(network, val) == min(losses, key=losses.__getitem__)
    probabilities = network.class_probabilities(val.batch(torch.arange(5))[0])
    assert torch.equal(network.mix(*probabilities), network(val.batch(torch.arange(5))[0]))
