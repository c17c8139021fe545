"""Representations of whole networks, the public examples on which they are taken, and how alike they are."""

import pytest
import torch
from torch import Tensor, nn

import polyfed as pf
from polyfed.alignment import compute_representations, draw_public_rows, linear_cka, noise_like
from polyfed.alignment.pairwise_cka import mean_pairwise_cka, pairwise_cka
from polyfed.alignment.representations import differentiable_representations, representation_module_name
from polyfed.core.examples.examples import Examples, Normalise
from polyfed.core.nn.module_cache import build_module
from polyfed.core.seeds import torch_generator
from polyfed.models import build
from polyfed.models.structure import compute_batch_representation
from polyfed.testing import SmallNet


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch_generator(seed), dtype=dtype)


def examples(x: Tensor) -> Examples:
    return Examples(x, torch.zeros(len(x)))


def trained() -> SmallNet:
    """With statistics of its own, dropout on, and one part in the other mode."""
    net = build_module(SmallNet, 1)
    assert isinstance(net, SmallNet)
    norm = net.body[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    norm.running_mean += 0.7
    net.train()
    net.body[2].eval()
    return net


def by_hand(net: SmallNet, x: Tensor, own_statistics: bool = False) -> Tensor:
    linear, norm = net.body[0], net.body[1]
    hidden = linear(x)
    mean, variance = norm.running_mean, norm.running_var
    if own_statistics:
        mean, variance = hidden.mean(0), hidden.var(0, unbiased=False)
    return ((hidden - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias).relu()


def test_representations_are_without_dropout_and_with_running_statistics() -> None:
    """Those with gradients are with the statistics of their batch, as training is; neither changes the network."""
    net, x = trained(), random(2, 200, 6)
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    modes = [part.training for part in net.modules()]
    assert any(modes)
    assert not all(modes)
    state = torch.random.get_rng_state()
    whole, live = (
        compute_representations(net, examples(x)),
        differentiable_representations(net, examples(x), torch.arange(200), "head"),
    )
    for found, own_statistics in ((whole, False), (live, True)):
        torch.testing.assert_close(found, by_hand(net, x, own_statistics))
    assert [part.training for part in net.modules()] == modes
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in net.named_buffers())
    assert torch.equal(state, torch.random.get_rng_state())
    assert not whole.requires_grad
    assert not torch.allclose(whole, live, atol=0.1)


@pytest.mark.parametrize("sizes", [[100], [256], [128, 129], [128, 128, 128, 60]])
def test_gradients_through_batches_are_those_without_checkpoints(sizes: list[int]) -> None:
    """A last batch of one row, which has no variance, joins the one before it."""
    net, x, number = trained(), random(2, 900, 6), sum(sizes)
    rows = torch.randperm(900, generator=torch_generator(3))[:number]
    factor, parameters = random(4, number, 8), list(net.body.parameters())
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    found = differentiable_representations(net, examples(x), rows, "head")
    expected = torch.cat([by_hand(net, part, own_statistics=True) for part in x[rows].split(sizes)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    one, other = (torch.autograd.grad((a * factor).tanh().sum(), parameters) for a in (found, expected))
    assert all(other[i].abs().max() > 1e-2 for i in (0, 2, 3))  # the bias before a BatchNorm has none
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in net.named_buffers())


def test_without_batch_norm_the_batches_are_one_piece() -> None:
    net, x = build_module(lambda: build("mlp", (6,), 3, hidden=(8, 5)), 1), random(2, 700, 6)
    module = representation_module_name(net, examples(x))
    found = differentiable_representations(net, examples(x), torch.arange(700), module)
    expected = compute_batch_representation(net, x, module=module)
    torch.testing.assert_close(found, expected)
    parameters = [p for name, p in net.named_parameters() if not name.startswith(module)]
    one, other = (torch.autograd.grad(a.tanh().sum(), parameters) for a in (found, expected))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_more_than_a_batch_is_run_again_in_the_backward_pass() -> None:
    runs: list[int] = []
    net = trained()
    net.body[0].register_forward_hook(lambda *given: runs.append(len(given[1][0])))
    for number, forward, again in ((256, [256], []), (300, [128, 128, 44], [44, 128, 128])):
        runs.clear()
        a = differentiable_representations(net, examples(random(2, number, 6)), torch.arange(number), "head")
        assert runs == forward
        torch.autograd.backward(a.sum())
        assert sorted(runs) == sorted(forward + again)


NETWORKS = [
    ("lstm", (25,), {"vocabulary": 50, "embedding": 8, "hidden": 8, "fc": 12}, 12),
    ("lstm", (25,), {"vocabulary": 50, "embedding": 8, "hidden": 8, "fc": 9, "num_layers": 2}, 9),
    ("vit", (1, 8, 8), {"dim": 16, "patch": 2}, 16),
    ("cnn_fedhenn", (3, 32, 32), {"level": 1}, None),
    ("cnn_fedhenn", (3, 32, 32), {"level": 5}, None),
    ("mlp", (6,), {"hidden": [7, 5]}, 5),
]


@pytest.mark.parametrize(("name", "shape", "arguments", "width"), NETWORKS)
def test_networks_of_the_zoo_have_representations(
    name: str, shape: tuple[int, ...], arguments: dict[str, int], width: int | None
) -> None:
    net = build_module(lambda: build(name, shape, 3, **arguments), 5)
    tokens = torch.randint(1, 50, (5, *shape), generator=torch_generator(1))
    data = examples(tokens if name == "lstm" else random(1, 5, *shape))
    module = representation_module_name(net, data)
    last = net.get_submodule(module)
    assert isinstance(last, nn.Linear)
    assert width is None or last.in_features == width
    a = compute_representations(net, data)
    assert a.shape == (5, last.in_features)
    rows = torch.tensor([4, 1])
    found = differentiable_representations(net, data, rows, module)
    torch.testing.assert_close(found, a[rows], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last(a), net.eval()(data.batch(torch.arange(5))[0]), rtol=1e-4, atol=1e-5)
    torch.autograd.backward(found.square().sum())
    assert any(p.grad is not None and p.grad.any() for p in net.parameters())


def test_a_module_can_be_named_and_inputs_are_transformed() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    images = torch.randint(256, (9, 3, 2, 2), generator=torch_generator(1), dtype=torch.uint8)
    data = Examples(images, torch.zeros(9), torch.tensor([2, 5, 7]), Normalise((0.5,) * 3, (0.2,) * 3))
    inputs = (images[[2, 5, 7]] / 255 - 0.5) / 0.2
    torch.testing.assert_close(compute_representations(net, data, module="1"), inputs.flatten(1))
    torch.testing.assert_close(
        differentiable_representations(net, data, torch.tensor([1]), "1"), inputs[1:2].flatten(1)
    )
    assert compute_representations(net, data).shape == (3, 8)
    with pytest.raises(pf.UserError, match="module='2a'"):
        compute_representations(net, data, module="2a")


# -- RAD ----------------------------------------------------------------------------------------------------------


def test_the_rows_of_a_round_are_drawn_once_and_depend_on_seed_and_round() -> None:
    rows = draw_public_rows(3, 7, 1000, 200)
    assert rows.dtype == torch.int32
    assert rows.shape == (200,)
    assert len(set(rows.tolist())) == 200
    assert set(rows.tolist()) <= set(range(1000))
    assert torch.equal(rows, draw_public_rows(3, 7, 1000, 200))
    for other in (draw_public_rows(3, 8, 1000, 200), draw_public_rows(4, 7, 1000, 200)):
        assert 10 < len(set(other.tolist()) & set(rows.tolist())) < 100
    drawn = torch.cat([draw_public_rows(0, t, 20, 10) for t in range(200)])
    assert drawn.bincount(minlength=20).float().sub(100).abs().max() < 40  # each as often as any other


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_noise_has_the_form_of_the_inputs_and_is_the_same_for_all_clients(dtype: torch.dtype) -> None:
    transform = Normalise((0.5,), (0.5,)) if dtype == torch.uint8 else None
    one, other = (
        Examples((90 * random(seed, n, 1, 4, 4)).abs().to(dtype), torch.zeros(n), transform=transform)
        for seed, n in ((1, 5), (2, 9))
    )
    noise = noise_like(one, 400, seed=6)
    assert len(noise) == 400
    assert noise.x.shape[1:] == (1, 4, 4)
    assert noise.x.dtype == dtype
    assert noise.transform is transform
    assert torch.equal(noise.x, noise_like(other, 400, seed=6).x)
    assert not torch.equal(noise.x, noise_like(one, 400, seed=7).x)
    mean, deviation = noise.x.double().mean().item(), noise.x.double().std().item()
    wanted = (127.5, 73.9) if dtype == torch.uint8 else (0, 1)
    assert (mean, deviation) == (pytest.approx(wanted[0], abs=0.05 * wanted[1]), pytest.approx(wanted[1], rel=0.05))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_there_is_no_noise_of_tokens(dtype: torch.dtype) -> None:
    with pytest.raises(pf.UserError, match=r"rad='noise'.*torch.int.*use rad='public' with public examples"):
        noise_like(examples(torch.ones(3, 25, dtype=dtype)), 4, seed=0)


# -- similarity ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [20, 256, 700])
def test_pairwise_cka_is_linear_cka_of_each_pair(number: int) -> None:
    a = random(1, number, 5)
    parts = [a, a[:, :2] + 3, 1e3 * random(2, number, 400) + 5, torch.full((number, 4), 0.1)]
    table = pairwise_cka(parts)
    places = torch.arange(number) if number <= 256 else torch.linspace(0, number - 1, 256).long()
    for i, one in enumerate(parts):
        for j, other in enumerate(parts):
            expected = linear_cka(one[places].double(), other[places].double()).item() if max(i, j) < 3 else 0
            assert table[i, j].item() == pytest.approx(expected, rel=1e-6)
    pairs = [table[i, j].item() for i, j in ((0, 1), (0, 2), (1, 2))]
    assert mean_pairwise_cka(parts[:3]) == pytest.approx(sum(pairs) / 3, abs=1e-8)
    assert min(pairs) > 0.01
    assert max(pairs) < 0.99


def test_fewer_than_two_networks_have_no_similarity() -> None:
    assert mean_pairwise_cka([]) is None
    assert mean_pairwise_cka([random(1, 5, 2)]) is None
    assert mean_pairwise_cka([random(1, 5, 2)] * 2) == pytest.approx(1)
