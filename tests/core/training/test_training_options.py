"""The options of local training that every method has: optimisers, warm-up, accumulation, rates by name, losses, samplers
and early stopping, each against its closed form or the loop that anyone would write."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed.algorithms import REGISTRY, FedAvg, FedProx, Local, PerFedAvg, PFedMe
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.nn.module_cache import build_module
from polyfed.core.nn.optimizers import Adam, ParameterGroup, TorchOptimizer, build_optimizer
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.core.training.loop import fit
from polyfed.testing import assert_runs_equal, small_clients

DOUBLE = torch.float64


def data(number=24, classes=3, dtype=DOUBLE):
    generator = torch_generator(1)
    return Examples(torch.randn(number, 5, generator=generator, dtype=dtype), torch.arange(number) % classes)


def net():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def trained(options, examples=None, seed=5, **more):
    model = build_module(net, 0)
    found = fit(model, examples or data(), options, lr=0.1, seed=seed, **more)
    return model, found


def by_hand(make, epochs=2, size=8, weight=None, rate=lambda step: 1.0):
    """A plain loop over the same minibatches."""
    model, examples, generator = build_module(net, 0), data(), torch_generator(derive_seed(5, "batches"))
    optimizer, step = make(model), 0
    full = [group["lr"] for group in optimizer.param_groups]
    for _ in range(epochs):
        for rows in torch.randperm(len(examples), generator=generator).split(size):
            optimizer.zero_grad()
            F.cross_entropy(model(examples.x[rows]), examples.y[rows], weight=weight).backward()
            step += 1
            for group, lr in zip(optimizer.param_groups, full, strict=True):
                group["lr"] = lr * rate(step)
            optimizer.step()
    return model


def assert_equal(one, other):
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def assert_close(one, other):
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


OPTIMISERS = {
    "adamw": ({"optimizer": "adamw", "weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
    "AdamW, without decay": ({"optimizer": "AdamW"}, torch.optim.AdamW, {"weight_decay": 0.0}),
    "adamw with betas": (
        {"optimizer": "adamw", "weight_decay": 0.1, "optimizer_options": {"betas": [0.5, 0.9]}},
        torch.optim.AdamW,
        {"weight_decay": 0.1, "betas": (0.5, 0.9)},
    ),
    "rmsprop": (
        {"optimizer": "rmsprop", "optimizer_options": {"momentum": 0.5}},
        torch.optim.RMSprop,
        {"momentum": 0.5},
    ),
    "sgd with dampening": (
        {"momentum": 0.9, "optimizer_options": {"dampening": 0.5}},
        torch.optim.SGD,
        {"momentum": 0.9, "dampening": 0.5},
    ),
    "Rprop": ({"optimizer": "Rprop"}, torch.optim.Rprop, {}),
}


@pytest.mark.parametrize(("options", "theirs", "their_options"), OPTIMISERS.values(), ids=OPTIMISERS)
def test_optimisers_are_torchs_bit_for_bit(options, theirs, their_options):
    model, _ = trained(Local(local_epochs=2, batch_size=8, **options))
    assert_equal(model, by_hand(lambda m: theirs(m.parameters(), lr=0.1, **their_options)))


def test_adamw_steps_without_the_compiler_as_torch_does():
    assert type(build_optimizer([ParameterGroup([], 0.1)], "AdamW")) is Adam
    generator = torch_generator(2)
    mine, other = (nn.Parameter(torch.ones(4, 3)) for _ in range(2))
    ours = build_optimizer([ParameterGroup([mine], 0.1)], "adamw", weight_decay=0.3)
    theirs = torch.optim.AdamW([other], lr=0.1, weight_decay=0.3)
    for _ in range(5):
        slope = torch.randn(4, 3, generator=generator)
        mine.grad, other.grad = slope.clone(), slope
        ours.step(), theirs.step()
        assert torch.equal(mine, other)


def test_optimisers_that_do_not_fit_are_refused():
    for options, sentence in [
        ({"optimizer": "adamv"}, "FedAvg: unknown optimizer 'adamv'; did you mean"),
        ({"optimizer": "lbfgs"}, "unknown optimizer 'lbfgs'"),
        ({"optimizer": "rmsprop", "optimizer_options": {"bet": 1}}, "has no option 'bet'"),
        ({"optimizer_options": {"lr": 1}}, "cannot have 'lr'"),
        ({"optimizer_options": {"momentum": 0.9}}, "cannot have 'momentum'"),
        ({"optimizer": "rprop", "weight_decay": 0.1}, "has no weight decay"),
        ({"optimizer_options": [1]}, "optimizer_options must be a mapping"),
        ({"optimizer_options": {"dampening": 1e39}}, "optimizer_options must be of numbers up to 3.4e38"),
        ({"lr": 1e300}, "lr must be at most 3.4e38, as weights are, got 1e\\+300"),
        ({"weight_decay": 1e39}, "weight_decay must be at most 3.4e38"),
        ({"lr": 1e20, "lr_by_name": {"*": 1e20}}, "lr_by_name must be of positive factors, with which lr stays below"),
    ]:
        with pytest.raises(UserError, match=sentence):
            FedAvg(**options)
    with pytest.raises(UserError, match="RMSprop does not take these options"):
        TorchOptimizer([ParameterGroup([nn.Parameter(torch.ones(1))], 0.1)], torch.optim.RMSprop, {"alpha": -1.0})


@pytest.mark.parametrize("more", [{}, {"clip_norm": 0.05}, {"momentum": 0.9}], ids=str)
@pytest.mark.parametrize("number", [24, 22])
def test_accumulation_over_k_minibatches_is_one_of_k_times_the_size(number, more):
    """Also where the last minibatch of an epoch is smaller: the mean is over examples."""
    examples = data(number)
    small, found = trained(Local(local_epochs=3, batch_size=4, accumulate=3, **more), examples)
    large, expected = trained(Local(local_epochs=3, batch_size=12, **more), examples)
    assert_close(small, large)
    assert found.steps == expected.steps == 6
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)


@pytest.mark.parametrize("weights", [(1.0, 5.0, 0.5), (1.0, 0.0, 0.0), "balanced"], ids=str)
def test_accumulation_weighs_minibatches_by_the_class_weights_of_their_examples(weights):
    examples, more = data(22), {"local_epochs": 3, "class_weights": weights}
    small, large = (trained(Local(batch_size=b, accumulate=k, **more), examples)[0] for b, k in ((4, 3), (12, 1)))
    assert_close(small, large)


def test_accumulation_weighs_minibatches_by_their_tokens():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(5, (12, 6), generator=generator)
    y = torch.where(torch.rand(12, 6, generator=generator) < 0.7, -100, x)
    y[:, 0] = x[:, 0]
    for class_weights in (None, "balanced"):
        models = []
        for size, accumulate in ((2, 3), (6, 1)):
            model = build_module(lambda: nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)).double(), 0)
            options = Local(batch_size=size, accumulate=accumulate, class_weights=class_weights)
            fit(model, Examples(x, y), options, lr=0.1, seed=3, task="tokens")
            models.append(model)
        assert_close(*models)


def test_a_minibatch_of_classes_without_weight_changes_nothing():
    model, before = build_module(net, 0), build_module(net, 0)
    examples = data(8)
    ones = Examples(examples.x, torch.ones(8, dtype=torch.int64))
    assert fit(model, ones, Local(class_weights=(1.0, 0.0, 2.0)), lr=0.1, seed=0).loss == 0
    assert_close(model, before)


def test_another_number_of_class_weights_than_outputs_is_refused_before_round_1():
    with pytest.raises(
        UserError, match=r"class_weights has 2 numbers, but the network of client 'client-0' has \d outputs"
    ):
        pf.federate(small_clients(2), FedAvg(class_weights=(1.0, 2.0)), rounds=1, workers=0)


def test_accumulation_counts_steps_and_takes_a_penalty_once():
    assert trained(Local(local_steps=5, batch_size=4, accumulate=2))[1].steps == 5
    whole = [trained(Local(batch_size=b, accumulate=k), penalty=None)[0] for b, k in ((4, 3), (12, 1))]
    assert_close(*whole)
    found = []
    for size, accumulate in ((4, 3), (12, 1)):
        model, calls = build_module(net, 0), []

        def penalty(model=model, calls=calls):
            calls.append(1)
            return model[0].weight.square().sum()

        fit(model, data(), Local(batch_size=size, accumulate=accumulate), lr=0.1, seed=5, penalty=penalty)
        found.append((model, len(calls)))
    assert found[0][1] == found[1][1] == 2
    assert_close(found[0][0], found[1][0])


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (PFedMe, {"k": 2}),
        (PerFedAvg, {"variant": "hf", "buffers": "average"}),
        (FedProx, {}),
        (REGISTRY["fedavg_ft"], {}),
    ],
    ids=["pfedme", "per_fedavg", "fedprox", "fedavg_ft"],
)
def test_accumulation_reaches_methods_with_steps_of_their_own(kind, more):
    def plain():
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()

    def run(size, accumulate):
        clients = [
            pf.Client(c.id, plain, (c.train.x.double(), c.train.y), (c.test.x.double(), c.test.y))
            for c in small_clients(2)
        ]
        method = kind(lr=0.1, batch_size=size, accumulate=accumulate, **more)
        return pf.federate(clients, method, rounds=1, workers=0).last.state["model"]

    one, other = run(4, 2), run(8, 1)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-9, atol=1e-11)


def test_warm_up_over_rounds():
    method = FedAvg(lr=1.0, warmup_rounds=3)
    assert [method.lr_at(t, 9) for t in range(1, 6)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    both = FedAvg(lr=1.0, warmup_rounds=3, schedule="cosine")
    plain = FedAvg(lr=1.0, schedule="cosine")
    assert [both.lr_at(t, 9) / plain.lr_at(t, 9) for t in range(1, 6)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "rmsprop"])
def test_warm_up_over_steps(optimizer):
    """The s-th of w steps has s/(w+1) of the rate; then all of it."""
    model, found = trained(Local(local_epochs=2, batch_size=8, optimizer=optimizer, warmup_steps=4))
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}[optimizer]
    assert_equal(
        model, by_hand(lambda m: kind(m.parameters(), lr=0.1, weight_decay=0.0), rate=lambda s: min(1.0, s / 5))
    )
    assert found.steps == 6


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "rmsprop"])
def test_rates_by_pattern_are_groups_of_parameters(optimizer):
    options = Local(
        local_epochs=2, batch_size=8, optimizer=optimizer, warmup_steps=2, lr_by_name={"2.*": 10, "*.bias": 0.5}
    )
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}[optimizer]

    def groups(m):
        parts = [(m[0].weight, 0.1), (m[0].bias, 0.1 * 0.5), (m[2].weight, 0.1 * 10.0), (m[2].bias, 0.1 * 10.0)]
        return kind([{"params": [p], "lr": lr} for p, lr in parts], weight_decay=0.0)

    model, _ = trained(options)
    assert_equal(model, by_hand(groups, rate=lambda s: min(1.0, s / 3)))
    assert hash(options) == hash(Local(**{f: getattr(options, f) for f in ("local_epochs", "batch_size", "optimizer",
                                                                           "warmup_steps", "lr_by_name")}))  # fmt: skip


def test_a_pattern_that_no_parameter_has_is_refused():
    with pytest.raises(UserError, match=r"no trained parameter .* like 'heat\.\*'"):
        pf.federate(small_clients(), FedAvg(lr_by_name={"heat.*": 2}), rounds=1, workers=0)
    for bad in ({"head.*": 0}, {"head.*": "fast"}, {"head.*": math.inf}, [1]):
        with pytest.raises(UserError, match="lr_by_name must be"):
            FedAvg(lr_by_name=bad)


def test_weights_in_training_are_those_of_torchs_loss():
    weights = (0.2, 1.0, 4.0)
    model, _ = trained(Local(local_epochs=2, batch_size=8, class_weights=list(weights)))
    expected = by_hand(
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1), weight=torch.tensor(weights, dtype=torch.float64)
    )
    assert_equal(model, expected)


def test_options_are_written_and_read_again(tmp_path):
    method = FedAvg(
        lr=0.05, optimizer="AdamW", optimizer_options={"betas": [0.5, 0.9]}, lr_by_name={"head.*": 2.0}, accumulate=2,
        class_weights=[1, 2, 3], sampler="balanced", patience=1, warmup_rounds=1, warmup_steps=2,
    )  # fmt: skip
    clients = small_clients()
    run = pf.federate(clients, method, rounds=2, workers=0, out=tmp_path / "run")
    again = pf.resume(tmp_path / "run", clients=clients)
    assert again.federation.algorithm == method
    assert_runs_equal(run, again)
