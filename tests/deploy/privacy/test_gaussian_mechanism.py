"""What leaves a site: the objects that travel, what is disclosed, and clipping and noise against what is known of them."""

import json
import math
import secrets

import numpy as np
import pytest
import torch
from scipy.stats import norm

import polyfed as pf
from polyfed.algorithms import FLHAGHN, REGISTRY, FedAvg
from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.methods.declared_words import CONSENT
from polyfed.core.nn.module_cache import cached_module
from polyfed.core.state_dict import iter_tensors
from polyfed.deploy.flower.engine import envelope_from_record
from polyfed.deploy.flower.records import parse_flower_record
from polyfed.deploy.privacy import gaussian_mechanism
from polyfed.deploy.privacy.accountant import compute_epsilon
from polyfed.deploy.privacy.gaussian_mechanism import GaussianNoise, ReplyProtection, clip_and_add_noise
from polyfed.deploy.protocol.wire import PROTOCOL, Envelope
from polyfed.deploy.site.process.node_config import build_site
from polyfed.graphs.catalogue import LayerCatalogue
from polyfed.graphs.client_graph import graph_of_client
from polyfed.testing import SmallNet, example_of, small_clients
from tests.few_cases import few

from ..conftest import ONE
from ..test_parity import deployed, image_clients


@pytest.mark.thorough
def test_traffic_of_flha_ghn_has_the_same_form_for_sites_with_different_networks(tmp_path, nodes):
    """Every object of three rounds is recorded: names, shapes and types are the same in both directions whatever the
    network of the site, and no bytes of a site's files are among them. (The values do tell its layers: heads of layer types
    that it lacks come back as they went, `tests/algorithms/hypernetworks/test_flha_privacy.py`. So it needs consent.)"""
    clients = image_clients(("flha_arch1", "flha_arch2"), number=2)
    assert len({graph_of_client(client).layer_types for client in clients}) > 1, "the sites have the same network"
    LayerCatalogue.from_graphs(map(graph_of_client, clients)).write_yaml(tmp_path / "catalogue.yaml")
    method = FLHAGHN(lr=0.05, hidden=8, graph="layers_and_norms", catalogue=str(tmp_path / "catalogue.yaml"))
    grid = deployed(tmp_path, nodes, clients, method)[1]
    seen = {}
    for node, kind, record in grid.seen:
        letter = envelope_from_record(record)
        form = {g: {n: (t.shape, t.dtype) for n, t in tree.items()} for g, tree in letter.body.tensors.items()}
        head = {name: type(value) for name, value in letter.head.items()}
        head |= {f"evaluation.{name}": type(value) for name, value in letter.head.get("evaluation", {}).items()}
        seen.setdefault(node, []).append((kind, head, form, sorted(letter.body.scalars)))
    first, *others = seen.values()
    assert len(first) == 2 * (1 + 3 + 1 + 1), "a message was not recorded"  # introduce, local, evaluate, export
    assert all(other == first for other in others)
    assert any(form for _, _, form, _ in first)
    everything = b"".join(
        bytes(str(dict(record["head"])), "utf-8") + b"".join(parse_flower_record(record)[2].values())
        for _, _, record in grid.seen
    )
    for client in clients:
        for word in (b"site.py", b"clients_of_a_test", b"state-dir", client.model.name.encode(), b"conv1"):
            assert word not in everything
        for tensor in (client.train.x, client.train.y, client.test.x):
            assert tensor.numpy().tobytes()[:64] not in everything


@pytest.mark.parametrize(("weighted", "scalars"), few([(True, ["num_examples"]), (False, [])], [(False, [])]))
def test_nothing_is_told_but_what_the_method_needs(tmp_path, nodes, weighted, scalars):
    """Unless `disclose` names it: no metrics, no losses, no times; the server's table says so."""

    def sparing(clients):
        return nodes(clients, disclose="")

    run, grid = deployed(tmp_path, sparing, small_clients(), FedAvg(lr=0.05, weighted=weighted), ONE)
    replies = [envelope_from_record(record) for _, kind, record in grid.seen if kind == "reply"]
    assert {name for letter in replies for name in letter.body.scalars} == set(scalars)
    heads = [part for letter in replies for part in (letter.head, letter.head.get("evaluation", {}))]
    assert all(not head.get("metrics") and not head.get("seconds") for head in heads)
    assert any("num_examples" in letter.head for letter in replies) == weighted
    assert run.table()[0]["accuracy"] is None
    (kept,) = (tmp_path / "sites" / "client-0" / "state").glob("*/metrics.jsonl")
    records = [json.loads(line) for line in kept.read_text().splitlines()]
    assert any("accuracy" in record for record in records), "the site does not have its own metrics either"
    local = [record for record in records if record["phase"] == "local"]
    for way in ("bytes_down", "bytes_up"):
        assert [record[way] for record in local] == [record["clients"]["client-0"][way] for record in run.history]


@pytest.mark.parametrize("name", [name for name, method in REGISTRY.items() if not method.discloses & CONSENT])
def test_methods_that_need_no_consent_send_no_weights(name):
    """What they reply is looked at: nothing has the name, or the shape and values, of a weight before or after training."""
    clients = image_clients(("flha_arch1",), number=2)
    noise = torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    run = pf.federate(clients, example_of(name).build(), rounds=1, public=noise, workers=0)
    federation = run.federation
    for client in clients:
        down = federation.algorithm.dispatch(run.last.state, federation.client_info(client.id, 2))
        own = run.last.client_states[client.id]
        reply, after = federation.algorithm.local_update(down, own, client, 5)
        weights = [t for state in (own, after) for t in iter_tensors(state) if t.is_floating_point() and t.numel() > 1]
        sent = list(iter_tensors(reply.tensors))
        assert not [w for w in weights for t in sent if t.shape == w.shape and torch.allclose(t, w)], "a weight is sent"
        assert not {n for tree in reply.tensors.values() for n in tree} & set(
            cached_module(client.model).module.state_dict()
        )
    assert name in ("local", "fedhenn"), "another method says that it needs no consent: is that so?"


def message(value, shape=(30, 40)):
    return Message({"model": {"w": torch.full(shape, value), "steps": torch.tensor(3)}}, {"num_examples": 5.0})


def test_clipping_bounds_the_change_and_keeps_its_direction():
    down, up = message(1.0), message(3.0)
    length = 2 * math.sqrt(1200)
    for bound in (0.5, 10.0, 2 * length):
        sent = clip_and_add_noise(up, down, ReplyProtection(clip_norm=bound)).tensors["model"]["w"]
        change = (sent - 1.0).double()
        assert float(change.norm()) == pytest.approx(min(bound, length), rel=1e-4)
        assert torch.allclose(change, change.mean() * torch.ones_like(change), atol=1e-6)
    assert clip_and_add_noise(up, down, ReplyProtection()) is up


def test_noise_is_gaussian_with_the_deviation_that_is_promised():
    """10^6 draws: the mean within 5 standard errors of 0, the deviation within 1 %, and a Kolmogorov distance below the
    critical value at 1e-6; another seed each time."""
    down = up = message(0.0, (1000, 1000))
    protection = ReplyProtection(clip_norm=0.5, noise_multiplier=3.0)
    sent = clip_and_add_noise(up, down, protection).tensors["model"]["w"].double()
    other = clip_and_add_noise(up, down, protection).tensors["model"]["w"].double()
    assert abs(float(sent.mean())) < 5 * 1.5 / 1000
    assert float(sent.std()) == pytest.approx(1.5, rel=0.01)
    ordered, n = sent.flatten().sort().values.numpy(), sent.numel()
    cumulative = norm.cdf(ordered / 1.5)
    steps = torch.arange(1, n + 1).double().numpy() / n
    assert max(abs(cumulative - steps)) < math.sqrt(-0.5 * math.log(1e-6 / 2) / n)
    assert not torch.equal(sent, other)
    assert abs(float((sent * other).mean())) < 5 * 1.5**2 / 1000, "the noise of two messages is not independent"


def test_whole_numbers_are_not_covered_and_refused():
    protection = ReplyProtection(clip_norm=1.0, noise_multiplier=1.0)
    kept = clip_and_add_noise(Message({"model": {"steps": torch.tensor(9)}}), message(0.0), protection)
    assert kept.tensors["model"]["steps"] == 3, "a counter goes up, which tells how many batches there are"
    up = Message({"request": {"clients": torch.tensor([1, 2])}})
    with pytest.raises(UserError, match="whole numbers, which noise cannot cover"):
        clip_and_add_noise(up, Message(), protection)


def test_a_change_that_is_not_finite_is_not_sent():
    """Or a server could switch the protection off by a NaN in what it sends."""
    down = message(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        clip_and_add_noise(message(1.0), down, ReplyProtection(clip_norm=1.0))


def test_a_server_that_sends_nan_gets_nothing_from_a_site_that_clips(tmp_path, nodes):
    node = nodes(small_clients(), **{"clip-norm": 1e-6, "noise-multiplier": 1e6, "disclose": ""})[101]
    state = {name: tensor.clone() for name, tensor in SmallNet().state_dict().items()}
    state["body.1.running_mean"][0] = float("nan")
    site, algorithm = build_site(node.config), {"name": "fedavg", "weighted": False}
    head = {"kind": "task", "protocol": PROTOCOL, "run": "a", "algorithm": algorithm, "phase": "local", "round": 1,
            "client": "client-0", "seed": 1, "run_seed": 1, "state": None, "keep": 0}  # fmt: skip
    answer = site.answer_envelope(Envelope(head, Message({"model": state}, {"lr": 0.1})))
    assert "NaN or infinite values, with which clipping protects nothing" in answer.head["refused"]
    assert not answer.body.tensors


def test_the_stream_is_that_of_rfc_8439():
    """Appendix A.1, test vector 1: ChaCha20 with a key and a nonce of zeros. The last byte of the key counts."""
    words = GaussianNoise(bytes(32)).draw_uniform_uint64(8)
    assert words.astype("<u8").tobytes().hex() == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert not set(words) & set(GaussianNoise(bytes(31) + b"\x01").draw_uniform_uint64(8))


def test_each_message_has_a_key_of_its_own_from_the_system(monkeypatch):
    keys = []
    draw = secrets.token_bytes
    monkeypatch.setattr(gaussian_mechanism.secrets, "token_bytes", lambda size: keys.append(draw(size)) or keys[-1])
    protection = ReplyProtection(clip_norm=1.0, noise_multiplier=1.0)
    one, other = (clip_and_add_noise(message(0.0), message(0.0), protection).tensors["model"]["w"] for _ in range(2))
    assert [len(key) for key in keys] == [32, 32]
    assert keys[0] != keys[1]
    assert not torch.equal(one, other)


def test_moments_tails_and_pairs_of_the_noise():
    """10^6 draws with a fixed key: moments within 5 standard errors, the numbers beyond 3, 3.5 and 4 standard deviations
    within 5 of theirs, no correlation of values or squares at lags 1, 2 and 3 (pairs of the transform are neighbours)."""
    n = 2**20
    z = GaussianNoise(bytes(32)).draw_standard_normal(n)
    for power, (expected, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96), 6: (15, 10395 - 225)}.items():
        assert abs((z**power).mean() - expected) < 5 * math.sqrt(variance / n), power
    for far in (3.0, 3.5, 4.0):
        for side in (z > far, z < -far):
            expected = n * norm.sf(far)
            assert abs(side.sum() - expected) < 5 * math.sqrt(expected), far
    for lag in (1, 2, 3):
        assert abs((z[lag:] * z[:-lag]).mean()) < 5 / math.sqrt(n)
        squares = z**2 - 1
        assert abs((squares[lag:] * squares[:-lag]).mean()) < 5 * 2 / math.sqrt(n)
    assert len(np.unique(z)) == n


def test_the_least_and_the_largest_words_give_finite_numbers(monkeypatch):
    for word in (0, 2**64 - 1):
        monkeypatch.setattr(
            GaussianNoise, "draw_uniform_uint64", lambda self, number, word=word: np.full(number, word, dtype=np.uint64)
        )
        z = GaussianNoise().draw_standard_normal(4)
        assert np.isfinite(z).all()
        assert np.abs(z).max() < 9.6


def test_what_is_sent_lies_on_a_grid_that_does_not_depend_on_the_data():
    """Or the last bits of a sum of doubles would tell which change was added."""
    down = Message({"model": {"w": torch.zeros(1000, dtype=torch.float64)}})
    for value in (0.1, 1e-9, 1 / 3):
        up = Message({"model": {"w": torch.full((1000,), value, dtype=torch.float64)}})
        sent = clip_and_add_noise(up, down, ReplyProtection(clip_norm=3.0, noise_multiplier=1.0)).tensors["model"]["w"]
        steps = sent * 2.0 ** (24 - 1)  # the deviation is 3, of which the power of two is 2
        assert torch.equal(steps, steps.round()), value


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"clip_norm": 0.0}, "clip-norm must be positive"),
        *(
            ({"clip_norm": value}, "clip-norm must be positive, got")
            for value in (math.nan, math.inf, -1.0, "abc", True)
        ),
        *(
            ({"clip_norm": 1.0, "noise_multiplier": value}, "noise-multiplier must be at least 0, got")
            for value in (math.nan, math.inf, "abc", True)
        ),
        *(({"max_epsilon": value}, "max-epsilon must be positive, got") for value in (math.nan, math.inf, "abc", True)),
        ({"noise_multiplier": -1.0}, "noise-multiplier must be at least 0"),
        ({"noise_multiplier": 1.0}, "needs clip-norm"),
        ({"delta": 1.0}, "delta must be between 0 and 1"),
        ({"max_epsilon": 0.0}, "max-epsilon must be positive, got 0.0"),
    ],
)
def test_protection_that_protects_nothing_is_refused(words, sentence):
    with pytest.raises(UserError, match=sentence):
        ReplyProtection(**words)


@pytest.mark.thorough
def test_a_run_with_noise_learns_its_price(tmp_path, nodes):
    """Three rounds at noise multiplier 4: the books of the sites tell what their messages have cost."""
    config = {"disclose": "", "clip-norm": 1.0, "noise-multiplier": 4.0}
    run = deployed(
        tmp_path, lambda clients: nodes(clients, **config), small_clients(), FedAvg(lr=0.05, weighted=False), ONE
    )[0]
    assert len(run.history) == 3
    (metrics,) = (tmp_path / "sites" / "client-0" / "state").glob("*/metrics.jsonl")
    assert f'"epsilon": {compute_epsilon({4.0: 3}, 1e-5)}' in metrics.read_text()


def test_a_tensor_of_several_names_is_clipped_once_and_has_one_noise():
    once, zero = torch.full((10,), 0.3), torch.zeros(10)
    network = torch.nn.ModuleDict({"emb": torch.nn.Embedding(2, 5), "out": torch.nn.Linear(5, 2, bias=False)})
    network["emb"].weight.data = once.view(2, 5)
    network["out"].weight = network["emb"].weight
    down = Message({"model": {"emb.weight": zero.view(2, 5), "out.weight": zero.view(2, 5)}})
    for noise in (0.0, 1.0):
        sent = clip_and_add_noise(Message({"model": network.state_dict()}), down, ReplyProtection(0.5, noise)).tensors[
            "model"
        ]
        assert torch.equal(sent["emb.weight"], sent["out.weight"])
        assert noise or sent["emb.weight"].norm() == pytest.approx(0.5)
    apart = Message({"model": {"emb.weight": once.view(2, 5), "out.weight": once.view(2, 5).clone()}})
    sent = clip_and_add_noise(apart, down, ReplyProtection(0.5, 0.0)).tensors["model"]
    assert sent["emb.weight"].norm() == pytest.approx(0.5 / math.sqrt(2))  # two tensors that happen to be alike
