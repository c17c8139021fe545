"""Asynchronous rounds between sites: replies are taken as they come, with the code and the checks of the simulator."""

import dataclasses

import pytest
import torch

from polyfed.algorithms import Ditto, FedAvg, FedOpt, FedRep
from polyfed.core.algorithm import Message as Body
from polyfed.core.errors import ClientError, RoundError, UserError
from polyfed.deploy.flower.apps import client_app
from polyfed.deploy.flower.engine import envelope_from_record, envelope_to_record
from polyfed.deploy.flower.pending_requests import PollingSchedule
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.replies import reply_validation
from polyfed.simulation.storage.directory import read_metrics
from polyfed.testing import small_clients, without_durations
from polyfed.testing.algorithm_contract import _InterruptAfter
from tests.few_cases import few

from .conftest import MemoryGrid

BUFFER = {"asynchronous.rule": "fedbuff", "asynchronous.buffer": 2, "evaluate-every": 100}


@pytest.fixture(autouse=True)
def poll_always(monkeypatch):
    """Asks for every awaited reply at each look, so that the order of replies does not depend on how busy the machine is."""
    monkeypatch.setattr(PollingSchedule, "seconds_until_poll", lambda schedule: 0.0)


class SlowGrid(MemoryGrid):
    """Hands a reply over once so many further training messages have been sent as its node is slow, or when no other reply
    comes."""

    def __init__(self, nodes, slowness):
        super().__init__(nodes)
        self.slowness, self.num_trained, self.num_empty, self._due = slowness, 0, 0, {}

    def push_messages(self, messages):
        sent = super().push_messages(messages)
        for number, message in zip(sent, messages, strict=True):
            if message.metadata.message_type == "train":
                self.num_trained += 1
                self._due[number] = self.num_trained + self.slowness.get(message.metadata.dst_node_id, 0)
        return sent

    def pull_messages(self, message_ids):
        ready = [i for i in message_ids if self._due.get(i, 0) <= self.num_trained or self.num_empty > 100]
        replies = super().pull_messages(ready)
        self.num_empty = 0 if replies else self.num_empty + 1
        return replies


def heads_of(grid, node):
    """The heads of the training messages to a node."""
    return [envelope_from_record(record).head for n, kind, record in grid.seen if n == node and kind == "train"]


def test_a_slow_site_holds_nobody_up_and_its_reply_is_stale(run, nodes):
    grid = SlowGrid(nodes(small_clients()), {103: 7})
    deployed = run(grid=grid, rounds=7, **BUFFER)
    arrived = [sorted(c for c, row in record["clients"].items() if "bytes_up" in row) for record in deployed.history]
    assert arrived[:4] == [["client-0", "client-1"]] * 4
    (late,) = [k for k, clients in enumerate(arrived) if "client-2" in clients][:1]
    assert deployed.history[late]["clients"]["client-2"]["staleness"] == late == 4
    assert {record["clients"]["client-0"].get("staleness", 0) for record in deployed.history} == {0}
    assert all("accuracy" in row for row in deployed.history[-1]["clients"].values())
    assert len(deployed.history[-1]["clients"]) == 3
    assert all(not record["failures"] for record in deployed.history)


def test_a_stale_reply_counts_as_the_simulator_counts_it(run, nodes):
    """Two updates of one reply each, by hand: that of a fast site, and the slow one's to version 0, which counts half. That
    has been awaited for longer than the fast site's next reply, which comes at the same time."""
    grid = SlowGrid(nodes(small_clients(2)), {102: 1})
    words = {"sites": "client-0,client-1", "rounds": 2, **BUFFER, "asynchronous.buffer": 1}
    deployed = run(method=FedAvg(lr=0.05), grid=grid, **words, **{"asynchronous.staleness": "polynomial:1"})
    letters = [(node, kind, envelope_from_record(record)) for node, kind, record in grid.seen]
    start = next(letter.body for _, kind, letter in letters if kind == "train")
    replies = {}
    for node, kind, letter in letters:
        if kind == "reply" and letter.head.get("phase") == "local":
            replies.setdefault(node, letter.body)
    assert [sorted(record["clients"]) for record in deployed.history] == [["client-0"], ["client-0", "client-1"]]
    assert deployed.history[1]["clients"]["client-1"]["staleness"] == 1
    weights = {n: t for n, t in deployed.last.state["model"].items() if "running" not in n and "num_batches" not in n}
    for name, tensor in weights.items():
        change = replies[102].tensors["model"][name].double() - start.tensors["model"][name].double()
        expected = replies[101].tensors["model"][name].double() + 0.5 * change
        assert torch.equal(tensor, expected.to(tensor.dtype))


def test_each_reply_is_checked_and_measured_once(run, monkeypatch):
    """Also though it is checked when it comes, and used in the round."""
    checked, measured = [], []
    check, measure = Federation.reply_error, reply_validation.measure_update
    monkeypatch.setattr(Federation, "reply_error", lambda *words: checked.append(words[-1]) or check(*words))
    monkeypatch.setattr(reply_validation, "measure_update", lambda *words: measured.append(words[0]) or measure(*words))
    deployed = run(rounds=4, **BUFFER)
    used = [client for r in deployed.history for client, row in sorted(r["clients"].items()) if "bytes_up" in row]
    assert len(measured) == len(checked) == len(used) >= 8
    assert sorted(checked) == sorted(used)
    assert all("update_norm" in row for r in deployed.history for row in r["clients"].values() if "bytes_up" in row)


def test_with_all_sites_in_the_buffer_it_is_a_synchronous_run(run, nodes):
    plain = run(out="plain", **{"evaluate-every": 3})
    waits = run(out="all", **{**BUFFER, "evaluate-every": 3, "asynchronous.buffer": 3})
    words = ("update_seconds", "staleness")
    rows = [
        [{k: v for k, v in row.items() if k not in words} for _, row in sorted(r["clients"].items())]
        for r in without_durations(waits.history)
    ]
    assert rows == [[row for _, row in sorted(r["clients"].items())] for r in without_durations(plain.history)]
    state, other = waits.last.state["model"], plain.last.state["model"]
    assert all(torch.equal(state[name], other[name]) for name in other)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "method", [FedRep(lr=0.05), Ditto(lr=0.05), FedOpt(lr=0.05)], ids=["fedrep", "ditto", "fedopt"]
)
def test_private_states_are_those_of_the_last_accepted_reply(run, nodes, method):
    """Whatever a site has computed since: a task names the state that the server has accepted."""
    grid = SlowGrid(nodes(small_clients()), {103: 5, 102: 1})
    deployed = run(method=method, grid=grid, rounds=8, **BUFFER)
    assert all(not record["failures"] for record in deployed.history)
    for node in (101, 102, 103):
        heads = heads_of(grid, node)
        assert [head["state"] for head in heads] == [None, *(head["round"] for head in heads[:-1])]
        assert [head["round"] for head in heads] == sorted({head["round"] for head in heads})


@pytest.mark.thorough
def test_a_run_resumes_after_a_slow_sites_state_was_kept_long(run, nodes, tmp_path):
    """The state of a slow site's last accepted reply is there, however many rounds ago that was."""
    made = nodes(small_clients())
    words = {"method": FedRep(lr=0.05), **BUFFER, "asynchronous.buffer": 1}
    with pytest.raises(KeyboardInterrupt):
        run(grid=SlowGrid(made, {103: 12}), rounds=25, progress=_InterruptAfter(20), **words)
    resumed = run(grid=SlowGrid(made, {103: 12}), resume=True, **words)
    assert len(resumed.history) == 25
    assert not resumed.history[-1]["failures"]
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["round"] == 25
    states = sorted((tmp_path / "sites" / "client-0" / "state").glob("*/private/round-*.state"))
    assert 1 <= len(states) <= 5  # a fast site keeps few


def spoil_training(change):
    """A ClientApp whose training replies are changed."""
    good = client_app()

    def app(message, context):
        reply = good(message, context)
        if message.metadata.message_type != "train":
            return reply
        letter = change(envelope_from_record(reply.content))
        return type(reply)(envelope_to_record(letter), reply_to=message)

    return app


def not_a_number(letter):
    arrays = {
        group: {n: torch.full_like(t, torch.nan) if t.is_floating_point() else t for n, t in tree.items()}
        for group, tree in letter.body.tensors.items()
    }
    return dataclasses.replace(letter, body=Body(arrays, letter.body.scalars))


def wrong_round(letter):
    return dataclasses.replace(letter, head={**letter.head, "round": 99})


@pytest.mark.parametrize("change", few([not_a_number, wrong_round], [not_a_number]))
def test_a_bad_reply_is_a_failure_and_ends_no_run_with_a_buffer_of_one(run, change):
    def spoil(node):
        node.app = spoil_training(change)

    deployed = run(spoil, rounds=4, **{**BUFFER, "asynchronous.buffer": 1})
    failures = [failure for record in deployed.history for failure in record["failures"]]
    assert {failure["client"] for failure in failures} == {"client-0"}
    assert all("bytes_up" not in record["clients"].get("client-0", {}) for record in deployed.history)
    with pytest.raises(ClientError, match="client-0"):
        run(spoil, rounds=4, out="other", **{**BUFFER, "asynchronous.buffer": 1, "on-error": "raise"})


def test_sites_that_are_not_there(run, nodes):
    grid = MemoryGrid(nodes(small_clients()))
    push = grid.push_messages

    def leave_after_introductions(messages):
        if any(message.metadata.message_type == "train" for message in messages):
            grid.nodes[103].online = False
        return push(messages)

    grid.push_messages = leave_after_introductions
    with pytest.warns(RuntimeWarning, match="client-2.*its model is not written"):
        deployed = run(grid=grid, rounds=3, **BUFFER)
    gone = [[f["reason"] for f in r["failures"] if f["client"] == "client-2"] for r in deployed.history]
    assert any("is not connected" in reason for reasons in gone for reason in reasons)
    assert all(record["clients"]["client-0"].get("bytes_up") for record in deployed.history)


def test_nobody_at_work_ends_the_run(run, nodes):
    def hang(message, context):
        return None if message.metadata.message_type == "train" else client_app()(message, context)

    grid = MemoryGrid(nodes(small_clients()))
    for node in grid.nodes.values():
        node.app = hang
    with pytest.raises(RoundError, match=r"round 1 has 0 valid replies .* no reply within 0.3 s"):
        run(grid=grid, rounds=2, **{**BUFFER, "round-seconds": 0.3})


@pytest.mark.thorough
def test_a_site_that_hangs_is_asked_again_after_its_time(run, nodes):
    asked = []
    good = client_app()

    def hang_once(message, context):
        if message.metadata.message_type != "train":
            return good(message, context)
        asked.append(message.metadata.group_id)
        return good(message, context) if len(asked) > 1 else None

    def spoil(node):
        node.app = hang_once

    deployed = run(spoil, rounds=40, **{**BUFFER, "round-seconds": 0.2, "asynchronous.buffer": 2})
    reasons = [f["reason"] for record in deployed.history for f in record["failures"]]
    assert reasons == ["no reply within 0.2 s (round-seconds); a later one is discarded"]
    assert len(asked) > 1


REFUSED = {
    "secure": ({**BUFFER, "secure": True}, "secure=True sums the replies of one round"),
    "evaluation": ({**BUFFER, "evaluate-every": 1}, "evaluate-every = 1 evaluates after each; give evaluate-every = 3"),
    "buffer": ({**BUFFER, "asynchronous.buffer": 4}, "waits for more sites than the 3 there are"),
    "rule": ({**BUFFER, "asynchronous.rule": "fedbuf"}, "unknown asynchronous.rule 'fedbuf'"),
    "field": ({**BUFFER, "asynchronous.bufer": 1}, "bufer"),
    "speeds": ({"speeds": 1.0}, "speeds is for simulations alone"),
}


@pytest.mark.parametrize(("words", "sentence"), REFUSED.values(), ids=REFUSED)
def test_refused(run, words, sentence):
    with pytest.raises(UserError, match=sentence):
        run(**words)


def test_methods_without_a_mean_are_refused(run):
    from polyfed.algorithms import PFedLA

    with pytest.raises(UserError, match="needs a method whose server takes the mean"):
        run(method=PFedLA(lr=0.05), **BUFFER)


def test_fedasync_mixes(run, nodes):
    words = {"asynchronous": "fedasync", "asynchronous.mixing": 1.0, "evaluate-every": 100}
    deployed = run(grid=SlowGrid(nodes(small_clients()), {103: 9}), rounds=5, **words)
    assert [len([c for c, row in r["clients"].items() if "bytes_up" in row]) for r in deployed.history] == [1] * 5
