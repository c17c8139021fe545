"""Local: each client trains its own network on its own data, and nothing travels. The lower bound of every comparison."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from torch import nn

from polyfed.algorithm import Algorithm, Client, ClientInfo, Message, ServerContext
from polyfed.buffers import Policy
from polyfed.errors import UserError
from polyfed.scratch import fill, initial_state, scratch
from polyfed.training import LocalTraining, fit
from polyfed.tree import Spec, Tree

State = dict[str, Tree]
Mine = dict[str, Tree]


@final
@dataclass(frozen=True, kw_only=True)
class Local(LocalTraining, Algorithm[State, Mine]):
    """Each client alone, with any architecture. A client trains in the rounds for which it is drawn, so that it takes as
    many local steps as in the method it is compared with; the optimiser starts afresh each round, as it does there.

    Args:
        buffers: "local" only (ours), since nothing travels. The other fields are those of `LocalTraining`.

    >>> Local(lr=0.05).requires
    frozenset({'model'})
    """

    requires: ClassVar[frozenset[str]] = frozenset({"model"})
    discloses: ClassVar[frozenset[str]] = frozenset()
    buffers: Policy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffers != "local":
            raise UserError(f"Local: buffers must be 'local', since nothing travels, got {self.buffers!r}")

    # -- server ---------------------------------------------------------------------------------------------------

    def init(self, server: ServerContext) -> State:
        """The server keeps nothing."""
        return {}

    def dispatch(self, state: State, who: ClientInfo) -> Message:
        """Nothing but the learning rate of the round."""
        return Message({}, {"lr": self.lr_at(who.round, who.rounds)})

    def aggregate(self, state: State, replies: Mapping[str, Message]) -> State:
        """Nothing to aggregate."""
        return state

    def reply_spec(self, state: State, down: Message) -> Mapping[str, Spec]:
        """No tensor may go up."""
        return {}

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> Mine:
        """θ_i: the common draw of the client's architecture."""
        assert client.model is not None
        return {"model": initial_state(client.model, seed)}

    def local(self, down: Message, mine: Mine, client: Client, seed: int) -> tuple[Message, Mine]:
        """θ_i ← θ_i after `local_epochs` on the client's own data."""
        model = self.personal(down, mine, client, seed)
        loss = fit(model, client.train, self, lr=down.scalars["lr"], seed=seed, task=client.task)
        state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}
        return Message({}, {"train_loss": loss, "num_examples": len(client.train)}), {"model": state}

    def personal(self, down: Message, mine: Mine, client: Client, seed: int) -> nn.Module:
        """The client's own network."""
        assert client.model is not None
        return fill(scratch(client.model, client.train.x.device).module, mine["model"])
