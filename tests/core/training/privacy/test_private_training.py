"""Differentially private training: the accountant, clipped gradients against plain autograd, runs, and what is refused."""

import copy
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.training.loop import fit
from polyfed.core.training.privacy import Privacy, private_backend
from polyfed.core.training.privacy.private_gradients import (
    LayerOutputs,
    sum_clipped_gradients_of_examples,
    sum_clipped_gradients_of_groups,
)
from polyfed.core.training.privacy.sampled_gaussian import epsilon_of_steps, noise_multiplier_for_epsilon
from polyfed.models.lora import add_lora
from polyfed.testing import example_of, small_clients
from tests.few_cases import few

PRIVATE = [name for name, method in REGISTRY.items() if getattr(method, "private_fits", ())]


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


class MeanOfInputs(nn.Module):
    """Keeps a running mean of its inputs, and counts its calls."""

    def __init__(self, assigns):
        super().__init__()
        self.assigns, self.layer = assigns, nn.Linear(6, 3)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.calls += 1
            if self.assigns:
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            else:
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.layer(x)


def clients(number=3, model=plain):
    return [pf.Client(c.id, model, c.train, c.test) for c in small_clients(number)]


# -- the accountant -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "sigma", "steps"), [(0.01, 1.0, 1000), (1.0, 3.0, 50), (0.3, 2.0, 400), (0.05, 1.5, 200)]
)
def test_epsilon_is_that_of_googles_accountant_from_above(rate, sigma, steps):
    dp_accounting = pytest.importorskip("dp_accounting")
    event = dp_accounting.GaussianDpEvent(sigma)
    sampled = event if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, event)
    theirs = dp_accounting.rdp.RdpAccountant(orders=[*range(2, 65), 128, 256])
    theirs.compose(dp_accounting.SelfComposedDpEvent(sampled, steps))
    assert epsilon_of_steps(rate, sigma, steps, 1e-5) == pytest.approx(theirs.get_epsilon(1e-5), rel=0.01)


def test_one_full_batch_step_is_no_better_than_the_gaussian_mechanism():
    """δ of one step with noise σ is Φ(1/(2σ) − εσ) − e^ε Φ(−1/(2σ) − εσ), exactly (Balle and Wang 2018)."""
    normal = torch.distributions.Normal(0.0, 1.0)
    for sigma in (0.8, 2.0, 5.0):
        epsilon = epsilon_of_steps(1.0, sigma, 1, 1e-5)
        ends = torch.tensor([1 / (2 * sigma) - epsilon * sigma, -1 / (2 * sigma) - epsilon * sigma]).double()
        first, second = normal.cdf(ends).tolist()
        assert first - math.exp(epsilon) * second <= 1e-5


def test_noise_is_the_least_that_meets_the_epsilon():
    sigma = noise_multiplier_for_epsilon(3.0, 0.1, 200, 1e-5)
    assert epsilon_of_steps(0.1, sigma, 200, 1e-5) <= 3.0 < epsilon_of_steps(0.1, 0.99 * sigma, 200, 1e-5)
    with pytest.raises(UserError, match="no noise gives epsilon 1e-07"):
        noise_multiplier_for_epsilon(1e-7, 0.1, 200, 1e-5)


# -- gradients ----------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Has a layer for which torch.func has no rule."""

    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.cells(x.unsqueeze(1))[0][:, -1])


@pytest.mark.parametrize("network", [plain, lambda: nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3)),
                                     Recurrent])  # fmt: skip
def test_clipped_gradients_are_those_of_autograd_one_by_one(network):
    torch.manual_seed(0)
    model, x, y = network(), torch.randn(7, 6), torch.arange(7) % 3
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for row in range(7):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[row : row + 1]), y[row : row + 1]).backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
        for total, p in zip(expected, model.parameters(), strict=True):
            total += p.grad * min(1.0, 0.5 / float(norm))
    found = sum_clipped_gradients_of_examples(model, x, y, nn.functional.cross_entropy, 0.5)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    alone = [torch.tensor([row]) for row in range(7)]
    for ours, theirs in zip(
        sum_clipped_gradients_of_groups(model, x, y, alone, nn.functional.cross_entropy, 0.5), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_steps_of_a_training_share_the_shapes_of_the_layers_outputs(monkeypatch):
    """With the same bits as if each step found them anew."""
    calls, of = [], LayerOutputs.of.__func__
    monkeypatch.setattr(LayerOutputs, "of", classmethod(lambda cls, *more: calls.append(1) or of(cls, *more)))
    options = pf.algorithms.FedAvg(batch_size=8, local_steps=5, privacy=Privacy(noise_multiplier=1.0, run_steps=5))
    (client,) = clients(1)
    torch.manual_seed(0)
    first = plain()
    second = copy.deepcopy(first)
    fit(first, client, options, lr=0.1, seed=0)
    assert len(calls) == 1
    summed = private_backend.sum_clipped_gradients_of_examples
    monkeypatch.setattr(private_backend, "sum_clipped_gradients_of_examples", lambda *more: summed(*more[:-1]))
    fit(second, client, options, lr=0.1, seed=0)
    assert len(calls) > 2
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_one_unit_moves_the_sum_by_at_most_the_norm():
    torch.manual_seed(1)
    model, x, y = plain(), 100 * torch.randn(9, 6), torch.arange(9) % 3
    whole, less = (
        sum_clipped_gradients_of_examples(model, x[:n], y[:n], nn.functional.cross_entropy, 1.0) for n in (9, 8)
    )
    assert float(torch.sqrt(sum((a - b).square().sum() for a, b in zip(whole, less, strict=True)))) <= 1.0 + 1e-5
    groups = [torch.tensor([0, 1, 2, 3]), torch.tensor([4]), torch.tensor([5, 6, 7, 8])]
    whole, less = (
        sum_clipped_gradients_of_groups(model, x, y, groups[:n], nn.functional.cross_entropy, 1.0) for n in (3, 2)
    )
    assert float(torch.sqrt(sum((a - b).square().sum() for a, b in zip(whole, less, strict=True)))) <= 1.0 + 1e-5


def test_noise_has_the_stated_size_and_no_example_is_needed():
    """With a sampling rate of nearly 0 a step is noise alone: its variance over many weights is (η·σ·C/B)²."""
    model = nn.Linear(2000, 1)
    before = model.weight.detach().clone()
    data = Examples(torch.zeros(1000, 2000), torch.zeros(1000, 1))
    method = pf.algorithms.Local(
        batch_size=1, local_steps=1, privacy=Privacy(noise_multiplier=2.0, max_grad_norm=0.5, run_steps=1)
    )
    fit(model, data, method, lr=1.0, seed=3, task="regression")
    assert float((model.weight.detach() - before).std()) == pytest.approx(1.0, rel=0.1)


# -- runs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n if n == "fedavg" else pytest.param(n, marks=pytest.mark.thorough) for n in PRIVATE])
def test_each_method_that_privacy_covers_trains_reports_epsilon_and_no_training_loss(name):
    example = example_of(name)
    method = example.build(batch_size=8, privacy=Privacy(target_epsilon=5.0))
    networks = [pf.Client(c.id, plain, c.train, c.test) for c in example.clients()]
    if "adapters" in method.requires:
        networks = clients(model=lambda: add_lora(plain(), rank=2, train=["2.*"]))
    run = pf.federate(networks, method, rounds=2, seed=3, workers=0, public=example.public())
    for record, most in zip(run.history, (5.0, 5.0), strict=True):
        assert all(0 < epsilon <= most for epsilon in record["epsilon"].values())
        assert all("train_loss" not in row for row in record["clients"].values())
    assert run.history[0]["epsilon"]["client-0"] < run.history[1]["epsilon"]["client-0"]


@pytest.mark.thorough
def test_with_little_noise_it_learns_and_with_much_it_does_not():
    def accuracy(sigma):
        method = pf.algorithms.FedAvg(
            lr=0.3, batch_size=16, local_epochs=2, privacy=Privacy(noise_multiplier=sigma, max_grad_norm=2.0)
        )
        return pf.federate(clients(), method, rounds=8, seed=1, workers=0).history[-1]["summary"]["accuracy"]["mean"]

    assert accuracy(0.05) > accuracy(60.0) + 0.2


def test_without_privacy_nothing_changes_and_seeds_decide(tmp_path):
    private = pf.algorithms.FedAvg(lr=0.1, privacy=Privacy(target_epsilon=8.0))
    first, again = (pf.federate(clients(), private, rounds=2, seed=4, workers=0) for _ in range(2))
    assert torch.equal(first.model("client-0")[0].weight, again.model("client-0")[0].weight)
    other = pf.federate(clients(), private, rounds=2, seed=5, workers=0)
    assert not torch.equal(first.model("client-0")[0].weight, other.model("client-0")[0].weight)


@pytest.mark.parametrize("workers", few([0, 1], [1]))
def test_a_stopped_run_goes_on_with_the_same_noise(tmp_path, workers):
    class StopAfterOne(pf.Callback):
        def on_round(self, record):
            return record["round"] < 1

    private = pf.algorithms.FedAvg(lr=0.1, privacy=Privacy(target_epsilon=8.0))
    whole = pf.federate(clients(), private, rounds=2, seed=4, workers=0)
    out = tmp_path / "run"
    pf.federate(clients(), private, rounds=2, seed=4, workers=workers, out=out, callbacks=[StopAfterOne()])
    resumed = pf.resume(out, clients=clients(), algorithm=private if workers else None, workers=workers)
    assert torch.equal(whole.model("client-0")[0].weight, resumed.model("client-0")[0].weight)
    assert resumed.history[-1]["epsilon"] == whole.history[-1]["epsilon"]


def test_patients_are_units_if_asked():
    groups = np.arange(20) // 4
    people = []
    for client in small_clients(2):
        x, y = client.train.batch(torch.arange(20))
        people.append(pf.Client(client.id, plain, Examples(x, y, group=groups), client.test))
    epsilons = {}
    for unit in ("example", "group"):
        method = pf.algorithms.FedAvg(lr=0.1, batch_size=2, privacy=Privacy(noise_multiplier=1.0, unit=unit))
        run = pf.federate(people, method, rounds=2, seed=0, workers=0)
        epsilons[unit] = run.history[-1]["epsilon"]["client-0"]
    assert epsilons["group"] > epsilons["example"]  # two of five are sampled oftener than two of twenty


# -- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "target_epsilon, from which the noise follows, or noise_multiplier, one of them"),
        ({"target_epsilon": 3.0, "noise_multiplier": 1.0}, "one of them"),
        ({"target_epsilon": 0.0}, "target_epsilon must be a positive number, got 0.0"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier must be a positive number"),
        ({"target_epsilon": 3.0, "delta": 1.0}, "delta must be above 0 and below 1, got 1.0"),
        ({"target_epsilon": 3.0, "max_grad_norm": -1}, "max_grad_norm must be a positive number, got -1"),
        ({"target_epsilon": 3.0, "unit": "site"}, "unit must be 'example' or 'group', got 'site'"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        Privacy(**options)


@pytest.mark.parametrize(
    ("method", "options", "model", "words"),
    [
        ("scaffold", {}, plain, "Scaffold: privacy is not known to cover .* methods that it covers: .*fedavg, fedprox"),
        ("fedavg", {"sampler": "balanced"}, plain, "privacy does not cover sampler='balanced'"),
        ("fedavg", {"class_weights": "balanced"}, plain, "privacy does not cover class_weights='balanced'"),
        ("fedavg", {}, lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)),
         r"1 .BatchNorm1d. mixes the examples .*GroupNorm"),
        ("fedavg", {}, lambda: MeanOfInputs(assigns=False), "computes the buffer 'mean' from the examples"),
        ("fedavg", {}, lambda: MeanOfInputs(assigns=True), "computes the buffer 'mean' from the examples"),
    ],
)  # fmt: skip
def test_what_noise_does_not_cover_is_refused_before_round_1(method, options, model, words):
    algorithm = REGISTRY[method](privacy=Privacy(target_epsilon=3.0), **options)
    with pytest.raises(UserError, match=words):
        pf.federate(clients(model=model), algorithm, rounds=1, workers=0)


def test_a_buffer_of_weights_alone_may_change():
    def network():
        return nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(6, 4)), nn.ReLU(), nn.Linear(4, 3))

    method = pf.algorithms.FedAvg(privacy=Privacy(noise_multiplier=1.0))
    run = pf.federate(clients(2, network), method, rounds=1, workers=0)
    assert set(run.history[0]["epsilon"]) == {"client-0", "client-1"}


def test_an_epsilon_that_cannot_be_met_and_units_that_are_not_known_are_refused():
    with pytest.raises(UserError, match="client 'client-0': privacy: no noise gives epsilon"):
        pf.federate(clients(), pf.algorithms.FedAvg(privacy=Privacy(target_epsilon=1e-7)), rounds=2, workers=0)
    with pytest.raises(UserError, match="'client-0': privacy with unit 'group' needs to know"):
        pf.federate(
            clients(), pf.algorithms.FedAvg(privacy=Privacy(target_epsilon=3, unit="group")), rounds=2, workers=0
        )
    with pytest.warns(RuntimeWarning, match="delta=0.1 is not below one over the 20 examples of client 'client-0'"):
        pf.federate(clients(), pf.algorithms.FedAvg(privacy=Privacy(target_epsilon=3, delta=0.1)), rounds=1, workers=0)


@pytest.mark.thorough
def test_a_configuration_names_options_of_privacy(tmp_path, capsys):
    from polyfed.cli.main import main

    words = ["run", "heart", "--model", "mlp", "--algorithm", "fedavg", "--rounds", "1", "--baselines", "[]", "--quiet"]
    words += ["--out", str(tmp_path / "r")]
    assert main([*words, "--algorithm.privacy.targetepsilon", "8"]) == 2
    assert "unknown option 'targetepsilon'; did you mean target_epsilon" in capsys.readouterr().err
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main([*words, "--algorithm.privacy.target_epsilon", "8"]) == 0


def test_a_comparison_leaves_out_what_noise_does_not_cover():
    clients_alike = clients(2)
    private = pf.algorithms.FedAvg(lr=0.1, privacy=Privacy(target_epsilon=8.0))
    found = pf.compare(
        clients_alike, [private, "scaffold"], rounds=1, seeds=1, tune="none", references=False, parallel=1, quiet=True
    )
    assert "privacy is not known to cover" in found.skipped["scaffold"]
    assert set(found.results["methods"]) == {"local", "fedavg", "fedavg_ft"}


def test_a_comparison_with_privacy_goes_on_where_it_was_stopped(tmp_path):
    private = pf.algorithms.FedAvg(lr=0.1, privacy=Privacy(target_epsilon=8.0))
    words = {
        "rounds": 1,
        "seeds": 1,
        "tune": "none",
        "references": False,
        "parallel": 1,
        "quiet": True,
        "out": tmp_path,
    }
    first = pf.compare(clients(2), [private], **words)
    finished = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("metrics.jsonl"))
    again = pf.compare(clients(2), [private], **words)
    assert sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("metrics.jsonl")) == finished
    assert again.table() == first.table()


def test_one_client_alone_cannot_be_without():
    with pytest.raises(UserError, match=r"by_client\['client-0'\] cannot have 'privacy'; it is the same for all"):
        pf.algorithms.Local(privacy=Privacy(target_epsilon=8.0), by_client={"client-0": {"privacy": None}})
    method = pf.algorithms.Local(privacy=Privacy(target_epsilon=8.0), by_client={"client-0": {"sampler": "balanced"}})
    with pytest.raises(UserError, match="privacy does not cover sampler='balanced'"):
        pf.federate(clients(), method, rounds=1, workers=0)


def test_a_survival_loss_is_refused():
    x, y = torch.randn(12, 3), torch.stack([torch.arange(12) + 1.0, torch.ones(12)], 1)
    client = pf.Client("a", lambda: nn.Linear(3, 1), (x[:8], y[:8]), (x[8:], y[8:]), task="survival")
    with pytest.raises(UserError, match="privacy needs a loss that is a mean over examples"):
        pf.federate([client], pf.algorithms.FedAvg(privacy=Privacy(target_epsilon=3.0)), rounds=1, workers=0)


def mix_rows(x, generator):
    return 0.5 * (x + x[torch.randperm(len(x), generator=generator)])


def jitter(x, generator):
    return x + 0.1 * torch.randn(x.shape, generator=generator)


@pytest.mark.parametrize("part", [{"augment": mix_rows}, {"transform": lambda x: x - x.mean(0)}])
def test_inputs_that_mix_the_examples_of_a_minibatch_are_refused(part):
    private = pf.algorithms.FedAvg(privacy=Privacy(target_epsilon=3.0))
    (client,) = clients(1)
    mixed = pf.Client("a", plain, replace(client.train, **part), client.test)
    with pytest.raises(UserError, match="'a': transform or augment mixes the examples of a minibatch"):
        pf.federate([mixed], private, rounds=1, workers=0)
    numpy_noise = np.random.default_rng(0)
    for noise in (  # of the generator that it is given, of torch's default one, and of another
        jitter,
        lambda x, generator: x + 0.1 * torch.randn(x.shape),
        lambda x, generator: x + torch.from_numpy(numpy_noise.normal(size=x.shape)).float(),
    ):
        rowwise = replace(client.train, augment=noise, transform=lambda x: 2 * x)
        pf.federate([pf.Client("a", plain, rowwise, client.test)], private, rounds=1, workers=0)


@pytest.mark.parametrize("sampler", ["oort", "power_of_choice"])
def test_samplers_that_read_training_losses_are_refused(sampler):
    private = pf.algorithms.FedAvg(privacy=Privacy(target_epsilon=3.0))
    with pytest.raises(UserError, match="reads the clients' training losses, which privacy withholds"):
        pf.federate(clients(), private, rounds=1, clients_per_round=1, workers=0, sampler=sampler)


def test_an_example_that_is_there_twice_is_refused_unless_it_is_one_group():
    (client,) = clients(1)
    twice = replace(client.train, index=torch.tensor([0, 1, 2, 3, 4, 5, 5, 5]))
    private = pf.algorithms.FedAvg(privacy=Privacy(noise_multiplier=1.0))
    with pytest.raises(UserError, match="'a': 2 training examples are there more than once"):
        pf.federate([pf.Client("a", plain, twice, client.test)], private, rounds=1, workers=0)
    grouped = pf.Client("a", plain, replace(twice, group=np.arange(len(twice.y))), client.test)
    by_group = pf.algorithms.FedAvg(privacy=Privacy(noise_multiplier=1.0, unit="group"))
    pf.federate([grouped], by_group, rounds=1, workers=0)
