"""Programs of networks by torch.export, which runs `forward` on the example and records the operators of ATen."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from typing import Any, final

import torch
from torch import Tensor, nn

from polyfed.core.examples.pytree import Inputs, InputSpec, call_network, input_spec_of, logits_or_output, named_leaves
from polyfed.graphs.layer_flow import Root, TracedProgram, iterate_tensors


def trace_with_export(root: Root, x: Inputs) -> TracedProgram:
    """The program of a model on inputs of the shape of x; decisions on shapes and types are made as x has them.

    Args:
        root: holds a copy of the model.
        x: a batch of inputs.

    Raises:
        Exception: of any kind, where a decision depends on the values of tensors or an operation is unknown.

    >>> [node.op for node in trace_with_export(Root(nn.Flatten()), torch.zeros(2, 1, 3)).graph.nodes][-2:]
    ['call_function', 'output']
    """
    with _silence_export():
        # strict=False runs Python itself rather than analyse its bytecode: faster, and takes more models.
        parts = tuple(part for _, part in named_leaves(x))
        program: Any = torch.export.export(_Tensors(root, input_spec_of(x)), parts, strict=False).module()
    return TracedProgram(program.graph, program)


@final
class _Tensors(nn.Module):
    """Takes the parts of inputs one by one, and leaves of a model's output the tensors; torch.export takes no containers of
    classes that it does not know."""

    def __init__(self, root: Root, form: InputSpec) -> None:
        super().__init__()
        self.model, self._form = root.model, form

    def forward(self, *parts: Tensor) -> list[Tensor]:
        remaining = iter(parts)
        x = self._form.build_inputs(lambda shape, dtype: next(remaining))
        return list(iterate_tensors(logits_or_output(call_network(self.model, x))))


@contextmanager
def _silence_export() -> Iterator[None]:
    """Without what torch.export prints and logs about a model that it cannot take; the error says it."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            # Models that keep tensors in plain attributes (an LSTM's list of weights); the copy is thrown away.
            warnings.filterwarnings("ignore", message="The tensor attribute", category=UserWarning)
            yield
    finally:
        log.setLevel(level)
