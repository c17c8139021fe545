"""FedHeNN, for clients with one architecture: trains as FedAvg does, while clients align their kernels with the global
model's (Makhija, Han, Ho and Ghosh, ICML 2022, algorithm 1).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import nn

from polyfed.algorithms.alignment.alignment_method import AlignmentMethod
from polyfed.algorithms.base.averaging import (
    AveragedOver,
    ClientState,
    GlobalModelMethod,
    ServerState,
    build_reply_and_client_state,
)
from polyfed.alignment.alignment_term import NetworkKernelTarget
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import load_client_model, load_model_for_eval
from polyfed.core.nn.module_cache import cached_module, copy_trained_weights_and_buffers, fill_module
from polyfed.core.state_dict import StateDict
from polyfed.core.training.loop import fit

# The server keeps "model": Ŵ(t); "latest", "examples": see `GlobalModelMethod`; "public", "seed", "holders": see
# `AlignmentMethod`. A client keeps "trained": W_i with buffers; "buffers"; "public": the pool, if it is sent once.


@final
@dataclass(frozen=True, kw_only=True)
class FedHeNNHomo(AlignmentMethod, GlobalModelMethod):
    """Trains the global model at each client, with a penalty on representations that differ from the global model's;
    the server averages the results.

    Client i minimises F(W_i) + η_t·(1 − CKA(K_i, K_global(t−1))) (eq. 5), starting from the global model Ŵ.

    K_global is the kernel of the received Ŵ on X, the RAD of the round; Ŵ ← Σ_i (n_i/n) W_i over the clients of the
    round. After the last round Ŵ(T) is the mean over all clients' latest networks (algorithm 1, last line). All
    clients have one architecture. With η_0 = 0 it is FedAvg, bit for bit. Evaluated model: W_i after its last local
    training (Ŵ(T) for a client that never trained); next to it Ŵ(T), as `server_...`, and Ŵ(t), the mean over the
    clients of the last round, as `cohort_...`.

    Args:
        weighted: weighs clients by their number of training examples (True, paper; the authors' code counts every client
            the same); False counts every client the same.
        averaged_over: the clients over which Ŵ(T) is averaged: "all", with their latest networks (paper), which the
            server then stores; or "cohort", those of the last round. Training is the same. See `GlobalModelMethod`.
        buffers: "average" (polyfed's choice, as FedAvg).

    The other fields are those of `AlignmentMethod` and `LocalTraining`.

    >>> round(FedHeNNHomo(eta0=0.01).alignment_weight_at(4), 6)
    0.02
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedhenn_homo",
        summary="FedAvg; representations stay close to the global model's",
        paper="Makhija et al. 2022",
        evaluated="its own; also the average",
        small={"local_epochs": 2, "rad_size": 20, "rad_batch": 8, "eta0": 1.0},
        published=frozenset({"trained"}),
        leaderboard={"*": {"eta0": 1.0, "rad_size": 128, "rad_batch": 32}},
        stacked=True,
    )

    requires: ClassVar[frozenset[str]] = frozenset({"one_architecture", "public_data"})
    clients_keep_trained_weights: ClassVar[bool] = True
    weighted: bool = True
    averaged_over: AveragedOver = "all"

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the server state before round 1, with the initial global model Ŵ(0) and the public examples."""
        return {**self._init_public_state(server), **super().server_init(server)}

    def build_message_to_client(
        self, server_state: ServerState, client_info: ClientInfo, common: dict[str, Any]
    ) -> Message:
        """Builds the message for training, Ŵ(t), η and public examples X, or evaluation, Ŵ(T).

        X is drawn once for all clients.
        """
        if client_info.purpose == "personal":
            return Message(super().build_message_to_client(server_state, client_info, common).tensors)
        rad = common["rad"] = common.get("rad") or self._rad_tensors(server_state, client_info, needs_pool=False)
        groups = self._rad_and_pool_groups(server_state, client_info, rad)
        return Message({"model": server_state["model"], **groups}, self._round_scalars(server_state, client_info))

    def server_step(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Replaces the global model by the mean of the clients' models, weighted by their numbers of examples."""
        return {**server_state, **mean, "holders": self._holders_after_round(server_state, client_ids)}

    # -- client ---------------------------------------------------------------------------------------------------

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the global model with the alignment term (eq. 5) for `local_epochs`; replies with W_i."""
        net = load_client_model(client, message.tensors["model"], client_state, self.buffers)
        rad = self._pool_and_rad_rows(message, client_state, client)
        eta, term = message.scalars["eta"], None
        if eta:
            module = self._representation_module(net.module, client.id, client.train)
            k_global = NetworkKernelTarget(net.module, self.sigma if self.kernel == "rbf" else None)
            term = self._alignment_term(net.module, client, module, k_global, rad, eta, seed)
        lr = message.scalars["lr"]
        fit_result = fit(net.module, client, self, lr=lr, seed=seed, penalty=term)
        reply, buffer_state = build_reply_and_client_state(net, client, fit_result.loss, self)
        return reply, {
            **buffer_state,
            "trained": copy_trained_weights_and_buffers(net.module),
            **self._pool_state(message, client_state),
        }

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the network that the client trained last, or the global model if the client never trained."""
        if "trained" not in client_state:
            return self._load_global_model(message, client_state, client)
        assert client.model is not None
        return fill_module(cached_module(client.model, client.train.device).module, client_state["trained"])

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the final global model Ŵ(T), and the last round's mean if that differs, by name."""
        yield "server", self._load_global_model(message, client_state, client)
        if "cohort" in message.tensors:
            yield "cohort", self._load_global_model(message, client_state, client, "cohort")

    def _load_global_model(
        self, message: Message, client_state: ClientState, client: Client, group: str = "model"
    ) -> nn.Module:
        return load_model_for_eval(client, message.tensors[group], client_state, self.buffers)
