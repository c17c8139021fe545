"""Measures which share of the parameters of networks of many kinds FLHA-GHN's hypernetwork generates.

    python benchmarks/coverage.py [--out benchmarks/results/coverage.json]

For each network three shares: with the paper's kinds of layers (`kinds=paper`, all that polyfed generated before), by
default (tables of words stay with the client), and with these, too (`tables=generated`); and the processor's seconds of
one `extract`, on one thread. Networks of transformers and timm are left out where the package is not installed. Beside a
CPU build of torch:

    pip install --no-deps timm torchvision
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from four_networks import LENGTH, NETWORKS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import polyfed as pf
from polyfed.graphs import extract
from polyfed.graphs.tables import keep_tables_local

TOKENS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
Case = tuple[str, Callable[[], nn.Module], Tensor]


class Text(nn.Module):
    """Classifies a text by torch's transformer, pre- or post-norm, with learnt positions and a class token if asked to."""

    def __init__(self, first: bool, token: bool) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(200, 32), nn.Parameter(0.02 * torch.randn(1, 12, 32))
        self.token = nn.Parameter(torch.zeros(1, 1, 32)) if token else None
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=first)
        self.encoder, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) + self.position
        if self.token is not None:
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        out: Tensor = self.out(self.encoder(x).mean(1))
        return out


class Recurrent(nn.Module):
    """Classifies a text by the last output of a recurrent layer."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 32)
        self.layer = kind(32, 40, batch_first=True, **options)
        self.out = nn.Linear(40 * (2 if self.layer.bidirectional else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layer(self.embedding(x))[0][:, -1])
        return out


class Attention(nn.Module):
    """Classifies a sequence by torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.out = (
            nn.MultiheadAttention(32, 4, batch_first=True),
            nn.LayerNorm(32),
            nn.Linear(32, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(x + self.attention(x, x, x)[0]).mean(1))
        return out


class Residual(nn.Module):
    """Adds to its input what a small network makes of it."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.inner(x))


def pooled(*parts: nn.Module, features: int) -> nn.Module:
    """A network of these parts, the mean over places and a linear layer."""
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, 5))


def group_normed() -> nn.Module:
    def block() -> nn.Module:
        parts = [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.GroupNorm(4, 16), nn.ReLU()]
        return Residual(*parts, nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.GroupNorm(4, 16))

    return pooled(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), block(), block(), features=16)


def depthwise() -> nn.Module:
    def block(width: int) -> nn.Module:
        parts: list[nn.Module] = [nn.Conv2d(16, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU6()]
        parts += [nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False), nn.BatchNorm2d(width), nn.ReLU6()]
        return Residual(*parts, nn.Conv2d(width, 16, 1, bias=False), nn.BatchNorm2d(16))

    return pooled(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.Hardswish(), block(48), block(64), features=16)


class UpAndDown(nn.Module):
    """A small U-Net whose decoder goes up by transposed convolutions."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle, self.up = nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.last, self.out = nn.Conv2d(2 * width, width, 3, padding=1), nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.first(x))
        up = F.relu(self.up(F.relu(self.middle(F.relu(self.down(first))))))
        out: Tensor = self.out(F.relu(self.last(torch.cat([first, up], 1))))
        return out


def own(name: str, *shape: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: pf.models.build(name, shape, 5, **options)


def of_torch() -> Iterator[Case]:
    images, series = torch.randn(2, 3, 32, 32), torch.randn(2, 4, 32)
    yield "nn.TransformerEncoder, text, post-norm", lambda: Text(False, False), TOKENS
    yield "the same, pre-norm, class token", lambda: Text(True, True), TOKENS
    yield "LSTM, text (polyfed's `lstm`)", own("lstm", 12, vocabulary=200), TOKENS
    yield "LSTM, bidirectional, 2 layers", lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), TOKENS
    yield "GRU, text", lambda: Recurrent(nn.GRU), TOKENS
    yield "EmbeddingBag, text", lambda: nn.Sequential(nn.EmbeddingBag(200, 32), nn.Linear(32, 3)), TOKENS
    yield "nn.MultiheadAttention, classifier", Attention, torch.randn(2, 6, 32)
    yield "ViT (polyfed's `vit`)", own("vit", 3, 32, 32), images
    plain = [nn.Conv1d(4, 16, 5), nn.ReLU(), nn.Conv1d(16, 32, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten()]
    yield "1-D CNN, time series", lambda: nn.Sequential(*plain, nn.Linear(32, 5)), series
    yield (
        "TCN with weight_norm",
        lambda: nn.Sequential(
            weight_norm(nn.Conv1d(4, 8, 3, dilation=1)), nn.ReLU(), weight_norm(nn.Conv1d(8, 8, 3, dilation=2)), nn.ReLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 5),
        ),
        series,
    )  # fmt: skip
    up = [nn.Conv1d(4, 8, 4, 2), nn.PReLU(), nn.ConvTranspose1d(8, 8, 4, 2), nn.PReLU(), nn.Conv1d(8, 4, 3)]
    yield "ConvTranspose1d and PReLU", lambda: nn.Sequential(*up), series
    yield "U-Net with ConvTranspose2d", UpAndDown, torch.randn(2, 1, 32, 32)
    yield "ResNet with GroupNorm", group_normed, images
    yield "MobileNet-like, depthwise", depthwise, images
    volumes = [nn.Conv3d(1, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1)]
    yield "Conv3d", lambda: nn.Sequential(*volumes, nn.Flatten(), nn.Linear(8, 3)), torch.randn(2, 1, 8, 8, 8)


def of_federations() -> Iterator[Case]:
    """The networks of the two federations of `four_networks.py`."""
    letters = torch.randint(0, 50, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    inputs = {"tweets": letters, "cifar10": torch.randn(2, 3, 32, 32)}
    for federation, networks in NETWORKS.items():
        for name, build in networks.items():
            yield f"{federation}: {name}", build, inputs[federation]


def of_transformers() -> Iterator[Case]:
    if find_spec("transformers") is None:
        return
    import transformers as hf

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    bert = hf.BertConfig(vocab_size=200, max_position_embeddings=32, num_labels=3, **small)
    yield "transformers, BERT", lambda: hf.BertForSequenceClassification(bert), TOKENS
    distil = hf.DistilBertConfig(
        vocab_size=200, max_position_embeddings=32, dim=32, n_layers=2, n_heads=4, hidden_dim=64, num_labels=3
    )
    yield "transformers, DistilBERT", lambda: hf.DistilBertForSequenceClassification(distil), TOKENS
    gpt = hf.GPT2Config(vocab_size=200, n_positions=32, n_embd=32, n_layer=2, n_head=4, num_labels=3, pad_token_id=0)
    yield "transformers, GPT-2", lambda: hf.GPT2ForSequenceClassification(gpt), TOKENS
    vit = hf.ViTConfig(image_size=32, patch_size=8, num_labels=3, **small)
    yield "transformers, ViT", lambda: hf.ViTForImageClassification(vit), torch.randn(2, 3, 32, 32)


TIMM = (  # one small network of each of fifteen families in wide use
    "mobilenetv3_small_050", "convnext_atto", "vit_tiny_patch16_224", "resnet18", "efficientnet_b0", "deit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224", "regnetx_002", "densenet121", "mixer_s32_224", "eva02_tiny_patch14_224",
    "beit_base_patch16_224", "tf_efficientnetv2_b0", "inception_v3", "vgg11",
)  # fmt: skip


def declare_torchvision_operators() -> None:
    """Names the two operators without which torchvision cannot be imported where its compiled half does not load, as beside
    a CPU build of torch. The networks do not call them.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def of_timm() -> Iterator[Case]:
    if find_spec("timm") is None:
        return
    declare_torchvision_operators()
    import timm

    for name in TIMM:
        options = {"depth": 2} if name.startswith(("vit", "deit", "beit", "eva")) else {}
        size = timm.create_model(name, pretrained=False, **options).default_cfg["input_size"]
        yield (
            f"timm {name}",
            lambda n=name, o=options: timm.create_model(n, pretrained=False, **o),
            torch.randn(2, *size),
        )


def measure(case: Case) -> dict[str, Any]:
    """Returns the shares of one network's parameters that are generated, and the reasons why the rest is private."""
    name, build, x = case
    with pf.core.seeds.temporary_rng_seed(0):
        model = build()
    former, start = extract(model, x, kinds="paper"), time.process_time()
    graph = extract(model, x)
    seconds = time.process_time() - start
    local = keep_tables_local(graph)
    reasons = Counter(reason.partition(" (")[0] for reason in local.local_reasons.values())
    return {
        "network": name, "parameters": sum(graph.parameter_sizes.values()), "paper": round(former.coverage, 4),
        "default": round(local.coverage, 4), "tables": round(graph.coverage, 4), "in layers": round(
            graph.num_parameters_in_layers / max(1, sum(graph.parameter_sizes.values())), 4
        ),
        "tracer": graph.tracer, "seconds": round(seconds, 2), "private": dict(reasons),
        "not generated": dict(graph.local_reasons),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/coverage.json")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    rows = []
    print("| network | parameters | before | default | with tables of words | tracer | extract, s |")
    print("|---" * 7 + "|")
    for case in [*of_torch(), *of_federations(), *of_transformers(), *of_timm()]:
        row = measure(case)
        rows.append(row)
        shares = " | ".join(f"{100 * row[key]:.1f} %" for key in ("paper", "default", "tables"))
        print(
            f"| {row['network']} | {row['parameters']:,} | {shares} | {row['tracer']} | {row['seconds']} |", flush=True
        )
    with open(out, "w", encoding="utf-8") as file:
        json.dump(rows, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
