"""pFedHN: its written-out gradients against autograd, its steps against torch's optimiser, and what federations show.

The margin of the learning test is about half of what three seeds showed (pFedHN 0.954, FedAvg 0.854 on average).
"""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.algorithms.hypernetworks import pfedhn
from polyfed.algorithms.hypernetworks.pfedhn import PFedHN
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.hypernetworks.pfedhn_hypernetwork import (
    backpropagate_deltas,
    draw_embeddings,
    generate_client_weights,
    init_weight_hypernetwork,
    repeat_steps_without_gradient,
    sgd_step,
)
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.testing import AlgorithmContract, SmallNet, small_clients

OPTIONS = {"lr": 0.05, "momentum": 0.5, "batch_size": 8}


def wide_net():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def mixed_clients(number=3):
    """Every second client has another architecture."""
    return [
        pf.Client(c.id, wide_net if k % 2 else SmallNet, c.train, c.test, c.val)
        for k, c in enumerate(small_clients(number))
    ]


@pytest.mark.slow  # test_contract.py has it with nearly these options
class TestContract(AlgorithmContract):
    @pytest.fixture
    def algorithm(self):
        return PFedHN(**OPTIONS)


@pytest.mark.slow
class TestContractOfTwoArchitectures(AlgorithmContract):
    def clients(self, number=3):
        return mixed_clients(number)

    @pytest.fixture
    def algorithm(self):
        return PFedHN(**OPTIONS, local_steps=8, buffers="recompute")


@pytest.mark.slow
class TestContractOfHeadsByClient(AlgorithmContract):
    def clients(self, number=3):
        return mixed_clients(number)

    @pytest.fixture
    def algorithm(self):
        return PFedHN(**OPTIONS, local_steps=8, heads="client")


# -- the hypernetwork as functions --------------------------------------------------------------------------------


def _plain(name):
    """A parameter's name as one of a module."""
    return name.replace(".", "|")


class Explicit(nn.Module):
    """The same network out of torch's modules; `table` has the embeddings of all clients."""

    def __init__(self, network, table, depth, shapes):
        super().__init__()
        self.shapes = shapes

        def linear(name):
            weight, bias = network[f"{name}.weight"], network[f"{name}.bias"]
            layer = nn.Linear(weight.shape[-1], bias.numel(), dtype=weight.dtype)
            layer.weight.data, layer.bias.data = weight.reshape(-1, weight.shape[-1]).clone(), bias.flatten().clone()
            return layer

        self.embeddings = nn.Embedding.from_pretrained(table.clone(), freeze=False)
        layers = [linear("trunk.0")]
        for k in range(1, depth + 1):
            layers += [nn.ReLU(), linear(f"trunk.{k}")]
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleDict(
            {f"{key}/{_plain(n)}": linear(f"heads.{key}.{n}") for key, tensors in shapes.items() for n in tensors}
        )

    def forward(self, key, row):
        features = self.trunk(self.embeddings.weight[row])
        return {n: self.heads[f"{key}/{_plain(n)}"](features).view(shape) for n, shape in self.shapes[key].items()}

    def named(self, like):
        """Its parameters but the embeddings, in the form of the functions."""
        found = {}
        for k, layer in enumerate(m for m in self.trunk if isinstance(m, nn.Linear)):
            found |= {f"trunk.{k}.weight": layer.weight, f"trunk.{k}.bias": layer.bias}
        for name, layer in self.heads.items():
            key = name.replace("/", ".").replace("|", ".")
            found |= {f"heads.{key}.weight": layer.weight, f"heads.{key}.bias": layer.bias}
        return {name: tensor.view(like[name].shape) for name, tensor in found.items()}


SHAPES = {"a": {"w": (4, 3, 2), "b": (4,)}, "z": {"w": (5, 2), "scalar": ()}}


def random(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network_in_float64(depth=3):
    tensors = {
        key: {n: torch.zeros(s, dtype=torch.float64) for n, s in shapes.items()} for key, shapes in SHAPES.items()
    }
    return init_weight_hypernetwork(1, embedding_dim=3, hidden=7, depth=depth, architectures=tensors, offsets={})


TABLE = draw_embeddings(1, 6, 3, torch.float64)


def deltas(key, number, scale=1.0, seed=0):
    return {n: scale * random(seed + k, number, *shape) for k, (n, shape) in enumerate(SHAPES[key].items())}


def naive(network, key, rows, delta, clip, depth=3):
    """Per client: autograd on the explicit module, torch's clipping; then the sum, the embeddings' gradients, and norms."""
    total, norms, of_embeddings = {}, [], torch.zeros_like(TABLE)
    for position, row in enumerate(rows):
        explicit = Explicit(network, TABLE, depth, SHAPES)
        made = explicit(key, row)
        torch.autograd.backward([(made[n] * delta[n][position]).sum() for n in made])
        norms.append(float(nn.utils.clip_grad_norm_(explicit.parameters(), clip)))
        for name, p in explicit.named(network).items():
            total[name] = total.get(name, 0) + torch.zeros_like(p)
        of_embeddings += explicit.embeddings.weight.grad
        grads = Explicit(network, TABLE, depth, SHAPES)
        for p, q in zip(grads.parameters(), explicit.parameters(), strict=True):
            p.data = torch.zeros_like(q) if q.grad is None else q.grad
        total = {name: total[name] + g.detach() for name, g in grads.named(network).items()}
    return total, of_embeddings[rows], norms


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("key", SHAPES)
def test_generated_tensors_and_their_gradient_are_those_of_the_explicit_network(key, depth):
    network, rows = network_in_float64(depth), [4, 0, 5]
    made = generate_client_weights(network, key, TABLE[rows])
    explicit = Explicit(network, TABLE, depth, SHAPES)
    for position, row in enumerate(rows):
        for name, tensor in explicit(key, row).items():
            torch.testing.assert_close(made[name][position], tensor.detach())
    expected, of_embeddings, _ = naive(network, key, rows, deltas(key, 3), clip=float("inf"), depth=depth)
    found, found_of_embeddings = backpropagate_deltas(network, key, TABLE[rows], deltas(key, 3))
    other = "z" if key == "a" else "a"
    assert found.keys() == {name for name in network if not name.startswith(f"heads.{other}.")}
    for name, gradient in expected.items():
        torch.testing.assert_close(found.get(name, torch.zeros_like(gradient)), gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found_of_embeddings, of_embeddings, rtol=1e-10, atol=1e-12)
    assert found_of_embeddings.any(1).all()


def test_the_gradient_agrees_with_finite_differences():
    network, rows, delta = network_in_float64(), TABLE[[2, 3]], deltas("a", 2)
    gradient, of_rows = backpropagate_deltas(network, "a", rows, delta)
    step = {name: random(k, *tensor.shape) for k, (name, tensor) in enumerate(network.items())}
    step_of_rows = random(100, *rows.shape)

    def value(t):
        moved = {name: tensor + t * step[name] for name, tensor in network.items()}
        made = generate_client_weights(moved, "a", rows + t * step_of_rows)
        return sum(float((made[n] * delta[n]).sum()) for n in made)

    slope = sum(float((gradient[name] * step[name]).sum()) for name in gradient) + float((of_rows * step_of_rows).sum())
    assert (value(1e-5) - value(-1e-5)) / 2e-5 == pytest.approx(slope, rel=1e-7)


def test_each_client_is_clipped_by_itself_as_torch_clips():
    network, rows = network_in_float64(), [1, 5, 2]
    delta = {n: d * torch.tensor([0.1, 1.0, 10.0]).view(3, *[1] * (d.dim() - 1)) for n, d in deltas("a", 3).items()}
    expected, of_embeddings, norms = naive(network, "a", rows, delta, clip=5.0)
    assert norms[0] < 5 < norms[1] < norms[2]
    found, found_of_embeddings = backpropagate_deltas(network, "a", TABLE[rows], delta, clip=5.0)
    torch.testing.assert_close(found_of_embeddings, of_embeddings, rtol=1e-10, atol=1e-12)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 1e-3), (0.5, 0.0), (0.0, 0.1)])
def test_three_steps_are_those_of_torchs_sgd(momentum, decay):
    """The embeddings are read and stepped as rows, one of which takes its step when it is next read."""
    network, velocity = network_in_float64(), {}
    rate = {"lr": 0.1, "momentum": momentum, "weight_decay": decay}
    rows_after, velocities, taken = TABLE.clone(), torch.zeros_like(TABLE), [0] * len(TABLE)
    explicit = Explicit(network, TABLE, 3, SHAPES)
    optimiser = torch.optim.SGD(explicit.parameters(), lr=0.1, momentum=momentum, weight_decay=decay)
    for number, rows in enumerate([[0, 3], [3, 5], [1, 2]]):  # an embedding moves on when its client is not drawn
        gradient = {}
        for key, row in zip(SHAPES, rows, strict=True):
            v, u = repeat_steps_without_gradient(rows_after[[row]], velocities[[row]], [taken[row]], number, **rate)
            tensors, of_row = backpropagate_deltas(network, key, v, deltas(key, 1, seed=number))
            gradient = {name: gradient.get(name, 0) + g for name, g in tensors.items()} | {
                name: g for name, g in gradient.items() if name not in tensors
            }
            stepped, stepped_velocity = sgd_step({"v": v}, {"v": u}, {"v": of_row}, **rate)
            rows_after[row], velocities[row] = stepped["v"][0], stepped_velocity.get("v", u)[0]
            taken[row] = number + 1
        network, velocity = sgd_step(network, velocity, gradient, **rate)
        optimiser.zero_grad()
        for key, row in zip(SHAPES, rows, strict=True):
            made = explicit(key, row)
            torch.autograd.backward([(made[n] * deltas(key, 1, seed=number)[n][0]).sum() for n in made])
        optimiser.step()
        for name, tensor in explicit.named(network).items():
            torch.testing.assert_close(network[name], tensor.detach(), rtol=1e-10, atol=1e-12)
        table, _ = repeat_steps_without_gradient(rows_after, velocities, taken, number + 1, **rate)
        torch.testing.assert_close(table, explicit.embeddings.weight.detach(), rtol=1e-10, atol=1e-12)
    assert velocity.keys() == (network.keys() if momentum else set())


# -- the method ---------------------------------------------------------------------------------------------------


def halves(method, clients, seed=3):
    """The federation and the server's state before round 1."""
    federation = Federation({c.id: c for c in clients}, method, Settings(rounds=2, seed=seed))
    return federation, method.server_init(federation.server_context())


def replies_of(method, federation, state, ids=None):
    replies = {}
    with exclusive_single_torch_thread_with_grad():
        for i in ids or federation.clients:
            client = federation.clients[i]
            down = method.dispatch(state, federation.client_info(i, 1))
            replies[i], _ = method.local_update(down, method.client_init(client, 3), client, 5)
    return replies


def float64_clients(number=3):
    def net():
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    data = small_clients(number)
    return [pf.Client(c.id, net, (c.train.x.double(), c.train.y), (c.test.x.double(), c.test.y)) for c in data]


def test_a_hypernetwork_step_lowers_the_clients_loss_to_first_order():
    """One full-batch step of size η gives δ = η∇L, so g = Jᵀδ is η times the loss's gradient in φ and v_i."""
    client, eta, rate = float64_clients(2)[1], 0.1, 1e-5
    method = PFedHN(
        lr=eta, momentum=0.0, weight_decay=0.0, clip_norm=None, batch_size=0, local_steps=1,
        hn_lr=rate, hn_momentum=0.0, hn_weight_decay=0.0, hn_clip=None,
    )  # fmt: skip
    federation, state = halves(method, [client])
    replies = replies_of(method, federation, state)

    def loss(at):
        model = method.personal_model(method.dispatch(at, federation.client_info(client.id, 1)), {}, client, 0)
        return F.cross_entropy(model(client.train.x), client.train.y).item()

    delta = {n: d[None] for n, d in replies[client.id].tensors["delta"].items()}
    embedding = draw_embeddings(3, 1, method.embedding_dim or 1, torch.float64)
    gradient, of_embedding = backpropagate_deltas(
        state["network"], federation.client_info(client.id, 1).architecture, embedding, delta
    )
    square = sum(float(g.square().sum()) for g in [*gradient.values(), of_embedding])
    predicted = -rate * square / eta
    measured = loss(method.aggregate(state, replies, None)) - loss(state)
    assert measured < 0
    assert measured / predicted == pytest.approx(1, abs=1e-3)


def test_the_reply_is_what_local_training_took_off():
    client, method = float64_clients(1)[0], PFedHN(lr=0.1, momentum=0.0, weight_decay=0.0, batch_size=0, local_steps=1)
    federation, state = halves(method, [client])
    theta = method.dispatch(state, federation.client_info(client.id, 1)).tensors["model"]
    reply = replies_of(method, federation, state)[client.id]
    assert reply.tensors.keys() == {"delta"}
    net = client.model()
    net.load_state_dict(theta)
    loss = F.cross_entropy(net(client.train.x), client.train.y)
    for (name, _), g in zip(net.named_parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
        torch.testing.assert_close(reply.tensors["delta"][name], 0.1 * g)


def test_the_trunk_learns_from_both_architectures_and_heads_from_their_own():
    method = PFedHN(**OPTIONS, local_steps=5, hn_momentum=0.0, hn_weight_decay=0.0)
    federation, state = halves(method, mixed_clients())
    replies = replies_of(method, federation, state)

    def change(ids):
        after = method.aggregate(state, {i: replies[i] for i in ids}, None)["network"]
        return {name: after[name] - tensor for name, tensor in state["network"].items()}

    small, wide, both = change(["client-0", "client-2"]), change(["client-1"]), change(list(replies))
    for name in both:
        torch.testing.assert_close(both[name], small[name] + wide[name], rtol=1e-4, atol=1e-6)
    assert small["trunk.0.weight"].any()
    assert wide["trunk.0.weight"].any()
    keys = {i: federation.client_info(i, 1).architecture for i in replies}
    assert keys["client-0"] != keys["client-1"]
    assert any(change_.any() for name, change_ in small.items() if name.startswith(f"heads.{keys['client-0']}."))
    assert not any(change_.any() for name, change_ in small.items() if name.startswith(f"heads.{keys['client-1']}."))


def test_heads_of_a_client_are_its_own_and_the_trunk_is_shared():
    method = PFedHN(**OPTIONS, local_steps=5, heads="client", hn_lr=0.1, hn_weight_decay=0.01)
    clients = mixed_clients(4)  # 0 and 2 have one architecture, 1 and 3 another
    federation, state = halves(method, clients)
    network, replies = state["network"], replies_of(method, federation, state)
    rows = {client: row for row, client in enumerate(state["clients"])}
    keys = dict(zip(rows, json.loads(state["heads"]), strict=True))
    assert len(set(keys.values())) == 4
    shapes = {keys[c.id]: {n: p.shape for n, p in c.model().named_parameters()} for c in clients}
    explicit = Explicit(network, draw_embeddings(3, 4, 2, torch.float32), method.hn_depth, shapes)
    heads = {i: {n for n in network if n.startswith(f"heads.{keys[i]}.")} for i in keys}
    assert all(heads[i].isdisjoint(heads[j]) for i in keys for j in keys if i != j)
    optimiser = torch.optim.SGD(explicit.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    total = [torch.zeros_like(p) for p in explicit.parameters()]
    for i in keys:
        made = explicit(keys[i], rows[i])
        for name, tensor in method.dispatch(state, federation.client_info(i, 1)).tensors["model"].items():
            torch.testing.assert_close(tensor, made[name].detach())
        optimiser.zero_grad()
        torch.autograd.backward([(made[n] * delta).sum() for n, delta in replies[i].tensors["delta"].items()])
        nn.utils.clip_grad_norm_(explicit.parameters(), 50.0)
        total = [t if p.grad is None else t + p.grad for t, p in zip(total, explicit.parameters(), strict=True)]
    for p, gradient in zip(explicit.parameters(), total, strict=True):
        p.grad = gradient
    optimiser.step()
    after = method.aggregate(state, replies, None)["network"]
    for name, tensor in explicit.named(network).items():
        torch.testing.assert_close(after[name], tensor.detach(), rtol=1e-4, atol=1e-6)

    one = method.aggregate(state, {"client-0": replies["client-0"]}, None)["network"]  # the others only decay
    assert not all(torch.equal(one[n], network[n] * (1 - 0.1 * 0.01)) for n in heads["client-0"])
    for name in heads["client-2"]:
        torch.testing.assert_close(one[name], network[name] * (1 - 0.1 * 0.01))


def test_heads_of_clients_are_those_of_architectures_where_no_two_have_the_same():
    def after(heads):
        clients = mixed_clients(2)
        run = pf.federate(clients, PFedHN(**OPTIONS, local_steps=5, heads=heads), rounds=2, workers=0)
        return run.last.state["network"]

    one, other = after("architecture"), after("client")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_blocks_do_not_change_messages_or_the_step(monkeypatch):
    method = PFedHN(**OPTIONS, local_steps=3)
    federation, state = halves(method, mixed_clients(5))
    infos = [federation.client_info(i, 1) for i in federation.clients]
    replies = replies_of(method, federation, state)
    whole = list(method.dispatch_all(state, infos)), method.aggregate(state, replies, None)["network"]
    monkeypatch.setattr(pfedhn, "_BLOCK", 200)  # two small networks
    parts = list(method.dispatch_all(state, infos)), method.aggregate(state, replies, None)["network"]
    for who, one, other in zip(infos, whole[0], parts[0], strict=True):
        alone = method.dispatch(state, who)
        assert one.scalars == other.scalars == alone.scalars
        for name, tensor in one.tensors["model"].items():
            torch.testing.assert_close(other.tensors["model"][name], tensor)
            torch.testing.assert_close(alone.tensors["model"][name], tensor)
    for name, tensor in whole[1].items():
        torch.testing.assert_close(parts[1][name], tensor)


def test_initial_networks_differ_between_clients_and_their_norms_let_signals_through():
    method = PFedHN()
    federation, state = halves(method, small_clients())
    one, other = (
        method.dispatch(state, federation.client_info(i, 1)).tensors["model"] for i in ("client-0", "client-1")
    )
    assert not torch.allclose(one["head.weight"], other["head.weight"])
    assert one.keys() == {n for n, _ in SmallNet().named_parameters()}
    torch.testing.assert_close(one["body.1.weight"], torch.ones(8), rtol=0, atol=0.3)
    assert state["network"]["trunk.0.weight"].shape == (100, int(1 + 3 / 4))
    assert halves(PFedHN(embedding_dim=5), small_clients())[1]["network"]["trunk.0.weight"].shape == (100, 5)
    assert one["body.0.weight"].abs().max() < 0.5
