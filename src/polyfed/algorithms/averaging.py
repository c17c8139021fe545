"""The base of methods whose server half is a weighted mean: FedAvg and its relatives."""

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor, nn

from polyfed.core.algorithm import Algorithm, Client, ClientInfo, Message, ServerContext
from polyfed.core.buffers import Policy, give_back, ready, receive, travelling
from polyfed.core.errors import UserError
from polyfed.core.scratch import Scratch, initial_state, scratch
from polyfed.core.training import LocalTraining, fit
from polyfed.core.tree import RunningMean, Spec, Tree, UnlikeTreesError, spec

ServerState = dict[str, Any]  # the groups that are averaged, and what a method adds
ClientState = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Averaging(LocalTraining, Algorithm[ServerState, ClientState], ABC):
    """θ ← Σ_i w_i θ_i / Σ_i w_i over the replies of a round. As it stands it is FedAvg: one global model θ goes down, each
    client trains it, the server averages. A method says what else is different: what travels (`server_init`, `dispatch`,
    `groups`), how a client trains (`local_update`), what is made of the mean (`server_step`), which model is evaluated
    (`personal_model`).

    The server half never sees a single reply: replies are summed as they come, in the order of the clients' ids, and the
    server holds one model, whatever their number.

    Args:
        weighted: by the number of training examples; False counts every client the same.

    >>> @final
    ... @dataclass(frozen=True, kw_only=True)
    ... class HalfStep(Averaging):
    ...     def server_step(self, state, mean, who):
    ...         theta = {n: (t + mean["model"][n]) / 2 for n, t in state["model"].items()}
    ...         return {**state, "model": theta}
    >>> HalfStep(lr=0.1).weighted
    True
    """

    requires: ClassVar[frozenset[str]] = frozenset({"one_architecture"})
    groups: ClassVar[tuple[str, ...]] = ("model",)
    """What a reply holds; all of it is averaged."""
    weighted: bool = True

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """The initial global model θ: the common draw of the federation's architecture."""
        assert server.model is not None  # `requires` names "one_architecture"
        buffers = scratch(server.model).buffers
        return {"model": travelling(initial_state(server.model, server.seed), buffers, self.buffers)}

    def dispatch(self, state: ServerState, who: ClientInfo) -> Message:
        """θ and the learning rate of the round, the same for everyone."""
        return Message({group: state[group] for group in self.groups}, {"lr": self.lr_at(who.round, who.rounds)})

    def reply_spec(self, state: ServerState, down: Message, reply: Message) -> Mapping[str, Spec]:
        """The groups that are averaged, in the form in which they went down."""
        return {group: spec(down.tensors[group]) for group in self.groups}

    def form_is_known(self, state: ServerState) -> bool:
        """Whether the server knows which tensors a reply holds, so that replies can be summed as they come. Where only the
        clients find that out, the first replies are held, and those of another form than most are left out."""
        return True

    def summing(self, expected: Mapping[str, float] | None) -> "Summing":
        """Takes in the replies of a round, one by one, in the order of ids.

        Args:
            expected: id -> number of examples, of those who are expected; None if it is not known.
        """
        return Summing(self, expected)

    def aggregate(self, state: ServerState, replies: Mapping[str, Message], server: ServerContext) -> ServerState:
        """θ ← Σ_i (n_i/n) θ_i, or (1/m) Σ_i θ_i unweighted."""
        known = self.weighted and all("num_examples" in reply.scalars for reply in replies.values())
        found = self.summing({i: replies[i].scalars["num_examples"] if known else 1.0 for i in sorted(replies)})
        for i in sorted(replies):
            found.add(i, replies[i])
        return found.state_after(state)

    def server_step(self, state: ServerState, mean: Mapping[str, Tree], who: Sequence[str]) -> ServerState:
        """The next state, from the mean of the replies, group -> tree, and from who replied, in the order of ids."""
        return {**state, **mean}

    def unlike(self, error: UnlikeTreesError) -> UserError:
        """What to say where replies have no mean, because their tensors differ."""
        return UserError(f"{type(self).__name__}: {error}; the clients' networks must have one form")

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Nothing private before the first round."""
        return {}

    def local_update(self, down: Message, own: ClientState, client: Client, seed: int) -> tuple[Message, ClientState]:
        """θ_i: θ after `local_epochs` on the client's data."""
        net = receive(client, down.tensors["model"], own, self.buffers)
        found = fit(net.module, client.train, self, lr=down.scalars["lr"], seed=seed, task=client.task)
        return reply(net, client, found.loss, self.buffers)

    def personal_model(self, down: Message, own: ClientState, client: Client, seed: int) -> nn.Module:
        """θ."""
        return ready(receive(client, down.tensors["model"], own, self.buffers), client, own, self.buffers)


@final
class Summing:
    """The replies of a round to a method, summed as they come; see `Averaging.summing`."""

    def __init__(self, method: Averaging, expected: Mapping[str, float] | None) -> None:
        if expected is not None and not method.weighted:
            expected = dict.fromkeys(expected, 1.0)
        self._method, self._mean = method, RunningMean(expected)

    def add(self, client: str, reply: Message) -> None:
        """Takes in one reply, which is not needed after.

        Raises:
            UserError: its tensors are not those of the first reply.
        """
        groups = self._method.groups
        tree: dict[str, Tensor] = {f"{g}/{n}": t for g in groups for n, t in reply.tensors.get(g, {}).items()}
        try:
            self._mean.add(client, tree, reply.scalars["num_examples"] if self._method.weighted else 1.0)
        except UnlikeTreesError as error:
            raise self._method.unlike(error) from error

    def state_after(self, state: ServerState) -> ServerState:
        """The server's next state."""
        mean: dict[str, dict[str, Tensor]] = {group: {} for group in self._method.groups}
        for key, tensor in self._mean.value().items():
            group, _, name = key.partition("/")
            mean[group][name] = tensor
        return self._method.server_step(state, mean, self._mean.ids)


def reply(net: Scratch, client: Client, loss: float, policy: Policy) -> tuple[Message, ClientState]:
    """The trained model θ_i with n_i, and the private state of the buffer policy."""
    model, own = give_back(net, policy)
    return Message({"model": model}, {"num_examples": len(client.train), "train_loss": loss}), own
