"""APFL: gives each client a learnt mixture of its local model and the global model (Deng, Kamani and Mahdavi 2020,
algorithm 1).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from polyfed.algorithms.base.averaging import ClientState, EvaluatesGlobalModel, build_reply_and_client_state
from polyfed.algorithms.base.parameters import (
    assign_parameters,
    clone_buffers,
    copy_trained_parameters_to_cpu,
    restore_buffers,
)
from polyfed.core.algorithm import Client, Message
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy, load_client_model, load_model_for_eval
from polyfed.core.nn.module_cache import cached_module, initial_state
from polyfed.core.training.loop import fit
from polyfed.core.vectorized.deferred_calls import PerClientTerm
from polyfed.core.vectorized.stacked_module import (
    get_network_rng_states,
    reshape_to_broadcast,
    set_network_rng_states,
    sum_per_client,
)


@final
@dataclass(frozen=True, kw_only=True)
class APFL(EvaluatesGlobalModel):
    """Gives each client a mixture of its local model and the global model, with a mixing weight that is learnt for each
    client.

    The mixture is v̄_i = α_i·v_i + (1 − α_i)·w. FedAvg trains w, and the loss of the mixture trains v_i and α_i. All
    clients have one architecture. Evaluated model: v̄_i (w for a client that never took part); next to it w, as
    `server_...`.

    At each step w_i descends ∇L_i(w_i), and v_i descends the gradient of L_i(v̄_i) with respect to v_i, α_i·∇L_i(v̄_i),
    on the same minibatch. With `adaptive` off, α = 1 is training alone and α = 0 is FedAvg, bit for bit.

    Args:
        alpha: initial α_i, from 0 to 1 (0.5, polyfed's choice; the paper tries 0.25, 0.5 and 0.75).
        adaptive: whether α_i is learnt: α ← α − η⟨v − w, ∇L_i(v̄)⟩ (True, paper), once per round at its first step, clipped
            to 0 to 1 (authors' code).
        weighted: weighs clients in w by their number of training examples (True, polyfed's choice: as FedAvg); False counts
            every client the same (paper).
        buffers: "local" (polyfed's choice), as in every personalised method. BatchNorm's statistics are those of v̄_i.

    The other fields are those of `LocalTraining`. Momentum, weight decay and the optimiser apply to the step of w; v_i makes
    plain steps with the same learning rate, and `clip_norm` bounds both gradients.

    >>> APFL(alpha=0.25).adaptive
    True
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="apfl",
        summary="A learnt mixture of a local model and the global one",
        paper="Deng et al. 2020",
        evaluated="the mixture; also the global one",
        stacked=True,
    )

    clients_keep_trained_weights: ClassVar[bool] = True
    alpha: float = 0.5
    adaptive: bool = True
    weighted: bool = True
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 <= self.alpha <= 1, "alpha", "from 0 to 1")

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns a local model with common initial weights, and its mixing weight.

        They are v_i and α_i.
        """
        assert client.model is not None  # `requires` names "one_architecture"
        draw, buffers = initial_state(client.model, seed), cached_module(client.model).buffers
        v = {name: tensor for name, tensor in draw.items() if name not in buffers}
        return {"model": v, "alpha": self.alpha, "trained": False}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains global model, local model and mixing weight (algorithm 1); replies with the global model."""
        net, lr = load_client_model(client, message.tensors["model"], client_state, self.buffers), message.scalars["lr"]
        parameters = {name: p for name, p in net.module.named_parameters() if p.requires_grad}
        v = [client_state["model"][name].to(p.device, copy=True) for name, p in parameters.items()]
        alpha, alpha_is_due = v[0].new_tensor(client_state["alpha"]), v[0].new_tensor(float(self.adaptive))
        mixture_gradient = PerClientTerm(_MixtureGradient(lr), [alpha, alpha_is_due, *v])
        fit_result = fit(net.module, client, self, lr=lr, seed=seed, gradient=mixture_gradient)
        reply, buffer_state = build_reply_and_client_state(net, client, fit_result.loss, self)
        assign_parameters(list(parameters.values()), v)
        return reply, {
            **buffer_state,
            "model": copy_trained_parameters_to_cpu(net.module),
            "alpha": float(alpha),
            "trained": True,
        }

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the network to evaluate for the client: the mixture of its local model and the current global model.

        v̄_i = α_i·v_i + (1 − α_i)·w.
        """
        w = message.tensors["model"]
        mixture = (
            {name: torch.lerp(w[name], v, client_state["alpha"]) for name, v in client_state["model"].items()}
            if client_state["trained"]
            else {}
        )
        return load_model_for_eval(client, {**w, **mixture}, client_state, self.buffers)


@final
@dataclass(frozen=True)
class _MixtureGradient:
    """Computes the global model's gradient, and steps local model and mixing weight by the mixture's loss.

    It sets `grad` to ∇L(w); the tensors are α, whether its step is due, and v.
    """

    lr: float

    def __call__(self, network: nn.Module, loss_of: Callable[[int], Tensor], tensors: Sequence[Tensor]) -> Tensor:
        alpha, alpha_is_due, *v = tensors
        parameters = [p for p in network.parameters() if p.requires_grad]
        # Both passes draw the same dropout, and BatchNorm's statistics are those of v̄, which is evaluated.
        buffers, rng_states = clone_buffers(network), get_network_rng_states(network, parameters[0].device)
        loss_of(0)
        w, gradients = [p.detach().clone() for p in parameters], [p.grad for p in parameters]
        restore_buffers(network, buffers)
        set_network_rng_states(network, parameters[0].device, rng_states)
        assign_parameters(
            parameters,
            [torch.lerp(b, a, reshape_to_broadcast(alpha, b).to(b.dtype)) for a, b in zip(v, w, strict=True)],
        )
        loss = loss_of(0)
        with torch.no_grad():
            alpha_gradient = torch.zeros_like(alpha)
            for v_part, w_part, p in zip(v, w, parameters, strict=True):
                if p.grad is not None:
                    alpha_gradient += sum_per_client(network, (v_part - w_part) * p.grad)
                    # v ← v − η·∇_v L(αv + (1 − α)w).
                    v_part.add_(reshape_to_broadcast(alpha, p) * p.grad, alpha=-self.lr)
            alpha.sub_(alpha_is_due * self.lr * alpha_gradient).clamp_(0, 1)  # α ← α − η⟨v − w, ∇L(v̄)⟩
            alpha_is_due.zero_()
        assign_parameters(parameters, w)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        return loss
