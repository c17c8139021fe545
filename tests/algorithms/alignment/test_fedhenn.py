"""FedHeNN in both forms: identities with Local and FedAvg, the loss of the paper by hand, what the server makes of replies,
networks and data of different kinds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.algorithms import FedAvg, FedHeNN, FedHeNNHomo, Local
from polyfed.alignment import draw_public_rows, mean_kernel_features, mean_rbf_kernel
from polyfed.core.examples.as_examples import as_examples
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import initial_state
from polyfed.core.seeds import torch_generator
from polyfed.simulation.results.run import Run
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings
from polyfed.testing import SmallNet, small_clients

TRAINING: dict[str, Any] = {"lr": 0.05, "batch_size": 8, "local_epochs": 2, "momentum": 0.5}
OPTIONS: dict[str, Any] = TRAINING | {"rad_size": 20, "rad_batch": 8, "eta0": 1.0}
SEED = 3


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch_generator(seed), dtype=dtype)


def wide_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def narrow_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double()


def mixed_clients() -> list[pf.Client]:
    """Two architectures; the one with BatchNorm and dropout twice."""
    nets = [SmallNet, wide_net, SmallNet]
    return [pf.Client(c.id, net, c.train, c.test) for c, net in zip(small_clients(), nets, strict=True)]


PUBLIC = random(8, 40, 6), torch.zeros(40, dtype=torch.int64)


def federate(method: pf.Algorithm, clients: Sequence[pf.Client] | None = None, **settings: Any) -> Run:
    wanted: dict[str, Any] = {"rounds": 3, "seed": SEED, "workers": 0}
    if "public_data" in method.requires:
        wanted["public"] = PUBLIC
    return pf.federate(mixed_clients() if clients is None else clients, method, **(wanted | settings))


def federation(method: pf.Algorithm, clients: Sequence[pf.Client], public: Any = PUBLIC) -> Federation:
    return Federation({c.id: c for c in clients}, method, Settings(rounds=4, seed=SEED), as_examples(public))


def one_round(at: Federation, state: Any, number: int, who: Sequence[str], client_states: dict[str, Any]) -> Any:
    """The server's state after a round with these clients, whose private states are changed in `client_states`."""
    method, replies = at.algorithm, {}
    with exclusive_single_torch_thread_with_grad():
        for i in who:
            down, client = method.dispatch(state, at.client_info(i, number)), at.clients[i]
            own = client_states[i] if i in client_states else method.client_init(client, SEED)
            replies[i], client_states[i] = method.local_update(down, own, client, 10 * number)
            assert at.reply_error(replies[i], state, down) is None
        return method.aggregate(state, replies, at.server_context())


def measured(run: Run, prefix: str = "") -> list[dict[str, tuple[Any, ...]]]:
    names = ("accuracy", "loss")
    return [
        {i: (*(row[prefix + name] for name in names), row.get("train_loss")) for i, row in record["clients"].items()}
        for record in run.history
    ]


def assert_equal_models(one: Run, other: Run) -> None:
    for client in one.federation.clients:
        own, theirs = one.model(client).state_dict(), other.model(client).state_dict()
        assert own.keys() == theirs.keys()
        assert [name for name in own if not torch.equal(own[name], theirs[name])] == []


def differs(one: Run, other: Run) -> bool:
    clients = one.federation.clients
    return not all(torch.allclose(one.model(i).head.weight, other.model(i).head.weight, atol=1e-4) for i in clients)


# -- identities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        *(
            pytest.param(f, marks=pytest.mark.thorough)
            for f in ({"share": "weights"}, {"rad": "noise"}, {"kernel": "rbf", "rad_batch": 0})
        ),
    ],
)
def test_without_the_term_each_client_trains_alone_bit_for_bit(fields: Mapping[str, Any]) -> None:
    """Identity 2."""
    method = FedHeNN(**OPTIONS | {"eta0": 0.0} | fields)
    found, alone = federate(method, clients_per_round=2), federate(Local(**TRAINING), clients_per_round=2)
    assert measured(found) == measured(alone)
    assert_equal_models(found, alone)
    clients = [pf.Client(c.id, SmallNet, c.train, c.test) for c in small_clients()]
    assert differs(federate(FedHeNN(**OPTIONS | fields), clients), federate(Local(**TRAINING), clients))


@pytest.mark.thorough
@pytest.mark.parametrize(("policy", "weighted"), [("average", True), ("local", False), ("recompute", True)])
def test_without_the_term_the_homogeneous_form_is_fedavg_bit_for_bit(
    policy: Literal["average", "local", "recompute"], weighted: bool
) -> None:
    """Identity 2, for both means; the default returns that of all clients."""
    options = TRAINING | {"buffers": policy, "weighted": weighted}
    rad: dict[str, Any] = {"rad_size": 20, "rad_batch": 8}
    found = federate(FedHeNNHomo(eta0=0.0, **rad, **options), small_clients(), clients_per_round=2)
    fedavg = federate(FedAvg(**options), small_clients(), clients_per_round=2)
    assert measured(found, "cohort_") == measured(fedavg)
    assert measured(found, "server_") == measured(
        federate(FedAvg(averaged_over="all", **options), small_clients(), clients_per_round=2)
    )
    assert measured(found) != measured(fedavg)
    ours, theirs = found.last.state["model"], fedavg.last.state["model"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    pulled = federate(FedHeNNHomo(eta0=1.0, **rad, **options), small_clients(), clients_per_round=2)
    assert not torch.allclose(pulled.last.state["model"]["head.weight"], theirs["head.weight"], atol=1e-4)


def test_the_homogeneous_form_evaluates_the_trained_model_and_beside_it_the_global_one() -> None:
    run = federate(FedHeNNHomo(**OPTIONS), small_clients(), rounds=1, clients_per_round=2)
    trained = {i for i, row in run.history[0]["clients"].items() if "bytes_up" in row}
    assert len(trained) == 2
    common = run.last.state["model"]
    for i, row in run.history[0]["clients"].items():
        same = all(torch.equal(tensor, common[name]) for name, tensor in run.model(i).state_dict().items())
        assert same == (i not in trained)
        assert (row["server_loss"] == row["loss"]) == (i not in trained)


SHARED = [{"normalise": True}, {"kernel": "rbf", "rank": 4}]
SLOW = [pytest.param(fields, marks=pytest.mark.slow) for fields in ({}, {"rank": 3}, {"weighting": "capacity"})]


@pytest.mark.thorough
@pytest.mark.parametrize("fields", [*SHARED, *SLOW])
def test_sharing_weights_is_sharing_representations(fields: Mapping[str, Any]) -> None:
    options = OPTIONS | {"eta0": 3.0} | fields
    one, other = (
        federate(FedHeNN(share=share, **options), rounds=4, clients_per_round=2)
        for share in ("representations", "weights")
    )
    table, again = one.last.state["representations"], other.last.state["representations"]
    assert table.keys() == again.keys() == one.federation.clients.keys()
    for i in table:
        torch.testing.assert_close(table[i] @ table[i].T, again[i] @ again[i].T, rtol=1e-3, atol=1e-4)
        for name, tensor in one.model(i).state_dict().items():
            torch.testing.assert_close(other.model(i).state_dict()[name], tensor, rtol=1e-3, atol=1e-5)
    assert one.last.state["capacities"] == other.last.state["capacities"]
    assert bool(one.last.state["capacities"]) == ("weighting" in fields)
    for options_of_one in ("rank", "normalise", "weighting", "kernel"):
        if options_of_one in fields:  # else the comparison would be of two runs without the option
            without = federate(FedHeNN(**OPTIONS | {"eta0": 3.0}), rounds=4, clients_per_round=2)
            weights = [run.model("client-1").state_dict()["0.weight"] for run in (without, one)]
            assert not torch.allclose(*weights, rtol=1e-3, atol=1e-5)


# -- the loss by hand ---------------------------------------------------------------------------------------------


def centring(number: int) -> Tensor:
    return torch.eye(number, dtype=torch.float64) - 1 / number


def cka_by_hand(k: Tensor, m: Tensor) -> Tensor:
    h = centring(len(k))

    def hsic(one: Tensor, other: Tensor) -> Tensor:
        return torch.trace(one @ h @ other @ h) / (len(k) - 1) ** 2

    return hsic(k, m) / (hsic(k, k) * hsic(m, m)).sqrt()


def kernel_by_hand(a: Tensor, kind: str) -> Tensor:
    if kind == "linear":
        return a @ a.T
    squared = (a[:, None] - a[None, :]).square().sum(2)
    above = squared[torch.ones(len(a), len(a), dtype=torch.bool).triu(1)]
    return torch.exp(-squared / (2 * 0.5**2 * above.median()))


def double_clients() -> list[pf.Client]:
    return [
        pf.Client(c.id, narrow_net, (c.train.x.double(), c.train.y), (c.test.x.double(), c.test.y))
        for c in small_clients()
    ]


def as_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def network(state: Mapping[str, Tensor]) -> nn.Sequential:
    model = narrow_net()
    assert isinstance(model, nn.Sequential)
    model.load_state_dict(dict(state))
    return model


def step_by_hand(model: nn.Sequential, client: pf.Client, eta: float, lr: float, x: Tensor, m: Tensor, k: str) -> float:
    """One full-batch step on CE + η·(1 − CKA), in place; the cross-entropy before it."""
    loss = F.cross_entropy(model(client.train.x), client.train.y)
    term = eta * (1 - cka_by_hand(kernel_by_hand(model[0](x), k), m))
    for p, g in zip(model.parameters(), torch.autograd.grad(loss + term, list(model.parameters())), strict=True):
        p.data -= lr * g
    return loss.item()


DOUBLE_PUBLIC = random(8, 40, 6, dtype=torch.float64), PUBLIC[1]
STEP: dict[str, Any] = {"batch_size": 0, "momentum": 0.0, "lr": 0.1, "eta0": 2.0, "rad_size": 20, "rad_batch": 0}
HETEROGENEOUS: list[dict[str, Any]] = [{}, {"normalise": True}, {"kernel": "rbf"}, {"growth": "linear"}]


@pytest.mark.parametrize("fields", HETEROGENEOUS)
@pytest.mark.one_case
def test_a_step_descends_the_papers_loss(fields: Mapping[str, Any]) -> None:
    """Eq. 6 in round 2, with a client whose network is of round 1, by autograd from the definition with H."""
    method = FedHeNN(local_epochs=1, **STEP, **fields)
    clients = double_clients()
    at, client_states = federation(method, clients, DOUBLE_PUBLIC), dict[str, Any]()
    state = one_round(at, method.server_init(at.server_context()), 1, list(at.clients), client_states)
    state = one_round(at, state, 2, ["client-0", "client-2"], client_states)
    models = {i: network(own["model"]) for i, own in client_states.items()}
    x = DOUBLE_PUBLIC[0][draw_public_rows(SEED, 3, 40, 20).long()]
    kernels = []
    for i in at.clients:
        a = models[i][0](x).detach()
        if method.normalise:
            a = a / torch.linalg.matrix_norm(centring(20) @ a)
        kernels.append(kernel_by_hand(a, method.kernel))
    mean = sum(kernels) / 3
    assert isinstance(mean, Tensor)
    with exclusive_single_torch_thread_with_grad():
        down = method.dispatch(state, at.client_info("client-0", 3))
        reply, own = method.local_update(down, client_states["client-0"], clients[0], 7)
    eta = 2.0 * (3 if method.growth == "linear" else 3**0.5)
    alone = network(as_state(models["client-0"]))
    loss = step_by_hand(models["client-0"], clients[0], eta, 0.1, x, mean, method.kernel)
    for name, tensor in models["client-0"].state_dict().items():
        torch.testing.assert_close(own["model"][name], tensor, rtol=0, atol=1e-6)
    step_by_hand(alone, clients[0], 0.99 * eta, 0.1, x, mean, method.kernel)
    assert not torch.allclose(alone[0].weight, own["model"]["0.weight"], rtol=0, atol=3e-6)
    assert reply.scalars["train_loss"] == pytest.approx(loss, rel=1e-6)
    everything = models["client-0"][0](DOUBLE_PUBLIC[0]).detach().float()
    torch.testing.assert_close(reply.tensors["representations"]["a"], everything, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_steps_of_the_homogeneous_form_descend_the_papers_loss(kernel: Literal["linear", "rbf"]) -> None:
    """Eq. 5: at the first step the client's kernel is the global model's, and the term has no gradient."""
    method = FedHeNNHomo(local_epochs=3, kernel=kernel, **STEP | {"eta0": 20.0})
    (client, *_), start = double_clients(), initial_state(narrow_net, SEED)
    at = federation(method, [client], DOUBLE_PUBLIC)
    with exclusive_single_torch_thread_with_grad():
        down = method.dispatch(method.server_init(at.server_context()), at.client_info(client.id, 4))
        reply, _ = method.local_update(down, method.client_init(client, SEED), client, 7)
    x = DOUBLE_PUBLIC[0][draw_public_rows(SEED, 4, 40, 20).long()]
    model, alone = network(start), network(start)
    m = kernel_by_hand(model[0](x).detach(), kernel)
    for _ in range(3):
        step_by_hand(model, client, 40.0, 0.1, x, m, kernel)
        step_by_hand(alone, client, 0.0, 0.1, x, m, kernel)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(reply.tensors["model"][name], tensor, rtol=0, atol=1e-5)
    assert not torch.allclose(alone[0].weight, model[0].weight, rtol=0, atol=1e-3)


GROWTH: dict[Literal["sqrt", "linear", "constant"], Callable[[int], float]] = {
    "sqrt": lambda t: 0.5 * t**0.5,
    "linear": lambda t: 0.5 * t,
    "constant": lambda t: 0.5,
}


@pytest.mark.parametrize("growth", GROWTH)
@pytest.mark.parametrize("kind", [FedHeNN, FedHeNNHomo])
def test_eta_grows_with_the_rounds_and_reaches_the_client(kind: Any, growth: Any) -> None:
    method = kind(**OPTIONS | {"eta0": 0.5, "growth": growth})
    at = federation(method, small_clients())
    state = method.server_init(at.server_context())
    for t in (1, 2, 4, 9):
        assert method.dispatch(state, at.client_info("client-1", t)).scalars["eta"] == pytest.approx(GROWTH[growth](t))


# -- K̄ ------------------------------------------------------------------------------------------------------------


def test_who_was_not_drawn_counts_with_the_last_network_and_the_unreached_do_not_count() -> None:
    method = FedHeNN(**OPTIONS)
    at, client_states = federation(method, mixed_clients()), dict[str, Any]()
    state = method.server_init(at.server_context())
    assert "target" not in method.dispatch(state, at.client_info("client-0", 1)).tensors
    first = one_round(at, state, 1, ["client-0", "client-1"], client_states)
    assert list(first["representations"]) == ["client-0", "client-1"]
    second = one_round(at, first, 2, ["client-0"], client_states)
    old, new = first["representations"], second["representations"]
    assert torch.equal(new["client-1"], old["client-1"])
    assert not torch.equal(new["client-0"], old["client-0"])
    rows = draw_public_rows(SEED, 3, 40, 20).long()
    found = method.dispatch(second, at.client_info("client-2", 3)).tensors["target"]["features"]
    parts = [new[i][rows] for i in ("client-0", "client-1")]
    expected = mean_kernel_features(parts, [0.5, 0.5])
    torch.testing.assert_close(found @ found.T, expected @ expected.T)
    torch.testing.assert_close(found @ found.T, sum(a @ a.T for a in parts) / 2)


def test_capacity_weighs_by_the_number_of_parameters() -> None:
    numbers = {"client-0": 99, "client-1": 6 * 12 + 12 + 3 * 12 + 3, "client-2": 99}
    for kernel in ("linear", "rbf"):
        method = FedHeNN(weighting="capacity", kernel=kernel, **OPTIONS)
        at, client_states = federation(method, mixed_clients()), dict[str, Any]()
        state = one_round(at, method.server_init(at.server_context()), 1, list(at.clients), client_states)
        assert state["capacities"] == numbers
        target = method.dispatch(state, at.client_info("client-0", 2)).tensors["target"]
        parts = [state["representations"][i][draw_public_rows(SEED, 2, 40, 20).long()] for i in sorted(numbers)]
        w = [numbers[i] / sum(numbers.values()) for i in sorted(numbers)]
        if kernel == "linear":
            found, expected = target["features"], mean_kernel_features(parts, w)
            torch.testing.assert_close(found @ found.T, expected @ expected.T)
        else:
            torch.testing.assert_close(target["kernel"], mean_rbf_kernel(parts, w))


def test_a_rank_bounds_what_travels_in_both_directions() -> None:
    clients = [pf.Client(c.id, wide_net, c.train, c.test) for c in small_clients()]
    for rank, up, down in ((None, 12, 20), (5, 5, 5), (20, 12, 20)):
        method = FedHeNN(rank=rank, **OPTIONS)
        at, client_states = federation(method, clients), dict[str, Any]()
        state = one_round(at, method.server_init(at.server_context()), 1, list(at.clients), client_states)
        assert {tuple(a.shape) for a in state["representations"].values()} == {(40, up)}
        features = method.dispatch(state, at.client_info("client-0", 2)).tensors["target"]["features"]
        assert features.shape == (20, down)


@pytest.mark.thorough
def test_alignment_makes_networks_see_alike() -> None:
    """And the record tells how much."""
    runs = {eta: federate(FedHeNN(**OPTIONS | {"eta0": eta}), rounds=6) for eta in (0.0, 10.0)}
    alone, aligned = (run.history[-1]["analysis"]["mean_cka"] for run in runs.values())
    assert 0 < alone < aligned - 0.05
    assert aligned <= 1


# -- networks and data of different kinds ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:FedHeNN. nothing before:RuntimeWarning")
def test_a_module_is_named_for_all_or_for_some() -> None:
    def widths(module: Any, clients: Sequence[pf.Client]) -> list[tuple[int, ...]]:
        run = federate(FedHeNN(**OPTIONS | {"module": module}), clients, rounds=2)
        return [tuple(a.shape) for a in run.last.state["representations"].values()]

    assert widths(None, small_clients()) == [(40, 8)] * 3
    assert widths("body.0", small_clients()) == [(40, 6)] * 3
    assert widths({"client-1": "0"}, mixed_clients()) == [(40, 8), (40, 6), (40, 8)]
    run = federate(FedHeNN(**OPTIONS | {"module": {"client-1": "0"}}), rounds=1)
    assert torch.equal(run.last.state["representations"]["client-1"], PUBLIC[0])
    weights = federate(FedHeNN(share="weights", **OPTIONS | {"module": {"client-1": "0"}}), rounds=1)
    assert torch.equal(weights.last.state["representations"]["client-1"], PUBLIC[0])
    with pytest.raises(pf.UserError, match=r"module='hat': the network of .* has no such module.*head"):
        federate(FedHeNNHomo(**OPTIONS | {"module": "hat"}), small_clients(), rounds=1)
