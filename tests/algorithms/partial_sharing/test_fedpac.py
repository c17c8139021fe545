"""FedPAC: representations pulled together, heads mixed by a quadratic programme. Identities, the programme by other means, a
round in plain torch."""

from itertools import chain, combinations

import pytest
import torch
import torch.nn.functional as F
from halves import FULL, OPTIONS, features, mixed, plain, play, run
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedPAC, FedRep
from polyfed.algorithms.partial_sharing.head_mixing import (
    head_mixing_statistics,
    head_mixing_weights,
    minimize_quadratic_on_simplex,
)
from polyfed.core.algorithm import Message
from polyfed.core.seeds import torch_generator
from polyfed.testing import small_clients


def assert_same_tensors(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_without_the_pull_and_with_own_heads_it_is_fedrep_bit_for_bit():
    apart = {**OPTIONS, "lam": 0.0, "collaborate": False, "weight_decay": 0.0}
    found = run(FedPAC(**apart, head_epochs=2, local_epochs=3), small_clients(), rounds=3, clients_per_round=2)
    fedrep = run(FedRep(**OPTIONS, local_epochs=2, body_epochs=3), small_clients(), rounds=3, clients_per_round=2)
    for i in fedrep.federation.clients:
        assert_same_tensors(found.model(i).state_dict(), fedrep.model(i).state_dict())
    assert found.history[-1]["train_loss"] == fedrep.history[-1]["train_loss"]


@pytest.mark.parametrize("changed", [{"lam": 1.0}, {"collaborate": True}], ids=["pull", "mix"])
@pytest.mark.thorough
def test_each_part_changes_the_models(changed):
    apart = {**OPTIONS, "lam": 0.0, "collaborate": False}
    one, other = (run(FedPAC(**{**apart, **more}), small_clients(), rounds=2) for more in ({}, changed))
    nets = [found.model("client-0").state_dict() for found in (one, other)]
    assert any(not torch.equal(tensor, nets[1][name]) for name, tensor in nets[0].items())


def by_hand(form):
    """The least of αᵀPα on the simplex: the best of the stationary points of all its faces that are inside of it."""
    m, found = len(form), []
    for support in chain.from_iterable(combinations(range(m), k) for k in range(1, m + 1)):
        some = list(support)
        x = torch.linalg.solve(form[some][:, some], torch.ones(len(some), dtype=torch.float64))
        alpha = torch.zeros(m, dtype=torch.float64)
        alpha[some] = x / x.sum()
        if bool((alpha >= 0).all()):
            found.append((float(alpha @ form @ alpha), alpha))
    return min(found, key=lambda pair: pair[0])[1]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.one_case
def test_the_programme_is_solved(scale):
    generator, inner = torch_generator(1), 0
    for _ in range(20):
        half = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        form = scale * (half @ half.T + torch.diag(0.3 * torch.rand(5, generator=generator, dtype=torch.float64)))
        alpha = minimize_quadratic_on_simplex(form)
        torch.testing.assert_close(alpha, by_hand(form), rtol=1e-5, atol=1e-6)
        inner += int((alpha == 0).any())
    assert inner > 5  # on faces too
    assert minimize_quadratic_on_simplex(torch.zeros(2, 2)).tolist() == [0.5, 0.5]


def moments_by_hand(f, y, classes):
    """The paper's h and V, class by class."""
    n, h, v = len(y), [], 0.0
    for c in range(classes):
        of_class = [row for row, k in zip(f, y.tolist(), strict=True) if k == c]
        if not of_class:
            h.append(torch.zeros(f.shape[1]))
            continue
        p, mu = len(of_class) / n, sum(of_class) / len(of_class)
        v += p * sum(float(row @ row) for row in of_class) / len(of_class) - p**2 * float(mu @ mu)
        h.append(p * mu)
    return torch.stack(h), v / n


def test_bias_and_variance_are_those_of_the_paper():
    generator = torch_generator(2)
    f, y = torch.randn(12, 4, generator=generator) + 1, torch.tensor([0, 0, 2] * 4)
    found, (h, v) = head_mixing_statistics(f, y, 3), moments_by_hand(f, y, 3)
    torch.testing.assert_close(found["h"], h)
    assert float(found["v"]) == pytest.approx(v, rel=1e-5)


def rows_of_shares(h, v):
    found = head_mixing_weights({i: {"h": h[k], "v": v[k]} for k, i in enumerate("abc")})
    return torch.tensor([[found[i][j] for j in "abc"] for i in "abc"], dtype=torch.float64)


def test_heads_are_mixed_among_alike_and_by_how_well_they_are_known():
    """Two clients alike and one that is far: the far one goes its own way, the others share by the inverse of V."""
    h = torch.zeros(3, 2, 4)
    h[2] = 10.0
    found = rows_of_shares(h, torch.tensor([1.0, 3.0, 1.0]))
    expected = torch.tensor([[0.75, 0.25, 0.0], [0.75, 0.25, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01)
    h[2] = 0.1
    found = rows_of_shares(h, torch.tensor([1.0, 3.0, 1.0]))
    for i in range(3):
        apart = [h[i] - h[j] for j in range(3)]
        form = torch.tensor([[float((a * b).sum()) for a in apart] for b in apart]).double()
        torch.testing.assert_close(found[i], by_hand(form + torch.diag(torch.tensor([1.0, 3.0, 1.0])).double()))


@pytest.mark.parametrize("head_lr", [None, 0.3])
@pytest.mark.one_case
def test_a_round_written_out_in_plain_torch_is_the_same(head_lr):
    """The second round of clients of which two have two classes of three."""
    clients = plain(mixed(classes=[(0, 1), (1, 2), (0, 1, 2)]))
    method = FedPAC(**{**FULL, "local_steps": None}, local_epochs=3, head_epochs=2, momentum=0.0, weight_decay=0.0,
                    lam=0.7, head_lr=head_lr)  # fmt: skip
    federation, state, _, _ = play(method, clients)
    after_federation, after, _, replies = play(method, clients, rounds=2)
    heads, stats, sent = {}, {}, {}
    body = dict.fromkeys(state["model"], 0.0)
    n = {c.id: len(c.train) for c in clients}
    for c in clients:
        down = method.dispatch(state, federation.client_info(c.id, 2))
        net = c.model()
        net.load_state_dict({**down.tensors["model"], **down.tensors["head"]})
        x, y = c.train.x, c.train.y
        stats[c.id] = moments_by_hand(features(net, x), y, 3)
        for part, steps, lr in ((net[2:], 2, head_lr or 0.1), (net[:2], 3, 0.1)):
            for _ in range(steps):
                f = net[:2](x)
                loss = F.cross_entropy(net[2](f), y)
                if steps == 3:
                    gap = [((row - state["prototypes"]["means"][k]) ** 2).mean() for row, k in zip(f, y, strict=True)]
                    loss = loss + 0.7 * sum(gap) / len(y)
                grads = torch.autograd.grad(loss, list(part.parameters()))
                with torch.no_grad():
                    for p, g in zip(part.parameters(), grads, strict=True):
                        p -= lr * g
        for name in body:
            body[name] = body[name] + n[c.id] * net.state_dict()[name] / sum(n.values())
        heads[c.id] = {name: t for name, t in net.state_dict().items() if name not in body}
        torch.testing.assert_close(dict(replies[c.id].tensors["head"]), heads[c.id], rtol=1e-5, atol=1e-5)
        sent |= {(c.id, k): (features(net, x)[y == k].mean(0), int((y == k).sum())) for k in set(y.tolist())}
    torch.testing.assert_close(after["model"], body, rtol=1e-5, atol=1e-5)
    for k in range(3):
        rows = [(mu, number) for (_, c), (mu, number) in sent.items() if c == k]
        mean = sum(mu * number for mu, number in rows) / sum(number for _, number in rows)
        torch.testing.assert_close(after["prototypes"]["means"][k], mean, rtol=1e-4, atol=1e-5)
    for c in clients:
        form = torch.zeros(3, 3, dtype=torch.float64)
        for j, one in enumerate(clients):
            form[j, j] += stats[one.id][1]
            for k, other in enumerate(clients):
                a, b = (stats[c.id][0] - stats[who.id][0] for who in (one, other))
                form[j, k] += float((a * b).sum())
        alpha = by_hand(form)
        assert 0 < alpha.max() < 0.999  # mixed indeed
        head = method.dispatch(after, after_federation.client_info(c.id, 3)).tensors["head"]
        for name in head:
            mix = sum(float(a) * heads[o.id][name] for a, o in zip(alpha, clients, strict=True))
            torch.testing.assert_close(head[name], mix, rtol=1e-4, atol=1e-5)


def test_who_missed_a_round_keeps_the_head_that_was_mixed_for_it():
    clients, method = plain(mixed()), FedPAC(**OPTIONS)
    federation, before, _, _ = play(method, clients)
    _, after, _, _ = play(method, clients, rounds=2, skip={"client-2"})
    assert_same_tensors(after["heads"]["client-2"], before["heads"]["client-2"])
    assert not torch.equal(after["heads"]["client-0"]["2.weight"], before["heads"]["client-0"]["2.weight"])
    down = method.dispatch(after, federation.client_info("client-2", 3, "evaluate"))
    assert sorted(down.tensors) == ["head", "model"]
    own = method.client_init(clients[2], 3)
    model = method.personal_model(down, own, clients[2], 1)
    assert torch.equal(model[2].weight, after["heads"]["client-2"]["2.weight"])


def test_a_head_of_ones_own_is_not_sent():
    clients, method = plain(mixed()), FedPAC(**OPTIONS, collaborate=False)
    _, state, _, replies = play(method, clients, rounds=2)
    assert all(sorted(reply.tensors) == ["classes", "model"] for reply in replies.values())
    assert not state["heads"]
    assert sorted(state["model"]) == ["0.bias", "0.weight"]


def test_a_variance_below_zero_is_refused():
    clients, method = plain(mixed()), FedPAC(**OPTIONS)
    federation, state, _, replies = play(method, clients)
    reply = replies["client-0"]
    forged = {**reply.tensors, "statistics": {**reply.tensors["statistics"], "v": torch.tensor(-1.0)}}
    down = method.dispatch(state, federation.client_info("client-0", 2))
    assert federation.reply_error(reply, state, down) is None
    assert federation.reply_error(Message(forged, reply.scalars), state, down) == "its variance V is negative"


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"lam": -1.0}, "lam must be at least 0"), ({"head_epochs": 0}, "head_epochs must be at least 1"),
     ({"head_lr": 0.0}, "head_lr must be positive, or none")],
)  # fmt: skip
def test_fields_are_checked(fields, message):
    with pytest.raises(pf.UserError, match=message):
        FedPAC(**fields)


def without_bias():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3, bias=False))


def test_a_network_whose_last_layer_is_no_linear_one_with_bias_is_refused():
    clients = [pf.Client(c.id, without_bias, c.train, c.test) for c in small_clients()]
    with pytest.raises(pf.UserError, match="FedPAC: the last linear layer"):
        FedPAC(**OPTIONS).client_init(clients[0], 3)
