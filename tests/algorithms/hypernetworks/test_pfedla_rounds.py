"""pFedLA and HeurpFedLA: rounds of algorithms 1 and 2 written out in plain torch, with autograd on the explicit graph."""

import pytest
import torch
import torch.nn.functional as F
from halves import FULL
from torch import nn

import polyfed as pf
from polyfed.algorithms import HeurPFedLA, PFedLA
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import initial_state
from polyfed.core.seeds import derive_seed
from polyfed.hypernetworks.layer_aggregation import HypernetworkSizes, init_aggregation_hypernetwork
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.testing import small_clients

ROUNDS = (("client-0", "client-2"), ("client-1", "client-2"), ("client-0", "client-1"))  # client-3 never takes part
LAYERS = {"0": ("0.weight", "0.bias"), "1": ("1.weight", "1.bias"), "3": ("3.weight", "3.bias")}
RATE = 2.0  # of the hypernetworks, so large that their weights move and different layers are retained


def net():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def clients():
    return [pf.Client(c.id, net, c.train, c.test) for c in small_clients(4)]


class Written:
    """θ_j, v_j, ψ_j and the buffers of every client, and what algorithms 1 and 2 do with them."""

    def __init__(self, members, k, normalise):
        draw = initial_state(net, 3)
        self.members, self.k, self.normalise = members, k, normalise
        self.buffers = [
            {n: t.clone() for n, t in draw.items() if n.startswith("1.r") or n.endswith("tracked")} for _ in members
        ]
        self.theta = [{n: t for n, t in draw.items() if n not in self.buffers[0]} for _ in members]
        self.networks = [init_aggregation_hypernetwork(c.id, HypernetworkSizes(4, 3, 6, 5), 3) for c in members]

    def alpha(self, network):
        """Eq. 4: three layers with ReLU, then one for each layer of the model; rows that sum to 1."""
        hidden = network["embedding"]
        for layer in range(3):
            hidden = torch.relu(network[f"trunk.{layer}.weight"] @ hidden + network[f"trunk.{layer}.bias"])
        z = [network["heads.weight"][row] @ hidden + network["heads.bias"][row] for row in range(len(LAYERS))]
        return [torch.softmax(s, 0) if self.normalise == "softmax" else torch.relu(s) / torch.relu(s).sum() for s in z]

    def mixture(self, alpha):
        """Eq. 6."""
        return {
            name: sum(weight * self.theta[j][name] for j, weight in enumerate(row))
            for row, names in zip(alpha, LAYERS.values(), strict=True)
            for name in names
        }

    def served(self, i):
        """What client i begins with, and whether each layer was retained: algorithm 2, lines 5 to 7 and 13."""
        alpha = self.alpha(self.networks[i])
        order = sorted(range(len(LAYERS)), key=lambda row: -float(alpha[row][i]))[: self.k]
        kept = {name for row, names in enumerate(LAYERS.values()) if row in order for name in names}
        mixed = self.mixture(alpha)
        return {n: self.theta[i][n] if n in kept else t for n, t in mixed.items()}, kept

    def play(self, who):
        after = {}
        for i in who:
            leaves = {n: t.clone().requires_grad_() for n, t in self.networks[i].items()}
            mixed = self.mixture(self.alpha(leaves))
            start, _ = self.served(i)
            module = net()
            module.load_state_dict({**{n: t.detach() for n, t in start.items()}, **self.buffers[i]})
            step = torch.optim.SGD(module.parameters(), lr=FULL["lr"], momentum=0.9)
            for _ in range(FULL["local_steps"]):
                step.zero_grad()
                F.cross_entropy(module(self.members[i].train.x), self.members[i].train.y).backward()
                step.step()
            trained = {n: t.detach().clone() for n, t in module.state_dict().items()}
            delta = {n: trained[n] - start[n].detach() for n in mixed}
            ascent = torch.autograd.grad(
                list(mixed.values()), list(leaves.values()), [delta[n] for n in mixed]
            )  # eq. 10, 11
            network = {n: (t + RATE * g).detach() for (n, t), g in zip(leaves.items(), ascent, strict=True)}
            after[i] = trained, network
        for i, (trained, network) in after.items():  # all of a round see the θ_j of its start
            self.theta[i] = {n: trained[n] for n in self.theta[i]}
            self.buffers[i] = {n: trained[n] for n in self.buffers[i]}
            self.networks[i] = network


def polyfeds(method, members, rounds):
    """State, private states and the networks that are evaluated, after these rounds."""
    federation = Federation({c.id: c for c in members}, method, Settings(rounds=5, seed=3))
    state, own = method.server_init(federation.server_context()), {c.id: method.client_init(c, 3) for c in members}
    by_id = {c.id: c for c in members}
    for number, who in enumerate(rounds, 1):
        down = {i: method.dispatch(state, federation.client_info(i, number)) for i in who}
        replies = {}
        for i in who:
            replies[i], own[i] = method.local_update(down[i], own[i], by_id[i], derive_seed(3, number, i))
            assert federation.reply_error(replies[i], state, down[i]) is None
        state = method.aggregate(state, replies, federation.server_context())
    evaluated = {}
    for c in members:
        message = method.dispatch(state, federation.client_info(c.id, len(rounds), "evaluate"))
        module = method.personal_model(message, own[c.id], c, 3)
        evaluated[c.id] = {n: t.clone() for n, t in module.state_dict().items()}
    return state, evaluated


@pytest.mark.parametrize(
    ("method", "k", "normalise"),
    [(PFedLA, 0, "relu"), (PFedLA, 0, "softmax"), (HeurPFedLA, 1, "relu"), (HeurPFedLA, 2, "relu")],
)
@pytest.mark.one_case
def test_rounds_written_out_in_plain_torch_are_the_same(method, k, normalise):
    """Two of four clients a round, momentum 0.9, BatchNorm: weights, hypernetworks, and what is evaluated."""
    members = clients()
    options = {"hn_lr": RATE, "normalise": normalise, "embedding_dim": 6, "hidden": 5, "momentum": 0.9, **FULL}
    made = method(**options, **({"k": k} if k else {}))
    with exclusive_single_torch_thread_with_grad():
        state, evaluated = polyfeds(made, members, ROUNDS)
        written, kept = Written(members, k, normalise), set()
        for who in ROUNDS:
            places = [int(i.removeprefix("client-")) for i in who]
            kept |= {frozenset(written.served(i)[1]) for i in places}
            written.play(places)
    tolerance = {"rtol": 1e-5, "atol": 2e-6}
    for i, c in enumerate(members):
        torch.testing.assert_close(state["models"][c.id], written.theta[i], **tolerance)
        if c.id in state["hypernetworks"]:
            torch.testing.assert_close(dict(state["hypernetworks"][c.id]), written.networks[i], **tolerance)
        start, _ = written.served(i)
        trained = any(c.id in who for who in ROUNDS)  # else statistics are estimated again, on the client's data
        for name, tensor in {**start, **(written.buffers[i] if trained else {})}.items():
            torch.testing.assert_close(evaluated[c.id][name], tensor, **tolerance)
    assert state["hypernetworks"].keys() == {"client-0", "client-1", "client-2"}
    moved = [
        (written.networks[0][n] - t).abs().max()
        for n, t in init_aggregation_hypernetwork("client-0", HypernetworkSizes(4, 3, 6, 5), 3).items()
    ]
    assert max(moved) > 1e-3
    assert k == 0 or len(kept) > 1  # not the same layers always
