"""Sites that fail, lie or are not there, and a server that stops: each is caused here."""

import dataclasses
import re
import time

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

import polyfed as pf
from polyfed.algorithms import FedAvg, Local, PFedLA
from polyfed.core.algorithm import Message as Body
from polyfed.core.errors import ClientError, RoundError, UserError
from polyfed.deploy.flower.apps import client_app
from polyfed.deploy.flower.engine import envelope_from_record, envelope_to_record
from polyfed.deploy.protocol.wire import Envelope
from polyfed.simulation.engines.base import Engine
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.testing import small_clients, without_durations
from polyfed.testing.algorithm_contract import _InterruptAfter

from .conftest import NAMES, MemoryGrid
from .test_parity import models_of


def instead(change, kind="train"):
    """A ClientApp whose replies to messages of a kind are `change(letter)`, a letter or a record."""

    def spoil(node):
        good = client_app()

        def app(message, context):
            reply = good(message, context)
            if message.metadata.message_type != kind:
                return reply
            new = change(envelope_from_record(reply.content))
            if new is None or isinstance(new, Error):
                return new and Message(new, reply_to=message)
            return Message(envelope_to_record(new) if isinstance(new, Envelope) else new, reply_to=message)

        node.app = app

    return spoil


def tensors(letter, change):
    """The letter with other tensors."""
    arrays = {
        group: {name: change(tensor) for name, tensor in tree.items()} for group, tree in letter.body.tensors.items()
    }
    return dataclasses.replace(letter, body=Body(arrays, letter.body.scalars))


def head(**words):
    return lambda letter: dataclasses.replace(letter, head={**letter.head, **words})


def scalars(**words):
    return lambda letter: dataclasses.replace(letter, body=Body(letter.body.tensors, {**letter.body.scalars, **words}))


def hostile(data, text="{}"):
    array = Array(dtype="uint8", shape=(1,), stype="numpy.ndarray", data=data)
    return RecordDict(
        {"head": ConfigRecord({"json": text}), "body": ConfigRecord({}), "arrays": ArrayRecord({"model": array})}
    )


GARBAGE = RecordDict(
    {
        "head": ConfigRecord({"json": "[]"}),
        "body": ConfigRecord({}),
        "arrays": ArrayRecord({"model": Array(torch.zeros(3).numpy())}),
    }
)
BROKEN = {
    "nan": (lambda le: tensors(le, lambda t: t * float("nan") if t.is_floating_point() else t), "NaN or infinite"),
    "shape": (lambda le: tensors(le, lambda t: t[..., None]), "has shape"),
    "type": (lambda le: tensors(le, lambda t: t.double()), "has dtype torch.float64"),
    "missing": (lambda le: dataclasses.replace(le, body=Body({"model": {}}, le.body.scalars)), "is missing"),
    "scalar": (lambda le: dataclasses.replace(le, body=Body(le.body.tensors, {"num_examples": -1.0})), "num_examples"),
    "list": (
        lambda le: dataclasses.replace(le, body=Body(le.body.tensors, {"num_examples": [1.0, 2.0]})),
        "num_examples",
    ),
    "oversized": (lambda le: tensors(le, lambda t: torch.zeros(400_000)), "above max-megabytes = 1"),
    "another's id": (head(client="client-2"), "answers for client 'client-2', expected 'client-0'"),
    "another run": (head(run="0123"), "answers for run '0123'"),
    "a former round": (head(round=0), "answers for round 0"),
    "a failure": (head(failure="OutOfMemoryError"), "OutOfMemoryError"),
    "metrics": (head(metrics={"accuracy": "high"}), "its metrics are not scores"),
    "names of metrics": (head(metrics={"bytes_up": -1e12}), "its metrics are not scores"),
    "a huge metric": (head(metrics={"accuracy": 1.7e308}), "its metrics are not scores"),
    "a huge whole metric": (head(metrics={"accuracy": 10**400}), "its metrics are not scores"),
    "a huge scalar": (scalars(train_loss=1.7e308), "which is not a number up to 1e+12"),
    "a share of all": (scalars(num_examples=10**12), "reports num_examples 1000000000000, but reported 20"),
    "nested": (lambda le: hostile(b"", "[" * 200_000), "not a message of polyfed"),
    "no array": (lambda le: hostile(b""), "not a message of polyfed"),
    "an archive": (lambda le: hostile(b"PK\x03\x04" + bytes(99)), "not a message of polyfed"),
    "a header": (
        lambda le: hostile(
            b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (%d,), }" % 10**15
        ),
        "not a message of polyfed",
    ),
    "escapes": (head(failure="\x1b[2K\x1b[1Aall is well"), "[2K [1Aall is well"),
    "line breaks": (head(failure="a\nround 3 is fine\n" * 99), "a round 3 is fine a round 3 is fine"),
    "dies": (lambda le: Error(8, "the process ended"), "Flower reports error 8: the process ended"),
    "garbage": (lambda le: GARBAGE, "not a message of polyfed"),
    "empty": (lambda le: RecordDict({}), "not a message of polyfed"),
    "hangs": (lambda le: None, "no reply within 0.3 s"),
}
DIFFERENT = ("nan", "shape", "oversized", "another's id", "a failure", "metrics", "a header", "escapes", "dies")


@pytest.fixture(scope="module")
def without_the_first():
    """The history of the same run of the other two sites."""
    return pf.federate(small_clients()[1:], FedAvg(lr=0.05), rounds=1, seed=3, workers=0).history


@pytest.mark.parametrize(
    "fault", [f if f in DIFFERENT else pytest.param(f, marks=pytest.mark.thorough) for f in BROKEN]
)
def test_a_reply_that_cannot_be_used_costs_the_round_of_that_site_only(run, fault, without_the_first):
    change, sentence = BROKEN[fault]
    words = {"round-seconds": 0.3 if fault == "hangs" else 60.0, "max-megabytes": 1.0}
    found = run(instead(change), rounds=1, **words)
    for record in found.history:
        (failure,) = record["failures"]
        assert failure["client"] == "client-0"
        assert sentence in failure["reason"]
        assert set(record["clients"]) == {"client-0", "client-1", "client-2"}
    assert [r["train_loss"] for r in found.history] == [r["train_loss"] for r in without_the_first], "it was averaged"


def test_a_reply_that_flower_cannot_read_takes_no_other_with_it(run, nodes, caplog):
    class Breaks(MemoryGrid):
        def pull_messages(self, message_ids):
            for number in set(message_ids) & set(self._replies):
                reply = self._replies[number]
                if reply.metadata.src_node_id == 101 and '"phase": "local"' in reply.content["head"]["json"]:
                    del self._replies[number]
                    raise ValueError("Error parsing message")
            return super().pull_messages(message_ids)

    found = run(grid=Breaks(nodes(small_clients())), rounds=1)  # at once, not after round-seconds
    assert [failure["client"] for failure in found.history[0]["failures"]] == ["client-0"]
    assert "its reply cannot be read" in found.history[0]["failures"][0]["reason"]
    assert "cannot be read: ValueError: Error parsing message" in caplog.text


def anew(node, reply):
    """A SuperNode that is started anew while it has a message, before or after it has replied."""
    good = client_app()

    def app(message, context):
        answer = good(message, context)
        if message.metadata.message_type != "train":
            return answer
        node.since += "1"
        return answer if reply else None

    node.app = app


@pytest.mark.parametrize("reply", [False, True], ids=["before it replied", "after it"])
def test_a_supernode_that_starts_anew_is_not_waited_for(run, nodes, monkeypatch, reply):
    """It may be back before Flower notices that it was away, and knows nothing of the message."""
    monkeypatch.setattr("polyfed.deploy.flower.engine._NODE_CHECK_SECONDS", 0.1)
    grid = MemoryGrid(nodes(small_clients()))
    anew(next(iter(grid.nodes.values())), reply)
    began = time.monotonic()
    found = run(grid=grid, rounds=1, **{"round-seconds": 60.0})
    assert time.monotonic() - began < 30
    assert [failure["client"] for failure in found.history[0]["failures"]] == ([] if reply else ["client-0"])
    if not reply:
        assert "restarted, before it replied" in found.history[0]["failures"][0]["reason"]


@pytest.mark.slow
def test_sites_that_hang_share_one_limit_of_time(run, nodes, monkeypatch):
    """Messages of any size go to all sites at once."""
    monkeypatch.setattr(Engine, "max_block_bytes", 1)
    grid = MemoryGrid(nodes(small_clients()))
    for node in list(grid.nodes.values())[:2]:
        instead(lambda letter: None)(node)
    began = time.monotonic()
    found = run(grid=grid, method=PFedLA(lr=0.05), rounds=1, **{"round-seconds": 3.0})
    assert len(found.history[0]["failures"]) == 2
    assert time.monotonic() - began < 5.9


def test_a_late_reply_is_discarded(run, nodes):
    """It comes when the next round has begun, and is not asked for any more."""
    kept = []
    grid = MemoryGrid(nodes(small_clients()))
    good = client_app()

    def late(message, context):
        reply = good(message, context)
        if message.metadata.message_type != "train":
            return reply
        if kept:
            grid._replies.update({kept[-1][0]: kept[-1][1]})
        kept.append((message.metadata.message_id, reply))
        return None

    grid.nodes[101].app = late
    found = run(grid=grid, rounds=3, **{"round-seconds": 0.3})
    phases = [[failure["phase"] for failure in record["failures"]] for record in found.history]
    assert phases == [["evaluate", "local"]] * 2 + [["local"]], "what rides on a message is as late as the message"
    assert len(grid._replies) == 2, "a late reply was taken"


@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_a_site_that_raises_is_left_out_and_keeps_its_texts(run, phase):
    def spoil(node):
        good = client_app()

        def app(message, context):
            export = '"phase": "export"' in message.content["head"]["json"]
            if message.metadata.message_type == phase and not export:
                context.node_config["site"] = "/nowhere/patient-4711.py"
            return good(message, context)

        node.app = app

    found = run(spoil, rounds=2)
    reasons = [failure["reason"] for record in found.history for failure in record["failures"]]
    assert reasons
    assert all("refuses: it cannot start (the reason is in its log)" in reason for reason in reasons)
    assert "4711" not in str(found.history)


def test_too_few_replies_end_the_run(run):
    with pytest.raises(RoundError, match="has 2 valid replies of 3, min_replies is 3"):
        run(instead(BROKEN["nan"][0]), **{"min-replies": 3})


def test_a_site_that_is_not_connected_is_left_out_and_taken_back(run, nodes):
    grid = MemoryGrid(nodes(small_clients()))

    def leave(record):
        grid.nodes[101].online = record["round"] != 1

    found = run(grid=grid, progress=_Told(leave), rounds=3)  # gone when round 3 begins, with which round 2 is evaluated
    assert [[f["phase"] for f in record["failures"]] for record in found.history] == [[], ["evaluate"], ["local"]]
    assert "is not connected" in found.history[1]["failures"][0]["reason"]


def test_a_site_that_comes_back_as_another_node_is_found(run, nodes):
    grid = MemoryGrid(nodes(small_clients()))

    def move(record):
        if record["round"] == 1:
            grid.nodes[999] = grid.nodes.pop(101)

    found = run(grid=grid, progress=_Told(move), rounds=3, **{"round-seconds": 5.0})
    assert not found.history[2]["failures"]


class _Told(SilentProgress.__base__):
    """Calls something after each round."""

    def __init__(self, call):
        self._call = call

    def finish_round(self, record):
        self._call(record)

    def start(self, title, rounds, rounds_done): ...

    def show_clients_done(self, phase, clients_done, total): ...

    def say(self, sentence): ...

    def stop(self): ...


def test_who_claims_to_be_another_site_stays_out(run, nodes, caplog):
    """By its registered name; and, without one, because the other is there."""
    grid = MemoryGrid(nodes(small_clients()))
    thief = dataclasses.replace(grid.nodes[101], name="client-2", config=dict(grid.nodes[101].config))
    found = run(grid=MemoryGrid({**grid.nodes, 900: thief}), rounds=1)
    assert not found.history[0]["failures"]
    assert "node 900 says that it is 'client-0', but is registered as 'client-2'" in caplog.text
    nameless = {900: dataclasses.replace(thief, name=""), **grid.nodes}
    del nameless[101]
    with pytest.raises(UserError, match="these sites are missing: client-0"):
        run(grid=MemoryGrid(nameless), out="b", **{"join-seconds": 0.2})
    assert "node 900 says that it is 'client-0', but is registered as ''; it stays out" in caplog.text
    twice = {900: dataclasses.replace(thief, name="client-0"), **grid.nodes}
    run(grid=MemoryGrid(twice), out="c", rounds=1)
    assert "which node 900 is; it stays out" in caplog.text or "which node 101 is; it stays out" in caplog.text


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ({"num_examples": -3}, "reports -3 examples, which is not a count"),
        ({"num_examples": "many"}, "reports many examples"),
        ({"task": ["regression"]}, "must have one task"),
    ],
)
def test_a_site_that_introduces_itself_with_nonsense_is_named(run, answer, sentence):
    with pytest.raises(UserError, match=sentence):
        run(instead(head(**answer), "query"))


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda letter: GARBAGE, "not a message of polyfed"),
        (head(refused="x" * 2**16), "its introduction has 65... bytes; at most 65536 are read"),
    ],
)
def test_a_site_that_introduces_itself_with_garbage_is_missing(run, caplog, answer, sentence):
    with pytest.raises(UserError, match="these sites are missing: client-0"):
        run(instead(answer, "query"), **{"join-seconds": 0.3})
    assert re.search(rf"node 101 \(client-0\) stays out: {sentence}", caplog.text)


def test_strangers_stay_out(run, nodes, caplog):
    found = run(grid=MemoryGrid(nodes([*small_clients(), dataclasses_client("stranger")])), rounds=1)
    assert "'stranger', which is not among the sites" in caplog.text
    assert list(found.history[0]["clients"]) == NAMES.split(",")


def dataclasses_client(name):
    first = small_clients(1)[0]
    return pf.Client(name, first.model, first.train, first.test)


def test_a_reply_that_comes_twice_counts_once(run, nodes):
    class Repeats(MemoryGrid):
        replies = ()

        def pull_messages(self, message_ids):
            new = super().pull_messages(message_ids)
            self.replies = (*self.replies, *new)
            return [*new, *self.replies]  # of former rounds too

    found, once = (run(grid=kind(nodes(small_clients())), out=kind.__name__) for kind in (Repeats, MemoryGrid))
    assert without_durations(found.history) == without_durations(once.history)


@pytest.mark.parametrize("when", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_to_the_same_end(tmp_path, run, nodes, when):
    """The sites have trained a round further than the server's checkpoint: their private state of that round is used."""
    method = PFedLA(lr=0.05)
    whole = pf.federate(small_clients(), method, rounds=4, seed=3, workers=0)
    grid = MemoryGrid(nodes(small_clients()))
    with pytest.raises(KeyboardInterrupt):
        run(grid=grid, method=method, rounds=4, progress=_InterruptAfter(when), **{"checkpoint-every": 2})
    for folder in (tmp_path / "run" / "checkpoint").glob(
        "round-*"
    ):  # as after kill -9: what was saved on the way out is lost
        if int(folder.name.removeprefix("round-")) % 2:
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    found = run(grid=grid, method=method, resume=True, file="")  # the server's file is that of the run
    assert without_durations(found.history) == without_durations(whole.history)
    ours, theirs = models_of(tmp_path, "client-1"), whole.model("client-1").state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_site_that_lost_its_private_state_says_so(tmp_path, run, nodes):
    grid = MemoryGrid(nodes(small_clients()))
    with pytest.raises(KeyboardInterrupt):
        run(grid=grid, method=Local(lr=0.05), rounds=4, progress=_InterruptAfter(2), **{"on-error": "raise"})
    for file in (tmp_path / "sites" / "client-0").glob("state/*/private/*"):
        file.unlink()
    with pytest.raises(ClientError, match=r"state after round 2 is lost: .*/round-000002.state cannot be read"):
        run(grid=grid, resume=True)


def test_a_site_with_other_data_cannot_go_on(run, nodes):
    with pytest.raises(KeyboardInterrupt):
        run(grid=MemoryGrid(nodes(small_clients())), rounds=4, progress=_InterruptAfter(2))
    changed = [pf.Client(c.id, c.model, (c.train.x + 1, c.train.y), c.test) for c in small_clients()]
    with pytest.raises(UserError, match="'client-0' does not take part: its data or network are not those with which"):
        run(grid=MemoryGrid(nodes(changed)), resume=True)


def test_polyfed_resume_says_how_to_go_on_with_a_deployment(tmp_path, run):
    run(rounds=1)
    with pytest.raises(UserError, match="is of real sites: go on with it by polyfed flower run"):
        pf.resume(tmp_path / "run")


def test_other_sites_cannot_go_on_with_a_run(run, nodes):
    run(rounds=1)
    with pytest.raises(UserError, match="is of client-0, client-1, client-2, not of client-0"):
        run(resume=True, sites="client-0")
