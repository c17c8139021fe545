"""FedRolex: windows that roll over one global model. Identities, rounds in plain torch, and which units are trained."""

import pytest
import torch
import torch.nn.functional as F
from halves import FULL, OPTIONS, begin, mixed, play, run
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedAvg, FedRolex, HeteroFL
from polyfed.algorithms.submodels.fedrolex import inputs_per_unit
from polyfed.algorithms.submodels.widths import add_to_window, window
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.testing import small_clients


def of_width(width, second=5):
    def build():
        return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, second), nn.ReLU(), nn.Linear(second, 3))

    return build


WIDTHS = ((4, 5), (6, 4), (8, 5))
FACTORIES = tuple(of_width(*widths) for widths in WIDTHS)


def family(factories=FACTORIES, classes=None):
    return [pf.Client(c.id, f, c.train, c.test, c.val) for c, f in zip(mixed(classes=classes), factories, strict=True)]


def test_with_one_width_it_is_fedavg_bit_for_bit():
    """With BatchNorm and dropout, and all classes at each client."""
    found = run(FedRolex(**OPTIONS, weighted=True), small_clients(), rounds=3)
    fedavg = run(FedAvg(**OPTIONS, buffers="recompute"), small_clients(), rounds=3)
    for i in fedavg.federation.clients:
        one, other = found.model(i).state_dict(), fedavg.model(i).state_dict()
        assert all(torch.equal(one[name], other[name]) for name in other)
    assert found.history[-1]["train_loss"] == fedavg.history[-1]["train_loss"]


def test_round_1_is_heterofls_and_round_2_is_not():
    for rounds in (1, 2):
        ours, theirs = (play(method(**OPTIONS), family(), rounds)[1]["model"] for method in (FedRolex, HeteroFL))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours) == (rounds == 1)


def units(widths, j):
    """The first unit is j, and 8 and 5 are all units."""
    return [[(k + j) % size if n < size else k for k in range(n)] for n, size in zip(widths, (8, 5), strict=True)]


@pytest.mark.parametrize("weighted", [False, True])
def test_rounds_written_out_in_plain_torch_are_the_same(weighted):
    """Three rounds, from the server's first state; in the last ones windows wrap around."""
    clients = family(classes=[(0, 1), (1, 2), (0, 1, 2)])
    method = FedRolex(**FULL, weighted=weighted)
    theta = {name: tensor.clone() for name, tensor in begin(method, clients)[1]["model"].items()}
    for j in range(3):
        total = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in theta.items()}
        count = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in theta.items()}
        for c, widths in zip(clients, WIDTHS, strict=True):
            (a, b), (r1, r2) = units(widths, j), (widths[0] / 8, widths[1] / 5)
            cut = {
                "0.weight": torch.meshgrid(torch.tensor(a), torch.arange(6), indexing="ij"),
                "0.bias": (torch.tensor(a),),
                "2.weight": torch.meshgrid(torch.tensor(b), torch.tensor(a), indexing="ij"),
                "2.bias": (torch.tensor(b),),
                "4.weight": torch.meshgrid(torch.arange(3), torch.tensor(b), indexing="ij"),
                "4.bias": (torch.arange(3),),
            }
            p = {name: theta[name][rows].clone().requires_grad_(True) for name, rows in cut.items()}
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
                total[name][cut[name]] += n * tensor.detach()
                count[name][cut[name]] += n
        theta = {
            name: torch.where(count[name] > 0, total[name] / count[name].clamp(min=1), t.double()).float()
            for name, t in theta.items()
        }
    state = play(method, clients, rounds=3)[1]
    for name, tensor in theta.items():
        torch.testing.assert_close(state["model"][name], tensor, rtol=1e-5, atol=1e-5)


def test_over_all_rounds_each_unit_is_trained_equally_often():
    """A client of half the width, and one of the whole that never takes part."""
    method = FedRolex(**FULL)
    clients = family((of_width(4), of_width(8), of_width(8)))
    federation, state, _ = begin(method, clients)
    counts = torch.zeros(8)
    for number in range(1, 9):
        message = method.dispatch(state, federation.client_info("client-0", number))
        reply = pf.Message({"model": {n: t + 1 for n, t in message.tensors["model"].items()}}, {"num_examples": 1.0})
        after = method.aggregate(state, {"client-0": reply}, federation.server_context())
        counts += (after["model"]["0.bias"] != state["model"]["0.bias"]).float()
        state = after
    assert counts.tolist() == [4.0] * 8


def test_a_window_wraps_around_and_is_put_back_where_it_was():
    tensor = torch.arange(15.0).view(3, 5)
    assert window(tensor, (2, 2), (2, 4)).tolist() == [[14.0, 10.0], [4.0, 0.0]]
    total = add_to_window(torch.zeros(3, 5), window(tensor, (2, 2), (2, 4)), (2, 4), alpha=1.0)
    assert torch.equal(total != 0, (tensor == 14) | (tensor == 10) | (tensor == 4))
    assert all(total[tensor == k] == k for k in (14, 10, 4, 0))


def images(width):
    layers = [nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Linear(16 * width, 2 * width)]
    return nn.Sequential(*layers, nn.LayerNorm(2 * width), nn.Linear(2 * width, 3))


def test_a_window_has_the_pixels_of_its_channels():
    """The linear layer after a convolution has the 16 pixels of each of the window's channels, in their order."""
    shapes = {name: tuple(tensor.shape) for name, tensor in images(6).state_dict().items()}
    blocks = inputs_per_unit(images(2), shapes)
    assert blocks == {"4.weight": 16}
    method = FedRolex(scaler=False)
    state = {"model": images(6).state_dict(), "round": 5, "blocks": blocks}
    starts = {n: method.find_window_starts(state, n, t.shape, "local") for n, t in images(2).state_dict().items()}
    assert starts["0.weight"] == (5, 0, 0, 0)
    assert starts["1.running_mean"] == (5,)
    assert starts["4.weight"] == (5, 5 * 16)
    assert starts["6.weight"] == (0, 5)
    later = method.find_window_starts(
        {**state, "round": 7}, "4.weight", images(2).state_dict()["4.weight"].shape, "local"
    )
    assert later == (7, 1 * 16), "the six channels begin again, the twelve units do not"
    narrow, x = images(2), torch.randn(7, 1, 6, 6)
    narrow.load_state_dict(
        {n: window(state["model"][n], tuple(t.shape), starts[n]) for n, t in narrow.state_dict().items()}
    )
    wide = images(6)
    wide.load_state_dict(state["model"])
    pixels = wide.eval()[:3](x)[:, [5, 0]]  # what the wide network's channels 5 and 0 say
    torch.testing.assert_close(narrow.eval()[:3](x), pixels)
    weight = wide[4].weight.view(12, 6, 16)[[5, 6, 7, 8]][:, [5, 0]].reshape(4, 32)
    torch.testing.assert_close(narrow[4].weight, weight)


def test_units_that_no_convolution_precedes_roll_one_by_one():
    for network in (of_width(4)(), nn.Linear(6, 3), nn.Sequential(nn.Conv1d(2, 5, 3), nn.Flatten(), nn.Linear(5, 4))):
        assert inputs_per_unit(network, {name: t.shape for name, t in network.state_dict().items()}) == {}


def test_before_round_1_the_first_window_is_evaluated():
    method, clients = FedRolex(**OPTIONS, scaler=False), family()
    federation, state, _ = begin(method, clients)
    personal = method.dispatch(state, federation.client_info("client-0", 0, "personal")).tensors["model"]
    assert torch.equal(personal["0.bias"], state["model"]["0.bias"][:4])


@pytest.mark.parametrize("rounds", [1, 2])
def test_evaluated_is_the_window_with_which_it_was_trained_last(rounds):
    method, clients = FedRolex(**OPTIONS, scaler=False), family()
    federation, state, _, _ = play(method, clients, rounds=rounds)
    personal = method.dispatch(state, federation.client_info("client-0", rounds, "personal")).tensors["model"]
    last = [rounds - 1 + k for k in range(4)]
    assert torch.equal(personal["0.bias"], state["model"]["0.bias"][last])
    assert torch.equal(personal["2.weight"], state["model"]["2.weight"][:, last])
    training = method.dispatch(state, federation.client_info("client-0", rounds + 1)).tensors["model"]
    assert torch.equal(training["0.bias"], state["model"]["0.bias"][[k + 1 for k in last]])


@pytest.mark.thorough
def test_narrow_clients_train_units_that_heterofl_leaves_untrained():
    """All who take part are of half the width: what of the wide network's loss is learnt without any wide client."""
    narrow = of_width(8, 8)
    clients = [pf.Client(c.id, narrow, c.train, c.test, c.val) for c in small_clients()]
    clients.append(pf.Client("wide", of_width(16, 16), clients[0].train, clients[0].test, clients[0].val))
    losses = []
    for method in (FedRolex(lr=0.2, batch_size=8), HeteroFL(lr=0.2, batch_size=8)):
        federation, state, own = begin(method, clients)
        with exclusive_single_torch_thread_with_grad():
            for number in range(1, 33):
                replies = {}
                for c in clients[:3]:
                    down = method.dispatch(state, federation.client_info(c.id, number))
                    replies[c.id], own[c.id] = method.local_update(down, own[c.id], c, number)
                state = method.aggregate(state, replies, federation.server_context())
        message = method.dispatch(state, federation.client_info("wide", 32, "personal"))
        network = method.personal_model(message, own["wide"], clients[3], 0)
        x, y = (torch.cat([getattr(c.test, part) for c in clients[:3]]) for part in ("x", "y"))
        losses.append(F.cross_entropy(network(x), y).item())
    assert losses[0] < 0.5 * losses[1]
