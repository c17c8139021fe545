"""FedMRL: each client's network and a small shared one feed one representation, of which the shared network's head sees
the first part (Yi et al., NeurIPS 2024, "Federated Model Heterogeneous Matryoshka Representation Learning").
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor, nn

from polyfed.algorithms.base.averaging import ClientState
from polyfed.algorithms.distillation.base.matryoshka_pair import MatryoshkaPair, last_layer
from polyfed.algorithms.distillation.base.mutual_learning import MutualLearningMethod
from polyfed.algorithms.distillation.base.shared_network import (
    SharedNetworkFactory,
    build_model_spec,
    client_with_shared_network,
)
from polyfed.alignment.representations import representation_module_name
from polyfed.core.algorithm import Client, Message
from polyfed.core.errors import UserError
from polyfed.core.io.values.frozen_mapping import FrozenMapping
from polyfed.core.methods.capabilities import WrapsNetwork
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import extract_sent_tensors_and_client_state, recompute_norm_statistics_if_needed
from polyfed.core.nn.module_cache import (
    CachedModule,
    build_module,
    cached_module,
    copy_trained_weights_and_buffers,
    fill_module,
)
from polyfed.core.seeds import derive_seed
from polyfed.core.state_dict import StateDict
from polyfed.core.training.loop import ForwardPass, fit, reply_scalars


@final
@dataclass(frozen=True, kw_only=True)
class FedMRL(MutualLearningMethod, WrapsNetwork):
    """Trains each client's network, of any architecture, together with a small shared network, which the server averages:
    both feed one representation, from which the heads (last layers) of both predict.

    g and f are the inputs of the last layers of the shared network and of the client's. A linear layer that stays with
    the client, the projector P, makes h = P([g, f]). The client's head takes h, and the shared one its first part, as
    long as g. All are trained on m_local·CE(head_i(h)) + m_global·CE(head(h's first part)). Evaluated model: the client's
    head on h, of the averaged shared network and the client's own network and projector.

    In round 1 the server sends nothing, since it does not know the shapes of the clients' data: every client starts the
    shared network from the same initial weights, which depend on the run's seed.

    Args:
        shared: the shared network: a name of the zoo or module:factory, or a mapping with the name and arguments, as
            {name: cnn_small, channels: [8, 16]} (mlp with 16 hidden numbers, polyfed's choice: small, and it takes inputs
            of any shape except tokens). Its last linear layer gives its outputs, and takes no more numbers than the
            clients' last layers do.
        m_local: weight of the loss of the client's head (1, authors' code).
        m_global: weight of the loss of the shared head (1, authors' code).
        weighted: weighs clients in the shared network by their number of training examples (True, authors' code); False
            counts every client the same.
        buffers: buffers of the shared network ("average", polyfed's choice); those of the client's always stay with it.

    The other fields are those of `LocalTraining`, for all parts.

    >>> FedMRL(shared={"name": "mlp", "hidden": [32]}).shared
    {'name': 'mlp', 'hidden': (32,)}
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedmrl",
        summary="A small common network feeds each client's representation",
        paper="Yi et al. 2024",
        evaluated="its own network and the common one, joined",
        small={"shared": {"name": "mlp", "hidden": (4,)}},
        leaderboard={"*": {}, "tweets": {"shared": {"name": "lstm", "vocabulary": 5000, "hidden": 16}}},
    )

    shared: str | Mapping[str, Any] = FrozenMapping({"name": "mlp", "hidden": (16,)})
    m_local: float = 1.0
    m_global: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "m_local", "m_global")

    def build_joint_loss(self, pair: Any, client: Client) -> Callable[[ForwardPass], Tensor]:
        """Returns the function that computes the loss of a minibatch for both heads: m_local·CE(z, y) + m_global·CE(s, y).

        z and s are the outputs of the client's head and of the shared one.
        """
        label_loss = self.criterion(client)

        def loss(batch: ForwardPass) -> Tensor:
            z, s, y = batch.outputs, pair.outputs, batch.targets
            return self.m_local * label_loss(z, y) + self.m_global * label_loss(s, y)

        return loss

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns network, initial projector (equal for equal architectures), and both last layers' places.

        Raises:
            UserError: the two networks cannot be joined.
        """
        client_state = super().client_init(client, seed)
        factory = client_with_shared_network(self._shared_options, client_state, client).factory
        shared = cached_module(factory, client.train.device).module
        networks = super().personal_model(Message(), client_state, client, seed), shared
        layers = [net.get_submodule(representation_module_name(net, client.train)) for net in networks]
        if not all(isinstance(layer, nn.Linear) for layer in layers):
            kinds = [type(layer).__name__ for layer in layers]
            raise UserError(f"FedMRL: the last layers of the network of {client.id!r} and of the shared one are {kinds}; "
                            "give networks that end in an nn.Linear")  # fmt: skip
        places = [list(net.modules()).index(layer) for net, layer in zip(networks, layers, strict=True)]
        width, shared_width = (last_layer(net, place).in_features for net, place in zip(networks, places, strict=True))
        if shared_width > width or layers[1].out_features != client_state["outputs"]:
            raise UserError(
                f"FedMRL: the last linear layer of the shared network takes {shared_width} numbers and gives "
                f"{layers[1].out_features}, that of the network of {client.id!r} takes {width}, for "
                f"{client_state['outputs']} outputs; give a shared network that takes no more and gives as many, in Python "
                f"pf.algorithms.FedMRL(shared={{'name': 'mlp', 'hidden': [{min(width, 16)}]}}), in the terminal "
                f"--algorithm.shared '{{name: mlp, hidden: [{min(width, 16)}]}}'"
            )
        is_side_by_side = int(client_state.get("side_by_side", False))
        form = [*places, client_state["outputs"], is_side_by_side, *client_state["input_shape"]]
        projector = MatryoshkaPair(*networks, form, seed=derive_seed(seed, "projector")).projector
        return {**client_state, "form": form, "projector": copy_trained_weights_and_buffers(projector)}

    def _load_pair(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[MatryoshkaPair, CachedModule]:
        """Returns the client's network joined with the received shared one, and the module of the shared one alone."""
        shared, _ = self._load_shared_network(message, client_state, client)
        personal = super().personal_model(message, client_state, client, seed)
        pair = MatryoshkaPair(personal, shared.module, client_state["form"], seed=0)
        fill_module(pair.projector, client_state["projector"])
        return pair.to(client.train.device), shared

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the client's network, the shared one and the projector; replies with the shared one only."""
        pair, shared = self._load_pair(message, client_state, client, seed)
        loss = self.build_joint_loss(pair, client)
        fit_result = fit(pair, client, self, lr=message.scalars["lr"], seed=seed, loss=loss, reported_loss="task")
        model, buffer_state = extract_sent_tensors_and_client_state(shared, self)
        parts = {"own": pair.own, "projector": pair.projector}
        state_after = {**client_state, **buffer_state}
        state_after |= {name: copy_trained_weights_and_buffers(part) for name, part in parts.items()}
        return Message({"model": model}, reply_scalars(client, fit_result.loss)), state_after

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the network to evaluate for the client: its network and the averaged shared one, joined."""
        pair, shared = self._load_pair(message, client_state, client, seed)
        recompute_norm_statistics_if_needed(shared, client, client_state, self.buffers)
        return pair

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields nothing: neither network is trained to predict without the other."""
        return iter(())

    def wrap_network(self, network: nn.Module, weights: StateDict) -> nn.Module:
        """Joins a client's network with a shared one, in the form that the weights of the pair say."""
        form = [int(number) for number in weights["form"]]
        spec = build_model_spec(self._shared_options, form[4:], form[2])
        return MatryoshkaPair(network, build_module(SharedNetworkFactory(spec, bool(form[3])), 0), form, seed=0)
