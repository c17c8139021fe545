"""Computes many networks of one architecture as one network: stacks each weight over the clients, whose examples share
a batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyfed.core.nn.optimizers import Optimizer
from polyfed.core.seeds import DropoutMaskGenerator, get_rng_state, set_rng_state
from polyfed.core.tasks.task import Task
from polyfed.core.vectorized.cohort_batches import ValidRows
from polyfed.core.vectorized.stacked_layers import STACKED_LAYERS, USES_BATCH_STATISTICS, max_pool_channels_last

ModuleTensors = Mapping[str, Tensor]


class CannotStackError(Exception):
    """Raised with half a sentence if networks of one architecture cannot be computed as one stack."""


def stacking_obstacle(module: nn.Module) -> str | None:
    """Names the first part of a network that cannot be computed as a stack; None without one.

    >>> stacking_obstacle(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), stacking_obstacle(nn.Bilinear(2, 2, 1))
    (None, 'Bilinear has weights of its own')
    """
    for part in module.modules():
        parameter_names = [name for name, parameter in part._parameters.items() if parameter is not None]
        layer_entry = STACKED_LAYERS.get(type(part))
        if parameter_names and layer_entry is None:
            return f"{type(part).__name__} has weights of its own"
        hooked = part._forward_pre_hooks or part._forward_hooks or part._backward_hooks or part._backward_pre_hooks
        if hooked or "forward" in part.__dict__:
            return f"{type(part).__name__} has hooks"
        if layer_entry is not None and not layer_entry[1](part):
            return f"{type(part).__name__} has options that are computed alone"
    return None


@final
class StackedNetworks(nn.Module):
    """Computes k networks of one architecture on inputs (k·rows, ...) at once.

    Use it as a context: inside, the layers of `module` compute with the stacked weights; after it, with their own again.

    Args:
        module: the architecture; its own weights are neither used nor changed.
        states: all parameters and buffers of each client, by the names of `named_parameters` and `named_buffers`.
        trained: names of the parameters that are trained.
        dropout_rngs: of each client's dropout; none if nothing is dropped.

    Raises:
        CannotStackError: buffers that no layer here knows differ between the clients.

    >>> first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> with StackedNetworks(first, [dict(n.named_parameters()) for n in (first, second)]) as both:
    ...     outputs = both(torch.ones(4, 2))
    >>> bool(torch.allclose(outputs[2:], second(torch.ones(2, 2))))
    True
    """

    def __init__(
        self,
        module: nn.Module,
        states: Sequence[ModuleTensors],
        trained: frozenset[str] = frozenset(),
        dropout_rngs: Sequence[DropoutMaskGenerator] = (),
    ) -> None:
        super().__init__()
        self.module = module
        self.valid_rows: ValidRows | None = (
            None  # examples of each client in the batch, where they differ; others only fill it
        )
        self.dropout_rngs = dropout_rngs
        names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        self._parts: list[tuple[nn.Module, dict[str, str]]] = []
        stacked: set[str] = set()
        for part in module.modules():
            if type(part) in STACKED_LAYERS:
                layer_tensors = {**part._parameters, **part._buffers}
                full_names = {name: names[id(tensor)] for name, tensor in layer_tensors.items() if tensor is not None}
                self._parts.append((part, full_names))
                stacked |= set(full_names.values())
        for name, buffer in module.named_buffers():
            if name in stacked:
                continue
            if not all(torch.equal(state[name], states[0][name]) for state in states if name in state):
                raise CannotStackError(f"buffer {name!r} differs between clients")
            if name in states[0]:
                buffer.copy_(states[0][name])
        self._shared_buffers = {name: states[0][name] for name in states[0] if name not in stacked}
        self.stacked_tensors = {
            name: torch.stack([state[name].detach() for state in states]) for name in states[0] if name in stacked
        }
        self._active_tensors: dict[str, Tensor] = {
            name: nn.Parameter(tensor) if name in trained else tensor for name, tensor in self.stacked_tensors.items()
        }
        self.num_clients = len(states)
        self.loss_sums = torch.zeros(self.num_clients, device=next(iter(self.stacked_tensors.values())).device)
        self.example_counts = torch.zeros_like(self.loss_sums)

    def __enter__(self) -> "StackedNetworks":
        for part, mine in self._parts:
            part.forward = partial(self._layer, STACKED_LAYERS[type(part)][0], part, mine)
        for part in self.module.modules():
            if type(part) is nn.Dropout and part.p > 0:
                part.forward = partial(self._apply_dropout_of_clients, part)  # type: ignore[method-assign]
            if type(part) is nn.MaxPool2d:
                part.forward = partial(max_pool_channels_last, part)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.module.modules():
            part.__dict__.pop("forward", None)

    def _layer(self, layer: Callable[..., Any], part: nn.Module, full_names: Mapping[str, str], *inputs: Any) -> Any:
        weights = {name: self._active_tensors[full_name] for name, full_name in full_names.items()}
        if layer in USES_BATCH_STATISTICS:
            return layer(part, weights, *inputs, None if self.valid_rows is None else self.valid_rows.device_counts)
        return layer(part, weights, *inputs)

    def _apply_dropout_of_clients(self, part: nn.Dropout, x: Tensor) -> Tensor:
        """Applies dropout, with each client's mask as the client's network alone would draw it."""
        if not part.training:
            return x
        max_rows, noise = len(x) // self.num_clients, torch.ones_like(x)
        rows = [max_rows] * self.num_clients if self.valid_rows is None else self.valid_rows.cpu_counts
        for number, (rng, num_rows) in enumerate(zip(self.dropout_rngs, rows, strict=False)):
            mask = noise[number * max_rows : number * max_rows + num_rows]
            mask.copy_(rng.dropout_mask(mask, part.p))
        return x * noise

    def forward(self, x: Tensor) -> Any:
        """Returns the outputs of each client's network for that client's examples in the batch."""
        return self.module(x)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields (name, stacked tensor) for each parameter that is trained."""
        return ((name, tensor) for name, tensor in self._active_tensors.items() if isinstance(tensor, nn.Parameter))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, stacked tensor) for each buffer."""
        buffer_names = {name for name, _ in self.module.named_buffers()}
        return ((name, tensor) for name, tensor in self._active_tensors.items() if name in buffer_names)

    def keep_first_clients(self, num_clients: int, optimizer: Optimizer | None = None) -> None:
        """Removes all clients but the first `num_clients` from the stack, so that later steps do not change the others.

        The others have made all their steps.
        """
        if num_clients == self.num_clients:
            return
        for name, tensor in self._active_tensors.items():
            if isinstance(tensor, nn.Parameter):
                tensor.data, tensor.grad = self.stacked_tensors[name][:num_clients], None
            else:
                self._active_tensors[name] = self.stacked_tensors[name][:num_clients]
        for group in () if optimizer is None else optimizer.groups:
            for parameter, moments in group.state.items():
                group.state[parameter] = [m if m is None or m.dim() == 0 else m[: len(parameter)] for m in moments]
        self.num_clients = num_clients

    def criterion(self, task: Task, label_smoothing: float) -> Callable[[Tensor, Tensor], Tensor]:
        """Returns the function (outputs, targets) -> mean loss of each client's part of a batch, shape (k,)."""

        def loss_by_client(outputs: Tensor, targets: Tensor) -> Tensor:
            losses = task.elementwise_loss(outputs, targets, label_smoothing)
            assert losses is not None  # others are not stacked
            by_client = losses.reshape(self.num_clients, -1)
            if self.valid_rows is None:
                return by_client.mean(1)
            loss_by_example = losses.flatten(1).mean(1) if losses.dim() > 1 else losses
            loss_by_row = loss_by_example.view(self.num_clients, -1)
            return (
                torch.where(self.valid_row_mask(loss_by_row.shape[1]), loss_by_row, 0.0).sum(1)
                / self.valid_rows.device_counts
            )

        return loss_by_client

    def valid_row_mask(self, max_rows: int) -> Tensor:
        """Returns a mask of shape (k, max_rows): True for a client's real examples, False for padding."""
        assert self.valid_rows is not None
        return torch.arange(
            max_rows, device=self.valid_rows.device_counts.device
        ) < self.valid_rows.device_counts.unsqueeze(1)

    def clip_gradients(self, max_norm: float) -> None:
        """Scales each client's gradients down in place to a global norm of at most `max_norm`."""
        grads = [p.grad for _, p in self.named_parameters() if p.grad is not None]
        norms = torch.stack([torch.linalg.vector_norm(grad.flatten(1), dim=1) for grad in grads])
        factor = (max_norm / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor.view(-1, *(1 for _ in grad.shape[1:])))

    def record_losses(self, loss: Tensor, rows: Tensor) -> None:
        """Adds each client's loss of a step, (k,), times its number of examples, to the sums of `mean_losses`."""
        self.loss_sums[: self.num_clients] += loss * rows
        self.example_counts[: self.num_clients] += rows

    def mean_losses(self) -> Tensor:
        """Returns each client's mean loss over all examples that it has seen, shape (k,)."""
        return self.loss_sums / self.example_counts

    def check_shared_buffers_unchanged(self) -> None:
        """Raises a `CannotStackError` if the network changed a buffer that all clients of the stack share."""
        for name, buffer in self.module.named_buffers():
            if name in self._shared_buffers and not torch.equal(buffer, self._shared_buffers[name]):
                raise CannotStackError(f"buffer {name!r} changes in training")

    def client_tensors(self, client: int) -> dict[str, Tensor]:
        """Returns `{name: tensor}` for the parameters and buffers of one client, as views of the stacked tensors."""
        return {name: tensor[client] for name, tensor in self.stacked_tensors.items()}


def has_batch_statistics(module: nn.Module) -> bool:
    """Returns whether training computes batch statistics (BatchNorm), which need two examples at least."""
    return any(isinstance(part, _BatchNorm) for part in module.modules())


def sum_per_client(network: nn.Module, numbers: Tensor) -> Tensor:
    """Returns the sum of the numbers of each client: shape (k,) for k stacked networks, a scalar for one network."""
    return numbers.reshape(network.num_clients, -1).sum(1) if isinstance(network, StackedNetworks) else numbers.sum()


def reshape_to_broadcast(per_client_numbers: Tensor, like: Tensor) -> Tensor:
    """Reshapes numbers per client, (k,), or one, to multiply stacked parameters of the shape of `like`.

    >>> (reshape_to_broadcast(torch.ones(4), torch.zeros(4, 3, 2)).shape,
    ...  reshape_to_broadcast(torch.ones(()), torch.zeros(3)).shape)
    (torch.Size([4, 1, 1]), torch.Size([1]))
    """
    return per_client_numbers.reshape((*per_client_numbers.shape, *(1 for _ in like.shape[per_client_numbers.dim() :])))


def get_network_rng_states(network: nn.Module, device: torch.device) -> list[Tensor]:
    """Returns the states of a network's random number generators, one or one per stacked client."""
    if isinstance(network, StackedNetworks):
        return [chance.state for chance in network.dropout_rngs]
    return [get_rng_state(device)]


def set_network_rng_states(network: nn.Module, device: torch.device, states: Sequence[Tensor]) -> None:
    """Sets a network's random number generators to the states from `get_network_rng_states`."""
    if isinstance(network, StackedNetworks):
        for rng, rng_state in zip(network.dropout_rngs, states, strict=True):
            rng.state = rng_state
    else:
        set_rng_state(device, states[0])
