"""Provides the base class of methods whose server averages the clients' models by architecture, and distils the outputs of
all of them into each average on public examples: FedDF and TAKFL.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from polyfed.algorithms.base.averaging import Averaging, ServerState
from polyfed.core.algorithm import Architecture, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.examples.examples import Examples
from polyfed.core.nn.buffers import BufferPolicy
from polyfed.core.nn.module_cache import cached_module, fill_module, initial_state, restore_all_but_weights_and_set_eval
from polyfed.core.seeds import derive_seed
from polyfed.core.state_dict import StateDict
from polyfed.core.training.config import LocalTraining

# The server keeps "model": θ^p by architecture; "seed" of the run; "round"


@dataclass(frozen=True, kw_only=True)
class EnsembleDistillationMethod(Averaging, ABC):
    """Trains one model for each architecture: by FedAvg among the clients with this architecture, then by distilling
    all clients' models into it on the server's public examples (`distil`).

    With `server_steps` = 0 it is FedAvg among the clients of each architecture, bit for bit. Models of architectures that
    no client of the round has are distilled, too (polyfed's choice). The clients' models run in evaluation mode.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"architectures", "public_data", "classification"})
    discloses: ClassVar[frozenset[str]] = frozenset({"architecture", "weights"})
    server_steps: int = 500
    server_lr: float = 0.001
    server_batch_size: int = 128
    weighted: bool = True
    buffers: BufferPolicy = "average"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.server_steps >= 0, "server_steps", "at least 0 (0 is FedAvg by architecture)")
        self._positive("server_lr")
        self._require(self.server_batch_size >= 0, "server_batch_size", "at least 1, or 0 for all public examples")
        self._require(self.buffers == "average", "buffers", "'average', since the server runs the clients' models")

    @property
    def aggregates_by_sum(self) -> bool:
        """Returns False, since the server needs each client's model, not only their sum."""
        return False

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns an initial model for each architecture.

        Raises:
            UserError: the architectures differ in their number of outputs.
        """
        assert server.architectures is not None  # `requires` names both
        assert server.public is not None
        initial_models = {
            key: initial_state(factory, server.seed) for key, factory in sorted(server.architectures.items())
        }
        example = server.public.head()
        num_outputs = {
            key: predict_public(server.architectures[key], weights, example).shape[1]
            for key, weights in initial_models.items()
        }
        if len(set(num_outputs.values())) > 1:
            outputs_by_client = {
                client_info.id: num_outputs[client_info.architecture or ""] for client_info in server.clients
            }
            first, second = (
                next(i for i in outputs_by_client if outputs_by_client[i] == width)
                for width in list(dict.fromkeys(outputs_by_client.values()))[:2]
            )
            raise UserError(
                f"{type(self).__name__}: the network of {first!r} has {outputs_by_client[first]} outputs, that of "
                f"{second!r} {outputs_by_client[second]}, which cannot be averaged; give all networks the same number of "
                "outputs, one for each class of the federation"
            )
        return {"model": initial_models, "seed": server.seed, "round": 0}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the message to a client: the current model of its architecture, and the learning rate of the round."""
        return Message(
            {"model": server_state["model"][client_info.architecture]},
            {"lr": self.lr_at(client_info.round, client_info.rounds)},
        )

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """Averages the models of each architecture, then distils all models' outputs into each average."""
        assert server.architectures is not None
        assert server.public is not None
        architecture_by_client = {client_info.id: client_info.architecture or "" for client_info in server.clients}
        models, round_number = dict(server_state["model"]), server_state["round"] + 1
        for key in sorted({architecture_by_client[i] for i in replies}):
            models[key] = self._average_by_client(
                {i: replies[i].tensors["model"] for i in sorted(replies) if architecture_by_client[i] == key}, replies
            )
        if not self.server_steps:
            return {**server_state, "model": models, "round": round_number}
        outputs = {
            i: predict_public(
                server.architectures[architecture_by_client[i]], replies[i].tensors["model"], server.public
            )
            for i in sorted(replies)
        }
        seed = derive_seed(server_state["seed"], round_number, "server")
        for key, weights in models.items():
            models[key] = self.distil(key, weights, outputs, server, seed)
        return {**server_state, "model": models, "round": round_number}

    @abstractmethod
    def distil(
        self, architecture: str, weights: StateDict, outputs: Mapping[str, Tensor], server: ServerContext, seed: int
    ) -> StateDict:
        """Returns the model of an architecture after distillation.

        Args:
            architecture: its key in `server.architectures`.
            weights: the average of its clients' models, or the last model if the round had none.
            outputs: for each client of the round, in the order of ids, the outputs of its model on all public examples.
            server: the architectures, the clients and the public examples.
            seed: of the round.
        """

    @property
    def distillation_options(self) -> LocalTraining:
        """Returns the options with which a student is trained on public examples: steps and batch size of Adam."""
        return LocalTraining(local_steps=self.server_steps, batch_size=self.server_batch_size, optimizer="adam")


def predict_public(factory: Architecture, weights: StateDict, examples: Examples) -> Tensor:
    """Returns the logits of a client's model on public examples."""
    return predict(restore_all_but_weights_and_set_eval(fill_module(cached_module(factory).module, weights)), examples)
