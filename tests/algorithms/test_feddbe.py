"""FedDBE: a vector of each client's own and a common mean of representations. Identities, what travels, learning."""

import pytest
import torch
from halves import OPTIONS, mixed, plain, play, run, short

import polyfed as pf
from polyfed.algorithms import FedAvg, FedDBE
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.seeds import torch_generator
from polyfed.testing import small_clients


def features(theta, x):
    return torch.tanh(x @ theta["0.weight"].T + theta["0.bias"])


def test_without_memory_and_penalty_it_is_fedavg_bit_for_bit():
    options = {**OPTIONS, "buffers": "local"}
    fedavg = run(FedAvg(**options), small_clients(), rounds=3)
    for more in ({"kappa": 0.0}, {"kappa": 0.0, "mean_momentum": 0.0}):
        feddbe = run(FedDBE(**options, memory=False, **more), small_clients(), rounds=3)
        one, other = fedavg.last.state["model"], feddbe.last.state["model"]
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert fedavg.history[-1]["train_loss"] == feddbe.history[-1]["train_loss"]
        assert fedavg.table()[-1]["accuracy"] == feddbe.table()[-1]["accuracy"]


def test_with_momentum_0_the_penalty_does_nothing():
    """The moving mean stays at zero, and has no gradient."""
    clients = plain(mixed())
    states = [
        play(FedDBE(**OPTIONS, kappa=kappa, mean_momentum=0.0), clients, rounds=3)[1]["model"] for kappa in (0.0, 99.0)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_clients_mean_is_found_in_round_1_and_stays():
    clients, method = plain(mixed()), FedDBE(**OPTIONS)
    _, first, own, replies = play(method, clients, rounds=1)
    assert all(set(reply.tensors) == {"model", "consensus"} for reply in replies.values())
    assert not any(state["memory"]["vector"].any() for state in own.values())  # round 1 is FedAvg
    federation, third, _, _ = play(method, clients, rounds=3)
    assert torch.equal(first["consensus"]["mean"], third["consensus"]["mean"])
    down = method.dispatch(third, federation.client_info("client-0", 4))
    assert set(down.tensors) == {"model", "consensus"}
    assert set(method.dispatch(third, federation.client_info("client-0", 3, "personal")).tensors) == {"model"}


def test_the_evaluated_network_adds_the_vector_to_its_representations():
    clients, method = plain(mixed()), FedDBE(**OPTIONS)
    federation, state, own, _ = play(method, clients, rounds=3)
    for c in clients:
        message, theta = method.dispatch(state, federation.client_info(c.id, 3, "personal")), state["model"]
        z, vector = features(theta, c.test.x), own[c.id]["memory"]["vector"]
        with exclusive_single_torch_thread_with_grad():
            network = method.personal_model(message, own[c.id], c, 0)
            expected = (z + vector) @ theta["2.weight"].T + theta["2.bias"]
            torch.testing.assert_close(network(c.test.x), expected)
            ((name, generic),) = method.other_models(message, own[c.id], c, 0)
            torch.testing.assert_close(generic(c.test.x), z @ theta["2.weight"].T + theta["2.bias"])
        assert name == "server"


def test_training_leaves_the_private_state_that_it_got_as_it_is():
    clients, method = plain(mixed()), FedDBE(**OPTIONS)
    federation, state, own, _ = play(method, clients, rounds=2)
    before, c = own["client-0"]["memory"]["vector"].clone(), clients[0]
    with exclusive_single_torch_thread_with_grad():
        message = method.dispatch(state, federation.client_info(c.id, 3))
        _, after = method.local_update(message, own[c.id], c, 5)
    assert torch.equal(own[c.id]["memory"]["vector"], before)
    assert not torch.equal(after["memory"]["vector"], before)


def skewed():
    """Clients that have nine of ten examples from one class, of classes that overlap; tested as they are trained."""
    generator = torch_generator(5)
    centres = 0.5 * torch.randn(3, 6, generator=generator)

    def drawn(k, number):
        y = torch.where(torch.arange(number) % 10 == 0, (k + 1) % 3, k)
        return centres[y] + torch.randn(number, 6, generator=generator), y

    return [pf.Client(f"c{k}", short, drawn(k, 60), drawn(k, 100)) for k in range(3)]


def test_the_penalty_keeps_mean_representations_together():
    clients, spreads = skewed(), []
    for kappa in (0.0, 50.0):
        _, state, _, replies = play(FedDBE(lr=0.1, batch_size=10, local_epochs=3, kappa=kappa), clients, rounds=4)
        means = [features(replies[c.id].tensors["model"], c.train.x).mean(0) for c in clients]
        spreads.append(sum(float((mean - state["consensus"]["mean"]).square().sum()) for mean in means))
    assert spreads[1] < 0.5 * spreads[0]


@pytest.mark.thorough
def test_the_vector_learns_what_one_model_for_all_cannot():
    """How often the client has each class."""
    rows = [
        run(FedDBE(lr=0.2, batch_size=10, local_epochs=3, kappa=kappa), skewed(), rounds=8).table()[-1]
        for kappa in (50.0, 0.0)
    ]
    assert rows[0]["accuracy"] > rows[0]["server_accuracy"] + 0.1
    off = run(FedDBE(lr=0.2, batch_size=10, local_epochs=3, memory=False), skewed(), rounds=8).table()[-1]
    assert off["accuracy"] == off["server_accuracy"] < rows[0]["accuracy"] - 0.1


@pytest.mark.parametrize("wrong", [{"kappa": -1.0}, {"mean_momentum": 1.5}])
def test_wrong_fields_are_refused(wrong):
    with pytest.raises(pf.UserError, match=f"FedDBE: {next(iter(wrong))} must be"):
        FedDBE(**wrong)
