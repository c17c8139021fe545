"""Which methods fit anything to validation examples, over the whole registry; their scores there are then out of fold."""

from dataclasses import dataclass, replace

import pytest
import torch
from test_contract import OF_NETWORKS

import polyfed as pf
from polyfed.algorithms import REGISTRY, FedAvg, FedFomo, FedL2G, KNNPer
from polyfed.core.evaluation.evaluate import out_of_fold_outputs, predict
from polyfed.testing import AlgorithmContract, example_of, small_clients


class Contract(AlgorithmContract):
    pass


def check(method):
    contract = Contract()
    contract.clients = example_of(type(method)).clients
    contract.test_validation_examples_are_fitted_only_where_declared(method)


@pytest.mark.parametrize(
    "name",
    [n if n in ("knn_per", "fedfomo") else pytest.param(n, marks=pytest.mark.thorough) for n in OF_NETWORKS],
)
@pytest.mark.one_case
def test_no_method_fits_validation_examples_unsaid(name):
    check(example_of(name).build())


def test_the_methods_that_fit_them_are_these():
    assert {name for name, method in REGISTRY.items() if "fits_validation" in method.traits | method().traits} == {
        "knn_per"
    }
    assert "fits_validation" not in KNNPer(lam=0.5).traits


@dataclass(frozen=True, kw_only=True)
class ShiftsByValidation(FedAvg):
    """Its network's outputs, or its replies, depend on validation labels."""

    replies: bool = False

    def shifted(self, tensors, client):
        more = 0.01 * client.val.labels[0]
        return {name: tensor + more if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}

    def local_update(self, message, client_state, client, seed):
        reply, client_state = super().local_update(message, client_state, client, seed)
        model = self.shifted(reply.tensors["model"], client) if self.replies else reply.tensors["model"]
        return pf.Message({"model": model}, reply.scalars), client_state

    def personal_model(self, message, client_state, client, seed):
        model = super().personal_model(message, client_state, client, seed)
        if not self.replies:
            model.load_state_dict(self.shifted(model.state_dict(), client))
        return model


@pytest.mark.parametrize(("replies", "what"), [(True, "the server's state"), (False, "a network")])
@pytest.mark.one_case
def test_one_that_fits_them_is_caught(replies, what):
    with pytest.raises(AssertionError, match=f"with other validation examples, {what}"):
        check(ShiftsByValidation(lr=0.05, batch_size=8, replies=replies))
    said = ShiftsByValidation(lr=0.05, batch_size=8, replies=replies)
    object.__setattr__(said, "traits", frozenset({"fits_validation"}))
    if replies:
        with pytest.raises(AssertionError, match="with other validation examples, the server's state"):
            check(said)
    else:
        check(said)


def test_scores_of_what_is_fitted_are_out_of_fold(tmp_path):
    """Each half of the validation examples has the outputs of the network that the other half chose, in a run, in its
    files and in its best round."""
    run = pf.federate(small_clients(), KNNPer(lr=0.05), rounds=2, workers=0, keep="best", out=tmp_path / "run")
    for who in run.federation.clients.values():
        seen = []

        def personal(of, who=who, seen=seen):
            seen.append(of.val)
            found = run.model(who.id)
            found.lam.fill_(0.0 if len(seen) == 1 else 1.0)
            return found

        outputs = out_of_fold_outputs(personal, who)
        assert sorted(len(part) for part in seen) == [1, 2]
        network, share = run.model(who.id), []
        for lam in (0.0, 1.0):
            network.lam.fill_(lam)
            share.append(predict(network, who.val))
        rows = [bool(torch.equal(outputs[k], share[0][k])) for k in range(3)]
        assert all(torch.equal(outputs[k], share[0 if rows[k] else 1][k]) for k in range(3))
        assert 1 <= sum(rows) <= 2


def test_lambda_no_longer_sees_what_it_is_scored_on():
    """The loss on validation examples was the least over λ, by the λ that they chose; it no longer is. Scores on test
    examples are as they were."""
    run = pf.federate(small_clients(), KNNPer(lr=0.05), rounds=1, workers=0)
    for who in run.federation.clients.values():
        inside = torch.nn.functional.cross_entropy(predict(run.model(who.id), who.val), who.val.labels)
        row = run.history[-1]["clients"][who.id]
        assert row["val_loss"] >= float(inside) - 1e-6  # the least over λ, of all
        test = torch.nn.functional.cross_entropy(predict(run.model(who.id), who.test), who.test.labels)
        assert row["loss"] == pytest.approx(float(test))


@pytest.mark.parametrize("number", [1, 2])
def test_one_or_two_validation_examples_are_enough(number):
    rows = torch.arange(number)
    few = [replace(c, val=c.val.select(rows)) for c in small_clients(2)]
    run = pf.federate(few, KNNPer(lr=0.05), rounds=1, workers=0)
    assert all(row["val_loss"] is not None for row in run.table()[:-1])


def test_groups_stay_in_one_half():
    x, y = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    val = pf.Examples(x, y, columns={"patient": [k // 3 for k in range(12)]}, group="patient")
    who = replace(small_clients(1)[0], val=val)
    parts = []

    def personal(of):
        parts.append(set(of.val.column("patient").tolist()))
        return torch.nn.Identity()

    outputs = out_of_fold_outputs(personal, who)
    assert torch.equal(outputs, x)
    assert parts[0] & parts[1] == set()


@pytest.mark.parametrize(("method", "rows"), [(FedFomo(), "holdout"), (FedL2G(quiz_size=7), "quiz")])
def test_what_a_method_holds_out_of_training_are_whole_groups(method, rows):
    """Otherwise it would judge networks by patients that they were trained on."""
    x, y = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 3
    patients = [f"p{k // 3}" for k in range(30)]
    who = replace(small_clients(1)[0], train=pf.Examples(x, y, group=patients))
    held_out = method.client_init(who, 0)[rows].tolist()
    assert len(held_out) == 6
    assert not {patients[k] for k in held_out} & {patients[k] for k in range(30) if k not in held_out}
