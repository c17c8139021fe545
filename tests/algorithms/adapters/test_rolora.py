"""RoLoRA: factors in turn, rounds in plain torch, what it shares with FFA-LoRA, and what a random A cannot learn."""

import pytest
import torch
from adapter_nets import BASE, FULL, A, B, Net, adapter_alone, clients, descend, first_state, mean, one_round, run

import polyfed as pf
from polyfed.algorithms import FFALoRA, RoLoRA
from polyfed.models.lora import add_lora


def test_rounds_train_the_factors_in_turn():
    people = clients()
    states = [run(RoLoRA(**FULL), people, rounds=rounds).last.state["model"] for rounds in (1, 2, 3)]
    first = first_state(RoLoRA(), people)
    assert torch.equal(states[0][A], first[A])
    assert torch.equal(states[1][B], states[0][B])
    assert torch.equal(states[2][A], states[1][A])
    for name, one, other in ((B, states[0], first), (A, states[1], states[0]), (B, states[2], states[1])):
        assert (one[name] - other[name]).abs().max() > 1e-4
    _, replies, after = one_round(RoLoRA(**FULL), people)
    assert replies["client-0"].tensors["model"].keys() == {B, "head.weight"}
    assert after["model"].keys() == {A, B, "head.weight"}
    _, replies, _ = one_round(RoLoRA(**FULL, first="A"), people)
    assert replies["client-0"].tensors["model"].keys() == {A, "head.weight"}


def test_the_first_round_is_that_of_ffa_lora():
    people, options = clients(), {"lr": 0.2, "batch_size": 8, "local_epochs": 2}
    ours, theirs = (run(kind(**options), people, rounds=1).model("client-1").state_dict() for kind in (RoLoRA, FFALoRA))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.one_case
def test_two_rounds_in_plain_torch(rounds):
    method, people = RoLoRA(**FULL, local_epochs=2), clients()
    state, found = first_state(method, people), run(method, people, rounds=rounds)
    for number in range(rounds):
        trained_names = ((B, A)[number % 2], "head.weight")
        trained = [descend(state, c, 2, 0.2, trained_names)[0] for c in people]
        state = {**state, **{name: mean(trained, people, name) for name in trained_names}}
    model = found.model("client-0").state_dict()
    for name in (A, B, "head.weight", BASE):
        torch.testing.assert_close(model[name], state[name])


@pytest.mark.thorough
def test_it_learns_what_a_random_a_cannot():
    """Of one frozen random direction of the inputs little can be told; RoLoRA turns it. The head is frozen."""
    people = clients(3, adapter_alone_of_rank_1, turn=1)
    ours, frozen = (
        run(kind(lr=0.3, batch_size=8, local_epochs=4), people, rounds=8).table()[-1]["loss"]
        for kind in (RoLoRA, FFALoRA)
    )
    assert ours < 0.7 * frozen


def adapter_alone_of_rank_1():
    return add_lora(Net(), rank=1, alpha=2.0, layers=["hidden"])


def test_impossible_values_are_refused():
    with pytest.raises(pf.UserError, match="unknown first 'C'; choices: A, B"):
        RoLoRA(first="C")
    assert adapter_alone().hidden.scaling == {"default": 2.0}
