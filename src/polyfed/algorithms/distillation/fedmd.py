"""FedMD: networks of any architecture learn their mean outputs on public examples (Li and Wang 2019, "FedMD:
Heterogenous Federated Learning via Model Distillation", algorithm 1, without its pre-training on labelled public
examples).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch
import torch.nn.functional as F

from polyfed.algorithms.base.averaging import Averaging, ClientState, ServerState
from polyfed.algorithms.base.personal_network import PersonalNetworkMethod
from polyfed.algorithms.base.public_data import PublicDataMethod
from polyfed.algorithms.distillation.base.output_matching import fit_to_targets
from polyfed.alignment.public_examples import draw_public_rows
from polyfed.core.algorithm import Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.evaluation.evaluate import predict
from polyfed.core.examples.pytree import first_leaf
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy
from polyfed.core.nn.module_cache import copy_trained_weights_and_buffers, restore_all_but_weights_and_set_eval
from polyfed.core.seeds import derive_seed
from polyfed.core.state_dict import IncompatibleTensorsError, StateDict, StateDictSpec
from polyfed.core.training.loop import fit, reply_scalars

# The server keeps "outputs", f̃ of the last round, empty at first; "done", the number of rounds; and the public examples
# A client keeps "model", W_i and buffers; and the public examples


@final
@dataclass(frozen=True, kw_only=True)
class FedMD(PersonalNetworkMethod, PublicDataMethod, Averaging):
    """Trains each client's network in each round first to match the mean outputs of all clients on public examples, and
    then on the client's data.

    The first part ("digest") minimises |f_i(x) − f̃(x)|, where f̃ are mean logits on the public examples x of the
    round; the second ("revisit") is local training. Then the client sends its outputs on the public examples of the
    next round. With `digest_epochs` = 0 it is Local, bit for bit. Evaluated model: W_i, the client's own network. All
    networks have the classes of all clients; public examples need no labels.

    The paper's clients first train on labelled public examples; here they start with their own, and round 1 has no f̃. A
    client's network may be pretrained elsewhere.

    Args:
        digest_epochs: passes over the public examples of a round, before those over the client's own (1, authors' code).
        digest_batch_size: public examples in a minibatch (256, authors' code); 0 takes all.
        distance: distance of outputs and f̃: "l1", the mean absolute difference (authors' code), or "l2", the mean squared
            one. The paper does not say which.
        public_size: public examples of a round, drawn in each round (5000, paper); all if there are fewer.
        pool_once: sends the public examples to a client once, and afterwards only row numbers (True, paper: all clients have
            them). Clients keep them, in memory and in checkpoints.
        weighted: weighs clients in f̃ by their number of training examples; False takes the plain mean (False, paper).
        buffers: "local" only (polyfed's choice), since networks stay with their clients.

    The other fields are those of `LocalTraining`.

    >>> FedMD(public_size=500).groups
    ('outputs',)
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedmd",
        summary="Networks learn their mean outputs on public examples",
        paper="Li and Wang 2019",
        evaluated="its own",
    )

    requires: ClassVar[frozenset[str]] = frozenset({"model", "public_data"})
    discloses: ClassVar[frozenset[str]] = frozenset({"representations", "weights"})
    """Weights are included, since those of a network without hidden layers follow from its outputs on known examples."""
    groups: ClassVar[tuple[str, ...]] = ("outputs",)
    digest_epochs: int = 1
    digest_batch_size: int = 256
    distance: Literal["l1", "l2"] = "l1"
    public_size: int = 5000
    pool_once: bool = True
    weighted: bool = False
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.digest_epochs >= 0, "digest_epochs", "at least 0 (0 is local)")
        self._require(self.digest_batch_size >= 0, "digest_batch_size", "at least 1, or 0 for all public examples")
        self._at_least(1, "public_size")
        self._require(self.buffers == "local", "buffers", "'local', since networks stay with their clients")

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the server state before round 1, with the public examples, and without mean outputs."""
        return {
            "public": self._stored_public_tensors(server),
            "seed": server.seed,
            "holders": [],
            "outputs": {},
            "done": 0,
        }

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns the mean outputs on the last public examples, and the rows for the next outputs."""
        if client_info.purpose == "personal":
            return Message()
        current_rows, next_rows = (
            self._public_rows(server_state, number) for number in (server_state["done"], server_state["done"] + 1)
        )
        digest = (
            {"digest": {"rows": current_rows, **server_state["outputs"]}}
            if server_state["outputs"] and self.digest_epochs
            else {}
        )
        groups = {**digest, "next": {"rows": next_rows}, **self._pool_group(server_state, client_info.id)}
        return Message(groups, {"lr": self.lr_at(client_info.round, client_info.rounds)})

    def _public_rows(self, server_state: ServerState, round_number: int) -> torch.Tensor:
        pool_size = len(first_leaf(server_state["public"]))
        return draw_public_rows(server_state["seed"], round_number, pool_size, self.public_size)

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shape and dtype of a reply: logits for the rows asked, as many as in round 1."""
        average, logits = server_state["outputs"], reply.tensors.get("outputs", {}).get("logits")
        free = (None,) * (max(2, logits.dim()) - 1 if isinstance(logits, torch.Tensor) else 1)
        width = tuple(average["logits"].shape[1:]) if average else free
        return {"outputs": {"logits": ((len(message.tensors["next"]["rows"]), *width), torch.float32)}}

    def reply_spec_is_known(self, server_state: ServerState) -> bool:
        """Returns False in round 1, when the server does not know the networks' number of outputs yet; True later."""
        return bool(server_state["outputs"])

    def server_step(
        self, server_state: ServerState, mean: Mapping[str, StateDict], client_ids: Sequence[str]
    ) -> ServerState:
        """Returns the next server state, with the mean of the clients' outputs for each public example."""
        return {
            **server_state,
            **mean,
            "holders": self._holders_after_round(server_state, client_ids),
            "done": server_state["done"] + 1,
        }

    def make_incompatible_replies_error(self, error: IncompatibleTensorsError) -> UserError:
        """Returns the error to raise if clients' networks have different numbers of outputs."""
        return UserError(
            f"FedMD: the outputs of {error.first_client!r} and {error.other_client!r} differ ({error.difference}); "
            "give all networks the same number of outputs, one for each class of the federation"
        )

    # -- client ---------------------------------------------------------------------------------------------------

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains on mean outputs ("digest") and own examples ("revisit"); replies with new outputs.

        The paper calls sending "communicate".
        """
        pool_state = self._pool_state(message, client_state)
        model = self.personal_model(message, client_state, client, seed)
        pool = self._public_examples(message, client_state, client)
        lr = message.scalars["lr"]
        if digest := message.tensors.get("digest"):
            options = replace(
                self, local_epochs=self.digest_epochs, local_steps=None, batch_size=self.digest_batch_size,
                sampler="shuffle", class_weights=None, patience=None,
            )  # fmt: skip
            distance = F.l1_loss if self.distance == "l1" else F.mse_loss
            digest_examples = pool.select(digest["rows"].long().to(pool.device))
            fit_to_targets(
                model,
                digest_examples,
                digest["logits"],
                options,
                lr=lr,
                seed=derive_seed(seed, "digest"),
                distance=distance,
            )
        fit_result = fit(model, client, self, lr=lr, seed=seed)
        outputs = predict(
            restore_all_but_weights_and_set_eval(model),
            pool.select(message.tensors["next"]["rows"].long().to(pool.device)),
        )
        return Message({"outputs": {"logits": outputs}}, reply_scalars(client, fit_result.loss)), {
            "model": copy_trained_weights_and_buffers(model),
            **pool_state,
        }
