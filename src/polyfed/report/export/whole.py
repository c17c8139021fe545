"""A network with its preprocessing as one module of plain tensors: what TorchScript and ONNX hold."""

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from polyfed.core.inputs import call, logits_of
from polyfed.data.features import Prepared, from_description
from polyfed.report.export.trained import Trained
from polyfed.simulation.runs.signature import Input, Signature

BATCHES = (1, 3, 5)  # of the examples on which a written network is compared; it is traced on two


@final
class Whole(nn.Module):
    """The client's network from stored inputs to its outputs: images of uint8 are normalised, rows of a table are scaled,
    filled in and encoded, and targets of regression come in the table's unit."""

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.network, self.tree = trained.network, trained.signature["tree"]
        self.unit: nn.Module | None = None
        if trained.prepared is not None:
            ready: list[nn.Module] = [_Rows(trained.prepared)]
            self.unit = _Unit(trained.prepared) if trained.prepared.target else None
        else:
            ready = [_ready(one) for one in trained.signature["inputs"]]
        self.ready = nn.ModuleList(ready)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Outputs, shape (batch, ...), of the tensors of the signature in their order."""
        given = tuple(ready(one) for ready, one in zip(self.ready, inputs, strict=True))
        outputs = logits_of(call(self.network, _built(self.tree, given)))
        return outputs if self.unit is None else self.unit(outputs)


def _ready(form: Input) -> nn.Module:
    """What makes an input of a stored tensor."""
    if (table := form.get("prepared")) is not None:
        return _Rows(from_description(table))
    scale = form["normalise"]
    return nn.Identity() if scale is None else _Pixels(scale["mean"], scale["std"], len(form["shape"]))


def _built(tree: Any, tensors: tuple[Tensor, ...]) -> Any:
    if isinstance(tree, int):
        return tensors[tree]
    if isinstance(tree, Mapping):
        return {name: _built(part, tensors) for name, part in tree.items()}
    return tuple(_built(part, tensors) for part in tree)


@final
class _Pixels(nn.Module):
    """`Normalise`, with the same bits."""

    scale: Tensor
    offset: Tensor

    def __init__(self, mean: list[float], std: list[float], dimensions: int) -> None:
        super().__init__()
        shape = (1, -1, *[1] * (dimensions - 1))
        self.register_buffer("scale", torch.tensor([1 / (255 * s) for s in std]).view(shape))
        self.register_buffer("offset", torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).view(shape))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = x.to(torch.float32) * self.scale + self.offset
        return scaled


@final
class _Rows(nn.Module):
    """`Prepared`, with the same bits, of rows in float64: by operations that ONNX has for every type."""

    own: Tensor
    marked: Tensor
    owners: Tensor
    codes: Tensor
    mean: Tensor
    spread: Tensor

    def __init__(self, prepared: Prepared) -> None:
        super().__init__()
        own = [i for i, c in enumerate(prepared.columns) if c.categories is None]
        marked = [i for i in own if prepared.columns[i].missing]
        sizes = {i: len(c.categories) + c.missing for i, c in enumerate(prepared.columns) if c.categories is not None}
        shares = [(i, float(code)) for i, size in sizes.items() for code in range(size)]
        self.register_buffer("own", torch.tensor(own, dtype=torch.int64))
        self.register_buffer("marked", torch.tensor(marked, dtype=torch.int64))
        self.register_buffer("owners", torch.tensor([i for i, _ in shares], dtype=torch.int64))
        self.register_buffer("codes", torch.tensor([code for _, code in shares], dtype=torch.float64))
        self.register_buffer("mean", torch.tensor(prepared.mean, dtype=torch.float64))
        self.register_buffer("spread", torch.tensor(prepared.divisors, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        scaled = (x.index_select(1, self.own) - self.mean) / self.spread
        absent = torch.isnan(scaled)
        parts = [torch.where(absent, torch.zeros_like(scaled), scaled).to(torch.float32)]
        if len(self.marked):
            parts.append(torch.isnan(x.index_select(1, self.marked)).to(torch.float32))
        if len(self.owners):
            parts.append(torch.eq(x.index_select(1, self.owners), self.codes).to(torch.float32))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


@final
class _Unit(nn.Module):
    """Targets of regression in the unit of the table."""

    mean: Tensor
    spread: Tensor

    def __init__(self, prepared: Prepared) -> None:
        super().__init__()
        mean, spread = torch.tensor(prepared.target, dtype=torch.float64).T
        self.register_buffer("mean", mean.clone())
        self.register_buffer("spread", spread.clone())

    def forward(self, outputs: Tensor) -> Tensor:
        scaled: Tensor = (outputs.to(torch.float64) * self.spread + self.mean).to(torch.float32)
        return scaled


def examples_of(trained: Trained, number: int, seed: int) -> tuple[Tensor, ...]:
    """Inputs of the signature's form, of no client's data: random numbers; 0 and 1 where whole numbers are, which every
    vocabulary has; missing cells and unknown categories too in rows of a table."""
    generator = torch.Generator().manual_seed(seed)
    if trained.prepared is not None:
        return (_rows(trained.prepared, number, generator),)
    return tuple(_tensor(one, number, generator) for one in trained.signature["inputs"])


def _tensor(form: Input, number: int, generator: torch.Generator) -> Tensor:
    if (table := form.get("prepared")) is not None:
        return _rows(from_description(table), number, generator)
    shape, dtype = (number, *form["shape"]), getattr(torch, form["dtype"])
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    most = 256 if dtype == torch.uint8 and len(shape) > 3 else 2
    return torch.randint(most, shape, generator=generator).to(dtype)


def _rows(prepared: Prepared, number: int, generator: torch.Generator) -> Tensor:
    found, plain = [], iter(zip(prepared.mean, prepared.spread, strict=True))
    for column in prepared.columns:
        draw = torch.randn(number, generator=generator, dtype=torch.float64)
        if column.categories is None:
            mean, spread = next(plain)
            cells = mean + (spread or 1.0) * draw
            found.append(torch.where(draw > 1, math.nan, cells) if column.missing else cells)
        else:
            size = len(column.categories) + column.missing + 1
            found.append(torch.randint(size, (number,), generator=generator).double() - 1)
    return torch.stack(found, dim=1)


def onnx_names(signature: Signature) -> list[str]:
    """What inputs are called in ONNX, whose exporter takes no name that begins with a figure, as those of a tuple do.

    >>> onnx_names({"inputs": [{"name": "0"}, {"name": "image"}]})
    ['input_0', 'image']
    """
    names = [one["name"] for one in signature["inputs"]]
    return [f"input_{name}" if name[:1].isdigit() else name for name in names]
