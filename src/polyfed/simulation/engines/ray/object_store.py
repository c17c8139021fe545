"""Converts clients and tensors for Ray's object store, which holds one copy per machine that all processes there read
in place.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from polyfed.core.algorithm import Architecture, Client
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import InputSpec, input_spec_of, named_leaves
from polyfed.core.state_dict import iter_tensors
from polyfed.core.tasks.task import Loss
from polyfed.core.tasks.task import Task as TaskKind
from polyfed.simulation.engines.base import ClientTask

_LARGE = 1 << 20  # bytes from which a tensor is an object of its own, which only nodes that use it fetch


@final
class FlatTensor(NamedTuple):
    """Holds a tensor as raw bytes, together with its type, shape and strides.

    The bytes are a NumPy array of uint8, shape (num_bytes,), which pickle's protocol 5 need not copy.
    """

    data: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def flatten_tensor(tensor: Tensor) -> FlatTensor:
    """Converts a tensor to raw bytes, without a copy where possible; a view gives its elements only.

    The order of its dimensions in memory stays, since rounding in later computations may depend on it.

    >>> flatten_tensor(torch.ones(3, 2).t()).stride
    (1, 2)
    """
    cpu_tensor = tensor.detach().cpu()
    strides = cpu_tensor.stride()
    order = sorted(range(cpu_tensor.dim()), key=lambda d: (-strides[d], d))
    dense = cpu_tensor.permute(order)
    if not dense.is_contiguous():
        dense = cpu_tensor = cpu_tensor.contiguous()
    data = dense.reshape(-1).view(torch.uint8).numpy()
    return FlatTensor(data, cpu_tensor.dtype, tuple(cpu_tensor.shape), tuple(cpu_tensor.stride()))


def unflatten_tensor(stored: FlatTensor, *, copy: bool = False) -> Tensor:
    """Restores a tensor from raw bytes; unless `copy` is True, it shares memory with `stored` and must not be written to.

    >>> unflatten_tensor(flatten_tensor(torch.tensor([[1.5, 2.0]])), copy=True)
    tensor([[1.5000, 2.0000]])
    """
    if stored.data.size == 0:
        return torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype)
    if copy:
        data = torch.tensor(stored.data)
    else:
        with warnings.catch_warnings():
            # Shared memory is read-only, and torch warns of that; nothing writes into a client's examples.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writ", category=UserWarning)
            data = torch.from_numpy(stored.data)
    return data.view(stored.dtype).as_strided(stored.shape, stored.stride)


@final
class _StoredParts(NamedTuple):
    """Holds inputs of several parts, each as raw bytes or as a reference to an object in the store."""

    form: InputSpec
    parts: tuple[Any, ...]

    def restore(self, load: Callable[[Any], Tensor]) -> Any:
        """Rebuilds the inputs; `load` turns each stored part into a tensor."""
        remaining = iter(self.parts)
        return self.form.build_inputs(lambda shape, dtype: load(next(remaining)))


# x, y and index, each as `FlatTensor` or a reference; transform, augment, columns, group, time, classes
_StoredSet = tuple[Any, Any, Any, Any, Any, Any, Any, Any, Any]


@final
class StoredClient(NamedTuple):
    """Holds a client with raw bytes (`FlatTensor`) or object-store references in place of tensors."""

    id: str
    model: Architecture | None
    sets: tuple[_StoredSet | None, ...]
    task: TaskKind
    loss: Loss | None = None

    def restore(self, load: Callable[[Any], Tensor]) -> Client:
        """Returns the client as stored; `load` turns each `FlatTensor` or reference into a tensor."""

        def examples(stored_set: _StoredSet | None) -> Examples | None:
            if stored_set is None:
                return None
            x, y, index, *rest = stored_set
            inputs = x.restore(load) if isinstance(x, _StoredParts) else load(x)
            return Examples(inputs, load(y), None if index is None else load(index), *rest)

        train, test, val, common = map(examples, self.sets)
        return Client(self.id, self.model, train, test, val, common, self.task, self.loss)


def store_clients(clients: Sequence[Client], put: Callable[[FlatTensor], Any]) -> list[StoredClient]:
    """Replaces clients' tensors by raw bytes or, for large ones, `put`'s references; shared ones once.

    >>> x, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    >>> a, b = store_clients([Client(name, None, (x, y), (x, y)) for name in "ab"], put=lambda large: large)
    >>> a.sets[0][0] is b.sets[1][0]
    True
    """
    stored_by_key: dict[Any, Any] = {}

    def store_tensor(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        # Keyed by memory, since clients that share a tensor hold different tensor objects.
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in stored_by_key:
            stored = flatten_tensor(tensor)
            stored_by_key[key] = put(stored) if stored.data.nbytes >= _LARGE else stored
        return stored_by_key[key]

    def inputs(x: Any) -> Any:
        if isinstance(x, Tensor):
            return store_tensor(x)
        return _StoredParts(input_spec_of(x), tuple(store_tensor(part) for _, part in named_leaves(x)))

    def sets(client: Client) -> tuple[_StoredSet | None, ...]:
        return tuple(
            None if s is None else (inputs(s.x), store_tensor(s.y), store_tensor(s.index), s.transform, s.augment,
                                    s.columns, s.group, s.time, s.classes)
            for s in (client.train, client.test, client.val, client.global_test)
        )  # fmt: skip

    return [StoredClient(client.id, client.model, sets(client), client.task, client.loss) for client in clients]


@final
class SharedTensorStore:
    """Puts tensors of several tasks into Ray's object store once, one object per set of receivers.

    Attributes:
        names: `id(tensor)` -> its name in the object.
    """

    def __init__(self, tasks: Sequence[ClientTask], put: Callable[[dict[str, FlatTensor]], Any]) -> None:
        tensors: dict[int, Tensor] = {}
        receivers: dict[int, list[int]] = {}
        for position, task in enumerate(tasks):
            task_tensors = {id(tensor): tensor for tensor in iter_tensors(task.message.tensors)}
            tensors |= task_tensors
            for key in task_tensors:
                receivers.setdefault(key, []).append(position)
        groups: dict[tuple[int, ...], list[int]] = {}
        for key, positions in receivers.items():
            if len(positions) > 1:
                groups.setdefault(tuple(positions), []).append(key)
        self.names: dict[int, str] = {}
        self.references: dict[int, list[Any]] = {id(task): [] for task in tasks}
        for receiver_positions, keys in groups.items():
            self.names |= {key: f"t{key}" for key in keys}
            reference = put({self.names[key]: flatten_tensor(tensors[key]) for key in keys})
            for position in receiver_positions:
                self.references[id(tasks[position])].append(reference)
