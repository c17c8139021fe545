"""FedProto: networks of any architecture learn the same mean representation of each class (Tan et al., AAAI 2022)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from polyfed.algorithms.base.averaging import ServerState
from polyfed.algorithms.base.heads.class_means import AveragesClassMeans
from polyfed.algorithms.prototypes.prototype_method import EvaluatedClassifier, PrototypeMethod, update_prototypes
from polyfed.core.algorithm import ServerContext
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.state_dict import StateDict


@final
@dataclass(frozen=True, kw_only=True)
class FedProto(PrototypeMethod, AveragesClassMeans):
    """Trains each client's network, of any architecture, and pulls its representation of each example towards the mean
    representation of the example's class over all clients.

    Each client minimises CE + λ/d·‖f(x) − p̄_y‖² and sends p_ic, the mean of f over its examples of class c; the server
    averages them to the prototype p̄_c. λ = 0 is Local, bit for bit, as far as training goes. Evaluated model: the
    class of the nearest prototype; next to it W_i with its own head, as `head_...`.

    The server needs only the sum over clients. A class that no client of a round has keeps its prototype.

    Args:
        lam: λ ≥ 0, the weight of the distance to the prototypes (1.0, authors' code; the paper chooses it for each
            data set).
        evaluate: "prototypes" predicts the class with the nearest global prototype (paper), "head" takes the network's own
            outputs.
        weighted: p̄_c by each client's number of examples of class c; False is the plain mean over the clients that have it
            (False, authors' code; eq. 6 has these weights and divides by the number of clients once more, which would shrink
            all prototypes).
        buffers: "local" only (polyfed's choice), since networks stay with their clients.

    The other fields are those of `LocalTraining`.

    >>> sorted(FedProto().requires)
    ['classification', 'model', 'one_representation']
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedproto",
        summary="Clients share the mean representation of each class",
        paper="Tan et al. 2022",
        evaluated="nearest prototype; also its own head",
    )

    groups: ClassVar[tuple[str, ...]] = ("classes",)
    lam: float = 1.0
    evaluate: EvaluatedClassifier = "prototypes"
    weighted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weighted:  # by the weights that are sent with the class means
            object.__setattr__(self, "discloses", self.discloses | {"class_counts"})

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the server state before round 1, without class prototypes (mean representations)."""
        return {"prototypes": {}}

    def reply_spec_is_known(self, server_state: ServerState) -> bool:
        """Returns False in round 1, when the server does not know the shape of the class prototypes yet; True later."""
        return bool(server_state["prototypes"])

    def server_step(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Returns the state with each class's mean over the clients that have it (eq. 6).

        p̄_c ← Σ_i w_ic p_ic / Σ_i w_ic.
        """
        return {"prototypes": update_prototypes(server_state["prototypes"], mean["classes"])}
