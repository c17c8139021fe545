"""Draws the initial weights of a graph hypernetwork, so that the weights that it generates start at a suitable size
(FLHA-GHN, section 4.2).

Dimensions are those of `polyfed.hypernetworks.ghn`.
"""

import math
from statistics import fmean
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.core.seeds import derive_seed, temporary_rng_seed, torch_generator
from polyfed.graphs.architecture import NODE_MARKS, PAPER_KINDS, LayerType
from polyfed.hypernetworks.ghn import GHN, GHNConfig, build_ghn
from polyfed.hypernetworks.ghn_heads import Factored, TypeHead
from polyfed.hypernetworks.ghn_layers import Level, forward_backward_levels

Init = Literal["kaiming", "network", "paper", "last_layer"]
_CHAINS = 16  # number of random graphs on which the heads' activations are measured at initialisation


def init_ghn_params(config: GHNConfig, init: Init, seed: int) -> dict[str, Tensor]:
    """Returns `{name: tensor}` with random initial weights of a graph hypernetwork.

    With `normalise` the GNN and the hidden layers have Kaiming's variance, shared between A and B, and zero biases;
    otherwise they start as PyG and torch initialise them. At the start every scale s is 1, generated biases are 0, generated
    norm scales are 1, and `init` determines the variance of the generated weights W of convolutions and linear layers. All
    other kinds start with the mean and variance that they have in the clients' networks.

    - "kaiming": variance 2/fan_in (He et al. 2015), since the last layer's variance is 2/(fan_in·H·E[z²]). E[z²] is measured
      per type on random graphs of the catalogue's types, since the server does not know the clients' graphs;
    - "paper": variance 2/fan_out, He et al.'s other form, as section 4.2 says: all matrices of W_H are Xavier-normal with
      zero bias, the last one times √(2·c_in/H), so that H·E[z²]·2/(P+H)·2·c_in/H = 2/fan_out · P/(P+H) if E[z²] = ½, the
      value for a (leaky) ReLU of pre-activations of variance 1. To have that variance, Xavier's hidden layer needs
      ‖h_v^T‖² = (d+H)/2. The paper does not say how the GNN is initialised; so its last layer is multiplied by the missing
      factor, measured as for "kaiming". With `normalise`, E[z²] is 1 instead, and the last layer's variance is halved. A
      scale s with zero bias would be random with mean 0: its bias of 1 is polyfed's choice;
    - "network": the variance that the layer has in the clients' networks when they are built (`LayerType.start`);
    - "last_layer": the factor √(2·c_in/H) on the last layer alone, and hidden layers as for "kaiming"; without `normalise`,
      E[z²] is then far below ½ and W is small.

    >>> from polyfed.graphs import LayerCatalogue, LayerType
    >>> tensors = init_ghn_params(GHNConfig(LayerCatalogue((LayerType("linear", 20, 10),))), "kaiming", seed=0)
    >>> tuple(tensors["heads.linear-20-10-k-s-g1-b1-d-none.out.weight"].shape)
    (200, 16)
    """
    with temporary_rng_seed(derive_seed(seed, "graph hypernetwork")):
        ghn = build_ghn(config)
        if config.normalise:
            _reset_trunk(ghn)
        if config.head == "lowrank":
            ghn.decoder.reset()
            return {name: tensor.detach().clone() for name, tensor in ghn.state_dict().items()}
        if init == "paper":
            _reset_hidden(ghn, config, seed)
        own_start = {kind for kind in config.catalogue.types if init == "network" or kind.kind not in PAPER_KINDS}
        energies = _hidden_energies(ghn, config, seed) if init == "kaiming" or own_start else {}
        with torch.no_grad():
            for kind in config.catalogue.types:
                head = ghn.heads[kind.key]
                assert isinstance(head, TypeHead)
                if kind in own_start and not kind.is_norm:
                    variance = kind.start_or_default[1] ** 2 / energies[kind]
                elif init in ("kaiming", "network"):
                    variance = 2 / (kind.fan_in * energies[kind])
                else:  # variance of Xavier-normal · √(2·c_in/H) for the (P, H) matrix, which assumes E[z²] = ½
                    variance = (
                        2 / (config.hidden + math.prod(kind.parameter_shapes["weight"])) * 2 * kind.c_in / config.hidden
                    )
                    variance = variance / 2 if init == "paper" and config.normalise else variance
                _reset_head(head, kind, variance)
    return {name: tensor.detach().clone() for name, tensor in ghn.state_dict().items()}


def _reset_trunk(ghn: GHN) -> None:
    """Initialises the GNN and the heads' hidden layers so that activations keep their variance from layer to layer.

    A h and B Σ h each have half of it if a node has one predecessor. The matrices of a GRU keep torch's
    initialisation.
    """
    for name, parameter in ghn.named_parameters():
        if name.endswith("bias") or name.startswith("cell.bias"):
            nn.init.zeros_(parameter)
        elif name == "embed.weight":
            nn.init.normal_(parameter)  # so that each node's h has the variance 1
        elif ".lin_" in name:
            nn.init.kaiming_normal_(parameter)
            parameter.data.mul_(2**-0.5)
        elif name.endswith("hidden.weight"):
            nn.init.kaiming_normal_(parameter)


def _reset_head(head: TypeHead, kind: LayerType, variance: float) -> None:
    """Initialises a head's last layers; entries of the matrix that z is multiplied by get this variance."""
    nn.init.zeros_(head.scale.weight)
    nn.init.ones_(head.scale.bias)
    mean = 0.0 if kind.kind in PAPER_KINDS else kind.start_or_default[0]
    nn.init.constant_(
        head.out.bias, mean / math.sqrt(head.hidden.out_features) if isinstance(head.out, Factored) else mean
    )
    for role, name in head.linear_layer_name_by_role_except_weight.items():
        layer = head.get_submodule(name)
        nn.init.zeros_(layer.weight)  # type: ignore[arg-type]
        nn.init.constant_(layer.bias, 1.0 if role == "scale" else 0.0)  # type: ignore[arg-type]
    if isinstance(head.out, Factored):
        # The product of the three has the variance of a dense layer. Rows and columns are small and the core large, so that
        # a step of the core, which all entries of W share, moves W about as much as a step of the bias.
        rank, hidden = head.out.rows.shape[1], head.out.core.shape[2]
        nn.init.normal_(head.out.rows, std=(rank * hidden) ** -0.25)
        nn.init.normal_(head.out.columns, std=(rank * hidden) ** -0.25)
        nn.init.normal_(head.out.core, std=math.sqrt(hidden * variance))
    elif kind.is_norm:
        nn.init.zeros_(head.out.weight)
        nn.init.ones_(head.out.bias)
    else:
        nn.init.normal_(head.out.weight, std=math.sqrt(variance))


@torch.no_grad()
def _reset_hidden(ghn: GHN, config: GHNConfig, seed: int) -> None:
    """Initialises the heads' hidden layers (Xavier-normal, zero bias: section 4.2), and scales the GNN's last layer.

    The scale gives z mean square ½ before it is normalised. Hidden layers are scaled by the rest: by the deviation of
    single draws, and by all of the factor where the GNN's last layer does not scale h_v^T (a GRU, asynchronous
    passing, no GNN).
    """
    heads = {kind: head for kind in config.catalogue.types if isinstance(head := ghn.heads[kind.key], TypeHead)}
    for head in heads.values():
        nn.init.xavier_normal_(head.hidden.weight)
        nn.init.zeros_(head.hidden.bias)
    lacking = {
        kind: math.sqrt(config.hidden / 2 / energy)
        for kind, energy in _hidden_energies(ghn, config, seed, is_normalised=False).items()
    }
    growth = 1.0
    if config.depth and config.gnn != "gated" and config.passing == "synchronous":
        growth = fmean(value**-2 for value in lacking.values()) ** -0.5
        for parameter in ghn.gnn[-1].parameters():
            parameter.mul_(growth)
    for kind, head in heads.items():
        head.hidden.weight.mul_(lacking[kind] / growth)


@torch.no_grad()
def _hidden_energies(ghn: GHN, config: GHNConfig, seed: int, is_normalised: bool = True) -> dict[LayerType, float]:
    """Measures, for each layer type, the mean squared norm of the head's hidden activations on random graphs.

    This is H·E[z²], the mean of ‖z‖² over random circles of nodes, each with every node type once. Normalised z gives H
    up to rounding; `is_normalised=False` takes z before normalisation. Asynchronous passing needs a beginning and an end,
    so that chains take the place of circles.
    """
    features = len(config.catalogue.node_types)
    totals = dict.fromkeys(config.catalogue.types, 0.0)
    generator = torch_generator(derive_seed(seed, "graph hypernetwork", "chains"))
    for _ in range(_CHAINS):
        order = torch.randperm(features, generator=generator)
        edges = torch.stack([order, order.roll(-1)])
        levels: tuple[Level, ...] = ()
        if config.passing == "asynchronous":
            edges = edges[:, :-1]
            levels = forward_backward_levels([(int(a), int(b)) for a, b in edges.T], features, edges.device)
        h = ghn.encode_nodes(torch.eye(features), edges, levels)
        for column, kind in enumerate(config.catalogue.types, start=len(NODE_MARKS)):
            head = ghn.heads[kind.key]
            assert isinstance(head, TypeHead)
            row = h[column : column + 1]
            z = head.hidden_activations(row) if is_normalised else F.leaky_relu(head.hidden(row))
            totals[kind] += float(z.square().sum()) / _CHAINS
    # With few latent entries the GNN's ReLUs may set h = 0 for all nodes of a type on all these graphs: then any value
    # works.
    return {kind: total or float(config.hidden) for kind, total in totals.items()}
