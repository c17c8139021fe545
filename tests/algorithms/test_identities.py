"""Theory that the averaging methods must meet: closed forms and equivalences, no golden numbers."""

import math
from dataclasses import dataclass

import pytest
import torch
from closed_forms import COUNT, CURVATURE, OPTIMUM, Line, quadratics
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.algorithms import FedAvg, FedAvgFT, FedProx, Local
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.module_cache import initial_state
from polyfed.core.seeds import derive_seed
from polyfed.core.training.loop import fit
from polyfed.testing import SmallNet, assert_runs_equal, small_clients, without_durations


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("steps", "weighted"),
    [(1, False), (5, True), *(pytest.param(*c, marks=pytest.mark.slow) for c in ((1, True), (5, False)))],
)
def test_fedavg_reaches_its_closed_form_fixed_point(steps, weighted):
    lr = 0.1
    method = FedAvg(local_steps=steps, batch_size=0, lr=lr, weighted=weighted)
    run = pf.federate(quadratics(), method, rounds=300, workers=0, evaluate_every=300)
    shares = [n / sum(COUNT) for n in COUNT] if weighted else [0.5, 0.5]
    # K steps of gradient descent: θ_i = c_i + (1 − ηa_i)^K (θ − c_i)
    pull = [w * (1 - (1 - lr * a) ** steps) for w, a in zip(shares, CURVATURE, strict=True)]
    expected = sum(p * c for p, c in zip(pull, OPTIMUM, strict=True)) / sum(pull)
    assert run.model("q0").theta.item() == pytest.approx(expected, abs=1e-10)
    minimiser = sum(w * a * c for w, a, c in zip(shares, CURVATURE, OPTIMUM, strict=True)) / sum(
        w * a for w, a in zip(shares, CURVATURE, strict=True)
    )
    assert (abs(expected - minimiser) < 1e-12) == (steps == 1)  # more than one step: the known drift


@pytest.mark.thorough
def test_fedprox_reaches_its_closed_form_fixed_point():
    mu, shares = 0.7, [n / sum(COUNT) for n in COUNT]
    method = FedProx(local_steps=100, batch_size=0, lr=0.1, mu=mu)
    run = pf.federate(quadratics(), method, rounds=20, workers=0, evaluate_every=20)
    # exact local minimisers: θ_i = (a_i c_i + μ θ̄)/(a_i + μ)
    pull = [w * a / (a + mu) for w, a in zip(shares, CURVATURE, strict=True)]
    expected = sum(p * c for p, c in zip(pull, OPTIMUM, strict=True)) / sum(pull)
    assert run.model("q0").theta.item() == pytest.approx(expected, abs=1e-8)


def test_local_reaches_each_clients_own_optimum():
    run = pf.federate(quadratics(), Local(local_steps=50, batch_size=0, lr=0.2), rounds=10, workers=0)
    assert [run.model(f"q{i}").theta.item() for i in (0, 1)] == pytest.approx(OPTIMUM, abs=1e-8)


def test_fedprox_with_mu_0_is_fedavg_bit_for_bit():
    options = {"lr": 0.05, "local_epochs": 2, "batch_size": 8, "momentum": 0.9}
    fedavg, fedprox = (
        pf.federate(small_clients(), m, rounds=3, workers=0) for m in (FedAvg(**options), FedProx(mu=0.0, **options))
    )
    assert_runs_equal(fedavg, fedprox)
    pulled = pf.federate(small_clients(), FedProx(mu=0.5, **options), rounds=3, workers=0)
    assert without_durations(pulled.history) != without_durations(fedavg.history)


def test_large_mu_keeps_clients_at_the_received_model():
    options = {"lr": 0.001, "local_epochs": 5, "batch_size": 0, "buffers": "recompute"}
    start = initial_state(SmallNet, 0)

    def distance(mu):
        run = pf.federate(small_clients(), FedProx(mu=mu, **options), rounds=1, workers=0)
        return sum(float((p.detach() - start[n]).square().sum()) for n, p in run.model("client-0").named_parameters())

    assert distance(900.0) < 0.25 * distance(0.0)


def plain_net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def with_model(clients, factory):
    return [pf.Client(c.id, factory, c.train, c.test, c.val) for c in clients]


def test_one_client_and_one_full_batch_step_are_centralised_sgd():
    (client,) = with_model(small_clients(1), plain_net)
    run = pf.federate([client], FedAvg(batch_size=0, lr=0.3), rounds=5, workers=0)
    model = plain_net()
    model.load_state_dict(initial_state(plain_net, 0))
    for _ in range(5):
        loss = F.cross_entropy(model(client.train.x), client.train.y)
        for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            p.data -= 0.3 * g
    for name, tensor in run.model(client.id).state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_one_full_batch_step_of_all_clients_is_centralised_sgd_on_the_pooled_data():
    clients = with_model(small_clients(), plain_net)
    run = pf.federate(clients, FedAvg(batch_size=0, lr=0.3), rounds=4, workers=0)
    x, y = torch.cat([c.train.x for c in clients]), torch.cat([c.train.y for c in clients])
    model = plain_net()
    model.load_state_dict(initial_state(plain_net, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for name, tensor in run.model("client-1").state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [FedAvg, FedProx])
@pytest.mark.one_case
def test_identical_clients_average_to_any_of_them(method):
    def twins(number):
        source = small_clients(1)[0]
        return [pf.Client(f"twin-{k}", SmallNet, source.train, source.test) for k in range(number)]

    # full batch and no dropout: only then do twins, whose random streams differ, compute the same
    def still():
        net = SmallNet()
        net.body[3] = nn.Identity()
        return net

    options = {"batch_size": 0, "lr": 0.1, "local_epochs": 3}
    runs = [pf.federate(with_model(twins(n), still), method(**options), rounds=3, workers=0) for n in (1, 3)]
    one, many = (run.model("twin-0").state_dict() for run in runs)
    for name in one:
        torch.testing.assert_close(one[name], many[name], rtol=1e-5, atol=1e-6)


def test_local_of_a_lone_client_is_fedavg_of_one():
    local = pf.federate(small_clients(1), Local(lr=0.1), rounds=3, workers=0)
    fedavg = pf.federate(small_clients(1), FedAvg(lr=0.1), rounds=3, workers=0)
    ours, theirs = local.model("client-0").state_dict(), fedavg.model("client-0").state_dict()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_fine_tuning_is_fedavg_followed_by_local_epochs():
    options = {"lr": 0.05, "batch_size": 8}
    fedavg = pf.federate(small_clients(), FedAvg(**options), rounds=2, workers=0)
    tuned = pf.federate(small_clients(), FedAvgFT(finetune_epochs=2, **options), rounds=2, workers=0)
    assert torch.equal(fedavg.last.state["model"]["head.weight"], tuned.last.state["model"]["head.weight"])
    weights = [tuned.model(c.id).head.weight for c in small_clients()]
    assert not any(torch.equal(w, fedavg.model("client-0").head.weight) for w in weights)
    assert not torch.equal(weights[0], weights[1])
    before, after = (sum(r["train_loss"] for r in run.history[-1]["clients"].values()) for run in (fedavg, tuned))
    assert before == after  # what federates does not depend on the fine-tuning


@pytest.mark.parametrize(("own_lr", "lr"), [(None, 0.05 * 0.5), (0.2, 0.2)])
@pytest.mark.one_case
def test_fine_tuning_is_fit_from_the_global_model(own_lr, lr):
    """By hand: from θ, with the round's seed of the client, its data, the epochs and the learning rate."""
    options = {"lr": 0.05, "schedule": "exponential", "decay": 0.5, "batch_size": 8, "local_epochs": 3}
    run = pf.federate(
        small_clients(), FedAvgFT(finetune_epochs=2, finetune_lr=own_lr, **options), rounds=2, seed=5, workers=0
    )
    for client in small_clients():
        by_hand = SmallNet()
        by_hand.load_state_dict(run.last.state["model"])
        with exclusive_single_torch_thread_with_grad():
            seed = derive_seed(5, 2, client.id, "personal")
            fit(by_hand, client.train, FedAvg(**{**options, "local_epochs": 2}), lr=lr, seed=seed)
        ours = run.model(client.id).state_dict()
        assert all(torch.equal(ours[name], tensor) for name, tensor in by_hand.state_dict().items())


@pytest.mark.parametrize("policy", ["local", "recompute"])
def test_fine_tuning_starts_from_and_ends_with_statistics_of_the_clients_data(policy):
    method = FedAvgFT(buffers=policy, batch_size=0, lr=0.5, finetune_lr=0.5)
    run = pf.federate(small_clients(), method, rounds=1, clients_per_round=1, workers=0)
    took_part = {i for i, row in run.history[0]["clients"].items() if "bytes_up" in row}
    for client in small_clients():
        if policy == "local" and client.id in took_part:
            continue
        tuned, theta = run.model(client.id), SmallNet()
        theta.load_state_dict(run.last.state["model"], strict=False)
        # One full-batch step moves the statistics towards those of the same data under θ, where they already are;
        # under "recompute" they are those of the tuned weights.
        hidden = (theta if policy == "local" else tuned).body[0](client.train.x)
        torch.testing.assert_close(tuned.body[1].running_mean, hidden.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(tuned.body[1].running_var, hidden.var(0), rtol=1e-4, atol=1e-5)
        other = (tuned if policy == "local" else theta).body[0](client.train.x)
        assert not torch.allclose(tuned.body[1].running_mean, other.mean(0), rtol=1e-4, atol=1e-5)


STATES = []


@dataclass(frozen=True, kw_only=True)
class Recorded(FedAvg):
    def aggregate(self, server_state, replies, server):
        STATES.append(super().aggregate(server_state, replies, server))
        return STATES[-1]


@pytest.mark.parametrize("schedule", ["cosine", "exponential"])
def test_each_round_makes_its_step_with_its_learning_rate(schedule):
    STATES.clear()
    method = Recorded(batch_size=0, lr=0.2, schedule=schedule, decay=0.7)
    pf.federate(quadratics(), method, rounds=5, workers=0, evaluate_every=5)
    assert len(STATES) == 5
    theta = initial_state(Line, 0)["theta"].item()
    for past, state in enumerate(STATES):
        eta = 0.2 * 0.7**past if schedule == "exponential" else 0.1 * (1 + math.cos(math.pi * past / 5))
        slope = sum(n / 40 * a * (theta - c) for n, a, c in zip(COUNT, CURVATURE, OPTIMUM, strict=True))
        theta -= eta * slope
        assert state["model"]["theta"].item() == pytest.approx(theta, rel=1e-12)


OPTIONS = {"lr": 0.05, "batch_size": 8, "local_epochs": 2}


class TestBufferPolicies:
    def run(self, policy, **options):
        method = FedAvg(buffers=policy, **(OPTIONS | options))
        return pf.federate(small_clients(), method, rounds=2, workers=0)

    def test_average_gives_every_client_the_same_statistics(self):
        run = self.run("average")
        means = [run.model(c.id).body[1].running_mean for c in small_clients()]
        assert torch.equal(means[0], means[1])
        counter = run.last.state["model"]["body.1.num_batches_tracked"]
        assert counter.dtype == torch.int64
        # Of 20, 26 and 32 examples in batches of 8, so that in a round of two epochs clients count 6, 8 and 8.
        assert int(counter) == 2 * round((20 * 6 + 26 * 8 + 32 * 8) / 78)

    def test_without_weights_counters_go_up_as_they_came_down(self):
        """They would tell the number of examples, which such a method does not need."""
        run = self.run("average", weighted=False)
        assert int(run.last.state["model"]["body.1.num_batches_tracked"]) == 0
        assert float(run.last.state["model"]["body.1.running_mean"].abs().max()) > 0

    def test_average_is_the_weighted_mean_of_the_clients_statistics(self):
        clients, method = small_clients(), FedAvg(buffers="average", **OPTIONS)
        run = pf.federate(clients, method, rounds=1, workers=0)
        alone = [pf.federate([c], method, rounds=1, workers=0).model(c.id).body[1].running_var for c in clients]
        sizes = torch.tensor([float(len(c.train)) for c in clients])
        expected = (torch.stack(alone) * (sizes / sizes.sum())[:, None]).sum(0)
        torch.testing.assert_close(run.model("client-0").body[1].running_var, expected)

    def test_local_keeps_statistics_with_the_client_and_off_the_wire(self):
        run = self.run("local")
        means = [run.model(c.id).body[1].running_mean for c in small_clients()]
        assert not torch.allclose(means[0], means[2])
        assert "body.1.running_mean" not in run.last.state["model"]
        assert torch.equal(run.last.client_states["client-0"]["buffers"]["body.1.running_mean"], means[0])

    def test_recompute_gives_the_statistics_of_the_clients_own_data(self):
        run = self.run("recompute")
        assert "body.1.running_mean" not in run.last.state["model"]
        for client in small_clients():
            model = run.model(client.id)
            hidden = model.body[0](client.train.x)
            torch.testing.assert_close(model.body[1].running_mean, hidden.mean(0))
            torch.testing.assert_close(model.body[1].running_var, hidden.var(0))

    def test_a_client_that_never_took_part_is_not_evaluated_with_untrained_statistics(self):
        method = FedAvg(buffers="local", **OPTIONS)
        run = pf.federate(small_clients(), method, rounds=1, clients_per_round=1, workers=0)
        for client in small_clients():
            mean = run.model(client.id).body[1].running_mean
            assert not torch.equal(mean, torch.zeros_like(mean))
