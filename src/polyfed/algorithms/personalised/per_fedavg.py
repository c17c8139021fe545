"""Per-FedAvg: trains by meta-learning a global model that is good after one step on a client's data (Fallah, Mokhtari
and Ozdaglar, NeurIPS 2020, algorithm 1).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch
from torch import Tensor, nn

from polyfed.algorithms.base.averaging import ClientState, EvaluatesGlobalModel, build_reply_and_client_state
from polyfed.algorithms.base.parameters import assign_parameters, clone_buffers, restore_buffers
from polyfed.core.algorithm import Client, Message
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import (
    BufferPolicy,
    load_client_model,
    recompute_norm_statistics,
    recompute_norm_statistics_if_needed,
)
from polyfed.core.training.loop import fit
from polyfed.core.vectorized.deferred_calls import PerClientTerm
from polyfed.core.vectorized.stacked_module import get_network_rng_states, set_network_rng_states

MetaGradientVariant = Literal["fo", "hf"]


@final
@dataclass(frozen=True, kw_only=True)
class PerFedAvg(EvaluatesGlobalModel):
    """Trains a global model by meta-learning, so that it is good for each client after one gradient step on the
    client's data.

    Minimises mean_i f_i(w − α∇f_i(w)) over w, where f_i is client i's loss (eq. 3). All clients have one architecture.
    Evaluated model: w after `adapt_steps` steps of rate α on the client's training data, never on its test data; next
    to it w itself, as `server_...`. Neither w nor the replies depend on that adaptation.

    With α = 0 a step descends ∇f(w; D') alone: with `batch_size: 0`, where D = D', w is that of FedAvg, bit for bit.

    Args:
        variant: "fo" (first order, 2 minibatches and gradients per step) omits the Hessian; "hf" (Hessian-free, 3
            minibatches and 4 gradients) replaces its product with a vector by a difference of two gradients (both paper).
        alpha: α ≥ 0 of the inner step and of the adaptation (0.01, paper, for MNIST), the same in all rounds; `schedule`
            applies to `lr`, which is β.
        delta: δ > 0 of the finite difference of "hf" (0.001, polyfed's choice).
        adapt_steps: steps before evaluation (1, paper), plain SGD, each on one minibatch of `batch_size` as in training;
            with `batch_size` 0, the full batch, it is the step of eq. (3).
        weighted: weighs clients by their number of training examples; False counts every client the same (paper).
        buffers: "local" (polyfed's choice), as in every personalised method. In training BatchNorm's statistics are updated
            once per step, at w̃ on D'; the adaptation updates them as `fedavg_ft` does.

    The other fields are those of `LocalTraining`. `local_steps` counts steps, not their minibatches.

    >>> PerFedAvg(variant="hf", lr=0.001).alpha
    0.01
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="per_fedavg",
        summary="Meta-learning: a model that is good after one step",
        paper="Fallah et al. 2020",
        evaluated="the model after that step; also before it",
        stacked=True,
    )

    variant: MetaGradientVariant = "fo"
    alpha: float = 0.01
    delta: float = 1e-3
    adapt_steps: int = 1
    weighted: bool = False
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "alpha")
        self._positive("delta")
        self._at_least(1, "adapt_steps")

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the global model by meta-learning steps with trial steps; replies with it.

        w ← w − β(I − α∇²f(w; D''))∇f(w̃; D'), with w̃ = w − α∇f(w; D).
        """
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        fit_result = fit(
            net.module, client, self, lr=message.scalars["lr"], seed=seed,
            gradient=PerClientTerm(self._meta_gradient), batches_per_step=2 if self.variant == "fo" else 3,
        )  # fmt: skip
        return build_reply_and_client_state(net, client, fit_result.loss, self)

    def _meta_gradient(self, module: nn.Module, loss_of: Callable[[int], Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """Writes the meta-gradient to the parameters' `grad`; returns the loss at w̃ on D'."""
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

        def loss_and_gradient_at(points: list[Tensor], batch: int) -> tuple[Tensor, list[Tensor]]:
            """Sets the network's parameters to `points`, and returns loss and gradient there."""
            assign_parameters(parameters, points)
            loss = loss_of(batch)
            return loss, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]

        w, buffers_before = [parameter.detach().clone() for parameter in parameters], clone_buffers(module)
        _, inner_gradient = loss_and_gradient_at(w, 0)  # ∇f(w; D)
        restore_buffers(module, buffers_before)
        # ∇f(w̃; D'), the direction of "fo"
        loss, outer_gradient = loss_and_gradient_at(_add_scaled(w, inner_gradient, -self.alpha), 1)
        if self.variant == "hf":
            # Both passes start from the same buffers and draw the same dropout: dividing by 2δ would magnify any other
            # difference.
            buffers_after, rng_states = clone_buffers(module), get_network_rng_states(module, w[0].device)
            _, gradient_ahead = loss_and_gradient_at(_add_scaled(w, outer_gradient, self.delta), 2)
            restore_buffers(module, buffers_after)
            set_network_rng_states(module, w[0].device, rng_states)
            _, gradient_behind = loss_and_gradient_at(_add_scaled(w, outer_gradient, -self.delta), 2)
            restore_buffers(module, buffers_after)
            # ∇²f(w; D'')·v ≈ (∇f(w + δv; D'') − ∇f(w − δv; D''))/(2δ), with v = ∇f(w̃; D')
            hessian_products = [
                (a - b) / (2 * self.delta) for a, b in zip(gradient_ahead, gradient_behind, strict=True)
            ]
            outer_gradient = _add_scaled(outer_gradient, hessian_products, -self.alpha)
        with torch.no_grad():
            for parameter, point, gradient in zip(parameters, w, outer_gradient, strict=True):
                parameter.copy_(point)
                parameter.grad = gradient
        return loss

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the global model after `adapt_steps` gradient steps on the client's data.

        A step is w − α∇f_i(w).
        """
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        recompute_norm_statistics_if_needed(net, client, client_state, self.buffers)
        options = replace(
            self, local_steps=self.adapt_steps, optimizer="sgd", optimizer_options=None, momentum=0.0, nesterov=False,
            weight_decay=0.0, lr_by_name=None, warmup_steps=0, accumulate=1, patience=None,
        )  # fmt: skip
        fit(net.module, client, options, lr=self.alpha, seed=seed)
        if self.buffers == "recompute":
            recompute_norm_statistics(net.module, client.train)
        return net.module


def _add_scaled(points: list[Tensor], directions: list[Tensor], scale: float) -> list[Tensor]:
    return [point + scale * step for point, step in zip(points, directions, strict=True)]
