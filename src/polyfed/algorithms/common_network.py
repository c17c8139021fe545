"""A network that a method brings for all clients, beside their own: a teacher, or one that learns with theirs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from torch import Tensor, nn

from polyfed.core.algorithm import Client
from polyfed.core.code import named
from polyfed.core.errors import UserError
from polyfed.core.evaluation import predict
from polyfed.core.inputs import form_of, leaves
from polyfed.core.scratch import fill, scratch
from polyfed.core.tree import Tree
from polyfed.models import ModelSpec
from polyfed.models.parts import SideBySide


@final
@dataclass(frozen=True)
class Common:
    """Its architecture as another factory than any client's: it must not share the scratch module of a client's own network
    that happens to have its architecture."""

    network: ModelSpec
    side_by_side: bool = False

    def __call__(self) -> nn.Module:
        """A new one."""
        return SideBySide(self.network()) if self.side_by_side else self.network()


def spec_of(given: Mapping[str, Any], input_shape: Sequence[int], outputs: int) -> ModelSpec:
    """Of a name with arguments, the network for inputs and outputs of this form.

    Raises:
        UserError: an unknown name.

    >>> spec_of({"name": "mlp", "hidden": (32,)}, (6,), 3).name
    'mlp'
    """
    arguments = {name: value for name, value in given.items() if name != "name"}
    return ModelSpec(given["name"], arguments, tuple(input_shape), outputs)


def check_found(given: Mapping[str, Any]) -> None:
    """Raises a `UserError`, where a module:factory is not found, before work starts."""
    if ":" in given["name"]:
        named(given["name"])


def learner(given: Mapping[str, Any], client_state: Mapping[str, Any], client: Client) -> tuple[Client, Common]:
    """The client as if the common network were its own, and that network; `client_state` has the form of its data."""
    factory = Common(
        spec_of(given, client_state["input_shape"], client_state["outputs"]), client_state.get("side_by_side", False)
    )
    return replace(client, model=factory), factory


def common_form(given: Mapping[str, Any], state: Tree, client: Client, method: str, field: str) -> dict[str, Any]:
    """The `input_shape` and `outputs` of the client's own network, which the common one must take and give.

    Args:
        given: the common network.
        state: of the client's own.
        client: whose.
        method, field: how the method and its field are called, for errors.

    Raises:
        UserError: the common network fails on the client's inputs, or has another number of outputs.
    """
    assert client.model is not None
    device = client.train.device
    one, x = client.train.head(), client.train.one_input
    outputs = predict(fill(scratch(client.model, device).module, state), one).shape[1]
    form = {"input_shape": list(form_of(x).shape), "outputs": outputs}
    if not isinstance(x, Tensor) and ":" not in given["name"]:  # polyfed's networks take one tensor
        form |= {"input_shape": [sum(part[0].numel() for _, part in leaves(x))], "side_by_side": True}
    _, factory = learner(given, form, client)
    network, name = scratch(factory, device).module, f"{method}: the {field} {factory.network.name!r}"
    try:
        found = predict(network, one).shape[1]
    except Exception as error:  # whatever a network raises that does not take such inputs
        told = f"shape {tuple(x.shape)} ({x.dtype})" if isinstance(x, Tensor) else f"several parts ({form_of(x)})"
        tokens = isinstance(x, Tensor) and x.ndim == 2 and not x.is_floating_point()
        other = "as {name: lstm, vocabulary: 5000} for numbers of tokens" if tokens else f"{field}=..."
        raise UserError(
            f"{name} fails on inputs of {told}: {type(error).__name__}: {error}; give another, {other}"
        ) from error
    if found != outputs:
        raise UserError(
            f"{name} has {found} outputs, the network of {client.id!r} {outputs}; give another, {field}=..."
        )
    return form
