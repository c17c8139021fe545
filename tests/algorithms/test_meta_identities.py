"""Theory that pFedMe and Per-FedAvg must meet: closed forms, gradients by autograd, equivalences; no golden numbers."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.algorithms import FedAvg
from polyfed.algorithms.personalised.per_fedavg import PerFedAvg
from polyfed.algorithms.personalised.pfedme import PFedMe
from polyfed.core.algorithm import Message
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import initial_state
from polyfed.testing import AlgorithmContract, SmallNet, small_clients, without_durations

OPTIONS = {"lr": 0.05, "momentum": 0.5, "batch_size": 8}


@pytest.mark.parametrize(
    ("method", "policy"),
    [
        pytest.param(PFedMe(**OPTIONS), "average", marks=pytest.mark.slow),
        pytest.param(PerFedAvg(**OPTIONS), "recompute", marks=pytest.mark.thorough),
        pytest.param(PFedMe(**OPTIONS), "recompute", marks=pytest.mark.slow),
        pytest.param(PerFedAvg(**OPTIONS), "average", marks=pytest.mark.slow),
    ],
    ids=["pfedme-average", "per_fedavg-recompute", "pfedme-recompute", "per_fedavg-average"],
)
class TestContract(AlgorithmContract):
    @pytest.fixture
    def algorithm(self, method, policy):
        return dataclasses.replace(method, buffers=policy)


@pytest.mark.slow
class TestContractOfHessianFree(AlgorithmContract):
    @pytest.fixture
    def algorithm(self):
        return PerFedAvg(variant="hf", **OPTIONS)


class Line(nn.Module):
    """θ·x in float64."""

    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return self.theta * x


CURVATURE, OPTIMUM, COUNT = (1.0, 3.0), (-2.0, 5.0), (10, 30)


def quadratics():
    """L_i(θ) = ½·a_i·(θ − c_i)²."""
    clients = []
    for i in (0, 1):
        x = torch.full((COUNT[i], 1), CURVATURE[i] ** 0.5, dtype=torch.float64)
        data = pf.Examples(x, x * OPTIMUM[i])
        clients.append(pf.Client(f"q{i}", Line, data, data, task="regression"))
    return clients


def wide():
    return nn.Linear(3, 1, bias=False).double()


def line_client(test_seed=1):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(20, n, generator=generator, dtype=torch.float64) for n in (3, 1))
    other = torch.Generator().manual_seed(test_seed)
    test = tuple(torch.randn(9, n, generator=other, dtype=torch.float64) for n in (3, 1))
    return pf.Client("one", wide, pf.Examples(x, y), pf.Examples(*test), task="regression")


def plain_net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def plain_client():
    (source,) = small_clients(1)
    data = pf.Examples(source.train.x.double(), source.train.y)
    return pf.Client("one", plain_net, data, data)


def loss_at(client, names, values):
    model = client.model()
    out = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (client.train.x,))
    return (
        F.cross_entropy(out, client.train.y)
        if client.task == "classification"
        else 0.5 * F.mse_loss(out, client.train.y)
    )


def still():
    """Without dropout, whose random numbers depend on how many passes are made."""
    net = SmallNet()
    net.body[3] = nn.Identity()
    return net


def still_clients():
    return [pf.Client(c.id, still, c.train, c.test, c.val) for c in small_clients()]


# -- pFedMe -------------------------------------------------------------------------------------------------------


def test_with_lambda_0_the_global_model_never_moves_but_personal_ones_do():
    run = pf.federate(small_clients(), PFedMe(lam=0.0, beta=0.7, **OPTIONS), rounds=3, workers=0)
    start = initial_state(SmallNet, 0)
    assert all(torch.equal(w, start[name]) for name, w in run.last.state["model"].items())
    heads = [run.model(c.id).head.weight for c in small_clients()]
    assert not any(torch.equal(theta, start["head.weight"]) for theta in heads)
    assert not torch.equal(heads[0], heads[1])


def test_with_lambda_above_0_the_global_model_moves_and_is_not_what_is_evaluated():
    run = pf.federate(small_clients(), PFedMe(**OPTIONS), rounds=3, workers=0)
    w, start = run.last.state["model"], initial_state(SmallNet, 0)
    assert not any(torch.equal(tensor, start[name]) for name, tensor in w.items())
    for client in small_clients():
        assert not torch.equal(run.model(client.id).head.weight, w["head.weight"])
        for record in run.history:
            row = record["clients"][client.id]
            assert row["loss"] != row["server_loss"]
            assert row["val_loss"] != row["server_val_loss"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("steps", "weighted"),
    [(4, True), *(pytest.param(*c, marks=pytest.mark.slow) for c in ((1, False), (1, True), (4, False)))],
)
def test_pfedme_reaches_the_minimum_of_the_moreau_envelopes(steps, weighted):
    """F_i(w) = ½·m_i·(w − c_i)² with m = λa/(λ + a), so that R steps give w_i = c_i + (1 − ηm_i)^R (w − c_i)."""
    lam, eta = 2.0, 0.3
    method = PFedMe(lam=lam, k=20, personal_lr=0.25, local_steps=steps, batch_size=0, lr=eta, weighted=weighted)
    run = pf.federate(quadratics(), method, rounds=90 // steps, workers=0, evaluate_every=90 // steps)
    shares = [n / sum(COUNT) for n in COUNT] if weighted else [0.5, 0.5]
    m = [lam * a / (lam + a) for a in CURVATURE]
    pull = [s * (1 - (1 - eta * m_i) ** steps) for s, m_i in zip(shares, m, strict=True)]
    w = sum(p * c for p, c in zip(pull, OPTIMUM, strict=True)) / sum(pull)
    assert run.last.state["model"]["theta"].item() == pytest.approx(w, abs=1e-10)
    if steps == 1:  # no drift: the minimum of Σ F_i
        assert w == pytest.approx(sum(s * k * c for s, k, c in zip(shares, m, OPTIMUM, strict=True))
                                  / sum(s * k for s, k in zip(shares, m, strict=True)))  # fmt: skip
    for i, (a, c) in enumerate(zip(CURVATURE, OPTIMUM, strict=True)):
        last = c + (1 - eta * m[i]) ** (steps - 1) * (w - c)  # w_i before the last step; θ_i is its proximal point
        assert run.model(f"q{i}").theta.item() == pytest.approx((a * c + lam * last) / (a + lam), abs=1e-9)


@pytest.mark.parametrize("beta", [0.25, 1.0, 2.0])
@pytest.mark.one_case
def test_beta_mixes_the_old_and_the_new_global_model(beta):
    def after(beta):
        run = pf.federate(small_clients(), PFedMe(beta=beta, buffers="average", **OPTIONS), rounds=1, workers=0)
        return run.last.state

    start, plain, mixed = initial_state(SmallNet, 0), after(1.0), after(beta)
    for name, w in mixed["model"].items():
        torch.testing.assert_close(w, start[name] + beta * (plain["model"][name] - start[name]))
    assert "body.1.running_var" in mixed["buffers"]
    assert all(torch.equal(tensor, plain["buffers"][name]) for name, tensor in mixed["buffers"].items())


def test_all_clients_train_and_only_those_drawn_are_averaged():
    method = PFedMe(lam=2.0, k=20, personal_lr=0.25, batch_size=0, lr=0.3)
    run = pf.federate(quadratics(), method, rounds=1, clients_per_round=1, workers=0)
    rows = run.history[0]["clients"]
    (drawn,) = [i for i in (0, 1) if "bytes_up" in rows[f"q{i}"]]
    assert all("train_loss" in row and row["bytes_down"] > 0 for row in rows.values())
    assert set(run.last.client_states) == {"q0", "q1"}
    m = 2 * CURVATURE[drawn] / (2 + CURVATURE[drawn])
    expected = OPTIMUM[drawn] + (1 - 0.3 * m) * (1 - OPTIMUM[drawn])
    assert run.last.state["model"]["theta"].item() == pytest.approx(expected, abs=1e-10)
    for i, (a, c) in enumerate(zip(CURVATURE, OPTIMUM, strict=True)):
        assert run.model(f"q{i}").theta.item() == pytest.approx((a * c + 2) / (a + 2), abs=1e-10)


def test_clipping_bounds_the_inner_gradients():
    free, loose, tight = (
        pf.federate(still_clients(), PFedMe(clip_norm=bound, **OPTIONS), rounds=1, workers=0).last.state["model"]
        for bound in (None, 1e6, 1e-7)
    )
    start = initial_state(still, 0)
    for name, w in free.items():
        assert torch.equal(w, loose[name])
        torch.testing.assert_close(tight[name], start[name], rtol=0, atol=1e-6)
    assert not torch.allclose(free["head.weight"], start["head.weight"], atol=1e-4)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_weights_with_two_names_are_personal_under_both():
    clients = [pf.Client(c.id, Tied, c.train, c.test) for c in small_clients()]
    run = pf.federate(clients, PFedMe(lr=0.05), rounds=2, workers=0)
    model, own = run.model("client-0"), run.last.client_states["client-0"]["model"]
    assert torch.equal(model.first.weight, own["first.weight"])
    assert not torch.equal(model.first.weight, run.last.state["model"]["first.weight"])


def test_a_client_that_never_trained_has_the_global_model():
    client, method = small_clients(1)[0], PFedMe(buffers="average")
    down = Message({"model": initial_state(SmallNet, 4)}, {"lr": 0.1})
    model = method.personal_model(down, method.client_init(client, 0), client, 1)
    assert all(torch.equal(tensor, down.tensors["model"][name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("field", "value"),
    [("k", 0), ("lam", -1.0), ("beta", 0.0), ("personal_lr", 0.0), ("personal_lr", 0.2), ("lam", float("nan"))],
)
def test_pfedme_refuses_impossible_values(field, value):
    with pytest.raises(pf.UserError, match=f"{field} must be .* got {value}"):
        PFedMe(**{field: value})


# -- Per-FedAvg ---------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_per_fedavg_with_alpha_0_on_full_batches_is_fedavg_bit_for_bit(variant):
    options = {"lr": 0.1, "momentum": 0.5, "batch_size": 0, "local_epochs": 3, "weighted": True, "buffers": "average"}
    fedavg = pf.federate(still_clients(), FedAvg(**options), rounds=3, workers=0)
    meta = pf.federate(still_clients(), PerFedAvg(alpha=0.0, variant=variant, **options), rounds=3, workers=0)
    theirs, ours = fedavg.last.state["model"], meta.last.state["model"]
    assert "body.1.running_mean" in ours  # and so are BatchNorm's statistics: probing leaves them alone
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    for one, other in zip(fedavg.history, meta.history, strict=True):
        assert one["train_loss"] == other["train_loss"]
        for client, row in one["clients"].items():
            assert row["loss"] == other["clients"][client]["server_loss"]
    # the step of rate 0 moves no weight
    assert torch.equal(meta.model("client-0").head.weight, fedavg.model("client-0").head.weight)
    moved = pf.federate(still_clients(), PerFedAvg(alpha=0.1, variant=variant, **options), rounds=3, workers=0)
    assert without_durations(moved.history) != without_durations(meta.history)


def direction(client, **fields):
    """What one full-batch step of learning rate 1 subtracts, and the exact gradient of f(w − α∇f(w)) by autograd."""
    method = PerFedAvg(batch_size=0, lr=1.0, **fields)
    start = initial_state(client.model, 0)
    with exclusive_single_torch_thread_with_grad():
        reply, _ = method.local_update(Message({"model": start}, {"lr": 1.0}), {}, client, 0)
    step = torch.cat([(start[name] - reply.tensors["model"][name]).flatten() for name in start])
    w = [tensor.clone().requires_grad_() for tensor in start.values()]
    inner = torch.autograd.grad(loss_at(client, start, w), w, create_graph=True)
    adapted = [p - method.alpha * g for p, g in zip(w, inner, strict=True)]
    value = loss_at(client, start, adapted)
    first_order = torch.cat([g.flatten() for g in torch.autograd.grad(value, adapted, retain_graph=True)])
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(value, w)])
    return step, first_order, exact


@pytest.mark.parametrize("delta", [1e-3, 1.0, 50.0])
def test_hessian_free_is_the_exact_meta_gradient_on_quadratics_whatever_delta(delta):
    step, first_order, exact = direction(line_client(), variant="hf", alpha=0.3, delta=delta)
    torch.testing.assert_close(step, exact, rtol=0, atol=1e-9)
    assert not torch.allclose(first_order, exact, atol=1e-3)


def test_first_order_leaves_the_hessian_out():
    for client in (line_client(), plain_client()):
        step, first_order, exact = direction(client, variant="fo", alpha=0.3)
        torch.testing.assert_close(step, first_order, rtol=0, atol=1e-12)
        assert not torch.allclose(step, exact, atol=1e-4)


def test_hessian_free_is_of_second_order_in_delta():
    errors = []
    for delta in (1.0, 0.1):
        step, _, exact = direction(plain_client(), variant="hf", alpha=0.5, delta=delta)
        errors.append((step - exact).norm().item())
    assert 50 < errors[0] / errors[1] < 200


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_per_fedavg_reaches_its_closed_form_fixed_point(variant):
    """The direction is s_i·(w − c_i) with s = a(1 − αa), or a(1 − αa)² with the Hessian."""
    alpha, beta, steps = 0.1, 0.2, 3
    method = PerFedAvg(variant=variant, alpha=alpha, lr=beta, batch_size=0, local_steps=steps)
    run = pf.federate(quadratics(), method, rounds=90, workers=0, evaluate_every=90)
    slopes = [a * (1 - alpha * a) ** (1 if variant == "fo" else 2) for a in CURVATURE]
    pull = [1 - (1 - beta * s) ** steps for s in slopes]
    w = sum(p * c for p, c in zip(pull, OPTIMUM, strict=True)) / sum(pull)
    assert run.last.state["model"]["theta"].item() == pytest.approx(w, abs=1e-10)
    for i, (a, c) in enumerate(zip(CURVATURE, OPTIMUM, strict=True)):
        assert run.model(f"q{i}").theta.item() == pytest.approx(w - alpha * a * (w - c), abs=1e-10)


class Watching(nn.Module):
    """Keeps what it was trained on."""

    seen: tuple[list[float], ...] = ()

    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        if self.training:
            type(self).seen += (sorted(x.flatten().tolist()),)
        return self.theta * x


@pytest.mark.parametrize(("variant", "batches"), [("fo", [0, 1]), ("hf", [0, 1, 2, 2])])
def test_a_step_takes_different_minibatches(variant, batches):
    x = torch.arange(12.0).view(12, 1)
    client = pf.Client("one", Watching, (x, x), (x, x), task="regression")
    method, start = PerFedAvg(variant=variant, batch_size=4, local_steps=1), initial_state(Watching, 0)
    Watching.seen = ()
    method.local_update(Message({"model": start}, {"lr": 0.1}), {}, client, 0)
    different = list(dict.fromkeys(map(tuple, Watching.seen)))
    assert len(different) == max(batches) + 1
    assert [different.index(tuple(batch)) for batch in Watching.seen] == batches
    assert len({value for batch in different for value in batch}) == 4 * len(different)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_evaluated_model_is_adapted_on_training_data_alone_at_a_constant_rate(steps):
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "schedule": "exponential", "decay": 0.5}
    method = PerFedAvg(alpha=0.2, adapt_steps=steps, batch_size=0, **options)
    models = []
    for test_seed in (1, 2):
        client = line_client(test_seed)
        run = pf.federate([client], method, rounds=3, workers=0)
        w = [run.last.state["model"]["weight"].clone()]
        for _ in range(steps):  # plain gradient descent, whatever momentum and weight decay the outer steps have
            w[0].requires_grad_()
            w = [(w[0] - 0.2 * torch.autograd.grad(loss_at(client, ["weight"], w), w)[0]).detach()]
        torch.testing.assert_close(run.model("one").weight.detach(), w[0], rtol=1e-12, atol=1e-12)
        models.append(run.model("one").weight)
    assert torch.equal(*models)


def test_the_unadapted_model_is_evaluated_beside_it():
    run = pf.federate(small_clients(), PerFedAvg(alpha=0.1, **OPTIONS), rounds=2, workers=0)
    for row in run.history[-1]["clients"].values():
        assert row["loss"] != row["server_loss"]


@pytest.mark.parametrize("variant", ["fo", "hf"])
@pytest.mark.one_case
def test_statistics_move_once_a_step(variant):
    method = PerFedAvg(variant=variant, local_steps=3, batch_size=4, alpha=0.1)
    run = pf.federate(small_clients(), method, rounds=2, workers=0)
    assert int(run.last.client_states["client-0"]["buffers"]["body.1.num_batches_tracked"]) == 2 * 3


@pytest.mark.parametrize(("field", "value"), [("alpha", -0.1), ("delta", 0.0), ("adapt_steps", 0)])
def test_per_fedavg_refuses_impossible_values(field, value):
    with pytest.raises(pf.UserError, match=f"{field} must be .* got {value}"):
        PerFedAvg(**{field: value})


def test_per_fedavg_names_its_variants():
    with pytest.raises(pf.UserError, match=r"unknown variant 'FO'.*fo, hf"):
        PerFedAvg(variant="FO")
