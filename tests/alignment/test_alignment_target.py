"""K̄ as features and as a kernel; what is left of a representation with few columns."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyfed.alignment import (
    AlignmentTarget,
    cka,
    linear_cka,
    mean_kernel_features,
    mean_rbf_kernel,
    rbf_kernel,
    reduce_to_principal_components,
)
from polyfed.core.seeds import torch_generator

WEIGHTS = [0.5, 0.3, 0.2]


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch_generator(seed), dtype=dtype)


def parts() -> list[Tensor]:
    """Of three widths and scales, far from 0."""
    return [scale * random(seed, 20, width) + scale for seed, width, scale in ((1, 4, 1.0), (2, 9, 5.0), (3, 30, 0.1))]


def centred(a: Tensor) -> Tensor:
    return a.double() - a.double().mean(0)


def test_features_have_the_weighted_mean_of_the_kernels() -> None:
    f = mean_kernel_features(parts(), WEIGHTS)
    assert f.shape == (20, 43)
    expected = sum(w * a @ a.T for w, a in zip(WEIGHTS, parts(), strict=True))
    torch.testing.assert_close(f @ f.T, expected, rtol=1e-5, atol=1e-4)


def test_normalised_representations_enter_with_unit_centred_norm() -> None:
    f = mean_kernel_features(parts(), WEIGHTS, normalise=True)
    for part, a, weight in zip(f.split([4, 9, 30], dim=1), parts(), WEIGHTS, strict=True):
        assert torch.linalg.vector_norm(centred(part)).item() == pytest.approx(weight**0.5, rel=1e-5)
        torch.testing.assert_close(part / part.norm(), a / a.norm())
    scaled = [a * scale for a, scale in zip(parts(), (100, 1e-3, 7), strict=True)]
    torch.testing.assert_close(mean_kernel_features(scaled, WEIGHTS, normalise=True), f)
    assert not torch.allclose(mean_kernel_features(scaled, WEIGHTS), mean_kernel_features(parts(), WEIGHTS))


@pytest.mark.parametrize("value", [0.0, 0.1, -3e4])
def test_a_constant_representation_does_not_disturb_normalised_ones(value: float) -> None:
    a, dead, other = random(1, 50, 4), torch.full((50, 3), value), random(2, 50, 6)
    with_it = mean_kernel_features([a, dead], [0.5, 0.5], normalise=True)
    assert with_it.isfinite().all()
    assert linear_cka(other, with_it).item() == pytest.approx(linear_cka(other, a).item(), rel=1e-4)


def test_the_mean_rbf_kernel_gives_each_representation_a_width_of_its_own() -> None:
    for sigma in (0.5, 2.0):
        expected = sum(w * rbf_kernel(a, sigma) for w, a in zip(WEIGHTS, parts(), strict=True))
        torch.testing.assert_close(mean_rbf_kernel(parts(), WEIGHTS, sigma), expected)


class Counting(TorchDispatchMode):
    """Counts the results that have at least so many numbers and memory of their own."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.storages = numbers, dict[int, Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() >= self.numbers and out.untyped_storage().data_ptr() not in given:
            self.storages[out.untyped_storage().data_ptr()] = out  # kept, so that no other gets its place
        return out


@pytest.mark.parametrize("number", [255, 257, 1500])
@pytest.mark.thorough
def test_the_mean_rbf_kernel_is_the_only_matrix_of_its_size(number: int) -> None:
    many = [random(seed, number, width) + 1 for seed, width in ((1, 4), (2, 9), (3, 30))]
    expected = sum(w * rbf_kernel(a) for w, a in zip(WEIGHTS, many, strict=True))
    with Counting(max(number, 1025) ** 2) as seen:  # the width is the median of 1,024 examples' distances
        found = mean_rbf_kernel(many, WEIGHTS)
    torch.testing.assert_close(found, expected)
    assert seen.storages.keys() == ({found.untyped_storage().data_ptr()} if number > 1024 else set())


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["linear", "rbf"])
def test_the_whole_rad_is_aligned_with_without_a_copy_of_the_mean_kernel(kind: str) -> None:
    number = 1500
    a, many = random(9, number, 7), [random(seed, number, 400) for seed in (1, 2, 3)]
    target = (
        AlignmentTarget(mean_kernel_features(many, WEIGHTS))
        if kind == "linear"
        else AlignmentTarget(mean_rbf_kernel(many, WEIGHTS), 0.5)
    )
    first = target.cka(a)
    with Counting(min(target.matrix.numel(), 1025**2)) as seen:
        again = target.cka(a)
    assert not seen.storages
    assert torch.equal(first, again)
    torch.testing.assert_close(first, target.cka(a, torch.arange(number)))
    other = AlignmentTarget(target.matrix[:20, : 20 if kind == "rbf" else None], target.sigma)
    torch.testing.assert_close(other.cka(a[:20]), target.cka(a[:20], torch.arange(20)))


def of_spectrum(rows: int, width: int, values: Tensor) -> Tensor:
    """A centred matrix with these singular values, moved away from 0."""
    left = torch.linalg.qr(centred(random(4, rows, len(values)))).Q
    right = torch.linalg.qr(random(5, width, len(values), dtype=torch.float64)).Q
    return (left * values @ right.T + 2).float()


SPECTRA = {
    "slowly falling": 1 / torch.arange(1, 41, dtype=torch.float64),
    "fast falling": 0.7 ** torch.arange(40, dtype=torch.float64),
    "nearly flat": torch.linspace(1.5, 1, 40, dtype=torch.float64),
}


@pytest.mark.parametrize("rank", [1, 5, 12])
@pytest.mark.parametrize("width", [60, 1100])
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.one_case
def test_reduced_has_the_best_kernel_of_that_rank(spectrum: str, width: int, rank: int) -> None:
    """The error of HKH is that of the truncated singular value decomposition, the least that there is."""
    values = SPECTRA[spectrum]
    a = of_spectrum(90, width, values)
    small = reduce_to_principal_components(a, rank)
    assert small.shape == (90, rank)
    assert small.dtype == torch.float32
    kernel = centred(a) @ centred(a).T
    best = values[rank:].pow(4).sum().sqrt().item()
    error = torch.linalg.matrix_norm(kernel - small.double() @ small.double().T).item()
    slack = 0.05 if spectrum == "nearly flat" and width > 1024 else 1e-3
    assert best * (1 - 1e-4) <= error <= best * (1 + slack) + 1e-6
    assert torch.equal(small, reduce_to_principal_components(a, rank))


@pytest.mark.parametrize("width", [60, 1100])
def test_reduced_is_exact_from_the_true_rank_on(width: int) -> None:
    a = of_spectrum(90, width, torch.tensor([3.0, 2.0, 1.0, 0.5], dtype=torch.float64))
    kernel = centred(a) @ centred(a).T
    for rank in (4, 10, width, width + 5):
        small = reduce_to_principal_components(a, rank).double()
        assert small.shape[1] <= rank
        torch.testing.assert_close(small @ small.T, kernel, rtol=1e-4, atol=1e-5)
    less = reduce_to_principal_components(a, 3).double()
    assert not torch.allclose(less @ less.T, kernel, atol=1e-2)


@pytest.mark.parametrize("width", [60, 1100])
def test_reduced_takes_fewer_examples_than_columns_asked_for(width: int) -> None:
    a = random(1, 8, width)
    small = reduce_to_principal_components(a, 30).double()
    torch.testing.assert_close(small @ small.T, centred(a) @ centred(a).T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [torch.arange(20), torch.tensor([3, 17, 5, 8, 0, 11])])
def test_alignment_on_some_rows_is_cka_of_the_kernels_parts(rows: Tensor) -> None:
    a = random(9, 20, 7)[rows]
    f = mean_kernel_features(parts(), WEIGHTS)
    expected = cka((a @ a.T).double(), (f @ f.T).double()[rows][:, rows]).item()
    assert AlignmentTarget(f).cka(a, rows).item() == pytest.approx(expected, rel=1e-4)
    assert abs(AlignmentTarget(f).cka(a, rows.flip(0)).item() - expected) > 1e-3
    for sigma in (0.5, 1.5):
        k = mean_rbf_kernel(parts(), WEIGHTS, sigma)
        expected = cka(rbf_kernel(a, sigma).double(), k.double()[rows][:, rows]).item()
        assert AlignmentTarget(k, sigma).cka(a, rows).item() == pytest.approx(expected, rel=1e-4)
