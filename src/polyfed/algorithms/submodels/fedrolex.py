"""FedRolex: clients train submodels of one global model, whose units are a window that rolls on from round to round (Alam,
Liu, Yan and Zhang, NeurIPS 2022, "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction",
arXiv 2212.01548).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from torch import nn

from polyfed.algorithms.base.averaging import ServerState
from polyfed.algorithms.submodels.width_submodel import WidthSubmodelMethod
from polyfed.algorithms.submodels.widths import CONVOLUTIONS, widest_shape_by_tensor
from polyfed.core.algorithm import Message, ServerContext
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy
from polyfed.core.nn.module_cache import cached_module

# The server keeps what HeteroFL keeps, and "round": how many were aggregated; "blocks": inputs a unit of the layer before


@final
@dataclass(frozen=True, kw_only=True)
class FedRolex(WidthSubmodelMethod):
    """Trains one global model. Each client trains a submodel as wide as it can afford, of other units in each round, so
    that all units of the global model are trained evenly.

    In round j = 0, 1, ... a client with k of the K units of a layer has the units j, j + 1, ..., j + k − 1 modulo K. The
    client's network gives k, and the widest network K. Each entry of the global model θ becomes the mean over the clients of
    the round that have it, and does not change if none has. The scaler, the mask and the statistics of BatchNorm are
    HeteroFL's. With one width, `weighted`, and all classes at each client it is FedAvg, bit for bit. Evaluated model: the
    client's submodel of the last round's units, with its scaler; for the widest client this is θ.

    The networks of all clients must have the same layers and differ in width alone. A linear layer that follows a
    convolution directly (with the channels' pixels as its inputs) has all pixels of the window's channels.

    Args:
        scaler: divides outputs by r (True, authors' code, as HeteroFL); False does not.
        mask: sets the outputs of absent classes to 0 in the loss (True, authors' code, as HeteroFL); False does not.
        weighted: weighs clients by their number of training examples (False, authors' code: all clients that have an entry
            count the same).
        buffers: "recompute" estimates the statistics of evaluation on the client's training data (polyfed's choice); or
            "local".

    The other fields are those of `LocalTraining`.

    >>> sorted(FedRolex(mask=False).requires)
    ['architectures', 'one_family', 'one_input_spec']
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedrolex",
        summary="Clients train windows of one model, which roll each round",
        paper="Alam et al. 2022",
        evaluated="the client's last window",
        leaderboard={},
    )

    scaler: bool = True
    mask: bool = True
    weighted: bool = False
    buffers: BufferPolicy = "recompute"

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the server state before round 1: the global model as in HeteroFL, and the number of the round."""
        state = super().server_init(server)
        assert server.architectures is not None  # `requires` names "architectures"
        shapes, factory = widest_shape_by_tensor(server.architectures), next(iter(server.architectures.values()))
        return {**state, "round": 0, "blocks": inputs_per_unit(cached_module(factory).module, shapes)}

    def find_window_starts(
        self, server_state: ServerState, name: str, shape: Sequence[int], purpose: Literal["local", "personal"]
    ) -> tuple[int, ...]:
        """Returns the first unit of the window in each dimension: j mod K for k < K units of K, and 0 for all of them.

        A network that is evaluated has the window with which it was trained last.
        """
        j = server_state["round"] - (purpose == "personal" and server_state["round"] > 0)
        starts = []
        for dimension, (k, size) in enumerate(zip(shape, server_state["model"][name].shape, strict=True)):
            block = server_state["blocks"].get(name, 1) if dimension == 1 else 1
            starts.append(0 if k == size else j % (size // block) * block)
        return tuple(starts)

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """Averages each entry over the clients whose windows contain it, and rolls the windows on by one unit."""
        return {**super().aggregate(server_state, replies, server), "round": server_state["round"] + 1}


def inputs_per_unit(network: nn.Module, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Returns `{weight: inputs a channel}` of linear layers that get several numbers of a convolution's channels.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(36, 5), nn.Linear(5, 10))
    >>> inputs_per_unit(net, {name: tensor.shape for name, tensor in net.state_dict().items()})
    {'2.weight': 9}
    """
    blocks, channels = {}, 0
    for name, layer in network.named_modules():
        weight = f"{name}.weight"
        if isinstance(layer, CONVOLUTIONS) and weight in shapes:
            channels = shapes[weight][0]
        elif isinstance(layer, nn.Linear) and weight in shapes:
            inputs = shapes[weight][1]
            if channels and inputs != channels and inputs % channels == 0:
                blocks[weight] = inputs // channels
            channels = 0
    return blocks
