"""FFA-LoRA: the factor A of each adapter keeps its first values, and the server averages B (Sun et al., ICLR 2024)."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor, nn

from polyfed.algorithms.adapters.factors import ADAPTER_REQUIREMENTS, freeze_within_block, names_of_factor
from polyfed.algorithms.base.averaging import ClientState
from polyfed.algorithms.base.local_parts import LocalPartMethod
from polyfed.core.algorithm import Client, Message
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.training.loop import fit, reply_scalars


@final
@dataclass(frozen=True, kw_only=True)
class FFALoRA(LocalPartMethod):
    """Trains the factor B of each low-rank adapter (LoRA) and the head, and averages them; the factor A never changes.

    All clients draw the same A from the run's seed and never send it. So Σ_i w_i·B_i·A = (Σ_i w_i·B_i)·A: the average of B
    gives the average of the products. One architecture with adapters of one rank. Evaluated model: the average.

    Args:
        weighted: weighs clients by their number of training examples (polyfed's choice, as in FedAvg).
        adapters: None only (paper), since B is averaged without A, and so has one rank.

    The other fields are those of `LocalTraining`.

    >>> FFALoRA(lr=0.1).weighted
    True
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="ffa_lora",
        summary="FedAvg of the adapters' B, with A frozen",
        paper="Sun et al. 2024",
        evaluated="the average",
        leaderboard={},
        stacked=True,
    )
    private_fits: ClassVar[tuple[str, ...]] = ("local_epochs",)

    requires: ClassVar[frozenset[str]] = ADAPTER_REQUIREMENTS
    weighted: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.adapters is None, "adapters", "none: B is averaged without A, so give all one rank")

    def _find_local_tensors(self, module: nn.Module, example: Tensor | None) -> list[str]:
        return names_of_factor(list(module.state_dict()), "A")

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the received factors B and the head with A frozen; returns them as the reply, and a state with A."""
        net = self._load_with_local_part(message, client_state, client)
        with freeze_within_block(net.module, client_state[self.local_group]):
            fit_result = fit(net.module, client, self, lr=message.scalars["lr"], seed=seed)
        model, factors_a, buffer_state = self._split_trained(net, client_state)
        return Message({"model": model}, reply_scalars(client, fit_result.loss)), {
            self.local_group: factors_a,
            **buffer_state,
        }
