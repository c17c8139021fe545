"""Provides the base class of methods whose clients train submodels of one wider network, with fewer units per layer, such as
HeteroFL.
"""

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from polyfed.algorithms.base.averaging import Averaging, ClientState, ServerState, build_reply_and_client_state
from polyfed.algorithms.submodels.widths import (
    add_to_window,
    divide_layer_outputs_by_ratio,
    fold_scaling_into_weights,
    leading_slice,
    validate_head_width,
    widest_shape_by_tensor,
    width_ratio_by_layer,
    window,
)
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.methods.declared_words import ONE_CLASS
from polyfed.core.nn.buffers import BufferPolicy, load_client_model, load_model_for_eval, tensors_to_send
from polyfed.core.nn.module_cache import cached_module, initial_state
from polyfed.core.training.loop import ForwardPass, fit

_RATIO_PREFIX = "rate of "  # prefix of a layer's name in a message's scalars
# The server keeps "model": θ, the widest; "forms": the shapes of each architecture's submodel; "rates": r of its layers


@dataclass(frozen=True, kw_only=True)
class WidthSubmodelMethod(Averaging, ABC):
    """Trains one global model. Each client trains a submodel with fewer units per layer, which the method chooses in
    `find_window_starts`.

    The client's network gives the widths: the networks of all clients have the same layers and differ in width alone, and
    the global model θ is in each dimension as wide as the widest. Each entry of θ becomes the mean over the clients of the
    round that have it, and does not change if none has.

    Args:
        scaler: divides in training the outputs of a layer by r, the share of the widest network's units that it has
            (True, HeteroFL's paper); False does not. The evaluated network has the scaler in its weights.
        mask: sets the outputs of classes that the client lacks to 0 in the loss (True, HeteroFL's paper); False does not.
        weighted: weighs clients by their number of training examples (False, HeteroFL's paper: all clients that have an
            entry count the same).
        buffers: "recompute" estimates the statistics of evaluation on the client's training data (polyfed's choice); or
            "local".
    """

    requires: ClassVar[frozenset[str]] = frozenset({"architectures", "classification", "one_family", "one_input_spec"})
    discloses: ClassVar[frozenset[str]] = frozenset({"architecture", "weights"})
    scaler: bool = True
    mask: bool = True
    weighted: bool = False
    buffers: BufferPolicy = "recompute"

    def __post_init__(self) -> None:
        super().__post_init__()
        static = self.buffers != "average"
        self._require(static, "buffers", "'recompute' or 'local': statistics of different widths are not averaged")
        if not self.mask:
            object.__setattr__(self, "requires", self.requires - {ONE_CLASS})

    def find_window_starts(
        self, server_state: ServerState, name: str, shape: Sequence[int], purpose: Literal["local", "personal"]
    ) -> tuple[int, ...]:
        """Returns for each dimension of a tensor of θ the first unit that a submodel of this shape has.

        The units that follow wrap around. By default all are 0: a submodel has the leading units.

        Args:
            server_state: the server's state, which must not depend on the client.
            name: the tensor's.
            shape: its shape in the submodel.
            purpose: what the submodel is sent for.
        """
        return (0,) * len(shape)

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the global model, into which each architecture's weights are written, the widest last."""
        assert server.architectures is not None  # `requires` names "architectures"
        shapes, networks = widest_shape_by_tensor(server.architectures), server.architectures
        initial_models = {
            key: tensors_to_send(initial_state(factory, server.seed), cached_module(factory).buffers, self.buffers)
            for key, factory in networks.items()
        }
        theta = {name: tensor.new_zeros(shapes[name]) for name, tensor in next(iter(initial_models.values())).items()}
        for key in sorted(
            initial_models, key=lambda key: (sum(tensor.numel() for tensor in initial_models[key].values()), key)
        ):
            for name, tensor in initial_models[key].items():
                leading_slice(theta[name], tuple(tensor.shape)).copy_(tensor)
        forms = {
            key: {name: list(tensor.shape) for name, tensor in weights.items()}
            for key, weights in initial_models.items()
        }
        return {
            "model": theta,
            "forms": forms,
            "rates": {k: width_ratio_by_layer(f, shapes) for k, f in networks.items()},
        }

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the client's submodel, and for each layer its share of the global model's units."""
        shapes, ratios = (server_state[part][client_info.architecture] for part in ("forms", "rates"))
        model = {
            name: window(
                server_state["model"][name],
                tuple(shape),
                self.find_window_starts(server_state, name, shape, client_info.purpose),
            ).contiguous()
            for name, shape in shapes.items()
        }
        ratio_scalars = {f"{_RATIO_PREFIX}{layer}": r for layer, r in ratios.items()} if self.scaler else {}
        return Message({"model": model}, {"lr": self.lr_at(client_info.round, client_info.rounds), **ratio_scalars})

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """Averages each entry of the global model over the clients whose submodels contain it.

        θ[e] ← Σ_i w_i θ_i[e] / Σ_i w_i over the clients with the entry e. This is the paper's equation for its
        complexity levels.
        """
        w = {i: replies[i].scalars["num_examples"] if self.weighted else 1.0 for i in sorted(replies)}
        new_model = {}
        for name, before in server_state["model"].items():
            total, weight_held = (torch.zeros(before.shape, dtype=torch.float64) for _ in range(2))
            for i, weight in w.items():
                received = replies[i].tensors["model"][name]
                starts = self.find_window_starts(server_state, name, received.shape, "local")
                total = add_to_window(total, received, starts, alpha=weight / sum(w.values()))
                weight_held = add_to_window(weight_held, received.new_ones(received.shape), starts, alpha=weight)
            share = weight_held / sum(w.values())  # exactly 1 where all clients have the entry
            new_model[name] = torch.where(weight_held > 0, total / share, before).to(before.dtype)
        return {**server_state, "model": new_model}

    # -- client ---------------------------------------------------------------------------------------------------

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the client's submodel for `local_epochs`; replies with the trained submodel."""
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        ratios = _width_ratios_of(message)
        validate_head_width(net.module, ratios, client, type(self).__name__)
        with divide_layer_outputs_by_ratio(net.module, ratios):
            loss = self._local_loss(client, bool(ratios))
            fit_result = fit(
                net.module, client, self, lr=message.scalars["lr"], seed=seed, loss=loss, reported_loss="task"
            )
        return build_reply_and_client_state(net, client, fit_result.loss, self)

    def _local_loss(self, client: Client, has_scaler: bool) -> Callable[[ForwardPass], Tensor] | None:
        """Builds the loss that sets outputs of absent classes to 0; None if the ordinary one is enough."""
        if not (self.mask or has_scaler):
            return None
        task_loss, present = self.criterion(client), torch.unique(client.train.labels) if self.mask else None

        def loss(batch: ForwardPass) -> Tensor:
            z = batch.outputs
            if present is not None:
                z = torch.zeros_like(z).index_copy(1, present, z[:, present])
            return task_loss(z, batch.targets)

        return loss

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the submodel as a plain network, with the scales of its layers' outputs in the weights."""
        weights = fold_scaling_into_weights(message.tensors["model"], _width_ratios_of(message))
        return load_model_for_eval(client, weights, client_state, self.buffers)


def _width_ratios_of(message: Message) -> dict[str, float]:
    return {
        name.removeprefix(_RATIO_PREFIX): r for name, r in message.scalars.items() if name.startswith(_RATIO_PREFIX)
    }
