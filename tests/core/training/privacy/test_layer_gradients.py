"""Sums of clipped gradients, computed from layers' inputs and outputs, against autograd, one example after the other."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polyfed.core.training.privacy import private_gradients
from polyfed.core.training.privacy.layer_gradients import supported_layers
from polyfed.core.training.privacy.private_gradients import (
    sum_clipped_gradients_of_examples,
    sum_clipped_gradients_of_groups,
)
from polyfed.models import ModelSpec


def images(*layers, flat):
    return lambda: nn.Sequential(*(layer() for layer in layers), nn.Flatten(), nn.Linear(flat, 3))


class Calls(nn.Module):
    """Calls parts of itself in a way of its own."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def tied():
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    net[2].weight = net[0].weight
    return net


def partly_frozen():
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    net[0].weight.requires_grad_(False)
    net[2].bias.requires_grad_(False)
    return net


def add_one_in_place(m, x):
    hidden = x * 1.5
    first = m.a(hidden)
    hidden.add_(1.0)
    return m.b(torch.tanh(first) + hidden)


IMAGE, VOLUME, SERIES, ROW, TOKENS = (2, 6, 6), (2, 4, 4, 4), (2, 9), (6,), (5, 6)
CASES = {
    "dense": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)), ROW, {"0", "2"}),
    "layer alone": (lambda: nn.Linear(6, 3), ROW, {""}),
    "no bias": (lambda: nn.Linear(6, 3, bias=False), ROW, {""}),
    "convolution": (images(lambda: nn.Conv2d(2, 4, (3, 2)), nn.ReLU, flat=80), IMAGE, {"0", "3"}),
    "strides, padding, dilation, groups": (
        images(lambda: nn.Conv2d(2, 4, (3, 2), (2, 1), (2, 1), (1, 2), groups=2), nn.ReLU, flat=96), IMAGE, {"0", "3"},
    ),
    "channel by channel": (images(lambda: nn.Conv2d(2, 2, 3, groups=2, bias=False), flat=32), IMAGE, {"0", "2"}),
    "series": (images(lambda: nn.Conv1d(2, 3, 3, 2, 1), nn.Tanh, flat=15), SERIES, {"0", "3"}),
    "volume": (images(lambda: nn.Conv3d(2, 3, 2, (1, 2, 1), 1), nn.Tanh, flat=225), VOLUME, {"0", "3"}),
    "padding by name": (images(lambda: nn.Conv2d(2, 3, 3, padding="same"), flat=108), IMAGE, {"2"}),
    "padding by reflection": (
        images(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), flat=108), IMAGE, {"2"},
    ),
    "norms": (images(lambda: nn.Conv2d(2, 4, 3), lambda: nn.GroupNorm(2, 4), nn.ReLU, flat=64), IMAGE, {"0", "4"}),
    "tokens": (lambda: Calls(lambda m, x: m.b(torch.tanh(m.a(x)).mean(1)), a=nn.Linear(6, 4), b=nn.Linear(4, 3)), TOKENS,
               {"a", "b"}),
    "tokens first": (
        lambda: Calls(lambda m, x: m.b(torch.tanh(m.a(x.transpose(0, 1))).mean(0)), a=nn.Linear(6, 4), b=nn.Linear(4, 3)),
        TOKENS, {"a", "b"},
    ),
    "no dimension for examples": (
        lambda: Calls(lambda m, x: m.b(torch.tanh(m.a(x[0])))[None] + 0 * m.b.bias if len(x) == 1 else None,
                      a=nn.Linear(6, 4), b=nn.Linear(4, 3)), ROW, set(),
    ),
    "frames": (
        lambda: Calls(lambda m, x: m.b(torch.relu(m.a(x.transpose(0, 1)[:, :, None])).flatten(1)).mean(0)[None],
                      a=nn.Conv2d(1, 2, (1, 2)), b=nn.Linear(10, 3)), (4, 6), {"a", "b"},
    ),
    "called twice": (
        lambda: Calls(lambda m, x: m.b(torch.tanh(m.a(torch.tanh(m.a(x))))), a=nn.Linear(6, 6), b=nn.Linear(6, 3)), ROW,
        {"a", "b"},
    ),
    "convolution twice": (
        lambda: Calls(lambda m, x: m.b(m.a(torch.relu(m.a(x))).flatten(1)), a=nn.Conv2d(2, 2, 3, padding=1),
                      b=nn.Linear(72, 3)), IMAGE, {"a", "b"},
    ),
    "tied weights": (tied, ROW, {"4"}),
    "weight used elsewhere": (
        lambda: Calls(lambda m, x: m.b(F.linear(torch.tanh(m.a(x)), m.a.weight.T)), a=nn.Linear(6, 4), b=nn.Linear(6, 3)),
        ROW, set(),
    ),
    "never called": (lambda: Calls(lambda m, x: m.b(x), a=nn.Linear(6, 4), b=nn.Linear(6, 3)), ROW, {"b"}),
    "a number as parameter": (
        lambda: Calls(lambda m, x: m.b(x) * m.scale, b=nn.Linear(6, 3), scale=nn.Parameter(torch.tensor(0.5))), ROW, {"b"},
    ),
    "partly frozen": (partly_frozen, ROW, {"2", "4"}),
    "attention": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), nn.Flatten(),
                              nn.Linear(30, 3)), TOKENS, {"0.linear1", "0.linear2", "2"},
    ),
    "a network of polyfed's": (ModelSpec("cnn_582k", {"channels": (2, 3), "hidden": 5}, (1, 16, 16), 3), (1, 16, 16),
                               {"conv1", "conv2", "fc1", "fc2"}),
}  # fmt: skip


def batch_of(case, number=7):
    network, shape, layers = CASES[case]
    torch.manual_seed(0)
    return network(), torch.randn(number, *shape), torch.arange(number) % 3, layers


def expected_sum(model, x, y, max_norm):
    rows = torch.arange(len(y)).split(1)
    return sum_clipped_gradients_of_groups(model, x, y, rows, F.cross_entropy, max_norm)


@pytest.mark.parametrize("case", CASES)
def test_the_sum_is_that_of_one_example_after_the_other(case):
    model, x, y, layers = batch_of(case)
    parameters = dict(model.named_parameters())
    assert set(private_gradients._zeros_for_outputs(model, supported_layers(model), x[:1])) == layers
    for max_norm in (0.3, 100.0):
        found = sum_clipped_gradients_of_examples(model, x, y, F.cross_entropy, max_norm)
        for ours, theirs in zip(found, expected_sum(model, x, y, max_norm), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)
            assert not ours.requires_grad
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("case", ["dense", "convolution", "tokens"])
def test_few_numbers_at_once_give_the_same_sum(case, monkeypatch):
    model, x, y, _ = batch_of(case)
    expected = sum_clipped_gradients_of_examples(model, x, y, F.cross_entropy, 0.3)
    monkeypatch.setattr(private_gradients, "_GRADIENT_NUMBERS", 1)
    for ours, theirs in zip(
        sum_clipped_gradients_of_examples(model, x, y, F.cross_entropy, 0.3), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("case", ["dense", "convolution", "tokens", "norms"])
def test_an_example_whose_gradient_is_not_finite_counts_nothing(case, value):
    model, x, y, _ = batch_of(case)
    expected = sum_clipped_gradients_of_examples(model, x[1:], y[1:], F.cross_entropy, 0.3)
    x[0] = value
    for ours, theirs in zip(
        sum_clipped_gradients_of_examples(model, x, y, F.cross_entropy, 0.3), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_network_that_changes_a_layers_input_in_place_is_refused_as_autograd_refuses_it():
    model = Calls(add_one_in_place, a=nn.Linear(6, 6), b=nn.Linear(6, 3))
    x, y = torch.randn(3, 6), torch.arange(3)
    assert not private_gradients._zeros_for_outputs(model, supported_layers(model), x[:1])
    with pytest.raises(RuntimeError, match=r"in-?place"):
        sum_clipped_gradients_of_examples(model, x, y, F.cross_entropy, 1.0)


def test_no_example_moves_the_sum_by_more_than_the_norm_whatever_the_layers():
    for case in CASES:
        model, x, y, _ = batch_of(case)
        x[6] *= 1e30 if case in ("dense", "convolution") else 50.0
        whole, less = (sum_clipped_gradients_of_examples(model, x[:n], y[:n], F.cross_entropy, 1.0) for n in (7, 6))
        assert float(sum((a - b).square().sum() for a, b in zip(whole, less, strict=True))) <= (1.0 + 1e-4) ** 2, case


def test_dropout_is_drawn_for_each_example_and_the_first_look_draws_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64, bias=False), nn.Dropout(0.5), nn.Linear(64, 3, bias=False)).train()
    before = torch.random.get_rng_state()
    private_gradients._zeros_for_outputs(model, supported_layers(model), torch.ones(1, 6))
    assert torch.equal(before, torch.random.get_rng_state())
    x, y = torch.ones(2, 6), torch.zeros(2, dtype=torch.int64)
    summed = sum_clipped_gradients_of_examples(model, x, y, F.cross_entropy, 1e6)[0]
    once = (summed.abs().sum(dim=1) > 0).float().mean()
    assert 0.6 < float(once) < 0.9  # of two draws, one keeps a unit with probability 0.75
