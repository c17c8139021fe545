"""FedRep: clients share a body, each has its own head, and both are trained in turn (Collins et al., ICML 2021,
algorithm 1).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, final

from polyfed.algorithms.base.averaging import ClientState
from polyfed.algorithms.base.heads.body_and_head import train_head_then_body
from polyfed.algorithms.base.heads.chosen_head import ChosenHeadMethod
from polyfed.core.algorithm import Client, Message
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy
from polyfed.core.seeds import derive_seed
from polyfed.core.training.loop import fit, reply_scalars


@final
@dataclass(frozen=True, kw_only=True)
class FedRep(ChosenHeadMethod):
    """Trains a body shared by all clients, which the server averages, and for each client a head (the last layers) that
    never leaves the client.

    In a round each client trains its head h_i with the body φ frozen, then φ with h_i frozen. All clients have one
    architecture. Evaluated model: φ with the client's own head; a client that never took part has the initial head.

    The head is found by running the network on an example, which the server does not have: in round 1 it sends the whole
    initial network, the replies hold bodies only, and from then on the server sends bodies, too. With `head` given, only
    bodies are sent from the start.

    Args:
        local_epochs: epochs on the head, body frozen (10, paper).
        local_steps: if given, exactly this many minibatches on the head instead.
        body_epochs: epochs on the body, head frozen, after that (1; the paper takes 1 or 5, depending on the data).
        head_layers: how many of the last parametric layers are the head (1, the classifier: paper). 0 leaves nothing local:
            FedAvg with `body_epochs`, bit for bit.
        head: names of the head's modules, instead of a search (polyfed's choice).
        weighted: weighs clients by their number of training examples (True, authors' code); algorithm 1 has the plain mean.
        batch_size: examples in a minibatch (10, authors' code); 0 takes all of the client's examples.
        lr: learning rate of round 1, on head and body (0.01, authors' code).
        momentum: momentum of SGD (0.5, authors' code).
        buffers: buffers of the body; those of the head are never sent ("local", polyfed's choice).

    The other fields are those of `LocalTraining`.

    >>> FedRep(head_layers=2).local_epochs
    10
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedrep",
        summary="A shared body, and a head for each client",
        paper="Collins et al. 2021",
        evaluated="the body with the client's head",
        small={"local_epochs": 1},
        stacked=True,
    )
    private_fits: ClassVar[tuple[str, ...]] = ("local_epochs", "body_epochs")
    name_with_empty_head: ClassVar[str] = "FedAvg with local_epochs=body_epochs"

    local_epochs: int = 10
    body_epochs: int = 1
    weighted: bool = True
    batch_size: int = 10
    lr: float = 0.01
    momentum: float = 0.5
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "body_epochs")

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the head with the body frozen, then the body with the head frozen; replies with the body.

        It is algorithm 1, with `local_epochs` for the head and `body_epochs` for the body.
        """
        net = self._load_with_local_part(message, client_state, client)
        fit_net = partial(fit, net.module, client, lr=message.scalars["lr"])
        # The body's seed is the round's own, which makes FedRep without a head FedAvg.
        body_options = replace(self, local_epochs=self.body_epochs, local_steps=None)
        fit_head = partial(fit_net, options=self, seed=derive_seed(seed, "head"))
        loss = train_head_then_body(
            net.module, client_state["head"], fit_head, partial(fit_net, options=body_options, seed=seed)
        )
        model, head, buffer_state = self._split_trained(net, client_state)
        return Message({"model": model}, reply_scalars(client, loss)), {"head": head, "trained": True, **buffer_state}
