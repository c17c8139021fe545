"""Defines FedDSNAS and CA-FedDSNAS, which search an architecture for all clients by DSNAS (Hoang and Kingsford, eq. 3):
as FedPNAS does, but not trained for adaptation to clients.
"""

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar, final

from polyfed.algorithms.base.averaging import ClientState
from polyfed.algorithms.nas.supernet_method import SMALL_SUPERNET, SupernetMethod
from polyfed.core.algorithm import Client, Message
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.training.loop import fit
from polyfed.nas.supernet import SamplerContext, SamplingUnit


@dataclass(frozen=True, kw_only=True)
class AveragedSupernetMethod(SupernetMethod, ABC):
    """Trains a supernet at every client without adaptation to it, and averages the weights and probabilities (FedAvg)."""

    finetune_epochs: int = 0

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the supernet with random architectures; replies with it.

        These are steps on L_k(W, Π), with architectures drawn by eq. 2, and lead to θ^k.
        """
        net = self.load_supernet(message, client_state, client)
        fit_result = fit(
            net.module, client, self, lr=message.scalars["lr"], seed=seed, lr_factor=self.sampler_lr_factor
        )
        return self.build_reply_and_client_state(net, client, fit_result.loss)


@final
@dataclass(frozen=True, kw_only=True)
class FedDSNAS(AveragedSupernetMethod):
    """Searches one architecture for all clients: the server averages over the clients the weights of a supernet, which
    contains all candidate operations, and the operations' probabilities (FedAvg).

    argmin_{W, Π} (1/M) Σ_i L_i(W, Π) (eq. 3). Each minibatch draws one architecture. Evaluated model: the most probable
    architecture, as it comes from the server.

    Args:
        sampler_lr: learning rate of the samplers (0.2, polyfed's choice): if probabilities hardly change, the weights must
            suit all operations at once.
        finetune_epochs: 0, no adaptation (paper).

    The other fields are those of `SupernetMethod` and `LocalTraining`; clients' own networks are not used.

    >>> FedDSNAS(channels=8).finetune_epochs
    0
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="feddsnas",
        summary="Searches one architecture for all, with shared weights",
        paper="Hoang and Kingsford 2021",
        evaluated="the most probable architecture",
        small=SMALL_SUPERNET,
        leaderboard={},
    )

    sampler_lr: float | None = 0.2


@final
@dataclass(frozen=True, kw_only=True)
class CAFedDSNAS(AveragedSupernetMethod):
    """Searches architectures as FedDSNAS does, but chooses the operations of the network separately for each example
    (context-aware samplers, section 3.3).

    Evaluated model: the supernet, which takes the most probable operations for each example.

    Args:
        per: training draws an architecture for each "example" (paper), or one for the whole "batch" from the mean of its
            probabilities, which is faster (authors' code).
        sampler_lr: learning rate of the samplers (0.05, polyfed's choice, for the same reason as in FedDSNAS).
        finetune_epochs: 0, no adaptation (paper).

    The other fields are those of `SupernetMethod` and `LocalTraining`; clients' own networks are not used.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="ca_feddsnas",
        summary="FedDSNAS with operations chosen for each image",
        paper="Hoang and Kingsford 2021",
        evaluated="the supernet",
        small=SMALL_SUPERNET,
        leaderboard={},
    )

    context: ClassVar[SamplerContext] = "aware"
    per: SamplingUnit = "example"
    sampler_lr: float | None = 0.05

    def _sampling_unit(self) -> SamplingUnit:
        return self.per
