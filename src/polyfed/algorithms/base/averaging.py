"""The base of methods whose server half is a weighted mean: FedAvg and its relatives."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from polyfed.algorithms.base.reply_sum import PlainReplySum, ReplySum
from polyfed.core.algorithm import Algorithm, Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.messages.lora import AdapterMode, factorise_mean_adapters
from polyfed.core.nn.buffers import (
    HasBufferPolicy,
    extract_update,
    load_client_model,
    load_model_for_eval,
    tensors_to_send,
)
from polyfed.core.nn.module_cache import CachedModule, cached_module, initial_state
from polyfed.core.state_dict import (
    IncompatibleTensorsError,
    StateDict,
    StateDictSpec,
    state_dict_spec,
    weighted_mean,
)
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.loop import fit, reply_scalars

AveragedOver = Literal["cohort", "all"]
ServerState = dict[str, Any]  # the groups that are averaged, and what a method adds
ClientState = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Averaging(LocalTraining, Algorithm[ServerState, ClientState], ABC):
    """θ ← Σ_i w_i θ_i / Σ_i w_i over the replies of a round. As it stands it is FedAvg: one global model θ goes down, each
    client trains it, the server averages. A method says what else is different: what travels (`server_init`, `dispatch`,
    `groups`), how a client trains (`local_update`), what is made of the mean (`server_step`), which model is evaluated
    (`personal_model`).

    The server half never sees a single reply (`aggregates_by_sum`): replies are summed as they come, in the order of the
    clients' ids, and the server holds one model, whatever their number.

    Args:
        weighted: by the number of training examples; False counts every client the same.
        adapters: what becomes of low-rank adapters whose ranks differ between clients: "zero_pad", "svd" or "stack", see
            `polyfed.core.messages.lora`; None is for one rank (polyfed's choice).

    >>> from typing import final
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
    clients_keep_trained_weights: ClassVar[bool] = False
    """Says whether a client keeps weights trained in a round, which must then fit the server's model of later rounds."""
    weighted: bool = True
    adapters: AdapterMode | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapters is not None:
            self._require(self.adapters in get_args(AdapterMode), "adapters", "'zero_pad', 'svd', 'stack', or none")
            averages_one_model = "one_architecture" in self.requires and self.aggregates_by_sum
            self._require(
                averages_one_model,
                "adapters",
                "none, except where one global model is averaged (with averaged_over='cohort')",
            )
            fits = not (self.adapters == "stack" and self.clients_keep_trained_weights)
            self._require(
                fits, "adapters", "'zero_pad' or 'svd': clients keep networks trained on the last round's weights"
            )

    @property
    def aggregates_by_sum(self) -> bool:
        """Says whether the server half needs only the sum of a round's replies, no single one. What hides single replies
        from the server, such as a secure sum, is for methods of which this is true."""
        return True

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """The initial global model θ: the common draw of the federation's architecture."""
        assert server.model is not None  # `requires` names "one_architecture"
        buffers = cached_module(server.model).buffers
        return {"model": tensors_to_send(initial_state(server.model, server.seed), buffers, self.buffers)}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """θ and the learning rate of the round, the same for everyone."""
        return Message(
            {group: server_state[group] for group in self.groups},
            {"lr": self.lr_at(client_info.round, client_info.rounds)},
        )

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """The groups that are averaged, in the form in which they went down."""
        return {group: state_dict_spec(message.tensors[group]) for group in self.groups}

    def reply_spec_is_known(self, server_state: ServerState) -> bool:
        """Whether the server knows which tensors a reply holds, so that replies can be summed as they come. Where only the
        clients find that out, the first replies are held, and those of another form than most are left out."""
        return True

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """θ ← Σ_i (n_i/n) θ_i, or (1/m) Σ_i θ_i unweighted; `server_step` makes the next state of this mean.

        A run has added each reply as it came, by the same `add_reply`, and gives their sum.
        """
        total = replies if isinstance(replies, ReplySum) else self.sum_replies(replies)
        mean = factorise_mean_adapters(self, total.mean())
        new_state = self.server_step(server_state, mean, total.client_ids)
        return new_state if self.aggregates_by_sum else self.keep_replies(new_state, total)

    def sum_replies(self, replies: Mapping[str, Message]) -> ReplySum:
        """Σ_i n_i θ_i over replies that are all there, in the order of ids."""
        num_examples = {i: replies[i].scalars["num_examples"] if self.weighted else 1.0 for i in sorted(replies)}
        total = self.empty_sum(num_examples)
        for i in sorted(replies):
            self.add_reply(total, i, replies[i])
        return total

    def empty_sum(self, expected: Mapping[str, float] | None) -> ReplySum:
        """Returns the sum of no replies yet; `expected` maps ids to numbers of examples, None if they are unknown."""
        keeps_replies = not self.aggregates_by_sum
        return PlainReplySum(self.groups, weighted=self.weighted, expected=expected, keeps_replies=keeps_replies)

    def add_reply(self, total: ReplySum, client_id: str, reply: Message) -> None:
        """Σ ← Σ + n_i θ_i. A run calls this for each reply as soon as it has come, in the order of ids.

        Raises:
            UserError: the reply's tensors are not those of the first.
        """
        try:
            total.add(client_id, reply)
        except IncompatibleTensorsError as error:
            raise self.incompatible_replies_error(error) from error

    def _average_by_client(self, trees: Mapping[str, StateDict], replies: Mapping[str, Message]) -> dict[str, Tensor]:
        """Σ_i (n_i/n) θ_i of trees by client, or (1/m) Σ_i θ_i unweighted; n_i as the replies have it."""
        num_examples = {i: replies[i].scalars["num_examples"] for i in trees} if self.weighted else None
        try:
            return weighted_mean(trees, num_examples)
        except IncompatibleTensorsError as error:
            raise self.incompatible_replies_error(error) from error

    def server_step(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Computes the next state from the mean of the replies, group -> tensors, and the sorted ids of who replied."""
        return {**server_state, **mean}

    def keep_replies(self, server_state: ServerState, replies: Mapping[str, Message]) -> ServerState:
        """The state after `server_step` with what it keeps of single replies; asked for only without `aggregates_by_sum`."""
        return server_state

    def incompatible_replies_error(self, error: IncompatibleTensorsError) -> UserError:
        """Returns the error for replies that have no mean, because their tensors differ."""
        return UserError(f"{type(self).__name__}: {error}; the clients' networks must have one form")

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns an empty state: nothing is private before the first round."""
        return {}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """θ_i: θ after `local_epochs` on the client's data."""
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        fit_result = fit(net.module, client, self, lr=message.scalars["lr"], seed=seed)
        return build_reply(net, client, fit_result.loss, self)

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """θ."""
        return load_model_for_eval(client, message.tensors["model"], client_state, self.buffers)


@dataclass(frozen=True, kw_only=True)
class GlobalModelMethod(Averaging, ABC):
    """An averaging method of one global model that is the result of the run. `averaged_over` says which mean that is:

    - "cohort": θ(t), the mean over the clients of the last round, with which training would go on.
    - "all": the mean over all clients' latest models, θ_all(t) = Σ_i n_i θ_i / Σ_i n_i, θ_i being what client i sent when it
      last took part (FedHeNN, algorithm 1, last line). With few clients a round and different data θ(t) has just been pulled
      towards the few; θ_all has not.

    Training is the same with both, bit for bit: θ(t) is what goes down in the next round. What is evaluated, returned and
    given to unseen clients differs. With "all", θ(t) is evaluated next to it, as `cohort_...`.

    A client that has never replied is left out of θ_all: the paper defines θ_i by local training only, and the server
    learns n_i with a reply. (In the paper's 200 rounds of a tenth of the clients everybody has been drawn.) If all clients
    replied in the last round, θ_all is θ(t), bit for bit.

    "all" costs the server memory and checkpoints of N models instead of one, since to exchange a client's part of the sum
    it needs the part before: so it holds each client's latest weights by themselves, and `aggregates_by_sum` is false.
    """

    averaged_over: AveragedOver = "cohort"

    @property
    def aggregates_by_sum(self) -> bool:
        """Only where the last cohort's mean is returned."""
        return self.averaged_over == "cohort"

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """The initial global model θ(0), and nobody's latest model yet."""
        return {**super().server_init(server), **({} if self.aggregates_by_sum else {"latest": {}, "examples": {}})}

    def keep_replies(self, server_state: ServerState, replies: Mapping[str, Message]) -> ServerState:
        """θ_i and n_i of those who replied take the place of their last ones."""
        latest = {**server_state["latest"], **{i: dict(reply.tensors["model"]) for i, reply in replies.items()}}
        num_examples = (
            {i: float(reply.scalars["num_examples"]) for i, reply in replies.items()} if self.weighted else {}
        )
        examples = {**server_state["examples"], **num_examples}
        return {**server_state, "latest": _sorted_by_id(latest), "examples": _sorted_by_id(examples)}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Builds the message to one client, see `message_to`."""
        return self.message_to(server_state, client_info, {})

    def dispatch_all(self, server_state: ServerState, client_infos: Sequence[ClientInfo]) -> Iterator[Message]:
        """Builds the messages to several clients; what is the same for all is computed once."""
        common: dict[str, Any] = {}
        return (self.message_to(server_state, client_info, common) for client_info in client_infos)

    def message_to(self, server_state: ServerState, client_info: ClientInfo, common: dict[str, Any]) -> Message:
        """Builds a message: θ(t) to train with; to be evaluated and kept, the result (`result_models`).

        Args:
            server_state, client_info: as `dispatch` has them.
            common: holds what all messages of one `dispatch_all` share, once the first of them needed it.
        """
        tensors = {"model": server_state["model"]}
        if client_info.purpose == "personal":
            tensors = common["result"] = common.get("result") or self.result_models(server_state)
        return Message(tensors, {"lr": self.lr_at(client_info.round, client_info.rounds)})

    def result_models(self, server_state: ServerState) -> dict[str, StateDict]:
        """The result after this round, the group "model"; with "all" the last cohort's mean too, as "cohort"."""
        if self.aggregates_by_sum:
            return {"model": server_state["model"]}
        mean = (
            weighted_mean(server_state["latest"], server_state["examples"] or None)
            if server_state["latest"]
            else server_state["model"]
        )
        return {"model": mean, "cohort": server_state["model"]}

    # -- client ---------------------------------------------------------------------------------------------------

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """The last cohort's mean, where it is not the result."""
        if "cohort" in message.tensors:
            yield "cohort", self.personal_model(_with_cohort_model(message), client_state, client, seed)


@dataclass(frozen=True, kw_only=True)
class ServerUpdateMethod(Averaging, ABC):
    """An averaging method whose server does more with the mean of the parameters than take it: `server_update`. Buffers that
    travel are averaged and no more: a step along their changes could make a running variance negative. So the server keeps
    them apart, as "buffers"."""

    def server_init(self, server: ServerContext) -> ServerState:
        """The initial parameters, and the buffers that travel."""
        assert server.model is not None  # `requires` names "one_architecture"
        model, names = super().server_init(server)["model"], cached_module(server.model).buffers
        return {
            "model": {name: tensor for name, tensor in model.items() if name not in names},
            "buffers": {name: tensor for name, tensor in model.items() if name in names},
        }

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """The parameters with the buffers that travel, and the learning rate of the round."""
        return Message(
            {"model": {**server_state["model"], **server_state["buffers"]}},
            {"lr": self.lr_at(client_info.round, client_info.rounds)},
        )

    def server_step(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Parameters by `server_update`, buffers averaged."""
        model = mean["model"]
        parameters = {name: model[name] for name in server_state["model"]}
        buffers = {name: model[name] for name in server_state["buffers"]}
        return {**self.server_update(server_state, {**mean, "model": parameters}, client_ids), "buffers": buffers}

    @abstractmethod
    def server_update(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """The next state, from the mean of the replies without buffers, group -> tree, and from who replied."""


def interpolate(w: Tensor, mean: Tensor, beta: float) -> Tensor:
    """(1−β)w + β·mean in the type of w, exact where both are equal and where β is 1."""
    if beta == 1:
        return mean
    precise_w = w.to(torch.float64)
    return (precise_w + beta * (mean.to(torch.float64) - precise_w)).to(w.dtype)


def _with_cohort_model(message: Message) -> Message:
    """The message as it would be if the last cohort's mean were the result."""
    return Message({"model": message.tensors["cohort"]}, message.scalars)


def _sorted_by_id(by_client: Mapping[str, Any]) -> dict[str, Any]:
    return {client: by_client[client] for client in sorted(by_client)}


def build_reply(net: CachedModule, client: Client, loss: float, method: HasBufferPolicy) -> tuple[Message, ClientState]:
    """Builds the reply, the trained model θ_i with n_i, and returns it with the private state of the buffer policy."""
    model, buffer_state = extract_update(net, method)
    return Message({"model": model}, reply_scalars(client, loss)), buffer_state
