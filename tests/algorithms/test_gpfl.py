"""GPFL: representations conditioned on embeddings of the classes. What travels, what is evaluated, learning."""

import pytest
import torch
from halves import OPTIONS, begin, mixed, plain, play, run
from two_parts import swapped

import polyfed as pf
from polyfed.algorithms import GPFL, FedAvg
from polyfed.algorithms.base.heads.conditioning import condition_of, draw_conditioning_tensors
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad


def conditioned(t, z, context):
    """relu((1 + γ(c))·z + β(c)), with the layer norms written out."""

    def part(name):
        h = torch.relu(t[f"{name}.weight"] @ context + t[f"{name}.bias"])
        normal = (h - h.mean()) / ((h - h.mean()).square().mean() + 1e-5).sqrt()
        return normal * t[f"{name}.norm.weight"] + t[f"{name}.norm.bias"]

    return torch.relu((1 + part("gamma")) * z + part("beta"))


def shares(c):
    return torch.tensor([float((c.train.y == k).float().mean()) for k in range(3)])


def test_the_evaluated_network_is_conditioned_on_the_clients_shares_of_classes():
    clients, method = plain(mixed(classes=[(0, 1), (1, 2), (0, 1, 2)])), GPFL(**OPTIONS)
    federation, state, own, _ = play(method, clients, rounds=2)
    for c in clients:
        message = method.dispatch(state, federation.client_info(c.id, 2, "personal"))
        with exclusive_single_torch_thread_with_grad():
            network = method.personal_model(message, own[c.id], c, 0)
            found = network(c.test.x)
        theta, h, shared = state["model"], own[c.id]["head"], state["conditional"]
        z = torch.tanh(c.test.x @ theta["0.weight"].T + theta["0.bias"])
        v = conditioned(shared, z, (shares(c)[:, None] * shared["embeddings"]).sum(0))
        torch.testing.assert_close(found, v @ h["2.weight"].T + h["2.bias"], rtol=1e-4, atol=1e-5)


def test_all_clients_begin_with_the_same_embeddings():
    clients = plain(mixed())
    first = [GPFL().client_init(c, 3)["first"] for c in clients]
    assert all(torch.equal(first[0][name], other[name]) for other in first for name in first[0])
    assert not torch.equal(first[0]["embeddings"], GPFL().client_init(clients[0], 4)["first"]["embeddings"])


def test_a_first_reply_without_embeddings_is_refused():
    clients, method = plain(mixed()), GPFL(**OPTIONS)
    federation, state, own = begin(method, clients)
    message = method.dispatch(state, federation.client_info("client-0", 1))
    with exclusive_single_torch_thread_with_grad():
        reply, _ = method.local_update(message, own["client-0"], clients[0], 0)
    body_alone = pf.Message({"model": reply.tensors["model"]}, reply.scalars)
    assert federation.reply_error(reply, state, message) is None
    assert "expected 'conditional' among them" in federation.reply_error(body_alone, state, message)


def test_first_draws_are_those_of_torchs_layers():
    """An embedding is standard normal; a linear layer's weights and bias are uniform between −1/√width and 1/√width."""
    tensors, limit = draw_conditioning_tensors(200, 100, 0), 0.1
    assert abs(tensors["embeddings"].mean()) < 0.03
    assert abs(tensors["embeddings"].std() - 1) < 0.03
    for part in ("gamma", "beta"):
        for name in ("weight", "bias"):
            drawn = tensors[f"{part}.{name}"]
            assert -limit <= drawn.min() < -0.9 * limit
            assert 0.9 * limit < drawn.max() <= limit
            assert abs(drawn.mean()) < 0.2 * limit
            assert abs(drawn.std() - limit / 3**0.5) < 0.1 * limit
        assert torch.equal(tensors[f"{part}.norm.weight"], torch.ones(100))
        assert torch.equal(tensors[f"{part}.norm.bias"], torch.zeros(100))


def test_a_condition_of_no_scale_and_no_shift_leaves_positive_representations():
    tensors = {name: torch.zeros_like(tensor) for name, tensor in draw_conditioning_tensors(3, 8, 0).items()}
    z = torch.rand(5, 8)
    assert torch.equal(condition_of(tensors, torch.ones(8)).apply(z), z)


@pytest.mark.thorough
def test_it_learns_clients_who_give_the_same_inputs_other_labels():
    ours, theirs = (run(m(lr=0.1, batch_size=8), swapped(), rounds=15).table()[-1]["accuracy"] for m in (GPFL, FedAvg))
    assert ours > theirs + 0.3


@pytest.mark.parametrize("wrong", [{"lam": -1.0}, {"mu": -1.0}])
def test_wrong_fields_are_refused(wrong):
    with pytest.raises(pf.UserError, match=f"GPFL: {next(iter(wrong))} must be"):
        GPFL(**wrong)
