"""FLHA-GHN: clients with any architectures train one graph hypernetwork ("Federated Learning with Heterogeneous
Architectures using Graph HyperNetworks", section 4).
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import torch
from torch import nn

from polyfed.algorithms.base.averaging import Averaging, ClientState, ServerState
from polyfed.core.algorithm import Client, Message, ServerContext
from polyfed.core.errors import UserError
from polyfed.core.methods.capabilities import ResolvesAutoFields
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import (
    BufferPolicy,
    fill_client_model,
    recompute_norm_statistics,
    recompute_norm_statistics_if_needed,
)
from polyfed.core.nn.module_cache import CachedModule, cached_module, initial_state
from polyfed.core.state_dict import StateDict
from polyfed.core.training.config import Schedule
from polyfed.core.training.loop import fit, reply_scalars
from polyfed.graphs import ArchitectureGraph, LayerCatalogue
from polyfed.graphs.architecture import NONE, PAPER_KINDS
from polyfed.graphs.catalogue import read_graph_variant_of_catalogue
from polyfed.graphs.client_graph import graph_of_client
from polyfed.graphs.contraction import ContractionOptions, NormTreatment
from polyfed.graphs.tracing.layer_flow import Kinds
from polyfed.hypernetworks.generated_network import GeneratedNetwork, build_generated_network
from polyfed.hypernetworks.ghn import (
    GHNConfig,
    Gnn,
    Head,
    Passing,
    catalogue_from_weights,
    decoder_sizes_from_weights,
    describe_message_size_of_heads,
    read_sizes_from_weights,
    shrink_to_size_of_networks,
    use_factored_heads_if_large,
)
from polyfed.hypernetworks.ghn_start import Init, init_ghn_params
from polyfed.hypernetworks.lowrank_decoder import Sizes, fits, largest_sizes

GraphForm = Literal["layers", "layers_and_norms"]


@final
@dataclass(frozen=True, kw_only=True)
class FLHAGHN(Averaging, ResolvesAutoFields):
    """Trains one graph hypernetwork (GHN) for all clients, a network that generates the weights of each client's
    network from the graph of its layers.

    The generated weights are θ_c(𝒜_c; W_G, W_H), where 𝒜_c is the client's graph. Clients train the GHN through their
    networks on their data, and the server averages it (algorithm 1). Neither the graph nor the network is sent, though
    a single reply reveals much of them (docs/methods/flha_ghn.md). Layers outside the public catalogue stay with the
    client and are trained together with the GHN. Evaluated model: generated weights with the linear head refined for
    one epoch, and the client's own buffers. Next to it, "generated" is the same without the refinement.

    Args:
        gnn: layers of the graph neural network: "graphconv" (eq. 2, paper), "gated" (GRU) or "sage" (means), the other two
            of appendix D.
        passing: order of message passing: "synchronous" (paper), or "asynchronous", in the order of the data flow and back
            (section 4.3 tried it without an advantage).
        depth: T of eq. 2 (6, paper); 0 is Table 2's ablation without GNN, one set of weights per layer type.
        latent: entries of h_v (51, paper); with light heads the largest number of them.
        hidden: hidden units of a head H_l (16, paper); with light heads the largest number of them.
        head: "light" (polyfed's choice): low rank over output and input channels, with `rank`, `latent` and `hidden` reduced
            until a message is at most twice as large as the largest network, as far as they can be; "mlp" (paper): each
            weight costs 17 numbers; "factored": low rank with `rank`, `latent` and `hidden` as given; "lowrank": one decoder
            for all layer types and widths, which generates a change of low rank of a draw that clients make themselves; or
            "auto", polyfed's default before: "mlp" up to 50 MB per message, "factored" above.
        rank: rank of the factored heads, of light ones the largest (32, polyfed's choice).
        normalise: keeps the activations of GNN and heads at one scale (true, polyfed's choice). False is the published form;
            with initialisation="last_layer" it is more accurate in some federations with few images whose networks have norm
            layers, and seldom useful where they have none.
        initialisation: "kaiming" (polyfed's choice): generated weights of convolutions and linear layers have Kaiming's
            variance 2/fan_in; "network": the variance that the clients' networks have when they are built; "paper": section
            4.2's initialisation, which gives 2/fan_out (paper); "last_layer": section 4.2's factor on the last layer
            of a head alone, which without `normalise` gives small weights.
        graph: "layers" (paper): nodes are convolutions and linear layers, and a norm is part of the layer before it; or
            "layers_and_norms": norm layers are nodes, too.
        joins: whether sums and concatenations are nodes (true, paper, section 4.2); with false, edges pass through
            them, which appendix B finds sufficient.
        norms: "generate" (polyfed's choice; the paper does not say), or "local": scales and shifts of norm layers stay with
            the client.
        kinds: "all" (polyfed's choice): every parameter is generated that can be, also those of embeddings, recurrent layers
            and transposed convolutions, and parameters that belong to no layer; "paper": convolutions, linear and norm
            layers alone (paper).
        tables: "local" (polyfed's choice): tables of which the data choose rows (words, categories) stay with the client,
            since rows that come back unchanged reveal which words it has; "generated": they are generated.
        catalogue: file of the public layer types (`polyfed graph --catalogue` writes one); None takes the union over the
            clients, as a simulation can (polyfed's choice).
        refine_epochs: epochs of refining the linear head before evaluation (1, paper); 0 evaluates the generated weights.
        refine_lr: learning rate of the refinement (0.009, polyfed's choice: the paper's learning rate of training; the paper
            names none for the refinement). It does not follow `lr`: a hypernetwork tolerates rates at which one epoch
            spoils a small head.
        weighted: weighs replies by their number of examples; false counts each client the same (paper, algorithm 1).
        lr: learning rate of round 1 (0.009, paper).
        schedule: schedule of the learning rate over rounds ("cosine", paper).
        batch_size: examples in a minibatch (64, polyfed's choice).
        momentum: momentum of local SGD (0.9, polyfed's choice).
        clip_norm: largest norm of a gradient (5, polyfed's choice), since one step moves all layers of a type at once; None
            does not clip.
        buffers: "local" (polyfed's choice) or "recompute".

    The other fields are those of `LocalTraining`.

    >>> FLHAGHN(head="factored").depth
    6
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="flha_ghn",
        summary="A graph hypernetwork generates weights for any network",
        paper="Litany et al. 2022",
        evaluated="generated weights with the head refined; also without",
        small={"depth": 2, "hidden": 4},
        leaderboard={
            "*": {
                "lr": 0.02,
                "momentum": 0.9,
                "clip_norm": 5.0,
                "schedule": "cosine",
                "graph": "layers_and_norms",  # its rows were measured with this graph and these kinds
                "kinds": "paper",
                "head": "auto",
            }
        },
        stacked=True,
    )
    private_fits: ClassVar[tuple[str, ...]] = ("local_epochs", "refine_epochs")

    requires: ClassVar[frozenset[str]] = frozenset({"layer_catalogue"})
    groups: ClassVar[tuple[str, ...]] = ("ghn",)
    discloses: ClassVar[frozenset[str]] = frozenset({"architecture", "hypernetwork", "weights"})
    """In the paper the server sees neither graph nor weights; but heads of layer types that a client lacks come back
    unchanged, which reveals its layers, and W_c and the graph generate the client's weights (docs/methods/flha_ghn.md)."""
    gnn: Gnn = "graphconv"
    passing: Passing = "synchronous"
    depth: int = 6
    latent: int = 51
    hidden: int = 16
    head: Literal["light", "auto", "mlp", "factored", "lowrank"] = "light"
    rank: int = 32
    normalise: bool = True
    initialisation: Init = "kaiming"
    graph: GraphForm = "layers"
    joins: bool = True
    norms: Literal["generate", "local"] = "generate"
    kinds: Kinds = "all"
    tables: Literal["local", "generated"] = "local"
    catalogue: str | None = None
    refine_epochs: int = 1
    refine_lr: float = 0.009
    weighted: bool = False
    lr: float = 0.009
    schedule: Schedule = "cosine"
    batch_size: int = 64
    momentum: float = 0.9
    clip_norm: float | None = 5.0
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "depth")
        for field in ("latent", "hidden", "rank"):
            self._require(getattr(self, field) >= 1, field, "at least 1")
        self._at_least(0, "refine_epochs")
        self._positive("refine_lr")
        if self.graph == "layers":
            object.__setattr__(self, "requires", self.requires | {"norms_in_layers"})
        if self.tables == "generated" and self.kinds == "all":
            object.__setattr__(self, "discloses", self.discloses | {"vocabulary"})
        starts = self.head != "lowrank" or self.initialisation in ("kaiming", "network")
        self._require(starts, "initialisation", "'kaiming' or 'network' with head='lowrank'")
        self._require(self.buffers != "average", "buffers", "'local' or 'recompute' (clients' buffers differ in form)")

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns initial weights of the hypernetwork for the layer types of the clients' networks.

        Raises:
            UserError: none of these types can be generated.
        """
        catalogue = server.layer_catalogue if self.catalogue is None else self._read_catalogue(self.catalogue)
        types = tuple(
            t if self.norms == "generate" else replace(t, norm=NONE, norm_bias=False)
            for t in catalogue.types
            if (self.norms == "generate" or not t.is_norm)
            and (self.kinds == "all" or t.kind in PAPER_KINDS)
            and (self.tables == "generated" or t.kind != "embedding")
        )
        if not types:
            raise UserError("flha_ghn has nothing to generate: no client has a layer of a type in the catalogue")
        if not self.normalise and self.initialisation != "kaiming" and not _has_norms(catalogue):
            warnings.warn(
                f"FLHAGHN: with normalise=False and initialisation={self.initialisation!r} networks without norm layers, as "
                "all are here, learned less than by the default, and next to nothing without clip_norm "
                "(docs/methods/flha_ghn.md); take normalise=True, initialisation='kaiming'",
                UserWarning, stacklevel=2,
            )  # fmt: skip
        config = (
            self._decoder_config(largest_sizes(types))
            if self.head == "lowrank"
            else self._ghn_config(replace(catalogue, types=types))
        )
        config = shrink_to_size_of_networks(config) if self.head == "light" else config
        state = {"ghn": init_ghn_params(config, self.initialisation, server.seed)}
        for field, decision in self.resolved_fields(state).items():
            warnings.warn(f"FLHAGHN: {field} is {decision}; give {field}=... to choose", UserWarning, stacklevel=2)
        return state

    def _read_catalogue(self, path: str) -> LayerCatalogue:
        """Reads the catalogue of layer types from a file.

        Raises:
            UserError: its types contain norms, which in this method's graphs are nodes.
        """
        catalogue = LayerCatalogue.read_yaml(path)
        if self.norms == "local":
            return catalogue
        type_with_norm = next((t for t in catalogue.types if t.norm != NONE), None)
        if self.graph == "layers_and_norms" and (
            type_with_norm is not None or read_graph_variant_of_catalogue(path) == "layers"
        ):
            raise UserError(
                f"the layer catalogue {path} is for graph='layers' (norms are part of layers), and this method has "
                "graph='layers_and_norms'; give graph='layers', or write the catalogue with polyfed graph --graph "
                "layers_and_norms"
            )
        if self.graph == "layers" and type_with_norm is None and _has_norms(catalogue):
            warnings.warn(
                f"FLHAGHN: no layer type of the catalogue {path} has a norm, though there are norm layers: layers with a "
                "norm after them will stay with their clients. If it was written for graph='layers_and_norms', write it "
                "with polyfed graph --graph layers",
                UserWarning, stacklevel=3,
            )  # fmt: skip
        return catalogue

    def resolved_fields(self, server_state: ServerState) -> dict[str, str]:
        """Returns `{"head": description}` if `head: auto` chose another than the paper's "mlp", else {}."""
        config = self._config_of_message(server_state["ghn"])
        if self.head == "auto" and config.head == "factored":
            return {"head": describe_message_size_of_heads(config)}
        return {}

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> ClientState:
        """Returns the initial values of all trained parameters of the client's network.

        Later, the values of those that the hypernetwork generates are ignored.
        """
        assert client.model is not None
        initial_weights = initial_state(client.model, seed)
        names = [name for name, _ in cached_module(client.model).module.named_parameters()]
        return {"private": {name: initial_weights[name] for name in names if name in initial_weights}}

    def local_update(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> tuple[Message, ClientState]:
        """Trains the hypernetwork by gradients through the weights that it generates; replies with it.

        This is SGD on eq. 5. Parameters that are not generated are trained with it and stay private.
        """
        generated, cached, graph = self._generate_network(message, client_state, client)
        if not graph.generated_weights:
            warnings.warn(
                f"FLHAGHN: no layer of the network of client {client.id!r} is generated, so that it trains alone: none of "
                "its layers has a type in the catalogue (kind, channels, kernel, stride, dilation, groups, bias and "
                "activation)",
                RuntimeWarning,
                stacklevel=2,
            )
        for name, parameter in cached.module.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name in graph.local_reasons)
        fit_result = fit(generated, client, self, lr=message.scalars["lr"], seed=seed)
        trained = {name: tensor.detach().to("cpu", copy=True) for name, tensor in generated.ghn.state_dict().items()}
        return Message({"ghn": trained}, reply_scalars(client, fit_result.loss)), self._private_state(cached, graph)

    def _private_state(self, cached: CachedModule, graph: ArchitectureGraph) -> ClientState:
        state = cached.module.state_dict()
        names_by_part = {
            "private": [name for name in graph.local_reasons if name not in cached.frozen],
            "buffers": cached.buffers if self.buffers == "local" else (),
        }
        tensors_by_part = {
            part: {name: state[name].to("cpu", copy=True) for name in names} for part, names in names_by_part.items()
        }
        return {part: tensors for part, tensors in tensors_by_part.items() if tensors}

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the client's network with generated weights and a trained last linear layer.

        The paper calls this "Inference and local refinement".
        """
        _, cached, graph = self._generate_network(message, client_state, client)
        recompute_norm_statistics_if_needed(cached, client, client_state, self.buffers)
        if self.refine_epochs:
            self._refine_head(cached.module, graph.head_parameter_names, client, seed)
            if self.buffers == "recompute":
                recompute_norm_statistics(cached.module, client.train)
        return cached.module

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields (name, network): the client's network with generated weights, its head untrained."""
        _, cached, _ = self._generate_network(message, client_state, client)
        yield "generated", recompute_norm_statistics_if_needed(cached, client, client_state, self.buffers)

    def client_graph(self, message: Message, client: Client) -> ArchitectureGraph:
        """Returns the network's graph with generated layers of the message's catalogue only.

        The other layers are private, each with a reason.
        """
        return self._build_graph(client, self._config_of_message(message.tensors["ghn"]))

    def _build_graph(self, client: Client, config: GHNConfig) -> ArchitectureGraph:
        catalogue = config.catalogue
        if config.head == "lowrank":  # all types that the decoder is large enough for
            types = graph_of_client(client, contraction=self.contraction).layer_types
            catalogue = LayerCatalogue(tuple(kind for kind in types if fits(kind, config.sizes)))
        return graph_of_client(client, catalogue, self.contraction)

    @property
    def contraction(self) -> ContractionOptions:
        """Returns the setting that says which operations of a network become nodes of its graph."""
        norms: NormTreatment = "layers" if self.norms == "generate" else "local"
        if self.graph == "layers_and_norms":
            norms = "nodes"
        return ContractionOptions(norms, self.joins, self.kinds, self.tables)

    def _refine_head(self, network: nn.Module, head: frozenset[str], client: Client, seed: int) -> None:
        """Trains the last layer for `refine_epochs`; BatchNorm's statistics are updated, as in training."""
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name in head)
        if any(parameter.requires_grad for parameter in network.parameters()):
            options = replace(self, local_epochs=self.refine_epochs, local_steps=None)
            fit(network, client, options, lr=self.refine_lr, seed=seed)

    def _generate_network(
        self, message: Message, client_state: ClientState, client: Client
    ) -> tuple[GeneratedNetwork, CachedModule, ArchitectureGraph]:
        """Generates the client's weights; returns the network, its cached module and its graph.

        The cached module has the generated weights, the private parameters and the buffers. In the graph, layers
        outside the catalogue are private.
        """
        assert client.model is not None
        config = self._config_of_message(message.tensors["ghn"])
        graph = self._build_graph(client, config)
        generated, cached = build_generated_network(
            client.model, graph, config, message.tensors["ghn"], client.train.device
        )
        with torch.no_grad():
            weights = {**client_state.get("private", {}), **generated.generate_weights()}
        return generated, fill_client_model(cached, weights, client_state, self.buffers), graph

    def _config_of_message(self, tensors: StateDict) -> GHNConfig:
        if self.head == "lowrank":
            return self._decoder_config(decoder_sizes_from_weights(tensors))
        config = self._ghn_config(catalogue_from_weights(tensors))
        return read_sizes_from_weights(config, tensors) if self.head == "light" else config

    def _decoder_config(self, sizes: Sizes) -> GHNConfig:
        numbers = (self.depth, self.latent, self.hidden, "lowrank", self.rank, self.normalise)
        return GHNConfig(LayerCatalogue(()), *numbers, self.gnn, self.passing, sizes, self.initialisation == "network")  # type: ignore[arg-type]

    def _ghn_config(self, catalogue: LayerCatalogue) -> GHNConfig:
        head: Head = "factored" if self.head in ("factored", "light") else "mlp"
        sizes = (self.depth, self.latent, self.hidden, head, self.rank, self.normalise)
        config = GHNConfig(catalogue, *sizes, self.gnn, self.passing)
        return use_factored_heads_if_large(config) if self.head == "auto" else config


def _has_norms(catalogue: LayerCatalogue) -> bool:
    return any(t.is_norm or t.norm != NONE for t in catalogue.types)
