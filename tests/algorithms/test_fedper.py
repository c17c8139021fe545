"""FedPer: FedAvg with personal last layers. What it is without them, two rounds by hand, and what travels."""

import warnings

import pytest
import torch
from halves import FULL, OPTIONS, mixed, plain, play, run, short
from two_parts import BODY, HEAD, descend, mean_of, swapped

import polyfed as pf
from polyfed.algorithms import FedAvg, FedPer, FedRep, Local
from polyfed.core.nn.module_cache import initial_state
from polyfed.testing import assert_runs_equal, small_clients
from tests.few_cases import few


@pytest.mark.parametrize("policy", few(["local", "average", "recompute"], ["recompute"]))
@pytest.mark.parametrize("nothing", [{"head_layers": 0}, {"head": ()}])
@pytest.mark.one_case
def test_without_a_head_it_is_fedavg_bit_for_bit(policy, nothing):
    fedavg = run(FedAvg(**OPTIONS, local_epochs=2, buffers=policy), small_clients(), rounds=3)
    with pytest.warns(RuntimeWarning, match="^FedPer: the head is empty, .* this is FedAvg$") as told:
        fedper = run(FedPer(**OPTIONS, local_epochs=2, buffers=policy, **nothing), small_clients(), rounds=3)
    assert len(told) == 1
    assert_runs_equal(fedavg, fedper)


def test_a_head_that_is_the_whole_network_is_local():
    local = run(Local(**OPTIONS), small_clients())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        fedper = run(FedPer(**OPTIONS, head_layers=9), small_clients())
    for client in small_clients():
        one, other = local.model(client.id).state_dict(), fedper.model(client.id).state_dict()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("weighted", [True, False])
def test_two_rounds_in_plain_torch_are_the_same(weighted):
    """All layers are trained at once, the body from the average, the head from where the client left it."""
    clients = plain(mixed())
    _, state, own, replies = play(FedPer(**FULL, weighted=weighted), clients, rounds=2)
    sizes = [len(c.train) if weighted else 1 for c in clients]
    draw = initial_state(short, 3)
    body, heads = {name: draw[name] for name in BODY}, [{name: draw[name] for name in HEAD} for _ in clients]
    for _ in range(2):
        trained = [descend({**body, **h}, BODY + HEAD, c.train) for c, h in zip(clients, heads, strict=True)]
        body, heads = mean_of(trained, sizes, BODY), [{name: tree[name] for name in HEAD} for tree in trained]
    for c, head in zip(clients, heads, strict=True):
        assert set(replies[c.id].tensors) == {"model"}
        assert set(replies[c.id].tensors["model"]) == set(BODY)  # the head is never sent
        for name in HEAD:
            torch.testing.assert_close(own[c.id]["head"][name], head[name], rtol=1e-5, atol=1e-6)
    assert set(state) == {"model"}
    for name in BODY:
        torch.testing.assert_close(state["model"][name], body[name], rtol=1e-5, atol=1e-6)


def test_after_round_1_only_the_body_travels_and_with_a_named_head_from_the_start():
    clients = plain(mixed())
    for method, sent in (
        (FedPer(**FULL), [set(BODY + HEAD), set(BODY)]),
        (FedPer(**FULL, head=["2"]), [set(BODY)] * 2),
    ):
        for rounds, names in enumerate(sent):
            federation, state, _, _ = play(method, clients, rounds=rounds)
            message = method.dispatch(state, federation.client_info("client-0", rounds + 1))
            assert {name for tree in message.tensors.values() for name in tree} == names


def test_it_is_not_fedrep_which_trains_head_and_body_in_turn():
    options = {**FULL, "momentum": 0.0}
    fedper, fedrep = (play(m, plain(mixed()))[1]["model"] for m in (FedPer(**options), FedRep(**options)))
    assert not torch.allclose(fedper["0.weight"], fedrep["0.weight"], atol=1e-4)


def test_it_learns_clients_who_give_the_same_inputs_other_labels():
    """One network for all is right for one of three at best."""
    fedper, fedavg = (
        run(method(lr=0.2, batch_size=8), swapped(), rounds=15).table()[-1]["accuracy"] for method in (FedPer, FedAvg)
    )
    assert fedper > fedavg + 0.3
    assert fedper > 0.85


@pytest.mark.parametrize("wrong", [{"head_layers": -1}, {"head": "2"}, {"head": [3]}])
def test_wrong_heads_are_refused(wrong):
    with pytest.raises(pf.UserError, match=f"FedPer: {next(iter(wrong))} must be"):
        FedPer(**wrong)
