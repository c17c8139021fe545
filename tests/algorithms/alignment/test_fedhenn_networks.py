"""FedHeNN among networks of different families: a vision transformer, a CNN and an MLP, with other numbers of classes."""

from typing import Literal

import pytest
import torch

import polyfed as pf
from polyfed.algorithms import FedHeNN
from polyfed.core.seeds import torch_generator
from polyfed.models import ModelSpec


@pytest.mark.slow
@pytest.mark.parametrize("share", ["representations", "weights"])
def test_a_vision_transformer_learns_among_cnns_with_other_classes(
    share: Literal["representations", "weights"],
) -> None:
    """Images as bytes, which clients and server scale alike."""
    specs = [
        ModelSpec("vit", {"dim": 8, "depth": 1, "patch": 4}, (1, 8, 8), 3),
        ModelSpec("cnn_small", {}, (1, 8, 8), 2),
        ModelSpec("mlp", {"hidden": (9,)}, (1, 8, 8), 5),
    ]
    images = torch.randint(256, (60, 1, 8, 8), generator=torch_generator(1), dtype=torch.uint8)
    clients = []
    for k, spec in enumerate(specs):
        data = images[12 * k : 12 * k + 12], torch.arange(12) % spec.num_classes
        clients.append(pf.Client(f"client-{k}", spec, data, data))
    method = FedHeNN(share=share, lr=0.05, batch_size=8, local_epochs=1, rad_size=10, rad_batch=8)
    public = images[40:], torch.zeros(20, dtype=torch.int64)
    run = pf.federate(clients, method, public=public, rounds=2, seed=3, workers=0)
    assert run.history[-1]["failures"] == []
    shapes = {i: tuple(a.shape) for i, a in run.last.state["representations"].items()}
    assert shapes["client-0"] == (20, 8)
    assert shapes["client-2"] == (20, 9)
    outputs = run.model("client-1")(clients[1].train.batch(torch.arange(3))[0])
    assert outputs.shape == (3, 2)
