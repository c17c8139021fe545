"""Adds tensors of a client's own at the last layer of its network, such as a second head, and trains both together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.algorithms.base.heads.conditioning import ScaleAndShift
from polyfed.alignment.representations import representation_module_name
from polyfed.core.algorithm import Client
from polyfed.core.examples.pytree import first_leaf, logits_of
from polyfed.core.nn.module_cache import cached_module
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.loop import FitResult, ForwardPass, fit
from polyfed.models.structure import compute_batch_representation


def find_last_layer(client: Client) -> tuple[str, Tensor]:
    """Returns the module whose input is the representation (usually the last linear), and one such input, (width,).

    Raises:
        UserError: the network has no such module.
    """
    assert client.model is not None  # `requires` asks for one
    module = cached_module(client.model, client.train.device).module
    name = representation_module_name(module, client.train)
    with torch.no_grad():
        return name, compute_batch_representation(module, client.train.first_input, module=name)[0].cpu()


@contextmanager
def watch_last_layer(
    network: nn.Module, name: str, transform: Callable[[Tensor], Tensor] | None = None
) -> Iterator[list[Tensor]]:
    """Stores and transforms the inputs of a module inside a `with` block: the representations.

    Yields a list, which holds the flattened representation of the last batch, (batch, width), before it is transformed.

    >>> layer = nn.Linear(2, 2)
    >>> with watch_last_layer(layer, "", lambda z: z + 1) as inputs_of_last: shifted = layer(torch.zeros(1, 2))
    >>> inputs_of_last[-1], torch.equal(shifted, layer(torch.ones(1, 2)))
    (tensor([[0., 0.]]), True)
    """
    representations: list[Tensor] = []

    def replace_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        z = args[0] if args else first_leaf(kwargs)
        representations[:] = [z.flatten(1)]
        if transform is None:
            return None
        transformed = transform(z.flatten(1)).view_as(z)
        return ((transformed, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): transformed})

    hook = network.get_submodule(name).register_forward_pre_hook(replace_input, with_kwargs=True)
    try:
        yield representations
    finally:
        hook.remove()


class _AtLastLayer(nn.Module):
    """Holds a network and the name of its last layer, as a buffer, so that saved weights tell it."""

    def __init__(self, network: nn.Module, name: str | Tensor) -> None:
        super().__init__()
        self.network = network
        self.name: Tensor
        encoded = torch.tensor(list(name.encode()), dtype=torch.uint8) if isinstance(name, str) else name
        self.register_buffer("name", encoded)

    @property
    def layer_name(self) -> str:
        """Returns the name of the last layer."""
        return bytes(self.name.tolist()).decode()


@final
class NetworkWithAddedHead(_AtLastLayer):
    """Adds to the outputs of a network those of a further linear head on the same representation."""

    def __init__(self, network: nn.Module, name: str | Tensor, weight: Tensor, bias: Tensor) -> None:
        super().__init__(network, name)
        self.weight: Tensor
        self.bias: Tensor
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, *parts: Any, **kwargs: Any) -> Tensor:
        """Returns the sum of both heads' outputs, (batch, outputs)."""
        with watch_last_layer(self.network, self.layer_name) as representations:
            outputs = logits_of(self.network(*parts, **kwargs))
        return outputs + F.linear(representations[-1], self.weight, self.bias)


@final
class NetworkWithShiftedRepresentation(_AtLastLayer):
    """Adds a vector to the representations from which a network's last layer computes its outputs."""

    def __init__(self, network: nn.Module, name: str | Tensor, vector: Tensor) -> None:
        super().__init__(network, name)
        self.vector: Tensor
        self.register_buffer("vector", vector)

    def forward(self, *parts: Any, **kwargs: Any) -> Tensor:
        """Returns the outputs for the shifted representations, (batch, outputs)."""
        with watch_last_layer(self.network, self.layer_name, lambda z: z + self.vector):
            return logits_of(self.network(*parts, **kwargs))


@final
class NetworkWithConditionedRepresentation(_AtLastLayer):
    """Scales and shifts the last layer's inputs, and sets negative numbers to 0."""

    def __init__(self, network: nn.Module, name: str | Tensor, scale: Tensor, shift: Tensor) -> None:
        super().__init__(network, name)
        self.scale: Tensor
        self.shift: Tensor
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, *parts: Any, **kwargs: Any) -> Tensor:
        """Returns the outputs for the representations relu(scale·z + shift), (batch, outputs)."""
        with watch_last_layer(self.network, self.layer_name, ScaleAndShift(self.scale, self.shift).apply):
            return logits_of(self.network(*parts, **kwargs))


def fit_with_extra_tensors(
    module: nn.Module,
    client: Client,
    method: LocalTraining,
    tensors: Sequence[Tensor],
    *,
    lr: float,
    seed: int,
    loss: Callable[[ForwardPass], Tensor],
) -> FitResult:
    """Trains a network with `fit`, and in each step takes a plain gradient step with further tensors, on the same loss.

    The gradient of these tensors is not clipped, and they have neither momentum nor weight decay.

    Args:
        module, client, method, lr, seed: as `fit` has them.
        tensors: the further tensors, on the network's device; they are changed in place.
        loss: the loss of a minibatch, which depends on network and tensors.
    """
    for tensor in tensors:
        tensor.requires_grad_(True)

    def step_with_tensors(loss_of: Callable[[int], Tensor]) -> Tensor:
        value = loss_of(0)
        with torch.no_grad():
            for tensor in tensors:
                if tensor.grad is not None:
                    tensor.sub_(tensor.grad, alpha=lr)
                tensor.grad = None
        return value

    try:
        return fit(
            module, client, method, lr=lr, seed=seed, loss=loss, gradient=step_with_tensors, reported_loss="task"
        )
    finally:
        for tensor in tensors:
            tensor.requires_grad_(False)
