"""The orthogonal Procrustes distance: its definition, what it does not see, its gradient; kernels are all that it needs."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import polyfed as pf
from polyfed.alignment import AlignmentTarget, mean_kernel_features, procrustes_distance
from polyfed.alignment.alignment_target import triangular_kernel_factor
from polyfed.alignment.cka import CentredFeatures
from polyfed.core.seeds import torch_generator

SHAPES = {"same width": (7, 3, 3), "other widths": (8, 5, 3), "few examples": (4, 6, 9), "one is wide": (5, 3, 12)}


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch_generator(seed), dtype=dtype)


def orthogonal(seed: int, width: int) -> Tensor:
    q: Tensor = torch.linalg.qr(random(seed, width, width)).Q
    return q


def unit(a: Tensor) -> Tensor:
    centred = a - a.mean(0)
    return centred / torch.linalg.matrix_norm(centred)


def by_definition(a: Tensor, b: Tensor) -> Tensor:
    """‖Â‖² + ‖B̂‖² − 2‖B̂ᵀÂ‖_*, the singular values of the whole matrix, by autograd."""
    a, b = unit(a), unit(b)
    return a.square().sum() + b.square().sum() - 2 * torch.linalg.svdvals(b.T @ a).sum()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.one_case
def test_value_and_gradients_are_those_of_the_definition(shape: str) -> None:
    number, of_a, of_b = SHAPES[shape]
    a, b = (random(seed, number, width).requires_grad_() for seed, width in ((1, of_a), (2, of_b)))
    found, expected = procrustes_distance(a, b), by_definition(a, b)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for one, other in zip(torch.autograd.grad(found, (a, b)), torch.autograd.grad(expected, (a, b)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert torch.autograd.gradcheck(procrustes_distance, (a, b))


def test_it_is_the_least_squared_distance_over_rotations() -> None:
    a, b = unit(random(1, 12, 4)), unit(random(2, 12, 4))
    u, _, v = torch.linalg.svd(b.T @ a)
    assert procrustes_distance(a, b).item() == pytest.approx((a - b @ (u @ v)).square().sum().item())
    others = [(a - b @ orthogonal(seed, 4)).square().sum().item() for seed in range(20)]
    assert min(others) > procrustes_distance(a, b).item()


@pytest.mark.parametrize("width", [4, 30])
def test_rotation_reflection_shift_and_scale_are_not_seen(width: int) -> None:
    """And a linear map that is not a rotation is."""
    a = random(1, 12, width)
    flipped = orthogonal(2, width) @ torch.diag(torch.tensor([-1.0] + [1.0] * (width - 1), dtype=torch.float64))
    for q in (orthogonal(2, width), flipped):
        assert abs(procrustes_distance(3 * a @ q + 7, a).item()) < 1e-12
    wider = torch.cat([a, torch.zeros(12, 5, dtype=torch.float64)], dim=1) @ orthogonal(3, width + 5)
    assert abs(procrustes_distance(wider, a).item()) < 1e-12
    assert procrustes_distance(a @ torch.diag(torch.arange(1.0, width + 1, dtype=torch.float64)), a).item() > 0.01


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_are_all_that_it_needs(shape: str) -> None:
    """It is the squared Bures distance of the kernels, 2 − 2·tr (√K M √K)^½; any factor of a kernel has the same."""
    number, of_a, of_b = SHAPES[shape]
    a, b = random(1, number, of_a), random(2, number, of_b)
    k, m = unit(a) @ unit(a).T, unit(b) @ unit(b).T

    def root(kernel: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(kernel)
        return (vectors * values.clamp(min=0).sqrt()) @ vectors.T

    expected = 2 - 2 * torch.trace(root(root(k) @ m @ root(k))).item()
    assert procrustes_distance(a, b).item() == pytest.approx(expected, abs=1e-6)
    assert procrustes_distance(a, triangular_kernel_factor(b)).item() == pytest.approx(
        procrustes_distance(a, b).item(), abs=1e-9
    )
    centred = CentredFeatures.from_representation(b)
    assert procrustes_distance(a, centred).item() == procrustes_distance(a, b).item()


def test_constant_representations_are_far_from_everything_and_have_no_gradient() -> None:
    b = random(2, 10, 3, dtype=torch.float32)
    for value in (0.0, 0.1, -3e4):
        a = torch.full((10, 4), value, requires_grad=True)
        found = procrustes_distance(a, b)
        found.backward()  # type: ignore[no-untyped-call]
        assert found.item() == 2
        assert a.grad is not None
        assert not a.grad.any()


def test_a_dead_feature_is_not_pulled_anywhere() -> None:
    """The gradient of least norm; an SVD's would depend on how it completes a basis."""
    a = torch.cat([random(1, 12, 3), torch.zeros(12, 2, dtype=torch.float64)], dim=1).requires_grad_()
    found = procrustes_distance(a, random(2, 12, 5))
    (slope,) = torch.autograd.grad(found, a)
    assert slope[:, :3].abs().max() > 1e-3
    assert slope[:, 3:].abs().max() < 1e-12
    assert found.item() == pytest.approx(procrustes_distance(a[:, :3], random(2, 12, 5)).item())


def test_a_step_against_the_gradient_lowers_it() -> None:
    a, b = random(1, 20, 6, dtype=torch.float32), random(2, 20, 9, dtype=torch.float32)
    values = []
    for _ in range(80):
        a.requires_grad_()
        distance = procrustes_distance(a, b)
        (slope,) = torch.autograd.grad(distance, a)
        a = (a - 10 * slope).detach()
        values.append(distance.item())
    assert all(after < before + 1e-5 for before, after in pairwise(values))
    # No representation of 6 columns is nearer to one of 9 than its principal components, of the largest singular values.
    spectrum = torch.linalg.svdvals(unit(b))
    assert values[-1] == pytest.approx(2 - 2 * spectrum[:6].square().sum().sqrt().item(), abs=2e-3)


@pytest.mark.parametrize("rows", [None, torch.tensor([3, 17, 5, 8, 0, 11])])
def test_a_target_measures_the_distance_from_the_mean_kernel(rows: Tensor | None) -> None:
    parts = [random(seed, 20, width) + seed for seed, width in ((1, 4), (2, 9))]
    f, a = mean_kernel_features(parts, [0.7, 0.3]), random(3, 20, 5)
    some = slice(None) if rows is None else rows
    found = AlignmentTarget(f, distance_measure="procrustes").distance(a[some], rows)
    torch.testing.assert_close(found, by_definition(a[some], f[some]), rtol=0, atol=1e-12)
    assert torch.equal(AlignmentTarget(f).distance(a[some], rows), 1 - AlignmentTarget(f).cka(a[some], rows))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_gives_a_distance_that_is_not(value: float) -> None:
    """As CKA does; an SVD would raise."""
    for width in (3, 30):
        a = random(1, 10, width)
        a[4, 1] = value
        found = procrustes_distance(a.requires_grad_(), random(2, 10, 4))
        (slope,) = torch.autograd.grad(found, a)
        assert found.isnan()
        assert slope.isnan().any()


def test_representations_of_other_examples_are_refused() -> None:
    with pytest.raises(pf.UserError, match="same examples"):
        procrustes_distance(random(1, 5, 2), random(2, 6, 2))
