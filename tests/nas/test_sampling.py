"""Samples follow softmax(logits), and their gradient is that of eq. 2."""

import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from polyfed.core.seeds import temporary_rng_seed
from polyfed.nas import (
    ContextAwareSampler,
    ContextFreeSampler,
    gumbel_noise_like,
    most_probable_operations,
    sample_operations,
)
from polyfed.nas.sampling import pool_to_8x8


@pytest.mark.parametrize("temperature", [0.1, 1.0, 5.0])
def test_samples_follow_softmax(temperature):
    """Chi-square of 100,000 samples per edge, whatever the temperature; at p = 0.001 a wrong distribution is found."""
    logits = torch.tensor([[0.0, 1.0, -1.0, 0.5], [2.0, 2.0, 0.0, -3.0]])
    with temporary_rng_seed(4):
        index = sample_operations(logits.expand(100_000, 2, 4), temperature).indices
    for edge in range(2):
        seen = torch.bincount(index[:, edge], minlength=4).numpy()
        expected = F.softmax(logits[edge].double(), 0).numpy() * 100_000
        assert stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-3
        flat = stats.chisquare(seen)  # the same samples are not uniform: the test can fail
        assert flat.pvalue < 1e-9


def test_most_probable_with_noise_is_a_sample():
    logits = torch.tensor([[0.0, 1.0, -1.0]])
    with temporary_rng_seed(2):
        index = torch.stack(
            [most_probable_operations(logits, gumbel_noise_like(logits)).indices for _ in range(5_000)]
        ).flatten()
    expected = F.softmax(logits[0].double(), 0).numpy() * 5_000
    assert stats.chisquare(torch.bincount(index, minlength=3).numpy(), expected).pvalue > 1e-3
    assert most_probable_operations(logits).indices.tolist() == [1]


def test_scale_is_one_with_the_gradient_of_the_softmax():
    """Eq. 2 by hand, from the same noise."""
    logits = torch.tensor([[0.3, -0.2, 0.1], [1.0, 0.0, 2.0]], dtype=torch.float64, requires_grad=True)
    with temporary_rng_seed(3):
        choice = sample_operations(logits, 0.7)
    with temporary_rng_seed(3):
        perturbed = logits.detach() + gumbel_noise_like(logits)
    assert torch.equal(choice.scale, torch.ones(2, dtype=torch.float64))
    assert torch.equal(choice.indices, perturbed.argmax(-1))
    (found,) = torch.autograd.grad(choice.scale[0] + 3 * choice.scale[1], logits)
    soft = torch.softmax(perturbed / 0.7, -1)
    for edge, weight in ((0, 1.0), (1, 3.0)):
        k = int(choice.indices[edge])
        by_hand = soft[edge, k] * (F.one_hot(torch.tensor(k), 3) - soft[edge]) / 0.7
        assert torch.allclose(found[edge], weight * by_hand)


def test_all_operations_are_equally_probable_at_first():
    image, previous = torch.randn(5, 3, 9, 9), torch.randn(5, 4, 3, 3)
    for sampler, shape in ((ContextFreeSampler(2, 6), (2, 6)), (ContextAwareSampler(2, 6, 3, 4), (5, 2, 6))):
        assert torch.equal(sampler(image, previous), torch.zeros(shape))


def test_context_aware_logits_depend_on_cell_input_and_image():
    sampler = ContextAwareSampler(1, 2, 3, 4)
    with torch.no_grad():
        sampler.logits.weight.normal_()
    image, previous = torch.randn(2, 3, 9, 9), torch.randn(2, 4, 3, 3)
    base = sampler(image, previous)
    for other in (sampler(image + 1, previous), sampler(image, previous + 1)):
        assert not torch.allclose(base, other)
    alone = sampler(image[:1], previous[:1])
    assert torch.allclose(alone, base[:1], atol=1e-6)


@pytest.mark.parametrize("size", [1, 5, 8, 13, 28])
def test_fields_are_those_of_adaptive_pooling(size):
    leaves = [torch.randn(3, 2, size, size + 2, dtype=torch.float64).requires_grad_()]
    leaves.append(leaves[0].detach().clone().requires_grad_())
    found, expected = pool_to_8x8(leaves[0]), F.adaptive_avg_pool2d(leaves[1], 8)
    weights = torch.randn_like(found)
    for out in (found, expected):
        (out * weights).sum().backward()
    assert torch.allclose(found, expected, atol=1e-12)
    assert torch.allclose(leaves[0].grad, leaves[1].grad, atol=1e-12)
    assert torch.equal(pool_to_8x8(found), found)


def test_fields_first_seen_without_gradients_can_be_trained_through():
    with torch.inference_mode():
        pool_to_8x8(torch.ones(1, 1, 19, 23))
    x = torch.ones(1, 1, 19, 23, requires_grad=True)
    pool_to_8x8(x).sum().backward()
    assert x.grad is not None
