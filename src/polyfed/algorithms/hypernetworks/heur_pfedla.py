"""HeurpFedLA: mixes models as pFedLA does, but each client retains the k layers that weigh most (Ma et al., CVPR 2022,
algorithm 2).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from torch import nn

from polyfed.algorithms.hypernetworks.pfedla import ClientState, LayerAggregationMethod, ServerState
from polyfed.core.algorithm import Client, Message
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import (
    extract_sent_tensors_and_client_state,
    load_client_model,
    recompute_norm_statistics_if_needed,
    tensors_to_send,
)
from polyfed.core.nn.module_cache import CachedModule, cached_module, initial_state
from polyfed.core.state_dict import StateDictSpec, clone_tensors, state_dict_spec
from polyfed.core.training.loop import fit, reply_scalars


@final
@dataclass(frozen=True, kw_only=True)
class HeurPFedLA(LayerAggregationMethod):
    """Mixes all clients' models layer by layer for each client, as pFedLA does, but k layers of each client's model are
    not mixed, and so need not be sent to it.

    These are the k layers in which the client's own weight is largest; they are neither aggregated nor sent to it.

    All layers are sent up (paper, section 3.3). Evaluated model: the network with which the client would begin its
    next round, its own retained layers and the other layers of θ̄_i; next to it, as `trained_...`, θ_i after its last
    local training.

    With k = 0 it is pFedLA; with k = all layers it is training alone, without any download.

    Args:
        k: number of layers that each client retains (1, the paper's tables). The other fields are those of
            `LayerAggregationMethod` and `LocalTraining`.

    >>> HeurPFedLA(k=2).k
    2
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="heur_pfedla",
        summary="pFedLA; each client keeps its k most personal layers",
        paper="Ma et al. 2022",
        evaluated="the aggregated model; also the trained one",
        published=frozenset({"model"}),
        stacked=True,
    )
    private_fits: ClassVar[tuple[str, ...]] = ("local_epochs",)

    k: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.k >= 0, "k", "a number of layers, at least 0")

    # -- server ---------------------------------------------------------------------------------------------------

    @property
    def _num_retained_layers(self) -> int:
        return self.k

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shapes and dtypes that a client's reply must have: those of all layers of the model."""
        return {"model": state_dict_spec(server_state["models"][server_state["clients"][0]])}

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the client's private state before round 1: its model θ_i, with the common initial weights."""
        assert client.model is not None
        buffers = cached_module(client.model).buffers
        return {"model": tensors_to_send(initial_state(client.model, seed), buffers, "local")}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains received and retained layers together; replies with all of them.

        The network is {Heurθ̄_i, θ_i^retain} (line 13).
        """
        net = self._load_with_retained_layers(message, client_state, client)
        fit_result = fit(net.module, client, self, lr=message.scalars["lr"], seed=seed)
        model, state_after = extract_sent_tensors_and_client_state(net, self)
        state_after["model"] = clone_tensors(model)
        return Message({"model": model}, reply_scalars(client, fit_result.loss)), state_after

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the network of the received layers and those that the client retained."""
        return recompute_norm_statistics_if_needed(
            self._load_with_retained_layers(message, client_state, client), client, client_state, self.buffers
        )

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields (name, network): the client's model θ_i as it was after its last local training."""
        if self.evaluate_trained:
            net = load_client_model(client, client_state["model"], client_state, self.buffers)
            yield "trained", recompute_norm_statistics_if_needed(net, client, client_state, self.buffers)

    def _load_with_retained_layers(self, message: Message, client_state: ClientState, client: Client) -> CachedModule:
        """Loads the client's own model into its network, then replaces the layers that are in the message."""
        return load_client_model(
            client, {**client_state["model"], **message.tensors["model"]}, client_state, self.buffers
        )
