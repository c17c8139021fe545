"""Recognises activation functions (element-wise nonlinear functions and gated linear units) in a traced program.

A layer's activation is part of its type (FLHA-GHN, section 4.2). Pooling, softmax, dropout and products of two values are
not activations, nor are functions composed of them. Both tracers give the same names, except for `nn.Softsign` and
`nn.Tanhshrink`, which torch.export decomposes into arithmetic ("none") and a tanh.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn
from torch.nn import functional as F

from polyfed.graphs.architecture import ACTIVATIONS
from polyfed.graphs.recognition.layer_recognition import torch_operation_name

_CLASSES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu", nn.ReLU6: "relu6", nn.LeakyReLU: "leaky_relu", nn.PReLU: "prelu", nn.RReLU: "rrelu",
    nn.ELU: "elu", nn.CELU: "celu", nn.SELU: "selu", nn.GELU: "gelu", nn.SiLU: "silu", nn.Mish: "mish",
    nn.Sigmoid: "sigmoid", nn.LogSigmoid: "logsigmoid", nn.Tanh: "tanh", nn.Hardswish: "hardswish",
    nn.Hardsigmoid: "hardsigmoid", nn.Softplus: "softplus", nn.Softsign: "softsign", nn.Tanhshrink: "tanhshrink",
    nn.Softshrink: "softshrink", nn.Hardshrink: "hardshrink", nn.Threshold: "threshold", nn.GLU: "glu",
    nn.Hardtanh: "hardtanh",
}  # fmt: skip
_FUNCTIONS = dict(zip(ACTIVATIONS, ACTIVATIONS, strict=True))
_FUNCTIONS |= {"log_sigmoid": "logsigmoid", "prelu_kernel": "prelu"}  # as ATen names them
_FUNCTIONS |= dict.fromkeys(("clamp", "clamp_min", "clip"), "clamp")


def activation_name(
    node: fx.Node, module: nn.Module | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Returns the activation that a traced operation computes; None if it computes none.

    Args:
        node: an operation of the traced program.
        module: the module that the node calls; None if it calls a function.
        args, kwargs: the values with which the operation is called.
    """
    if module is not None:
        name = next((name for kind, name in _CLASSES.items() if isinstance(module, kind)), None)
        return _clamp_activation(module.min_val, module.max_val) if isinstance(module, nn.Hardtanh) else name
    name = "logsigmoid" if node.target is F.logsigmoid else _FUNCTIONS.get(torch_operation_name(node).strip("_"))
    if name in ("clamp", "hardtanh"):
        end, default = ("", (None, None)) if name == "clamp" else ("_val", (-1.0, 1.0))
        arguments = {**kwargs, **dict(zip((f"min{end}", f"max{end}"), args[1:], strict=False))}
        return _clamp_activation(arguments.get(f"min{end}", default[0]), arguments.get(f"max{end}", default[1]))
    return name


def _clamp_activation(least: Any, most: Any) -> str | None:
    """Names the activation that clamping to two bounds is; None for an upper bound alone, which is none."""
    if not isinstance(least, int | float):
        return None
    if least == 0 and most in (None, 6):
        return "relu" if most is None else "relu6"
    return None if most is None else "hardtanh"
