"""FedAvg: clients train the global model, the server averages (McMahan et al., AISTATS 2017, algorithm 1)."""

from dataclasses import dataclass
from typing import ClassVar, final

from polyfed.algorithms.base.averaging import AveragedOver, GlobalModelMethod
from polyfed.core.method_card import MethodCard


@final
@dataclass(frozen=True, kw_only=True)
class FedAvg(GlobalModelMethod):
    """The mean of the clients' models, weighted by examples: θ ← Σ_i (n_i/n) θ_i, θ_i being θ after local training. One
    architecture. Evaluated model: θ. The base `Averaging` is this method.

    Args:
        weighted: by the number of training examples (the paper); False counts every client the same.
        final: which mean is the result: "cohort", that of the last round's clients (paper), or "all", that of all clients'
            latest models, for which the server keeps each of them (see `GlobalModelMethod`).

    The other fields are those of `LocalTraining`.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedavg",
        summary="The average of the clients' models, weighted by examples",
        paper="McMahan et al. 2017",
        evaluated="the average",
        stacked=True,
    )

    weighted: bool = True
    final: AveragedOver = "cohort"
