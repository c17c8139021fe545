"""The first head of LG-FedAvg and FedGH: one for all clients whose heads have one form, whatever their bodies."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from halves import FULL, begin, play
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedGH, LGFedAvg, Local
from polyfed.algorithms.base.heads.initial_heads import draw_common_head
from polyfed.core.nn.module_cache import build_module, initial_state
from polyfed.core.seeds import derive_seed
from polyfed.testing import small_clients


def flat():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def deep():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def normed():
    hidden = [nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(8, 3))


class Named(nn.Module):
    """The head's layers come first in it, under other names."""

    def __init__(self):
        super().__init__()
        self.out, self.middle, self.first = nn.Linear(8, 3), nn.Linear(5, 8), nn.Linear(6, 5)

    def forward(self, x):
        return self.out(torch.tanh(self.middle(torch.relu(self.first(x)))))


def of(*factories, double=False):
    kind = torch.float64 if double else torch.float32
    return [
        pf.Client(c.id, factory, *((part.x.to(kind), part.y) for part in (c.train, c.test)))
        for c, factory in zip(small_clients(), factories, strict=True)
    ]


def last_layer(net):
    """The name of the layer of three outputs."""
    return next(name for name, part in net.named_modules() if isinstance(part, nn.Linear) and part.out_features == 3)


def first_heads(method, clients):
    """Weight and bias of each client's last layer before round 1, in the network that would be evaluated."""
    _, _, own = begin(method, clients)
    for c in clients:
        net = method.personal_model(pf.Message(), own[c.id], c, 3)
        layer = net.get_submodule(last_layer(net))
        yield layer.weight.detach().clone(), layer.bias.detach().clone()


def doubled(factory):
    return factory().double()


@pytest.mark.parametrize("method", [LGFedAvg, FedGH])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.one_case
def test_heads_of_different_architectures_are_equal_at_the_start(method, double):
    """And bodies are as without it, each the draw of its architecture."""
    nets = [flat, normed, Named]
    clients = of(*([partial(doubled, net) for net in nets] if double else nets), double=double)
    (weight, bias), *others = first_heads(method(), clients)
    assert all(torch.equal(w, weight) and torch.equal(b, bias) for w, b in others)
    bound = 8**-0.5  # torch's for a linear layer of eight inputs
    assert weight.abs().max() <= bound
    assert weight.std() > bound / 3
    own = method(first_head="architecture")
    assert len({w.sum().item() for w, _ in first_heads(own, clients)}) == 3
    for c in clients:
        drawn, state = initial_state(c.model, 3), method().client_init(c, 3)
        body, head = state.get("body", state.get("model")), last_layer(c.model())
        assert all(torch.equal(t, drawn[n]) for n, t in body.items() if not n.startswith(head))


def test_fedgh_begins_with_the_servers_head():
    """Which the server makes from the first replies."""
    (weight, bias), *_ = first_heads(FedGH(), of(flat, normed, Named))
    drawn = build_module(partial(nn.Linear, 8, 3), derive_seed(3, "head"))
    assert torch.equal(weight, drawn.weight)
    assert torch.equal(bias, drawn.bias)


def test_the_first_round_written_out_in_plain_torch_is_the_same():
    """LG-FedAvg, two layers of different architectures from one draw: three steps each, and the mean by examples."""
    clients, method = of(deep, Named, Named), LGFedAvg(**FULL, head_layers=2)
    _, after, _, _ = play(method, clients)
    places = {deep: {"0": "4", "1": "2"}, Named: {"0": "out", "1": "middle"}}
    common = {
        k: build_module(f, derive_seed(3, "head", k))
        for k, f in enumerate((partial(nn.Linear, 8, 3), partial(nn.Linear, 5, 8)))
    }
    total, mean = sum(len(c.train) for c in clients), {}
    for c in clients:
        net = c.model()
        net.load_state_dict(initial_state(c.model, 3))
        for k, layer in common.items():
            net.get_submodule(places[c.model][str(k)]).load_state_dict(layer.state_dict())
        for _ in range(3):
            grads = torch.autograd.grad(F.cross_entropy(net(c.train.x), c.train.y), list(net.parameters()))
            with torch.no_grad():
                for p, g in zip(net.parameters(), grads, strict=True):
                    p -= 0.1 * g
        for k, name in places[c.model].items():
            for part, tensor in net.get_submodule(name).state_dict().items():
                mean[f"{k}.{part}"] = mean.get(f"{k}.{part}", 0) + len(c.train) / total * tensor
    torch.testing.assert_close(after["head"], mean, rtol=1e-5, atol=1e-6)


# -- what is not drawn again ---------------------------------------------------------------------------------------


def pretrained(seed):
    net = flat()
    with torch.no_grad():
        for k, p in enumerate(net.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + k)))
    return net


@pytest.mark.parametrize("method", [LGFedAvg, FedGH])
def test_weights_that_the_network_brings_stay(method):
    """Pretrained ones, and those of a factory that sets its own seed; beside them a head that is drawn has its form's."""
    one, other = partial(pretrained, 1), partial(pretrained, 9)

    def new_head():
        net = pretrained(1)
        net[2] = nn.Linear(8, 3)
        return net

    clients = of(one, other, new_head)
    first, second, third = first_heads(method(), clients)
    assert torch.equal(first[0], one()[2].weight)
    assert torch.equal(second[1], other()[2].bias)
    assert torch.equal(third[0], next(first_heads(method(), of(flat, flat, flat)))[0])


def test_layers_that_cannot_be_started_again_stay():
    """A parametrised layer and one without reset_parameters; norms, whose start is not a draw, too."""

    def net():
        parametrised = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
        return nn.Sequential(parametrised, nn.BatchNorm1d(4), nn.LSTM(4, 4), Plain())

    first = draw_common_head(net, ["0", "1", "2", "3"], [1, 2, 3, 4])
    assert {name.partition(".")[0] for name in first} == {"2"}


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))


class Tied(nn.Module):
    """Its embedding is the weight of its head."""

    def __init__(self, deep):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), *([nn.Linear(8, 8)] if deep else []))
        self.emb, self.out = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.emb.weight = self.out.weight

    def forward(self, x):
        return self.out(self.inner(self.emb(x).mean(1)))


def test_a_tied_weight_is_the_heads_and_frozen_ones_are_left_alone():
    shallow, deeper = partial(Tied, False), partial(Tied, True)
    x, y = torch.arange(60).reshape(12, 5) % 12, torch.arange(12)
    found = [LGFedAvg().client_init(pf.Client("c", f, (x, y), (x, y)), 3)["head"] for f in (shallow, deeper)]
    assert found[0].keys() == {"0.weight", "0.bias"}
    assert all(torch.equal(t, found[1][n]) for n, t in found[0].items())

    def frozen():
        net = Tied(False)
        net.out.weight.requires_grad_(False)
        return net

    state = LGFedAvg().client_init(pf.Client("c", frozen, (x, y), (x, y)), 3)
    assert state["head"].keys() == {"0.bias"}
    net = LGFedAvg().personal_model(pf.Message(), state, pf.Client("c", frozen, (x, y), (x, y)), 3)
    assert torch.equal(net.out.weight, build_module(frozen, 0).out.weight)


def test_with_one_architecture_the_start_is_another_draw_and_nothing_else():
    """With the architecture's own head both begin as training alone does."""
    clients = of(flat, flat, flat)
    for method in (LGFedAvg, FedGH):
        drawn = initial_state(flat, 3)
        own, new = (next(first_heads(method(first_head=way), clients))[0] for way in ("architecture", "form"))
        assert torch.equal(own, drawn["2.weight"])
        assert not torch.equal(new, own)
        assert torch.equal(own, next(first_heads(Local(), clients))[0])
    with pytest.raises(pf.UserError, match="unknown first_head 'forms'"):
        LGFedAvg(first_head="forms")


def test_the_head_of_a_network_in_double_precision_is_the_servers():
    """A server draws its first head in single precision, without a client's network."""
    single = draw_common_head(lambda: nn.Linear(4, 3), [""], [5])
    double = draw_common_head(lambda: nn.Linear(4, 3).double(), [""], [5])
    for name, tensor in single.items():
        assert double[name].dtype == torch.float64
        assert torch.equal(double[name], tensor.double())
