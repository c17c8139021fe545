"""FedHeNN for clients with different architectures: each trains its own network, and all networks learn to see the same
examples as alike (Makhija, Han, Ho and Ghosh, ICML 2022, algorithm 2)."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from polyfed.algorithm import Algorithm, Client, ClientInfo, Message, ServerContext
from polyfed.algorithms.aligning import Aligning
from polyfed.alignment.representations import representations
from polyfed.alignment.similarity import mean_similarity
from polyfed.alignment.target import Target, mean_features, mean_rbf_kernel, reduced
from polyfed.buffers import Policy
from polyfed.errors import UserError
from polyfed.scratch import fill, initial_state, scratch
from polyfed.training import fit
from polyfed.tree import Spec

State = dict[
    str, Any
]  # "representations" A_j and "capacities" by client; "received" weights; "forms" of architectures;
# "public", "seed", "holders": see `Aligning`
Mine = dict[str, Any]  # "model": W_i with buffers; "public", where it is sent once


@final
@dataclass(frozen=True, kw_only=True)
class FedHeNN(Aligning, Algorithm[State, Mine]):
    """Each client minimises F(W_i) + η_t·(1 − CKA(K_i, K̄(t−1))) (eq. 6) with a network of its own; K̄ = Σ_j w_j K_j is the
    mean kernel of all clients' latest networks on X, the RAD of the round. η_0 = 0 is Local, bit for bit. Evaluated model:
    W_i.

    A network's representation A_j is computed when it has been trained, on the whole public pool, of which every later X is
    a part: so a client that is not drawn counts in K̄ with its last network exactly, on the same X as the others. Clients
    that nobody has reached yet do not count (ours; the paper's K̄(0) is of untrained networks), so that round 1 has no term.

    A capacity is counted by the server where it has the architectures (`share="weights"`); else it is what the client tells,
    and is believed if it is a whole number up to 10^12.

    Args:
        share: what a client sends: its "representations" (ours: the server learns neither weights nor architecture), or its
            "weights" (paper), of which the server computes the same.
        weighting: w_j "uniform" (1/N, paper), or in proportion to "capacity", the number of trained parameters (the paper
            leaves that open).
        normalise: scale each A_j to unit centred norm on X before it enters K̄, so that no network dominates by the scale of
            its features (False, paper). Without effect with an RBF kernel, whose width follows the scale.
        rank: columns to which each A_j, and with a linear kernel K̄, are reduced before they travel, by principal components
            (None, paper: not at all).
        buffers: "local" only (ours), since networks stay with their clients.

    The other fields are those of `Aligning` and `LocalTraining`.

    >>> FedHeNN(share="weights").requires == {"architectures", "public_data"}
    True
    """

    requires: ClassVar[frozenset[str]] = frozenset({"model", "public_data"})
    discloses: ClassVar[frozenset[str]] = frozenset({"representations"})
    share: Literal["representations", "weights"] = "representations"
    weighting: Literal["uniform", "capacity"] = "uniform"
    normalise: bool = False
    rank: int | None = None
    buffers: Policy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.rank is None or self.rank >= 1, "rank", "at least 1, or none")
        self._require(self.buffers == "local", "buffers", "'local', since networks stay with their clients")
        if self.share == "weights":
            if self.rad == "noise":
                raise UserError(
                    "FedHeNN: rad='noise' needs share='representations': the server, which would compute them, does not "
                    "know the form of the clients' inputs"
                )
            object.__setattr__(self, "requires", frozenset({"architectures", "public_data"}))
            object.__setattr__(self, "published", frozenset({"model"}))
            object.__setattr__(self, "discloses", frozenset({"architecture", "weights"}))

    @property
    def scalars_needed(self) -> frozenset[str]:
        """The capacity, if it weighs and the server cannot count it."""
        told = self.weighting == "capacity" and self.share == "representations"
        return frozenset({"capacity"}) if told else frozenset()

    # -- server ---------------------------------------------------------------------------------------------------

    def init(self, server: ServerContext) -> State:
        """No representations yet."""
        state = {**self._start_pool(server), "representations": {}, "capacities": {}, "received": {}}
        networks = (server.architectures or {}) if self.share == "weights" else {}
        drawn = {key: initial_state(factory, server.seed) for key, factory in networks.items()}
        forms = {k: {n: [list(t.shape), str(t.dtype)] for n, t in tree.items()} for k, tree in sorted(drawn.items())}
        return {**state, "forms": forms}

    def dispatch(self, state: State, who: ClientInfo) -> Message:
        """See `dispatch_all`."""
        return next(self.dispatch_all(state, [who]))

    def dispatch_all(self, state: State, everyone: Sequence[ClientInfo]) -> Iterator[Message]:
        """X, η and K̄, computed once for all; nothing for evaluation, since a client has its own network."""
        rad: dict[str, Tensor] = {}
        target: dict[str, Tensor] = {}
        for who in everyone:
            if who.purpose == "personal":
                yield Message()
                continue
            if not rad:
                rad = self._rad(state, who, whole=self.share == "representations")
                target = self._target(state, self._rows(state, who))
            arrays, scalars = self._public(state, who, rad), self._scalars(state, who)
            if self.share == "weights":
                scalars["form"] = sorted(state["forms"]).index(who.architecture or "")
            yield Message({**arrays, "target": target} if target else arrays, scalars)

    def _target(self, state: State, rows: Tensor) -> dict[str, Tensor]:
        """K̄(t−1) = Σ_j w_j K_j on X, over all clients with a representation."""
        who = sorted(state["representations"])
        if not who:
            return {}
        parts = [state["representations"][j][rows.long()] for j in who]
        raw = [state["capacities"][j] if self.weighting == "capacity" else 1.0 for j in who]
        w = [one / sum(raw) for one in raw]
        if self.kernel == "rbf":
            return {"kernel": mean_rbf_kernel(parts, w, self.sigma)}
        features = mean_features(parts, w, self.normalise)
        return {"features": features if self.rank is None else reduced(features, self.rank)}

    def aggregate(self, state: State, replies: Mapping[str, Message]) -> State:
        """A_j of those who replied, or W_j, of which `server_step` makes A_j."""
        after = {**state, "received": {}}
        if self.share == "weights":
            after["received"] = {j: reply.arrays["model"] for j, reply in sorted(replies.items())}
        else:
            new = {j: reply.arrays["representations"]["a"] for j, reply in replies.items()}
            after["representations"] = _sorted({**state["representations"], **new})
            if self.weighting == "capacity":
                told = {j: reply.scalars["capacity"] for j, reply in replies.items()}
                after["capacities"] = _sorted({**state["capacities"], **told})
        if self.pool_once:
            after["holders"] = sorted({*state["holders"], *replies})
        return after

    def server_step(self, state: State, server: ServerContext) -> State:
        """A_j = Φ_j(X; W_j) of the weights that came ("the server uses each client's weights", section 3.3); capacities."""
        if not state["received"]:
            return state
        assert server.architectures is not None
        assert server.public is not None
        kinds, found, counted = {info.id: info.architecture or "" for info in server.clients}, {}, {}
        for j, weights in state["received"].items():
            model = fill(scratch(server.architectures[kinds[j]]).module, weights)
            try:
                module = self._representation(model, j, server.public)
                a = representations(model, server.public, module=module, batch_statistics=True)
            except UserError:
                raise
            except Exception as error:  # of the user's network
                raise UserError(
                    f"FedHeNN: the server ran the network of client {j!r}, a {type(model).__name__} (architecture "
                    f"{kinds[j]}), on the public examples, and it failed: {type(error).__name__}: {error}; mend the "
                    "network, or set share='representations', with which each client runs its own"
                ) from error
            if _broken(a):
                warnings.warn(
                    f"FedHeNN: the representation of client {j!r} is not finite or beyond {_LARGEST:g}, and does not count: "
                    "its training diverged; lower lr or set clip_norm",
                    RuntimeWarning,
                    stacklevel=2,
                )
                continue
            found[j] = self._shared(a)
            if self.weighting == "capacity":
                counted[j] = _capacity(model)
        return {
            **state,
            "received": {},
            "representations": _sorted({**state["representations"], **found}),
            "capacities": _sorted({**state["capacities"], **counted}),
        }

    def _shared(self, a: Tensor) -> Tensor:
        return a if self.rank is None else reduced(a, self.rank)

    def reply_spec(self, state: State, down: Message) -> Mapping[str, Spec]:
        """A_j of the whole pool, of any width; or W_j in the form of the client's architecture."""
        if self.share == "weights":
            form = state["forms"][sorted(state["forms"])[int(down.scalars["form"])]]
            return {
                "model": {
                    n: (tuple(shape), getattr(torch, dtype.removeprefix("torch.")))
                    for n, (shape, dtype) in form.items()
                }
            }
        number = len(state["public"]["x"]) if state["public"] else 2 * self.rad_size
        return {"representations": {"a": ((number, None), torch.float32)}}

    def reply_flaw(self, state: State, reply: Message) -> str | None:
        """A representation has columns, no more than agreed; a capacity could be that of a network."""
        if self.share == "representations":
            capacity = reply.scalars.get("capacity", 0)
            if self.weighting == "capacity" and not (1 <= capacity <= _MOST and float(capacity).is_integer()):
                return (
                    f"capacity, its number of parameters, is {reply.scalars.get('capacity')!r}; it must be a whole number "
                    f"from 1 to {_MOST:,}"
                )
            a = reply.arrays["representations"]["a"]
            width = a.shape[1]
            if not 1 <= width <= (self.rank or width):
                return f"its representation has {width} columns; it must have from 1 to {self.rank or 'any number'}"
            if _broken(a):
                return f"its representation has values beyond {_LARGEST:g}; its training diverged: lower lr or set clip_norm"
        return None

    def analysis(self, state: State, who: Sequence[str]) -> Mapping[str, float]:
        """The mean CKA between two clients' representations of the public examples (256 of them)."""
        similarity = mean_similarity(list(state["representations"].values()))
        return {} if similarity is None else {"mean_cka": similarity}

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> Mine:
        """W_i(0): the common draw of the client's architecture."""
        assert client.model is not None
        return {"model": initial_state(client.model, seed)}

    def local(self, down: Message, mine: Mine, client: Client, seed: int) -> tuple[Message, Mine]:
        """W_i(t) after `local_epochs` on the loss of eq. 6; and its representation of the public examples, or itself."""
        model = self.personal(down, mine, client, seed)
        pool, rows = self._received(down, mine, client)
        module, term = self._representation(model, client.id, client.train), None
        if "target" in down.arrays:
            (matrix,) = down.arrays["target"].values()
            target = Target(matrix, self.sigma if self.kernel == "rbf" else None)
            term = self._term(model, module, target, pool, rows, down.scalars["eta"], seed)
        loss = fit(model, client.train, self, lr=down.scalars["lr"], seed=seed, task=client.task, penalty=term)
        scalars = {"train_loss": loss, "num_examples": len(client.train)}
        if self.weighting == "capacity" and self.share == "representations":
            scalars["capacity"] = _capacity(model)
        state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}
        after: Mine = {"model": state, **self._keep_pool(down, mine)}
        if self.share == "weights":
            return Message({"model": {name: tensor.clone() for name, tensor in state.items()}}, scalars), after
        a = self._shared(representations(model, pool, module=module, batch_statistics=True))
        return Message({"representations": {"a": a}}, scalars), after

    def personal(self, down: Message, mine: Mine, client: Client, seed: int) -> nn.Module:
        """W_i."""
        assert client.model is not None
        return fill(scratch(client.model, client.train.x.device).module, mine["model"])


_LARGEST = 1e9
"""Of a representation. Networks that learn are far from it; squares of sums of such numbers are still finite."""


_MOST = 10**12
"""Parameters that a client may claim to have: more than any network that is trained on a client."""


def _capacity(model: nn.Module) -> int:
    """The number of trained parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _broken(a: Tensor) -> bool:
    return not bool(a.abs().amax() <= _LARGEST)  # NaN is not


def _sorted(by_client: Mapping[str, Any]) -> dict[str, Any]:
    return {client: by_client[client] for client in sorted(by_client)}
