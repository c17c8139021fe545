"""Ditto: trains a personal model for each client, which is pulled towards a global model that is trained at the same
time (Li, Hu, Beirami and Smith, ICML 2021, algorithm 1).
"""

from dataclasses import dataclass, replace
from typing import ClassVar, final

from polyfed.algorithms.base.averaging import ClientState, build_reply_and_client_state
from polyfed.algorithms.base.personal_network import PersonalBesideGlobalMethod
from polyfed.algorithms.base.regularizers import ProximalTerm, clone_trained_parameters
from polyfed.core.algorithm import Client, Message
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy, load_client_model
from polyfed.core.nn.module_cache import copy_trained_weights_and_buffers
from polyfed.core.training.loop import fit
from polyfed.core.vectorized.deferred_calls import PerClientTerm


@final
@dataclass(frozen=True, kw_only=True)
class Ditto(PersonalBesideGlobalMethod):
    """Trains a personal model for each client, which is pulled towards a global model that FedAvg trains at the same
    time.

    Client i minimises L_i(v_i) + λ/2·‖v_i − w‖² over v_i; the global model w never depends on any v_i. All clients have
    one architecture. Evaluated model: v_i (w for a client that never took part); next to it w, as `server_...`.

    In a round a client trains w as in FedAvg, and then its own v_i, which is pulled to the received w. Both use the same
    minibatches. With λ = 0 it is training alone, bit for bit.

    Args:
        lam: λ ≥ 0, the pull of v_i to w (1, paper: where a client has too few validation examples to choose among 0.1, 1
            and 2).
        personal_epochs: epochs of v_i in a round; None takes as many epochs or steps as w (paper).
        weighted: weighs clients in w by their number of training examples (True, polyfed's choice: as FedAvg); False counts
            every client the same.
        buffers: buffers of w ("local", polyfed's choice), as in every personalised method; v_i always has its own.

    The other fields are those of `LocalTraining`, for w and v_i alike.

    >>> Ditto(lam=0.1).weighted
    True
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="ditto",
        summary="A personal model that is pulled to the global one",
        paper="Li et al. 2021",
        evaluated="the personal model; also the global one",
        stacked=True,
    )
    private_fits: ClassVar[tuple[str, ...]] = ("local_epochs", "personal_epochs")

    clients_keep_trained_weights: ClassVar[bool] = True
    lam: float = 1.0
    personal_epochs: int | None = None
    weighted: bool = True
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "lam")
        self._require(
            self.personal_epochs is None or self.personal_epochs >= 1, "personal_epochs", "at least 1, or none"
        )

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains global model and the personal one pulled to it; replies with the former.

        The personal step is v_i ← v_i − η(∇L_i(v_i) + λ(v_i − w)).
        """
        net, lr = load_client_model(client, message.tensors["model"], client_state, self.buffers), message.scalars["lr"]
        # the received w, before it is trained to w_i
        proximal_term = PerClientTerm(ProximalTerm(self.lam), clone_trained_parameters(net.module))
        fit_result = fit(net.module, client, self, lr=lr, seed=seed)
        reply, buffer_state = build_reply_and_client_state(net, client, fit_result.loss, self)
        epochs = self.personal_epochs
        options = self if epochs is None else replace(self, local_epochs=epochs, local_steps=None)
        personal = self.load_personal_network(client_state, client)
        fit(personal, client, options, lr=lr, seed=seed, penalty=proximal_term)
        return reply, {**buffer_state, "model": copy_trained_weights_and_buffers(personal), "trained": True}
