"""Defines FedPNAS and CA-FedPNAS, which search an architecture for each client (Hoang and Kingsford, section 3.2,
algorithm 1).
"""

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor, nn

from polyfed.algorithms.base.averaging import ClientState
from polyfed.algorithms.nas.supernet_method import SMALL_SUPERNET, SupernetMethod, supernet_of
from polyfed.core.algorithm import Client, Message
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.optimizers import Adam, ParameterGroup
from polyfed.core.training.loop import fit
from polyfed.nas.operations import normalise_by_batch_without_tracking
from polyfed.nas.supernet import SamplerContext, SamplingUnit

SecondOrder = Literal["outer_product", "none"]
InnerOptimizer = Literal["sgd", "adam"]


@dataclass(frozen=True, kw_only=True)
class MetaSupernetMethod(SupernetMethod, ABC):
    """Implements FedPNAS's local update: trains a supernet so that it is good after one step that adapts its personal
    (last) cells to a client.

    The loss is L̃_i(θ_b, θ_p) = L_i(θ_b, θ̃_p) with θ̃_p = θ_p − η∇_{θ_p}L_i(θ_b, θ_p); its gradient takes two passes.

    Args:
        eta: η ≥ 0, the rate of the inner step (0.01, polyfed's choice; the paper states none, the authors' code has 0.002
            for its step of Adam). With 0 it is FedDSNAS, at twice the cost.
        inner: "sgd" is θ̃_p = θ_p − η·g (paper, section 3.2). "adam" is a step of Adam at rate η (authors' code), at first
            θ_p − η·g/(|g| + ε); its moments are reset in each round.
        second_order: "outer_product" takes g·gᵀ for the Hessian (paper, section 3.2), for either inner step: the authors'
            code differentiates a step of Adam as if it were one of SGD. "none" leaves the term out, which is first-order
            MAML (polyfed's choice).
    """

    eta: float = 0.01
    inner: InnerOptimizer = "sgd"
    second_order: SecondOrder = "outer_product"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "eta")

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the supernet by meta-learning steps (algorithm 1, CLIENTUPDATE); replies with it.

        The personal stack is the server's at the start of the round; from then on each minibatch updates it.
        """
        net = self.load_supernet(message, client_state, client)
        fit_result = fit(
            net.module, client, self, lr=message.scalars["lr"], seed=seed,
            gradient=self.build_meta_gradient_function(supernet_of(net)), lr_factor=self.sampler_lr_factor,
        )  # fmt: skip
        return self.build_reply_and_client_state(net, client, fit_result.loss)

    def build_meta_gradient_function(self, supernet: nn.Module) -> Callable[[Callable[[int], Tensor]], Tensor]:
        """Returns the function that writes the meta-gradient, and returns the loss after the inner step.

        The gradient is that of L̃, and the loss that at θ̃_p.

        Parameters named `personal...` are θ_p.
        """
        personal = [p for n, p in supernet.named_parameters() if n.startswith("personal.")]
        take_inner_step = self._build_inner_step(personal)

        def compute_meta_gradient(loss_of: Callable[[int], Tensor]) -> Tensor:
            theta = [p.detach().clone() for p in personal]
            with normalise_by_batch_without_tracking(supernet):  # BatchNorm tracks one pass per step
                loss_of(0)  # line 10: L and ∇L at (θ_b, θ_p)
            g = [p.grad for p in personal]
            take_inner_step()  # line 11: θ̃_p
            loss = loss_of(0)  # line 12: L̃ and ∇L̃ at (θ_b, θ̃_p), on operations drawn again
            with torch.no_grad():
                for parameter, start in zip(personal, theta, strict=True):
                    parameter.copy_(start)
                if self.second_order == "outer_product":
                    self._add_second_order_term(personal, g)
            return loss

        return compute_meta_gradient

    def _build_inner_step(self, personal: list[nn.Parameter]) -> Callable[[], None]:
        """Builds the function that takes the personal stack's inner step (line 11, GRADUPDATE).

        The step is θ_p − η∇L, or one of Adam, which keeps its moments. Adam's moments go on from minibatch to
        minibatch.
        """
        if self.inner == "adam":
            return Adam([ParameterGroup(personal, self.eta)]).step

        @torch.no_grad()
        def descend() -> None:
            for parameter in personal:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=self.eta)

        return descend

    def _add_second_order_term(self, personal: list[nn.Parameter], g: list[Tensor | None]) -> None:
        """Adds the second-order term of the meta-gradient to the gradients of the personal stack (line 13).

        ∇_{θ_p}L̃ ≃ (I − η·g·gᵀ)·g̃ = g̃ − η·g·(gᵀg̃). It is one product over all of θ_p (appendix E: α). Weights of
        operations that only the first pass drew stay without a gradient (polyfed's choice): −η·α·g is tiny, but Adam
        would make a whole step of it, as often away from the minimum as towards it, and momentum and weight decay would
        move them too.
        """
        alpha = sum(
            (s * p.grad).sum() for p, s in zip(personal, g, strict=True) if s is not None and p.grad is not None
        )
        for parameter, gradient in zip(personal, g, strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad = parameter.grad - self.eta * alpha * gradient


@final
@dataclass(frozen=True, kw_only=True)
class FedPNAS(MetaSupernetMethod):
    """Searches an architecture for each client: all train a common supernet so that it adapts well, and each client
    adapts its last cells before evaluation.

    The samplers are context-free: each minibatch draws one architecture from learnable probabilities. Evaluated model:
    the most probable architecture after `finetune_epochs` of the personal stack on the client's data; next to it the
    one that came from the server, as `server_...`. Neither θ nor the replies depend on that adaptation.

    Args:
        sampler_lr: learning rate of the samplers (0.2, polyfed's choice): if probabilities hardly change, the weights must
            suit all operations at once.

    The other fields are those of `MetaSupernetMethod`, `SupernetMethod` and `LocalTraining`; clients' own networks are
    not used.

    >>> FedPNAS(eta=0.05).second_order
    'outer_product'
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedpnas",
        summary="Searches an architecture that each client adapts",
        paper="Hoang and Kingsford 2021",
        evaluated="the most probable architecture, adapted; also not",
        small=SMALL_SUPERNET,
        leaderboard={},
    )

    sampler_lr: float | None = 0.2


@final
@dataclass(frozen=True, kw_only=True)
class CAFedPNAS(MetaSupernetMethod):
    """Searches architectures as FedPNAS does, but chooses the operations of the network separately for each example
    (context-aware samplers, section 3.3): the paper's method.

    Evaluated model: the supernet after `finetune_epochs` of the personal stack, which takes the most probable
    operations for each example; next to it the one that came from the server, as `server_...`.

    Args:
        per: training draws an architecture for each "example" (paper), or one for the whole "batch" from the mean of its
            probabilities, which is faster (authors' code).
        sampler_lr: learning rate of the samplers (0.05, polyfed's choice, for the same reason as in FedPNAS).

    The other fields are those of `MetaSupernetMethod`, `SupernetMethod` and `LocalTraining`; clients' own networks are
    not used.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="ca_fedpnas",
        summary="FedPNAS with operations chosen for each image",
        paper="Hoang and Kingsford 2021",
        evaluated="the supernet, adapted; also not",
        small=SMALL_SUPERNET,
        leaderboard={},
    )

    context: ClassVar[SamplerContext] = "aware"
    per: SamplingUnit = "example"
    sampler_lr: float | None = 0.05

    def _sampling_unit(self) -> SamplingUnit:
        return self.per
