"""FedGen: the server trains a generator of representations that the averaged head classifies as their labels say, and
clients train their heads on it too (Zhu, Hong and Zhou, ICML 2021, "Data-Free Knowledge Distillation for Heterogeneous
Federated Learning").
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.algorithms.base.averaging import ClientState, ServerState
from polyfed.algorithms.base.heads.class_means import find_replaceable_head
from polyfed.algorithms.base.heads.shared_heads import AveragedHeadMethod
from polyfed.algorithms.distillation.base.label_generator import build_generator, diversity_loss, draw_generator_inputs
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.methods.capabilities import ValidatesNetworks
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.module_cache import copy_trained_weights_and_buffers
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.core.state_dict import StateDict, StateDictSpec
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.loop import ForwardPass, fit

# The server keeps "head": h; "labels": p̂; "generator": w, empty before the first replies; "seed" of the run; "round"


@final
@dataclass(frozen=True, kw_only=True)
class FedGen(AveragedHeadMethod, ValidatesNetworks):
    """Trains a head (the last layer) that the server averages on the clients' data and on representations that a
    generator makes up; the bodies, of any architecture, stay with their clients.

    The server trains the generator G so that the clients' heads together give a representation G(y, ε) the class y. A
    client then minimises its own loss plus α·CE(h(G(y, ε)), y), with classes y drawn by their shares in the whole
    federation, so that its head keeps the classes that it has no examples of. With α = 0 it is LG-FedAvg, bit for bit.
    Evaluated model: the average head on the client's body; next to it the client's network as it had trained it, as
    `trained_...`.

    The heads are linear, so that the mean of their outputs is the output of their mean: the server needs only the sum of
    the replies.

    Args:
        alpha: α, weight of the generated representations in a client's loss (1, paper; the authors' code has 10, which
            falls by 2 % a round).
        eta: weight of the generator's diversity loss (1, authors' code).
        noise_dim: length of the noise ε (32, authors' code for MNIST).
        hidden_dim: width of the generator's hidden layer (256, authors' code for MNIST).
        generated_batch_size: generated representations in a step of a client (32, paper: as many as in its minibatch).
        server_steps: steps of the generator in a round (50, authors' code).
        server_lr: learning rate of these steps, by Adam (0.0003, authors' code for MNIST).
        server_batch_size: representations in such a step (32, authors' code).
        weighted: weighs heads by the number of training examples (True, authors' code); False counts every client the
            same (paper).
        head_layers: how many of the last parametric layers are averaged (1, paper, section 3.3; it averages all where
            networks have one architecture). Generated representations go into the last one, which is linear.

    The other fields are those of `LocalTraining`.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedgen",
        summary="Heads also learn from a generator of representations",
        paper="Zhu et al. 2021",
        evaluated="the average head on the client's body; also its own",
        small={"server_steps": 5, "hidden_dim": 16, "noise_dim": 4},
        published=frozenset({"head"}),
        leaderboard={"*": {"first_head": "architecture"}, "architectures": {}},
    )

    requires: ClassVar[frozenset[str]] = frozenset({"model", "classification", "one_representation"})
    discloses: ClassVar[frozenset[str]] = frozenset({"weights", "class_counts"})
    groups: ClassVar[tuple[str, ...]] = ("head", "labels")
    alpha: float = 1.0
    eta: float = 1.0
    noise_dim: int = 32
    hidden_dim: int = 256
    generated_batch_size: int = 32
    server_steps: int = 50
    server_lr: float = 0.0003
    server_batch_size: int = 32
    weighted: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "alpha", "eta")
        self._at_least(1, "noise_dim", "hidden_dim", "generated_batch_size", "server_steps")
        self._at_least(2, "server_batch_size")
        self._positive("server_lr")

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns a state without a head and a generator, whose shapes the first replies tell."""
        return {**super().server_init(server), "labels": {}, "generator": {}, "seed": server.seed, "round": 0}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the average head, the learning rate and, for training, generator and class shares."""
        message, for_training = super().dispatch(server_state, client_info), client_info.purpose != "personal"
        generated = {g: server_state[g] for g in ("generator", "labels") if server_state[g] and for_training}
        return Message({**message.tensors, **generated}, message.scalars)

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shapes and dtypes that a client's reply must have: a head, and a number for each class."""
        spec = super().reply_spec(server_state, message, reply)
        return {**spec, "labels": {"counts": (spec["head"]["0.bias"][0], torch.float32)}}

    def server_step(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Returns the mean head h, class shares p̂, and a generator G trained on them.

        G minimises the mean over y ~ p̂ and ε of CE(h(G(y, ε)), y) + η·L_div.
        """
        head, counts = mean["head"], mean["labels"]["counts"].clamp(min=0)
        shares, round_number = F.normalize(counts + (counts.sum() == 0), 1, 0), server_state["round"] + 1
        seed = derive_seed(server_state["seed"], round_number, "server")
        generator = build_generator(head["0.weight"], self.noise_dim, self.hidden_dim, server_state["generator"],
                                    derive_seed(server_state["seed"], "generator"))  # fmt: skip
        labels, inputs = draw_generator_inputs(shares, self.noise_dim, self.server_steps * self.server_batch_size,
                                               torch_generator(derive_seed(seed, "labels")))  # fmt: skip

        def loss(batch: ForwardPass) -> Tensor:
            assert isinstance(batch.inputs, Tensor)
            weight, bias = head["0.weight"], head["0.bias"]
            error = F.cross_entropy(F.linear(batch.outputs.to(weight), weight, bias), batch.targets)
            return error + self.eta * diversity_loss(batch.inputs[:, : self.noise_dim], batch.outputs)  # eq. 4

        options = LocalTraining(local_steps=self.server_steps, batch_size=self.server_batch_size, optimizer="adam")
        fit(generator, Examples(inputs, labels), options, lr=self.server_lr, seed=seed, loss=loss)
        return {**server_state, "head": head, "labels": {"shares": shares}, "round": round_number,
                "generator": copy_trained_weights_and_buffers(generator)}  # fmt: skip

    # -- client ---------------------------------------------------------------------------------------------------

    def validate_network(self, client: Client) -> None:
        """Raises a `UserError` unless the network ends in a linear layer with a bias, its head."""
        self.client_init(client, 0)

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the state of the base; raises a `UserError` unless the head is one linear layer."""
        client_state = super().client_init(client, seed)
        head = find_replaceable_head(self.personal_model(Message(), client_state, client, seed), client, "FedGen")
        if client_state["head"]["0.weight"].shape != head.weight.shape or "0.bias" not in client_state["head"]:
            raise UserError(f"FedGen: the network of client {client.id!r} has further trained layers after its last linear "
                            "one; give one that ends in an nn.Linear with a bias")  # fmt: skip
        return client_state

    def build_penalty(
        self, model: nn.Module, message: Message, client: Client, seed: int
    ) -> Callable[[], Tensor] | None:
        """Returns the function α·CE(h(G(y, ε)), y) with y ~ p̂ drawn at every step.

        It is None if α is 0 or no generator was received.
        """
        if not self.alpha or "generator" not in message.tensors:
            return None
        head = find_replaceable_head(model, client, "FedGen")
        generator = build_generator(
            head.weight, self.noise_dim, self.hidden_dim, message.tensors["generator"], 0
        ).eval()
        random, shares = torch_generator(derive_seed(seed, "generated")), message.tensors["labels"]["shares"]

        def penalty() -> Tensor:
            labels, inputs = draw_generator_inputs(shares, self.noise_dim, self.generated_batch_size, random)
            z = generator(inputs).detach().to(head.weight)
            return self.alpha * F.cross_entropy(head(z), labels.to(z.device))  # eq. 5

        return penalty

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains body and head on own and generated examples; replies with head and class counts.

        If heads are weighted by the number of examples, the shares of the classes are sent, so that their mean is p̂.
        """
        reply, state_after = super().local_update(message, client_state, client, seed)
        counts = torch.bincount(client.train.labels.cpu(), minlength=len(reply.tensors["head"]["0.bias"])).float()
        labels = {"counts": counts / len(client.train) if self.weighted else counts}
        return Message({**reply.tensors, "labels": labels}, reply.scalars), state_after
