"""Defines what the four methods of FedPNAS's paper share: all clients train one supernet, a base stack and a personal
stack of cells, from which each client derives its network (Hoang and Kingsford, "Personalized Neural Architecture
Search for Federated Learning").
"""

import math
from abc import ABC
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from polyfed.algorithms.base.averaging import Averaging, ClientState, ServerState
from polyfed.core.algorithm import Architecture, Client, ClientInfo, DataSpec, Message, ServerContext
from polyfed.core.methods.capabilities import BringsNetwork
from polyfed.core.nn.buffers import (
    BufferPolicy,
    extract_sent_tensors_and_client_state,
    fill_client_model,
    recompute_norm_statistics,
    tensors_to_send,
)
from polyfed.core.nn.module_cache import CachedModule, cached_module, initial_state
from polyfed.core.seeds import derive_seed, temporary_rng_seed
from polyfed.core.state_dict import StateDict
from polyfed.core.training.loop import fit, reply_scalars
from polyfed.nas.cells import EdgeJoin
from polyfed.nas.derived import describe_network, most_probable_network, operation_probabilities, rebuild_network
from polyfed.nas.operations import (
    OPERATION_NAMES,
    SMALL_OPERATION_NAMES,
    check_operation_names,
    normalise_by_batch_without_tracking,
)
from polyfed.nas.sampling import Gradient, gumbel_noise_like
from polyfed.nas.supernet import Network, SampledNetwork, SamplerContext, SamplingUnit, SupernetPlan, plan_cell_stacks

DerivationMode = Literal["argmax", "sampled"]
Annealing = Literal["exponential", "linear", "constant"]
STACKS = ("base", "personal")
"""Groups of a message, θ_b and θ_p; the names of their tensors begin with these words."""
SMALL_SUPERNET: Mapping[str, Any] = {
    "channels": 4, "base_cells": 1, "base_nodes": 1, "personal_nodes": 1,
    "operations": ("sep_conv_3", "max_pool_3", "skip"), "personal_operations": ("sep_conv_3", "skip"),
}  # fmt: skip
"""Hyper-parameters with which a test trains a supernet in a moment."""


@dataclass(frozen=True, kw_only=True)
class SupernetMethod(Averaging, BringsNetwork, ABC):
    """Averages a supernet (a network that contains all candidate operations) over the clients, and derives each
    client's network from it; subclasses define the local update.

    The personal cells are averaged, too: a client adapts its copy of them only before evaluation, and sends nothing of
    that adaptation.

    Args:
        channels: C of all feature maps (paper: 16 for MNIST, 32 for CIFAR-10).
        base_cells, personal_cells: cells of the two stacks (3 and 1, authors' code; 4 and 4 give the 32 edges that Table 3
            counts).
        base_nodes, personal_nodes: nodes of a cell (2, polyfed's choice: the paper states none; 4 and 4 cells of 2 nodes
            have exactly the parameters of Table 3; the authors' code has 4 nodes, and 12 edges per cell).
        operations: operations from which an edge of a base cell chooses (all nine, paper).
        personal_operations: operations from which an edge of a personal cell chooses (those without a kernel of 5 or 7,
            paper, section 3.1; Table 3 counts all nine on every edge, against that section).
        join: "sum" of a node's edges (paper) or their "mean" (authors' code).
        stem_stride: 2 halves the images before the first cell, 1 does not (1, authors' code).
        temperature: τ of eq. 2 in round 1 (1.0, polyfed's choice; 0.1 throughout in the authors' code).
        temperature_end: τ in the last round (0.1, authors' code).
        annealing: decrease of τ over the rounds in between: "exponential" (polyfed's choice), "linear", or "constant",
            which keeps `temperature` throughout.
        gradient: gradient of the samplers. "chosen" (polyfed's choice, as in DSNAS) flows through the drawn operations, and
            the others are not computed; "full" (paper, eq. 2) flows through all operations of an edge, which are all
            evaluated. The forward pass is the same.
        finetune_epochs: epochs on the client's training data in which its personal stack and sampler are adapted before
            evaluation and export; 0 skips this (1, polyfed's choice, for FedPNAS, and 0 for FedDSNAS, which has no such
            phase, paper).
        finetune_lr: learning rate of this adaptation; None takes the round's (polyfed's choice).
        evaluation: "argmax" evaluates the most probable architecture, "sampled" the mean of `samples` networks
            (polyfed's choice; 5 samples in the authors' code).
        samples: number of networks of "sampled" (5, authors' code).
        weighted: weighs clients by their number of training examples; False counts every client the same (paper,
            algorithm 1, line 6).
        batch_size: examples in a minibatch (48, authors' code).
        optimizer: optimiser of local training ("adam", authors' code).
        lr: learning rate of the weights (0.01, polyfed's choice; 0.002 in the authors' code, over 10,000 steps).
        sampler_lr: learning rate of the samplers in round 1; it follows the schedule of `lr` (polyfed's choice; None takes
            `lr`).
        buffers: "recompute" (polyfed's choice): minibatches use random operations, so that running statistics of BatchNorm
            belong to old weights or were never updated; estimated on the client's training data, they belong to the
            network that is evaluated.

    Raises:
        UserError: a value is outside its range.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"images", "one_data_spec"})
    traits: ClassVar[frozenset[str]] = frozenset({"plans_all_rounds"})
    groups: ClassVar[tuple[str, ...]] = STACKS
    context: ClassVar[SamplerContext] = "free"
    """Kind of the samplers: context-free ("free") or context-aware ("aware")."""

    channels: int = 16
    base_cells: int = 3
    personal_cells: int = 1
    base_nodes: int = 2
    personal_nodes: int = 2
    operations: tuple[str, ...] = OPERATION_NAMES
    personal_operations: tuple[str, ...] = SMALL_OPERATION_NAMES
    join: EdgeJoin = "sum"
    stem_stride: int = 1
    temperature: float = 1.0
    temperature_end: float = 0.1
    annealing: Annealing = "exponential"
    gradient: Gradient = "chosen"
    finetune_epochs: int = 1
    finetune_lr: float | None = None
    evaluation: DerivationMode = "argmax"
    samples: int = 5
    weighted: bool = False
    batch_size: int = 48
    optimizer: str = "adam"
    lr: float = 0.01
    sampler_lr: float | None = None
    buffers: BufferPolicy = "recompute"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("operations", "personal_operations"):  # configurations have lists, and a plan must be hashable
            names = getattr(self, field)
            self._require(isinstance(names, list | tuple), field, "a list of names of operations")
            check_operation_names(names)
            object.__setattr__(self, field, tuple(names))
        self._at_least(1, "channels")
        self._require(self.stem_stride in (1, 2), "stem_stride", "1 or 2")
        self._require(0 < self.temperature < math.inf, "temperature", "positive")
        self._require(0 < self.temperature_end < math.inf, "temperature_end", "positive")
        self._at_least(0, "finetune_epochs")
        self._require(self.finetune_lr is None or 0 < self.finetune_lr < math.inf, "finetune_lr", "positive, or none")
        self._at_least(1, "samples")
        self._require(self.sampler_lr is None or 0 < self.sampler_lr < math.inf, "sampler_lr", "positive, or none")
        self.supernet_plan(1, 1)  # checks the sizes

    def supernet_plan(self, in_channels: int, outputs: int) -> SupernetPlan:
        """Returns the plan of the supernet for images of `in_channels` and for `outputs` logits."""
        base, personal = plan_cell_stacks(
            self.base_cells, self.personal_cells, self.base_nodes, self.personal_nodes, self.operations,
            self.personal_operations,
        )  # fmt: skip
        return SupernetPlan(
            in_channels, outputs, self.channels, base, personal, self.join, self.context, self._sampling_unit(),
            stem_stride=self.stem_stride,
        )  # fmt: skip

    def _sampling_unit(self) -> SamplingUnit:
        return "example"

    def temperature_at(self, round_number: int, rounds: int) -> float:
        """Returns the temperature τ of the Gumbel-softmax in a round, counted from 1.

        >>> from polyfed.algorithms import FedDSNAS
        >>> for annealing in ("exponential", "linear", "constant"):
        ...     print([round(FedDSNAS(annealing=annealing).temperature_at(t, 3), 3) for t in (1, 2, 3)])
        [1.0, 0.316, 0.1]
        [1.0, 0.55, 0.1]
        [1.0, 1.0, 1.0]
        """
        progress = (min(round_number, rounds) - 1) / max(rounds - 1, 1)
        if self.annealing == "linear":
            return self.temperature + progress * (self.temperature_end - self.temperature)
        return self.temperature * (
            (self.temperature_end / self.temperature) ** progress if self.annealing != "constant" else 1
        )

    def sampler_lr_factor(self, name: str) -> float:
        """Returns the factor by which the learning rate of the named parameter differs from that of the weights."""
        return 1.0 if self.sampler_lr is None or ".samplers." not in name else self.sampler_lr / self.lr

    @property
    def evaluated(self) -> str:
        """Says which architecture is evaluated, and whether its personal cells are adapted before."""
        which = f"the mean of {self.samples} sampled networks"
        if self.evaluation == "argmax":
            each = " of each image" if self.context == "aware" else ""
            which = f"the most probable operations{each}"
        epochs = f"{self.finetune_epochs} epoch{'s' if self.finetune_epochs > 1 else ''} of"
        return f"{which}, after {epochs if self.finetune_epochs else 'no'} adaptation of the personal stack"

    # -- server ---------------------------------------------------------------------------------------------------

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns both stacks of cells with initial weights and operations' probabilities.

        θ = {θ_b, θ_p}; weights are W, and the samplers' parameters Π.
        """
        assert server.data_spec is not None  # `requires` names "one_data_spec"
        plan = self.supernet_plan(server.data_spec.inputs[0], server.data_spec.outputs)
        return _split_into_stacks(
            tensors_to_send(initial_state(plan, server.seed), cached_module(plan).buffers, self.buffers)
        )

    def dispatch(self, server_state: ServerState, client_info: ClientInfo) -> Message:
        """Returns to every client both stacks of cells, and the round's learning rate and temperature."""
        scalars = {
            "lr": self.lr_at(client_info.round, client_info.rounds),
            "temperature": self.temperature_at(client_info.round, client_info.rounds),
        }
        return Message({group: server_state[group] for group in STACKS}, scalars)

    # -- client ---------------------------------------------------------------------------------------------------

    def load_supernet(self, message: Message, client_state: ClientState, client: Client) -> CachedModule:
        """Returns a supernet with the message's weights, from which its numbers of input channels and outputs are read."""
        base, personal = (message.tensors[group] for group in STACKS)
        plan = self.supernet_plan(base["base.stem.weight"].shape[1], len(personal["personal.classifier.bias"]))
        net = fill_client_model(
            cached_module(plan, client.train.device), {**base, **personal}, client_state, self.buffers
        )
        supernet_of(net).temperature, supernet_of(net).gradient = message.scalars["temperature"], self.gradient
        return net

    def build_reply_and_client_state(
        self, net: CachedModule, client: Client, loss: float
    ) -> tuple[Message, ClientState]:
        """Builds the reply, both trained stacks of cells, and the state, the buffers that stay private."""
        model, buffer_state = extract_sent_tensors_and_client_state(net, self)
        return Message(_split_into_stacks(model), reply_scalars(client, loss)), buffer_state

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the network derived from the supernet after its personal cells were adapted.

        It is the most probable architecture as a plain network, or the mean of sampled ones. With context-aware
        samplers it is the supernet itself, which chooses for each example.
        """
        net = self.load_supernet(message, client_state, client)
        if self.finetune_epochs:
            tuning = replace(self, local_epochs=self.finetune_epochs, local_steps=None)
            lr = message.scalars["lr"] if self.finetune_lr is None else self.finetune_lr
            adapt_personal_stack(supernet_of(net), client, tuning, lr=lr, seed=seed)
        return self.derive_network(net, client_state, client, seed)

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields (name, network): the one that the client derives from the supernet without adaptation."""
        if self.finetune_epochs:
            yield (
                "server",
                self.derive_network(self.load_supernet(message, client_state, client), client_state, client, seed),
            )

    def derive_network(self, net: CachedModule, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Derives the client's network, with BatchNorm statistics of its training data.

        Statistics are not estimated if the client has kept its own buffers.
        """
        supernet = supernet_of(net).eval()
        derived: nn.Module = supernet
        if self.evaluation == "sampled":
            with temporary_rng_seed(derive_seed(seed, "sampled networks")):
                noise = {
                    k: gumbel_noise_like(torch.empty(self.samples, sampler.edges, sampler.operations))
                    for k, (_, sampler) in enumerate(supernet.cells_with_samplers())
                    if sampler is not None
                }
            derived = SampledNetwork(supernet, noise, client.task.one_class_per_example).to(client.train.device)
        elif self.context == "free":
            derived = most_probable_network(supernet)
        if self.buffers == "recompute" or (self.buffers == "local" and not client_state.get("buffers")):
            recompute_norm_statistics(derived, client.train)
        return derived.eval()

    def network_for(self, data: DataSpec) -> Architecture:
        """Returns the supernet's plan for this input shape and number of classes, its factory."""
        return self.supernet_plan(data.inputs[0], data.outputs)

    def build_from_description(self, description: Mapping[str, Any]) -> nn.Module:
        """Builds the network of `describe_personal_network`, still without its weights."""
        return rebuild_network(description)

    def describe_personal_network(self, network: nn.Module, client: Client) -> Mapping[str, Any]:
        """Describes a derived network by its plan, its cells, and its operations' probabilities."""
        supernet = network.network if isinstance(network, SampledNetwork) else network
        assert isinstance(supernet, Network)
        return describe_network(network, supernet.known or operation_probabilities(supernet, client.train))


def supernet_of(net: CachedModule) -> Network:
    """Returns the supernet that a `CachedModule` holds."""
    assert isinstance(net.module, Network)
    return net.module


def _split_into_stacks(weights: StateDict) -> ServerState:
    return {group: {n: t for n, t in weights.items() if n.startswith(f"{group}.")} for group in STACKS}


def adapt_personal_stack(
    supernet: Network,
    client: Client,
    options: SupernetMethod,
    *,
    lr: float,
    seed: int,
    trains_samplers: bool = True,
    trains_base_stack: bool = False,
) -> None:
    """Trains the personal cells in place on the client, the base cells if `trains_base_stack`.

    This is the fine-tuning phase.

    Args:
        supernet: the supernet, on the device of the client's data.
        client: the client whose training data are used.
        options: epochs or steps, and the other settings of local training.
        lr: learning rate.
        seed: seed of minibatches and sampled operations.
        trains_samplers: whether samplers are trained, too (paper, section 4: frozen in the transfer to new tasks).
        trains_base_stack: whether the base stack is trained, too.
    """
    frozen = [
        p
        for n, p in supernet.named_parameters()
        if (not trains_base_stack and n.startswith("base.")) or (not trains_samplers and ".samplers." in n)
    ]
    required_grad = [p.requires_grad for p in frozen]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        with nullcontext() if trains_base_stack else normalise_by_batch_without_tracking(supernet.base):
            fit(supernet, client, options, lr=lr, seed=seed, lr_factor=options.sampler_lr_factor)
    finally:
        for parameter, requires_grad in zip(frozen, required_grad, strict=True):
            parameter.requires_grad_(requires_grad)
