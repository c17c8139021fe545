"""What the two forms of FedHeNN share: the schedule of η, the public examples on which networks are aligned, and the term
η·d of the local loss, d being 1 − CKA or the Procrustes distance."""

import math
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from polyfed.algorithms.public_pool import PublicPool, prepared
from polyfed.alignment.held import OncePerEpoch
from polyfed.alignment.rad import noise_like, rad_rows
from polyfed.alignment.representations import check_representation, representation_name
from polyfed.alignment.target import Distance, Target
from polyfed.alignment.term import Alignment, OfNetwork
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError, nearest
from polyfed.core.examples import Examples
from polyfed.core.frozen import FrozenArguments
from polyfed.core.gathered import OfClient
from polyfed.core.inputs import first
from polyfed.core.network_needs import LooksInside
from polyfed.core.scratch import scratch
from polyfed.core.seeds import derive
from polyfed.core.stacked import needs_two
from polyfed.core.streams import plan
from polyfed.core.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Aligning(PublicPool, LooksInside, ABC):
    """Hyper-parameters of the alignment term, η_t·d(K_i, ·) on the RAD, with η_t = η_0·f(t), d = 1 − CKA by default.

    Args:
        eta0: η_0 (0.001, paper, tuned for CIFAR; 0.01 for Sentiment140). It is small: with few rounds, tune it upwards.
        growth: f(t): "sqrt" √t (authors' code; the paper leaves f open, and says that η is low in the first
            rounds), "linear" t, "constant" 1.
        rad: where the RAD comes from ("public", unlabelled examples that are no client's; polyfed's choice; the
            paper's server "generates" it "by random sampling", the authors' code draws it from the clients' training
            images). "noise" needs no public
            data: 2·rad_size random inputs that each client makes from a common seed.
        rad_size: L, examples in the RAD of a round (5000, paper; the authors' code has 1,000); not more than there are
            public examples.
        rad_batch: examples of the RAD, drawn afresh whenever the term is computed (256, polyfed's choice: all 5,000 at
            every minibatch are out of reach); 0 takes the whole RAD (paper).
        term: when it is computed: at every "minibatch" (polyfed's choice), or once an "epoch" (paper, algorithms 1 and 2),
            at its start: each of its minibatches then adds the same gradient.
        distance: d: "cka", 1 − CKA (paper), or "procrustes", the orthogonal Procrustes distance of centred representations
            of norm 1, from 0 to 2, which the paper finds comparable for one architecture (93.7 against 94.7). It depends on
            linear kernels alone, so that here it is also for networks of different widths.
        kernel: "linear" or "rbf" (both in the paper, which finds them alike).
        sigma: width of the RBF kernel, as a fraction of the median distance between two examples (0.5, polyfed's
            choice; the paper tried several).
        module: name of the module whose input is the representation, for all clients or by client's id; None finds the
            last linear layer of each network (polyfed's choice, after the paper's "all but the last layer").
        local_epochs: passes over the client's training examples in a round (20, paper).
        momentum: of SGD (0.5, authors' code; the paper has momentum, and does not tell its size).
    """

    local_epochs: int = 20
    momentum: float = 0.5
    eta0: float = 0.001
    growth: Literal["sqrt", "linear", "constant"] = "sqrt"
    rad: Literal["public", "noise"] = "public"
    rad_size: int = 5000
    rad_batch: int = 256
    term: Literal["minibatch", "epoch"] = "minibatch"
    distance: Distance = "cka"
    kernel: Literal["linear", "rbf"] = "linear"
    sigma: float = 0.5
    module: str | Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "eta0")
        self._at_least(2, "rad_size")
        enough = self.rad_batch == 0 or self.rad_batch >= 2
        self._require(enough, "rad_batch", "at least 2, or 0 for the whole RAD")
        self._positive("sigma")
        fits = self.distance == "cka" or self.kernel == "linear"
        self._require(
            fits, "kernel", "'linear' with distance='procrustes', which compares representations, not kernels"
        )
        if isinstance(self.module, Mapping):
            object.__setattr__(self, "module", FrozenArguments(self.module))
        if self.rad == "noise":  # instead of public data, inputs of one form
            object.__setattr__(self, "requires", self.requires - {"public_data"} | {"one_input_spec"})

    requires: ClassVar[frozenset[str]] = frozenset()

    def eta_at(self, round_number: int) -> float:
        """η_t = η_0·f(t), t counted from 1."""
        f = {"sqrt": math.sqrt(round_number), "linear": float(round_number), "constant": 1.0}
        return self.eta0 * f[self.growth]

    # -- server ---------------------------------------------------------------------------------------------------

    def _start_pool(self, server: ServerContext) -> dict[str, Any]:
        """The public examples as they are stored, the run's seed, and who has the pool already."""
        ids = [info.id for info in server.clients]
        if isinstance(self.module, Mapping) and (unknown := sorted(set(self.module) - set(ids))):
            raise UserError(
                f"{type(self).__name__}: module names {unknown[0]!r}, but no client is called so; {nearest(unknown[0], ids)}"
            )
        if self.rad == "noise":
            return {"public": {}, "seed": server.seed, "holders": []}
        public = self._stored(server)
        if len(first(public)) < self.rad_size:
            raise UserError(
                f"{type(self).__name__}: rad_size must be at most the number of public examples, {len(first(public))}, got "
                f"{self.rad_size}; lower rad_size, or give more public examples (public=..., or --data.public_fraction)"
            )
        return {"public": public, "seed": server.seed, "holders": []}

    def _rows(self, state: Mapping[str, Any], client_info: ClientInfo) -> Tensor:
        """The rows of the pool that are X, the RAD of this round: the same for everyone."""
        pool = len(first(state["public"])) if state["public"] else 2 * self.rad_size
        return rad_rows(state["seed"], client_info.round, pool, self.rad_size)

    def _rad(self, state: Mapping[str, Any], client_info: ClientInfo, whole: bool) -> dict[str, Tensor]:
        """What says X to the clients: X itself, or its rows in the pool, where a client has all of that: because it needs
        it (`whole`), was sent it once, or makes it from noise."""
        rows = self._rows(state, client_info)
        if whole or self.pool_once or self.rad == "noise":
            return {"rows": rows}
        return {name: part[rows.long()] for name, part in state["public"].items()}

    def _public(self, state: Mapping[str, Any], client_info: ClientInfo, rad: Tree) -> dict[str, Tree]:
        """X in the form of `_rad`, and the pool, where a client needs it and does not have it."""
        needed = "rows" in rad and self.rad == "public"
        return {"rad": rad, **(self._sent_pool(state, client_info.id) if needed else {})}

    def _scalars(self, state: Mapping[str, Any], client_info: ClientInfo) -> dict[str, float]:
        scalars = {"lr": self.lr_at(client_info.round, client_info.rounds), "eta": self.eta_at(client_info.round)}
        if self.rad == "noise":  # whole numbers up to 2^53 survive as floats on every wire
            scalars["noise"] = derive(state["seed"], "noise") >> 10
        return scalars

    # -- client ---------------------------------------------------------------------------------------------------

    def _received(self, message: Message, client_state: Mapping[str, Any], client: Client) -> tuple[Examples, Tensor]:
        """The public examples that the client has, prepared as its own are; and which of them are X."""
        rad = message.tensors["rad"]
        if "rows" not in rad:
            pool = prepared(rad, client)
            return pool, torch.arange(len(pool), device=pool.device)
        rows = rad["rows"].to(client.train.device, torch.int64)
        if self.rad == "noise":
            return noise_like(client.train, 2 * self.rad_size, int(message.scalars["noise"])), rows
        return self._pool(message, client_state, client), rows

    def look_inside(self, client: Client) -> None:
        """For the module whose input is Φ."""
        assert client.model is not None
        model = scratch(client.model, client.train.device).module
        name = self._representation(model, client.id, client.train)
        check_representation(client, name)

    def _representation(self, model: nn.Module, client: str, examples: Examples) -> str:
        """Name of the module whose input is Φ, in the network of this client, which takes such examples."""
        given = self.module.get(client) if isinstance(self.module, Mapping) else self.module
        names = dict(model.named_modules())
        if given is not None and given not in names:
            raise UserError(
                f"{type(self).__name__}: module={given!r}: the network of {client!r} has none; {nearest(given, names)}"
            )
        return representation_name(model, examples) if given is None else given

    def _term(
        self,
        network: nn.Module,
        client: Client,
        module: str,
        target: Target | OfNetwork,
        pool: Examples,
        rows: Tensor,
        eta: float,
        seed: int,
    ) -> OfClient | None:
        """η·d(K_i, K̄) at the present parameters (eq. 5, 6), or those at the epoch's start, on `rad_batch` rows of X that are
        drawn whenever it is computed; None if η is 0."""
        if eta == 0:
            return None
        number = min(self.rad_batch or len(rows), len(rows))
        term = Alignment(pool, rows, module, target, self.distance, eta, number, type(self).__name__)
        if self.term == "minibatch":
            return term.of_client(seed)
        epoch = plan(len(client.train), self.batch_size, 1, None, self.accumulate, needs_two(network))
        return OncePerEpoch.of_client(term, network, len(epoch), seed)
