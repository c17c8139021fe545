"""What the four methods of FedPNAS's paper share: a supernet of a base and a personal stack that is trained by everyone, and
the architecture that each client takes from it (Hoang and
Kingsford, "Personalized Neural Architecture Search for Federated Learning").
"""

import math
from abc import ABC
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyfed.algorithm import Algorithm, Architecture, Client, ClientInfo, Form, Message, ServerContext
from polyfed.buffers import Policy, filled, give_back, recompute, travelling
from polyfed.scratch import Scratch, initial_state, scratch
from polyfed.search.cells import Join
from polyfed.search.found import describe, most_probable_network, probabilities, rebuild
from polyfed.search.network import Context, Network, Per, Plan, Sampled, stacks
from polyfed.search.operations import NAMES, SMALL, check_names
from polyfed.search.sampling import gumbel
from polyfed.seeds import derive, local_rng
from polyfed.training import LocalTraining, Optimizer, fit
from polyfed.tree import Spec, Tree, spec, weighted_mean

State = dict[str, Tree]
Mine = dict[str, Tree]
Evaluation = Literal["argmax", "sampled"]
Annealing = Literal["exponential", "linear", "constant"]
GROUPS = ("base", "personal")
"""Of a message: θ_b and θ_p. The names of their tensors begin with these words."""


@dataclass(frozen=True, kw_only=True)
class Searching(LocalTraining, Algorithm[State, Mine], ABC):
    """Hyper-parameters and both halves, but for the local update.

    Args:
        channels: C of all feature maps (paper: 16 for MNIST, 32 for CIFAR-10).
        base_cells, personal_cells: cells of the two stacks (3 and 1, authors' code).
        base_nodes, personal_nodes: nodes of a cell (2, ours; the paper's 32 edges follow from no number that it tells, the
            authors' code has 4, and 12 edges a cell).
        operations: from which an edge of a base cell chooses (all nine, paper).
        personal_operations: from which one of a personal cell does (those without a kernel of 5 or 7, paper).
        join: "sum" of a node's edges (paper) or their "mean" (authors' code).
        stem_stride: 2 halves the images before the first cell, 1 does not (1, authors' code).
        temperature: τ of eq. 2 in round 1 (1.0, ours; 0.1 throughout in the authors' code).
        temperature_end: in the last round (0.1, authors' code).
        annealing: how τ falls over the rounds in between ("exponential", ours): also "linear", or "constant" for
            `temperature` throughout.
        finetune_epochs: epochs on the client's training data in which its personal stack and sampler are adapted before
            evaluation and export; 0 none (1, ours, for FedPNAS, and 0 for FedDSNAS, which has no such phase, paper).
        finetune_lr: its learning rate; None takes the round's (ours).
        evaluation: "argmax" evaluates the most probable architecture, "sampled" the mean of `samples` networks (ours; 5
            samples in the authors' code).
        samples: networks of "sampled" (5, authors' code).
        weighted: by the number of training examples; False counts every client the same (paper, algorithm 1, line 6).
        batch_size: 48 (authors' code).
        optimizer: "adam" (authors' code).
        lr: 0.01 (ours; 0.002 in the authors' code, over 10,000 steps).
        sampler_lr: learning rate of the samplers where that of the weights is `lr` (ours; None takes `lr`).
        buffers: "recompute" (ours): which operations a client's minibatches visit is random, so that running means of
            BatchNorm are of weights long gone or were never touched; estimated on the client's training data, they
            are those of the network that is evaluated.

    Raises:
        UserError: a value outside its range.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"images", "one_form"})
    context: ClassVar[Context] = "free"
    """Whether samplers are context-free or context-aware."""

    channels: int = 16
    base_cells: int = 3
    personal_cells: int = 1
    base_nodes: int = 2
    personal_nodes: int = 2
    operations: tuple[str, ...] = NAMES
    personal_operations: tuple[str, ...] = SMALL
    join: Join = "sum"
    stem_stride: int = 1
    temperature: float = 1.0
    temperature_end: float = 0.1
    annealing: Annealing = "exponential"
    finetune_epochs: int = 1
    finetune_lr: float | None = None
    evaluation: Evaluation = "argmax"
    samples: int = 5
    weighted: bool = False
    batch_size: int = 48
    optimizer: Optimizer = "adam"
    lr: float = 0.01
    sampler_lr: float | None = None
    buffers: Policy = "recompute"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("operations", "personal_operations"):  # a list in a configuration; a plan must be hashable
            names = getattr(self, field)
            self._require(isinstance(names, list | tuple), field, "a list of names of operations")
            check_names(names)
            object.__setattr__(self, field, tuple(names))
        self._require(self.channels >= 1, "channels", "at least 1")
        self._require(self.stem_stride in (1, 2), "stem_stride", "1 or 2")
        self._require(0 < self.temperature < math.inf, "temperature", "positive")
        self._require(0 < self.temperature_end < math.inf, "temperature_end", "positive")
        self._require(self.finetune_epochs >= 0, "finetune_epochs", "at least 0")
        self._require(self.finetune_lr is None or 0 < self.finetune_lr < math.inf, "finetune_lr", "positive, or none")
        self._require(self.samples >= 1, "samples", "at least 1")
        self._require(self.sampler_lr is None or 0 < self.sampler_lr < math.inf, "sampler_lr", "positive, or none")
        self.plan(1, 1)  # sizes

    def plan(self, in_channels: int, outputs: int) -> Plan:
        """The supernet's form for images of so many channels and so many logits."""
        base, personal = stacks(
            self.base_cells, self.personal_cells, self.base_nodes, self.personal_nodes, self.operations,
            self.personal_operations,
        )  # fmt: skip
        return Plan(
            in_channels, outputs, self.channels, base, personal, self.join, self.context, self._per(),
            stem_stride=self.stem_stride,
        )  # fmt: skip

    def _per(self) -> Per:
        return "example"

    def temperature_at(self, round_number: int, rounds: int) -> float:
        """τ of a round, counted from 1.

        >>> from polyfed.algorithms import FedDSNAS
        >>> for annealing in ("exponential", "linear", "constant"):
        ...     print([round(FedDSNAS(annealing=annealing).temperature_at(t, 3), 3) for t in (1, 2, 3)])
        [1.0, 0.316, 0.1]
        [1.0, 0.55, 0.1]
        [1.0, 1.0, 1.0]
        """
        past = (min(round_number, rounds) - 1) / max(rounds - 1, 1)
        if self.annealing == "linear":
            return self.temperature + past * (self.temperature_end - self.temperature)
        return self.temperature * (
            (self.temperature_end / self.temperature) ** past if self.annealing != "constant" else 1
        )

    def rate(self, name: str) -> float:
        """By what factor a parameter's learning rate differs from that of the weights (see `fit`)."""
        return 1.0 if self.sampler_lr is None or ".samplers." not in name else self.sampler_lr / self.lr

    @property
    def evaluated(self) -> str:
        """Which architecture is scored, and whether its personal stack has been adapted before."""
        which = f"the mean of {self.samples} sampled networks"
        if self.evaluation == "argmax":
            each = " of each image" if self.context == "aware" else ""
            which = f"the most probable operations{each}"
        epochs = f"{self.finetune_epochs} epoch{'s' if self.finetune_epochs > 1 else ''} of"
        return f"{which}, after {epochs if self.finetune_epochs else 'no'} adaptation of the personal stack"

    # -- server ---------------------------------------------------------------------------------------------------

    def init(self, server: ServerContext) -> State:
        """The initial θ = {θ_b, θ_p}, each of weights W and of what the samplers learn, Π."""
        assert server.form is not None  # `requires` names "one_form"
        plan = self.plan(server.form.inputs[0], server.form.outputs)
        return _groups(travelling(initial_state(plan, server.seed), scratch(plan).buffers, self.buffers))

    def dispatch(self, state: State, who: ClientInfo) -> Message:
        """θ_b, θ_p, and learning rate and temperature of the round, the same for everyone."""
        now = {"lr": self.lr_at(who.round, who.rounds), "temperature": self.temperature_at(who.round, who.rounds)}
        return Message({group: state[group] for group in GROUPS}, now)

    def aggregate(self, state: State, replies: Mapping[str, Message]) -> State:
        """θ ← (1/M) Σ_k θ^k (algorithm 1, line 6)."""
        weights = {i: reply.scalars["num_examples"] for i, reply in replies.items()} if self.weighted else None
        return {
            group: weighted_mean({i: reply.arrays[group] for i, reply in replies.items()}, weights) for group in GROUPS
        }

    def reply_spec(self, state: State, down: Message) -> Mapping[str, Spec]:
        """A reply holds both stacks in the form in which they went down."""
        return {group: spec(down.arrays[group]) for group in GROUPS}

    def reply_flaw(self, state: State, reply: Message) -> str | None:
        """A mean by examples needs their number."""
        return "num_examples is missing" if self.weighted and "num_examples" not in reply.scalars else None

    # -- client ---------------------------------------------------------------------------------------------------

    def client_init(self, client: Client, seed: int) -> Mine:
        """Nothing private before the first round."""
        return {}

    def receive(self, down: Message, mine: Mine, client: Client) -> Scratch:
        """The scratch supernet with what came down; its form is that of the message's tensors."""
        base, personal = (down.arrays[group] for group in GROUPS)
        plan = self.plan(base["base.stem.weight"].shape[1], len(personal["personal.classifier.bias"]))
        own = filled(scratch(plan, client.train.x.device), {**base, **personal}, mine, self.buffers)
        network(own).temperature = down.scalars["temperature"]
        return own

    def reply(self, own: Scratch, client: Client, loss: float) -> tuple[Message, Mine]:
        """Both stacks after training, and the private state of the policy for buffers."""
        model, mine = give_back(own, self.buffers)
        return Message(_groups(model), {"num_examples": len(client.train), "train_loss": loss}), mine

    def personal(self, down: Message, mine: Mine, client: Client, seed: int) -> nn.Module:
        """The architecture that the client takes from the supernet after adapting its personal stack: the most probable
        one as a plain network, or the mean of sampled ones. With context-aware samplers it is the supernet itself, which
        chooses for each example."""
        own = self.receive(down, mine, client)
        if self.finetune_epochs:
            tuning = replace(self, local_epochs=self.finetune_epochs, local_steps=None)
            lr = down.scalars["lr"] if self.finetune_lr is None else self.finetune_lr
            adapt(network(own), client, tuning, lr=lr, seed=seed)
        return self.taken(own, mine, client, seed)

    def beside(self, down: Message, mine: Mine, client: Client, seed: int) -> Iterator[tuple[str, nn.Module]]:
        """What came down, not adapted."""
        if self.finetune_epochs:
            yield "server", self.taken(self.receive(down, mine, client), mine, client, seed)

    def taken(self, own: Scratch, mine: Mine, client: Client, seed: int) -> nn.Module:
        """The network that a client takes from its supernet. BatchNorm's statistics are of its training data, unless the
        policy for buffers has others for it."""
        supernet = network(own).eval()
        taken: nn.Module = supernet
        if self.evaluation == "sampled":
            with local_rng(derive(seed, "sampled networks")):
                noise = {
                    k: gumbel(torch.empty(self.samples, sampler.edges, sampler.operations))
                    for k, (_, sampler) in enumerate(supernet.cells())
                    if sampler is not None
                }
            taken = Sampled(supernet, noise, client.task == "classification").to(client.train.x.device)
        elif self.context == "free":
            taken = most_probable_network(supernet)
        if self.buffers == "recompute" or (self.buffers == "local" and not mine.get("buffers")):
            recompute(taken, client.train)
        return taken.eval()

    def brings(self, form: Form) -> Architecture:
        """The supernet."""
        return self.plan(form.inputs[0], form.outputs)

    def build(self, description: Mapping[str, Any]) -> nn.Module:
        """The network of a description, its weights not yet those that were found."""
        return rebuild(description)

    def description(self, network: nn.Module, client: Client) -> Mapping[str, Any]:
        """The form of the network, its cells, and with what probability each operation was to be chosen."""
        supernet = network.network if isinstance(network, Sampled) else network
        assert isinstance(supernet, Network)
        return describe(network, supernet.known or probabilities(supernet, client.train))


def network(own: Scratch) -> Network:
    """The supernet of a scratch module."""
    assert isinstance(own.module, Network)
    return own.module


def _groups(tree: Tree) -> State:
    return {group: {n: t for n, t in tree.items() if n.startswith(f"{group}.")} for group in GROUPS}


@contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """Inside the block BatchNorm goes by its batch, as in training, but does not count it."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


def adapt(
    network: Network,
    client: Client,
    options: Searching,
    *,
    lr: float,
    seed: int,
    samplers: bool = True,
    base: bool = False,
) -> None:
    """The fine-tuning phase: trains the personal stack in place on the client's data, the base stack as it is.

    Args:
        network: on the device of the client's data.
        options: epochs or steps, and the rest of local training.
        lr: learning rate.
        seed: of batches and samples.
        samplers: whether samplers learn too (paper, section 4: frozen in the transfer to new tasks).
        base: whether the base stack learns too.
    """
    kept = [
        p
        for n, p in network.named_parameters()
        if (not base and n.startswith("base.")) or (not samplers and ".samplers." in n)
    ]
    before = [p.requires_grad for p in kept]
    for parameter in kept:
        parameter.requires_grad_(False)
    try:
        with nullcontext() if base else statistics_kept(network.base):
            fit(network, client.train, options, lr=lr, seed=seed, task=client.task, rate=options.rate)
    finally:
        for parameter, wanted in zip(kept, before, strict=True):
            parameter.requires_grad_(wanted)
