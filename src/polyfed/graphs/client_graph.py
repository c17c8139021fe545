"""Extracts the graph of the layers of a client's network, and keeps it for later calls, also on disk if it took long."""

from dataclasses import replace

import torch
from torch import Tensor

from polyfed.core.algorithm import Architecture, Client
from polyfed.core.errors import UserError
from polyfed.core.examples.pytree import InputSpec, input_spec_of
from polyfed.core.nn.module_cache import FactoryCache, cached_module
from polyfed.core.seeds import torch_generator
from polyfed.graphs.architecture import ArchitectureGraph
from polyfed.graphs.catalogue import LayerCatalogue
from polyfed.graphs.contraction import NO_CONTRACTION, ContractionOptions
from polyfed.graphs.graph_cache import extract_with_disk_cache

_ROWS = 2  # BatchNorm and torch.export may treat a batch of one example as a special case


def graph_of_client(
    client: Client, catalogue: LayerCatalogue | None = None, contraction: ContractionOptions = NO_CONTRACTION
) -> ArchitectureGraph:
    """Returns a client's graph, contracted, with layers outside `catalogue` kept at the client.

    Raises:
        UserError: the network cannot be traced; the message has the client's id.
    """
    assert client.model is not None
    x = client.train.batch(torch.zeros(_ROWS, dtype=torch.int64, device=client.train.device))[0]
    try:
        return _extract_cached(client.model, input_spec_of(x), catalogue, contraction)
    except UserError as error:
        raise UserError(f"client {client.id!r}: {error}") from error


def _extract_contracted(
    factory: Architecture, form: InputSpec, catalogue: LayerCatalogue | None, contraction: ContractionOptions
) -> ArchitectureGraph:
    uncontracted = replace(NO_CONTRACTION, kinds=contraction.kinds)
    if catalogue is not None or contraction != uncontracted:
        graph = contraction.apply(_extract_cached(factory, form, None, uncontracted))
        return graph if catalogue is None else graph.restrict_to_types(catalogue.types)
    # Random values reveal a traced program that computes something else than the network; tokens are 0 or 1.
    generator = torch_generator(0)

    def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype.is_floating_point:
            return torch.randn((_ROWS, *shape), generator=generator).to(dtype)
        return torch.randint(0, 2, (_ROWS, *shape), generator=generator).to(dtype)

    return extract_with_disk_cache(cached_module(factory).module, form.build_inputs(random_tensor), contraction.kinds)


_extract_cached = FactoryCache(_extract_contracted, maxsize=128)
