"""Runs that compress: the same bits wherever clients run, after a stop and in any order; bytes as they travel; and what a
hostile reply does."""

import dataclasses
import math
from functools import cache

import pytest
import safetensors.torch
import torch
import yaml

import polyfed as pf
from polyfed.algorithms import FLHAGHN, REGISTRY, FedAvg, FedHeNN, PFedHN, PFedLA
from polyfed.core.algorithm import Message
from polyfed.core.errors import ClientError, UserError
from polyfed.core.evaluation.evaluate import evaluate_client_with_outputs
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.messages.compressors import Int8, TopK
from polyfed.core.messages.message_compression import compress_message, decompress_message
from polyfed.core.seeds import torch_generator
from polyfed.core.serialization import serialize_state
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.directory import read_config
from polyfed.testing import SmallNet, assert_runs_equal, small_clients, without_durations
from tests.hostile.test_replies import KINDS, ODD, clients_of, method_of
from tests.stopped import Stop

PUBLIC = torch.randn(60, 6, generator=torch_generator(8)), torch.zeros(60, dtype=torch.int64)
BOTH, SPARSE = {"compress": "int8", "compress_down": "int8"}, {"compress": "topk:0.2"}


def federate(method, clients=None, **options):
    more = {"public": PUBLIC} if "public_data" in method.requires else {}
    return pf.federate(clients or small_clients(), method, **{"rounds": 2, "seed": 3, "workers": 0, **more, **options})


def check_contract(tmp_path, method, clients, **how):
    """One run in this process, on a pool, and stopped and resumed; its networks are those that were evaluated."""
    words = {"rounds": 3, "clients_per_round": 2, **how}
    whole = federate(method, clients, **words)
    assert all(record["failures"] == [] for record in whole.history)
    assert_runs_equal(whole, federate(method, clients, **{**words, "workers": 2}))
    with pytest.raises(KeyboardInterrupt):
        federate(method, clients, out=tmp_path / "run", progress=Stop(1), **words)
    public = PUBLIC if "public_data" in method.requires else None
    assert_runs_equal(whole, pf.resume(tmp_path / "run", clients=clients, public=public))
    for client in clients:
        metrics, outputs = evaluate_client_with_outputs(whole.model(client.id), client, whole.federation.metrics)
        recorded = whole.history[-1]["clients"][client.id]
        if "fits_validation" in method.traits:  # validation examples are scored by networks fitted without them
            metrics = {name: value for name, value in metrics.items() if not name.startswith("val_")}
        assert {name: recorded[name] for name in metrics} == metrics
        assert torch.equal(whole.predictions(client.id).outputs, outputs["test"])
    return whole


LONG = [(name, how) for name in REGISTRY for how in (BOTH, SPARSE) if (name, how) != ("fedavg", BOTH)]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param("fedavg", BOTH, marks=pytest.mark.thorough),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG),
    ],
    ids=str,
)
def test_every_method_gives_the_same_bits_on_a_pool_and_after_a_stop(tmp_path, name, how):
    method, clients = method_of(name), clients_of(name)
    check_contract(tmp_path, method, clients, **how)


@pytest.mark.parametrize("how", [BOTH, pytest.param(SPARSE, marks=pytest.mark.thorough)], ids=str)
@pytest.mark.parametrize(
    "method", [FedAvg(lr=0.05), FedHeNN(rad_size=20, rad_batch=8), PFedLA(lr=0.05), FLHAGHN(hidden=8)]
)
@pytest.mark.one_case
def test_neither_order_nor_compression_changes_anything_it_was_given(method, how):
    public = pf.core.examples.as_examples.as_examples(PUBLIC) if "public_data" in method.requires else None
    federation = Federation({c.id: c for c in small_clients()}, method, Settings(rounds=2, seed=3, **how), public)
    engine = InProcessEngine(method, small_clients(), torch.device("cpu"), compression=federation.reply_compression)
    with exclusive_single_torch_thread_with_grad():
        start = federation.initial_checkpoint()
        before = serialize_state(start.state)
        (tasks,) = federation.build_task_blocks("local", list(federation.clients), 1, start)
        downs = [serialize_state([dict(t.message.tensors), dict(t.transmitted_message.tensors)]) for t in tasks]
        one, other = ({r.task.client: r.reply for r in engine.run(order)} for order in (tasks, tasks[::-1]))
        for client, reply in one.items():
            assert serialize_state(dict(reply.tensors)) == serialize_state(dict(other[client].tensors))
        replies = {t.client: federation.decode_reply_for_server(one[t.client], t.message) for t in tasks}
        assert not [flaw for t in tasks if (flaw := federation.reply_error(replies[t.client], start.state, t.message))]
        after = [
            method.aggregate(start.state, r, federation.server_context())
            for r in (replies, dict(reversed(replies.items())))
        ]
        assert serialize_state(after[0]) == serialize_state(after[1])
        assert downs == [serialize_state([dict(t.message.tensors), dict(t.transmitted_message.tensors)]) for t in tasks]
        assert before == serialize_state(start.state)


@pytest.mark.slow
@pytest.mark.parametrize("how", [BOTH, SPARSE], ids=str)
def test_ray_gives_the_same_bits(how):
    clients, method = [pf.Client(c.id, lambda: SmallNet(), c.train, c.test) for c in small_clients()], PFedLA(lr=0.05)
    assert_runs_equal(federate(method, clients, engine="ray", workers=2, **how), federate(method, clients, **how))


@pytest.mark.parametrize("name", ["fedavg", "pfedla"])
@pytest.mark.one_case
def test_top_k_of_all_entries_is_the_run_itself(name):
    """Only the names of the tensors are longer, by a colon."""
    plain, whole = (federate(method_of(name), compress=how) for how in (None, TopK(1)))
    sizes = ("bytes_up", "bytes_up_total")
    without = [
        [
            {k: v for k, v in {**r, "clients": {i: {**row, "bytes_up": 0} for i, row in r["clients"].items()}}.items()
             if k not in sizes}
            for r in without_durations(run.history)
        ]
        for run in (plain, whole)
    ]  # fmt: skip
    assert without[0] == without[1]
    assert 0 <= whole.history[0]["bytes_up"] - plain.history[0]["bytes_up"] < 3 * 40


def test_a_method_that_sends_differences_under_another_name_is_not_thinned_out():
    """pFedHN's `delta` has no counterpart among what went down; one byte a number it can have."""
    plain, sparse, rounded = (
        federate(PFedHN(lr=0.05, local_steps=2), compress=how, rounds=1) for how in ("none", "topk:0.1", "int8")
    )
    assert sparse.history[-1]["summary"] == plain.history[-1]["summary"] != rounded.history[-1]["summary"]
    assert rounded.history[-1]["bytes_up"] < plain.history[-1]["bytes_up"]


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def travelled(monkeypatch):
    """What went down and came up in this process, by round and client, as files."""
    seen, run = {}, InProcessEngine.run

    def watched(engine, tasks):
        for result in run(engine, tasks):
            if result.task.phase == "local":
                pair = result.task.transmitted_message, result.reply
                flat = [{f"{g}/{n}": t for g, tree in m.tensors.items() for n, t in tree.items()} for m in pair]
                seen[result.task.round, result.task.client] = [len(safetensors.torch.save(tensors)) for tensors in flat]
            yield result

    monkeypatch.setattr(InProcessEngine, "run", watched)
    return seen


@pytest.mark.parametrize("how", [BOTH, SPARSE], ids=str)
def test_bytes_are_counted_as_they_travel(travelled, how):
    run = federate(FedAvg(lr=0.05), **how)
    for record in run.history:
        for client, row in record["clients"].items():
            assert [row["bytes_down"], row["bytes_up"]] == travelled[record["round"], client]
        assert record["bytes_up"] == sum(row["bytes_up"] for row in record["clients"].values())


def test_a_large_network_travels_in_a_quarter_a_seventh_or_less():
    """The payload, of 90,000 weights: one byte instead of four; four and two for one of ten; six for one of a hundred."""
    net = torch.nn.Linear(300, 300)
    state = {name: t.detach() for name, t in net.state_dict().items()}
    up, down = Message({"model": {n: t + torch.randn(t.shape) for n, t in state.items()}}), Message({"model": state})
    plain, few = up.nbytes, 1500  # biases and names
    for how, expected in ((Int8(), 90_000), (TopK(0.1), 9_000 * 8), (TopK(0.01), 900 * 8)):
        assert expected < compress_message(up, down, how, 0).nbytes < expected + few < plain


def test_what_is_evaluated_is_what_the_next_round_sends():
    """The rounding of the server's message is drawn from its state, not from what the message is for."""
    run = federate(FedAvg(lr=0.05), **BOTH)
    federation = run.federation
    one, other = (federation.build_single_task(phase, "client-0", run.last) for phase in ("evaluate", "local"))
    assert serialize_state(dict(one.message.tensors)) == serialize_state(dict(other.message.tensors))
    assert one.compressed_message is not None
    assert serialize_state(
        dict(decompress_message(one.compressed_message, Message(), Int8()).tensors)
    ) == serialize_state(dict(one.message.tensors))
    state = run.model("client-0").state_dict()
    assert all(torch.equal(state[name], t) for name, t in one.message.tensors["model"].items())
    assert any(not torch.equal(t, run.last.state["model"][name]) for name, t in one.message.tensors["model"].items())
    again = federation.build_single_task("local", "client-1", run.last)
    assert serialize_state(dict(again.message.tensors)) == serialize_state(dict(one.message.tensors)), (
        "one global model is compressed once"
    )


# -- hostile replies ---------------------------------------------------------------------------------------------------


def entries(change):
    return lambda m: Message(
        {g: {n: change(n, t) for n, t in tree.items()} for g, tree in m.tensors.items()}, m.scalars
    )


HOSTILE = {
    "a scale that is NaN": ("int8", entries(lambda n, t: t * math.nan if n == ":scales" else t), "has the scale nan"),
    "a huge scale": ("int8", entries(lambda n, t: t * 0 + 1e30 if n == ":scales" else t), "has values beyond 1e"),
    "a scale too few": ("int8", entries(lambda n, t: t[1:] if n == ":scales" else t), "':scales' is"),
    "another shape": ("int8", entries(lambda n, t: torch.cat([t, t]) if t.dtype == torch.int8 else t), "has shape"),
    "positions out of range": (
        "topk:0.2",
        entries(lambda n, t: t + 200 if n.endswith(":topk") else t),
        "has positions",
    ),
    "positions twice": ("topk:0.2", entries(lambda n, t: t * 0 if n.endswith(":topk") else t), "has positions"),
    "values that are NaN": ("topk:0.2", entries(lambda n, t: t * math.nan if n == ":values" else t), "NaN or infinite"),
    "not compressed": (
        "topk:0.2",
        lambda m: Message({g: {"w": torch.zeros(2)} for g in m.tensors}),
        "does not say how it travels; this run has compress=topk:0.2",
    ),
    "no message": ("int8", lambda m: {"model": m}, "the reply is a dict, not a Message"),
    "lists": ("int8", entries(lambda n, t: t.tolist()), "is a list, not a tensor"),
}


@cache
def of_the_others(how):
    return without_durations(federate(FedAvg(lr=0.05), small_clients()[1:], compress=how).history)


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.one_case
def test_a_hostile_reply_costs_its_client_the_round_and_nobody_else(monkeypatch, kind):
    how, change, sentence = HOSTILE[kind]
    honest = InProcessEngine.run

    def run(engine, tasks):
        for result in honest(engine, tasks):
            first = result.task.phase == "local" and result.task.client == "client-0"
            yield dataclasses.replace(result, reply=change(result.reply)) if first else result

    expected = of_the_others(how)
    monkeypatch.setattr(InProcessEngine, "run", run)
    found = federate(FedAvg(lr=0.05), on_error="skip", compress=how)
    for record, other in zip(found.history, expected, strict=True):
        (failure,) = record["failures"]
        assert (failure["client"], failure["phase"]) == ("client-0", "reply")
        assert sentence in failure["reason"]
        assert record["train_loss"] == other["train_loss"]
        assert record["bytes_up"] == other["bytes_up"]
    with pytest.raises(ClientError, match="phase 'reply'"):
        federate(FedAvg(lr=0.05), compress=how)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
@pytest.mark.parametrize("how", ["int8", "topk:0.2"])
@pytest.mark.parametrize("name", ["fedavg", "fedhenn"])
def test_no_kind_of_hostile_reply_ends_a_run(monkeypatch, name, how):
    """All kinds that uncompressed replies are tried with, as replies of a run that compresses."""
    honest, method = InProcessEngine.run, method_of(name)
    for kind, change in KINDS.items():

        def run(engine, tasks, change=change):
            for result in honest(engine, tasks):
                first = result.task.phase == "local" and result.task.client == "client-0"
                yield dataclasses.replace(result, reply=change(result.reply)) if first else result

        monkeypatch.setattr(InProcessEngine, "run", run)
        found = federate(method, on_error="skip", compress=how, rounds=1)
        assert {f["client"] for f in found.history[0]["failures"]} <= {"client-0"}, kind
        assert math.isfinite(found.history[0]["summary"]["loss"]["mean"]), kind
        assert kind in ODD or found.history[0]["failures"], kind


@pytest.mark.parametrize("how", ["int8", "topk:0.1"])
def test_weights_that_diverged_are_told_as_without(monkeypatch, how):
    honest = FedAvg.local_update

    def diverged(self, *given):
        reply, own = honest(self, *given)
        return entries(lambda n, t: t * math.inf if t.is_floating_point() else t)(reply), own

    monkeypatch.setattr(FedAvg, "local_update", diverged)
    sentence = "NaN or infinite values; the local training diverged: lower lr or set clip_norm"
    with pytest.raises(ClientError, match=sentence):
        federate(FedAvg(lr=0.05), compress=how)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_take_texts_and_compressions():
    assert Settings() == Settings(compress="none", compress_down=None)
    assert Settings(compress=Int8(), compress_down=Int8()) == Settings(**BOTH)
    assert Settings(compress=TopK(0.1)).compress == Settings(compress="topk:1e-1").compress == "topk:0.1"
    for field in ("compress", "compress_down"):
        with pytest.raises(UserError, match="unknown compression 'zip'"):
            Settings(**{field: "zip"})
    with pytest.raises(
        UserError, match=r"compress_down must be 'none' or 'int8', got 'topk:0.1': the server does not know"
    ):
        Settings(compress_down="topk:0.1")


def test_the_configuration_records_it_and_a_run_goes_on_with_nothing_else(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        federate(FedAvg(), compress=Int8(), out=tmp_path / "run", progress=Stop(1))
    file = tmp_path / "run" / "config.yaml"
    assert (read_config(tmp_path / "run")["compress"], read_config(tmp_path / "run")["compress_down"]) == (
        "int8",
        "none",
    )
    whole = file.read_text()
    file.write_text(yaml.safe_dump({**yaml.safe_load(whole), "compress": "none"}))
    with pytest.raises(UserError, match=r"config.yaml was changed since the run began"):
        pf.resume(tmp_path / "run", clients=small_clients())
    file.write_text(whole)
    assert pf.resume(tmp_path / "run", clients=small_clients()).federation.settings.compress == "int8"


@pytest.mark.slow
def test_a_comparison_compresses_all_methods():
    words = {"tune": "none", "references": False, "parallel": 1, "quiet": True, "rounds": 1, "seeds": [0]}
    plain, small = (pf.compare(small_clients(2), ["fedavg"], compress=how, **words) for how in ("none", "int8"))
    one, other = ({n: m["runs"]["0"]["bytes"] for n, m in found.results["methods"].items()} for found in (plain, small))
    assert one["local"] == other["local"] == 0
    assert other["fedavg"] < one["fedavg"]
