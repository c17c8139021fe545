"""Defines the cell of a supernet: a directed acyclic graph of feature maps, in which each edge applies one chosen
operation (FedPNAS, section 2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, cast, final

import torch
from torch import Tensor, nn

from polyfed.core.errors import UserError
from polyfed.core.machine.allocator import enlarge_onednn_kernel_cache
from polyfed.nas.operations import GroupedNorm, build_operations, normalise_by_batch_without_tracking
from polyfed.nas.sampling import OperationChoice

EdgeJoin = Literal["sum", "mean"]
enlarge_onednn_kernel_cache()  # the number of examples that choose an operation differs from step to step


@final
@dataclass(frozen=True)
class CellPlan:
    """Describes a cell: each node has edges from all inputs and earlier nodes; the last is the output.

    Args:
        inputs: 2 for a base cell (outputs of the previous cell and of the one before it), 1 for a personal cell
            (section 3.1).
        nodes: number of computed nodes, at least 1.
        candidates: for each edge, in the order of `edges`, the names of the operations from which it chooses.
        reduces: whether edges from the inputs have stride 2.
        skip_stride: stride of the 1×1 convolution on the second input; 2 if the previous cell has halved the image.

    >>> CellPlan(2, 2, (("skip",),) * 5).edges
    ((0, 2), (1, 2), (0, 3), (1, 3), (2, 3))
    """

    inputs: int
    nodes: int
    candidates: tuple[tuple[str, ...], ...]
    reduces: bool = False
    skip_stride: int = 1

    def __post_init__(self) -> None:
        if self.inputs not in (1, 2) or self.nodes < 1:
            raise UserError(f"a cell has 1 or 2 inputs and at least 1 node, got {self.inputs} and {self.nodes}")
        # Counted before `edges` lists them, since a file may claim too many.
        number = self.nodes * self.inputs + self.nodes * (self.nodes - 1) // 2
        if len(self.candidates) != number:
            raise UserError(f"a cell of {self.inputs} inputs and {self.nodes} nodes has {number} edges, got "
                            f"candidates for {len(self.candidates)}")  # fmt: skip

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Returns (from, to) of each edge; 0 is the previous cell, 1 the one before if an input, then nodes."""
        last = self.inputs + self.nodes
        return tuple((i, j) for j in range(self.inputs, last) for i in range(j))


@final
class Cell(nn.Module):
    """Computes a cell's feature maps, in which each node is the sum (or mean) of the operations on its incoming edges.

    v_j = Σ_{i<j} Z_ijᵀ O_ij(v_i) (section 2).
    """

    def __init__(self, plan: CellPlan, channels: int, skip_channels: int, join: EdgeJoin = "sum") -> None:
        super().__init__()
        self.plan, self.join = plan, join
        if plan.inputs == 2:
            # "a cost-effective way to control the number of channels" (section 3.1); BatchNorm is polyfed's choice.
            convolution = nn.Conv2d(skip_channels, channels, 1, plan.skip_stride, bias=False)
            self.skip = nn.Sequential(convolution, GroupedNorm(channels))
        self.operations = nn.ModuleList(
            build_operations(channels, names, 2 if plan.reduces and i < plan.inputs else 1)
            for names, (i, _) in zip(plan.candidates, plan.edges, strict=True)
        )

    def forward(self, previous: Tensor, skip: Tensor, choice: OperationChoice | None) -> Tensor:
        """Returns the output (batch, channels, height, width), halved if the cell reduces images.

        Args:
            previous: output of the previous cell.
            skip: output of the cell before that; a cell with one input does not use it.
            choice: one operation per edge; None if every edge has only one.
        """
        values = [previous] if self.plan.inputs == 1 else [previous, self.skip(skip)]
        index = None if choice is None else choice.indices.tolist() if choice.indices.dim() == 1 else choice.indices
        edge_outputs: list[list[Tensor]] = [[] for _ in range(self.plan.nodes)]
        for number, (edge, (i, j)) in enumerate(zip(self.operations, self.plan.edges, strict=True)):
            while len(values) <= i:
                values.append(self._join_edges(edge_outputs[len(values) - self.plan.inputs]))
            edge_outputs[j - self.plan.inputs].append(self._apply_edge(edge, number, values[i], choice, index))
        return self._join_edges(edge_outputs[-1])

    def _join_edges(self, terms: Sequence[Tensor]) -> Tensor:
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total if self.join == "sum" else total / len(terms)

    def _apply_edge(
        self,
        edge: nn.Module,
        number: int,
        value: Tensor,
        choice: OperationChoice | None,
        index: list[int] | Tensor | None,
    ) -> Tensor:
        candidates = list(cast(nn.ModuleDict, edge).values())
        if len(candidates) == 1 or choice is None or index is None:
            return cast(Tensor, candidates[0](value))
        if isinstance(index, list):
            out = cast(Tensor, candidates[index[number]](value))
            scale = None if choice.scale is None else choice.scale[number]
        else:
            out = apply_chosen_operations(candidates, value, index[:, number])
            scale = None if choice.scale is None else choice.scale[:, number].view(-1, 1, 1, 1)
        if choice.one_hot is not None:
            z = choice.one_hot[..., number, :].expand(len(value), -1)
            return cast(Tensor, _OneHotSelection.apply(out, z, value, candidates))  # type: ignore[no-untyped-call]
        return out if scale is None else _scale_by_choice(out, scale)


def apply_chosen_operations(candidates: Sequence[nn.Module], value: Tensor, index: Tensor) -> Tensor:
    """Returns each example's chosen operation's output, with one call per operation.

    Operations that no example chose are not called.

    Args:
        candidates: the operations.
        value: feature maps, (batch, channels, height, width).
        index: each example's operation, int64, (batch,), below len(candidates).

    >>> double = nn.Conv2d(1, 1, 1, bias=False)
    >>> with torch.no_grad(): _ = double.weight.fill_(2.0)
    >>> value = torch.tensor([1.0, 5.0, 7.0]).view(3, 1, 1, 1)
    >>> apply_chosen_operations([double, nn.Identity()], value, torch.tensor([1, 0, 1])).flatten().tolist()
    [1.0, 10.0, 7.0]
    """
    order = torch.argsort(index, stable=True)
    sizes = torch.bincount(index, minlength=len(candidates)).tolist()
    if max(sizes) == len(index):
        return cast(Tensor, candidates[sizes.index(len(index))](value))
    rows = torch.split(order, sizes)
    operations = [(operation, row) for operation, row in zip(candidates, rows, strict=True) if len(row)]
    rows = tuple(row for _, row in operations)
    groups = _SplitRows.apply(value, rows)  # type: ignore[no-untyped-call]
    outs = [operation(group) for (operation, _), group in zip(operations, groups, strict=True)]
    return cast(Tensor, _MergeRows.apply(rows, *outs))  # type: ignore[no-untyped-call]


@final
class _SplitRows(torch.autograd.Function):
    """Splits a batch's rows into groups, with a backward pass that copies gradients: each row is in exactly one group."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the rows of each group; `rows` has the positions of each group's rows, and each row is in one group."""
        ctx.rows = rows
        return _split_rows(value, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Returns the gradients of all rows in their order before the split."""
        return _merge_rows(gradients, ctx.rows), None


@final
class _MergeRows(torch.autograd.Function):
    """Merges groups of rows into one batch: the inverse of `_SplitRows`."""

    @staticmethod
    def forward(ctx: Any, rows: Sequence[Tensor], *groups: Tensor) -> Tensor:
        """Returns one tensor with the rows of all groups; `rows` has the positions of each group's rows."""
        ctx.rows = rows
        return _merge_rows(groups, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradient of each group."""
        return None, *_split_rows(gradient, ctx.rows)


def _split_rows(value: Tensor, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Splits a batch's rows into groups, in the memory format of `value`.

    `index_select` is several times as fast as indexing, but loses channels-last.
    """
    if not value.is_contiguous(memory_format=torch.channels_last):
        return tuple(value.index_select(0, group_rows) for group_rows in rows)
    last = value.permute(0, 2, 3, 1)
    return tuple(last.index_select(0, group_rows).permute(0, 3, 1, 2) for group_rows in rows)


def _merge_rows(groups: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    """Merges groups of rows into one batch, in the memory format of the first group.

    Dtypes may differ under autocast: a skip connection keeps its input's.
    """
    first, dtype = groups[0], reduce(torch.promote_types, (group.dtype for group in groups))
    last = first.is_contiguous(memory_format=torch.channels_last)
    form = torch.channels_last if last else torch.contiguous_format
    size = (sum(map(len, rows)), *first.shape[1:])
    out = torch.empty(size, dtype=dtype, device=first.device, memory_format=form)
    filled = out.permute(0, 2, 3, 1) if last else out
    for group_rows, group in zip(rows, groups, strict=True):
        filled.index_copy_(0, group_rows, (group.permute(0, 2, 3, 1) if last else group).to(dtype))
    return out


def _scale_by_choice(out: Tensor, scale: Tensor) -> Tensor:
    return cast(Tensor, _UnitScale.apply(out, scale))  # type: ignore[no-untyped-call]


@final
class _UnitScale(torch.autograd.Function):
    """Computes out·Z for Z = 1 without multiplying, and the gradient of Z."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, scale: Tensor) -> Tensor:
        """Returns `out` unchanged; `scale` is 1, of shape () for the whole batch or (batch, 1, 1, 1) for each example."""
        ctx.save_for_backward(out)
        ctx.form = scale.shape
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradient of `out`, and of the scale, summed over entries that share it."""
        return gradient, (gradient * ctx.saved_tensors[0]).sum_to_size(ctx.form)


@final
class _OneHotSelection(torch.autograd.Function):
    """Returns each example's chosen operation's output, with gradients for all operations' choice.

    It computes Zᵀ·[o_1(v) ... o_D(v)] for a one-hot Z of each example, with ∂L/∂Z[k] for every k (eq. 2). Operations
    that are not chosen are multiplied by 0, so that neither their weights nor v get a gradient from them. The backward
    pass evaluates them for the gradient of Z alone, one after the other, so that no memory is kept in between. An
    operation that some examples did not choose processes the whole minibatch: its BatchNorm normalises by these
    statistics but does not track them.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, z: Tensor, value: Tensor, candidates: Sequence[nn.Module]) -> Tensor:
        """Returns `out`, each example's output of its chosen operation; `z` is (batch, operations), `value` is v."""
        ctx.save_for_backward(out, z, value)
        ctx.candidates = candidates
        kind = value.device.type
        ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        """Returns the gradient of `out`, and for `z` the inner products of the gradient with each operation's output."""
        out, z, value = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return gradient, None, None, None
        slope = (gradient * out).flatten(1).sum(1)
        slopes = [_choice_gradient(operation, value, gradient, slope, z[:, k] > 0, ctx.autocast)
                  for k, operation in enumerate(ctx.candidates)]  # fmt: skip
        return gradient, torch.stack(slopes, 1).to(z.dtype), None, None


@torch.no_grad()
def _choice_gradient(
    operation: nn.Module, value: Tensor, gradient: Tensor, of_chosen: Tensor, is_chosen: Tensor,
    autocast: tuple[str, torch.dtype, bool],
) -> Tensor:  # fmt: skip
    """Computes, for each example, the inner product of the gradient with one operation's output, shape (batch,).

    ⟨gradient, o(v)⟩; for examples that chose the operation it is `of_chosen`.
    """
    if bool(is_chosen.all()):
        return of_chosen
    kind, dtype, enabled = autocast
    with normalise_by_batch_without_tracking(operation), torch.autocast(kind, dtype, enabled=enabled):
        out = operation(value)
    return torch.where(is_chosen, of_chosen, (gradient * out).flatten(1).sum(1))
