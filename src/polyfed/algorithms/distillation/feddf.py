"""FedDF: the server averages the clients' models by architecture, and distils the mean outputs of all of them into each
average (Lin, Kong, Stich and Jaggi, NeurIPS 2020, "Ensemble Distillation for Robust Model Fusion in Federated
Learning", algorithm 3 in appendix B).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from polyfed.algorithms.distillation.base.ensemble_distillation import EnsembleDistillationMethod
from polyfed.algorithms.distillation.base.output_matching import fit_to_targets, softened_kl_divergence
from polyfed.core.algorithm import ServerContext
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.module_cache import cached_module, copy_trained_weights_and_buffers, fill_module
from polyfed.core.state_dict import StateDict


@final
@dataclass(frozen=True, kw_only=True)
class FedDF(EnsembleDistillationMethod):
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

    def distil(
        self, architecture: str, weights: StateDict, outputs: Mapping[str, Tensor], server: ServerContext, seed: int
    ) -> StateDict:
        """Trains the average θ^p of one architecture on the round's mean outputs over all architectures."""
        assert server.architectures is not None
        assert server.public is not None
        student = fill_module(cached_module(server.architectures[architecture]).module, weights)
        targets = torch.stack(list(outputs.values())).mean(0)
        fit_to_targets(
            student,
            server.public,
            targets,
            self.distillation_options,
            lr=self.server_lr,
            seed=seed,
            distance=_kl_divergence,
        )
        return copy_trained_weights_and_buffers(student)


def _kl_divergence(teacher: Tensor, student: Tensor) -> Tensor:
    return softened_kl_divergence(teacher, student, 1.0)
