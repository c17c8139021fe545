"""Algorithms 1 and 2 of FedHeNN over several rounds, against a computation in plain torch: L×L kernels, HSIC with H,
minibatches, momentum, two of four clients a round; with the term at every minibatch, and once an epoch."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.algorithms import FedAvg, FedHeNN, FedHeNNHomo, Local
from polyfed.alignment import draw_public_rows
from polyfed.core.examples.examples import Examples
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import initial_state
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.testing import AlgorithmContract, small_clients
from tests.few_cases import few

SEED, SIZE, POOL, LR, ETA0, BATCH, EPOCHS = 3, 20, 40, 0.1, 3.0, 8, 3
COHORTS = ((0, 1), (1, 2), (2, 3), (0, 3))
PUBLIC = torch.randn(POOL, 6, generator=torch_generator(8), dtype=torch.float64)
FIELDS = {
    "lr": LR, "batch_size": BATCH, "local_epochs": EPOCHS, "momentum": 0.5, "eta0": ETA0, "rad_size": SIZE, "rad_batch": 0
}  # fmt: skip


def narrow():
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double()


def wide():
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def clients(*factories):
    return [
        pf.Client(c.id, factories[k % len(factories)], (c.train.x.double(), c.train.y), (c.test.x.double(), c.test.y))
        for k, c in enumerate(small_clients(4))
    ]


def played(method, people):
    """The server's state and the private ones after rounds with the cohorts."""
    public = Examples(PUBLIC, torch.zeros(POOL, dtype=torch.int64))
    at = Federation({c.id: c for c in people}, method, Settings(rounds=len(COHORTS), seed=SEED), public)
    state, private = method.server_init(at.server_context()), {c.id: method.client_init(c, SEED) for c in people}
    with exclusive_single_torch_thread_with_grad():
        for t, cohort in enumerate(COHORTS, 1):
            replies = {}
            for c in (people[k] for k in cohort):
                down = method.dispatch(state, at.client_info(c.id, t))
                replies[c.id], private[c.id] = method.local_update(down, private[c.id], c, 10 * t)
                assert at.reply_error(replies[c.id], state, down) is None
            state = method.aggregate(state, replies, at.server_context())
    return state, private


# -- in plain torch ---------------------------------------------------------------------------------------------------


def kernel(a, kind):
    if kind == "linear":
        return a @ a.T
    squared = (a[:, None] - a[None, :]).square().sum(2)
    median = squared[torch.ones(len(a), len(a), dtype=torch.bool).triu(1)].median()
    return torch.exp(-squared / (2 * 0.5**2 * median))


def cka(k, m):
    h = torch.eye(SIZE, dtype=torch.float64) - 1 / SIZE

    def hsic(one, other):
        return torch.trace(one @ h @ other @ h) / (SIZE - 1) ** 2

    return hsic(k, m) / (hsic(k, k) * hsic(m, m)).sqrt()


def network(factory, state):
    net = factory()
    net.load_state_dict(state)
    return net


def copied(net):
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def trained(net, client, target, eta, x, kind, term, seed):
    """LocalTraining of the algorithms."""
    parameters = list(net.parameters())
    velocity = [torch.zeros_like(p) for p in parameters]
    orders = torch_generator(derive_seed(seed, "batches"))

    def slopes(value):
        found = torch.autograd.grad(value, parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]

    def of_term():
        return slopes(eta * (1 - cka(kernel(net[:-1](x), kind), target)))

    for _ in range(EPOCHS):
        held = of_term() if target is not None else None
        for rows in torch.randperm(len(client.train), generator=orders).split(BATCH):
            step = slopes(F.cross_entropy(net(client.train.x[rows]), client.train.y[rows]))
            if target is not None:
                step = [a + b for a, b in zip(step, of_term() if term == "minibatch" else held, strict=True)]
            for p, v, g in zip(parameters, velocity, step, strict=True):
                v.mul_(0.5).add_(g)
                p.data -= LR * v
    return net


def rad(t):
    return PUBLIC[draw_public_rows(SEED, t, POOL, SIZE).long()]


def algorithm_2(people, kind, term):
    """W_j(T) of those who have trained; K̄ is over these (polyfed's choice)."""
    latest = {}
    for t, cohort in enumerate(COHORTS, 1):
        kernels = [kernel(net[:-1](rad(t)).detach(), kind) for net in latest.values()]
        target = sum(kernels) / len(kernels) if kernels else None
        new = {}
        for j in cohort:
            net = network(
                people[j].model, latest[j].state_dict() if j in latest else initial_state(people[j].model, SEED)
            )
            new[j] = trained(net, people[j], target, ETA0 * t**0.5, rad(t), kind, term, 10 * t)
        latest |= new
    return {people[j].id: copied(net) for j, net in latest.items()}


def mean(states, numbers):
    return {name: sum(n * s[name] for n, s in zip(numbers, states, strict=True)) / sum(numbers) for name in states[0]}


def algorithm_1(people, kind, term):
    """Ŵ(T) of the last cohort; and that of all clients, the algorithm's last line."""
    common, latest = initial_state(narrow, SEED), {}
    for t, cohort in enumerate(COHORTS, 1):
        start = network(narrow, common)
        target = kernel(start[:-1](rad(t)).detach(), kind)
        for j in cohort:
            net = network(narrow, common)
            latest[j] = copied(trained(net, people[j], target, ETA0 * t**0.5, rad(t), kind, term, 10 * t))
        common = mean([latest[j] for j in cohort], [len(people[j].train) for j in cohort])
    everyone = sorted(latest)
    return common, mean([latest[j] for j in everyone], [len(people[j].train) for j in everyone])


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=3e-6)


TERMS = ("minibatch", "epoch")


@pytest.mark.parametrize(
    ("term", "kind", "share"),
    few(
        list(product(TERMS, ["linear", "rbf"], ["representations", "weights"])),
        {("minibatch", "linear", "weights"), ("epoch", "rbf", "representations")},
    ),
)
@pytest.mark.one_case
def test_algorithm_2_is_that_of_the_paper(term, kind, share):
    people = clients(narrow, wide)
    _, private = played(FedHeNN(kernel=kind, share=share, term=term, **FIELDS), people)
    expected = algorithm_2(people, kind, term)
    for i, state in expected.items():
        assert_close(private[i]["model"], state)
    other = algorithm_2(people, kind, TERMS[term == "minibatch"])["client-3"]
    assert any(not torch.allclose(other[name], t, rtol=0, atol=1e-4) for name, t in expected["client-3"].items())


@pytest.mark.parametrize(
    ("term", "kind"), few(list(product(TERMS, ["linear", "rbf"])), {("minibatch", "rbf"), ("epoch", "linear")})
)
@pytest.mark.one_case
def test_algorithm_1_is_that_of_the_paper_to_its_last_line(term, kind):
    people = clients(narrow)
    method = FedHeNNHomo(kernel=kind, term=term, **FIELDS)
    state, _ = played(method, people)
    cohort, everyone = algorithm_1(people, kind, term)
    assert_close(state["model"], cohort)
    assert_close(method.result_models(state)["model"], everyone)
    other = algorithm_1(people, kind, TERMS[term == "minibatch"])[0]
    assert any(not torch.allclose(other[name], tensor, rtol=0, atol=1e-4) for name, tensor in cohort.items())


# -- the term once an epoch -------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_without_the_term_once_an_epoch_both_forms_are_local_and_fedavg_bit_for_bit():
    training = {"lr": LR, "batch_size": BATCH, "local_epochs": 2, "momentum": 0.5}
    options = {"rounds": 2, "seed": SEED, "workers": 0, "clients_per_round": 2}
    fields = {"eta0": 0.0, "rad_size": SIZE, "term": "epoch", **training}
    found = pf.federate(small_clients(), FedHeNN(**fields), public=PUBLIC.float(), **options)
    alone = pf.federate(small_clients(), Local(**training), **options)
    for i in found.federation.clients:
        theirs = alone.model(i).state_dict()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in found.model(i).state_dict().items())
    found = pf.federate(small_clients(), FedHeNNHomo(**fields), public=PUBLIC.float(), **options)
    theirs = pf.federate(small_clients(), FedAvg(**training), **options).last.state["model"]
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in found.last.state["model"].items())


def test_algorithm_1_of_one_epoch_has_no_term():
    """At the epoch's start K_i is K_global, with which it is as alike as can be."""
    people, fields = clients(narrow), {**FIELDS, "local_epochs": 1}
    found = played(FedHeNNHomo(term="epoch", **fields), people)[0]["model"]
    assert_close(found, played(FedHeNNHomo(**{**fields, "eta0": 0.0}), people)[0]["model"])
    other = played(FedHeNNHomo(**fields), people)[0]["model"]
    assert any(not torch.allclose(other[name], tensor, rtol=0, atol=1e-4) for name, tensor in found.items())


def normed():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


ONE_STEP = {
    "whole": (narrow, {"batch_size": 0}),
    "steps": (narrow, {"batch_size": 0, "local_steps": 4}),
    "accumulated": (narrow, {"batch_size": 10, "accumulate": 2}),
    "normed": (normed, {"batch_size": 19}),  # the last example joins the others
}


@pytest.mark.parametrize(
    ("method", "case"),
    few(
        list(product([FedHeNN, FedHeNNHomo], ONE_STEP)),
        {(FedHeNNHomo, "whole"), (FedHeNN, "steps")},
    ),
)
@pytest.mark.one_case
def test_with_one_step_an_epoch_both_forms_of_the_term_are_one(method, case):
    factory, fields = ONE_STEP[case]
    people = [pf.Client(c.id, c.model, (c.train.x[:20], c.train.y[:20]), c.test) for c in clients(factory)]
    fields = {**FIELDS, "rad_batch": 8, **fields}
    found = [played(method(term=term, **fields), people)[1] for term in TERMS]
    without = played(method(**{**fields, "eta0": 0.0}), people)[1]
    group = "model" if method is FedHeNN else "trained"
    for i, own in found[0].items():
        assert_close(found[1][i][group], own[group])
        name = next(iter(own[group]))
        assert not torch.allclose(without[i][group][name], own[group][name], atol=1e-4)


@pytest.mark.thorough  # test_contract.py has both methods with the default options
@pytest.mark.parametrize("name", ["fedhenn", "fedhenn_homo"])
class TestOnceAnEpoch(AlgorithmContract):
    @pytest.fixture
    def algorithm(self, name):
        self.published = frozenset({"trained"}) if name == "fedhenn_homo" else frozenset()
        fields = {"lr": 0.05, "momentum": 0.5, "batch_size": 8, "local_epochs": 2, "eta0": 1.0}
        return {"fedhenn": FedHeNN, "fedhenn_homo": FedHeNNHomo}[name](term="epoch", rad_size=20, rad_batch=0, **fields)
