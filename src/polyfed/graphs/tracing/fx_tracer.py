"""Traces networks with torch.fx, which runs `forward` on symbols in place of tensors."""

from itertools import count
from typing import Any, final

import torch
from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized

from polyfed.core.examples.pytree import Inputs, input_spec_of
from polyfed.graphs.recognition.layer_recognition import has_only_weight_and_bias, layer_kind
from polyfed.graphs.tracing.layer_flow import Root, TracedProgram
from polyfed.graphs.tracing.traced_modules import inherits_torch_forward


def trace_with_fx(root: Root, x: Inputs) -> TracedProgram:
    """Traces a model into a program in which each call of a layer is one operation.

    Args:
        root: module around a copy of the model; symbols may remain in it.
        x: inputs with the structure that the program shall take; their values do not matter.

    Raises:
        Exception: of any class, if `forward` uses a symbol in a way that only a tensor supports.

    >>> import torch
    >>> [node.op for node in trace_with_fx(Root(nn.Linear(2, 3)), torch.zeros(1, 2)).graph.nodes]
    ['placeholder', 'call_module', 'output']
    """
    return TracedProgram(_Tracer(x).trace(root), root)


@final
class _Tracer(fx.Tracer):
    def __init__(self, x: Inputs) -> None:
        super().__init__(param_shapes_constant=True)
        self._form = input_spec_of(x)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Creates the symbols for tracing, one for each part of the inputs, in their structure."""
        number = count()

        def symbol(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
            return self.create_proxy("placeholder", f"x_{next(number)}", (), {})

        return root_fn, [self.root, self._form.build_inputs(symbol)]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Returns whether a call of the module is recorded as one operation, instead of the operations inside it.

        These are torch's own modules, layers of the catalogue's kinds whatever they do with their weight, and layers
        whose weight is computed (a property that symbols cannot pass through).
        """
        layer = layer_kind(m) is not None and has_only_weight_and_bias(m)
        return layer or is_parametrized(m) or inherits_torch_forward(m)
