"""FedSA-LoRA: the server averages the factor A of each adapter, and B stays with the client (Guo et al., ICLR 2025)."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor, nn

from polyfed.algorithms.adapters.factors import ADAPTER_REQUIREMENTS, names_of_factor
from polyfed.algorithms.base.local_parts import LocalPartMethod
from polyfed.core.methods.method_card import MethodCard


@final
@dataclass(frozen=True, kw_only=True)
class FedSALoRA(LocalPartMethod):
    """Trains both factors of each low-rank adapter (LoRA) at the clients, averages the factors A, and leaves the factors B
    and the head with each client.

    Client i computes W₀x + (α/r)·B_i·A·x. One architecture with adapters of one rank. Evaluated model: the average A with
    the client's own B and head; a client that never took part has the initial ones.

    Args:
        weighted: weighs clients by their number of training examples (polyfed's choice, as in FedAvg).
        shared_head: averages the trained tensors outside of the adapters, too, such as the classifier (False, authors'
            code, which keeps the classifier at the client).
        adapters: None only (paper), since A is averaged without B, and so has one rank.

    The other fields are those of `LocalTraining`.

    >>> FedSALoRA(adapters="svd")
    Traceback (most recent call last):
    polyfed.core.errors.UserError: FedSALoRA: adapters must be none: A is averaged without B, so give all one rank, got 'svd'
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedsa_lora",
        summary="A of each adapter is averaged; B and head stay",
        paper="Guo et al. 2025",
        evaluated="the average A with the client's B and head",
        leaderboard={},
        stacked=True,
    )

    requires: ClassVar[frozenset[str]] = ADAPTER_REQUIREMENTS
    weighted: bool = True
    shared_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.adapters is None, "adapters", "none: A is averaged without B, so give all one rank")

    def _find_local_tensors(self, module: nn.Module, example: Tensor | None) -> list[str]:
        names = list(module.state_dict())
        if self.shared_head:
            return names_of_factor(names, "B")
        shared = names_of_factor(names, "A")
        return [name for name in names if name not in shared]
