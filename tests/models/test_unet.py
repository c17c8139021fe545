"""U-Nets: shapes of odd sizes, what the four systems need of them, and that they learn."""

import pytest
import torch

from polyfed import tasks
from polyfed.core.seeds import temporary_rng_seed
from polyfed.graphs.extract import extract
from polyfed.models import build
from polyfed.models.structure import (
    compute_batch_representation,
    find_head_modules,
    find_representation_module,
    tensor_names_by_module,
)
from tests.few_cases import few


@pytest.mark.parametrize("sides", [(8, 8), (9, 31), (13, 10), (8, 9, 11)])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.one_case
def test_outputs_have_the_size_of_the_image_also_an_odd_one(sides, depth):
    network = build("unet" if len(sides) == 2 else "unet3d", (2, *sides), 3, width=2, depth=depth)
    assert network(torch.randn(2, 2, *sides)).shape == (2, 3, *sides)


@pytest.mark.parametrize(("name", "sides"), [("unet", (16, 12)), ("unet3d", (8, 8, 8))])
@pytest.mark.parametrize("norm", few(["instance", "batch", "group", "none"], ["batch"]))
def test_hypernetworks_generate_every_weight_and_the_bottleneck_is_the_representation(name, sides, norm):
    network, x = build(name, (1, *sides), 2, width=4, depth=1, norm=norm), torch.randn(3, 1, *sides)
    graph = extract(network, x)
    assert graph.coverage == 1.0
    assert dict(graph.local_reasons) == {}
    assert find_representation_module(network, x) == "representation"
    features = compute_batch_representation(network, x)
    assert features.shape == (3, 8)  # twice the width after one pooling, averaged over positions
    assert bool((features.std(0) > 0).any())
    assert find_head_modules(network, x) == ("head",)
    assert len(tensor_names_by_module(network)) == sum(1 for module in network.modules() if module._parameters)


@pytest.mark.thorough
@pytest.mark.parametrize("norm", ["instance", pytest.param("batch", marks=pytest.mark.thorough)])
def test_a_u_net_learns_eight_blobs_by_heart(norm):
    generator = torch.Generator().manual_seed(0)
    y, x = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    centres, radii = torch.randint(8, 24, (8, 2), generator=generator), torch.randint(3, 7, (8,), generator=generator)
    targets = (
        (y - centres[:, 0, None, None]) ** 2 + (x - centres[:, 1, None, None]) ** 2 < radii[:, None, None] ** 2
    ).long()
    images = (targets + 0.5 * torch.randn(8, 32, 32, generator=generator))[:, None]
    task = tasks.Segmentation()
    with temporary_rng_seed(0):
        network = build("unet", (1, 32, 32), 2, width=4, norm=norm)
    optimiser = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(40):
        optimiser.zero_grad()
        task.loss(network(images), targets).backward()
        optimiser.step()
    network.eval()
    assert task.default_metric(network(images).detach(), targets) > 0.9
