"""Provides the base class of both forms of FedHeNN: the alignment term, which the clients' loss contains, its weight in
each round, and its public examples.
"""

import math
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from polyfed.algorithms.base.public_data import PublicDataMethod, convert_public_examples_to_client_form
from polyfed.alignment.alignment_target import AlignmentTarget, Distance
from polyfed.alignment.alignment_term import AlignmentTerm, NetworkKernelTarget
from polyfed.alignment.epoch_gradient_term import CachedGradientAlignmentTerm
from polyfed.alignment.public_examples import draw_public_rows, noise_like
from polyfed.alignment.representations import check_has_representation, representation_module_name
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import first_leaf
from polyfed.core.io.values.frozen_mapping import FrozenMapping
from polyfed.core.methods.capabilities import ValidatesNetworks
from polyfed.core.nn.module_cache import cached_module
from polyfed.core.seeds import derive_seed
from polyfed.core.state_dict import StateDict
from polyfed.core.vectorized.cohort_batches import plan_batch_sizes
from polyfed.core.vectorized.deferred_calls import PerClientTerm
from polyfed.core.vectorized.stacked_module import has_batch_statistics


@dataclass(frozen=True, kw_only=True)
class AlignmentMethod(PublicDataMethod, ValidatesNetworks, ABC):
    """Adds a term to each client's loss that makes the network's representations of public examples similar to those of
    other networks.

    In round t the term is η_t·d(K_i, ·), with η_t = η_0·f(t), where K_i is the kernel of client i's representations of
    the round's public examples X, the "representation alignment dataset" (RAD), and d is 1 − CKA by default.

    Args:
        eta0: η_0 (0.001, paper, tuned for CIFAR; 0.01 for Sentiment140). It is small: with few rounds, tune it upwards.
        growth: f(t): "sqrt" √t (authors' code; the paper leaves f open, and says that η is low in the first rounds),
            "linear" t, "constant" 1.
        rad: source of the RAD: "public", unlabelled examples that belong to no client (polyfed's choice; the paper's server
            "generates" the RAD "by random sampling", the authors' code draws it from the clients' training images); or
            "noise", which needs no public data: 2·rad_size random inputs that each client generates from a common seed.
        rad_size: L, examples in the RAD of a round (5000, paper; the authors' code has 1,000); all public examples if there
            are fewer.
        rad_batch: examples of the RAD that are drawn each time the term is computed (256, polyfed's choice: all 5,000 at
            every minibatch would take too long); 0 takes the whole RAD (paper).
        term: when the term is computed: at every "minibatch" (polyfed's choice), or once per "epoch" at its start (paper,
            algorithms 1 and 2), so that each minibatch of the epoch adds the same gradient.
        distance: d: "cka", 1 − CKA (paper), or "procrustes", the orthogonal Procrustes distance of centred representations
            of norm 1, from 0 to 2, which the paper finds comparable for one architecture (93.7 against 94.7). It depends on
            linear kernels alone, so that here it also works for networks of different widths.
        kernel: "linear" or "rbf" (both in the paper, which finds little difference).
        sigma: width of the RBF kernel, as a fraction of the median distance between two examples (0.5, polyfed's
            choice; the paper tried several).
        module: name of the module whose input is the representation, for all clients or by client's id; None finds the
            last linear layer of each network (polyfed's choice, after the paper's "all but the last layer").
        local_epochs: passes over the client's training examples in a round (20, paper).
        momentum: momentum of SGD (0.5, authors' code; the paper uses momentum without stating its value).
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
            object.__setattr__(self, "module", FrozenMapping(self.module))
        if self.rad == "noise":  # all clients' inputs need one structure instead of public data
            object.__setattr__(self, "requires", self.requires - {"public_data"} | {"one_input_spec"})

    requires: ClassVar[frozenset[str]] = frozenset()

    def alignment_weight_at(self, round_number: int) -> float:
        """Returns the weight η_t of the alignment term in the loss in round t, counted from 1."""
        f = {"sqrt": math.sqrt(round_number), "linear": float(round_number), "constant": 1.0}
        return self.eta0 * f[self.growth]

    # -- server ---------------------------------------------------------------------------------------------------

    def _init_public_state(self, server: ServerContext) -> dict[str, Any]:
        """Builds the server's state of public examples: tensors, the run's seed, and the clients that have them."""
        ids = [info.id for info in server.clients]
        if isinstance(self.module, Mapping) and (unknown := sorted(set(self.module) - set(ids))):
            raise UserError(
                f"{type(self).__name__}: module names {unknown[0]!r}, but no client has this id; "
                f"{did_you_mean(unknown[0], ids)}"
            )
        if self.rad == "noise":
            return {"public": {}, "seed": server.seed, "holders": []}
        public = self._stored_public_tensors(server)
        if len(first_leaf(public)) < 2:
            raise UserError(
                f"{type(self).__name__} compares networks by at least 2 public examples, got 1; give more "
                "(public=..., or --data.public_fraction)"
            )
        return {"public": public, "seed": server.seed, "holders": []}

    def _rad_rows(self, server_state: Mapping[str, Any], client_info: ClientInfo) -> Tensor:
        """Draws the row numbers of the public examples X that are used in this round, the same for all clients."""
        pool_size = len(first_leaf(server_state["public"])) if server_state["public"] else 2 * self.rad_size
        return draw_public_rows(server_state["seed"], client_info.round, pool_size, self.rad_size)

    def _rad_tensors(
        self, server_state: Mapping[str, Any], client_info: ClientInfo, needs_pool: bool
    ) -> dict[str, Tensor]:
        """Returns the round's public examples X, or their rows if clients have all examples.

        Clients have all public examples (the pool) if they need it (`needs_pool`), were sent it once (`pool_once`), or
        generate it from noise.
        """
        rows = self._rad_rows(server_state, client_info)
        if needs_pool or self.pool_once or self.rad == "noise":
            return {"rows": rows}
        return {name: part[rows.long()] for name, part in server_state["public"].items()}

    def _rad_and_pool_groups(
        self, server_state: Mapping[str, Any], client_info: ClientInfo, rad: StateDict
    ) -> dict[str, StateDict]:
        """Returns the round's public examples, and the whole pool for a client that needs and lacks it."""
        needs_pool = "rows" in rad and self.rad == "public"
        return {"rad": rad, **(self._pool_group(server_state, client_info.id) if needs_pool else {})}

    def _round_scalars(self, server_state: Mapping[str, Any], client_info: ClientInfo) -> dict[str, float]:
        scalars = {
            "lr": self.lr_at(client_info.round, client_info.rounds),
            "eta": self.alignment_weight_at(client_info.round),
        }
        if self.rad == "noise":  # integers up to 2^53 are exact as floats
            scalars["noise"] = derive_seed(server_state["seed"], "noise") >> 10
        return scalars

    # -- client ---------------------------------------------------------------------------------------------------

    def _pool_and_rad_rows(
        self, message: Message, client_state: Mapping[str, Any], client: Client
    ) -> tuple[Examples, Tensor]:
        """Returns the client's public examples, prepared as its own are, and the rows used in the round."""
        rad = message.tensors["rad"]
        if "rows" not in rad:
            pool = convert_public_examples_to_client_form(rad, client)
            return pool, torch.arange(len(pool), device=pool.device)
        rows = rad["rows"].to(client.train.device, torch.int64)
        if self.rad == "noise":
            return noise_like(client.train, 2 * self.rad_size, int(message.scalars["noise"])), rows
        return self._public_examples(message, client_state, client), rows

    def validate_network(self, client: Client) -> None:
        """Raises a `UserError` unless a module's input can serve as an example's representation."""
        assert client.model is not None
        model = cached_module(client.model, client.train.device).module
        name = self._representation_module(model, client.id, client.train)
        check_has_representation(client, name)

    def _representation_module(self, model: nn.Module, client: str, examples: Examples) -> str:
        """Returns the name of the module whose input is the representation in this client's network.

        `examples` are inputs of the network.
        """
        module_name = self.module.get(client) if isinstance(self.module, Mapping) else self.module
        names = dict(model.named_modules())
        if module_name is not None and module_name not in names:
            raise UserError(
                f"{type(self).__name__}: module={module_name!r}: the network of {client!r} has no such module; "
                f"{did_you_mean(module_name, names)}"
            )
        return representation_module_name(model, examples) if module_name is None else module_name

    def _alignment_term(
        self,
        network: nn.Module,
        client: Client,
        module: str,
        target: AlignmentTarget | NetworkKernelTarget,
        rad: tuple[Examples, Tensor],
        eta: float,
        seed: int,
    ) -> PerClientTerm | None:
        """Builds the alignment term of the local loss; None if its weight η is 0.

        The term is η·d(K_i, K̄) (eq. 5, 6) on `rad_batch` rows of X, which are drawn each time it is computed, for the
        current parameters or for those at the epoch's start. `rad` is what `_pool_and_rad_rows` returns.
        """
        if eta == 0:
            return None
        pool, rows = rad
        batch_rows = min(self.rad_batch or len(rows), len(rows))
        term = AlignmentTerm(pool, rows, module, target, self.distance, eta, batch_rows, type(self).__name__)
        if self.term == "minibatch":
            return term.build_penalty_for_client(seed)
        batches = plan_batch_sizes(
            len(client.train), self.batch_size, 1, None, self.accumulate, has_batch_statistics(network)
        )
        return CachedGradientAlignmentTerm.build_penalty_for_client(term, network, len(batches), seed)
