"""FML: a network of one's own and a common one teach each other (Shen et al. 2020, "Federated Mutual Learning")."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from polyfed.algorithms.distillation.mutual_learning import MutualLearningMethod, Pair
from polyfed.algorithms.distillation.output_matching import softened_kl_divergence
from polyfed.core.algorithm import Client
from polyfed.core.method_card import MethodCard
from polyfed.core.training.loop import ForwardPass


@final
@dataclass(frozen=True, kw_only=True)
class FML(MutualLearningMethod):
    """Each client trains its own network θ_i, of any architecture, by α·CE + (1−α)·KL(s ‖ θ_i), and with it the common
    network s ("meme model") by β·CE + (1−β)·KL(θ_i ‖ s); the server averages s. In each divergence the teacher is a
    constant. α = 1 is Local, bit for bit, and β = 1 FedAvg of s. Evaluated model: θ_i; next to it s, as `shared_...`.

    In round 1 nothing goes down, since the server does not know the form of the clients' data: every client starts s from
    the run's draw for its architecture. With several labels an example, and in regression, KL is as in `fedavg_kd`.

    Args:
        shared: the common network s: a name of the zoo or module:factory, or a mapping with the name and arguments, as
            {name: cnn_small, channels: [8, 16]} ("mlp", polyfed's choice: it takes inputs of any shape but tokens).
        alpha: α, the share of the labels in the loss of θ_i (0.5, authors' code).
        beta: β, the share of the labels in the loss of s (0.5, authors' code).
        weighted: the mean of s by the number of training examples (True, polyfed's choice: as FedAvg); False counts every
            client the same.
        buffers: those of s ("average", polyfed's choice); those of θ_i always stay with it.

    The other fields are those of `LocalTraining`, for both networks.

    >>> FML(shared={"name": "mlp", "hidden": [32]}).shared
    {'name': 'mlp', 'hidden': (32,)}
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fml",
        summary="Each client's network and a common one teach each other",
        paper="Shen et al. 2020",
        evaluated="its own; also the common one",
        leaderboard={"*": {}, "tweets": {"shared": {"name": "lstm", "vocabulary": 5000}}},
    )

    alpha: float = 0.5
    beta: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 <= self.alpha <= 1, "alpha", "between 0 and 1")
        self._require(0 <= self.beta <= 1, "beta", "between 0 and 1")

    def joint_loss(self, pair: Pair, client: Client) -> Callable[[ForwardPass], Tensor]:
        """α·CE(z, y) + (1−α)·KL(s ‖ z), and β·CE(s, y) + (1−β)·KL(z ‖ s), z and s being the two networks' outputs."""
        label_loss = self.criterion(client)

        def loss(batch: ForwardPass) -> Tensor:
            z, s, y = batch.outputs, pair.outputs, batch.targets
            personal_loss = self.alpha * label_loss(z, y) + (1 - self.alpha) * softened_kl_divergence(
                s.detach(), z, 1.0, client.task
            )
            return (
                personal_loss
                + self.beta * label_loss(s, y)
                + (1 - self.beta) * softened_kl_divergence(z.detach(), s, 1.0, client.task)
            )

        return loss
