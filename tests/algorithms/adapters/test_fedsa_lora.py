"""FedSA-LoRA: what travels, what stays, a round in plain torch, and what only own factors B can learn."""

import pytest
import torch
from adapter_nets import BASE, FULL, A, B, Net, adapter_alone, clients, descend, first_state, mean, run
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg, FedSALoRA, Local
from polyfed.models.lora import add_lora
from polyfed.testing import AlgorithmContract, small_adapter_clients
from tests.few_cases import few


def wider():
    return add_lora(Net(), rank=3, alpha=4.0, layers=["hidden"], train=["head.*"])


@pytest.mark.thorough
class TestContract(AlgorithmContract):
    """With BatchNorm and a head that is averaged."""

    def clients(self, number=3):
        return small_adapter_clients(number)

    @pytest.fixture
    def algorithm(self):
        return FedSALoRA(lr=0.05, batch_size=8, shared_head=True)


def test_with_one_client_it_is_local_training():
    options = {"lr": 0.1, "batch_size": 8, "local_epochs": 2}
    ours, alone = (run(kind(**options), clients(1), rounds=3).model("client-0") for kind in (FedSALoRA, Local))
    for name, tensor in alone.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def test_only_a_travels():
    people = clients()
    for shared, names in ((False, {A}), (True, {A, "head.weight"})):
        found = run(FedSALoRA(**FULL, shared_head=shared), people)
        assert found.last.state["model"].keys() == names
        states = [found.model(c.id).state_dict() for c in people]
        assert torch.equal(states[0][A], states[1][A])
        assert not torch.allclose(states[0][B], states[1][B])
        assert torch.equal(states[0]["head.weight"], states[1]["head.weight"]) == shared


@pytest.mark.parametrize("shared", few([False, True], [True]))
def test_a_round_in_plain_torch(shared):
    """Two rounds of two steps: A is the weighted mean, and each client goes on from its own B."""
    method, people = FedSALoRA(**FULL, local_epochs=2, shared_head=shared), clients()
    found, first = run(method, people), first_state(method, people)
    states = [first] * 3
    for _ in range(2):
        trained = [descend(s, c, 2, 0.2, (A, B, "head.weight"))[0] for s, c in zip(states, people, strict=True)]
        common = {name: mean(trained, people, name) for name in (A, *(["head.weight"] if shared else []))}
        states = [{**state, **common} for state in trained]
    for client, state in zip(people, states, strict=True):
        model = found.model(client.id).state_dict()
        for name in (A, B, "head.weight", BASE):
            torch.testing.assert_close(model[name], state[name])


@pytest.mark.thorough
def test_clients_with_opposite_labels_learn():
    """Clients call the classes by other names: own factors B learn them, a common B does not. The head is frozen."""
    people = clients(3, adapter_alone, shift=1)
    options = {"lr": 0.3, "batch_size": 8, "local_epochs": 5}
    ours, common = (run(kind(**options), people, rounds=5).table()[-1]["accuracy"] for kind in (FedSALoRA, FedAvg))
    assert ours > common + 0.3
    assert ours > 0.75


def test_networks_without_adapters_are_refused_with_what_to_do():
    plain = [pf.Client(c.id, lambda: nn.Linear(6, 3).double(), c.train, c.test) for c in clients(2)]
    for method in ("fedsa_lora", "ffa_lora", "rolora"):
        with pytest.raises(
            pf.UserError, match=rf"{method} trains low-rank adapters .* 'client-0' has none .*add_lora\("
        ):
            pf.federate(plain, method, rounds=1, workers=0)


def test_adapters_of_different_ranks_are_refused():
    first, second = clients(2)
    other = pf.Client("other", wider, second.train, second.test)
    with pytest.raises(pf.UserError, match="needs one architecture"):
        pf.federate([first, other], "fedsa_lora", rounds=1, workers=0)


def test_the_option_for_different_ranks_is_refused():
    for name in ("fedsa_lora", "ffa_lora", "rolora"):
        with pytest.raises(pf.UserError, match=r"adapters must be none: .* so give all one rank, got 'svd'"):
            pf.algorithms.get(name)(adapters="svd")
