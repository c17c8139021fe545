"""DepthFL: clients train the first layers of one global model, as deep as they can afford, with a classifier after each
depth; the classifiers of a client teach one another (Kim, Yu, Kim and Moon, ICLR 2023, "DepthFL: Depthwise Federated
Learning for Heterogeneous Clients").
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.algorithms.base.averaging import Averaging, ClientState, ServerState, build_reply_and_client_state
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import load_client_model, tensors_to_send
from polyfed.core.nn.module_cache import cached_module, initial_state
from polyfed.core.training.loop import ForwardPass, fit

# The server keeps "model": the tensors of all depths; "forms": for each architecture, {tensor's name: its name in "model"}


@final
@dataclass(frozen=True, kw_only=True)
class DepthFL(Averaging):
    """Trains one global model with a classifier after each depth. Each client trains the first layers, as many as it
    can afford, with their classifiers.

    Client i of depth d minimises Σ_k ℓ(z_k, y) + w/(d − 1)·Σ_k Σ_{l≠k} KL(softmax(z_l) ‖ softmax(z_k)), where z_k are the
    outputs of its k-th classifier, and the teacher z_l gets no gradient. w grows from nearly 0 to `distill` ("ramp-up"). The
    server averages each tensor over the clients of the round that have it. Evaluated model: the client's network, which
    returns the mean of its classifiers' outputs.

    A network with several classifiers has a method `exits(x)` that returns a list with the outputs of each, the shallowest
    first, and returns their mean itself. Tensors with one name and one shape are the same layer in all networks. With one
    depth and `weighted` it is FedAvg, bit for bit, if there is one classifier.

    Args:
        distill: w of the classifiers' mutual distillation after the ramp-up (1, authors' code); 0 turns it off.
        rampup: share of the run's rounds in which w grows, as distill·exp(−5·(1 − t/T)²) in the t-th of T rounds (0.3,
            authors' code: 300 of 1,000 rounds); 0 takes the whole w from the start.
        weighted: weighs clients by their number of training examples (False, authors' code: all clients that have a tensor
            count the same).

    The other fields are those of `LocalTraining`.

    >>> DepthFL(distill=0.5, rampup=0.5).distillation_weight(1, 10) < 0.01
    True
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="depthfl",
        summary="Clients train the first layers of one model, with exits",
        paper="Kim et al. 2023",
        evaluated="the mean of the client's classifiers",
        leaderboard={},
        stacked=True,
    )

    requires: ClassVar[frozenset[str]] = frozenset({"architectures", "classification", "one_input_spec"})
    discloses: ClassVar[frozenset[str]] = frozenset({"architecture", "weights"})
    traits: ClassVar[frozenset[str]] = frozenset({"plans_all_rounds"})
    distill: float = 1.0
    rampup: float = 0.3
    weighted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "distill")
        self._require(0 <= self.rampup <= 1, "rampup", "from 0 to 1")

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the initial tensors of all networks; the largest's where several have one."""
        assert server.architectures is not None  # `requires` names "architectures"
        tensors_of = {
            key: tensors_to_send(initial_state(factory, server.seed), cached_module(factory).buffers, self.buffers)
            for key, factory in server.architectures.items()
        }
        theta: dict[str, Tensor] = {}
        forms: dict[str, dict[str, str]] = {}
        for key in sorted(
            tensors_of, key=lambda key: (-sum(tensor.numel() for tensor in tensors_of[key].values()), key)
        ):
            forms[key] = {}
            for name, tensor in tensors_of[key].items():
                is_shared = name not in theta or theta[name].shape == tensor.shape
                forms[key][name] = name if is_shared else f"{name} {tuple(tensor.shape)}"
                theta.setdefault(forms[key][name], tensor)
        return {"model": theta, "forms": forms}

    def distillation_weight(self, number: int, rounds: int) -> float:
        """Returns w of a round (from 1) with t = number − 1: distill·exp(−5·(1 − t/T)²) for T rounds of ramp-up.

        Afterwards it is `distill`.
        """
        left = max(0.0, 1 - (number - 1) / (self.rampup * rounds)) if self.rampup else 0.0
        return self.distill * math.exp(-5 * left**2)

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the message to a client: the tensors of its network, the learning rate and w."""
        form = server_state["forms"][client_info.architecture]
        return Message(
            {"model": {name: server_state["model"][key] for name, key in form.items()}},
            {
                "lr": self.lr_at(client_info.round, client_info.rounds),
                "distill": self.distillation_weight(client_info.round, client_info.rounds),
            },
        )

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """Averages each tensor over the clients of the round that have it; a tensor that none has does not change."""
        architectures = {info.id: info.architecture for info in server.clients}
        forms = {i: server_state["forms"][architectures[i]] for i in replies}
        sent = {i: {forms[i][n]: t for n, t in reply.tensors["model"].items()} for i, reply in replies.items()}
        model = {}
        for key, before in server_state["model"].items():
            holders = {i: {key: tensors[key]} for i, tensors in sent.items() if key in tensors}
            model[key] = self._average_by_client(holders, replies)[key] if holders else before
        return {**server_state, "model": model}

    # -- client ---------------------------------------------------------------------------------------------------

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the network with all its classifiers for `local_epochs`; replies with the trained tensors."""
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        lr, has_exits = message.scalars["lr"], hasattr(net.module, "exits")
        with _all_exits_as_outputs(net.module):
            loss = self._local_loss(client, message.scalars["distill"]) if has_exits else None
            fit_result = fit(net.module, client, self, lr=lr, seed=seed, loss=loss)
        return build_reply_and_client_state(net, client, fit_result.loss, self)

    def _local_loss(self, client: Client, weight: float) -> Callable[[ForwardPass], Tensor]:
        task_loss = self.criterion(client)

        def loss(batch: ForwardPass) -> Tensor:
            exits = batch.outputs.unbind(-1)
            total = torch.stack([task_loss(z, batch.targets) for z in exits]).sum()
            pairs = [(z, teacher) for k, z in enumerate(exits) for j, teacher in enumerate(exits) if j != k]
            if not pairs or not weight:
                return total
            return total + weight / (len(exits) - 1) * torch.stack([_teacher_divergence(*pair) for pair in pairs]).sum()

        return loss


def _teacher_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Returns KL(softmax(teacher) ‖ softmax(student)), the mean over a minibatch; the teacher gets no gradient."""
    return F.kl_div(student.log_softmax(1), teacher.detach().log_softmax(1), reduction="batchmean", log_target=True)


@contextmanager
def _all_exits_as_outputs(network: nn.Module) -> Iterator[None]:
    """Lets a network with `exits` return, inside a `with` block, the outputs of all of them, (batch, classes, exits)."""
    exits: Any = getattr(network, "exits", None)
    if exits is None:
        yield
        return
    vars(network)["forward"] = lambda *parts, **kwargs: torch.stack(exits(*parts, **kwargs), -1)
    try:
        yield
    finally:
        del vars(network)["forward"]
