"""pFedHN: a hypernetwork on the server generates every client's weights (Shamsian et al., ICML 2021, algorithm 1)."""

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from polyfed.core.algorithm import Algorithm, Client, ClientInfo, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.methods.capabilities import AddsServerTensors, KeepsServerStateByClient, ValidatesNetworks
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import (
    BufferPolicy,
    extract_sent_tensors_and_client_state,
    load_client_model,
    recompute_norm_statistics_if_needed,
)
from polyfed.core.nn.module_cache import CachedModule, cached_module, initial_state
from polyfed.core.state_dict import StateDict, StateDictSpec, state_dict_spec
from polyfed.core.training.config import LocalTraining
from polyfed.core.training.loop import fit, reply_scalars
from polyfed.hypernetworks.pfedhn_hypernetwork import (
    backpropagate_deltas,
    draw_embeddings,
    generate_client_weights,
    generated_tensor_names,
    init_weight_hypernetwork,
    repeat_steps_without_gradient,
    sgd_step,
)
from polyfed.models.structure import norm_layer_tensor_names

# "network": φ; "velocity": its momentum; "clients": the sorted ids; "embeddings": client -> v_i, its momentum, and how many
# of the server's "steps" they have had, and nothing for a client that has not replied; "heads": the keys of the clients'
# heads as one JSON text (one key where all have the same), since every check of the state would go through a million
ServerState = dict[str, Any]
ClientState = dict[str, StateDict]  # "buffers"
_BLOCK = 2**24  # floats of clients' networks that are generated, or backpropagated, at one time: 64 MB


@final
@dataclass(frozen=True, kw_only=True)
class PFedHN(
    LocalTraining, ValidatesNetworks, AddsServerTensors, KeepsServerStateByClient, Algorithm[ServerState, ClientState]
):
    """Trains one hypernetwork on the server, which generates all trained parameters of each client's network from an
    embedding (a learnt vector) of the client.

    The parameters are θ̄_i = h(v_i; φ), with the embedding v_i and the hypernetwork's weights φ. The client trains them
    and sends back θ̄_i − θ_i, from which the chain rule gives the gradients of φ and v_i. Clients may differ in
    architecture: each architecture, or each client, has its own heads on the shared trunk. Evaluated model: θ̄_i with
    the client's own buffers; a client that never took part estimates their statistics on its training data.

    The paper updates φ after each client. Here all clients of a round get weights from the same φ, and their gradients, each
    clipped separately, are summed into one step: the same to first order in `hn_lr`. The hypernetwork has about `hidden`
    entries for each parameter of every architecture (or of every client), and as many for momentum.

    Args:
        heads: "architecture" (polyfed's choice): clients of one architecture share heads; "client": each client has its own
            heads, as in FLHA-GHN's comparison (section 5.1), so that those of a client that never took part keep their
            initial values up to weight decay. Both give the same bits if no two clients have the same architecture.
        embedding_dim: entries of v_i; None takes int(1 + N/4) for N clients (authors' code).
        hidden: width of the trunk (100, authors' code).
        hn_depth: layers hidden→hidden after the first layer of the trunk (3, authors' code).
        hn_lr: learning rate of φ and the embeddings (0.01, authors' code).
        hn_momentum: its momentum (0.9, authors' code).
        hn_weight_decay: its weight decay (0.001, authors' code).
        hn_clip: largest norm of a client's gradient of φ and v_i (50, authors' code); None does not clip.
        local_steps: minibatches of a round (50, authors' code); with None, `local_epochs` counts instead.
        batch_size: examples in a minibatch (64, authors' code); 0 takes all of the client's examples.
        lr: learning rate of local training in round 1 (0.005, authors' code).
        momentum: momentum of local SGD (0.9, authors' code).
        weight_decay: weight decay of local training (5e-5, authors' code).
        clip_norm: largest norm of a gradient in local training (50, authors' code); None does not clip.
        buffers: "local" (polyfed's choice) or "recompute"; the hypernetwork generates parameters only.

    The other fields are those of `LocalTraining`.

    >>> PFedHN(hn_lr=0.05).local_steps
    50
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="pfedhn",
        summary="A hypernetwork at the server generates all clients' weights",
        paper="Shamsian et al. 2021",
        evaluated="the generated model",
        small={"local_steps": 3},
        leaderboard={"*": {"clip_norm": 5.0}},
        stacked=True,
    )

    requires: ClassVar[frozenset[str]] = frozenset({"architectures"})
    discloses: ClassVar[frozenset[str]] = frozenset({"architecture", "weights"})
    heads: Literal["architecture", "client"] = "architecture"
    embedding_dim: int | None = None
    hidden: int = 100
    hn_depth: int = 3
    hn_lr: float = 0.01
    hn_momentum: float = 0.9
    hn_weight_decay: float = 0.001
    hn_clip: float | None = 50.0
    local_steps: int | None = 50
    batch_size: int = 64
    lr: float = 0.005
    momentum: float = 0.9
    weight_decay: float = 5e-5
    clip_norm: float | None = 50.0
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "embedding_dim", "hidden")
        self._at_least(0, "hn_depth")
        self._positive("hn_lr")
        self._require(0 <= self.hn_momentum < 1, "hn_momentum", "at least 0 and below 1")
        self._at_least(0, "hn_weight_decay")
        self._require(self.hn_clip is None or self.hn_clip > 0, "hn_clip", "positive, or none")
        self._require(
            self.buffers != "average", "buffers", "'local' or 'recompute' (parameters are generated, buffers are not)"
        )

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the hypernetwork's initial weights φ, and an embedding v_i for each client.

        Biases of the heads that generate norm layers' parameters start at these layers' initial values (polyfed's
        choice), since scales near 0 would let no signal through.
        """
        assert server.architectures is not None  # `requires` names "architectures"
        initial_parameters, offsets = {}, {}
        for key, factory in server.architectures.items():
            module, initial_weights = cached_module(factory).module, initial_state(factory, server.seed)
            initial_parameters[key] = {
                name: initial_weights[name] for name, p in module.named_parameters() if p.requires_grad
            }
            norms = frozenset(norm_layer_tensor_names(module))
            offsets[key] = {name: tensor for name, tensor in initial_parameters[key].items() if name in norms}
        architecture_by_client = {client_info.id: client_info.architecture or "" for client_info in server.clients}
        heads = _head_keys_by_client(architecture_by_client) if self.heads == "client" else architecture_by_client
        place = {kind: k for k, kind in enumerate(server.architectures)}
        architecture_by_heads = {
            heads[client_info]: architecture_by_client[client_info]
            for client_info in sorted(
                architecture_by_client,
                key=lambda client_info: (place[architecture_by_client[client_info]], client_info),
            )
        }
        parameters_by_heads, offsets_by_heads = (
            {key: part[kind] for key, kind in architecture_by_heads.items()} for part in (initial_parameters, offsets)
        )
        ids, nothing = sorted(architecture_by_client), dict[str, Tensor]()
        state: ServerState = {
            "network": init_weight_hypernetwork(
                server.seed,
                int(1 + len(ids) / 4) if self.embedding_dim is None else self.embedding_dim,
                self.hidden,
                self.hn_depth,
                parameters_by_heads,
                offsets_by_heads,
            ),
            "velocity": {},
            "clients": ids,
            "heads": json.dumps([*heads.values()][:1] if len({*heads.values()}) == 1 else [heads[i] for i in ids]),
            "embeddings": dict.fromkeys(ids, nothing),
            "steps": 0,
            "seed": server.seed,
        }
        _initial_embeddings(state)  # too many for the memory end here, and not in round 1
        return state

    @property
    def groups_by_client(self) -> frozenset[str]:
        """Returns the group of the server state that has an entry for each client: its embedding."""
        return frozenset({"embeddings"})

    def later_server_tensors(self, server_state: ServerState) -> StateDict:
        """Returns an entry of the form that each client's has once it has replied."""
        embedding = _initial_embeddings(server_state)[0]
        velocity = {"velocity": embedding} if self.hn_momentum else {}
        return {"embedding": embedding, **velocity, "steps": torch.tensor(0)}

    def dispatch_all(self, server_state: ServerState, client_infos: Sequence[ClientInfo]) -> Iterator[Message]:
        """Yields the message to each client: the weights θ̄_i that the hypernetwork generates for it.

        Clients of one architecture take one matrix product per tensor; the clients are processed in blocks.
        """
        client_info_by_id = {client_info.id: client_info for client_info in client_infos}
        for block in _split_into_blocks(server_state, list(client_info_by_id)):
            models: dict[str, StateDict] = {}
            for architecture, ids in _group_by_heads(server_state, block).items():
                embeddings, _ = self._read_embeddings(server_state, ids)
                generated = generate_client_weights(server_state["network"], architecture, embeddings)
                models |= {client: {n: t[k] for n, t in generated.items()} for k, client in enumerate(ids)}
            for client in block:
                lr = self.lr_at(client_info_by_id[client].round, client_info_by_id[client].rounds)
                yield Message({"model": models[client]}, {"lr": lr})

    def aggregate(
        self, server_state: ServerState, replies: Mapping[str, Message], server: ServerContext
    ) -> ServerState:
        """Updates hypernetwork and embeddings by the chain rule from changes of generated weights.

        φ ← φ − α Σ_i ∇_φ θ̄_iᵀ(θ̄_i − θ_i), and v_i likewise (algorithm 1, as a sum). The step is SGD with momentum and
        weight decay on all of φ and all embeddings. Those of clients that have not replied take it when they are next read.
        """
        total: dict[str, Tensor] = {}
        changed, steps = dict[str, StateDict](), torch.tensor(server_state["steps"] + 1)
        for block in _split_into_blocks(server_state, sorted(replies)):
            for architecture, ids in sorted(_group_by_heads(server_state, block).items()):
                deltas = {
                    name: torch.stack([replies[i].tensors["delta"][name] for i in ids])
                    for name in generated_tensor_names(server_state["network"], architecture)
                }
                embeddings, velocity = self._read_embeddings(server_state, ids)
                gradients, gradient_of_embeddings = backpropagate_deltas(
                    server_state["network"], architecture, embeddings, deltas, self.hn_clip
                )
                for name, gradient in gradients.items():
                    total[name] = total[name] + gradient if name in total else gradient
                stepped, velocities = sgd_step(
                    {"embedding": embeddings},
                    {"embedding": velocity},
                    {"embedding": gradient_of_embeddings},
                    **self._step_options,
                )
                columns = {**stepped, **({"velocity": velocities["embedding"]} if velocities else {})}
                for row, client in enumerate(ids):
                    changed[client] = {name: column[row].clone() for name, column in columns.items()} | {"steps": steps}
        network, velocity_of_network = sgd_step(
            server_state["network"], server_state["velocity"], total, **self._step_options
        )
        return {
            **server_state,
            "network": network,
            "velocity": velocity_of_network,
            "embeddings": server_state["embeddings"] | changed,
            "steps": server_state["steps"] + 1,
        }

    @property
    def _step_options(self) -> dict[str, float]:
        return {"lr": self.hn_lr, "momentum": self.hn_momentum, "weight_decay": self.hn_weight_decay}

    def _read_embeddings(self, server_state: ServerState, clients: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Returns the embeddings of some clients and their momentum, (B, E) each, after all steps of the server so far."""
        entries, now = [server_state["embeddings"][client] for client in clients], server_state["steps"]
        initial = _initial_embeddings(server_state)[
            [bisect_left(server_state["clients"], client) for client in clients]
        ]
        rows = torch.stack([entry.get("embedding", row) for entry, row in zip(entries, initial, strict=True)])
        velocity = torch.stack(
            [entry.get("velocity", torch.zeros_like(row)) for entry, row in zip(entries, rows, strict=True)]
        )
        steps = [int(entry.get("steps", 0)) for entry in entries]
        if not all(0 <= number <= now for number in steps):
            raise UserError(
                f"PFedHN: the server state has an embedding after {max(steps)} steps, and it has taken {now}"
            )
        if not self.hn_weight_decay and not self.hn_momentum:
            return rows, velocity
        return repeat_steps_without_gradient(rows, velocity, steps, now, **self._step_options)

    def reply_spec(self, server_state: ServerState, message: Message, reply: Message) -> Mapping[str, StateDictSpec]:
        """Returns the shapes and dtypes of a reply: the change of each tensor that the server sent."""
        return {"delta": state_dict_spec(message.tensors["model"])}

    # -- client ---------------------------------------------------------------------------------------------------

    def validate_network(self, client: Client) -> None:
        """Raises a `UserError` if a norm layer of the client's network cannot be recognised."""
        assert client.model is not None
        norm_layer_tensor_names(cached_module(client.model).module)

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the client's private state before round 1, which is empty."""
        return {}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains generated weights for `local_steps`; replies with values before minus after.

        The sign is that of the authors' code: descent along the reply leads to θ_i.
        """
        net = self._load_generated_weights(message, client_state, client)
        fit_result = fit(net.module, client, self, lr=message.scalars["lr"], seed=seed)
        trained, buffer_state = extract_sent_tensors_and_client_state(net, self)
        delta = {name: theta_bar - trained[name] for name, theta_bar in message.tensors["model"].items()}
        return Message({"delta": delta}, reply_scalars(client, fit_result.loss)), buffer_state

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the network to evaluate for the client: its network with the generated weights and its buffers."""
        return recompute_norm_statistics_if_needed(
            self._load_generated_weights(message, client_state, client), client, client_state, self.buffers
        )

    def _load_generated_weights(self, message: Message, client_state: ClientState, client: Client) -> CachedModule:
        """Loads the generated weights from the message into the client's network."""
        return load_client_model(client, message.tensors["model"], client_state, self.buffers)


def _head_keys_by_client(architecture_by_client: Mapping[str, str]) -> dict[str, str]:
    """Names each client's own heads; an architecture's first client takes the architecture's name.

    So nothing changes where no two clients have the same architecture.

    >>> _head_keys_by_client({"a": "mlp", "c": "mlp", "b": "cnn"})
    {'a': 'mlp', 'b': 'cnn', 'c': 'mlp-1'}
    """
    number: dict[str, int] = {}
    heads = {}
    for client in sorted(architecture_by_client):
        k = number.get(architecture_by_client[client], 0)
        heads[client] = f"{architecture_by_client[client]}-{k}" if k else architecture_by_client[client]
        number[architecture_by_client[client]] = k + 1
    return heads


@lru_cache(maxsize=2)
def _parse_heads(heads: str) -> tuple[str, ...]:
    return tuple(json.loads(heads))


def _initial_embeddings(server_state: ServerState) -> Tensor:
    """Returns the embeddings of all clients before round 1, (N, E)."""
    first = server_state["network"]["trunk.0.weight"]
    return draw_embeddings(server_state["seed"], len(server_state["clients"]), first.shape[1], first.dtype)


def _heads_of(server_state: ServerState, client: str) -> str:
    heads = _parse_heads(server_state["heads"])
    return heads[0] if len(heads) == 1 else heads[bisect_left(server_state["clients"], client)]


def _group_by_heads(server_state: ServerState, clients: Sequence[str]) -> dict[str, list[str]]:
    """Groups clients that share heads of the hypernetwork, by the name of the heads."""
    groups: dict[str, list[str]] = {}
    for client in clients:
        groups.setdefault(_heads_of(server_state, client), []).append(client)
    return groups


def _split_into_blocks(server_state: ServerState, clients: Sequence[str]) -> Iterator[list[str]]:
    """Yields the clients in blocks small enough for the networks of one block to fit into memory."""
    network = server_state["network"]
    heads_by_client = {client: _heads_of(server_state, client) for client in clients}
    sizes = {
        key: sum(network[f"heads.{key}.{name}.bias"].numel() for name in generated_tensor_names(network, key))
        for key in set(heads_by_client.values())
    }
    block: list[str] = []
    held = 0
    for client in clients:
        size = sizes[heads_by_client[client]]
        if block and held + size > _BLOCK:
            yield block
            block, held = [], 0
        block.append(client)
        held += size
    if block:
        yield block
