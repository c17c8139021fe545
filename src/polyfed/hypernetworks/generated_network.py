"""Builds networks whose weights a graph hypernetwork (GHN) generates at each forward pass, so that training such a
network trains the hypernetwork.
"""

from typing import Any, final

import torch
from torch import Tensor, nn

from polyfed.core.algorithm import Architecture
from polyfed.core.errors import UserError
from polyfed.core.nn.functional_call import call_with_tensors
from polyfed.core.nn.module_cache import CachedModule, FactoryCache, cached_module
from polyfed.core.state_dict import StateDict
from polyfed.graphs.architecture import ArchitectureGraph
from polyfed.graphs.extract import autograd_functions
from polyfed.hypernetworks.ghn import GHN, GHNConfig, GraphTensors, cached_ghn, graph_to_tensors

_NO_CHECKPOINTS = (
    "activation checkpointing computes layers again after generated weights have left their places; switch it off, with "
    "model.gradient_checkpointing_disable(), model.set_grad_checkpointing(False) or without torch.utils.checkpoint"
)


@final
class GeneratedNetwork(nn.Module):
    """Runs a client's network with weights that a graph hypernetwork generates at each forward pass.

    It computes f_c(·; θ_c(𝒜_c; W_G, W_H)) of FLHA-GHN's eq. 5. Trained parameters are the hypernetwork's and those of
    `model` that require a gradient; the caller sets requires_grad to False for generated parameters. BatchNorm's
    statistics are buffers of `model`. Inputs and outputs are those of `model`.
    """

    client_network = "model"  # the submodule whose parameter names `lr_by_name` uses

    def __init__(self, ghn: GHN, model: nn.Module, graph: GraphTensors) -> None:
        super().__init__()
        self.ghn, self.model, self.graph = ghn, model, graph
        self._is_checked = False

    def generate_weights(self) -> dict[str, Tensor]:
        """Returns `{parameter: generated tensor}` in its shape, dtype and memory format.

        The memory format determines the one in which convolutions compute.
        """
        parameters = dict(self.model.named_parameters())
        with torch.autocast(self.graph.features.device.type, enabled=False):  # weights stay float32, also in bf16
            return {
                name: _match_layout(tensor, parameters[name])
                for name, tensor in self.ghn.iterate_generated_weights(self.graph)
            }

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Returns the output of the client's network, computed with generated weights.

        Raises:
            RuntimeError: the network uses activation checkpointing, or other hooks on saved tensors.
            UserError: the network uses reentrant activation checkpointing.
        """
        with torch.autograd.graph.disable_saved_tensors_hooks(_NO_CHECKPOINTS):
            output = call_with_tensors(self.model, self.generate_weights(), inputs, named)
        if not self._is_checked and torch.is_grad_enabled():
            self._is_checked = True
            if any(type(f).__name__ == "CheckpointFunctionBackward" for f in autograd_functions(output)):
                raise UserError(_NO_CHECKPOINTS)
        return output


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
    """Builds a client's network with weights from a hypernetwork, and returns it with the client's cached module.

    The module cache owns both: callers load the weights of `model` before use and do not keep either (see
    `cached_module`).

    Raises:
        ValueError: the weights do not fit a hypernetwork with this configuration.
    """
    device = device or torch.device("cpu")
    network, cached_model = _cached(factory, _GraphKey(graph), config, device)
    cached_model.restore_all_but_weights()
    try:
        network.ghn.load_state_dict(dict(ghn_weights))
    except RuntimeError as error:
        raise ValueError(
            "the hypernetwork that the server sent does not fit this client's settings (gnn, passing, depth, latent, "
            f"hidden, head, rank): {str(error).splitlines()[-1].strip()}"
        ) from error
    return network, cached_model


@final
class _GraphKey:
    """Wraps a graph in a cache key compared by identity, which is faster than by content."""

    def __init__(self, graph: ArchitectureGraph) -> None:
        self.graph = graph

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _GraphKey) and other.graph is self.graph

    def __hash__(self) -> int:
        return id(self.graph)


def _build_generated_network(
    factory: Architecture, graph: _GraphKey, config: GHNConfig, device: torch.device
) -> tuple[GeneratedNetwork, CachedModule]:
    catalogue = None if config.head == "lowrank" else config.catalogue
    tensors, cached_model = (
        graph_to_tensors(graph.graph, catalogue, device, config.passing),
        cached_module(factory, device),
    )
    return GeneratedNetwork(cached_ghn(config, device), cached_model.module, tensors), cached_model


_cached = FactoryCache(_build_generated_network, maxsize=64)
