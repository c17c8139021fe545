"""FFA-LoRA: A stays what it was, products are averaged exactly, a round in plain torch, and learning through the adapter."""

import pytest
import torch
from adapter_nets import BASE, FULL, A, B, adapter_alone, clients, descend, first_state, mean, one_round, run

from polyfed.algorithms import FedAvg, FFALoRA
from polyfed.algorithms.adapters.factors import freeze_within_block


def test_a_never_changes_and_never_travels():
    method, people = FFALoRA(lr=0.3, batch_size=8), clients()
    first, found = first_state(method, people), run(method, people, rounds=3)
    assert found.last.state["model"].keys() == {B, "head.weight"}
    assert first[A].abs().min() > 0
    for client in people:
        assert torch.equal(found.model(client.id).state_dict()[A], first[A])
        assert torch.equal(found.last.client_states[client.id]["local"][A], first[A])
    assert found.last.state["model"][B].abs().max() > 0.01


def test_what_was_frozen_before_stays_frozen_and_the_rest_is_trained_again():
    layer = torch.nn.Linear(2, 1)
    layer.bias.requires_grad_(False)
    with freeze_within_block(layer, ["weight", "bias"]):
        assert not layer.weight.requires_grad
    assert layer.weight.requires_grad
    assert not layer.bias.requires_grad


def test_the_mean_of_products_is_the_product_of_means():
    """And that of FedAvg is not, which averages both factors by themselves."""
    people, options = clients(), {"lr": 0.3, "batch_size": 8, "local_epochs": 4}
    a = first_state(FFALoRA(), people)[A]
    for method, exact in ((FFALoRA(**options), True), (FedAvg(**options), False)):
        _, replies, after = one_round(method, people)
        sent = [replies[c.id].tensors["model"] for c in people]
        products = mean([{"product": tree[B] @ tree.get(A, a)} for tree in sent], people, "product")
        common = after["model"][B] @ after["model"].get(A, a)
        assert torch.allclose(common, products, rtol=1e-9, atol=1e-9) == exact


def test_a_round_in_plain_torch():
    method, people = FFALoRA(**FULL, local_epochs=3), clients()
    state, found = first_state(method, people), run(method, people)
    for _ in range(2):
        trained = [descend(state, c, 3, 0.2, (B, "head.weight"))[0] for c in people]
        state = {**state, **{name: mean(trained, people, name) for name in (B, "head.weight")}}
    model = found.model("client-0").state_dict()
    for name in (A, B, "head.weight", BASE):
        torch.testing.assert_close(model[name], state[name])


@pytest.mark.thorough
def test_it_learns_through_the_adapter():
    """The head is frozen, so that without B nothing is learnt."""
    people = clients(3, adapter_alone, turn=1)
    start, end = (
        run(FFALoRA(lr=lr, batch_size=8, local_epochs=5), people, rounds=4).table()[-1]["accuracy"]
        for lr in (1e-30, 0.3)
    )
    assert start < 0.6
    assert end > 0.9
