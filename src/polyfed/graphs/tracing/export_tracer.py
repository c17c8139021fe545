"""Traces networks with torch.export, which runs `forward` on symbols of an example's shapes, or on the example itself, and
records ATen operators.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from polyfed.core.examples.pytree import (
    Inputs,
    InputSpec,
    call_network,
    input_spec_of,
    iterate_tensors,
    logits_or_output,
    named_leaves,
)
from polyfed.graphs.tracing.layer_flow import Root, TracedProgram


def trace_with_export(root: Root, x: Inputs) -> TracedProgram:
    """Traces a model into a program of ATen operators, with branches on shapes and types as for the example `x`.

    Args:
        root: module around a copy of the model.
        x: a batch of inputs.

    Raises:
        Exception: of any class, if a branch depends on the values of tensors or an operation is unknown.

    >>> [node.op for node in trace_with_export(Root(nn.Flatten()), torch.zeros(2, 1, 3)).graph.nodes][-2:]
    ['call_function', 'output']
    """
    with _silence_export():
        # strict=False runs the Python code instead of analysing its bytecode: faster, and works for more models.
        parts = tuple(part for _, part in named_leaves(x))
        program: Any = torch.export.export(_Tensors(root, input_spec_of(x)), parts, strict=False).module()
    return TracedProgram(program.graph, program)


def trace_on_example(root: Root, x: Inputs) -> TracedProgram:
    """Traces a model into the program of ATen operators that it runs on the example `x`, whatever its values decide.

    Args:
        root: module around a copy of the model.
        x: a batch of inputs.

    Raises:
        Exception: of any class.

    >>> program = trace_on_example(Root(nn.Flatten()), torch.zeros(2, 1, 3))
    >>> [node.op for node in program.graph.nodes][-2:]
    ['call_function', 'output']
    """
    parts = tuple(part for _, part in named_leaves(x))
    with _silence_export():
        trace: Any = make_fx(
            _Tensors(root, input_spec_of(x)),
            tracing_mode="real",
            pre_dispatch=True,  # recurrent layers stay one operation
            _error_on_data_dependent_ops=False,
        )
        program = trace(*parts)
    program.model = root.model  # whose parameters the program has under other names
    return TracedProgram(program.graph, program)


@final
class _Tensors(nn.Module):
    """Wraps a model so that it takes the parts of its inputs one by one and returns a flat list of tensors.

    torch.export accepts no containers of classes that it does not know.
    """

    def __init__(self, root: Root, form: InputSpec) -> None:
        super().__init__()
        self.model, self._form = root.model, form

    def forward(self, *parts: Tensor) -> list[Tensor]:
        remaining = iter(parts)
        x = self._form.build_inputs(lambda shape, dtype: next(remaining))
        return list(iterate_tensors(logits_or_output(call_network(self.model, x))))


@contextmanager
def _silence_export() -> Iterator[None]:
    """Hides what torch.export prints of a model that it cannot trace; its error says the same."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            # It warns of tensors in plain attributes (an LSTM's list of weights); this copy is discarded.
            warnings.filterwarnings("ignore", message="The tensor attribute", category=UserWarning)
            yield
    finally:
        log.setLevel(level)
