"""FedAvg with fine-tuning: each client trains the global model on its own data before using it."""

from dataclasses import dataclass, replace
from typing import ClassVar, final

from torch import nn

from polyfed.algorithms.base.averaging import AveragedOver, ClientState, GlobalModelMethod
from polyfed.core.algorithm import Client, Message
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import load_client_model, recompute_norm_statistics, recompute_norm_statistics_if_needed
from polyfed.core.training.loop import fit


@final
@dataclass(frozen=True, kw_only=True)
class FedAvgFT(GlobalModelMethod):
    """Trains a global model by FedAvg, and before evaluation each client fine-tunes a copy of it on its training data
    for `finetune_epochs`.

    It is an honest baseline of personalisation (Cheng et al., 2021). Evaluated model: θ after fine-tuning. Neither θ
    nor the replies depend on it.

    Args:
        weighted: weighs clients by their number of training examples (FedAvg's paper); False counts every client the same.
        averaged_over: the clients over which the result is averaged: "cohort", those of the last round (paper), or
            "all", with their latest models, which the server then stores (see `GlobalModelMethod`).
        finetune_epochs: epochs of fine-tuning (1, polyfed's choice).
        finetune_lr: learning rate of fine-tuning; None takes the round's (polyfed's choice).

    The other fields are those of `LocalTraining`. `buffers` is "average" by default, although the evaluated model is the
    client's own: the federation trains FedAvg, so that both methods have the same θ, and fine-tuning then adapts
    BatchNorm's statistics to the client's data.
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedavg_ft",
        summary="FedAvg, then fine-tuning on the client's data",
        evaluated="the fine-tuned model",
        stacked=True,
    )
    private_fits: ClassVar[tuple[str, ...]] = ("local_epochs", "finetune_epochs")

    weighted: bool = True
    averaged_over: AveragedOver = "cohort"
    finetune_epochs: int = 1
    finetune_lr: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.finetune_epochs >= 1, "finetune_epochs", "at least 1 (0 would be FedAvg)")
        self._require(self.finetune_lr is None or self.finetune_lr > 0, "finetune_lr", "positive, or none")

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the global model after `finetune_epochs` on the client's examples.

        If the server sent no BatchNorm statistics, fine-tuning starts from those of the client's data; under
        "recompute" they are estimated again for the fine-tuned weights.
        """
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        recompute_norm_statistics_if_needed(net, client, client_state, self.buffers)
        options = replace(self, local_epochs=self.finetune_epochs, local_steps=None)
        lr = message.scalars["lr"] if self.finetune_lr is None else self.finetune_lr
        fit(net.module, client, options, lr=lr, seed=seed)
        if self.buffers == "recompute":
            recompute_norm_statistics(net.module, client.train)
        return net.module
