"""Draws the minibatches of many clients side by side, for each client in the same order as if it were trained
separately.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import torch
from torch import Tensor

from polyfed.core.examples.examples import Examples, Normalise, split_into_batches
from polyfed.core.examples.pytree import concatenate_batches
from polyfed.core.seeds import derive_seed, torch_generator

_MAX_STORE_BYTES = 2**28  # bytes of examples that are put side by side at once
BatchSizes = tuple[tuple[int, ...], ...]  # of each step, its minibatches


@final
@dataclass(frozen=True, eq=False)
class Minibatch:
    """Holds one minibatch for each of k clients, stacked: inputs `x` and targets `y`, both of shape (k·rows, ...).

    `valid_rows` says how many of each client's rows are examples, (k,); the others only fill the batch; None if all
    are. For one client `x` may have any structure.
    """

    x: Any  # Inputs
    y: Tensor
    valid_rows: "ValidRows | None" = None


@final
@dataclass(frozen=True, eq=False)
class ValidRows:
    """Holds how many of each client's rows are no padding, shape (k,), on the CPU and on the device."""

    cpu_counts: Sequence[int]
    device_counts: Tensor


@lru_cache(maxsize=1024)
def plan_batch_sizes(
    num_examples: int, batch_size: int, epochs: int, steps: int | None, batches_per_step: int, at_least_two: bool
) -> BatchSizes:
    """Returns the sizes of the minibatches in each training step of one client, as `fit` makes them.

    >>> plan_batch_sizes(5, 2, 1, None, 1, False), plan_batch_sizes(5, 2, 1, 2, 2, False)
    (((2,), (2,), (1,)), ((2, 2), (1,)))
    """
    size = min(batch_size or num_examples, num_examples)
    sizes = [len(rows) for rows in split_into_batches(torch.arange(num_examples), size, at_least_two=at_least_two)]
    epoch = tuple(tuple(sizes[i : i + batches_per_step]) for i in range(0, len(sizes), batches_per_step))
    if steps is None:
        return epoch * epochs
    return (epoch * (steps // len(epoch) + 1))[:steps]


@final
class CohortBatches:
    """Yields the stacked minibatches of many clients, step by step.

    Clients come in the order of falling numbers of steps, so that those who still train are always the first.

    Args:
        examples, seeds, batch_sizes: of each client; the seeds are those that `fit` would get.
        batches_per_step: as for `fit`.
    """

    def __init__(
        self,
        examples: Sequence[Examples],
        seeds: Sequence[int],
        batch_sizes: Sequence[BatchSizes],
        batches_per_step: int = 1,
    ) -> None:
        self._examples, self._plans, self._batches_per_step = examples, batch_sizes, batches_per_step
        self._generators = [torch_generator(derive_seed(seed, "batches")) for seed in seeds]
        self._pending_batches: list[list[tuple[Tensor, Tensor]]] = [[] for _ in examples]
        self.device = examples[0].device
        self._store = _common_store(examples)
        self._rows = torch.empty(0)
        # Nothing but the order is drawn from the generators, so that it can be drawn at once.
        if self._store is not None:
            orders = [self._draw_rows_in_order(number) for number in range(len(examples))]
            longest = max(map(len, orders))
            self._rows = torch.stack([torch.cat([rows, rows[:1].expand(longest - len(rows))]) for rows in orders])
        self._orders: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * len(examples)
        # The places of all minibatches go to the device once; a copy at each step would wait for the device.
        self._sizes, self._offsets = _batch_layout(batch_sizes, batches_per_step)
        real, firsts = self._sizes.to(self.device), self._offsets.to(self.device)
        self._on_device = real, firsts, torch.arange(int(self._sizes.max()), device=self.device)
        self._examples_by_step = torch.tensor(
            [[sum(mine[t]) if t < len(mine) else 0 for mine in batch_sizes] for t in range(len(batch_sizes[0]))]
        )
        self._counts = self._examples_by_step.to(self.device)

    def _draw_rows_in_order(self, client: int) -> Tensor:
        """Returns the rows of the common store in the order in which the client sees them."""
        number, generator = len(self._examples[client]), self._generators[client]
        num_seen = sum(map(sum, self._plans[client]))
        epochs = [torch.randperm(number, generator=generator) for _ in range(-(-num_seen // number))]
        order = torch.cat(epochs)
        assert self._store is not None
        index = self._store[2][client]
        return order.to(self.device) if index is None else index[order.to(self.device)]

    def __iter__(self) -> Iterator[tuple[list[Minibatch], Tensor]]:
        """Yields for each step the stacked minibatches, and each client's number of examples in them, (k,)."""
        for step, counts in enumerate(self._examples_by_step):
            active = int(counts.count_nonzero())
            batches: list[Minibatch] = []
            for k in range(self._batches_per_step):
                sizes = self._sizes[step, k, :active]
                least, most = int(sizes.min()), int(sizes.max())
                x, y = (
                    self._batch_client_by_client(step, k, active, most)
                    if self._store is None
                    else self._batch_from_store(step, k, active, most)
                )
                batches.append(
                    Minibatch(
                        x, y, None if least == most else ValidRows(sizes.tolist(), self._on_device[0][step, k, :active])
                    )
                )
            for pending_batches in self._pending_batches[:active]:
                pending_batches.clear()
            yield batches, self._counts[step, :active]

    def _batch_from_store(self, step: int, k: int, active: int, most: int) -> tuple[Tensor, Tensor]:
        """Builds a minibatch of all clients by one index operation, from the store that holds all clients' examples."""
        assert self._store is not None
        _, firsts, columns = self._on_device
        places = firsts[step, k, :active].unsqueeze(1) + columns[:most]
        # A client with fewer rows fills up its batch with its own next rows.
        picked = self._rows[:active].gather(1, places.clamp_(max=self._rows.shape[1] - 1)).flatten()
        x, y = self._store[0].index_select(0, picked), self._store[1].index_select(0, picked)
        transform = self._examples[0].transform
        return (x if transform is None else transform(x)), y

    def _batch_client_by_client(self, step: int, k: int, active: int, most: int) -> tuple[Tensor, Tensor]:
        """Builds a minibatch of all clients client by client, each with its own transform and augmentation."""
        xs, ys = [], []
        for client in range(active):
            sizes = self._plans[client][step]
            x, y = self._draw_batches_of_step(client, int(self._offsets[step, 0, client]), sizes)[k % len(sizes)]
            missing = most - len(x)
            xs += [x, x[:1].expand(missing, *x.shape[1:])]
            ys += [y, y[:1].expand(missing, *y.shape[1:])]
        return torch.cat(xs), torch.cat(ys)

    def _draw_batches_of_step(self, client: int, num_seen: int, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Draws one client's minibatches of a step as `fit` would draw them for the client alone."""
        pending, generator, data = self._pending_batches[client], self._generators[client], self._examples[client]
        if not pending:
            first = num_seen % len(data)
            if first == 0:
                self._orders[client] = torch.randperm(len(data), generator=generator).to(self.device)
            for rows in torch.split(self._orders[client][first : first + sum(sizes)], list(sizes)):
                pending.append(data.batch(rows, generator))
        return pending


def _batch_layout(plans: Sequence[BatchSizes], batches_per_step: int) -> tuple[Tensor, Tensor]:
    """Computes how many examples each minibatch of each step has, and how many the client has seen before it.

    Both have shape (steps, batches per step, clients), with 0 where a client has no more steps.
    """
    steps = len(plans[0])
    sizes, firsts = (torch.zeros(len(plans), steps, batches_per_step, dtype=torch.int64) for _ in range(2))
    layout_by_sizes: dict[BatchSizes, tuple[Tensor, Tensor]] = {}
    for client, client_sizes in enumerate(plans):
        if client_sizes not in layout_by_sizes:
            wrapped = torch.tensor([[step[k % len(step)] for k in range(batches_per_step)] for step in client_sizes])
            starts = torch.tensor(
                [[sum(step[: k % len(step)]) for k in range(batches_per_step)] for step in client_sizes]
            )
            before = torch.tensor([0, *(sum(step) for step in client_sizes[:-1])]).cumsum(0)
            layout_by_sizes[client_sizes] = wrapped, starts + before.unsqueeze(1)
        sizes[client, : len(client_sizes)], firsts[client, : len(client_sizes)] = layout_by_sizes[client_sizes]
    return sizes.permute(1, 2, 0).contiguous(), firsts.permute(1, 2, 0).contiguous()


def _common_store(examples: Sequence[Examples]) -> tuple[Tensor, Tensor, list[Tensor | None]] | None:
    """Copies all clients' inputs and targets into two tensors; returns them and rows, or None if impossible.

    It is not where examples are augmented, transforms differ or may look at more than one example, or the examples are
    too large to be copied.
    """
    first = examples[0]
    is_rowwise = first.transform is None or isinstance(first.transform, Normalise)
    if not is_rowwise or any(data.augment is not None or data.transform != first.transform for data in examples):
        return None
    if all(data.x is first.x and data.y is first.y for data in examples):
        return first.input_tensor, first.y, [data.index for data in examples]
    numbers = [len(data) for data in examples]
    if sum(numbers) * first.input_tensor[:1].nbytes > _MAX_STORE_BYTES:
        return None
    xs = [data.raw_inputs for data in examples]
    starts = torch.tensor([0, *numbers]).cumsum(0).tolist()
    places: list[Tensor | None] = [
        torch.arange(start, start + number, device=first.device) for start, number in zip(starts, numbers, strict=False)
    ]
    return concatenate_batches(xs), torch.cat([data.labels for data in examples]), places
