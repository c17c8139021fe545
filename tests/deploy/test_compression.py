"""Compressed messages between sites: the bits and bytes of a simulation, and what a hostile site or server may send."""

import json

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FedAvg, PFedLA
from polyfed.core.algorithm import Message as Body
from polyfed.core.errors import UserError
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.messages.compressors import Int8, TopK
from polyfed.core.messages.message_compression import compress_message
from polyfed.core.serialization import serialize_state
from polyfed.deploy.flower import pending_requests
from polyfed.deploy.flower.apps import run_deployment
from polyfed.deploy.flower.engine import envelope_from_record
from polyfed.deploy.flower.records import parse_flower_record
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection, clip_and_add_noise
from polyfed.deploy.protocol import wire
from polyfed.deploy.server.server import DeploymentServer
from polyfed.deploy.server.server_config import build_or_restore_server
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.monitoring.progress import SilentProgress
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.testing import small_clients, without_durations

from .conftest import ONE, MemoryGrid, configuration
from .test_faults import _InterruptAfter, instead
from .test_parity import assert_same, cases, deployed

BOTH, SPARSE = {"compress": "int8", "compress-down": "int8"}, {"compress": "topk:0.2"}
LONG = [
    ("fedavg", SPARSE),
    ("pfedla", SPARSE),
    *((name, how) for name in ("flha_ghn", "fedhenn", "ca_fedpnas") for how in (BOTH, SPARSE)),
]


def simulated(clients, method, how, public=None, rounds=3):
    words = {key.replace("-", "_"): value for key, value in how.items()}
    return pf.federate(clients, method, rounds=rounds, seed=3, public=public, workers=0, **words)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "how"),
    [("fedavg", BOTH), *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG)],
    ids=str,
)
def test_a_deployment_that_compresses_gives_the_bits_and_bytes_of_a_simulation(tmp_path, nodes, name, how):
    """Bytes are part of the history; they are those of the messages on the wire, and those that sites write down."""
    clients, method, file, public = cases(tmp_path)[name]
    run, grid = deployed(tmp_path, nodes, clients, method, file, rounds=2, **how)
    assert_same(tmp_path, run, simulated(clients, method, how, public, rounds=2))
    sizes = {"down": [], "up": []}
    for _, kind, record in grid.seen:
        letter = envelope_from_record(record)
        if kind == "train" or (kind == "reply" and letter.head.get("phase") == "local"):
            sizes["down" if kind == "train" else "up"].append(letter.body.nbytes)
            wire = sum(map(len, parse_flower_record(record)[2].values()))
            headers = 200 + 12 * sum(
                len(tree) for tree in letter.body.tensors.values()
            )  # of files by group; their order
            assert abs(wire - letter.body.nbytes) < headers * max(1, len(letter.body.tensors))
    for way, seen in sizes.items():
        told = [row[f"bytes_{way}"] for r in run.history for row in r["clients"].values() if f"bytes_{way}" in row]
        assert sorted(seen) == sorted(told)
    (file,) = (tmp_path / "sites" / clients[0].id / "state").glob("*/metrics.jsonl")
    own = [json.loads(line) for line in file.read_text().splitlines()]
    for way in sizes:
        assert [r[f"bytes_{way}"] for r in own if r["phase"] == "local"] == [
            r["clients"][clients[0].id][f"bytes_{way}"] for r in run.history
        ]


def test_without_compression_no_letter_says_a_word_of_it(tmp_path, nodes):
    _, grid = deployed(tmp_path, nodes, small_clients(2), FedAvg(lr=0.05), ONE, rounds=1)
    assert not [record for _, _, record in grid.seen if "compress" in record["head"]["json"]]


def test_a_site_rounds_after_it_has_clipped(tmp_path, nodes):
    """What leaves is made of what protection lets out, not the other way round."""
    clients, method = small_clients(2), FedAvg(lr=0.5)
    _, grid = deployed(
        tmp_path, lambda c: nodes(c, **{"clip-norm": 0.1}), clients, method, ONE, rounds=1, compress="int8"
    )
    federation = Federation({c.id: c for c in clients}, method, Settings(rounds=1, seed=3, compress="int8"))
    with exclusive_single_torch_thread_with_grad():
        (tasks,) = federation.build_task_blocks("local", list(federation.clients), 1, federation.initial_checkpoint())
        results = list(InProcessEngine(method, clients, torch.device("cpu")).run(tasks))
    letters = {
        one.head["client"]: one
        for _, kind, r in grid.seen
        if kind == "reply" and (one := envelope_from_record(r)).body.tensors
    }
    for result in results:
        let_out = clip_and_add_noise(result.reply, result.task.message, ReplyProtection(clip_norm=0.1))
        expected = compress_message(let_out, result.task.message, Int8(), result.task.reply_seed)
        assert serialize_state(dict(letters[result.task.client].body.tensors)) == serialize_state(
            dict(expected.tensors)
        )


# -- a hostile site ----------------------------------------------------------------------------------------------------


def entries(change):
    """The letter with other entries in each group."""

    def changed(letter):
        groups = {g: {n: change(n, t) for n, t in tree.items()} for g, tree in letter.body.tensors.items()}
        return type(letter)(letter.head, Body(groups, letter.body.scalars))

    return changed


def only(group):
    return lambda letter: type(letter)(letter.head, Body({"model": group}, letter.body.scalars))


WRONG = {
    "a scale that is NaN": (
        "int8",
        entries(lambda n, t: t * float("nan") if n == ":scales" else t),
        "has the scale nan",
    ),
    "more scales": ("int8", entries(lambda n, t: torch.cat([t, t]) if n == ":scales" else t), "':scales' is"),
    "positions out of range": ("topk:0.2", entries(lambda n, t: t + 200 if n.endswith("topk") else t), "has positions"),
    "positions twice": ("topk:0.2", entries(lambda n, t: t * 0 if n.endswith("topk") else t), "has positions"),
    "another number": ("topk:0.2", entries(lambda n, t: t[1:] if n.endswith("topk") else t), "has positions of shape"),
    "a larger tensor": (
        "int8",
        only({"w:float32": torch.ones(900, 900, dtype=torch.int8), ":scales": torch.ones(1)}),
        "",
    ),
    "of nothing": ("topk:0.2", only({"w:topk": torch.zeros(9, dtype=torch.uint8), ":values": torch.ones(9)}), "'topk'"),
    "no mark": ("int8", only({"w": torch.ones(3)}), "does not say how it travels; this run has compress=int8"),
    "top-k, asked was int8": ("int8", only({"w:topk": torch.zeros(9, dtype=torch.uint8)}), "does not travel as 'topk'"),
}


FAST = ("a scale that is NaN", "positions out of range")


@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in WRONG]
)
def test_a_hostile_reply_costs_the_round_of_that_site_only(run, kind):
    how, change, sentence = WRONG[kind]
    found = run(instead(change), rounds=1, compress=how)
    (failure,) = found.history[0]["failures"]
    assert failure["client"] == "client-0"
    assert sentence in failure["reason"]
    others = pf.federate(small_clients()[1:], FedAvg(lr=0.05), rounds=1, seed=3, workers=0, compress=how)
    assert found.history[0]["train_loss"] == others.history[0]["train_loss"]


def test_the_form_of_a_compressed_reply_is_checked_before_its_tensors_are_read(run, monkeypatch):
    """Four bytes for one: a reply that the method does not take is not unpacked."""
    read, unpack = [], wire.unpack_tensors
    change = WRONG["a larger tensor"][1]

    def spoil(node):
        instead(change)(node)
        monkeypatch.setattr(wire, "unpack_tensors", lambda data: read.append(len(data)) or unpack(data))

    found = run(spoil, rounds=1, compress="int8")
    assert "is missing" in found.history[0]["failures"][0]["reason"]
    assert max(read, default=0) < 900 * 900


# -- a hostile server --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "sentence"),
    {
        "an unknown compression": "unknown compression 'zip'",
        "a scale that is NaN": "ValueError: group 'model': tensor 'body.0.weight' has the scale nan",
    }.items(),
)
def test_a_site_refuses_what_it_cannot_open(tmp_path, nodes, monkeypatch, kind, sentence):
    honest, post = DeploymentServer.build_task_head, pending_requests.envelope_to_record
    if kind == "an unknown compression":
        monkeypatch.setattr(
            DeploymentServer, "build_task_head", lambda self, task: {**honest(self, task), "compress_down": "zip"}
        )
    else:
        bad = entries(lambda n, t: t * float("nan") if n == ":scales" else t)
        monkeypatch.setattr(
            pending_requests, "envelope_to_record", lambda le: post(bad(le) if le.head.get("phase") == "local" else le)
        )
    words = {"rounds": 1, "on-error": "skip", **BOTH}
    with pytest.raises(pf.RoundError, match=sentence):
        deployed(tmp_path, nodes, small_clients(2), FedAvg(), ONE, **words)


# -- configuration -----------------------------------------------------------------------------------------------------


def test_the_configuration_of_a_server_takes_both_directions():
    words = {"sites": "north,south", "out": "run", "rounds": 3, "algorithm.name": "local"}
    assert build_or_restore_server({**words, **BOTH}).settings == Settings(
        rounds=3, on_error="skip", compress="int8", compress_down="int8"
    )
    assert build_or_restore_server({**words, "compress": "topk:0.01"}).settings.compress == str(TopK(0.01))
    with pytest.raises(UserError, match="unknown compression 'zip'"):
        build_or_restore_server({**words, "compress": "zip"})


@pytest.mark.slow
def test_a_deployment_goes_on_as_it_compressed(tmp_path, nodes):
    """Stopped after a round, and resumed with nothing said of compression."""
    clients, method = small_clients(2), PFedLA(lr=0.05)
    (tmp_path / "server.py").write_text(ONE)
    words = {"sites": "client-0,client-1", "out": str(tmp_path / "run"), "file": str(tmp_path / "server.py")}
    grid = MemoryGrid(nodes(clients))
    with pytest.raises(KeyboardInterrupt):
        run_deployment(grid, configuration(method, **words, **SPARSE), _InterruptAfter(1))
    again = run_deployment(grid, {**words, "resume": True, "allow-disclosure": True}, SilentProgress())
    assert without_durations(again.history) == without_durations(simulated(clients, method, SPARSE).history)
