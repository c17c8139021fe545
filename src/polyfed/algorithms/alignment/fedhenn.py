"""FedHeNN, for clients with different architectures: each client trains its own network, and all learn similar
representations (Makhija, Han, Ho and Ghosh, ICML 2022, algorithm 2).
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from polyfed.algorithms.alignment.alignment_method import AlignmentMethod
from polyfed.algorithms.base.personal_network import PersonalNetworkMethod
from polyfed.alignment.alignment_target import (
    AlignmentTarget,
    mean_kernel_features,
    mean_rbf_kernel,
    reduce_to_principal_components,
    triangular_kernel_factor,
)
from polyfed.alignment.kernel_sketch import KernelSketch
from polyfed.alignment.pairwise_cka import mean_pairwise_cka
from polyfed.alignment.representations import compute_representations
from polyfed.core.algorithm import Algorithm, Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.examples.pytree import first_leaf
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy
from polyfed.core.nn.module_cache import (
    cached_module,
    copy_trained_weights_and_buffers,
    fill_module,
    initial_state,
    restore_all_but_weights_and_set_eval,
)
from polyfed.core.state_dict import StateDict, StateDictSpec, clone_tensors
from polyfed.core.training.loop import fit, reply_scalars

# "representations" A_j and "capacities" by client; "forms": shapes and dtypes of architectures; "public", "seed", "holders":
# see `AlignmentMethod`
ServerState = dict[str, Any]
ClientState = dict[str, Any]  # "model": W_i with buffers; "public": the pool, if it is sent once


@final
@dataclass(frozen=True, kw_only=True)
class FedHeNN(PersonalNetworkMethod, AlignmentMethod, Algorithm[ServerState, ClientState]):
    """Trains each client's network, of any architecture, so that its representations of public examples become similar
    to those of all other clients' networks.

    Client i minimises F(W_i) + η_t·(1 − CKA(K_i, K̄(t−1))) (eq. 6), where F is its loss, W_i its network, and K_i the
    kernel of that network's representations.

    K̄ = Σ_j w_j K_j is the mean kernel of all clients' latest networks on X, the RAD of the round. With η_0 = 0 it is
    Local, bit for bit. Evaluated model: W_i.

    A network's representation A_j is computed after training, on the whole public pool, which contains every later X: so a
    client that is not drawn counts in K̄ with its last network, on the same X as the others. Clients that have not
    taken part yet do not count (polyfed's choice; the paper's K̄(0) is of untrained networks), so that round 1 has no term.

    The server counts capacities if it has the architectures (`share="weights"`); otherwise clients report them, and the
    server accepts whole numbers up to 10^12.

    Args:
        share: content of a reply: the client's "representations" (polyfed's choice: the server learns neither weights nor
            architecture), or its "weights" (paper), from which the server computes the same representations.
        weighting: w_j "uniform" (1/N, paper), or proportional to "capacity", the number of trained parameters (the paper
            leaves that open).
        normalise: scales each A_j to unit centred norm on X before it enters K̄, so that no network dominates by the scale
            of its features (False, paper). It has no effect with an RBF kernel, whose width follows the scale.
        rank: number of principal components to which each A_j, and with a linear kernel K̄, are reduced before sending
            (None, paper: no reduction).
        sketch: keeps a running mean of the kernels in `rank` columns instead of every client's A_j (paper), so that the
            server's state does not grow with the number of clients; see `polyfed.alignment.kernel_sketch`.
        buffers: "local" only (polyfed's choice), since networks stay with their clients.

    The other fields are those of `AlignmentMethod` and `LocalTraining`.

    >>> FedHeNN(share="weights").requires == {"architectures", "public_data"}
    True
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedhenn",
        summary="Networks learn similar representations of public examples",
        paper="Makhija et al. 2022",
        evaluated="its own",
        small={"local_epochs": 2, "rad_size": 20, "rad_batch": 8, "eta0": 1.0},
        leaderboard={"*": {"eta0": 1.0, "rad_size": 128, "rad_batch": 32, "normalise": True}},
        stacked=True,
    )
    private_fits: ClassVar[tuple[str, ...]] = ("local_epochs",)

    requires: ClassVar[frozenset[str]] = frozenset({"model", "public_data"})
    discloses: ClassVar[frozenset[str]] = frozenset({"representations", "weights"})
    """Weights are included, since those of a network with one hidden layer follow from its representations of known
    examples."""
    share: Literal["representations", "weights"] = "representations"
    weighting: Literal["uniform", "capacity"] = "uniform"
    normalise: bool = False
    rank: int | None = None
    sketch: bool = False
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "rank")
        can_be_sketched = self.rank is not None and self.kernel == "linear"
        self._require(not self.sketch or can_be_sketched, "sketch", "false without rank=..., and with kernel='rbf'")
        self._require(self.buffers == "local", "buffers", "'local', since networks stay with their clients")
        if self.share == "weights":
            if self.rad == "noise":
                raise UserError(
                    "FedHeNN: rad='noise' needs share='representations': with share='weights' the server would compute "
                    "them, and it does not know the structure of the clients' inputs"
                )
            object.__setattr__(self, "requires", frozenset({"architectures", "public_data"}))
            object.__setattr__(self, "discloses", frozenset({"architecture", "weights"}))

    @property
    def scalars_needed(self) -> frozenset[str]:
        """Returns "capacity" if the server needs it and cannot compute it, else no name."""
        sends_capacity = self.weighting == "capacity" and self.share == "representations"
        return frozenset({"capacity"}) if sends_capacity else frozenset()

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the server state before round 1, which holds no representations of any client yet."""
        state = {**self._init_public_state(server), "representations": {}, "capacities": {}}
        networks = (server.architectures or {}) if self.share == "weights" else {}
        initial_models = {key: initial_state(factory, server.seed) for key, factory in networks.items()}
        forms = {
            k: {n: [list(t.shape), str(t.dtype)] for n, t in tensors.items()}
            for k, tensors in sorted(initial_models.items())
        }
        if self.sketch:
            assert self.rank is not None
            state["sketch"] = KernelSketch.empty(self._num_public_examples(state), self.rank).to_state()
        return {**state, "forms": forms}

    def _num_public_examples(self, server_state: ServerState) -> int:
        return len(first_leaf(server_state["public"])) if server_state["public"] else 2 * self.rad_size

    def dispatch_all(self, server_state: ServerState, client_infos: Sequence[ClientInfo]) -> Iterator[Message]:
        """Yields the round's public examples X, the mean K̄ of clients' kernels, and the weight η.

        Sends nothing for evaluation, since each client has its own network.
        """
        rad: dict[str, Tensor] = {}
        target: dict[str, Tensor] = {}
        for client_info in client_infos:
            if client_info.purpose == "personal":
                yield Message()
                continue
            if not rad:
                rad = self._rad_tensors(server_state, client_info, needs_pool=self.share == "representations")
                target = self._mean_kernel(server_state, self._rad_rows(server_state, client_info))
            groups = self._rad_and_pool_groups(server_state, client_info, rad)
            scalars = self._round_scalars(server_state, client_info)
            if self.share == "weights":
                scalars["form"] = sorted(server_state["forms"]).index(client_info.architecture or "")
            yield Message({**groups, "target": target} if target else groups, scalars)

    def _mean_kernel(self, server_state: ServerState, rows: Tensor) -> dict[str, Tensor]:
        """Computes the mean kernel on the round's public examples; empty without representations.

        K̄(t−1) = Σ_j w_j K_j.
        """
        client_ids = sorted(server_state["representations"])
        if self.sketch and server_state["sketch"]["weight"] > 0:
            return {"features": triangular_kernel_factor(server_state["sketch"]["features"][rows.long()])}
        if not client_ids:
            return {}
        rad_representations = [server_state["representations"][j][rows.long()] for j in client_ids]
        unscaled = [server_state["capacities"][j] if self.weighting == "capacity" else 1.0 for j in client_ids]
        w = [weight / sum(unscaled) for weight in unscaled]
        if self.kernel == "rbf":
            return {"kernel": mean_rbf_kernel(rad_representations, w, self.sigma)}
        features = mean_kernel_features(rad_representations, w, self.normalise)
        return {"features": triangular_kernel_factor(self._reduce_rank(features))}

    def _reduce_rank(self, a: Tensor) -> Tensor:
        return a if self.rank is None else reduce_to_principal_components(a, self.rank)

    def analysis(self, server_state: ServerState, client_ids: Sequence[str]) -> Mapping[str, float]:
        """Returns `{name: mean CKA of two clients}` on at most 256 public examples; empty if not computable.

        With `sketch`, also the share of K̄ that the sketch has lost.
        """
        if self.sketch:
            return {"sketch_error": round(KernelSketch.from_state(server_state["sketch"]).relative_error, 9)}
        similarity = mean_pairwise_cka(list(server_state["representations"].values()))
        return {} if similarity is None else {"mean_cka": similarity}

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """Stores the new representations of clients that replied; those of others stay.

        The server computes A_j from W_j if weights were sent.
        """
        ids = sorted(replies)
        if self.share == "weights":
            new_representations, capacities = self._representations_of_models(
                {j: replies[j].tensors["model"] for j in ids}, server
            )
        else:
            new_representations = {j: replies[j].tensors["representations"]["a"] for j in ids}
            capacities = {j: int(replies[j].scalars["capacity"]) for j in ids} if self.weighting == "capacity" else {}
        if self.sketch:
            return self._with_new_sketch(server_state, new_representations, capacities, replies, server)
        return {
            **server_state,
            "representations": _sorted_by_id({**server_state["representations"], **new_representations}),
            "capacities": _sorted_by_id({**server_state["capacities"], **capacities}),
            "holders": self._holders_after_round(server_state, replies),
        }

    def _with_new_sketch(
        self,
        server_state: ServerState,
        representations: Mapping[str, Tensor],
        capacities: Mapping[str, int],
        replies: Mapping[str, Message],
        server: ServerContext,
    ) -> ServerState:
        """Returns the server state with the round's representations in the running mean, and none of them by itself."""
        sketch = KernelSketch.from_state(server_state["sketch"])
        if representations:
            sketch = sketch.add_replies(
                [representations[j] for j in sorted(representations)],
                [float(capacities.get(j, 1)) for j in sorted(representations)],
                num_clients=len(server.clients),
                normalise=self.normalise,
            )
        return {
            **server_state,
            "sketch": sketch.to_state(),
            "holders": self._holders_after_round(server_state, replies),
        }

    def _representations_of_models(
        self, models: Mapping[str, StateDict], server: ServerContext
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Computes A_j = Φ_j(X; W_j) and numbers of parameters from the clients' weights.

        "The server uses each client's weights" (section 3.3).
        """
        assert server.architectures is not None
        assert server.public is not None
        architecture_by_client = {info.id: info.architecture or "" for info in server.clients}
        by_client = {}
        capacities = {}
        for j, weights in models.items():
            model = fill_module(cached_module(server.architectures[architecture_by_client[j]]).module, weights)
            try:
                module = self._representation_module(model, j, server.public)
                a = compute_representations(model, server.public, module=module, batch_statistics=True)
            except UserError:
                raise
            except Exception as error:  # of the user's network
                raise UserError(
                    f"FedHeNN: the server ran the network of client {j!r}, a {type(model).__name__} (architecture "
                    f"{architecture_by_client[j]}), on the public examples, and it failed: {type(error).__name__}: "
                    f"{error}; fix the network, or set share='representations', with which each client runs its own"
                ) from error
            if _has_diverged(a):
                warnings.warn(
                    f"FedHeNN: the representation of client {j!r} is not finite or beyond {_MAX_VALUE:g}, and does not "
                    "count: its training diverged; lower lr or set clip_norm",
                    RuntimeWarning,
                    stacklevel=2,
                )
                continue
            by_client[j] = self._reduce_rank(a)
            if self.weighting == "capacity":
                capacities[j] = _count_trained_parameters(model)
        return by_client, capacities

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shapes and dtypes of a reply: representations, of at most `rank` columns, or weights.

        Raises:
            ValueError: numbers in the reply are out of range.
        """
        if self.share == "weights":
            form = server_state["forms"][sorted(server_state["forms"])[int(message.scalars["form"])]]
            return {
                "model": {
                    n: (tuple(shape), getattr(torch, dtype.removeprefix("torch.")))
                    for n, (shape, dtype) in form.items()
                }
            }
        capacity = reply.scalars.get("capacity", 0)
        if self.weighting == "capacity" and not (1 <= capacity <= _MAX_CAPACITY and float(capacity).is_integer()):
            raise ValueError(
                f"capacity, its number of parameters, is {capacity!r}; it must be a whole number from 1 to {_MAX_CAPACITY:,}"
            )
        num_public = self._num_public_examples(server_state)
        a = reply.tensors.get("representations", {}).get("a")
        if a is not None and a.dim() == 2 and not 1 <= a.shape[1] <= (self.rank or a.shape[1]):
            raise ValueError(
                f"its representation has {a.shape[1]} columns; it must have from 1 to {self.rank or 'any number'}"
            )
        # Otherwise only shapes are checked.
        has_values = a is not None and not a.is_meta and a.is_floating_point() and a.numel()
        if a is not None and has_values and bool(torch.isfinite(a).all()) and _has_diverged(a):
            raise ValueError(
                f"its representation has values beyond {_MAX_VALUE:g}; its training diverged: lower lr or set clip_norm"
            )
        return {"representations": {"a": ((num_public, None), torch.float32)}}

    # -- client ---------------------------------------------------------------------------------------------------

    def _initial_counters(self, client: Client) -> StateDict:
        """Returns a new network's integer buffers: trained ones would reveal the number of examples.

        Returns nothing if the server may know that number. No representation depends on these buffers.
        """
        assert client.model is not None
        buffers = {} if "num_examples" in self.scalars_needed else cached_module(client.model).buffers
        return {name: buffer.clone() for name, buffer in buffers.items() if not buffer.is_floating_point()}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains W_i with the alignment term (eq. 6); replies with representations of public examples, or weights."""
        model = self.personal_model(message, client_state, client, seed)
        pool, rows = self._pool_and_rad_rows(message, client_state, client)
        module, term = self._representation_module(model, client.id, client.train), None
        if "target" in message.tensors:
            (matrix,) = message.tensors["target"].values()
            target = AlignmentTarget(matrix, self.sigma if self.kernel == "rbf" else None)
            term = self._alignment_term(model, client, module, target, (pool, rows), message.scalars["eta"], seed)
        fit_result = fit(model, client, self, lr=message.scalars["lr"], seed=seed, penalty=term)
        scalars = reply_scalars(client, fit_result.loss)
        if self.weighting == "capacity" and self.share == "representations":
            scalars["capacity"] = _count_trained_parameters(model)
        state = copy_trained_weights_and_buffers(model)
        state_after: ClientState = {"model": state, **self._pool_state(message, client_state)}
        if self.share == "weights":
            return Message({"model": {**clone_tensors(state), **self._initial_counters(client)}}, scalars), state_after
        a = self._reduce_rank(
            compute_representations(
                restore_all_but_weights_and_set_eval(model), pool, module=module, batch_statistics=True
            )
        )
        return Message({"representations": {"a": a}}, scalars), state_after


_MAX_VALUE = 1e9
"""Largest absolute value in a valid representation. Networks that learn stay far below it, and squares of sums of such
numbers are still finite."""


_MAX_CAPACITY = 10**12
"""Most parameters that a client may report, which is more than any network trained on a client has."""


def _count_trained_parameters(model: nn.Module) -> int:
    """Returns the number of trained parameters of a network."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _has_diverged(a: Tensor) -> bool:
    return not bool(a.abs().amax() <= _MAX_VALUE)  # NaN is not


def _sorted_by_id(by_client: Mapping[str, Any]) -> dict[str, Any]:
    return {client: by_client[client] for client in sorted(by_client)}
