"""FedPAC: clients share a body, whose representations of each class are pulled together, and the server mixes a head
for each client by solving a quadratic programme (Xu, Tong and Huang, ICLR 2023).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, final

from torch import Tensor, nn

from polyfed.algorithms.base.averaging import ClientState, ServerState
from polyfed.algorithms.base.heads.body_and_head import (
    BodyAndHeadMethod,
    spec_of_sent_tensors,
    train_head_then_body,
)
from polyfed.algorithms.base.heads.class_means import class_means_with_weights, count_outputs, find_replaceable_head
from polyfed.algorithms.partial_sharing.head_mixing import (
    head_mixing_statistics,
    head_mixing_statistics_spec,
    head_mixing_weights,
)
from polyfed.algorithms.prototypes.prototype_method import (
    build_prototype_loss,
    expected_class_means_spec,
    update_prototypes,
)
from polyfed.alignment.representations import compute_representations, representation_module_name
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy
from polyfed.core.nn.module_cache import cached_module, restore_all_but_weights_and_set_eval
from polyfed.core.seeds import derive_seed
from polyfed.core.state_dict import StateDict, StateDictSpec, clone_tensors, state_dict_spec, weighted_mean
from polyfed.core.training.loop import fit, reply_scalars
from polyfed.models.structure import find_representation_module

# The server keeps, beside `BodyAndHeadMethod`'s, "prototypes": p̄, and "heads": the mixed head of each client that took part


@final
@dataclass(frozen=True, kw_only=True)
class FedPAC(BodyAndHeadMethod):
    """Trains a body shared by all clients, and for each client a head (last layer) that the server mixes from the heads
    of all clients in the round.

    The head is the last linear layer. A client trains its head with the body frozen, then the body φ by
    CE + λ/d·‖f(x) − p̄_y‖² with the head frozen, p̄_c being the mean representation of class c over all clients. The server
    gives each client a head of its own, Σ_j α_ij g_j, by the weights that minimise the sum of

    - variance, Σ_j α_ij² V_j, with V_j = (1/n_j)·[Σ_c p_jc·E(‖f‖² | c) − Σ_c p_jc²·‖μ_jc‖²], and
    - bias, Σ_c ‖Σ_j α_ij (h_ic − h_jc)‖², with h_jc = p_jc·μ_jc,

    over α_i ≥ 0, Σ_j α_ij = 1; p_jc is the share of class c at client j, and μ_jc the mean of f over it, by the body that
    all clients have received. With λ = 0 and without `collaborate` it is FedRep, bit for bit. One architecture.
    Evaluated model: φ with the mixed head.

    Heads are mixed among the clients of a round. A client that missed it keeps the head that was mixed for it last.

    Args:
        lam: λ ≥ 0 (1, authors' code, whose squared distance is the mean over the d numbers of f).
        collaborate: mixes heads (True, paper); False leaves each client its own head, which is then not sent.
        head_epochs: epochs on the head, body frozen (1, authors' code).
        head_lr: learning rate of the head in round 1, which falls as `lr` does; None takes `lr` (polyfed's choice; the
            authors' code has 0.1 next to 0.01).
        local_epochs: epochs on the body, head frozen, after that (5, authors' code).
        batch_size: examples in a minibatch (50, authors' code); 0 takes all of the client's examples.
        lr: learning rate of round 1 (0.01, authors' code).
        momentum: momentum of SGD (0.5, authors' code).
        weight_decay: weight decay of head and body (0.0005, authors' code).
        weighted: weighs clients in φ and p̄ by their number of training examples (True, paper); False counts every client the
            same.
        buffers: buffers of the body; those of the head are never sent ("local", polyfed's choice).

    The other fields are those of `LocalTraining`.

    >>> FedPAC(collaborate=False).aggregates_by_sum
    True
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedpac",
        summary="A shared body, and heads mixed for each client",
        paper="Xu et al. 2023",
        evaluated="the body with the mixed head",
        published=frozenset({"head"}),
    )

    requires: ClassVar[frozenset[str]] = frozenset({"one_architecture", "classification"})
    discloses: ClassVar[frozenset[str]] = frozenset({"weights", "class_means", "class_counts"})
    groups: ClassVar[tuple[str, ...]] = ("model", "classes")
    lam: float = 1.0
    collaborate: bool = True
    head_epochs: int = 1
    head_lr: float | None = None
    local_epochs: int = 5
    batch_size: int = 50
    lr: float = 0.01
    momentum: float = 0.5
    weight_decay: float = 0.0005
    weighted: bool = True
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "lam")
        self._at_least(1, "head_epochs")
        self._positive("head_lr")

    @property
    def aggregates_by_sum(self) -> bool:
        """Returns True if the server mixes no heads; False if it mixes them, since it then needs each client's head."""
        return not self.collaborate

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the initial network, without prototypes (mean representations) and mixed heads."""
        return {**super().server_init(server), "prototypes": {}, "heads": {}}

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the body φ, the client's mixed head and, for training, each class's mean representation."""
        common, groups = (
            super().dispatch(server_state, client_info),
            {"head": server_state["heads"].get(client_info.id)},
        )
        if client_info.purpose != "personal":
            groups["prototypes"] = server_state["prototypes"]
        return Message(
            {**common.tensors, **{group: tensors for group, tensors in groups.items() if tensors}}, common.scalars
        )

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shapes and dtypes of body and class means; with mixed heads also head, h and V."""
        classes = expected_class_means_spec(server_state["prototypes"], reply)
        specs = {**super().reply_spec(server_state, message, reply), **classes}
        if not self.collaborate:
            return specs
        head_spec = state_dict_spec(next(iter(server_state["heads"].values()), server_state.get("draw", {})))
        head = spec_of_sent_tensors(head_spec, reply, "head") if "draw" in server_state else head_spec
        return {**specs, "head": head, "statistics": head_mixing_statistics_spec(reply, classes["classes"])}

    def server_step(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Returns the state with the round's mean body and class prototypes.

        φ ← Σ_i (n_i/n) φ_i and p̄_c ← Σ_i n_ic μ_ic / Σ_i n_ic.
        """
        prototypes = update_prototypes(server_state["prototypes"], mean["classes"])
        return {
            **super().server_step(server_state, mean, client_ids),
            "prototypes": prototypes,
            "heads": server_state["heads"],
        }

    def update_state_from_single_replies(
        self, server_state: ServerState, replies: Mapping[str, Message]
    ) -> ServerState:
        """Mixes a new head for each client that replied from all their heads.

        The head of client i is Σ_j α_ij g_j.
        """
        statistics, local_heads = (
            {i: replies[i].tensors[part] for i in sorted(replies)} for part in ("statistics", "head")
        )
        heads = {
            **server_state["heads"],
            **{i: weighted_mean(local_heads, alpha) for i, alpha in head_mixing_weights(statistics).items()},
        }
        return {**server_state, "heads": {i: heads[i] for i in sorted(heads)}}

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the client's head with the common initial weights.

        Raises:
            UserError: this layer does not compute the outputs.
        """
        assert client.model is not None
        find_replaceable_head(cached_module(client.model, client.train.device).module, client, "FedPAC")
        return super().client_init(client, seed)

    def _find_head_modules(self, module: nn.Module, example: Tensor) -> tuple[str, ...]:
        return (find_representation_module(module, example),)

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the head, then the body; replies with body and class means, and with mixed heads their statistics.

        The statistics V and h are computed by the received body φ, the class means by the trained φ_i.
        """
        features = compute_representations(
            restore_all_but_weights_and_set_eval(self.personal_model(message, client_state, client, seed)), client.train
        )
        net, lr, y = (
            self._load_with_local_part(message, client_state, client),
            message.scalars["lr"],
            client.train.labels,
        )
        name, classes = representation_module_name(net.module, client.train), count_outputs(net.module, client)
        head_options, first_head_lr = replace(self, local_epochs=self.head_epochs, local_steps=None), self.head_lr
        head_seed, head_lr = derive_seed(seed, "head"), lr if first_head_lr is None else lr * first_head_lr / self.lr
        fit_body = partial(fit, net.module, client, self, lr=lr, seed=seed)
        if prototype_loss := build_prototype_loss(
            self.criterion(client), message.tensors.get("prototypes"), self.lam, client.train.device
        ):
            fit_body = partial(fit_body, loss=prototype_loss, representation=name, reported_loss="task")
        fit_head = partial(fit, net.module, client, head_options, lr=head_lr, seed=head_seed)
        loss = train_head_then_body(net.module, client_state["head"], fit_head, fit_body)
        body, head_state, buffer_state = self._split_trained(net, client_state)
        means = compute_representations(restore_all_but_weights_and_set_eval(net.module), client.train, module=name)
        groups = {"model": body, "classes": class_means_with_weights(means, y, classes, self.weighted)}
        if self.collaborate:
            groups["head"], groups["statistics"] = (
                clone_tensors(head_state),
                head_mixing_statistics(features, y, classes),
            )
        return Message(groups, reply_scalars(client, loss)), {"head": head_state, "trained": True, **buffer_state}
