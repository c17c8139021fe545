"""Reconstructs images from how a client's training has changed the weights of a network that the server knows."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from polyfed.core.errors import UserError
from polyfed.core.seeds import derive_seed, torch_generator

_STEP = 0.1
_DECAYS_AT = (3 / 8, 5 / 8, 7 / 8)
_SMOOTHNESS = (1e-4, 1e-2)  # weights of the total variation, in turn by restart
_MOST_ROWS = 512  # of a first layer, those whose bias has changed most


@final
@dataclass(frozen=True)
class InversionTarget:
    """Describes what is searched for.

    Args:
        shape: of one image: channels, height, width.
        labels: of the images that are searched for, int64, shape (n,).
        low, high: smallest and largest value of a pixel.
        steps: local steps of gradient descent that are imitated; 1 compares with a single gradient.
        batches: minibatches into which the images are divided; the steps take one after the other, again in every epoch.
        lr: learning rate of the imitated steps.
        seed: of the random images that the search begins with.
    """

    shape: tuple[int, ...]
    labels: Tensor
    low: float
    high: float
    steps: int = 1
    batches: int = 1
    lr: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise UserError(f"low must be below high, got low={self.low!r} and high={self.high!r}")
        for name in ("steps", "batches"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)!r}")


def compute_inputs_of_first_layer(change: Mapping[str, Tensor], target: InversionTarget) -> Tensor:
    """Returns images from a linear layer that gets whole images: of each unit, its weights' change over its bias' change.

    The gradient of a unit's weights is that of its bias times the input (Phong et al. 2018, section III), so that a unit
    that a single example has moved shows this example; others show weighted means of several.

    Args:
        change: of the weights, by parameter, in the direction of gradients.
        target: shape and range of an image; the range limits the result.

    Returns:
        Shape (units, *shape), with no unit where no layer has a bias and gets whole images.

    >>> change = {"0.weight": torch.tensor([[0.5, 1.0], [0.0, 0.0]]), "0.bias": torch.tensor([2.0, 0.0])}
    >>> compute_inputs_of_first_layer(change, InversionTarget((1, 1, 2), torch.tensor([0]), 0.0, 1.0)).tolist()
    [[[[0.25, 0.5]]]]
    """
    size, images = torch.Size(target.shape).numel(), []
    for name, weight in change.items():
        bias = change.get(f"{name.removesuffix('weight')}bias")
        if not name.endswith("weight") or weight.dim() != 2 or weight.shape[1] != size or bias is None:
            continue
        moved = (bias.abs() > 1e-6 * bias.abs().max()).nonzero().flatten()
        rows = moved[bias[moved].abs().argsort(descending=True)][:_MOST_ROWS]
        ratios = weight[rows].double() / bias[rows, None].double()
        images.append(ratios.clamp(target.low, target.high).float().reshape(-1, *target.shape))
    return torch.cat(images) if images else torch.empty(0, *target.shape)


def search_images(
    network: nn.Module, change: Mapping[str, Tensor], target: InversionTarget, iterations: int, restarts: int
) -> Tensor:
    """Searches for images whose training would change the weights as `change` says, and returns those of every restart.

    Minimises 1 − cosine of the two changes plus a weighted total variation, by the signs of its gradients in Adam
    (Geiping et al. 2020, "Inverting gradients", section 4; several local steps are imitated as in section 6). The weight
    is 0.0001 and 0.01 in turn, by restart.

    Args:
        network: with the weights before the training; takes images, returns logits. It is not changed.
        change: of the weights that travel, by parameter, in the direction of gradients.
        target: what is searched for.
        iterations, restarts: the effort.

    Returns:
        Shape (restarts · n, *shape).
    """
    model = copy.deepcopy(network).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout):
            module.eval()
    fixed = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers()) if n not in change}
    trained = {n: p.detach().requires_grad_() for n, p in model.named_parameters() if n in change}
    wanted_parts = {n: change[n].to(trained[n].dtype) for n in trained}
    norm = torch.stack([part.square().sum() for part in wanted_parts.values()]).sum().sqrt()
    results = []
    for restart in range(restarts):
        generator = torch_generator(derive_seed(target.seed, "inversion", restart))
        pixels = torch.rand(len(target.labels), *target.shape, generator=generator).requires_grad_()
        optimizer = torch.optim.Adam([pixels], lr=_STEP)
        milestones = [int(share * iterations) for share in _DECAYS_AT]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)
        for _ in range(iterations):
            images = target.low + (target.high - target.low) * pixels
            imitated = _change_by_training(model, trained, fixed, images, target)
            products = torch.stack([(imitated[n] * part).sum() for n, part in wanted_parts.items()]).sum()
            squares = torch.stack([part.square().sum() for part in imitated.values()]).sum()
            mismatch = 1 - products / (norm * squares.sqrt()).clamp(min=1e-20)
            loss = mismatch + _SMOOTHNESS[restart % len(_SMOOTHNESS)] * _total_variation(pixels)
            (gradient,) = torch.autograd.grad(loss, pixels)
            pixels.grad = gradient.nan_to_num().sign()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                pixels.clamp_(0, 1)
        results.append((target.low + (target.high - target.low) * pixels).detach())
    return torch.cat(results) if results else torch.empty(0, *target.shape)


def _change_by_training(
    model: nn.Module,
    trained: Mapping[str, Tensor],
    fixed: Mapping[str, Tensor],
    images: Tensor,
    target: InversionTarget,
) -> dict[str, Tensor]:
    """Returns the gradient at the weights before the training, or the change by several steps, as a graph over images."""
    weights, total = dict(trained), dict[str, Tensor]()
    batches = min(target.batches, len(images))
    for step in range(target.steps):
        rows = slice(step % batches, None, batches)
        copies = {n: t.clone() for n, t in fixed.items()}  # BatchNorm writes into its buffers
        outputs = functional_call(model, {**copies, **weights}, (images[rows],))
        loss = nn.functional.cross_entropy(outputs, target.labels[rows])
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True, materialize_grads=True)
        for (name, weight), gradient in zip(list(weights.items()), gradients, strict=True):
            total[name] = gradient if step == 0 else total[name] + gradient
            weights[name] = weight - target.lr * gradient
    return total


def _total_variation(images: Tensor) -> Tensor:
    """Returns the mean absolute difference of neighbouring pixels."""
    differences = [images.diff(dim=dim).abs() for dim in (-1, -2)]
    return sum((d.mean() for d in differences if d.numel()), torch.zeros(()))
