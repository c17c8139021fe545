"""FedAvg: clients train the global model, and the server averages (McMahan et al., AISTATS 2017, algorithm 1)."""

from dataclasses import dataclass
from typing import ClassVar, final

from polyfed.algorithms.base.averaging import AveragedOver, GlobalModelMethod
from polyfed.core.methods.method_card import MethodCard


@final
@dataclass(frozen=True, kw_only=True)
class FedAvg(GlobalModelMethod):
    """Trains one global model: each client trains it on its own data, and the server averages the results, weighted by
    the numbers of examples.

    θ ← Σ_i (n_i/n) θ_i, where θ_i is θ after local training.

    All clients have one architecture. Evaluated model: θ. The base `Averaging` is this method.

    Args:
        weighted: weighs clients by their number of training examples (the paper); False counts every client the same.
        averaged_over: the clients over which the result is averaged: "cohort", those of the last round (paper), or
            "all", with their latest models, which the server then stores (see `GlobalModelMethod`).

    The other fields are those of `LocalTraining`.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedavg",
        summary="The average of the clients' models, weighted by examples",
        paper="McMahan et al. 2017",
        evaluated="the average",
        stacked=True,
    )
    private_fits: ClassVar[tuple[str, ...]] = ("local_epochs",)

    weighted: bool = True
    averaged_over: AveragedOver = "cohort"
