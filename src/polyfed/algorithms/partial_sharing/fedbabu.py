"""FedBABU: clients train and share the body of a network alone, the head stays at its initial weights, and each client
fine-tunes before use (Oh, Kim and Yun, ICLR 2022, "FedBABU: Toward Enhanced Representation for Federated Image
Classification", arXiv 2106.06042).
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, final

from torch import nn

from polyfed.algorithms.base.averaging import ClientState
from polyfed.algorithms.base.heads.body_and_head import train_only
from polyfed.algorithms.base.heads.chosen_head import ChosenHeadMethod
from polyfed.core.algorithm import Client, Message
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy, recompute_norm_statistics
from polyfed.core.training.loop import fit, reply_scalars

FinetunedPart = Literal["all", "head", "body"]


@final
@dataclass(frozen=True, kw_only=True)
class FedBABU(ChosenHeadMethod):
    """Trains a body shared by all clients under one head that keeps its initial random weights, and lets each client
    fine-tune the network before it is evaluated.

    In a round client i trains the body φ with the head h⁰ frozen, and the server averages: φ ← Σ_i (n_i/n) φ_i. h⁰ is
    the same for all clients, since all draw it from the run's seed. All clients have one architecture. Evaluated model:
    (φ, h⁰) after fine-tuning on the client's training data; next to it (φ, h⁰), as `server_...`. Neither φ nor the replies
    depend on fine-tuning.

    Args:
        finetune_epochs: epochs of fine-tuning before evaluation (5, authors' code); 0 evaluates (φ, h⁰).
        finetune_part: which part is fine-tuned: "all" (authors' code), "head" or "body" (the paper compares them).
        finetune_lr: learning rate of fine-tuning; None takes a tenth of the round's (polyfed's choice: the body has grown to
            suit a head of small weights, so that at the round's rate the whole network can diverge).
        head_layers: how many of the last parametric layers are the head (1, the classifier: paper). 0 leaves nothing
            frozen: FedAvg with fine-tuning, bit for bit where `finetune_lr` is the round's.
        weighted: weighs clients by their number of training examples (True, polyfed's choice: as FedAvg); the authors'
            code has the plain mean.
        buffers: buffers of the body; those of the head are never sent ("local", polyfed's choice).

    The other fields are those of `LocalTraining`.

    >>> FedBABU(finetune_part="head").finetune_epochs
    5
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedbabu",
        summary="A body trained under a fixed head; then fine-tuning",
        paper="Oh et al. 2022",
        evaluated="the fine-tuned model; also before fine-tuning",
        small={"finetune_epochs": 1},
        stacked=True,
    )
    private_fits: ClassVar[tuple[str, ...]] = ("local_epochs", "finetune_epochs")
    name_with_empty_head: ClassVar[str] = "FedAvg with fine-tuning (fedavg_ft)"

    finetune_epochs: int = 5
    finetune_part: FinetunedPart = "all"
    finetune_lr: float | None = None
    weighted: bool = True
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "finetune_epochs")
        self._require(self.finetune_lr is None or self.finetune_lr > 0, "finetune_lr", "positive, or none")

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the received body φ for `local_epochs` with the head h⁰ frozen; returns a reply with the body."""
        net = self._load_with_local_part(message, client_state, client)
        fit_body = partial(fit, net.module, client, self, lr=message.scalars["lr"], seed=seed)
        loss = train_only(net.module, lambda name: name not in client_state["head"], fit_body)
        model, head, buffer_state = self._split_trained(net, client_state)
        return Message({"model": model}, reply_scalars(client, loss)), {"head": head, "trained": True, **buffer_state}

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the network to evaluate for the client: φ with h⁰ after `finetune_epochs` of training on its data."""
        module = super().personal_model(message, client_state, client, seed)
        if not self.finetune_epochs:
            return module
        options = replace(self, local_epochs=self.finetune_epochs, local_steps=None)
        lr = message.scalars["lr"] / 10 if self.finetune_lr is None else self.finetune_lr
        fit_part = partial(fit, module, client, options, lr=lr, seed=seed)
        train_only(module, partial(self._is_finetuned, client_state["head"]), fit_part)
        if self.buffers == "recompute":
            recompute_norm_statistics(module, client.train)
        return module

    def _is_finetuned(self, head: Container[str], name: str) -> bool:
        return self.finetune_part == "all" or (self.finetune_part == "head") == (name in head)

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields a further network to evaluate, as (name, network): φ with h⁰, before fine-tuning."""
        yield "server", super().personal_model(message, client_state, client, seed)
