"""The distance of FedHeNN's term: Procrustes by hand in both forms; what a large η makes of linear networks (lemma 3.2)."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.algorithms import FedHeNN, FedHeNNHomo
from polyfed.alignment import draw_public_rows, linear_cka
from polyfed.core.examples.as_examples import as_examples
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import initial_state
from polyfed.core.seeds import torch_generator
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.settings import Settings

STEP: dict[str, Any] = {"batch_size": 0, "momentum": 0.0, "lr": 0.1, "eta0": 2.0, "rad_size": 20, "rad_batch": 0}
SEED = 3


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch_generator(seed), dtype=torch.float64)


def five() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double()


def eight() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)).double()


PUBLIC = random(8, 40, 6), torch.zeros(40, dtype=torch.int64)


def clients(nets: Sequence[Any]) -> list[pf.Client]:
    found = []
    for k, net in enumerate(nets):
        y = torch.arange(24) % 2 + k % 2
        x = random(k, 24, 6) + 3 * random(9, 3, 6)[y]
        found.append(pf.Client(f"client-{k}", net, (x[:18], y[:18]), (x[18:], y[18:])))
    return found


def federation(method: pf.Algorithm, members: Sequence[pf.Client]) -> Federation:
    return Federation({c.id: c for c in members}, method, Settings(rounds=4, seed=SEED), as_examples(PUBLIC))


def network(net: Any, state: Any) -> nn.Sequential:
    model: nn.Sequential = net()
    model.load_state_dict(dict(state))
    return model


def unit(a: Tensor) -> Tensor:
    centred = a - a.mean(0)
    return centred / torch.linalg.matrix_norm(centred)


def step_by_hand(model: nn.Sequential, client: pf.Client, eta: float, x: Tensor, root: Tensor) -> None:
    """One full-batch step on CE + η·(‖Â‖² + ‖B̂‖² − 2‖B̂ᵀÂ‖_*), B being a root of the kernel to align with."""
    a, b = unit(model[0](x)), unit(root)
    distance = a.square().sum() + b.square().sum() - 2 * torch.linalg.svdvals(b.T @ a).sum()
    loss = F.cross_entropy(model(client.train.x), client.train.y) + eta * distance
    for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        p.data -= 0.1 * g


def symmetric_root(k: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(k)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


@pytest.mark.thorough
@pytest.mark.parametrize("normalise", [False, True])
def test_a_step_descends_the_procrustes_distance_from_the_mean_kernel(normalise: bool) -> None:
    """Networks of two widths; K̄ by the definition, its symmetric root instead of the factor that travels."""
    members = clients([five, eight, five])
    method = FedHeNN(distance="procrustes", local_epochs=1, normalise=normalise, **STEP)
    at, states, replies = federation(method, members), dict[str, Any](), {}
    with exclusive_single_torch_thread_with_grad():
        state = method.server_init(at.server_context())
        for client in members:
            down = method.dispatch(state, at.client_info(client.id, 1))
            replies[client.id], states[client.id] = method.local_update(
                down, method.client_init(client, SEED), client, 7
            )
        state = method.aggregate(state, replies, at.server_context())
        _, own = method.local_update(
            method.dispatch(state, at.client_info("client-0", 2)), states["client-0"], members[0], 7
        )
    x = PUBLIC[0][draw_public_rows(SEED, 2, 40, 20).long()]
    parts = [network(c.model, states[c.id]["model"])[0](x).detach() for c in members]
    if normalise:
        parts = [a / torch.linalg.matrix_norm(a - a.mean(0)) for a in parts]
    mean: Any = sum(a @ a.T for a in parts) / 3
    centring = torch.eye(20, dtype=torch.float64) - 1 / 20
    model = network(five, states["client-0"]["model"])
    step_by_hand(model, members[0], 2 * 2**0.5, x, symmetric_root(centring @ mean @ centring))
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(own["model"][name], tensor, rtol=0, atol=2e-6)
    other = network(five, states["client-0"]["model"])
    step_by_hand(other, members[0], 0.0, x, parts[0])
    assert not torch.allclose(other[0].weight, own["model"]["0.weight"], rtol=0, atol=1e-3)


def test_steps_of_the_homogeneous_form_descend_the_procrustes_distance() -> None:
    """From the global model's representation; in the first step the distance is 0, where it has no gradient."""
    method = FedHeNNHomo(distance="procrustes", local_epochs=3, **STEP | {"eta0": 20.0})
    (client,) = clients([five])
    at = federation(method, [client])
    with exclusive_single_torch_thread_with_grad():
        down = method.dispatch(method.server_init(at.server_context()), at.client_info(client.id, 1))
        reply, _ = method.local_update(down, method.client_init(client, SEED), client, 7)
    start = initial_state(five, SEED)
    model, x = network(five, start), PUBLIC[0][draw_public_rows(SEED, 1, 40, 20).long()]
    target = model[0](x).detach()
    for _ in range(3):
        step_by_hand(model, client, 20.0, x, target)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(reply.tensors["model"][name], tensor, rtol=0, atol=2e-5)


def test_procrustes_compares_representations_and_not_kernels() -> None:
    with pytest.raises(pf.UserError, match="kernel must be 'linear' with distance='procrustes'"):
        FedHeNN(distance="procrustes", kernel="rbf")


@pytest.mark.thorough
@pytest.mark.parametrize("distance", ["cka", "procrustes"])
def test_a_large_eta_makes_kernels_equal_and_weights_equal_up_to_rotation_and_scale(distance: Any) -> None:
    """Lemma 3.2 says that W_i = Ŵ for linear networks when η → ∞. What its premise, the largest CKA, gives is less:
    W_i W_iᵀ = c·ŴŴᵀ, since no rotation of the features and no scale changes CKA. Kernels on unseen inputs become equal as
    η grows, while the weights of the clients stay apart."""

    def linear() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 3)).double()

    members, unseen = clients([linear, linear]), random(12, 200, 6)
    apart, kernels = [], []
    for eta in (0.0, 50.0):
        method = FedHeNNHomo(
            eta0=eta, lr=0.006, momentum=0.0, batch_size=0, local_steps=80, rad_size=40, rad_batch=0, distance=distance
        )
        run = pf.federate(members, method, rounds=1, seed=SEED, public=PUBLIC, workers=0)
        one, other = (run.model(c.id).state_dict()["0.weight"].T for c in members)
        kernels.append(1 - linear_cka(unseen @ one, unseen @ other).item())
        apart.append(torch.linalg.matrix_norm(one / one.norm() - other / other.norm()).item())
    assert kernels[0] > 50 * kernels[1]
    assert apart[1] > 0.3 * apart[0] > 0.05


@pytest.mark.slow
def test_the_optimum_of_the_term_is_any_rotation_of_the_global_weights() -> None:
    """ "When each client has seen numerous RADs": only the term, from a start of its own."""
    generator = torch_generator(0)
    w, w_global = random(1, 4, 3).requires_grad_(), random(2, 4, 3)
    optimizer = torch.optim.SGD([w], lr=2.0, momentum=0.9)
    for _ in range(200):
        x = torch.randn(32, 4, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        (1 - linear_cka(x @ w, x @ w_global)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    one, other = (a @ a.T / (a @ a.T).norm() for a in (w.detach(), w_global))
    torch.testing.assert_close(one, other, rtol=0, atol=3e-2)
    assert (w.detach() / w.detach().norm() - w_global / w_global.norm()).norm() > 0.3
