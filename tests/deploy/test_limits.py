"""What a site can make the server spend: replies that are small on the wire and large to unpack, and claims that change."""

import dataclasses
import json
import time
import tracemalloc
from types import SimpleNamespace

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from polyfed.algorithms import FedAvg, FedAvgKD, FedFomo, FedHeNN, FedRep
from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.deploy.flower.engine import FlowerEngine, envelope_from_record, envelope_to_record
from polyfed.deploy.protocol import wire
from polyfed.deploy.protocol.wire import Envelope, PackedEnvelope, pack_tensors, read_tensor_specs, unpack_tensors
from polyfed.deploy.server.reply_validation import parse_task_result
from polyfed.deploy.server.server_config import build_or_restore_server
from polyfed.simulation.engines.base import ClientTask
from polyfed.simulation.settings import Settings
from polyfed.testing import SmallNet, small_clients

from .conftest import MemoryGrid, configuration
from .test_faults import _InterruptAfter, _Told, head, instead

pytestmark = pytest.mark.slow  # .ci/run has it

HEAD = {"client": "client-0", "run": "a", "round": 1, "phase": "local"}
STATE = dict(SmallNet().state_dict())
DOWN = Message({"model": STATE}, {"lr": 0.1})


def stub_server(method):
    """What the check of a reply asks of a `DeploymentServer`."""
    return SimpleNamespace(
        algorithm=method,
        run="a",
        settings=Settings(rounds=1),
        describe_stored_state=lambda task: {"round": task.round},
    )


def engine_of(tmp_path, method=None):
    """The server's end for one site, and a task of it."""
    (tmp_path / "server.py").write_text("from polyfed.testing import SmallNet as model\n")
    words = {"sites": "client-0", "out": str(tmp_path / "run"), "file": str(tmp_path / "server.py")}
    server = dataclasses.replace(build_or_restore_server(configuration(method or FedAvg(), **words)), run="a")
    engine = FlowerEngine(None, SimpleNamespace(introductions={"client-0": {"num_examples": 20}}), server)
    return engine, ClientTask("local", 1, "client-0", DOWN, None, 1, 1)


def record(text=None, scalars=None, groups=None):
    """A reply with parts of one's own."""
    numbers = {"num_examples": 20} if scalars is None else scalars
    body = {f"#{name}": value for name, value in numbers.items()}
    body |= {f"@{name}": data for name, data in (groups or {}).items()}
    return RecordDict({"head": ConfigRecord({"json": text or json.dumps(HEAD)}), "body": ConfigRecord(body)})


def header(content, data=b""):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text + data


def empties(number):
    """So many tensors without any numbers: 71 bytes each."""
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    names = ",".join(f'"tensor-{k:012d}":{entry}' for k in range(number))
    return header(f'{{"__metadata__":{{"order":"null"}},{names}}}'.encode())


LARGE = {
    "a head of 90 MB": (lambda: record('{"metrics":{"a":[' + "[]," * 30_000_000 + "0]}}"), "at most 65536 are read"),
    "10^6 empty tensors": (lambda: record(groups={"model": empties(10**6)}), "at most 4194304 are read"),
    "30,000 empty tensors": (lambda: record(groups={"model": empties(30_000)}), "at most 20000 are read"),
    "10^6 numbers": (lambda: record(scalars={f"s{k}": 0.5 for k in range(10**6)}), "1000000 numbers and 0 groups"),
    "10^4 groups": (lambda: record(groups={f"g{k}": b"" for k in range(10_000)}), "1 numbers and 10000 groups"),
    "a list of 10^6": (
        lambda: record(scalars={"num_examples": [1] * 10**6}),
        "is a list of 1000000, which is not a number",
    ),
    "a header of 2^60": (lambda: record(groups={"model": (2**60).to_bytes(8, "little") + b"{}"}), "at most 4194304"),
    "nested": (lambda: record("[" * 60_000), "is not JSON"),
    "nested tensors": (lambda: record(groups={"model": header(b"[" * 10**6)}), "cannot be read"),
    "64 MB of another shape": (
        lambda: record(groups={"model": pack_tensors({**STATE, "head.weight": torch.zeros(2**24)})}),
        "tensor 'head.weight' has shape (16777216,), expected (3, 8)",
    ),
    "64 MB too much": (
        lambda: record(groups={"model": pack_tensors({**STATE, "more": torch.zeros(2**24)})}),
        "tensor 'more' is unexpected",
    ),
}


@pytest.mark.parametrize("case", LARGE)
def test_a_large_reply_costs_no_more_than_it_brought(tmp_path, monkeypatch, case):
    """Within a second of this process and 200 MB, of which 64 are the copy of the largest reply; nothing is unpacked."""
    made, sentence = LARGE[case]
    engine, task = engine_of(tmp_path)
    engine._server_state = {"model": STATE}
    answer = SimpleNamespace(content=made(), has_error=lambda: False)
    monkeypatch.setattr(wire, "unpack_tensors", lambda data: pytest.fail("tensors are unpacked"))
    tracemalloc.start()
    began = time.process_time()
    found = engine._parse_answer(task, engine._unpack_answer(answer))
    seconds, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sentence in found.failure.reason
    assert len(found.failure.reason) <= 300
    assert seconds < 5  # a tenth of that on a machine that does nothing else
    assert peak < 200 * 2**20


def _result(engine, task, content):
    return engine._parse_answer(task, engine._unpack_answer(SimpleNamespace(content=content, has_error=lambda: False)))


def test_every_part_of_a_reply_counts_against_the_limit(tmp_path):
    """Names, numbers, lists and texts; also records that no reply has."""
    engine, task = engine_of(tmp_path)
    limits = dataclasses.replace(engine._server.deployment, max_megabytes=1.0)
    engine._server = dataclasses.replace(engine._server, deployment=limits)
    more = {"more": ConfigRecord({"texts": ["x" * 100] * 11_000})}
    for content in (
        record(scalars={f"{k:040d}": 0.5 for k in range(30_000)}),
        record(scalars={"a": [1] * 200_000}),
        record("x" * 1_100_000),
        record(groups={"x" * 1_100_000: b""}),
        RecordDict({**record(), **more}),
    ):
        reason = _result(engine, task, content).failure.reason
        assert "above max-megabytes = 1" in reason
    small = RecordDict({**record(), "more": ConfigRecord({})})
    reason = _result(engine, task, small).failure.reason
    assert "it holds the records ['body', 'head', 'more']" in reason


@pytest.mark.parametrize("method", [FedAvg(), FedAvgKD(teacher_rounds=2), FedRep(), FedFomo(), FedHeNN()])
def test_what_methods_can_tell_from_names_is_told_before_tensors_are_read(tmp_path, monkeypatch, method):
    """FedFomo looks at the clients asked for: those few numbers are read before the model is."""
    monkeypatch.setattr(PackedEnvelope, "unpack_body", lambda packed: pytest.fail("tensors are unpacked"))
    state = {
        "fedavg": {"model": STATE}, "fedavg_kd": {"model": STATE, "rounds_left": 1}, "fedrep": {"model": STATE},
        "fedfomo": {"model": STATE, "models": [STATE, STATE, STATE]}, "fedhenn": {"public": None},
    }[type(method).__name__.lower().replace("avgkd", "avg_kd")]  # fmt: skip
    server = stub_server(method)
    task = ClientTask("local", 1, "client-0", DOWN, None, 1, 1)
    large = torch.zeros(2**20)
    fomo = {"model": STATE, "request": {"clients": torch.tensor([1, 2])}}
    several = {"nothing it knows": {"other": {"w": torch.ones(3)}}}
    if isinstance(method, FedHeNN):
        several = {
            "rows": {"representations": {"a": torch.ones(4, 4)}},
            "a type": {"representations": {"a": torch.ones(64, 4, dtype=torch.float64)}},
            "a name": {"representations": {"b": torch.ones(64, 4)}},
            "a group": {"representations": {"a": torch.ones(64, 4)}, "more": {"w": large}},
        }
    if isinstance(method, FedFomo):
        several = {
            "nobody": {**fomo, "request": {"clients": torch.tensor([1, 9])}},
            "twice": {**fomo, "request": {"clients": torch.tensor([1, 1])}},
            "many": {**fomo, "request": {"clients": torch.zeros(2**20, dtype=torch.int64)}},
            "a type": {**fomo, "request": {"clients": torch.tensor([1.0, 2.0])}},
            "more beside few": {**fomo, "request": {"clients": torch.tensor([1, 2]), "more": large}},
            "a model": {**fomo, "model": {**STATE, "head.weight": large}},
        }
    for case, wrong in several.items():
        groups = {name: pack_tensors(tree) for name, tree in wrong.items()}
        packed = PackedEnvelope(json.dumps(HEAD), {"num_examples": 20, "capacity": 9}, groups)
        with pytest.raises(UserError) as told:
            parse_task_result(task, packed, server, {"num_examples": 20}, state)
        assert len(str(told.value)) < 400, case


def test_what_two_methods_can_only_tell_from_values_is_taken_where_it_is_right():
    for method, state, reply in (
        (
            FedFomo(),
            {"model": STATE, "models": [1, 2, 3]},
            {"model": STATE, "request": {"clients": torch.tensor([1, 2])}},
        ),
        (FedHeNN(), {"public": None}, {"representations": {"a": torch.ones(2 * FedHeNN().rad_size, 4)}}),
    ):
        server = stub_server(method)
        packed = PackedEnvelope(
            json.dumps(HEAD), {"num_examples": 20}, {name: pack_tensors(tree) for name, tree in reply.items()}
        )
        found = parse_task_result(
            ClientTask("local", 1, "client-0", DOWN, None, 1, 1), packed, server, {"num_examples": 20}, state
        )
        assert found.reply.tensors.keys() == reply.keys()


def test_a_reply_over_which_a_method_stumbles_is_refused():
    """Whatever its check raises of a reply that is nothing like its own."""

    class Stumbles(FedAvg):
        def reply_spec(self, server_state, message, reply):
            return {"model": reply.tensors["model"]["w"].names_of_a_module}

    server = stub_server(Stumbles())
    task = ClientTask("local", 1, "client-0", DOWN, None, 1, 1)
    for groups, error in (({}, "KeyError"), ({"model": pack_tensors({"w": torch.ones(1)})}, "AttributeError")):
        with pytest.raises(UserError, match=rf"the method cannot check the shapes of its reply .{error}."):
            parse_task_result(
                task, PackedEnvelope(json.dumps(HEAD), {"num_examples": 20}, groups), server, {"num_examples": 20}, None
            )


@pytest.mark.parametrize(
    "content",
    [
        {"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}},
        {"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}},
        {"w": [1, 2]}, {"w": None}, [1], "w", 7, None,
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(content):
    for read in (read_tensor_specs, unpack_tensors):
        with pytest.raises(UserError, match="cannot be read"):
            read(header(content, bytes(4)))


def test_every_type_of_tensor_has_a_form():
    types = set(wire._DTYPES.values()) - {torch.uint16, torch.uint32, torch.uint64}
    for dtype in sorted(types, key=str):
        tree = {
            "b": torch.zeros(2, 3, dtype=dtype),
            "a": torch.zeros((), dtype=dtype),
            "c": torch.zeros(0, 5, dtype=dtype),
        }
        packed = pack_tensors(tree)
        assert read_tensor_specs(packed) == {name: (tuple(t.shape), dtype) for name, t in tree.items()}
        assert list(unpack_tensors(packed)) == ["b", "a", "c"]


def test_a_head_from_the_server_may_be_larger_than_one_from_a_site():
    letter = Envelope({"algorithm": "x" * 100_000})
    assert envelope_from_record(envelope_to_record(letter)).head == letter.head
    with pytest.raises(UserError, match="at most 65536 are read"):
        envelope_from_record(envelope_to_record(letter), wire.SITE_HEAD_BYTES)


# -- claims ------------------------------------------------------------------------------------------------------------


def claiming(grid, **claims):
    """After round 1 the first site comes back as another node, and says other things of itself."""

    def move(round_record):
        if round_record["round"] == 1:
            node = grid.nodes.pop(101)
            instead(head(**claims), "query")(node)
            grid.nodes[999] = node

    return _Told(move)


@pytest.mark.parametrize(
    ("claims", "sentence"),
    [
        ({"num_examples": 10**12}, "its num_examples is 1000000000000, and was 20 when the run began"),
        ({"num_examples": 21}, "its num_examples is 21, and was 20"),
        ({"architecture": "resnet"}, "its architecture is resnet, and was None"),
        ({"form": [[9], 9]}, r"its form is [[9], 9], and was None"),
        ({"task": "regression"}, "its task is regression, and was classification"),
    ],
)
def test_a_site_that_comes_back_cannot_be_another(run, nodes, claims, sentence):
    grid = MemoryGrid(nodes(small_clients()))
    with pytest.warns(RuntimeWarning, match="does not take part any more: .*its model is not written"):
        found = run(grid=grid, progress=claiming(grid, **claims), rounds=3)
    assert not found.history[0]["failures"]
    assert [f["phase"] for f in found.history[1]["failures"]] == ["evaluate"]
    failures = [f for f in found.history[2]["failures"] if f["phase"] == "local"]
    assert [f["client"] for f in failures] == ["client-0"]
    assert f"does not take part any more: {sentence}" in failures[0]["reason"]


def test_a_site_that_comes_back_as_it_was_takes_part(run, nodes):
    grid = MemoryGrid(nodes(small_clients()))
    assert not any(record["failures"] for record in run(grid=grid, progress=claiming(grid), rounds=3).history)


def test_a_resumed_run_knows_what_its_sites_said(run, nodes):
    grid = MemoryGrid(nodes(small_clients()))
    with pytest.raises(KeyboardInterrupt):
        run(grid=grid, rounds=4, progress=_InterruptAfter(2))
    instead(head(num_examples=10**12), "query")(grid.nodes[101])
    with pytest.raises(UserError, match="'client-0' does not take part: its num_examples is 1000000000000, and was 20"):
        run(grid=grid, resume=True)


def test_how_many_examples_a_site_has_is_said_at_the_beginning_or_never(run, nodes):
    """A number that comes with a reply alone could change from round to round."""
    grid = MemoryGrid(nodes(small_clients()))

    def silent(letter):
        return dataclasses.replace(letter, head={n: v for n, v in letter.head.items() if n != "num_examples"})

    instead(silent, "query")(grid.nodes[101])
    with pytest.raises(UserError, match="site 'client-0' does not report its number of examples, which fedavg needs"):
        run(grid=grid)
    found = run(grid=grid, method=FedAvg(lr=0.05, weighted=False), out="b", rounds=1)
    losses = [row["train_loss"] for row in found.history[0]["clients"].values()]
    weights = [1.0, 26.0, 32.0]
    mean = sum(w * v for w, v in zip(weights, losses, strict=True)) / sum(weights)
    assert found.history[0]["train_loss"] == pytest.approx(mean)
