"""FML: each client's own network and a shared network teach each other (Shen et al. 2020, "Federated Mutual Learning")."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from polyfed.algorithms.distillation.base.mutual_learning import MutualLearningMethod, NetworkPair
from polyfed.algorithms.distillation.base.output_matching import softened_kl_divergence
from polyfed.core.algorithm import Client
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.training.loop import ForwardPass


@final
@dataclass(frozen=True, kw_only=True)
class FML(MutualLearningMethod):
    """Trains each client's network together with a shared network (the "meme model"), which teach each other; the
    server averages the shared one.

    The own network θ_i, of any architecture, minimises α·CE + (1−α)·KL(s ‖ θ_i), and the shared s minimises β·CE +
    (1−β)·KL(θ_i ‖ s); in each divergence the teacher has no gradient. With α = 1 it is Local, bit for bit, and with β =
    1 FedAvg of s. Evaluated model: θ_i; next to it s, as `shared_...`.

    In round 1 the server sends nothing, since it does not know the shapes of the clients' data: every client starts s from
    the same initial weights, which depend on the run's seed. In multilabel tasks and regression, KL is as in `fedavg_kd`.

    Args:
        shared: the shared network s: a name of the zoo or module:factory, or a mapping with the name and arguments, as
            {name: cnn_small, channels: [8, 16]} ("mlp", polyfed's choice: it takes inputs of any shape except tokens).
        alpha: α, weight of the labels in the loss of θ_i (0.5, authors' code).
        beta: β, weight of the labels in the loss of s (0.5, authors' code).
        weighted: weighs clients in s by their number of training examples (True, polyfed's choice: as FedAvg); False counts
            every client the same.
        buffers: buffers of s ("average", polyfed's choice); those of θ_i always stay with the client.

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

    def build_joint_loss(self, pair: NetworkPair, client: Client) -> Callable[[ForwardPass], Tensor]:
        """Returns the loss of both networks: errors on labels, and distance of outputs from the other's.

        It is α·CE(z, y) + (1−α)·KL(s ‖ z) + β·CE(s, y) + (1−β)·KL(z ‖ s).

        z and s are the outputs of the client's own network and of the shared one.
        """
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
