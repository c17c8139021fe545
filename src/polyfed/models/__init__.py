"""Defines the model zoo, functions that build networks from (input_shape, num_classes) by name, and descriptions of
networks (`ModelSpec`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.trusted_code import import_trusted_callable
from polyfed.core.io.values.frozen_mapping import FrozenMapping
from polyfed.core.machine.memory_limit import build_after_memory_check
from polyfed.models.building.call_factory import call_factory
from polyfed.models.cnn import cnn_582k, cnn_fedhenn, cnn_fedhenn_homo, cnn_fedpnas, cnn_pfedla, cnn_small
from polyfed.models.flha import flha_arch1, flha_arch2, flha_arch3, flha_chain, flha_small, resnet18, resnet18_hybrid
from polyfed.models.lstm import lstm
from polyfed.models.mlp import mlp
from polyfed.models.token_models import lstm_tagger, tiny_transformer
from polyfed.models.unet import unet, unet3d
from polyfed.models.vit import vit

__all__ = ["MODELS", "FrozenMapping", "ModelSpec", "build", "names"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "cnn_small": cnn_small,
    "cnn_582k": cnn_582k,
    "cnn_pfedla": cnn_pfedla,
    "cnn_fedhenn": cnn_fedhenn,
    "cnn_fedhenn_homo": cnn_fedhenn_homo,
    "cnn_fedpnas": cnn_fedpnas,
    "resnet18": resnet18,
    "resnet18_hybrid": resnet18_hybrid,
    "flha_arch0": resnet18,
    "flha_arch1": flha_arch1,
    "flha_arch2": flha_arch2,
    "flha_arch3": flha_arch3,
    "flha_small": flha_small,
    "flha_chain": flha_chain,
    "lstm": lstm,
    "lstm_tagger": lstm_tagger,
    "tiny_transformer": tiny_transformer,
    "vit": vit,
    "unet": unet,
    "unet3d": unet3d,
}
_LISTING = "polyfed.models.names() (polyfed list models)"


def names() -> list[str]:
    """Returns the names of polyfed's networks, sorted; `build` and `ModelSpec` take them."""
    return sorted(MODELS)


def build(
    model: str | Callable[..., nn.Module], input_shape: tuple[int, ...], num_classes: int, **arguments: Any
) -> nn.Module:
    """Builds a network by its name in the zoo, a `module:function`, or a function, with random initial weights.

    Args:
        model: a name in `MODELS`, the user's `module:factory` (searched in the current directory too), or a factory
            itself. A user's factory receives `input_shape` and `num_classes` only if its signature has these names.
            `module:factory` is imported only if `polyfed.trust_code` allowed it.
        input_shape: shape of one example, without the batch dimension.
        num_classes: number of outputs.
        arguments: further keyword arguments of the constructor.

    Raises:
        UserError: the model or an argument is unknown; the module or attribute does not exist or is not trusted; the sizes
            do not fit the input shape; a network of the zoo does not fit into this machine's memory; or the factory does
            not return an nn.Module.

    >>> build("mlp", (1, 8, 8), 10, hidden=(16,)).fc2
    Linear(in_features=16, out_features=10, bias=True)
    >>> build(nn.Linear, (1, 8, 8), 10, in_features=3, out_features=2)
    Linear(in_features=3, out_features=2, bias=True)
    """
    if not isinstance(model, str):
        label = getattr(model, "__name__", type(model).__name__)
        return call_factory(label, model, tuple(input_shape), num_classes, arguments)
    if ":" in model:
        return call_factory(model, import_trusted_callable(model), tuple(input_shape), num_classes, arguments)
    if model not in MODELS:
        raise UserError(
            f"there is no model {model!r}; {did_you_mean(model, MODELS, _LISTING)}. "
            "A network of your own is given as module:factory"
        )
    argument_text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    description = f"model {model}({argument_text[:200]}) on inputs {tuple(input_shape)} with {num_classes} outputs"
    return build_after_memory_check(
        description, lambda: call_factory(model, MODELS[model], tuple(input_shape), num_classes, arguments)
    )


@final
@dataclass(frozen=True)
class ModelSpec:
    """Describes a network by the function that builds it, its arguments and its shapes; calling the object builds the
    network.

    Recipes pass it as `Client.model`. Equal specs hash alike, and a spec can be sent to other processes.

    Args:
        name: a name in `MODELS`, or `module:factory`.
        arguments: further keyword arguments of the constructor, stored as `FrozenMapping`.
        input_shape: shape of one example, without the batch dimension.
        num_classes: number of outputs.

    Raises:
        UserError: the name is not in `MODELS`, or `arguments` cannot be hashed or contain `model`, `input_shape` or
            `num_classes`; when the spec is called, as `build`.

    >>> spec = ModelSpec("mlp", {"hidden": [16]}, (1, 8, 8), 10)
    >>> spec == ModelSpec("mlp", {"hidden": (16,)}, (1, 8, 8), 10), spec().fc1
    (True, Linear(in_features=64, out_features=16, bias=True))
    """

    name: str
    arguments: Mapping[str, Any]
    input_shape: tuple[int, ...]
    num_classes: int

    def __post_init__(self) -> None:
        if ":" not in self.name and self.name not in MODELS:
            raise UserError(
                f"there is no model {self.name!r}; {did_you_mean(self.name, MODELS, _LISTING)}. "
                f"A network of your own is given as module:factory"
            )
        if clash := sorted({"model", "input_shape", "num_classes"} & set(self.arguments)):
            raise UserError(f"model {self.name}: {clash[0]!r} cannot be among the arguments; it is given by the recipe")
        object.__setattr__(self, "arguments", FrozenMapping(self.arguments))
        object.__setattr__(self, "input_shape", tuple(self.input_shape))

    def __call__(self) -> nn.Module:
        """Builds a new network from this description, as `build` does."""
        return build(self.name, self.input_shape, self.num_classes, **self.arguments)


def __dir__() -> list[str]:
    return sorted([*__all__, "lora"])
