"""FedHeNN for clients with one architecture: FedAvg whose clients keep seeing examples as alike as the global model does
(Makhija, Han, Ho and Ghosh, ICML 2022, algorithm 1)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor, nn

from polyfed.algorithm import Algorithm, Client, ClientInfo, Message, ServerContext
from polyfed.algorithms.aligning import Aligning
from polyfed.algorithms.averaging import average, reply, same_as_down, start
from polyfed.alignment.representations import representations
from polyfed.alignment.target import Target, mean_rbf_kernel
from polyfed.buffers import ready, receive
from polyfed.scratch import fill, scratch
from polyfed.training import fit
from polyfed.tree import Spec

State = dict[str, Any]  # "model": Ŵ; "public", "seed", "holders": see `Aligning`
Mine = dict[str, Any]  # "trained": W_i with buffers; "buffers"; "public", where it is sent once


@final
@dataclass(frozen=True, kw_only=True)
class FedHeNNHomo(Aligning, Algorithm[State, Mine]):
    """Each client minimises F(W_i) + η_t·(1 − CKA(K_i, K_global(t−1))) (eq. 5), started at the global model Ŵ that it
    received, whose kernel on X, the RAD of the round, is K_global; Ŵ ← Σ_i (n_i/n) W_i. One architecture. η_0 = 0 is FedAvg,
    bit for bit. Evaluated model: W_i after its last local training (Ŵ for a client that never trained); beside it Ŵ, as
    `server_...`.

    Args:
        weighted: the mean by the number of training examples (True, paper); False counts every client the same.
        buffers: ("average", ours, as FedAvg).

    The other fields are those of `Aligning` and `LocalTraining`.

    >>> round(FedHeNNHomo(eta0=0.01).eta_at(4), 6)
    0.02
    """

    requires: ClassVar[frozenset[str]] = frozenset({"one_architecture", "public_data"})
    published: ClassVar[frozenset[str]] = frozenset({"trained"})
    weighted: bool = True

    # -- server ---------------------------------------------------------------------------------------------------

    def init(self, server: ServerContext) -> State:
        """The initial global model Ŵ(0)."""
        return {**self._start_pool(server), **start(server, self.buffers)}

    def dispatch(self, state: State, who: ClientInfo) -> Message:
        """See `dispatch_all`."""
        return next(self.dispatch_all(state, [who]))

    def dispatch_all(self, state: State, everyone: Sequence[ClientInfo]) -> Iterator[Message]:
        """Ŵ, and to train with, η and X, drawn once for all."""
        rad: dict[str, Tensor] = {}
        for who in everyone:
            if who.purpose == "personal":
                yield Message({"model": state["model"]})
                continue
            rad = rad or self._rad(state, who, whole=False)
            yield Message({"model": state["model"], **self._public(state, who, rad)}, self._scalars(state, who))

    def aggregate(self, state: State, replies: Mapping[str, Message]) -> State:
        """Ŵ(t) = Σ_i (n_i/n) W_i(t)."""
        holders = sorted({*state["holders"], *replies}) if self.pool_once else []
        return {**state, "model": average(replies, self.weighted), "holders": holders}

    def reply_spec(self, state: State, down: Message) -> Mapping[str, Spec]:
        """A reply holds the model in the form in which it went down."""
        return same_as_down(down)

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> Mine:
        """Nothing private before the first round."""
        return {}

    def local(self, down: Message, mine: Mine, client: Client, seed: int) -> tuple[Message, Mine]:
        """W_i(t) after `local_epochs` on the loss of eq. 5, started at Ŵ(t−1)."""
        own = receive(client, down.arrays["model"], mine, self.buffers)
        pool, rows = self._received(down, mine, client)
        eta, term = down.scalars["eta"], None
        if eta:
            module = self._representation(own.module, client.id, client.train)
            a_global = representations(own.module, pool.select(rows), module=module, batch_statistics=True)
            target = Target(a_global)
            if self.kernel == "rbf":
                target = Target(mean_rbf_kernel([a_global], [1.0], self.sigma), self.sigma)
            term = self._term(own.module, module, target, pool, rows, eta, seed)
        lr = down.scalars["lr"]
        loss = fit(own.module, client.train, self, lr=lr, seed=seed, task=client.task, penalty=term)
        message, kept = reply(own, client, loss, self.buffers)
        state = own.module.state_dict()
        trained = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        return message, {**kept, "trained": trained, **self._keep_pool(down, mine)}

    def personal(self, down: Message, mine: Mine, client: Client, seed: int) -> nn.Module:
        """W_i."""
        if "trained" not in mine:
            return self._global(down, mine, client)
        assert client.model is not None
        return fill(scratch(client.model, client.train.x.device).module, mine["trained"])

    def beside(self, down: Message, mine: Mine, client: Client, seed: int) -> Iterator[tuple[str, nn.Module]]:
        """Ŵ."""
        yield "server", self._global(down, mine, client)

    def _global(self, down: Message, mine: Mine, client: Client) -> nn.Module:
        return ready(receive(client, down.arrays["model"], mine, self.buffers), client, mine, self.buffers)
