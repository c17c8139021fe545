"""HeteroFL: corners of one global model. Identities, a round in plain torch, and which networks are not a family."""

import pytest
import torch
import torch.nn.functional as F
from halves import FULL, OPTIONS, begin, mixed, play, run
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg, HeteroFL
from polyfed.algorithms.submodels.widths import (
    divide_layer_outputs_by_ratio,
    fold_scaling_into_weights,
    widest_shape_by_tensor,
    width_ratio_by_layer,
)
from polyfed.core.nn.module_cache import initial_state
from polyfed.models import ModelSpec
from polyfed.testing import small_clients


def of_width(width, second=5):
    def build():
        return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, second), nn.ReLU(), nn.Linear(second, 3))

    return build


NARROW, MIDDLE, WIDE = of_width(4), of_width(6, 4), of_width(8)


def family(factories=(NARROW, MIDDLE, WIDE), classes=None):
    return [pf.Client(c.id, f, c.train, c.test, c.val) for c, f in zip(mixed(classes=classes), factories, strict=True)]


def test_with_one_width_it_is_fedavg_bit_for_bit():
    """With BatchNorm and dropout, and all classes at each client."""
    found = run(HeteroFL(**OPTIONS, weighted=True), small_clients(), rounds=3)
    fedavg = run(FedAvg(**OPTIONS, buffers="recompute"), small_clients(), rounds=3)
    for i in fedavg.federation.clients:
        one, other = found.model(i).state_dict(), fedavg.model(i).state_dict()
        assert all(torch.equal(one[name], other[name]) for name in other)
    assert found.history[-1]["train_loss"] == fedavg.history[-1]["train_loss"]


@pytest.mark.parametrize("weighted", [False, True])
def test_a_round_written_out_in_plain_torch_is_the_same(weighted):
    """Three widths, of which none is the widest in both layers but the last; two clients lack a class."""
    clients = family(classes=[(0, 1), (1, 2), (0, 1, 2)])
    method = HeteroFL(**FULL, weighted=weighted)
    _, state, _, _ = play(method, clients)
    _, after, _, replies = play(method, clients, rounds=2)
    total = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in state["model"].items()}
    count = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in state["model"].items()}
    for c, widths in zip(clients, ((4, 5), (6, 4), (8, 5)), strict=True):
        (a, b), (r1, r2) = widths, (widths[0] / 8, widths[1] / 5)
        cut = {
            "0.weight": (slice(a), slice(6)), "0.bias": (slice(a),), "2.weight": (slice(b), slice(a)),
            "2.bias": (slice(b),), "4.weight": (slice(3), slice(b)), "4.bias": (slice(3),),
        }  # fmt: skip
        p = {name: state["model"][name][rows].clone().requires_grad_(True) for name, rows in cut.items()}
        y = c.train.y
        absent = [k for k in range(3) if k not in set(y.tolist())]
        for _ in range(3):
            first = torch.tanh((c.train.x @ p["0.weight"].T + p["0.bias"]) / r1)
            second = torch.relu((first @ p["2.weight"].T + p["2.bias"]) / r2)
            z = second @ p["4.weight"].T + p["4.bias"]
            z = torch.stack([0 * z[:, k] if k in absent else z[:, k] for k in range(3)], 1)
            grads = torch.autograd.grad(F.cross_entropy(z, y), list(p.values()))
            with torch.no_grad():
                for tensor, g in zip(p.values(), grads, strict=True):
                    tensor -= 0.1 * g
        n = len(c.train) if weighted else 1
        for name, tensor in p.items():
            sent = replies[c.id].tensors["model"][name]
            torch.testing.assert_close(sent, tensor.detach(), rtol=1e-5, atol=1e-5)
            total[name][cut[name]] += n * tensor.detach()
            count[name][cut[name]] += n
    for name, before in state["model"].items():
        held = count[name] > 0
        mean = torch.where(held, total[name] / count[name].clamp(min=1), before.double())
        torch.testing.assert_close(after["model"][name], mean.float(), rtol=1e-5, atol=1e-5)


def test_entries_that_nobody_of_the_round_holds_keep_their_value():
    clients = family()
    method = HeteroFL(**OPTIONS)
    _, before, _, _ = play(method, clients)
    _, after, _, _ = play(method, clients, rounds=2, skip={"client-1", "client-2"})
    for name, tensor in after["model"].items():
        inside = torch.zeros_like(tensor, dtype=torch.bool)
        inside[tuple(slice(size) for size in NARROW().state_dict()[name].shape)] = True
        assert torch.equal(tensor[~inside], before["model"][name][~inside])
        assert not torch.equal(tensor[inside], before["model"][name][inside])


def test_the_global_model_is_as_wide_as_the_widest_in_each_dimension():
    crossed = {"a": of_width(8, 3), "b": of_width(4, 5), "c": of_width(2, 2)}
    shapes = widest_shape_by_tensor(crossed)
    assert [shapes[f"{k}.weight"] for k in (0, 2, 4)] == [(8, 6), (5, 8), (3, 5)]
    assert width_ratio_by_layer(crossed["a"], shapes) == {"2": 3 / 5}
    assert width_ratio_by_layer(crossed["b"], shapes) == {"0": 4 / 8}
    _, state, _, _ = play(HeteroFL(**OPTIONS), family(tuple(crossed.values())))
    assert not state["model"]["2.weight"][3:, 4:].any()  # which nobody has
    _, state, _ = begin(HeteroFL(**OPTIONS), family())
    drawn = initial_state(WIDE, 3)
    assert all(torch.equal(state["model"][name], drawn[name]) for name in drawn)


def normed(width):
    def build():
        layers = [nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Linear(16 * width, width)]
        return nn.Sequential(*layers, nn.LayerNorm(width), nn.Linear(width, 3))

    return build


def test_the_evaluated_network_computes_what_was_trained():
    """With the scaler in its weights; convolutions, norms and the step from channels to a flat layer nest too."""
    shapes = widest_shape_by_tensor({"narrow": normed(2), "wide": normed(6)})
    shares = width_ratio_by_layer(normed(2), shapes)
    assert shares == {"0": 1 / 3, "4": 1 / 3}
    net, plain, x = normed(2)(), normed(2)(), torch.randn(7, 1, 6, 6)
    plain.load_state_dict(fold_scaling_into_weights(net.state_dict(), shares))
    with divide_layer_outputs_by_ratio(net, shares):
        during = net(x)
    torch.testing.assert_close(during, plain(x), rtol=1e-4, atol=1e-4)  # norm layers amplify rounding
    assert not torch.allclose(net(x), during)
    channels = normed(6)().state_dict()["4.weight"][:2, : 16 * 2].view(2, 2, 16)
    assert channels.shape == (2, 2, 16)  # the first 2 channels' 16 pixels each: a prefix of the flat input


def test_a_round_with_the_scaler_is_evaluated_with_it():
    clients = family()
    found = run(HeteroFL(**OPTIONS), clients, rounds=2)
    theta, x = found.last.state["model"], clients[0].test.x
    first = torch.tanh((x @ theta["0.weight"][:4].T + theta["0.bias"][:4]) / (4 / 8))
    second = torch.relu(first @ theta["2.weight"][:5, :4].T + theta["2.bias"])
    z = second @ theta["4.weight"].T + theta["4.bias"]
    torch.testing.assert_close(found.model("client-0")(x), z, rtol=1e-5, atol=1e-5)
    plain = run(HeteroFL(**OPTIONS, scaler=False), clients, rounds=2).last.state["model"]
    assert not torch.equal(plain["0.weight"], theta["0.weight"])


def test_without_the_mask_the_task_may_be_another():
    clients = [
        pf.Client(c.id, c.model, (c.train.x, c.train.x[:, :3]), (c.test.x, c.test.x[:, :3]), task="regression")
        for c in family()
    ]
    assert run(HeteroFL(**OPTIONS, mask=False), clients).table()[-1]["loss"] > 0
    with pytest.raises(pf.UserError, match="needs one class per example"):
        run(HeteroFL(**OPTIONS), clients)


class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


class Tied(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, width), nn.Linear(6, width), nn.Linear(width, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.head(self.a(x) + self.b(x))


def grouped(width):
    return nn.Sequential(nn.Flatten(), nn.Unflatten(1, (6, 1)), nn.Conv1d(6, width, 1, groups=2), nn.Flatten(),
                         nn.Linear(width, 3))  # fmt: skip


def kernel(size):
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, size, padding=size // 2), nn.Flatten(), nn.Linear(24, 3)
    )


@pytest.mark.parametrize(
    ("one", "other", "flaw"),
    [
        (NARROW, lambda: nn.Sequential(nn.Linear(6, 3)), "is in one of them alone"),
        (lambda: Recurrent(4), lambda: Recurrent(8), r"in a LSTM, whose tensors may not nest"),
        (lambda: Tied(4), lambda: Tied(8), "it has several names"),
        (lambda: grouped(4), lambda: grouped(8), "in a convolution of 2 groups"),
        (lambda: kernel(1), lambda: kernel(3), r"'1.weight' is \(4, 1, 1\) and \(4, 1, 3\)"),
    ],
    ids=["layers", "lstm", "tied", "groups", "kernel"],
)
def test_networks_that_do_not_nest_are_refused(one, other, flaw):
    with pytest.raises(pf.UserError, match=f"do not differ in width alone: .*{flaw}"):
        run(HeteroFL(**OPTIONS), family((one, one, other)))


def test_other_numbers_of_outputs_are_refused():
    def four():
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))

    clients, method = family((NARROW, MIDDLE, four)), HeteroFL(**OPTIONS)
    with pytest.raises(pf.UserError, match="that of 'client-2' has 4 outputs, that of 'client-0' 3 outputs; give all"):
        run(method, clients)
    with pytest.raises(pf.UserError, match="the network of client 'client-0' has fewer outputs than another's"):
        play(method, clients)  # at a site, which the server does not check before


@pytest.mark.parametrize(
    ("name", "narrow", "wide", "shape"),
    [
        ("mlp", {"hidden": (8, 4)}, {"hidden": (16, 8)}, (1, 8, 8)),
        ("cnn_small", {"channels": (4, 8), "hidden": 16}, {"channels": (8, 16), "hidden": 32}, (1, 8, 8)),
        ("resnet18", {"width": 4}, {"width": 8}, (1, 8, 8)),
    ],
)
@pytest.mark.one_case
def test_networks_of_polyfed_are_families(name, narrow, wide, shape):
    one, other = (ModelSpec(name, arguments, shape, 10) for arguments in (narrow, wide))
    assert {n: tuple(t.shape) for n, t in other().state_dict().items()} == widest_shape_by_tensor(
        {"a": one, "b": other}
    )
    assert set(width_ratio_by_layer(one, widest_shape_by_tensor({"a": one, "b": other})).values()) == {0.5}


def test_statistics_are_not_averaged():
    with pytest.raises(pf.UserError, match="buffers must be 'recompute' or 'local'"):
        HeteroFL(buffers="average")
