"""Every constructor: sizes from the papers, shapes, learning, tracing, and refusals."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

from polyfed.core.errors import UserError
from polyfed.core.seeds import temporary_rng_seed
from polyfed.models import MODELS, build
from polyfed.models.building.plain_cnn import ConvSpec, build_norm_layer, plain_cnn

TOKENS = (25,)
TOKEN_BY_TOKEN = {"lstm_tagger", "tiny_transformer"}  # have logits for each token
# (name, input shape, arguments): small widths, so that all of them train in seconds; every name of the registry occurs.
TABLE: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("mlp", (1, 8, 8), {}),
    ("mlp", (13,), {"hidden": ()}),
    ("mlp", (3, 4, 5, 6), {"hidden": (16, 8)}),
    ("cnn_small", (1, 8, 8), {}),
    ("cnn_small", (1, 8, 8), {"norm": "batch", "channels": (8,)}),
    ("cnn_small", (3, 12, 10), {"norm": "group"}),
    ("cnn_582k", (1, 16, 16), {"channels": (4, 8), "hidden": 16}),
    ("cnn_pfedla", (1, 28, 28), {}),
    ("cnn_pfedla", (3, 32, 32), {"batch_norm": True}),
    *(("cnn_fedhenn", (3, 32, 32), {"level": level, "channels": 8}) for level in range(1, 6)),
    ("cnn_fedhenn", (1, 8, 8), {"level": 5, "channels": 8, "padding": 2}),
    ("cnn_fedhenn_homo", (3, 32, 32), {"channels": (8, 8)}),
    ("cnn_fedpnas", (1, 9, 8), {"channels": (4, 8, 16, 16)}),
    ("cnn_fedpnas", (3, 32, 32), {}),
    ("cnn_fedpnas", (3, 70, 20), {"channels": (4, 8, 16, 16)}),
    ("resnet18", (1, 8, 8), {"width": 4}),
    ("resnet18", (3, 16, 16), {"width": 8, "norm": "group"}),
    ("resnet18", (1, 64, 64), {"width": 4, "stem": "xray"}),
    *(("resnet18_hybrid", (3, 16, 16), {"width": 4, "variant": variant}) for variant in (1, 2, 3)),
    ("flha_arch0", (3, 16, 16), {"width": 4}),
    ("flha_arch1", (3, 16, 16), {"width": 4}),
    ("flha_arch2", (3, 16, 16), {"width": 4}),
    ("flha_arch3", (3, 16, 16), {"width": 4, "norm": "none"}),
    ("flha_arch3", (3, 16, 16), {"width": 4}),
    ("flha_small", (3, 16, 16), {"width": 8}),
    *(("flha_chain", (3, 16, 16), {"width": 8, "num_layers": n}) for n in (4, 7, 10, 13)),
    ("lstm", TOKENS, {"vocabulary": 50, "embedding": 16, "hidden": 16, "fc": 16}),
    ("lstm", TOKENS, {"vocabulary": 50, "embedding": 16, "hidden": 16, "fc": 16, "num_layers": 2}),
    ("lstm_tagger", TOKENS, {"vocabulary": 50, "embedding": 16, "hidden": 8}),
    ("tiny_transformer", TOKENS, {"vocabulary": 50, "dim": 16, "depth": 1}),
    ("tiny_transformer", TOKENS, {"vocabulary": 50, "dim": 16, "depth": 1, "causal": True}),
    ("vit", (1, 8, 8), {"dim": 16, "patch": 2}),
    ("vit", (3, 16, 16), {"dim": 16, "pool": "cls"}),
    ("unet", (1, 17, 14), {"width": 4}),
    ("unet", (3, 16, 16), {"width": 4, "depth": 3, "norm": "batch"}),
    ("unet3d", (1, 8, 9, 7), {"width": 2, "depth": 1, "norm": "group"}),
]
IDS = [f"{name}-{'-'.join(map(str, args.values()))}" for name, _, args in TABLE]
NUM_CLASSES = 5
# Without a norm layer, 12 layers with torch's default weights learn slowly: that combination is checked for shapes only.
# U-Nets have an output for each pixel; test_unet.py trains them.
LEARNERS = [
    row for row in TABLE if row[0][:4] != "unet" and not (row[0] == "flha_arch3" and row[2].get("norm") == "none")
]


def make(name: str, shape: tuple[int, ...], arguments: dict[str, Any], classes: int = NUM_CLASSES) -> nn.Module:
    with temporary_rng_seed(0):
        return build(name, shape, classes, **arguments)


def inputs(name: str, shape: tuple[int, ...], num: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if shape == TOKENS:
        return torch.randint(0, 50, (num, *shape), generator=generator)
    return torch.randn((num, *shape), generator=generator)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_the_table_covers_the_registry() -> None:
    assert {name for name, _, _ in TABLE} == set(MODELS)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "shape", "arguments"), TABLE, ids=IDS)
def test_output_shape_and_modes(name: str, shape: tuple[int, ...], arguments: dict[str, Any]) -> None:
    model, x = make(name, shape, arguments), inputs(name, shape, 3)
    places = shape if name in TOKEN_BY_TOKEN else ()
    assert model(x).shape == (3, *places, NUM_CLASSES, *(shape[1:] if name.startswith("unet") else ()))
    model.eval()
    expected = model(x)
    assert torch.allclose(model(x[:1]), expected[:1], atol=1e-5)  # no example depends on another one
    with torch.inference_mode():
        assert torch.allclose(model(x), expected, atol=1e-6)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)  # noqa: S301 (our own bytes)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "shape", "arguments"), TABLE, ids=IDS)
def test_fx_traces_it(name: str, shape: tuple[int, ...], arguments: dict[str, Any]) -> None:
    model, x = make(name, shape, arguments).eval(), inputs(name, shape, 2)
    traced = fx.symbolic_trace(model)
    assert torch.equal(traced(x), model(x))
    assert torch.equal(traced(x[:1]), model(x[:1]))  # the batch size is not baked in


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "shape", "arguments"), LEARNERS, ids=[f"{n}-{'-'.join(map(str, a.values()))}" for n, _, a in LEARNERS]
)
def test_learns_random_labels(name: str, shape: tuple[int, ...], arguments: dict[str, Any]) -> None:
    model, x = make(name, shape, arguments).train(), inputs(name, shape, 32)
    y = torch.arange(32) % NUM_CLASSES
    # At 0.01 the deep GroupNorm network, whose last features are 2×2 pixels, first throws its loss up.
    optimiser = torch.optim.Adam(model.parameters(), lr=0.003 if arguments.get("norm") == "group" else 0.01)
    losses = []
    for _ in range(25):
        optimiser.zero_grad()
        loss = F.cross_entropy(model(x)[:, 0] if name in TOKEN_BY_TOKEN else model(x), y)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
        if losses[-1] < losses[0] / 2:
            break
    assert losses[-1] < 0.75 * losses[0], losses
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "arguments", "parameters"),
    [
        ("cnn_582k", (1, 28, 28), 10, {}, 582_026),  # METHODS, issue 2
        ("cnn_pfedla", (1, 28, 28), 10, {}, 85_822),  # pFedLA, Table 3: 491.08 MB
        ("cnn_pfedla", (3, 32, 32), 10, {"batch_norm": True}, 121_278),  # pFedLA, Table 3: 693.98 MB
        ("resnet18", (3, 32, 32), 10, {}, 11_173_962),
        ("resnet18", (3, 32, 32), 100, {}, 11_173_962 + 90 * 513),
        ("cnn_fedhenn_homo", (3, 32, 32), 10, {}, 4_864 + 102_464 + 192_120 + 7_744 + 650),  # sizes in METHODS
        ("cnn_fedpnas", (3, 32, 32), 10, {}, 224 + 2_336 + 4_096 + 256 + 393_216 + 1_536 + 7_690),  # layer by layer
        ("cnn_fedpnas", (1, 28, 28), 10, {}, 80 + 2_336 + 4_096 + 256 + 393_216 + 1_536 + 7_690),
        ("cnn_fedpnas", (1, 8, 8), 3, {"channels": (2, 3, 4, 5)}, 20 + 57 + 12 + 8 + 80 + 10 + 18),
        ("mlp", (1, 8, 8), 10, {}, 65 * 64 + 65 * 10),
    ],
)
def test_parameter_counts(
    name: str, shape: tuple[int, ...], classes: int, arguments: dict[str, Any], parameters: int
) -> None:
    assert count(make(name, shape, arguments, classes)) == parameters


def test_pfedlas_table_3_in_megabytes() -> None:
    """The published costs (750 messages each way) are those of our layers; retained layers are not downloaded."""

    def megabytes(module: nn.Module, ways: int) -> float:
        return 750 * ways * 4 * count(module) / 2**20

    emnist: Any = make("cnn_pfedla", (1, 28, 28), {}, 10)
    cifar: Any = make("cnn_pfedla", (3, 32, 32), {"batch_norm": True}, 10)
    assert megabytes(emnist, 2) == pytest.approx(491.08, abs=0.03)
    assert megabytes(emnist.fc3, 1) == pytest.approx(491.08 - 488.65, abs=0.03)
    assert megabytes(emnist.fc1, 1) == pytest.approx(488.65 - 312.52, abs=0.03)
    assert megabytes(cifar, 2) == pytest.approx(693.98, abs=0.03)
    assert megabytes(cifar.fc1, 1) == pytest.approx(693.98 - 418.97, abs=0.03)
    assert megabytes(cifar.conv2, 1) == pytest.approx(418.97 - 382.25, abs=0.03)
    assert megabytes(cifar.fc3, 1) == pytest.approx(382.25 - 379.82, abs=0.03)


def layer_types(model: nn.Module) -> set[tuple[int, ...]]:
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    return {(m.in_channels, m.out_channels, m.kernel_size[0], m.stride[0]) for m in convs}


def num_layers(model: nn.Module) -> int:
    """As the paper counts: without the 1×1 convolutions of shortcuts and joins."""
    return sum(isinstance(m, nn.Linear) or (isinstance(m, nn.Conv2d) and m.kernel_size[0] > 1) for m in model.modules())


@pytest.mark.parametrize(
    ("name", "layers"), [("flha_arch0", 18), ("flha_arch1", 10), ("flha_arch2", 12), ("flha_arch3", 12)]
)
def test_flhas_architectures_have_the_papers_layers_and_share_types(name: str, layers: int) -> None:
    model = make(name, (3, 32, 32), {"width": 8})
    assert num_layers(model) == layers
    assert layer_types(model) <= layer_types(make("resnet18", (3, 32, 32), {"width": 8}))


def test_flhas_skips_are_where_the_paper_has_them() -> None:
    def skips(name: str) -> list[bool]:
        """Per layer between stem and linear: is it inside a residual block?"""
        model = make(name, (3, 32, 32), {"width": 4})
        convs = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.kernel_size[0] == 3]
        blocks = [n for n, m in model.named_modules() if hasattr(m, "shortcut")]
        return [any(conv.startswith(f"{block}.") for block in blocks) for conv in convs[1:]]

    assert skips("flha_arch0") == [True] * 16
    assert skips("flha_arch1") == [False] * 8
    assert skips("flha_arch2") == [True] * 8 + [False] * 2
    assert skips("flha_arch3") == [False] * 2 + [True] * 8


def test_flhas_chains_repeat_one_type() -> None:
    for layers in (4, 7, 10, 13):
        model = make("flha_chain", (3, 32, 32), {"num_layers": layers, "width": 64})
        assert num_layers(model) == layers
        assert layer_types(model) == {(3, 64, 3, 1), (64, 64, 3, 1)}
    assert num_layers(make("flha_small", (3, 32, 32), {})) == 4


def test_hybrids_differ_and_concatenate_two_blocks() -> None:
    joins = []
    for variant in (1, 2, 3):
        model = make("resnet18_hybrid", (3, 32, 32), {"variant": variant, "width": 4})
        joins.append(tuple(m.join for m in model.modules() if hasattr(m, "join")))
        assert joins[-1].count("concat") == 2
        assert len(joins[-1]) == 8
    assert len(set(joins)) == 3


def test_the_xray_stem_is_the_papers() -> None:
    stem = make("flha_arch3", (1, 224, 224), {"stem": "xray"}, 14).get_submodule("conv1")
    assert isinstance(stem, nn.Conv2d)
    assert (stem.in_channels, stem.out_channels, stem.kernel_size, stem.stride) == (1, 64, (7, 7), (2, 2))


def test_fedhenns_five_networks_grow() -> None:
    models = [make("cnn_fedhenn", (3, 32, 32), {"level": level}) for level in range(1, 6)]

    def count_type(model: nn.Module, kind: type[nn.Module]) -> int:
        return sum(isinstance(m, kind) for m in model.modules())

    assert [(count_type(model, nn.Conv2d), count_type(model, nn.Linear)) for model in models] == [
        (1, 1),
        (1, 2),
        (2, 2),
        (2, 3),
        (3, 3),
    ]


@pytest.mark.parametrize(("height", "width"), [(28, 28), (8, 12), (9, 31), (1, 1), (32, 32)])
def test_fedpnass_network_pads_small_images_to_32(height: int, width: int) -> None:
    """As if zeros were added around the image, one more below and on the right where their number is odd."""
    with temporary_rng_seed(0):
        small = build("cnn_fedpnas", (2, height, width), NUM_CLASSES, channels=(4, 8, 16, 16)).eval()
        whole = build("cnn_fedpnas", (2, 32, 32), NUM_CLASSES, channels=(4, 8, 16, 16)).eval()
    whole.load_state_dict(small.state_dict())
    x = inputs("cnn_fedpnas", (2, height, width), 3)
    rows, columns = 32 - height, 32 - width
    padded = F.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
    assert torch.allclose(small(x), whole(padded), atol=1e-6)


def test_fedpnass_network_by_hand() -> None:
    """The layers of the authors' code, one after the other; of larger images the mean over what is left."""
    net: Any = make("cnn_fedpnas", (3, 44, 56), {"channels": (4, 8, 16, 16)}).eval()
    x = inputs("cnn_fedpnas", (3, 44, 56), 2)
    for shape in ((32, 32), (44, 56)):
        part = x[:, :, : shape[0], : shape[1]]
        out = F.conv2d(part, net.conv1.weight, net.conv1.bias, stride=2, padding=1)
        out = F.conv2d(out, net.conv2.weight, net.conv2.bias, stride=2, padding=1)
        out = F.avg_pool2d(F.relu(out), 5, stride=3)
        for conv, norm in ((net.conv3, net.norm3), (net.conv4, net.norm4)):
            out = F.relu(norm(F.conv2d(out, conv.weight)))
        assert out.shape[2:] == ((1, 1) if shape == (32, 32) else (2, 3))
        out = F.linear(out.mean((2, 3)), net.fc1.weight, net.fc1.bias)
        assert torch.allclose(net(part), out, atol=1e-6)


def test_norms() -> None:
    assert isinstance(build_norm_layer("batch", 6), nn.BatchNorm2d)
    assert build_norm_layer("none", 6) is None
    groups: list[Any] = [build_norm_layer("group", channels) for channels in (1, 4, 24, 32, 56, 64, 512)]
    assert {group.num_channels: group.num_groups for group in groups} == {
        1: 1,
        4: 1,
        24: 1,
        32: 2,
        56: 1,
        64: 4,
        512: 32,
    }
    plain = make("resnet18", (3, 8, 8), {"width": 4, "norm": "none"})
    assert not any(isinstance(m, nn.BatchNorm2d) for m in plain.modules())


def test_pooling_before_relu_changes_nothing() -> None:
    with temporary_rng_seed(0):
        net: Any = plain_cnn("demo", (2, 9, 9), 3, [ConvSpec(4, 3, padding=1, pool=2)])
    x = inputs("demo", (2, 9, 9), 5).requires_grad_()
    other = net.fc1(net.flatten(net.pool1(net.relu1(net.conv1(x)))))
    assert torch.equal(net(x), other)
    target = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
    first = torch.autograd.grad((net(x) * target).sum(), [x, *net.parameters()])
    second = torch.autograd.grad((other * target).sum(), [x, *net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_vit_has_second_derivatives_and_vmaps() -> None:
    """Meta-learning differentiates twice, and clients of one architecture may run together."""
    model, x = make("vit", (1, 8, 8), {"dim": 8, "depth": 1}), inputs("vit", (1, 8, 8), 2)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(x).square().sum(), parameters, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in gradients), parameters)
    assert all(bool(g.isfinite().all()) for g in second)
    stacked, buffers = stack_module_state([model, model])
    together = vmap(lambda p, b: functional_call(model, (p, b), (x,)))(stacked, buffers)
    assert torch.allclose(together[1], model(x), atol=1e-6)


def test_lstm_reads_int32_and_ignores_padding() -> None:
    model = make("lstm", TOKENS, {"vocabulary": 20, "num_layers": 2}).eval()
    text = torch.tensor([[3, 7, 9, 4]])
    padded = torch.cat([text, torch.zeros(1, 21, dtype=torch.int64)], dim=1)
    assert torch.allclose(model(padded), model(text), atol=1e-6)
    assert torch.equal(model(padded.to(torch.int32)), model(padded))
    assert not torch.allclose(model(text), model(text[:, :3]))
    assert bool(model(torch.zeros(2, 25, dtype=torch.int64)).isfinite().all())


@pytest.mark.parametrize(
    ("name", "shape", "arguments", "says"),
    [
        ("cnn_582k", (1, 8, 8), {}, "too small"),
        ("cnn_pfedla", (1, 15, 15), {}, "too small"),
        ("cnn_fedhenn", (3, 18, 18), {"level": 5}, "too small"),
        ("cnn_small", (1, 8, 8), {"channels": (4, 4, 4, 4)}, "cnn_small or mlp"),
        ("cnn_small", (1, 8, 8), {"channels": (4, 0)}, r"at least 1, got \(0"),
        ("cnn_small", (64,), {}, r"got \(64,\)"),
        ("cnn_small", (1, 8, 8), {"norm": "batsh"}, "did you mean batch"),
        ("cnn_fedhenn", (3, 32, 32), {"level": 6}, "got 6"),
        ("cnn_fedpnas", (3, 32, 32), {"channels": (8, 32)}, r"four numbers, .* got \(8, 32\)"),
        ("cnn_fedpnas", (3, 32, 32), {"channels": (8, 32, 0, 8)}, "at least 1"),
        ("cnn_fedpnas", (32, 32), {}, "takes images"),
        ("mlp", (), {}, "input_shape is empty"),
        ("mlp", (4,), {"hidden": (3.5,)}, "whole numbers"),
        ("mlp", (4, -1), {}, "at least 1"),
        ("resnet18", (3, 8, 8), {"width": 0}, "width"),
        ("resnet18", (3, 8, 8), {"stem": "cifra"}, "did you mean cifar"),
        ("resnet18_hybrid", (3, 8, 8), {"variant": 4}, "1, 2 or 3, got 4"),
        ("flha_chain", (3, 8, 8), {"num_layers": 1}, "at least 2"),
        ("flha_chain", (3, 4, 4), {"num_layers": 13}, "too small"),
        ("lstm", (3, 8, 8), {}, "token sequences"),
        ("lstm", (25,), {"vocabulary": 0}, "vocabulary"),
        ("lstm", (25,), {"vocabulary": 5, "padding": 5}, "padding=5"),
        ("vit", (1, 9, 9), {}, "patch=4 does not divide"),
        ("vit", (1, 8, 8), {"num_heads": 3}, "num_heads=3"),
        ("vit", (1, 8, 8), {"pool": "max"}, "pool='max'"),
        ("unet", (1, 8, 8, 8), {}, "unet3d takes volumes"),
        ("unet", (1, 16, 7), {}, "need 8 pixels a side"),
        ("unet3d", (1, 8, 8, 8), {"norm": "instanse"}, "did you mean instance"),
        ("unet3d", (1, 8, 8, 8), {"width": 0}, "width"),
    ],
)
def test_refusals(name: str, shape: tuple[int, ...], arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make(name, shape, arguments)


def test_no_classes_is_refused() -> None:
    with pytest.raises(UserError, match="num_classes"):
        build("mlp", (4,), 0)
