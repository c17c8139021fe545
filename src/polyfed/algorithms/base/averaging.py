"""Provides the base classes of methods whose server averages the clients' replies, such as FedAvg."""

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from polyfed.algorithms.base.reply_sum import PlainReplySum, ReplySum
from polyfed.algorithms.base.robust_sum import build_robust_sum, robust_error
from polyfed.core.algorithm import Algorithm, Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.io.text.number_format import join_first_and_count_rest
from polyfed.core.messages.lora import AdapterMode, factorise_mean_adapters
from polyfed.core.methods.capabilities import KeepsServerStateByClient
from polyfed.core.nn.buffers import (
    HasBufferPolicy,
    extract_sent_tensors_and_client_state,
    load_client_model,
    load_model_for_eval,
    tensors_to_send,
)
from polyfed.core.nn.module_cache import CachedModule, cached_module, initial_state
from polyfed.core.robust.parse import parse_robust_rule
from polyfed.core.state_dict import IncompatibleTensorsError, StateDict, StateDictSpec, state_dict_spec, weighted_mean
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.loop import fit, reply_scalars

AveragedOver = Literal["cohort", "all"]
ServerState = dict[str, Any]  # the groups that are averaged, and what a method adds
ClientState = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Averaging(LocalTraining, Algorithm[ServerState, ClientState], ABC):
    """Averages the clients' models at the server, weighted by their numbers of training examples; this is FedAvg unless
    a subclass overrides a part.

    In each round the server sends the global model θ, each client trains it to θ_i, and the server sets θ ← Σ_i w_i θ_i
    / Σ_i w_i over the replies. A subclass overrides the steps that differ: the content of messages (`server_init`,
    `dispatch`, `groups`), local training (`local_update`), the use of the mean (`server_step`), or the evaluated model
    (`personal_model`).

    The server never sees a single reply (`aggregates_by_sum`): replies are summed as they arrive, in the order of the
    clients' ids, and the server holds one model, whatever the number of clients.

    Args:
        weighted: weighs clients by their number of training examples; False counts every client the same.
        adapters: what becomes of low-rank adapters whose ranks differ between clients: "zero_pad", "svd" or "stack", see
            `polyfed.core.messages.lora`; None is for one rank (polyfed's choice).
        robust: the rule that takes the place of the mean, so that a few wrong replies cannot ruin it: "clip" (or "clip:5",
            "clip:3x"), "median", "trimmed_mean:0.2", "krum:1", "multi_krum:1", "geometric_median"; or an object such as
            `Krum(liars=1)`. See `polyfed.core.robust`; None takes the mean (polyfed's choice).

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
    """The names of the groups of tensors in a reply; all of them are averaged."""
    clients_keep_trained_weights: ClassVar[bool] = False
    """Says whether a client keeps weights trained in a round, which must then fit the server's model of later rounds."""
    weighted: bool = True
    adapters: AdapterMode | None = None
    robust: str | None = None  # a rule object is replaced by its text

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.robust is not None:
            rule = parse_robust_rule(self.robust)
            object.__setattr__(self, "robust", None if rule is None else str(rule))
            replaces_mean = type(self).aggregate is Averaging.aggregate
            if rule is not None and (error_text := robust_error(rule, self, replaces_mean=replaces_mean)):
                raise UserError(f"{type(self).__name__}: robust={self.robust!r} is not possible: {error_text}")
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
        """Returns True if the server needs only the sum of a round's replies, and no single reply.

        Secure aggregation, which hides single replies from the server, works only for methods that return True.
        """
        return True

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the initial global model θ, drawn from the run's seed for the common architecture."""
        assert server.model is not None  # `requires` names "one_architecture"
        buffers = cached_module(server.model).buffers
        return {"model": tensors_to_send(initial_state(server.model, server.seed), buffers, self.buffers)}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns to every client the same message, the global model θ and the round's learning rate."""
        try:
            tensors = {group: server_state[group] for group in self.groups}
        except (KeyError, TypeError) as error:
            is_mapping = isinstance(server_state, Mapping)
            names = join_first_and_count_rest(sorted(server_state), 3) if is_mapping else type(server_state).__name__
            raise UserError(
                f"{type(self).__name__}: the server's state must have a mapping of tensors for each of "
                f"groups={self.groups!r}, a tuple of names, and has {names}; server_init, and aggregate or server_step, "
                "return it"
            ) from error
        return Message(tensors, {"lr": self.lr_at(client_info.round, client_info.rounds)})

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the names, shapes and dtypes of a reply's tensors, which are those that the server sent."""
        return {group: state_dict_spec(message.tensors[group]) for group in self.groups}

    def reply_spec_is_known(self, server_state: ServerState) -> bool:
        """Returns whether the server knows a reply's names and shapes, to add replies as they arrive.

        If only the clients can find them out, the server holds the first replies, and leaves out those whose shapes
        differ from most of the others.
        """
        return True

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """Averages a round's replies, from which `server_step` computes the next state.

        θ ← Σ_i (n_i/n) θ_i, or (1/m) Σ_i θ_i unweighted.

        With `robust`, another rule takes the place of the mean. A run has added each reply on arrival, by `add_reply`,
        and passes their sum as `replies`.
        """
        total = replies if isinstance(replies, ReplySum) else self.sum_replies(replies, server_state)
        try:
            mean = factorise_mean_adapters(self, total.mean())
        except IncompatibleTensorsError as error:  # of replies that a robust rule has held until now
            raise self.make_incompatible_replies_error(error) from error
        new_state = self.server_step(server_state, mean, total.client_ids)
        for group in self.groups:
            before, after = server_state.get(group, {}), new_state.get(group, {})
            prefix = f"{type(self).__name__}: group {group!r} of the server's state"
            if lost := sorted(before.keys() - after.keys()):
                raise UserError(
                    f"{prefix} loses {join_first_and_count_rest(lost, 3)} in server_step, which must return the whole state"
                )
            if changed := sorted(name for name in before if before[name].dtype != after[name].dtype):
                raise UserError(
                    f"{prefix} changes the type of {join_first_and_count_rest(changed, 3)} in server_step, to "
                    f"{after[changed[0]].dtype}; keep BatchNorm's counters, which are whole numbers, or use interpolate"
                )
        new_state = new_state if self.aggregates_by_sum else self.update_state_from_single_replies(new_state, total)
        return {**new_state, **entries} if (entries := total.server_state_entries) else new_state

    def sum_replies(self, replies: Mapping[str, Message], server_state: ServerState | None = None) -> ReplySum:
        """Sums all replies, weighted by examples, in the order of client ids.

        A robust rule also needs the server state before the round.
        """
        num_examples = {i: replies[i].scalars["num_examples"] if self.weighted else 1.0 for i in sorted(replies)}
        total = self.empty_reply_sum(num_examples, server_state)
        for i in sorted(replies):
            message = None if self.robust is None else self.dispatch(server_state or {}, ClientInfo(i))
            self.add_reply(total, i, replies[i], message)
        return total

    def empty_reply_sum(
        self, expected: Mapping[str, float] | None, server_state: ServerState | None = None
    ) -> ReplySum:
        """Returns a new `ReplySum`, to which no reply has been added yet.

        `expected` maps client ids to numbers of examples; it is None if they are unknown. A robust rule may read
        `server_state`, the state before the round.
        """
        total = PlainReplySum(
            self.groups, weighted=self.weighted, expected=expected, keeps_replies=not self.aggregates_by_sum
        )
        rule = parse_robust_rule(self.robust)
        if rule is None:
            return total
        return build_robust_sum(rule, self, total, server_state or {}, is_weighted=self.weighted)

    def add_reply(self, total: ReplySum, client_id: str, reply: Message, message: Message | None = None) -> None:
        """Adds one client's reply, weighted by its number of examples, to the sum of the round's replies.

        A run calls this for each reply as soon as it has come, in the order of ids. `message` is the server's message
        that the reply answers, which a robust rule needs.

        Raises:
            UserError: the reply's tensors differ in name or shape from those of the first reply.
        """
        try:
            total.add(client_id, reply, message)
        except IncompatibleTensorsError as error:
            raise self.make_incompatible_replies_error(error) from error

    def _average_by_client(
        self, state_dicts: Mapping[str, StateDict], replies: Mapping[str, Message]
    ) -> dict[str, Tensor]:
        """Averages the tensors of several clients, weighted by the numbers of examples in their replies.

        Returns Σ_i (n_i/n) θ_i, or (1/m) Σ_i θ_i unweighted.
        """
        num_examples = {i: replies[i].scalars["num_examples"] for i in state_dicts} if self.weighted else None
        try:
            return weighted_mean(state_dicts, num_examples)
        except IncompatibleTensorsError as error:
            raise self.make_incompatible_replies_error(error) from error

    def server_step(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Returns the next server state, computed from the mean of the clients' replies.

        Args:
            server_state: the state before the round.
            mean: the mean of the replies' tensors, by group and name.
            client_ids: the sorted ids of the clients that replied.
        """
        return {**server_state, **mean}

    def update_state_from_single_replies(
        self, server_state: ServerState, replies: Mapping[str, Message]
    ) -> ServerState:
        """Returns the state with what the method stores of single replies; here unchanged.

        It is called after `server_step`, and only if `aggregates_by_sum` is false.
        """
        return server_state

    def make_incompatible_replies_error(self, error: IncompatibleTensorsError) -> UserError:
        """Returns the error to raise if replies cannot be averaged because their tensors differ."""
        return UserError(f"{type(self).__name__}: {error}; the clients' networks must have one form")

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the client's private state before its first round, which is empty."""
        return {}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains θ on the client's data for `local_epochs`; returns the reply θ_i and the new private state."""
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        fit_result = fit(net.module, client, self, lr=message.scalars["lr"], seed=seed)
        return build_reply_and_client_state(net, client, fit_result.loss, self)

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the global model θ to evaluate, with the buffers that stay with the client, if any."""
        return load_model_for_eval(client, message.tensors["model"], client_state, self.buffers)


class EvaluatesGlobalModel(Averaging, ABC):
    """Evaluates the global model θ beside the client's network, as `server_...`."""

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields a further network to evaluate, as (name, network): the global model with the client's buffers."""
        yield "server", Averaging.personal_model(self, message, client_state, client, seed)


@dataclass(frozen=True, kw_only=True)
class GlobalModelMethod(KeepsServerStateByClient, Averaging, ABC):
    """Trains one global model by averaging the clients' models; this model is the result for all clients.
    `averaged_over` chooses the clients whose models are averaged for the result:

    - "cohort": θ(t), the mean over the clients of the last round, with which training would go on.
    - "all": the mean over all clients' latest models, θ_all(t) = Σ_i n_i θ_i / Σ_i n_i, θ_i being what client i sent when it
      last took part (FedHeNN, algorithm 1, last line). With few clients a round and different data θ(t) has just been pulled
      towards the few; θ_all has not.

    Training is the same with both, bit for bit: the server sends θ(t) in the next round. The model that is evaluated,
    returned and given to unseen clients differs. With "all", θ(t) is evaluated next to it, as `cohort_...`.

    A client that has never replied is left out of θ_all: the paper defines θ_i by local training only, and the server
    learns n_i with a reply. (In the paper's 200 rounds of a tenth of the clients everybody has been drawn.) If all clients
    replied in the last round, θ_all is θ(t), bit for bit.

    "all" costs the server N models instead of one, on disk if the run has a directory, since to exchange a client's part
    of the sum it needs the part before: so it holds each client's latest weights by themselves, and `aggregates_by_sum` is
    false.
    """

    averaged_over: AveragedOver = "cohort"

    @property
    def aggregates_by_sum(self) -> bool:
        """Returns whether the result is the last round's mean, for which the sum of replies is enough."""
        return self.averaged_over == "cohort"

    # -- server ---------------------------------------------------------------------------------------------------

    @property
    def groups_by_client(self) -> frozenset[str]:
        """Returns the state's groups with an entry for each client; none if `averaged_over` is "cohort"."""
        return frozenset() if self.aggregates_by_sum else frozenset({"latest", "examples"})

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the initial model θ(0) and, if `averaged_over` is "all", a store for clients' models."""
        return {**super().server_init(server), **({} if self.aggregates_by_sum else {"latest": {}, "examples": {}})}

    def update_state_from_single_replies(
        self, server_state: ServerState, replies: Mapping[str, Message]
    ) -> ServerState:
        """Replaces the stored models and example counts of the clients that replied."""
        models = {i: dict(reply.tensors["model"]) for i, reply in replies.items()}
        num_examples = (
            {i: float(reply.scalars["num_examples"]) for i, reply in replies.items()} if self.weighted else {}
        )
        return {
            **server_state,
            "latest": server_state["latest"] | models,
            "examples": server_state["examples"] | num_examples,
        }

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the model that `build_message_to_client` chooses, and the round's learning rate."""
        return self.build_message_to_client(server_state, client_info, {})

    def dispatch_all(self, server_state: ServerState, client_infos: Sequence[ClientInfo]) -> Iterator[Message]:
        """Yields the message to each of several clients, and computes what the messages have in common only once."""
        common: dict[str, Any] = {}
        return (self.build_message_to_client(server_state, client_info, common) for client_info in client_infos)

    def build_message_to_client(
        self, server_state: ServerState, client_info: ClientInfo, common: dict[str, Any]
    ) -> Message:
        """Builds the message with θ(t) for training, or with the run's result for evaluation.

        Args:
            server_state, client_info: as `dispatch` has them.
            common: holds what all messages of one `dispatch_all` share, once the first of them needed it.
        """
        tensors = {"model": server_state["model"]}
        if client_info.purpose == "personal":
            tensors = common["result"] = common.get("result") or self.result_models(server_state)
        return Message(tensors, {"lr": self.lr_at(client_info.round, client_info.rounds)})

    def result_models(self, server_state: ServerState) -> dict[str, StateDict]:
        """Returns the result as "model" and, if `averaged_over` is "all", the last round's mean as "cohort"."""
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
        """Yields the mean of the last round's models, as (name, network), if it differs from the result."""
        if "cohort" in message.tensors:
            model = Message({"model": message.tensors["cohort"]}, message.scalars)
            yield "cohort", self.personal_model(model, client_state, client, seed)


def interpolate(start: Tensor, end: Tensor, share_of_end: float) -> Tensor:
    """Returns (1−β)·start + β·end, where β is `share_of_end`, with the dtype of `start`.

    The result is exact where both are equal, and where β is 1.
    """
    if share_of_end == 1:
        return end
    precise_start = start.to(torch.float64)
    return (precise_start + share_of_end * (end.to(torch.float64) - precise_start)).to(start.dtype)


def build_reply_and_client_state(
    net: CachedModule, client: Client, loss: float, method: HasBufferPolicy
) -> tuple[Message, ClientState]:
    """Builds the reply, the trained model and number of examples, and the state, the buffers that stay."""
    model, buffer_state = extract_sent_tensors_and_client_state(net, method)
    return Message({"model": model}, reply_scalars(client, loss)), buffer_state
