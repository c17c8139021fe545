"""What leaves a site: the objects that travel, what is disclosed, and clipping and noise against what is known of them."""

import json
import math

import pytest
import torch
from scipy.stats import norm

import polyfed as pf
from polyfed.algorithm import Message
from polyfed.algorithms import FLHAGHN, REGISTRY, FedAvg
from polyfed.deploy import privacy
from polyfed.deploy.privacy import Protection, epsilon, protect, spend
from polyfed.deploy.site import read_site
from polyfed.deploy.wire import Letter
from polyfed.engines.flower import from_record
from polyfed.errors import UserError
from polyfed.graphs.cached import graph_of
from polyfed.graphs.catalogue import LayerCatalogue
from polyfed.scratch import scratch
from polyfed.testing import SmallNet, small_clients
from polyfed.tree import tensors_of

from .conftest import ONE
from .test_parity import deployed, image_clients


def test_traffic_of_flha_ghn_has_the_same_form_for_sites_with_different_networks(tmp_path, nodes):
    """Every object of three rounds is recorded: names, shapes and types are the same in both directions whatever the
    network of the site, and no bytes of a site's files are among them. (The values do tell its layers: heads of layer types
    that it lacks come back as they went, `tests/algorithms/test_flha_privacy.py`. So it needs consent.)"""
    clients = image_clients(("flha_arch1", "flha_arch2"), number=4)
    assert len({graph_of(client).types for client in clients}) > 1, "the sites have the same network"
    LayerCatalogue.of(map(graph_of, clients)).write(tmp_path / "catalogue.yaml")
    method = FLHAGHN(lr=0.05, hidden=8, catalogue=str(tmp_path / "catalogue.yaml"))
    grid = deployed(tmp_path, nodes, clients, method)[1]
    seen = {}
    for node, kind, record in grid.seen:
        letter = from_record(record)
        form = {g: {n: (t.shape, t.dtype) for n, t in tree.items()} for g, tree in letter.body.arrays.items()}
        head = {name: type(value) for name, value in letter.head.items()}
        seen.setdefault(node, []).append((kind, head, form, sorted(letter.body.scalars)))
    first, *others = seen.values()
    assert len(first) == 2 * (1 + 3 + 3 + 1), "a message was not recorded"  # introduce, local, evaluate, export
    assert all(other == first for other in others)
    assert any(form for _, _, form, _ in first)
    everything = b"".join(
        bytes(str(dict(record["head"])), "utf-8") + b"".join(a.data for a in record["arrays"].values())
        for _, _, record in grid.seen
    )
    for client in clients:
        for word in (b"site.py", b"clients_of_a_test", b"state-dir", client.model.name.encode(), b"conv1"):
            assert word not in everything
        for tensor in (client.train.x, client.train.y, client.test.x):
            assert tensor.numpy().tobytes()[:64] not in everything


@pytest.mark.parametrize(("weighted", "scalars"), [(True, ["num_examples"]), (False, [])])
def test_nothing_is_told_but_what_the_method_needs(tmp_path, nodes, weighted, scalars):
    """Unless `disclose` names it: no metrics, no losses, no times; the server's table says so."""

    def sparing(clients):
        return nodes(clients, disclose="")

    run, grid = deployed(tmp_path, sparing, small_clients(), FedAvg(lr=0.05, weighted=weighted), ONE)
    replies = [from_record(record) for _, kind, record in grid.seen if kind == "reply"]
    assert {name for letter in replies for name in letter.body.scalars} == set(scalars)
    assert all(not letter.head.get("metrics") and not letter.head.get("seconds") for letter in replies)
    assert any("num_examples" in letter.head for letter in replies) == weighted
    assert run.table()[0]["accuracy"] is None
    (kept,) = (tmp_path / "sites" / "client-0" / "state").glob("*/metrics.jsonl")
    own = [json.loads(line) for line in kept.read_text().splitlines()]
    assert any("accuracy" in record for record in own), "the site does not have its own metrics either"
    local = [record for record in own if record["phase"] == "local"]
    for way in ("bytes_down", "bytes_up"):
        assert [record[way] for record in local] == [record["clients"]["client-0"][way] for record in run.history]


@pytest.mark.parametrize("name", [name for name, method in REGISTRY.items() if "weights" not in method.discloses])
def test_methods_that_need_no_consent_send_no_weights(name):
    """What they reply is looked at: nothing has the name, or the shape and values, of a weight before or after training."""
    clients = image_clients(("flha_arch1",), number=2)
    noise = torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    fields = {"rad_size": 20, "rad_batch": 8} if name == "fedhenn" else {}
    run = pf.federate(clients, REGISTRY[name](**fields), rounds=1, public=noise, workers=0)
    federation = run.federation
    for client in clients:
        down = federation.algorithm.dispatch(run.last.state, federation.info(client.id, 2))
        mine = run.last.minds[client.id]
        reply, after = federation.algorithm.local(down, mine, client, 5)
        weights = [t for state in (mine, after) for t in tensors_of(state) if t.is_floating_point() and t.numel() > 1]
        sent = list(tensors_of(reply.arrays))
        assert not [w for w in weights for t in sent if t.shape == w.shape and torch.allclose(t, w)], "a weight is sent"
        assert not {n for tree in reply.arrays.values() for n in tree} & set(scratch(client.model).module.state_dict())
    assert name in ("local", "fedhenn"), "another method says that it needs no consent: is that so?"


def message(value, shape=(30, 40)):
    return Message({"model": {"w": torch.full(shape, value), "steps": torch.tensor(3)}}, {"num_examples": 5.0})


def test_clipping_bounds_the_change_and_keeps_its_direction():
    down, up = message(1.0), message(3.0)
    length = 2 * math.sqrt(1200)
    for bound in (0.5, 10.0, 2 * length):
        sent = protect(up, down, Protection(clip_norm=bound)).arrays["model"]["w"]
        change = (sent - 1.0).double()
        assert float(change.norm()) == pytest.approx(min(bound, length), rel=1e-4)
        assert torch.allclose(change, change.mean() * torch.ones_like(change), atol=1e-6)
    assert protect(up, down, Protection()) is up


def test_noise_is_gaussian_with_the_deviation_that_is_promised():
    """10^6 draws: the mean within 5 standard errors of 0, the deviation within 1 %, and a Kolmogorov distance below the
    critical value at 1e-6; another seed each time."""
    down = up = message(0.0, (1000, 1000))
    protection = Protection(clip_norm=0.5, noise_multiplier=3.0)
    sent = protect(up, down, protection).arrays["model"]["w"].double()
    other = protect(up, down, protection).arrays["model"]["w"].double()
    assert abs(float(sent.mean())) < 5 * 1.5 / 1000
    assert float(sent.std()) == pytest.approx(1.5, rel=0.01)
    ordered, n = sent.flatten().sort().values.numpy(), sent.numel()
    cumulative = norm.cdf(ordered / 1.5)
    steps = torch.arange(1, n + 1).double().numpy() / n
    assert max(abs(cumulative - steps)) < math.sqrt(-0.5 * math.log(1e-6 / 2) / n)
    assert not torch.equal(sent, other)
    assert abs(float((sent * other).mean())) < 5 * 1.5**2 / 1000, "the noise of two messages is not independent"


def test_whole_numbers_are_not_covered_and_refused():
    protection = Protection(clip_norm=1.0, noise_multiplier=1.0)
    kept = protect(Message({"model": {"steps": torch.tensor(9)}}), message(0.0), protection)
    assert kept.arrays["model"]["steps"] == 3, "a counter goes up, which tells how many batches there are"
    up = Message({"request": {"clients": torch.tensor([1, 2])}})
    with pytest.raises(UserError, match="whole numbers, which noise cannot cover"):
        protect(up, Message(), protection)


def test_a_change_that_is_not_finite_is_not_sent():
    """Or a server could switch the protection off by a NaN in what it sends."""
    down = message(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        protect(message(1.0), down, Protection(clip_norm=1.0))


def test_a_server_that_sends_nan_gets_nothing_from_a_site_that_clips(tmp_path, nodes):
    node = nodes(small_clients(), **{"clip-norm": 1e-6, "noise-multiplier": 1e6, "disclose": ""})[101]
    state = {name: tensor.clone() for name, tensor in SmallNet().state_dict().items()}
    state["body.1.running_mean"][0] = float("nan")
    site, algorithm = read_site(node.config), {"name": "fedavg", "weighted": False}
    head = {"kind": "task", "protocol": 2, "run": "a", "algorithm": algorithm, "phase": "local", "round": 1,
            "client": "client-0", "seed": 1, "run_seed": 1, "state": None, "keep": 0}  # fmt: skip
    answer = site.answer(Letter(head, Message({"model": state}, {"lr": 0.1})))
    assert "NaN or infinite values, with which clipping protects nothing" in answer.head["refused"]
    assert not answer.body.arrays


def test_noise_comes_from_more_than_torchs_32_bits(monkeypatch):
    """Two keys that are alike in their low 64 bits give other noise."""
    keys = iter([7, 7 + 2**64])
    monkeypatch.setattr(privacy.secrets, "randbits", lambda bits: next(keys))
    protection = Protection(clip_norm=1.0, noise_multiplier=1.0)
    one, other = (protect(message(0.0), message(0.0), protection).arrays["model"]["w"] for _ in range(2))
    assert not torch.equal(one, other)


def test_the_book_is_the_same_for_all_runs_and_can_be_closed(tmp_path):
    """The server names the runs: another one is no other data set."""
    book, protection = tmp_path / "privacy.json", Protection(clip_norm=1.0, noise_multiplier=4.0, max_epsilon=5.0)
    spent = [spend(book, "data", protection) for _ in range(2)]
    assert spent == [epsilon({4.0: 1}, 1e-5), epsilon({4.0: 2}, 1e-5)]
    assert spend(book, "other data", protection) == spent[0]
    while epsilon({4.0: len(spent) + 1}, 1e-5) <= 5.0:
        spent.append(spend(book, "data", protection))
    before = book.read_text()
    with pytest.raises(UserError, match="above max-epsilon = 5; nothing more is sent"):
        spend(book, "data", protection)
    assert book.read_text() == before


@pytest.mark.parametrize(("multiplier", "messages"), [(1.0, 1), (2.0, 10), (8.0, 100), (40.0, 1000)])
def test_epsilon_lies_between_the_exact_one_and_a_bound_that_is_known(multiplier, messages):
    """Gaussian mechanisms compose to one with mu = 2*sqrt(T)/z, whose (epsilon, delta) is known exactly (Balle and Wang
    2018); Bun and Steinke's (2016) rho + 2*sqrt(rho*ln(1/delta)), rho = mu^2/2, is an upper bound."""
    delta, mu = 1e-5, 2 * math.sqrt(messages) / multiplier

    def exact(e):
        return norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu)

    low, high = 0.0, 500.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if exact(middle) > delta else (low, middle)
    rho = mu**2 / 2
    assert low <= epsilon({multiplier: messages}, delta) <= rho + 2 * math.sqrt(rho * math.log(1 / delta))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"clip_norm": 0.0}, "clip-norm must be positive"),
        ({"noise_multiplier": -1.0}, "noise-multiplier must be at least 0"),
        ({"noise_multiplier": 1.0}, "needs clip-norm"),
        ({"delta": 1.0}, "delta must be between 0 and 1"),
        ({"max_epsilon": 1.0}, "max-epsilon must be positive, and needs noise-multiplier"),
    ],
)
def test_protection_that_protects_nothing_is_refused(words, sentence):
    with pytest.raises(UserError, match=sentence):
        Protection(**words)


def test_a_run_with_noise_learns_its_price(tmp_path, nodes):
    """Three rounds at noise multiplier 4: the books of the sites tell what their messages have cost."""
    config = {"disclose": "", "clip-norm": 1.0, "noise-multiplier": 4.0}
    run = deployed(
        tmp_path, lambda clients: nodes(clients, **config), small_clients(), FedAvg(lr=0.05, weighted=False), ONE
    )[0]
    assert len(run.history) == 3
    (metrics,) = (tmp_path / "sites" / "client-0" / "state").glob("*/metrics.jsonl")
    assert f'"epsilon": {epsilon({4.0: 3}, 1e-5)}' in metrics.read_text()
