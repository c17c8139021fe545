"""FedALA: each client learns how much of the global model to take over, weight by weight (Zhang, Hua, Wang, Song, Xue,
Ma and Guan, AAAI 2023, algorithm 1).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from polyfed.algorithms.base.averaging import ClientState, build_reply_and_client_state
from polyfed.algorithms.base.personal_network import PersonalBesideGlobalMethod
from polyfed.core.algorithm import Client, Message
from polyfed.core.methods.capabilities import ValidatesNetworks
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy, load_client_model
from polyfed.core.nn.functional_call import call_with_tensors
from polyfed.core.nn.memory_format import to_preferred_memory_format
from polyfed.core.nn.module_cache import copy_trained_weights_and_buffers
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.core.state_dict import StateDict
from polyfed.core.training.loop import fit
from polyfed.models.structure import find_head_modules, split_body_and_head


@final
@dataclass(frozen=True, kw_only=True)
class FedALA(PersonalBesideGlobalMethod, ValidatesNetworks):
    """Starts each client's local training from a mixture of the client's last model and the global model, with a learnt
    mixing weight for each parameter.

    The mixture is Θ̂_i = Θ_i + (Θ − Θ_i) ⊙ W_i, of the client's model Θ_i and the global Θ. W_i is learnt between 0 and
    1 for each weight of the upper layers, and is 1 below, so that the lower layers are the global model's. Everything
    else is FedAvg. All clients have one architecture. Evaluated model: Θ_i after local training (Θ for a client that
    never took part); next to it Θ, as `server_...`.

    W_i starts at 1, is kept from round to round, and is learnt on a part of the training examples by projected gradient
    descent with everything else frozen: for `start_epochs` in a client's second round, when its Θ_i first differs from Θ,
    and for one epoch in each later round. With `weight_lr` 0 it stays at 1, and Θ is that of FedAvg, bit for bit.

    Args:
        layers: p, number of last parametric layers that have weights W (1, paper).
        sample: s, the share of the training examples on which W is learnt, drawn again each round (0.8, paper).
        weight_lr: learning rate of W (1, paper).
        start_epochs: epochs in which W is first learnt (10, polyfed's choice; the paper trains until convergence).
        weighted: weighs clients by their number of training examples (paper); False counts every client the same.
        buffers: "local" (polyfed's choice), as in every personalised method.

    The other fields are those of `LocalTraining`.

    >>> FedALA(layers=2).sample
    0.8
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedala",
        summary="Each client learns how much of the global model to take",
        paper="Zhang et al. 2023",
        evaluated="its own; also the average",
        published=frozenset({"model"}),
    )

    clients_keep_trained_weights: ClassVar[bool] = True
    layers: int = 1
    sample: float = 0.8
    weight_lr: float = 1.0
    start_epochs: int = 10
    weighted: bool = True
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "layers")
        self._require(0 < self.sample <= 1, "sample", "above 0 and at most 1")
        self._at_least(0, "weight_lr")
        self._at_least(1, "start_epochs")

    def validate_network(self, client: Client) -> None:
        """Raises an error if the client's network has fewer layers than are to be mixed."""
        self.client_init(client, 0)

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns a model with common initial weights, and mixing weights of 1 for upper layers.

        They are Θ_i and W.
        """
        module = self.load_personal_network(client_state := super().client_init(client, seed), client)
        example = client.train.first_input
        _, upper = split_body_and_head(
            module, find_head_modules(module, to_preferred_memory_format(module, example), num_layers=self.layers)
        )
        names = [name for name, p in module.named_parameters() if name in upper and p.requires_grad]
        weights = {name: torch.ones_like(client_state["model"][name]) for name in names}
        return {**client_state, "weights": weights, "learnt": False}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the client's mixture with the global model for `local_epochs`; replies with the result.

        The mixing weights stay private.
        """
        learns_weights = bool(client_state["trained"] and self.weight_lr)  # before, Θ_i is Θ
        weights = (
            self._learn_mixing_weights(message, client_state, client, seed)
            if learns_weights
            else client_state["weights"]
        )
        mixture = {n: torch.lerp(client_state["model"][n], message.tensors["model"][n], w) for n, w in weights.items()}
        net = load_client_model(client, {**message.tensors["model"], **mixture}, client_state, self.buffers)
        fit_result = fit(net.module, client, self, lr=message.scalars["lr"], seed=seed)
        reply, buffer_state = build_reply_and_client_state(net, client, fit_result.loss, self)
        state_after = {
            "model": copy_trained_weights_and_buffers(net.module),
            "weights": weights,
            "trained": True,
            "learnt": learns_weights,
        }
        return reply, {**buffer_state, **state_after}

    def _learn_mixing_weights(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> StateDict:
        """Learns `{parameter: weights}` by projected gradient descent on a sample of examples.

        W_i ← clip(W_i − η·∇_W L_i(Θ̂_i), 0, 1).
        """
        module = load_client_model(client, message.tensors["model"], client_state, self.buffers).module
        data = client.train
        device, theta_i, theta = data.device, client_state["model"], message.tensors["model"]
        mixing = _Mixing(
            module,
            {n: (theta_i[n].to(device), theta[n].to(device)) for n in client_state["weights"]},
            client_state["weights"],
        )
        shuffled_rows = torch.randperm(len(data), generator=torch_generator(derive_seed(seed, "sample")))
        sample = replace(client, train=data.select(shuffled_rows[: max(1, round(self.sample * len(data)))].to(device)))
        options = replace(
            self, local_epochs=1 if client_state["learnt"] else self.start_epochs, local_steps=None, optimizer="sgd",
            optimizer_options=None, momentum=0.0, nesterov=False, weight_decay=0.0, lr_by_name=None, warmup_steps=0,
            clip_norm=None, patience=None,
        )  # fmt: skip
        gradient_of_weights = partial(mixing.projected_gradient, self.weight_lr)
        fit(mixing, sample, options, lr=self.weight_lr, seed=derive_seed(seed, "weights"), gradient=gradient_of_weights)
        return {
            name: w.detach().clamp(0, 1).to("cpu", copy=True)
            for name, w in zip(client_state["weights"], mixing.w, strict=True)
        }


@final
class _Mixing(nn.Module):
    """Runs a network whose upper layers mix two models; only mixing weights are trained.

    The mixture is Θ_i + (Θ − Θ_i) ⊙ W. The network stays in evaluation mode: dropout would blur W, and BatchNorm's
    statistics must not change.
    """

    def __init__(self, network: nn.Module, ends: Mapping[str, tuple[Tensor, Tensor]], weights: StateDict) -> None:
        super().__init__()
        # The network is in a tuple, so that it is not a submodule and is not trained.
        self._network, self._ends = (network.eval(),), ends
        self.w = nn.ParameterList(weights[name].to(mine.device, copy=True) for name, (mine, _) in ends.items())

    def forward(self, *parts: Any, **named: Any) -> Any:
        """Returns the output of the network with mixed weights Θ̂_i."""
        ends = zip(self._ends.items(), self.w, strict=True)
        upper = {name: torch.lerp(mine, shared, w) for (name, (mine, shared)), w in ends}
        return call_with_tensors(self._network[0], upper, parts, named)

    def projected_gradient(self, lr: float, loss_of: Callable[[int], Tensor]) -> Tensor:
        """Sets the gradient so that an SGD step keeps mixing weights in [0, 1]; returns the loss."""
        loss = loss_of(0)
        with torch.no_grad():
            for w in self.w:
                assert w.grad is not None
                w.grad = (w - (w - lr * w.grad).clamp(0, 1)) / lr
        return loss
