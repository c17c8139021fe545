"""FedPer: clients share the base layers of a network, each keeps its own last layers, and both are trained together
(Arivazhagan, Aggarwal, Singh and Choudhary 2019, "Federated Learning with Personalization Layers", arXiv 1912.00818).
"""

from dataclasses import dataclass
from typing import ClassVar, final

from polyfed.algorithms.base.heads.chosen_head import ChosenHeadMethod
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy


@final
@dataclass(frozen=True, kw_only=True)
class FedPer(ChosenHeadMethod):
    """Trains base layers shared by all clients, which the server averages, together with last layers that never leave
    the client.

    Client i trains (W_B, W_P,i) by SGD on all layers at once and sends W_B only; the server sets W_B ← Σ_i (n_i/n) W_B,i.
    All clients have one architecture. Evaluated model: W_B with the client's own last layers; a client that never took
    part has the initial ones.

    Args:
        head_layers: K_P, how many of the last parametric layers are personal (1, polyfed's choice: the classifier; the
            paper also tries the last blocks). 0 leaves nothing local: FedAvg, bit for bit.
        head: names of the personal modules, instead of a search (polyfed's choice); a ResNet's last blocks, say.
        weighted: weighs clients by their number of training examples (True, polyfed's choice: as FedAvg).
        buffers: buffers of the base layers; those of the head are never sent ("local", polyfed's choice).

    The other fields are those of `LocalTraining`.

    >>> FedPer(head_layers=2).local_epochs
    1
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedper",
        summary="A shared body and a head for each client, trained together",
        paper="Arivazhagan et al. 2019",
        evaluated="the body with the client's head",
        stacked=True,
    )
    private_fits: ClassVar[tuple[str, ...]] = ("local_epochs",)

    weighted: bool = True
    buffers: BufferPolicy = "local"
