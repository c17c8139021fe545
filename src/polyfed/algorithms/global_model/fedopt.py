"""FedOpt: the server's optimiser takes the clients' mean change in a round as a gradient (Reddi, Charles, Zaheer,
Garrett, Rush, Konečný, Kumar and McMahan, ICLR 2021, algorithm 2).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from polyfed.algorithms.base.averaging import ServerState
from polyfed.algorithms.base.server_update import ServerUpdateMethod
from polyfed.core.algorithm import ServerContext
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.state_dict import StateDict

ServerOptimizer = Literal["avgm", "adagrad", "adam", "yogi"]


@final
@dataclass(frozen=True, kw_only=True)
class FedOpt(ServerUpdateMethod):
    """Trains one global model by FedAvg, except that the server uses an optimiser such as Adam, with the clients' mean
    change as its gradient.

    The step is θ ← θ + η·m/(√v + τ), where m and v are moments of the mean change Δ, which stands for minus a gradient.
    All clients have one architecture. Evaluated model: θ.

    The optimiser updates parameters only. BatchNorm's statistics are averaged as in FedAvg: a step along their changes could
    make a variance negative.

    Args:
        server: the server's optimiser: "avgm", momentum alone, with θ ← θ + η·m (FedAvgM, Hsu, Qi and Brown 2019);
            "adagrad", "adam" or "yogi" ("adam", polyfed's choice: the paper has all of them).
        server_lr: η > 0, the server's learning rate; None takes 1 with "avgm", which then is FedAvg with momentum, and 0.01
            with the others (polyfed's choice; the paper tunes it for each task, from 0.001 to 10).
        beta1: β₁ of m; None takes 0 with "adagrad", and 0.9 with the others (paper).
        beta2: β₂ of v, for "adam" and "yogi" (0.99, paper).
        tau: τ > 0, adaptivity: the smaller, the more adaptive the step. v starts at τ² (0.001, paper).
        weighted: weighs clients in Δ by their number of training examples (public implementations); False counts every
            client the same, as algorithm 2.

    The other fields are those of `LocalTraining`; `lr` is the clients' learning rate, and the paper tunes both together.

    >>> FedOpt(server="yogi", server_lr=0.03).tau
    0.001
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedopt",
        summary="FedAvg with momentum, Adagrad, Adam or Yogi at the server",
        paper="Reddi et al. 2021",
        evaluated="the average",
        stacked=True,
    )

    server: ServerOptimizer = "adam"
    server_lr: float | None = None
    beta1: float | None = None
    beta2: float = 0.99
    tau: float = 1e-3
    weighted: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._positive("server_lr")
        self._require(self.beta1 is None or 0 <= self.beta1 < 1, "beta1", "at least 0 and below 1, or none")
        self._require(0 <= self.beta2 < 1, "beta2", "at least 0 and below 1")
        self._positive("tau")
        fits = self.adapters != "svd"
        self._require(
            fits, "adapters", "'zero_pad' or 'stack', since factors of a decomposition do not add up over rounds"
        )

    @property
    def effective_server_lr(self) -> float:
        """Returns `server_lr`, or the default of the chosen optimiser if it is None."""
        return self.server_lr if self.server_lr is not None else 1.0 if self.server == "avgm" else 0.01

    @property
    def effective_beta1(self) -> float:
        """Returns `beta1`, or the default of the chosen optimiser if it is None."""
        return self.beta1 if self.beta1 is not None else 0.0 if self.server == "adagrad" else 0.9

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the initial global model θ, and the initial moments m = 0 and v = τ²."""
        state = super().server_init(server)
        first_moment = {
            n: torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for n, t in state["model"].items()
        }
        second_moment = (
            {} if self.server == "avgm" else {n: torch.full_like(m, self.tau**2) for n, m in first_moment.items()}
        )
        return {**state, "m": first_moment, "v": second_moment}

    def server_update(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Takes a step of the server's optimiser, with the mean change as minus the gradient.

        θ ← θ + η·m/(√v + τ), with Δ = Σ_i (n_i/n) θ_i − θ.
        """
        new_state: dict[str, dict[str, Tensor]] = {"model": {}, "m": {}, "v": {}}
        for name, theta in server_state["model"].items():
            precise_theta, m = theta.to(torch.float64), server_state["m"][name]
            delta = mean["model"][name].to(torch.float64) - precise_theta
            delta_weight = 1.0 if self.server == "avgm" else 1 - self.effective_beta1
            new_m = self.effective_beta1 * m + delta_weight * delta  # m ← β₁m + (1 − β₁)Δ; FedAvgM: m ← βm + Δ
            step = new_m
            if name in server_state["v"]:
                v = self._update_second_moment(server_state["v"][name].to(torch.float64), delta.square())
                step = new_m / (v.sqrt() + self.tau)
                new_state["v"][name] = v.to(m.dtype)
            new_state["model"][name] = (precise_theta + self.effective_server_lr * step).to(theta.dtype)
            new_state["m"][name] = new_m.to(m.dtype)
        return {**server_state, **new_state}

    def _update_second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Returns the new second moment from the old v and the squared change Δ².

        There is no bias correction, which the initial v = τ² replaces.
        """
        if self.server == "adagrad":
            return v + square
        if self.server == "yogi":
            return v - (1 - self.beta2) * square * (v - square).sign()
        return self.beta2 * v + (1 - self.beta2) * square
