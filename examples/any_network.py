"""Networks that others wrote, of three kinds, in one federation with a built-in one; a fourth joins later."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import polyfed as pf
from polyfed.graphs import extract
from polyfed.models import build


class InvertedResidual(nn.Module):
    """MobileNet's: wide inside, a convolution per channel, a sum."""

    def __init__(self, channels, expand):
        super().__init__()
        wide = channels * expand
        self.body = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True),
            nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x):
        return x + self.body(x)


class DenseBlock(nn.Module):
    """DenseNet's: each layer sees all those before it."""

    def __init__(self, channels, growth, num_layers):
        super().__init__()
        widths = [channels + i * growth for i in range(num_layers)]
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.layers = nn.ModuleList(nn.Conv2d(width, growth, 3, padding=1, bias=False) for width in widths)

    def forward(self, x):
        features = [x]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            features.append(layer(torch.relu(norm(torch.cat(features, 1)))))
        return torch.cat(features, 1)


def convnet(*body, channels):
    stem = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def mobile():
    return convnet(InvertedResidual(8, 2), InvertedResidual(8, 2), channels=8)


def dense():
    return convnet(DenseBlock(8, 8, 3), nn.Conv2d(32, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), channels=8)


def residual():
    return build("resnet18", (1, 8, 8), 10, width=8)


def deeper():
    return convnet(*(InvertedResidual(8, 2) for _ in range(4)), channels=8)


images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels)
networks = {"north": mobile, "south": dense, "west": residual}
for name, network in networks.items():
    graph = extract(network(), x[:2])
    print(f"{name}: {len(graph.nodes)} nodes, {len(graph.edges)} edges, {graph.coverage:.0%} of the weights generated")
clients = [
    pf.Client(name, network, train=(x[k:400:4], y[k:400:4]), test=(x[800:], y[800:]))
    for k, (name, network) in enumerate(networks.items())
]
run = pf.federate(clients, pf.algorithms.FLHAGHN(lr=0.05, batch_size=16, local_epochs=2), rounds=25, evaluate_every=25)
for row in run.table():
    print(f"{row['client']}: accuracy {row['accuracy']:.2f}")
start = run.warmstart(deeper, (x[3:400:4], y[3:400:4]), test=(x[800:], y[800:]))
print(f"an unseen client: {start.coverage:.0%} generated, accuracy {start.before['accuracy']:.2f} at once, "
      f"{start.after['accuracy']:.2f} after an epoch on the head")  # fmt: skip
