"""Provides the base class of methods that average the body of a network (all but the last layers), while each client
keeps its head (the last layers), such as FedRep and FedPAC.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from polyfed.algorithms.base.averaging import Averaging, ClientState, ServerState
from polyfed.algorithms.base.local_parts import LocalPartMethod
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.nn.buffers import (
    BufferPolicy,
    load_client_model,
    recompute_norm_statistics,
    recompute_norm_statistics_if_needed,
    tensors_to_send,
)
from polyfed.core.nn.module_cache import (
    CachedModule,
    cached_module,
    copy_trained_weights_and_buffers,
    fill_module,
    initial_state,
)
from polyfed.core.state_dict import IncompatibleTensorsError, StateDict, StateDictSpec, state_dict_spec
from polyfed.core.training.loop import FitResult
from polyfed.models.structure import split_body_and_head

# The server keeps "model", the body φ; or "draw", the whole initial network, while the head is not known
# A client keeps "head": h_i; "buffers": as the policy has it; "trained": whether the client ever took part


@dataclass(frozen=True, kw_only=True)
class BodyAndHeadMethod(LocalPartMethod, ABC):
    """Averages the body of a network over all clients, while each client keeps a personal head (the last layers);
    clients train both together.

    φ is the body, of one architecture, and h_i the head of client i.

    Evaluated model: φ with the client's own head; a client that never took part has the initial head. A head
    that the server sends ("head") takes the place of the client's own.

    The head is found by running the network on an example, which the server does not have: in round 1 it sends the whole
    initial network, the replies hold bodies, and from then on the server sends bodies, too.

    Args:
        buffers: buffers of the body; those of the head are never sent ("local", polyfed's choice).
    """

    local_group: ClassVar[str] = "head"
    buffers: BufferPolicy = "local"

    @abstractmethod
    def _find_head_modules(self, module: nn.Module, example: Tensor) -> tuple[str, ...]:
        """Returns the names of the modules that form the head of a network."""

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the whole initial network, since only clients know which part of it is the head."""
        assert server.model is not None  # `requires` names "one_architecture"
        draw = initial_state(server.model, server.seed)
        return {"draw": tensors_to_send(draw, cached_module(server.model).buffers, self.buffers)}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns to every client the body φ (in round 1 the whole network), and the learning rate."""
        group = "draw" if "draw" in server_state else "model"
        return Message({group: server_state[group]}, {"lr": self.lr_at(client_info.round, client_info.rounds)})

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shapes and dtypes of the body; in round 1, before it is known, of any tensors."""
        if "draw" not in server_state:
            return {"model": state_dict_spec(server_state["model"])}
        return {"model": spec_of_sent_tensors(state_dict_spec(server_state["draw"]), reply, "model")}

    def reply_spec_is_known(self, server_state: ServerState) -> bool:
        """Returns False in round 1 unless the user named the head: the body is not known yet."""
        return "draw" not in server_state

    def server_step(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Returns the state with the mean body, weighted by examples.

        The first replies settle which tensors φ has.
        """
        if "draw" in server_state and not mean["model"]:
            emit_runtime_warning(build_empty_body_warning(self))
        return {"model": mean["model"]}

    def make_incompatible_replies_error(self, error: IncompatibleTensorsError) -> UserError:
        """Returns the error to raise if two clients identify different layers as the head of the same architecture.

        They do only if the network takes another path on another client's data.
        """
        advice = "; name the head's modules, head=(...)" if hasattr(self, "head") else "; use another network"
        return UserError(
            f"{type(self).__name__}: clients {error.first_client!r} and {error.other_client!r} find different heads "
            f"({error.difference}){advice}"
        )

    # -- client ---------------------------------------------------------------------------------------------------

    def _find_local_tensors(self, module: nn.Module, example: Tensor | None) -> tuple[str, ...]:
        assert example is not None  # the server sends the whole initial network
        return split_body_and_head(module, self._find_head_modules(module, example))[1]

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the head with the common initial weights, and a mark that it is not trained."""
        return {**super().client_init(client, seed), "trained": False}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the received body and the client's head for `local_epochs`; replies with only the body."""
        reply, state_after = super().local_update(message, client_state, client, seed)
        return reply, {**state_after, "trained": True}

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the network to evaluate for the client: the received body with the client's head."""
        net = self._load_with_local_part(message, client_state, client)
        if (
            self.buffers == "average"
            and not client_state["trained"]
            and net.buffers.keys() & client_state["head"].keys()
        ):
            # Norms in this head have never seen data, and no average of others' makes up for it.
            recompute_norm_statistics(net.module, client.train)
            body = {name: tensor for name, tensor in _body_tensors(message).items() if name not in client_state["head"]}
            fill_module(net.module, copy_trained_weights_and_buffers(net.module), body)
            return net.module
        return recompute_norm_statistics_if_needed(net, client, client_state, self.buffers)

    def _load_with_local_part(self, message: Message, client_state: ClientState, client: Client) -> CachedModule:
        head = message.tensors.get("head", client_state["head"])
        return load_client_model(client, {**_body_tensors(message), **head}, client_state, self.buffers)


def train_head_then_body(
    module: nn.Module, head: Container[str], fit_head: Callable[[], FitResult], fit_body: Callable[[], FitResult]
) -> float:
    """Trains the head with the body frozen, then the reverse; returns the last loss.

    A part without parameters, or with empty ones alone, is left out.

    Args:
        module: the network, which both calls train in place.
        head: names of the head's tensors.
        fit_head, fit_body: train the parameters that are not frozen.
    """
    loss = train_only(module, lambda name: name in head, fit_head)
    return train_only(module, lambda name: name not in head, fit_body, otherwise=loss)


def train_only(
    module: nn.Module, is_trained: Callable[[str], bool], fit_part: Callable[[], FitResult], otherwise: float = 0.0
) -> float:
    """Trains the parameters chosen by name, others frozen; returns the training loss.

    Args:
        module: the network, which `fit_part` trains in place.
        is_trained: returns whether the parameter of this name is trained.
        fit_part: trains the parameters that are not frozen.
        otherwise: is returned if no parameter is chosen, so that nothing is trained.
    """
    trainable = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name, parameter in trainable.items():
        parameter.requires_grad_(is_trained(name))
    chosen_numbers = sum(parameter.numel() for parameter in trainable.values() if parameter.requires_grad)
    loss = fit_part().loss if chosen_numbers else otherwise
    for parameter in trainable.values():
        parameter.requires_grad_(True)
    return loss


def _body_tensors(message: Message) -> StateDict:
    return message.tensors["model"] if "model" in message.tensors else message.tensors["draw"]


def spec_of_sent_tensors(network_spec: StateDictSpec, reply: Message, group: str) -> StateDictSpec:
    """Returns the shapes and dtypes of those tensors of a network that occur in the named group of tensors of a reply."""
    return {name: network_spec[name] for name in reply.tensors.get(group, ()) if name in network_spec}


def build_empty_body_warning(method: Averaging) -> str:
    """Returns the warning for a network whose every layer counts as its head, with none to share."""
    return f"{type(method).__name__}: the head is the whole network, so nothing travels: each client trains alone"


def emit_runtime_warning(text: str) -> None:
    """Emits a `RuntimeWarning` with the given text, when the run begins or after its first round."""
    warnings.warn(text, RuntimeWarning, stacklevel=3)
