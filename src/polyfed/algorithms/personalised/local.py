"""Local: each client trains its own network on its own data, and no weights are sent; the baseline of every comparison."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from polyfed.algorithms.base.personal_network import PersonalNetworkMethod
from polyfed.core.algorithm import Algorithm, Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.values.frozen_mapping import FrozenMapping
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy
from polyfed.core.nn.module_cache import copy_trained_weights_and_buffers
from polyfed.core.state_dict import StateDict
from polyfed.core.tasks.task import Loss
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.loop import fit, reply_scalars

ServerState = dict[str, StateDict]
ClientState = dict[str, StateDict]
# fields that `by_client` cannot change
_SAME_FOR_ALL = frozenset({"by_client", "buffers", "local_epochs", "local_steps", "batch_size", "privacy"})


@final
@dataclass(frozen=True, kw_only=True)
class Local(PersonalNetworkMethod, LocalTraining, Algorithm[ServerState, ClientState]):
    """Trains each client's network, of any architecture, on the client's data only, without a federation.

    A client trains only in the rounds for which it is drawn, so that it makes as many local steps as in the method it is
    compared with; the optimiser is reset each round, as it is there.

    Args:
        buffers: "local" only (polyfed's choice), since nothing is sent. The other fields are those of `LocalTraining`.
        by_client: other values for some clients, by id, such as {"north": {"lr": 0.1}} (polyfed's choice): a client that
            trains alone can have its own learning rate. Epochs, steps and batch size are the same for all. None gives all
            clients the same values.

    Raises:
        UserError: `buffers` is not "local", or `by_client` has invalid values.

    >>> Local(lr=0.05, by_client={"north": {"lr": 0.1}}).options_for("north").lr
    0.1
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="local",
        summary="Each client alone: the baseline of every comparison",
        evaluated="its own",
        leaderboard={},
        stacked=True,
    )
    private_fits: ClassVar[tuple[str, ...]] = ("local_epochs",)

    requires: ClassVar[frozenset[str]] = frozenset({"model"})
    discloses: ClassVar[frozenset[str]] = frozenset()
    buffers: BufferPolicy = "local"
    by_client: Mapping[str, Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffers != "local":
            raise UserError(f"Local: buffers must be 'local', since nothing is sent, got {self.buffers!r}")
        if self.by_client is not None:
            self._validate_by_client(self.by_client)

    def _validate_by_client(self, by_client: Any) -> None:
        """Checks `by_client`, settings of single clients, and stores it as a hashable mapping.

        Raises:
            UserError: it is invalid.
        """
        if not isinstance(by_client, Mapping) or not all(isinstance(fields, Mapping) for fields in by_client.values()):
            raise UserError(
                f"Local: by_client must be fields by client, as in {{'north': {{'lr': 0.1}}}}, got {by_client!r}"
            )
        object.__setattr__(self, "by_client", FrozenMapping(by_client))
        names = sorted({field.name for field in dataclasses.fields(self)} - _SAME_FOR_ALL)
        for client, fields in by_client.items():
            for name in fields:
                if name not in names:
                    hint = "it is the same for all clients" if name in _SAME_FOR_ALL else did_you_mean(str(name), names)
                    raise UserError(f"Local: by_client[{client!r}] cannot have {name!r}; {hint}")
            try:
                self.options_for(client)
            except UserError as error:
                raise UserError(f"{error} (by_client[{client!r}])") from error

    def options_for(self, client: str) -> "Local":
        """Returns this method with the training settings that `by_client` has for one client; unchanged if it has none."""
        fields = (self.by_client or {}).get(client)
        return self if fields is None else dataclasses.replace(self, by_client=None, **fields)

    def criterion(self, client: Client) -> Loss:
        """Returns the training loss of a client, with the class weights and label smoothing set for this client."""
        return LocalTraining.criterion(self.options_for(client.id), client)

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the server state before round 1, which is empty.

        Raises:
            UserError: `by_client` names an id that no client has.
        """
        client_ids = [client_info.id for client_info in server.clients]
        if unknown := [client for client in self.by_client or {} if client not in client_ids]:
            raise UserError(
                f"Local: by_client names {unknown[0]!r}, but no client has this id; {did_you_mean(unknown[0], client_ids)}"
            )
        return {}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the message to a client: only the learning rate of the round."""
        return Message({}, {"lr": self.options_for(client_info.id).lr_at(client_info.round, client_info.rounds)})

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """Returns the server state unchanged."""
        return server_state

    # -- client ---------------------------------------------------------------------------------------------------

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the client's network for `local_epochs`; replies without weights."""
        model = self.personal_model(message, client_state, client, seed)
        fit_result = fit(model, client, self.options_for(client.id), lr=message.scalars["lr"], seed=seed)
        return Message({}, reply_scalars(client, fit_result.loss)), {"model": copy_trained_weights_and_buffers(model)}
