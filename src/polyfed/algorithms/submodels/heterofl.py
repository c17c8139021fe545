"""HeteroFL: clients train submodels of one global model, each as wide as it can afford (Diao, Ding and Tarokh, ICLR
2021, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients", algorithm 1).
"""

from dataclasses import dataclass
from typing import ClassVar, final

from polyfed.algorithms.submodels.width_submodel import WidthSubmodelMethod
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy


@final
@dataclass(frozen=True, kw_only=True)
class HeteroFL(WidthSubmodelMethod):
    """Trains one global model. Each client trains a submodel as wide as it can afford: the first units of each layer.

    Client i has the submodel θ[:r·rows, :r·columns] of each tensor of the global model θ. The client's network gives
    the widths. Each entry of θ becomes the mean over the clients of the round that have it, and does not change if none
    has. In training, the outputs of a layer with the share r of the widest network's units are divided by r ("scaler"),
    BatchNorm normalises by the minibatch alone ("static"), and outputs of classes that the client does not have are set
    to 0 in the loss ("masked"). With one width, `weighted`, and all classes at each client it is FedAvg, bit for bit.
    Evaluated model: the client's submodel with its scaler; for the widest client this is θ.

    The networks of all clients must have the same layers and differ in width alone; θ is in each dimension as wide as the
    widest. The scaler is folded into the weights of the evaluated model; public code omits it there.

    Args:
        scaler: divides outputs by r (True, paper); False does not.
        mask: sets the outputs of absent classes to 0 in the loss (True, paper); False does not.
        weighted: weighs clients by their number of training examples (False, paper: all clients that have an entry count the
            same).
        buffers: "recompute" estimates the statistics of evaluation on the client's training data (polyfed's choice; the
            paper gathers them over all clients after the last round); or "local".

    The other fields are those of `LocalTraining`.

    >>> sorted(HeteroFL(mask=False).requires)
    ['architectures', 'one_family', 'one_input_spec']
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="heterofl",
        summary="Clients train corners of one global model, as wide as theirs",
        paper="Diao et al. 2021",
        evaluated="the client's corner",
        leaderboard={},
    )

    scaler: bool = True
    mask: bool = True
    weighted: bool = False
    buffers: BufferPolicy = "recompute"
