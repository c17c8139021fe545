"""MOON: a contrastive loss keeps clients' representations near the global model's (Li, He and Song, CVPR 2021)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.algorithms.base.averaging import AveragedOver, ClientState, GlobalModelMethod, build_reply_and_client_state
from polyfed.alignment.representations import check_has_representation, representation_module_name
from polyfed.core.algorithm import Client, Message
from polyfed.core.errors import UserError
from polyfed.core.methods.capabilities import ValidatesNetworks
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import load_client_model
from polyfed.core.nn.deep_copy import deep_copy
from polyfed.core.nn.module_cache import copy_trained_weights_and_buffers, fill_module
from polyfed.core.training.loop import ForwardPass, fit
from polyfed.models.structure import compute_batch_representation


@final
@dataclass(frozen=True, kw_only=True)
class Moon(GlobalModelMethod, ValidatesNetworks):
    """Trains one global model by FedAvg, with a contrastive loss that keeps each client's representations near the
    global model's.

    Client i minimises L_i + μ·ℓ_con (eq. 4); the server averages as FedAvg.

    ℓ_con (eq. 3) pulls the representation of an example towards the global model's, and away from that of the client's
    own model of its last round. All clients have one architecture. With μ = 0 it is FedAvg, bit for bit. Evaluated
    model: the average θ.

    The representation is the input of the network's last linear layer; the paper adds a projection head of two layers to its
    networks, which here users add themselves. In a client's first round there is no previous model and no ℓ_con.

    Args:
        mu: μ ≥ 0 (1, paper: the best on two of its three data sets; it chooses among 0.1, 1, 5 and 10).
        tau: τ > 0, the temperature (0.5, paper).
        module: name of the module whose input is the representation; None finds the last linear layer (polyfed's choice).
        weighted: weighs clients by their number of training examples (paper); False counts every client the same.
        averaged_over: the clients over which the result is averaged: "cohort", those of the last round (paper), or
            "all", with their latest models, which the server then stores (see `GlobalModelMethod`).

    The other fields are those of `LocalTraining`. Each minibatch goes through three networks.

    >>> Moon(mu=5.0).tau
    0.5
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="moon",
        summary="FedAvg with a contrastive loss on representations",
        paper="Li et al. 2021",
        evaluated="the average",
        published=frozenset({"previous"}),
    )

    clients_keep_trained_weights: ClassVar[bool] = True
    mu: float = 1.0
    tau: float = 0.5
    module: str | None = None
    weighted: bool = True
    averaged_over: AveragedOver = "cohort"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "mu")
        self._positive("tau")

    def validate_network(self, client: Client) -> None:
        """Raises a `UserError` unless a module's input can serve as an example's representation."""
        if self.mu:
            check_has_representation(client, self.module)

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the received model with the contrastive loss; replies with it, and stores it in the state.

        Raises:
            UserError: the named `module` is missing.
        """
        net, lr = load_client_model(client, message.tensors["model"], client_state, self.buffers), message.scalars["lr"]
        loss, name = None, None
        if self.mu and "previous" in client_state:
            name = representation_module_name(net.module, client.train) if self.module is None else self.module
            if name not in dict(net.module.named_modules()):
                raise UserError(f"Moon: module={name!r}: the network of {client.id!r} has no such module; name another")
            reference_networks = [deep_copy(net.module), fill_module(deep_copy(net.module), client_state["previous"])]
            loss = self._contrastive_loss(client, reference_networks, name)
        fit_result = fit(
            net.module, client, self, lr=lr, seed=seed, loss=loss, representation=name, reported_loss="task"
        )
        reply, buffer_state = build_reply_and_client_state(net, client, fit_result.loss, self)
        return reply, {**buffer_state, "previous": copy_trained_weights_and_buffers(net.module)}

    def _contrastive_loss(
        self, client: Client, reference_networks: list[nn.Module], name: str
    ) -> Callable[[ForwardPass], Tensor]:
        """Builds the task's loss plus the contrastive loss μ·ℓ_con of a minibatch.

        `reference_networks` are the global model and the client's previous one.
        """
        criterion = self.criterion(client)

        def loss(batch: ForwardPass) -> Tensor:
            assert batch.representation is not None
            z = batch.representation.flatten(1)
            with torch.no_grad():  # BatchNorm normalises by the minibatch, as for z; no dropout
                references = [
                    compute_batch_representation(net, batch.inputs, module=name, batch_statistics=True)
                    for net in reference_networks
                ]
            similarities = (
                torch.stack([F.cosine_similarity(z, reference) for reference in references], dim=1) / self.tau
            )
            # ℓ_con = −log( e^{sim(z, z_glob)/τ} / (e^{sim(z, z_glob)/τ} + e^{sim(z, z_prev)/τ}) )   (eq. 3)
            contrast = F.cross_entropy(similarities, torch.zeros(len(z), dtype=torch.int64, device=z.device))
            return criterion(batch.outputs, batch.targets) + self.mu * contrast

        return loss
