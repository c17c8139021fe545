"""TAKFL: the server distils the clients of each architecture apart into each average, and adds what it learned from them
up as task vectors (Morafah et al., NeurIPS 2024, "Towards Diverse Device Heterogeneous Federated Learning via Task
Arithmetic Knowledge Integration").
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from polyfed.algorithms.distillation.base.ensemble_distillation import EnsembleDistillationMethod, predict_public
from polyfed.algorithms.distillation.base.output_matching import fit_to_targets, softened_kl_divergence
from polyfed.core.algorithm import ServerContext
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.module_cache import cached_module, copy_trained_weights_and_buffers, fill_module
from polyfed.core.state_dict import StateDict


@final
@dataclass(frozen=True, kw_only=True)
class TAKFL(EnsembleDistillationMethod):
    """Trains one model for each architecture by FedAvg among its clients. Then the server distils the clients of each
    architecture into it, one architecture after the other from the same weights, and adds up what it learned from each.

    From the average θ^p the server trains one student for each architecture q of the round, on T²·KL(q's mean outputs ‖
    student) + γ·T_self²·KL(θ^p's own outputs ‖ student) over public examples, softened by T and T_self. The task vector
    τ^q is the student's weights minus θ^p, and the new model is θ^p + Σ_q λ_q·τ^q. With `server_steps` = 0 it is FedAvg
    among the clients of each architecture, bit for bit; with one architecture, γ = 0 and T = 1 it is FedDF. Evaluated
    model: that of the client's architecture.

    Models of architectures that no client of the round has are distilled, too (polyfed's choice). The clients' models run in
    evaluation mode; the student is in training mode. A round costs `server_steps` for each pair of architectures.

    Args:
        merge: λ_q: "equal" counts all architectures the same (authors' code: its first candidate; it chooses among many by
            labelled examples at the server, which polyfed does not have), "size" in proportion to the number of their
            trained parameters (polyfed's choice).
        temperature: T (3, authors' code).
        gamma: γ, weight of the student's own first outputs, which keep it from following a noisy teacher (0.01, authors'
            code).
        self_temperature: T_self (20, authors' code).
        server_steps: steps of distillation for each pair of architectures in a round (500, polyfed's choice: as FedDF).
        server_lr: learning rate of these steps, by Adam (0.001, polyfed's choice: as FedDF; the authors' code has 0.00001
            for five passes over CIFAR-100).
        server_batch_size: public examples in a step (128, authors' code); 0 takes all.
        weighted: weighs clients of an architecture by their number of training examples (True, authors' code); False counts
            every client the same. The mean of outputs is unweighted (authors' code).
        buffers: "average" only (polyfed's choice): the server runs the clients' models.

    The other fields are those of `LocalTraining`.

    >>> sorted(TAKFL(server_steps=100).discloses)
    ['architecture', 'weights']
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="takfl",
        summary="Each architecture's clients are distilled apart and added up",
        paper="Morafah et al. 2024",
        evaluated="the model of its architecture",
        small={"server_steps": 5},
        leaderboard={"*": {"server_steps": 50}},
        stacked=True,
    )

    merge: Literal["equal", "size"] = "equal"
    temperature: float = 3.0
    gamma: float = 0.01
    self_temperature: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._positive("temperature", "self_temperature")
        self._at_least(0, "gamma")

    def distil(
        self, architecture: str, weights: StateDict, outputs: Mapping[str, Tensor], server: ServerContext, seed: int
    ) -> StateDict:
        """Returns θ^p + Σ_q λ_q·τ^q, with a task vector τ^q of each architecture that a client of the round has."""
        assert server.architectures is not None
        assert server.public is not None
        architecture_by_client = {client_info.id: client_info.architecture or "" for client_info in server.clients}
        own_outputs = predict_public(server.architectures[architecture], weights, server.public)
        students, sizes = [], []
        for teacher in sorted({architecture_by_client[i] for i in outputs}):
            mean_outputs = torch.stack([z for i, z in outputs.items() if architecture_by_client[i] == teacher]).mean(0)
            student = fill_module(cached_module(server.architectures[architecture]).module, weights)
            fit_to_targets(
                student,
                server.public,
                torch.cat([mean_outputs, own_outputs], 1),
                self.distillation_options,
                lr=self.server_lr,
                seed=seed,
                distance=self.distance_from_teachers,
            )
            students.append(copy_trained_weights_and_buffers(student))
            teacher_module = cached_module(server.architectures[teacher]).module
            sizes.append(float(sum(p.numel() for p in teacher_module.parameters() if p.requires_grad)))
        shares = [size / sum(sizes) if self.merge == "size" else 1 / len(sizes) for size in sizes]
        return {name: add_task_vectors(tensor, [s[name] for s in students], shares) for name, tensor in weights.items()}

    def distance_from_teachers(self, teachers: Tensor, student: Tensor) -> Tensor:
        """Returns the loss T²·KL(t ‖ z) + γ·T_self²·KL(z₀ ‖ z) of a minibatch.

        The teacher's outputs t and the student's first outputs z₀ are side by side in `teachers`, (batch, 2·classes).
        """
        teacher, first = teachers.chunk(2, dim=1)
        distance = self.temperature**2 * softened_kl_divergence(teacher, student, self.temperature)
        own_distance = softened_kl_divergence(first, student, self.self_temperature)
        return distance + self.gamma * self.self_temperature**2 * own_distance


def add_task_vectors(start: Tensor, ends: list[Tensor], shares: list[float]) -> Tensor:
    """Returns start + Σ share·(end − start), the sum of task vectors; a tensor of whole numbers stays as it is.

    >>> add_task_vectors(torch.tensor(1.0), [torch.tensor(2.0), torch.tensor(5.0)], [0.5, 0.5])
    tensor(3.5000)
    """
    if not start.is_floating_point():
        return start.clone()
    return start + torch.stack([share * (end - start) for end, share in zip(ends, shares, strict=True)]).sum(0)
