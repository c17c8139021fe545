"""Wraps a network and its preprocessing as one module that takes and returns plain tensors, for TorchScript and ONNX."""

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from polyfed.core.examples.pytree import call_network, logits_of
from polyfed.data.tabular.preprocessing import TablePreprocessor, preprocessor_from_json
from polyfed.report.export.trained_model import TrainedModel
from polyfed.simulation.storage.model_signature import ModelInput, Signature

CHECKED_BATCH_SIZES = (1, 3, 5)  # of the examples on which a written network is compared; it is traced on two


@final
class StandaloneModule(nn.Module):
    """Applies the preprocessing and then the client's network to raw input tensors, and returns the network's outputs.

    Images of uint8 are normalised; rows of a table are scaled, filled in and encoded; targets of regression come in the
    table's unit.
    """

    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        self.network, self.tree = trained.network, trained.signature["tree"]
        self.unit: nn.Module | None = None
        if trained.preprocessor is not None:
            ready: list[nn.Module] = [_Rows(trained.preprocessor)]
            self.unit = _Unit(trained.preprocessor) if trained.preprocessor.target else None
        else:
            ready = [_input_module(input_spec) for input_spec in trained.signature["inputs"]]
        self.ready = nn.ModuleList(ready)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns the outputs, shape (batch, ...), for the inputs in the order of the signature."""
        ready_inputs = tuple(ready(tensor) for ready, tensor in zip(self.ready, inputs, strict=True))
        outputs = logits_of(call_network(self.network, _build_input_tree(self.tree, ready_inputs)))
        return outputs if self.unit is None else self.unit(outputs)


def _input_module(input_spec: ModelInput) -> nn.Module:
    """Returns the module that turns one stored tensor into the input of the network."""
    if (table := input_spec.get("prepared")) is not None:
        return _Rows(preprocessor_from_json(table))
    scale = input_spec["normalise"]
    return nn.Identity() if scale is None else _Pixels(scale["mean"], scale["std"], len(input_spec["shape"]))


def _build_input_tree(tree: Any, tensors: tuple[Tensor, ...]) -> Any:
    if isinstance(tree, int):
        return tensors[tree]
    if isinstance(tree, Mapping):
        return {name: _build_input_tree(part, tensors) for name, part in tree.items()}
    return tuple(_build_input_tree(part, tensors) for part in tree)


@final
class _Pixels(nn.Module):
    """Normalises images as `Normalise` does, bit for bit, in operations that can be exported."""

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
    """Prepares the rows of a table as `Prepared` does, bit for bit, in operations that ONNX has for float64."""

    own: Tensor
    marked: Tensor
    owners: Tensor
    codes: Tensor
    mean: Tensor
    spread: Tensor

    def __init__(self, preprocessor: TablePreprocessor) -> None:
        super().__init__()
        numeric_columns = [i for i, c in enumerate(preprocessor.columns) if c.categories is None]
        columns_with_missing = [i for i in numeric_columns if preprocessor.columns[i].missing]
        sizes = {
            i: len(c.categories) + c.missing for i, c in enumerate(preprocessor.columns) if c.categories is not None
        }
        category_codes = [(i, float(code)) for i, size in sizes.items() for code in range(size)]
        self.register_buffer("own", torch.tensor(numeric_columns, dtype=torch.int64))
        self.register_buffer("marked", torch.tensor(columns_with_missing, dtype=torch.int64))
        self.register_buffer("owners", torch.tensor([i for i, _ in category_codes], dtype=torch.int64))
        self.register_buffer("codes", torch.tensor([code for _, code in category_codes], dtype=torch.float64))
        self.register_buffer("mean", torch.tensor(preprocessor.mean, dtype=torch.float64))
        self.register_buffer("spread", torch.tensor(preprocessor.divisors, dtype=torch.float64))

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
    """Converts scaled regression outputs back to the unit of the table's target column."""

    mean: Tensor
    spread: Tensor

    def __init__(self, preprocessor: TablePreprocessor) -> None:
        super().__init__()
        mean, spread = torch.tensor(preprocessor.target, dtype=torch.float64).T
        self.register_buffer("mean", mean.clone())
        self.register_buffer("spread", spread.clone())

    def forward(self, outputs: Tensor) -> Tensor:
        scaled: Tensor = (outputs.to(torch.float64) * self.spread + self.mean).to(torch.float32)
        return scaled


def draw_random_inputs(trained: TrainedModel, num_examples: int, seed: int) -> tuple[Tensor, ...]:
    """Draws inputs of the signature's shapes and types, from no client's data.

    Floating-point numbers are normal; whole numbers are 0 or 1, which every vocabulary has; rows of a table also have
    missing cells and unknown categories.
    """
    generator = torch.Generator().manual_seed(seed)
    if trained.preprocessor is not None:
        return (_random_rows(trained.preprocessor, num_examples, generator),)
    return tuple(_random_tensor(input_spec, num_examples, generator) for input_spec in trained.signature["inputs"])


def _random_tensor(input_spec: ModelInput, number: int, generator: torch.Generator) -> Tensor:
    if (table := input_spec.get("prepared")) is not None:
        return _random_rows(preprocessor_from_json(table), number, generator)
    shape, dtype = (number, *input_spec["shape"]), getattr(torch, input_spec["dtype"])
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    upper_bound = 256 if dtype == torch.uint8 and len(shape) > 3 else 2
    return torch.randint(upper_bound, shape, generator=generator).to(dtype)


def _random_rows(preprocessor: TablePreprocessor, number: int, generator: torch.Generator) -> Tensor:
    columns, numeric_scales = [], iter(zip(preprocessor.mean, preprocessor.spread, strict=True))
    for column in preprocessor.columns:
        draw = torch.randn(number, generator=generator, dtype=torch.float64)
        if column.categories is None:
            mean, spread = next(numeric_scales)
            cells = mean + (spread or 1.0) * draw
            columns.append(torch.where(draw > 1, math.nan, cells) if column.missing else cells)
        else:
            size = len(column.categories) + column.missing + 1
            columns.append(torch.randint(size, (number,), generator=generator).double() - 1)
    return torch.stack(columns, dim=1)


def onnx_input_names(signature: Signature) -> list[str]:
    """Returns the names of the network's inputs, changed where a name begins with a digit, which ONNX does not allow.

    >>> onnx_input_names({"inputs": [{"name": "0"}, {"name": "image"}]})
    ['input_0', 'image']
    """
    names = [input_spec["name"] for input_spec in signature["inputs"]]
    return [f"input_{name}" if name[:1].isdigit() else name for name in names]
