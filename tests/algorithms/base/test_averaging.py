"""The base of averaging methods: replies are summed as they come, in the order of ids, and let go."""

import gc
import sys
import weakref
from dataclasses import dataclass
from typing import final

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FedAvg, FedProx, FedRep, PFedMe
from polyfed.algorithms.base.averaging import Averaging
from polyfed.algorithms.base.reply_sum import PlainReplySum
from polyfed.core.algorithm import Message
from polyfed.core.state_dict import weighted_mean
from polyfed.simulation.rounds.replies.aggregator import ReplyAggregator
from polyfed.simulation.rounds.replies.secure_aggregation import SecureSum
from polyfed.testing import assert_runs_equal, small_clients

SIZES = {"a": 3, "b": 5, "c": 9, "d": 2}


def reply(client):
    generator = torch.Generator().manual_seed(ord(client))
    return Message({"model": {"w": torch.randn(20, generator=generator)}}, {"num_examples": SIZES[client]})


@pytest.mark.parametrize("order", ["abcd", "dcba", "cabd"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_the_order_of_arrival_does_not_change_a_bit(order, weighted, known):
    method, weights = FedAvg(weighted=weighted), dict(SIZES) if weighted else None
    intake = ReplyAggregator(method, {"model": {}}, list("abcd"), SIZES if known else {})
    for client in order:
        intake.add_reply(client, reply(client))
    found = intake.aggregate(None, leave_out_bad_replies=False)[0]["model"]["w"]
    expected = weighted_mean({i: reply(i).tensors["model"] for i in "abcd"}, weights)["w"]
    assert torch.equal(found, expected)
    assert torch.equal(found, method.aggregate({"model": {}}, {i: reply(i) for i in order}, None)["model"]["w"])


@pytest.mark.parametrize("lost", ["a", "c", "d", "ab"])
def test_a_client_that_is_lost_does_not_hold_up_the_others(lost):
    intake, came = ReplyAggregator(FedAvg(), {"model": {}}, list("abcd"), SIZES), [i for i in "dcba" if i not in lost]
    for client in came:
        intake.add_reply(client, reply(client))
    for client in lost:
        intake.mark_client_missing(client)
    expected = weighted_mean({i: reply(i).tensors["model"] for i in came}, {i: SIZES[i] for i in came})["w"]
    torch.testing.assert_close(
        intake.aggregate(None, leave_out_bad_replies=False)[0]["model"]["w"], expected, rtol=1e-6, atol=0
    )


@pytest.fixture
def little_to_collect():
    """All that is there before a test is passed over by the collections in it, and later ones."""
    gc.freeze()


@pytest.mark.usefixtures("little_to_collect")
def test_one_reply_is_held_whatever_the_number_of_clients():
    """In this process each reply is gone before the next client trains; a method with an aggregation of its own gets all."""
    alive, most = weakref.WeakSet(), []

    @dataclass(frozen=True, kw_only=True)
    class Counted(Averaging):
        def local_update(self, message, client_state, client, seed):
            gc.collect()
            most.append(len(alive))
            reply, after = super().local_update(message, client_state, client, seed)
            alive.update(reply.tensors["model"].values())
            return reply, after

    @dataclass(frozen=True, kw_only=True)
    class Held(Counted):
        def aggregate(self, server_state, replies, server):
            return super().aggregate(server_state, replies, server)

    tensors = len(small_clients()[0].model().state_dict())
    run = pf.federate(small_clients(6), Counted(lr=0.05), rounds=1, workers=0)
    assert max(most) <= tensors, "replies of earlier clients are still in memory"
    most.clear()
    assert_runs_equal(run, pf.federate(small_clients(6), Held(lr=0.05), rounds=1, workers=0))
    assert max(most) == 5 * tensors, "this test cannot see replies"


@final
@dataclass(frozen=True, kw_only=True)
class Halfway(Averaging):
    def server_step(self, server_state, mean, client_ids):
        return {
            "model": {
                n: (t + mean["model"][n]) / 2 if t.is_floating_point() else t for n, t in server_state["model"].items()
            }
        }


def test_a_server_step_gets_the_mean_and_nothing_else():
    start = pf.federate(small_clients(), FedAvg(lr=1e-9), rounds=1, workers=0).last.state["model"]["head.weight"]
    full = pf.federate(small_clients(), FedAvg(lr=0.1), rounds=1, workers=0).last.state["model"]["head.weight"]
    half = pf.federate(small_clients(), Halfway(lr=0.1), rounds=1, workers=0).last.state["model"]["head.weight"]
    torch.testing.assert_close(half, (start + full) / 2)
    assert not torch.allclose(half, full)


def test_clients_that_train_but_were_not_drawn_do_not_count():
    """pFedMe: everyone trains, those drawn are averaged."""
    one, all_ = (
        pf.federate(small_clients(), PFedMe(personal_lr=0.05), rounds=1, workers=0, clients_per_round=n)
        for n in (1, 1.0)
    )
    assert [row.get("bytes_up") is not None for row in one.history[0]["clients"].values()].count(True) == 1
    assert not torch.equal(one.last.state["model"]["head.weight"], all_.last.state["model"]["head.weight"])


def test_replies_whose_networks_differ_have_no_mean():
    intake = ReplyAggregator(FedProx(), {"model": {}}, ["a", "b"], SIZES)
    intake.add_reply("a", reply("a"))
    other = Message({"model": {"w": torch.zeros(3)}}, {"num_examples": 1})
    with pytest.raises(
        pf.UserError, match=r"FedProx: the tensors of 'b' are not those of 'a': tensor 'model/w' has shape \(3,\)"
    ):
        intake.add_reply("b", other)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param(FedAvg(lr=0.05), {}, id="streamed"),
        pytest.param(FedAvg(lr=0.05), {"clients_per_round": 2}, id="partial"),
        pytest.param(FedAvg(lr=0.05, averaged_over="all"), {}, id="kept"),
        pytest.param(FedRep(lr=0.05), {}, id="held"),
        pytest.param(FedAvg(lr=0.05), {"secure": True}, id="secure"),
        pytest.param(FedAvg(lr=0.05), {"workers": 2, "engine": "pool"}, id="pool"),
    ],
)
@pytest.mark.one_case
def test_a_run_passes_through_the_lines_of_aggregate(method, settings, monkeypatch):
    """Each reply is added in `Averaging.add_reply`, and each state made in `Averaging.aggregate`: a debugger stops there."""
    events, callers = [], {"add": Averaging.add_reply.__code__, "server_step": Averaging.aggregate.__code__}

    def watch(owner, name):
        original = getattr(owner, name)

        def watched(self, *args):
            assert sys._getframe(1).f_code is callers[name], f"a run does not pass through Averaging to {name}"
            events.append((name, args[0] if name == "add" else args[2]))
            return original(self, *args)

        monkeypatch.setattr(owner, name, watched)

    for replies in (PlainReplySum, SecureSum):
        watch(replies, "add")
    watch(Averaging if type(method) is FedAvg else type(method), "server_step")
    run = pf.federate(small_clients(), method, **{"rounds": 2, "workers": 0, **settings})
    expected = []
    for record in run.history:
        client_ids = [i for i, row in record["clients"].items() if "bytes_up" in row]
        expected += [*(("add", i) for i in client_ids), ("server_step", client_ids)]
    assert events == expected
