"""RoLoRA: rounds train the factors B and A of the adapters in turn, and the server averages the one that was trained (Chen
et al., NeurIPS 2025).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from polyfed.algorithms.adapters.factors import ADAPTER_REQUIREMENTS, freeze_within_block, names_of_factor
from polyfed.algorithms.base.averaging import Averaging, ClientState, ServerState, build_reply_and_client_state
from polyfed.core.algorithm import Client, ClientInfo, Message
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import load_client_model
from polyfed.core.state_dict import StateDict, StateDictSpec, state_dict_spec
from polyfed.core.training.loop import fit


@final
@dataclass(frozen=True, kw_only=True)
class RoLoRA(Averaging):
    """Trains one global network with low-rank adapters (LoRA): odd rounds train and average the factors B with A frozen,
    even rounds A with B frozen.

    In each round one factor is the same at all clients, so that the average of the other gives the average of the products
    B·A. Other trained tensors, such as the head, are trained and averaged in every round. One architecture with adapters of
    one rank. Evaluated model: the average.

    Args:
        first: the factor that round 1 trains, "B" or "A" ("B", paper: B is zero at first, and A has no gradient then).
        weighted: weighs clients by their number of training examples (polyfed's choice, as in FedAvg).
        adapters: None only (paper), since a factor is averaged without the other, and so has one rank.

    The other fields are those of `LocalTraining`.

    >>> [RoLoRA().factor_of_round(number) for number in (1, 2, 3)]
    ['B', 'A', 'B']
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="rolora",
        summary="FedAvg of the adapters' B and A in turn",
        paper="Chen et al. 2025",
        evaluated="the average",
        leaderboard={},
        stacked=True,
    )
    private_fits: ClassVar[tuple[str, ...]] = ("local_epochs",)

    traits: ClassVar[frozenset[str]] = frozenset({"one_version"})
    requires: ClassVar[frozenset[str]] = ADAPTER_REQUIREMENTS
    first: Literal["B", "A"] = "B"
    weighted: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.adapters is None, "adapters", "none: one factor is averaged, so give all one rank")

    def factor_of_round(self, round_number: int) -> str:
        """Returns "A" or "B", the factor that clients train in a round; rounds are counted from 1."""
        return self.first if round_number % 2 else "AB".replace(self.first, "")

    # -- server ---------------------------------------------------------------------------------------------------

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns to every client both factors, the learning rate, and which factor is trained."""
        message = super().dispatch(server_state, client_info)
        return Message(
            message.tensors, {**message.scalars, "trains_a": float(self.factor_of_round(client_info.round) == "A")}
        )

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the names, shapes and dtypes of the global model without the factor frozen in the round."""
        return {"model": state_dict_spec(_without_frozen_factor(message.tensors["model"], message))}

    def server_step(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Returns the next server state: the clients' mean in place of what they trained, and the other factor as it was."""
        return {**server_state, "model": {**server_state["model"], **mean["model"]}}

    # -- client ---------------------------------------------------------------------------------------------------

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the network with one factor of each adapter frozen; replies without that factor."""
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        with freeze_within_block(net.module, _names_of_frozen_factor(message)):
            fit_result = fit(net.module, client, self, lr=message.scalars["lr"], seed=seed)
        reply, buffer_state = build_reply_and_client_state(net, client, fit_result.loss, self)
        return Message({"model": _without_frozen_factor(reply.tensors["model"], message)}, reply.scalars), buffer_state


def _names_of_frozen_factor(message: Message) -> list[str]:
    """Returns the names of the adapters' factors that the round of a message does not train."""
    return names_of_factor(list(message.tensors["model"]), "B" if message.scalars["trains_a"] else "A")


def _without_frozen_factor(model: StateDict, message: Message) -> StateDict:
    """Returns the tensors of a network except for the factors that the round of a message does not train."""
    frozen = _names_of_frozen_factor(message)
    return {name: tensor for name, tensor in model.items() if name not in frozen}
