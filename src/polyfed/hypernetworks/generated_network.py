"""A network whose weights a graph hypernetwork generates at each forward pass: training it trains the hypernetwork."""

from typing import Any, final

import torch
from torch import Tensor, nn

from polyfed.core.algorithm import Architecture
from polyfed.core.nn.functional_call import call_with_tensors
from polyfed.core.nn.module_cache import CachedModule, FactoryCache, cached_module
from polyfed.core.state_dict import StateDict
from polyfed.graphs.architecture import ArchitectureGraph
from polyfed.hypernetworks.ghn import GHN, GHNConfig, GraphTensors, cached_ghn, graph_to_tensors


@final
class GeneratedNetwork(nn.Module):
    """f_c(·; θ_c(𝒜_c; W_G, W_H)) of FLHA-GHN's eq. 5, with what is not generated trained next to the hypernetwork.

    Parameters that are trained: the hypernetwork's, and those of `model` that require a gradient; its user takes that from
    the generated ones. BatchNorm's statistics are the buffers of `model`, as ever. Inputs and outputs are those of `model`.
    """

    client_network = "model"  # whose names `lr_by_name` means

    def __init__(self, ghn: GHN, model: nn.Module, graph: GraphTensors) -> None:
        super().__init__()
        self.ghn, self.model, self.graph = ghn, model, graph

    def generate_weights(self) -> dict[str, Tensor]:
        """θ_c: name -> generated parameter, in the shape, type and memory layout of the one whose place it takes: its layout
        decides in which one convolutions work."""
        parameters = dict(self.model.named_parameters())
        with torch.autocast(self.graph.features.device.type, enabled=False):  # weights stay float32, also in bf16
            return {
                name: _match_layout(tensor, parameters[name]) for name, tensor in self.ghn.iterate_weights(self.graph)
            }

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Outputs of the client's network with θ_c in the place of its own weights."""
        return call_with_tensors(self.model, self.generate_weights(), inputs, named)


def _match_layout(generated: Tensor, parameter: Tensor) -> Tensor:
    last = parameter.dim() == 4 and not parameter.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    return generated.to(parameter.dtype).contiguous(memory_format=layout)


def build_generated_network(
    factory: Architecture,
    graph: ArchitectureGraph,
    config: GHNConfig,
    ghn_weights: StateDict,
    device: torch.device | None = None,
) -> tuple[GeneratedNetwork, CachedModule]:
    """The network of an architecture under a hypernetwork with the weights `ghn_weights`, and the scratch module that is its
    `model`: as with `scratch`, whoever takes them fills the latter and does not keep them.

    Raises:
        ValueError: the weights are not those of a hypernetwork of this form.
    """
    device = device or torch.device("cpu")
    network, cached_model = _cached(factory, _GraphKey(graph), config, device)
    cached_model.reset()
    try:
        network.ghn.load_state_dict(dict(ghn_weights))
    except RuntimeError as error:
        raise ValueError(
            "the hypernetwork that came down is not of the form of this client's settings (gnn, passing, depth, latent, "
            f"hidden, head, rank): {str(error).splitlines()[-1].strip()}"
        ) from error
    return network, cached_model


@final
class _GraphKey:
    """A graph as part of a cache's key: by identity, since comparing graphs would take longer than it saves."""

    def __init__(self, graph: ArchitectureGraph) -> None:
        self.graph = graph

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _GraphKey) and other.graph is self.graph

    def __hash__(self) -> int:
        return id(self.graph)


def _build(
    factory: Architecture, graph: _GraphKey, config: GHNConfig, device: torch.device
) -> tuple[GeneratedNetwork, CachedModule]:
    tensors, cached_model = (
        graph_to_tensors(graph.graph, config.catalogue, device, config.passing),
        cached_module(factory, device),
    )
    return GeneratedNetwork(cached_ghn(config, device), cached_model.module, tensors), cached_model


_cached = FactoryCache(_build, maxsize=64)
