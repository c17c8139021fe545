"""FedRep and FedBN, in which a part of the network stays with the client: equivalences, and what is in the messages.

The margin of the learning test is about half of what three seeds showed (FedRep 0.959, FedAvg 0.842 on average).
"""

import warnings

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg, Local
from polyfed.algorithms.partial_sharing import fedrep
from polyfed.algorithms.partial_sharing.fedbn import FedBN
from polyfed.algorithms.partial_sharing.fedrep import FedRep
from polyfed.core.errors import UserError
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import build_module, initial_state
from polyfed.core.seeds import derive_seed
from polyfed.core.training.loop import fit
from polyfed.models.structure import norm_layer_tensor_names
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.testing import AlgorithmContract, SmallNet, assert_runs_equal, small_clients

OPTIONS = {"lr": 0.05, "batch_size": 8, "momentum": 0.5}


def with_model(clients, factory):
    return [pf.Client(c.id, factory, c.train, c.test, c.val) for c in clients]


def plain_net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def deep_net():
    """The two last layers have a norm between them."""
    hidden = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(8, 3))


class Residual(nn.Module):
    """A block whose shortcut has a BatchNorm, under names that say nothing."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.shortcut = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(torch.relu(self.b(self.a(x)) + self.shortcut(x)))


def messages(method, clients, rounds=2):
    """Per round: the message down, the replies, the private states, and the state after."""
    federation = Federation({c.id: c for c in clients}, method, Settings(rounds=rounds, seed=3))
    state, client_states, told = method.server_init(federation.server_context()), {}, []
    with exclusive_single_torch_thread_with_grad():
        for number in range(1, rounds + 1):
            replies, downs = {}, {}
            for c in clients:
                downs[c.id] = method.dispatch(state, federation.client_info(c.id, number))
                own = client_states.get(c.id) or method.client_init(c, 3)
                replies[c.id], client_states[c.id] = method.local_update(
                    downs[c.id], own, c, derive_seed(3, number, c.id)
                )
                assert federation.reply_error(replies[c.id], state, downs[c.id]) is None
            state = method.aggregate(state, replies, None)
            told.append((downs, replies, dict(client_states), state))
    return told


@pytest.mark.slow  # test_contract.py has it with the default policy
@pytest.mark.parametrize("policy", ["average", "local", "recompute"])
class TestFedRepContract(AlgorithmContract):
    @pytest.fixture
    def algorithm(self, policy):
        return FedRep(**OPTIONS, local_epochs=2, buffers=policy)


# -- FedRep -------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["local", "average", "recompute"])
@pytest.mark.parametrize("nothing", [{"head_layers": 0}, {"head": ()}])
def test_fedrep_without_a_head_is_fedavg_bit_for_bit(policy, nothing):
    fedavg = pf.federate(small_clients(), FedAvg(**OPTIONS, local_epochs=2, buffers=policy), rounds=3, workers=0)
    method = FedRep(**OPTIONS, local_epochs=7, body_epochs=2, buffers=policy, **nothing)
    with pytest.warns(RuntimeWarning, match="nothing stays local: this is FedAvg") as told:
        run = pf.federate(small_clients(), method, rounds=3, workers=0)
    assert len(told) == 1
    assert_runs_equal(fedavg, run)


@pytest.mark.parametrize("steps", [None, 4])
def test_fedrep_trains_the_head_on_the_received_body_and_then_the_body_on_that_head(steps, monkeypatch):
    """By hand; and in neither phase does a parameter of the other part move."""
    phases = []

    def watched(module, *args, **kwargs):
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        found = fit(module, *args, **kwargs)
        phases.append({name for name, p in module.named_parameters() if not torch.equal(p, before[name])})
        return found

    monkeypatch.setattr(fedrep, "fit", watched)
    (client,), method = small_clients(1), FedRep(**OPTIONS, local_epochs=3, local_steps=steps, body_epochs=2)
    [(_, replies, client_states, _)] = messages(method, [client], rounds=1)
    body = {"body.0.weight", "body.1.weight", "body.1.bias"}  # a bias before BatchNorm has no gradient but rounding
    assert [moved - {"body.0.bias"} for moved in phases] == [{"head.weight", "head.bias"}, body]

    by_hand, seed = SmallNet(), derive_seed(3, 1, client.id)
    by_hand.load_state_dict(initial_state(SmallNet, 3))
    with exclusive_single_torch_thread_with_grad():
        by_hand.body.requires_grad_(False)
        head_phase = FedAvg(**OPTIONS, local_epochs=3, local_steps=steps)
        fit(by_hand, client.train, head_phase, lr=0.05, seed=derive_seed(seed, "head"))
        by_hand.body.requires_grad_(True)
        by_hand.head.requires_grad_(False)
        loss = fit(by_hand, client.train, FedAvg(**OPTIONS, local_epochs=2), lr=0.05, seed=seed).loss
    state, got = by_hand.state_dict(), client_states[client.id]
    assert all(torch.equal(state[n], t) for n, t in {**replies[client.id].tensors["model"], **got["head"]}.items())
    assert all(torch.equal(state[n], t) for n, t in got["buffers"].items())
    assert replies[client.id].scalars["train_loss"] == loss


@pytest.mark.parametrize("policy", ["local", "average", "recompute"])
@pytest.mark.one_case
def test_the_head_is_never_sent_and_clients_keep_different_ones(policy):
    method = FedRep(**OPTIONS, local_epochs=2, buffers=policy)
    first, second = messages(method, small_clients())
    body = {"body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias"}
    if policy == "average":
        body |= {"body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"}
    for _, replies, _, state in (first, second):
        assert all(reply.tensors.keys() == {"model"} for reply in replies.values())
        assert all(reply.tensors["model"].keys() == body for reply in replies.values())
        assert state.keys() == {"model"}
        assert state["model"].keys() == body
    assert all(down.tensors["draw"].keys() == body | {"head.weight", "head.bias"} for down in first[0].values())
    assert all(down.tensors["model"].keys() == body for down in second[0].values())
    heads = [own["head"]["head.weight"] for own in second[2].values()]
    assert not torch.allclose(heads[0], heads[1])
    given = messages(FedRep(**OPTIONS, local_epochs=2, buffers=policy, head=("head",)), small_clients())
    assert all(down.tensors["model"].keys() == body for down in given[0][0].values())
    assert all(torch.equal(given[1][3]["model"][name], second[3]["model"][name]) for name in body)


@pytest.mark.parametrize("weighted", [True, False])
def test_the_body_is_the_mean_of_the_clients_bodies(weighted):
    clients = small_clients()
    [(_, replies, _, state)] = messages(FedRep(**OPTIONS, local_epochs=2, weighted=weighted), clients, rounds=1)
    sizes = torch.tensor([float(len(c.train)) if weighted else 1.0 for c in clients])
    bodies = torch.stack([replies[c.id].tensors["model"]["body.0.weight"] for c in clients])
    expected = torch.einsum("i,ijk->jk", sizes / sizes.sum(), bodies)
    torch.testing.assert_close(state["model"]["body.0.weight"], expected)


def test_evaluated_is_the_global_body_with_the_clients_own_head_or_the_initial_one():
    run = pf.federate(small_clients(), FedRep(**OPTIONS, local_epochs=2), rounds=1, clients_per_round=2, workers=0)
    start = initial_state(SmallNet, 0)
    took_part = [i for i, row in run.history[0]["clients"].items() if "bytes_up" in row]
    for client in small_clients():
        model = run.model(client.id)
        assert torch.equal(model.body[0].weight, run.last.state["model"]["body.0.weight"])
        expected = (
            run.last.client_states[client.id]["head"]["head.weight"] if client.id in took_part else start["head.weight"]
        )
        assert torch.equal(model.head.weight, expected)
        if client.id not in took_part:
            torch.testing.assert_close(model.body[1].running_mean, model.body[0](client.train.x).mean(0))
    assert len(took_part) == 2


@pytest.mark.parametrize("policy", ["local", "average", "recompute"])
@pytest.mark.one_case
def test_norms_inside_the_head_stay_local_under_every_policy(policy):
    clients = with_model(small_clients(), deep_net)
    method = FedRep(**OPTIONS, local_epochs=2, head_layers=2, buffers=policy)
    run = pf.federate(clients, method, rounds=1, clients_per_round=2, workers=0)
    assert not [name for name in run.last.state["model"] if name[0] in "346"]
    (unseen,) = [c for c in clients if c.id not in run.last.client_states]
    model = run.model(unseen.id)
    if policy == "average":  # the body's statistics are the average, the head's are estimated
        assert torch.equal(model[1].running_mean, run.last.state["model"]["1.running_mean"])
    else:
        torch.testing.assert_close(model[1].running_mean, model[0](unseen.train.x).mean(0))
    assert not torch.equal(model[4].running_mean, torch.zeros(8))
    means = [run.model(i).state_dict()["4.running_mean"] for i in run.last.client_states]
    assert not torch.allclose(means[0], means[1])


def test_a_head_that_is_the_whole_network_is_local_with_one_warning():
    clients, options = with_model(small_clients(), plain_net), {"batch_size": 0, "lr": 0.1, "local_epochs": 3}
    local = pf.federate(clients, Local(**options), rounds=2, workers=0)
    for everything in ({"head_layers": 9}, {"head": ("0", "2")}):
        with pytest.warns(RuntimeWarning, match="nothing travels") as told:
            run = pf.federate(clients, FedRep(**options, momentum=0.0, **everything), rounds=2, workers=0)
        assert len(told) == 1
        assert run.history[-1]["bytes_up_total"] == 0
        for client in clients:
            for name, tensor in local.model(client.id).state_dict().items():
                torch.testing.assert_close(run.model(client.id).state_dict()[name], tensor)


def test_frozen_parameters_stay_frozen_and_evaluated_networks_are_as_built():
    def half_frozen():
        net = plain_net()
        net[0].weight.requires_grad_(False)
        return net

    run = pf.federate(with_model(small_clients(), half_frozen), FedRep(**OPTIONS), rounds=1, workers=0)
    start, model = initial_state(half_frozen, 0), run.model("client-0")
    assert torch.equal(model[0].weight, build_module(half_frozen, 0)[0].weight)
    assert not torch.equal(model[0].bias, start["0.bias"])
    assert not torch.equal(model[2].weight, start["2.weight"])
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]


def test_first_replies_that_do_not_agree_are_refused():
    method = FedRep(**OPTIONS, local_epochs=1)
    [(downs, replies, _, _)] = messages(method, small_clients(2), rounds=1)
    state, (one, other) = {"draw": downs["client-0"].tensors["draw"]}, replies
    body = dict(replies[other].tensors["model"])
    body.pop("body.0.weight")
    changed = {one: replies[one], other: pf.Message({"model": body}, replies[other].scalars)}
    with pytest.raises(UserError, match=r"find different heads.*'model/body.0.weight'.*head=\(\.\.\.\)"):
        method.aggregate(state, changed, None)
    federation = Federation({c.id: c for c in small_clients(2)}, method, Settings())
    assert federation.reply_error(replies[one], state, downs[one]) is None
    wrong = pf.Message({"model": {"alien": torch.zeros(1)}}, {"num_examples": 1})
    assert federation.reply_error(wrong, state, downs[one]) == "group 'model': tensor 'alien' is unexpected (1 are)"
    empty = pf.Message({}, {"num_examples": 1})
    assert federation.reply_error(empty, state, downs[one]) == "the reply holds the groups [], expected ['model']"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"body_epochs": 0}, "body_epochs must be at least 1, got 0"),
        ({"head_layers": -1}, "head_layers must be at least 0, got -1"),
        ({"head": "fc"}, "head must be a list of module names, or none, got 'fc'"),
    ],
)
def test_fedrep_refuses(wrong, told):
    with pytest.raises(UserError, match=told):
        FedRep(**wrong)


def test_fedrep_names_of_the_head_are_checked_before_work_and_may_come_from_a_file():
    with pytest.raises(UserError, match="the head cannot be 'hed'"):
        pf.federate(small_clients(), FedRep(head=("hed",)), rounds=1, workers=0)
    assert FedRep(head=["head"]) == FedRep(head=("head",))


# -- FedBN --------------------------------------------------------------------------------------------------------


def test_fedbn_without_norm_layers_is_fedavg_bit_for_bit_with_one_warning():
    clients = with_model(small_clients(), plain_net)
    fedavg = pf.federate(clients, FedAvg(**OPTIONS, buffers="local"), rounds=3, workers=0)
    with pytest.warns(RuntimeWarning, match="no norm layer") as told:
        run = pf.federate(clients, FedBN(**OPTIONS), rounds=3, workers=0)
    assert len(told) == 1
    assert_runs_equal(fedavg, run)


def test_a_shortcuts_batch_norm_is_never_in_a_message_and_differs_between_clients():
    clients = with_model(small_clients(), Residual)
    travels = {"a.weight", "a.bias", "shortcut.0.weight", "shortcut.0.bias", "out.weight", "out.bias"}
    told = messages(FedBN(**OPTIONS), clients)
    for downs, replies, _, state in told:
        for message in (*downs.values(), *replies.values()):
            assert message.tensors.keys() == {"model"}
            assert message.tensors["model"].keys() == travels
        assert state["model"].keys() == travels
    client_states = told[-1][2]
    norms = {"b.weight", "b.bias", "shortcut.1.weight", "shortcut.1.bias"}
    assert all(own["norms"].keys() == norms for own in client_states.values())
    one, other = client_states["client-0"], client_states["client-1"]
    assert not torch.allclose(one["norms"]["shortcut.1.weight"], other["norms"]["shortcut.1.weight"])
    assert not torch.allclose(one["buffers"]["shortcut.1.running_mean"], other["buffers"]["shortcut.1.running_mean"])


@pytest.mark.parametrize("weighted", [True, False])
def test_what_travels_is_averaged_as_in_fedavg_and_norms_carry_on(weighted):
    """Two rounds by hand, from each client's norm layers of the round before."""
    clients, method = small_clients(), FedBN(**OPTIONS, local_epochs=2, weighted=weighted)
    told = messages(method, clients)
    norms = set(norm_layer_tensor_names(SmallNet()))
    shares = torch.tensor([float(len(c.train)) if weighted else 1.0 for c in clients], dtype=torch.float64)
    states = [initial_state(SmallNet, 3) for _ in clients]
    for number, (_, _, client_states, state) in enumerate(told, start=1):
        with exclusive_single_torch_thread_with_grad():
            for k, client in enumerate(clients):
                net = SmallNet()
                net.load_state_dict(states[k])
                fit(
                    net,
                    client.train,
                    FedAvg(**OPTIONS, local_epochs=2),
                    lr=0.05,
                    seed=derive_seed(3, number, client.id),
                )
                states[k] = net.state_dict()
        for name in states[0].keys() - norms:
            stack = torch.stack([s[name].double() for s in states])
            mean = (stack * (shares / shares.sum()).view(-1, *[1] * (stack.dim() - 1))).sum(0).float()
            torch.testing.assert_close(state["model"][name], mean)
            states = [{**s, name: state["model"][name]} for s in states]
        for s, client in zip(states, clients, strict=True):
            kept = {**client_states[client.id]["norms"], **client_states[client.id]["buffers"]}
            assert kept.keys() == norms
            assert all(torch.equal(kept[name], s[name]) for name in norms)


def test_a_newcomer_to_fedbn_has_initial_norm_parameters_and_statistics_of_its_data():
    run = pf.federate(small_clients(), FedBN(**OPTIONS), rounds=2, clients_per_round=1, workers=0)
    unseen = [c for c in small_clients() if c.id not in run.last.client_states]
    assert unseen
    for client in unseen:
        model, hidden = run.model(client.id), run.model(client.id).body[0](client.train.x)
        assert torch.equal(model.body[1].weight, torch.ones(8))
        assert torch.equal(model.body[0].weight, run.last.state["model"]["body.0.weight"])
        torch.testing.assert_close(model.body[1].running_mean, hidden.mean(0))
        torch.testing.assert_close(model.body[1].running_var, hidden.var(0))


def test_norms_without_statistics_stay_local_too():
    def grouped():
        return nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = pf.federate(with_model(small_clients(), grouped), FedBN(**OPTIONS), rounds=2, workers=0)
    assert run.last.state["model"].keys() == {"0.weight", "0.bias", "4.weight", "4.bias"}
    scales = [run.model(c.id)[2].weight for c in small_clients()]
    assert not torch.allclose(scales[0], scales[1])


@pytest.mark.parametrize("policy", ["average", "recompute"])
def test_fedbn_refuses_to_share_statistics(policy):
    with pytest.raises(UserError, match=f"buffers must be 'local', since norm layers stay local, got '{policy}'"):
        FedBN(buffers=policy)
