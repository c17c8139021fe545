"""FedDF: the server averages the clients' models by architecture, and distils the mean outputs of all of them into each
average (Lin, Kong, Stich and Jaggi, NeurIPS 2020, "Ensemble Distillation for Robust Model Fusion in Federated
Learning", algorithm 3 in appendix B).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from polyfed.algorithms.base.averaging import Averaging, ServerState
from polyfed.algorithms.distillation.output_matching import fit_to_targets, softened_kl_divergence
from polyfed.core.algorithm import Architecture, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.examples.examples import Examples
from polyfed.core.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy
from polyfed.core.nn.module_cache import (
    cached_module,
    copy_trained_weights_and_buffers,
    fill_module,
    initial_state,
    restore_all_but_weights_and_set_eval,
)
from polyfed.core.seeds import derive_seed
from polyfed.core.state_dict import StateDict
from polyfed.core.training.config import LocalTraining

# The server keeps "model": θ^p by architecture; "seed" of the run; "round"


@final
@dataclass(frozen=True, kw_only=True)
class FedDF(Averaging):
    """Trains one model for each architecture: by FedAvg among the clients with this architecture, then by distilling
    all clients' models into it on the server's public examples.

    The server trains each average θ^p on KL(σ(mean_i f(θ_i, x)) ‖ σ(f(θ^p, x))) over public examples x, where p is the
    architecture, and the mean is over the outputs of all clients of the round, of whatever architecture. With
    `server_steps` = 0 it is FedAvg among the clients of each architecture, bit for bit. Evaluated model: θ^p.

    Models of architectures that no client of the round has are distilled, too (polyfed's choice). The clients' models run in
    evaluation mode; the student is in training mode, so that its BatchNorm statistics also come from public examples.

    Args:
        server_steps: steps of distillation for each architecture in a round (500, polyfed's choice; the paper has up to
            10,000, with early stopping on labelled examples at the server).
        server_lr: learning rate of these steps, by Adam (0.001, paper, with a cosine schedule; here it is constant).
        server_batch_size: public examples in a step (128, authors' code); 0 takes all.
        weighted: weighs clients by their number of training examples (True, paper); False counts every client the same. The
            mean of outputs is unweighted (paper).
        buffers: "average" only (polyfed's choice): the server runs the clients' models.

    The other fields are those of `LocalTraining`.

    >>> sorted(FedDF(server_steps=100).discloses)
    ['architecture', 'weights']
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="feddf",
        summary="FedAvg by architecture, then distilled on public examples",
        paper="Lin et al. 2020",
        evaluated="the average of its architecture",
        small={"server_steps": 5},
        leaderboard={"*": {"server_steps": 50}},
        stacked=True,
    )

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
        """Returns the server state before round 1: an initial model for each architecture; raises a `UserError` if
        these differ in their number of outputs.
        """
        assert server.architectures is not None  # `requires` names both
        assert server.public is not None
        initial_models = {
            key: initial_state(factory, server.seed) for key, factory in sorted(server.architectures.items())
        }
        example = server.public.head()
        num_outputs = {
            key: _predict_public(server.architectures[key], tree, example).shape[1]
            for key, tree in initial_models.items()
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
                f"FedDF: the network of {first!r} has {outputs_by_client[first]} outputs, that of {second!r} "
                f"{outputs_by_client[second]}, which cannot be averaged; give all networks the same number of outputs, one "
                "for each class of the federation"
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
        """Averages the clients' models of each architecture, then distils the mean output of all models into each
        average for `server_steps`; returns the new server state.
        """
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
        client_models = [
            (server.architectures[architecture_by_client[i]], replies[i].tensors["model"]) for i in sorted(replies)
        ]
        mean_outputs = torch.stack(
            [_predict_public(factory, tree, server.public) for factory, tree in client_models]
        ).mean(0)
        options = LocalTraining(local_steps=self.server_steps, batch_size=self.server_batch_size, optimizer="adam")
        seed = derive_seed(server_state["seed"], round_number, "server")
        for key, tree in models.items():
            student = fill_module(cached_module(server.architectures[key]).module, tree)
            fit_to_targets(
                student, server.public, mean_outputs, options, lr=self.server_lr, seed=seed, distance=_kl_divergence
            )
            models[key] = copy_trained_weights_and_buffers(student)
        return {**server_state, "model": models, "round": round_number}


def _predict_public(factory: Architecture, tree: StateDict, examples: Examples) -> Tensor:
    """Returns the logits of a client's model on public examples."""
    return predict(restore_all_but_weights_and_set_eval(fill_module(cached_module(factory).module, tree)), examples)


def _kl_divergence(teacher: Tensor, student: Tensor) -> Tensor:
    return softened_kl_divergence(teacher, student, 1.0)
