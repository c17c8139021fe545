"""LG-FedAvg: the server averages heads, and bodies stay with their clients (Liang et al. 2020, "Think Locally, Act
Globally", algorithm 1).
"""

from dataclasses import dataclass
from typing import ClassVar, final

from polyfed.algorithms.base.heads.initial_heads import InitialHead
from polyfed.algorithms.base.heads.shared_heads import AveragedHeadMethod
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy


@final
@dataclass(frozen=True, kw_only=True)
class LGFedAvg(AveragedHeadMethod):
    """Trains a head (the last layers) shared by all clients, which the server averages, and for each client a body of
    any architecture that never leaves the client.

    A client trains both together, from its body φ_i and the received head h (see the base `AveragedHeadMethod`). With the
    whole network as the head it is FedAvg in which clients keep their buffers, bit for bit. Evaluated model: h(φ_i(x)), with
    the average h; next to it the client's network as it had trained it, as `trained_...`.

    A head's tensors are sent under the place of their layer counted from the output (`0.weight` is the last layer's), since
    names differ between architectures. In round 1 the server sends no head: all clients draw the same first one from the
    run's seed. A weight of the head that the body uses too (a tied embedding) is the head's, and so averaged.

    Args:
        head_layers: how many of the last parametric layers are the shared head (1, polyfed's choice; the paper and its code
            keep two or more, depending on the data).
        first_head: "form" draws the first head by its layers' kinds and shapes, the same for all clients (paper: the server
            hands out one, algorithm 1), "architecture" takes the head of the architecture's own draw, as in `local`. What
            a network does not draw, such as pretrained weights, stays.
        weighted: weighs heads by the number of training examples (True, paper); False counts every client the same.
        buffers: "local" only (polyfed's choice), since bodies stay with their clients.

    The other fields are those of `LocalTraining`.

    >>> LGFedAvg(head_layers=2).groups
    ('head',)
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="lg_fedavg",
        summary="A shared head, and a body for each client",
        paper="Liang et al. 2020",
        evaluated="the average head on the client's body; also its own",
        published=frozenset({"head"}),
        # With one network for all, the head of its own draw is common to all, and is that of the other methods.
        leaderboard={"*": {"first_head": "architecture"}, "architectures": {}},
        stacked=True,
    )

    head_layers: int = 1
    first_head: InitialHead = "form"
    weighted: bool = True
    buffers: BufferPolicy = "local"
