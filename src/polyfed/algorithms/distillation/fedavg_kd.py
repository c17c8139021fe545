"""Local distillation: clients train a teacher by FedAvg, and each distils it into its own network; the baseline
"FLHA-distillation" of FLHA-GHN (Litany et al. 2022, section 5.1 and appendix E).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from polyfed.algorithms.base.averaging import build_reply_and_client_state
from polyfed.algorithms.distillation.base.output_matching import softened_kl_divergence
from polyfed.algorithms.distillation.base.shared_network import (
    SharedNetworkMethod,
    check_network_factory_can_be_imported,
    client_with_shared_network,
    infer_shared_network_sizes,
)
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.examples.pytree import call_network_on_copy_if_it_changes_inputs, logits_of, tree_map
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import load_client_model, recompute_norm_statistics_if_needed
from polyfed.core.nn.memory_format import to_preferred_memory_format
from polyfed.core.nn.module_cache import cached_module, copy_trained_weights_and_buffers, fill_module, initial_state
from polyfed.core.state_dict import StateDict, StateDictSpec
from polyfed.core.training.loop import ForwardPass, fit

# "model": the teacher; "rounds_left" of its training; "taught": the clients that have received the trained teacher
ServerState = dict[str, Any]
# "student"; "teacher", once received; "buffers" of the teacher; "seed", "input_shape", "outputs"
ClientState = dict[str, Any]


@final
@dataclass(frozen=True, kw_only=True)
class FedAvgKD(SharedNetworkMethod):
    """Trains a common teacher network by FedAvg (phase 1), from which each client then trains its network by
    distillation (phase 2).

    Client i's network θ_i, of any architecture, minimises (1−α)·CE(θ_i, y) + α·2T²·KL on the client's own data, where
    KL is the divergence of the teacher's softmax at temperature T from the student's. Evaluated model: θ_i, which has
    its initial weights until the client has distilled; next to it the teacher t, as `teacher_...`.

    The paper writes KL(y_pred, y_teacher), in the argument order of PyTorch's `kl_div`; that function computes, and Hinton
    et al. (2015) minimise, KL(teacher ‖ student), and so does polyfed, as the mean over examples. Beyond the paper: in
    multilabel tasks, KL is that of each label's Bernoulli distribution at temperature T, averaged over labels; in regression
    it is that of Gaussians with standard deviation T around the outputs, so that 2T²·KL is their squared distance for any T.

    In round 1 the server sends nothing, since it does not know the shapes of the clients' data: every client starts the
    teacher from the same initial weights, which depend on the run's seed. After its training the server sends the teacher
    once to each client, which keeps it; from then on no tensors are sent, and students never are.

    Args:
        teacher: the teacher network: a name of the zoo or module:factory, or a mapping with the name and arguments, as
            {name: resnet18, width: 16}. "mlp" takes inputs of any shape except tokens, and concatenates inputs of several
            parts (polyfed's choice). The paper names no teacher; its recipes have resnet18, Arch 0. A teacher that is no
            better than a client's own training does not help.
        teacher_lr: the teacher's learning rate, with a cosine schedule over its rounds (0.1, paper).
        teacher_rounds: rounds of the teacher's training, before the rounds of distillation; None takes half of all rounds,
            rounded up (polyfed's choice; the paper has 200 epochs for each).
        alpha: α, weight of the teacher in the loss (0.7, paper); 0 is Local.
        temperature: T of both softmaxes (20, paper).
        weighted: weighs clients in the teacher's mean by their number of training examples (True, paper: FedAvg); False
            counts every client the same.
        lr: learning rate of the student (0.01, paper).
        buffers: buffers of the teacher ("average", polyfed's choice); the student's always stay with the client.

    The other fields are those of `LocalTraining`, in both phases; `schedule` is the student's, over the rounds of phase 2.

    >>> FedAvgKD(teacher={"name": "mlp", "hidden": [32]}).teacher
    {'name': 'mlp', 'hidden': (32,)}
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedavg_kd",
        summary="A teacher trained by FedAvg, distilled into each network",
        paper="Litany et al. 2022",
        evaluated="its own; also the teacher",
        leaderboard={"*": {}, "tweets": {"teacher": {"name": "lstm", "vocabulary": 5000}, "teacher_lr": 0.002}},
    )

    traits: ClassVar[frozenset[str]] = frozenset({"one_version", "plans_all_rounds"})
    network_field: ClassVar[str] = "teacher"
    teacher: str | Mapping[str, Any] = "mlp"
    teacher_lr: float = 0.1
    teacher_rounds: int | None = None
    alpha: float = 0.7
    temperature: float = 20.0
    weighted: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._positive("teacher_lr")
        self._at_least(1, "teacher_rounds")
        self._require(0 <= self.alpha <= 1, "alpha", "between 0 and 1")
        self._positive("temperature")

    def _num_teacher_rounds(self, rounds: int) -> int:
        return (rounds + 1) // 2 if self.teacher_rounds is None else self.teacher_rounds

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns a state without a teacher network, which comes with the clients' first replies.

        Raises:
            UserError: `teacher_rounds` leaves no round for phase 2.
        """
        check_network_factory_can_be_imported(self._shared_options)
        teacher_rounds = self._num_teacher_rounds(server.rounds)
        if self.teacher_rounds is not None and teacher_rounds >= server.rounds:
            raise UserError(
                f"FedAvgKD: teacher_rounds must be below the number of rounds, {server.rounds}, got {teacher_rounds}: there "
                "would be no round to distil in; give more rounds, or a smaller teacher_rounds"
            )
        return {"model": {}, "rounds_left": teacher_rounds, "taught": []}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the teacher network in phase 1, and in phase 2 to a client that lacks it."""
        teacher_rounds = self._num_teacher_rounds(client_info.rounds)
        if server_state["rounds_left"]:
            lr = replace(self, lr=self.teacher_lr, schedule="cosine").lr_at(client_info.round, teacher_rounds)
        else:
            lr = self.lr_at(client_info.round - teacher_rounds, max(1, client_info.rounds - teacher_rounds))
        needs_teacher = server_state["model"] and client_info.id not in server_state["taught"]
        scalars = {"lr": lr, "distil": float(server_state["rounds_left"] == 0)}
        return Message({"model": server_state["model"]} if needs_teacher else {}, scalars)

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shapes and dtypes of the first teacher in phase 1; in phase 2 none.

        Raises:
            ValueError: the teacher is missing.
        """
        return {} if server_state["rounds_left"] == 0 else super().reply_spec(server_state, message, reply)

    def server_step(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Returns the state with the mean teacher (phase 1), or the clients that have it (phase 2)."""
        if server_state["rounds_left"] == 0:
            return {**server_state, "taught": sorted({*server_state["taught"], *client_ids})}
        return {**server_state, **mean, "rounds_left": server_state["rounds_left"] - 1}

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the client's network (the student), and the input shape and outputs of the teacher."""
        assert client.model is not None
        student = initial_state(client.model, seed)
        return {
            "seed": seed,
            **infer_shared_network_sizes(self._shared_options, student, client, "FedAvgKD", "teacher"),
            "student": student,
        }

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains and returns the teacher (phase 1), or trains the student on it (phase 2).

        Each phase has `local_epochs` per round.
        """
        if message.scalars["distil"]:
            return self._train_student(message, client_state, client, seed)
        net, _ = self._load_shared_network(message, client_state, client)
        fit_result = fit(net.module, client, self, lr=message.scalars["lr"], seed=seed)
        reply, buffer_state = build_reply_and_client_state(net, client, fit_result.loss, self)
        return reply, {**client_state, **buffer_state}

    def _train_student(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        teacher = self._load_teacher(message, client_state, client)
        student = self.personal_model(message, client_state, client, seed)
        hard = self.criterion(client)

        def loss(batch: ForwardPass) -> Tensor:
            """Computes the student's loss on a minibatch, (1−α)·CE(y_pred, y) + α·KL·2T² (appendix E).

            The teacher gets the same augmented inputs as the student.
            """
            with torch.no_grad():
                # They have the student's memory format.
                x = to_preferred_memory_format(teacher, tree_map(Tensor.contiguous, batch.inputs))
                target = logits_of(call_network_on_copy_if_it_changes_inputs(teacher, x))
            soft = (
                softened_kl_divergence(target, batch.outputs, self.temperature, client.task) * 2 * self.temperature**2
            )
            return (1 - self.alpha) * hard(batch.outputs, batch.targets) + self.alpha * soft

        fit_result = fit(student, client, self, lr=message.scalars["lr"], seed=seed, loss=loss)
        state_after = {**client_state, "student": copy_trained_weights_and_buffers(student)}
        if "model" in message.tensors:
            state_after["teacher"] = dict(message.tensors["model"])
        return Message({}, {"train_loss": fit_result.loss, "num_examples": len(client.train)}), state_after

    def _load_teacher(self, message: Message, client_state: ClientState, client: Client) -> nn.Module:
        """Loads the teacher in evaluation mode, from the message or from the client state."""
        model = message.tensors.get("model", client_state.get("teacher"))
        if model is None:
            raise UserError(
                f"client {client.id!r} was sent the teacher in an earlier round, and lost it with its private state; "
                "start the run again"
            )
        teacher_client, _ = client_with_shared_network(self._shared_options, client_state, client)
        return recompute_norm_statistics_if_needed(
            load_client_model(teacher_client, model, client_state, self.buffers),
            teacher_client,
            client_state,
            self.buffers,
        ).eval()

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the network to evaluate for the client: its network, the student."""
        assert client.model is not None
        return fill_module(cached_module(client.model, client.train.device).module, client_state["student"])

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields a further network to evaluate, as (name, network): the teacher with the client's buffers."""
        yield "teacher", self._load_teacher(message, client_state, client)
