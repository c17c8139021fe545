"""CKA against its definition with an explicit centring matrix, in float64 and with numpy; invariances; gradients; memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import polyfed as pf
from polyfed.alignment import cka, linear_cka, rbf_cka, rbf_kernel
from polyfed.alignment.cka import CentredFeatures, CentredKernel
from polyfed.core.seeds import torch_generator
from tests.few_cases import few

ROWS = 15
"""105 pairs, an odd number: their median is one of them."""


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch_generator(seed), dtype=dtype)


def rows_equal(number: int) -> Tensor:
    """Of which `number` are the same, the others random."""
    a = random(31, ROWS, 9)
    a[:number] = a[0]
    return a


CASES: dict[str, Tensor] = {
    "narrow": random(11, ROWS, 3),
    "wide": random(12, ROWS, 70),
    "wider than the rows' square": random(13, ROWS, 300),
    "of rank 2": random(14, ROWS, 2) @ random(15, 2, 12),
    "one-hot": torch.eye(7, dtype=torch.float64)[torch.arange(ROWS) % 7],
    "duplicated rows": random(16, 8, 9)[torch.arange(ROWS) // 2],
    "most rows equal": rows_equal(12),
    "huge": 1e15 * random(17, ROWS, 6),
    "tiny": 1e-15 * random(18, ROWS, 6),
    "far from 0": 1e3 + random(19, ROWS, 6),
}
OTHERS = {"narrow": random(21, ROWS, 5) + 1, "wide": random(22, ROWS, 60)}


def by_definition(k: np.ndarray, m: np.ndarray) -> float:
    """HSIC(K, M)/√(HSIC(K, K)·HSIC(M, M)), HSIC(K, M) = tr(KHMH)/(L−1)²; HH being H, H is applied from both sides, which
    keeps more digits of kernels that are far from 0."""
    number = len(k)
    h = np.eye(number) - np.ones((number, number)) / number

    def of(one: np.ndarray, other: np.ndarray) -> float:
        return float(np.trace(h @ one @ h @ (h @ other @ h))) / (number - 1) ** 2

    return of(k, m) / np.sqrt(of(k, k) * of(m, m))


def linear(a: Tensor) -> np.ndarray:
    x = a.double().numpy()
    return x @ x.T


def rbf(a: Tensor, sigma: float = 0.5) -> np.ndarray:
    x = a.double().numpy()
    distances = np.sqrt(((x[:, None, :] - x[None, :, :]) ** 2).sum(2))
    pairs = distances[np.triu_indices(len(x), 1)]
    median = np.median(pairs)
    width = sigma * (median if median > 0 else np.median(pairs[pairs > 0]))
    return np.exp(-(distances**2) / (2 * width**2))


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("case", CASES)
def test_linear_cka_is_the_definition_in_features_and_in_kernels(case: str, other: str) -> None:
    a, b = CASES[case], OTHERS[other]
    expected = by_definition(linear(a), linear(b))
    assert linear_cka(a, b).item() == pytest.approx(expected, rel=1e-6)
    assert linear_cka(b, a).item() == pytest.approx(expected, rel=1e-6)
    assert cka(a @ a.T, b @ b.T).item() == pytest.approx(expected, rel=1e-6)
    assert linear_cka(a.float(), b.float()).item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("sigma", [0.5, 2.0])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_case
def test_rbf_cka_is_the_definition(case: str, sigma: float) -> None:
    a, b = CASES[case], OTHERS["narrow"]
    torch.testing.assert_close(rbf_kernel(a, sigma), torch.from_numpy(rbf(a, sigma)), rtol=1e-6, atol=1e-9)
    expected = by_definition(rbf(a, sigma), rbf(b, sigma))
    assert cka(rbf_kernel(a, sigma), rbf_kernel(b, sigma)).item() == pytest.approx(expected, rel=1e-6)
    assert rbf_cka(a, rbf_kernel(b, sigma), sigma).item() == pytest.approx(expected, rel=1e-6)
    small = rbf_cka(a.float(), rbf_kernel(b.float(), sigma), sigma).item()
    assert small == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [2, 5, 8, 33, 64, 120])
@pytest.mark.one_case
def test_where_most_examples_are_equal_the_width_is_of_those_that_differ(width: int, dtype: torch.dtype) -> None:
    """As of networks whose units are dead on most of them: rounding must not pass for a distance."""
    for number, equal, offset in ((30, 27, 0.0), (30, 27, 3.0), (200, 150, 0.0)):
        a = (random(41, number, width) + offset).to(dtype)
        a[:equal] = a[0]
        torch.testing.assert_close(rbf_kernel(a).double(), torch.from_numpy(rbf(a)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("number", [ROWS, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sigma", [5.0, 10.0, 30.0])
def test_rbf_cka_of_a_wide_kernel_is_accurate_in_float32(sigma: float, number: int) -> None:
    """Its entries are near 1, and differ by 1/σ²."""
    a = random(1, number, 6, dtype=torch.float32)
    b = random(2, number, 6, dtype=torch.float32) + 0.5 * a
    expected = cka(rbf_kernel(a.double(), sigma), rbf_kernel(b.double(), sigma)).item()
    assert cka(rbf_kernel(a, sigma), rbf_kernel(b, sigma)).item() == pytest.approx(expected, rel=1e-3)
    assert rbf_cka(a, rbf_kernel(b, sigma), sigma).item() == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize(("a", "b", "gram"), [(3, 5, False), (70, 60, True), (3, 60, False), (400, 10, False)])
def test_the_smaller_form_is_computed(a: int, b: int, gram: bool) -> None:
    """A kernel is made of fewer examples than features only; a product of two widths only where the kernels cost more."""
    with Largest() as seen:
        linear_cka(random(1, ROWS, a), random(2, ROWS, b))
    assert ((ROWS, ROWS) in seen.shapes) == (max(a, b) > ROWS)
    assert ((b, a) in seen.shapes) != gram
    for width in {a, b} - {ROWS}:
        assert ((width, width) in seen.shapes) == (width < ROWS and not gram)


CKA: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": linear_cka,
    "rbf": lambda a, b: rbf_cka(a, rbf_kernel(b)),
    "rbf in blocks": lambda a, b: rbf_cka(a, rbf_kernel(b), block=7),
    "linear, centred before": lambda a, b: linear_cka(a, CentredFeatures.from_representation(b)),
    "rbf, centred before": lambda a, b: rbf_cka(a, CentredKernel.from_kernel(rbf_kernel(b), block=4), block=7),
}


@pytest.mark.parametrize("width", [4, 70])
@pytest.mark.parametrize("kind", CKA)
@pytest.mark.one_case
def test_cka_sees_neither_rotation_nor_scale_nor_translation(kind: str, width: int) -> None:
    a, b, value = random(3, ROWS, width), OTHERS["wide"], CKA[kind]
    start = value(a, b).item()
    turn = torch.linalg.qr(random(4, width, width)).Q
    for same in (a @ turn, 1e-3 * a, -7 * a, a + random(5, width), a[:, torch.arange(width).flip(0)]):
        assert value(same, b).item() == pytest.approx(start, rel=1e-9)
        assert value(a, same).item() == pytest.approx(1, rel=1e-9)
    assert value(a, a).item() == pytest.approx(1, rel=1e-9)
    assert 0 < start < 0.99
    stretched = a * torch.linspace(0.1, 3, width).double()
    assert abs(value(stretched, b).item() - start) > 1e-3  # not to any invertible map
    assert abs(value(a[torch.arange(ROWS).roll(1)], b).item() - start) > 1e-4  # and examples are not exchangeable


@pytest.mark.thorough
def test_equation_4_of_fedhenn_is_linear_cka_of_centred_features() -> None:
    """It is printed without H, and then calls any two representations with a large mean alike."""
    a, b = random(3, ROWS, 4), OTHERS["narrow"]

    def as_printed(one: Tensor, other: Tensor) -> float:
        norm = torch.linalg.matrix_norm
        return float(norm(other.T @ one) ** 2 / (norm(one.T @ one) * norm(other.T @ other)))

    assert as_printed(a - a.mean(0), b - b.mean(0)) == pytest.approx(linear_cka(a, b).item(), rel=1e-9)
    assert as_printed(a + 20, b + 20) > 0.99 > linear_cka(a + 20, b + 20).item() + 0.5


@pytest.mark.parametrize(
    ("kind", "number", "a", "b"),
    few(
        [(kind, *shape) for shape in ((11, 3, 4), (4, 9, 11)) for kind in CKA],
        {(kind, *shape) for kind, shape in zip(CKA, [(11, 3, 4), (4, 9, 11)] * len(CKA), strict=False)},
    ),
)
@pytest.mark.one_case
def test_gradients_are_those_of_finite_differences(kind: str, number: int, a: int, b: int) -> None:
    """Of features, eleven rows; of kernels, four rows by 9 and 11 columns."""
    one, other = (random(seed, number, width).requires_grad_() for seed, width in ((6, a), (7, b)))
    assert torch.autograd.gradcheck(lambda x, y: 1 - CKA[kind](x, y), (one, other))


def test_gradients_of_kernels_are_those_of_finite_differences() -> None:
    one, other = (random(seed, 6, 3).requires_grad_() for seed in (8, 9))
    assert torch.autograd.gradcheck(lambda x, y: cka(x @ x.T, y @ y.T), (one, other))
    assert torch.autograd.gradcheck(lambda x: rbf_kernel(x, 0.7), one)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e15, -1e-15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [3, 70])
@pytest.mark.parametrize("kind", CKA)
@pytest.mark.one_case
def test_a_constant_has_cka_and_gradient_0(kind: str, width: int, dtype: torch.dtype, value: float) -> None:
    """Whatever the rounding of its mean leaves."""
    one = torch.full((ROWS, width), value, dtype=dtype).requires_grad_()
    other = OTHERS["wide"].to(dtype).requires_grad_()
    for pair in ((one, other), (other, one)):
        found = CKA[kind](*pair)
        assert found.item() == 0
        for gradient in torch.autograd.grad(found, pair, allow_unused=True):
            assert gradient is None or not gradient.any()


class Largest(TorchDispatchMode):
    """Notes the shapes of all results, but for views of what is given."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.given:
                self.shapes.add(tuple(tensor.shape))
        return out

    def numbers(self) -> int:
        return max(int(np.prod(shape)) for shape in self.shapes)


def test_many_examples_are_compared_accurately_in_float32_and_without_their_kernel() -> None:
    number = 5000
    a = (random(1, number, 64).relu() + 3).requires_grad_()
    b = a.detach() @ random(2, 64, 640) + 8 * random(3, number, 640)
    with Largest() as seen:
        small = linear_cka(a.float(), b.float())
        (gradient,) = torch.autograd.grad(small, a)
    exact = linear_cka(a, b)
    (expected,) = torch.autograd.grad(exact, a)
    assert 0.05 < exact.item() < 0.95
    assert small.item() == pytest.approx(exact.item(), rel=1e-4)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))
    assert seen.numbers() <= number * 640


@pytest.mark.parametrize("block", [1, 7, 50, 51, 1000])
def test_blocks_of_an_rbf_kernel_are_the_whole(block: int) -> None:
    a, target = random(1, 51, 6).requires_grad_(), rbf_kernel(random(2, 51, 4))
    expected = cka(rbf_kernel(a), target)
    found = rbf_cka(a, target, block=block)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(torch.autograd.grad(found, a), torch.autograd.grad(expected, a), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_target_is_centred_in_blocks(requires_grad: bool) -> None:
    """To norm 1, and with the gradient of the whole."""
    target = rbf_kernel(random(2, 51, 4)).requires_grad_(requires_grad)
    h = torch.eye(51).double() - 1 / 51
    for block in (1, 7, 50, 51, 1000):
        found = CentredKernel.from_kernel(target, block)
        expected = h @ target.detach() @ h
        torch.testing.assert_close(
            found.centred_normalised_rows(0, 51).detach(), expected / expected.norm(), rtol=1e-9, atol=1e-12
        )
        torch.testing.assert_close(found.centred_normalised_rows(48, 99), found.centred_normalised_rows(0, 51)[48:])
        assert found.squared_norm.item() == pytest.approx(1)
        assert not found.inverse_norm.requires_grad


@pytest.mark.thorough
def test_no_matrix_of_all_pairs_is_made_beside_the_target() -> None:
    """Neither of the kernel, nor of the centred target, nor in the backward pass."""
    number = 2000
    a, target = random(1, number, 5).requires_grad_(), rbf_kernel(random(2, number, 3))
    expected = cka(rbf_kernel(a), target)
    (wanted,) = torch.autograd.grad(expected, a)
    with Largest(target) as seen:
        found = rbf_cka(a, target)
        (gradient,) = torch.autograd.grad(found, a)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(gradient, wanted, rtol=1e-8, atol=1e-12)
    assert seen.numbers() <= 1024 * 1024  # the distances whose median is taken


def test_the_median_of_many_examples_is_taken_from_evenly_spaced_ones() -> None:
    a = random(1, 1501, 3)
    exact, found = rbf(a), rbf_kernel(a).numpy()
    upper = np.triu_indices(len(a), 1)
    ratio = np.log(found[upper]) / np.log(exact[upper])
    assert np.ptp(ratio) < 1e-6
    assert ratio[0] == pytest.approx(1, rel=0.02)


def test_what_cannot_be_compared_is_refused() -> None:
    a = random(1, 6, 3)
    pairs: list[Callable[[Tensor, Tensor], Tensor]] = [linear_cka, rbf_cka, cka]
    for value in pairs:
        with pytest.raises(pf.UserError, match=r"same examples, one row each, got shapes \(6, 3\) and \(5, 3\)"):
            value(a, a[:5])
        with pytest.raises(pf.UserError, match="same examples, one row each"):
            value(a[0], a[0])
        with pytest.raises(pf.UserError, match="at least 2 examples, got 1"):
            value(a[:1], a[:1])
    for sigma in (0.0, -1.0, float("nan")):
        with pytest.raises(pf.UserError, match="sigma, the fraction of the median distance, must be above 0"):
            rbf_kernel(a, sigma)
        with pytest.raises(pf.UserError, match="must be above 0"):
            rbf_cka(a, rbf_kernel(a), sigma)
