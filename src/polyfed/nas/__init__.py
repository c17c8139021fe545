"""Defines FedPNAS's search spaces, samplers and supernets (networks that contain all candidate operations), and the
networks derived from supernets.

`operations`: the operations that an edge can choose. `sampling`: the choice of one operation per edge. `cells`,
`supernet`: the supernet. `derived`: the architecture of a client as a network of its own.
"""

from polyfed.nas.cells import Cell, CellPlan
from polyfed.nas.derived import (
    build_network_with_operations,
    describe_network,
    load_network,
    most_probable_network,
    operation_probabilities,
    rebuild_network,
)
from polyfed.nas.operations import OPERATION_NAMES, SMALL_OPERATION_NAMES, build_operation, build_operations
from polyfed.nas.sampling import (
    ContextAwareSampler,
    ContextFreeSampler,
    OperationChoice,
    gumbel_noise_like,
    most_probable_operations,
    sample_operations,
)
from polyfed.nas.supernet import (
    Network,
    SampledNetwork,
    SupernetPlan,
    count_edge_operation_parameters,
    plan_cell_stacks,
)

__all__ = [
    "OPERATION_NAMES",
    "SMALL_OPERATION_NAMES",
    "Cell",
    "CellPlan",
    "ContextAwareSampler",
    "ContextFreeSampler",
    "Network",
    "OperationChoice",
    "SampledNetwork",
    "SupernetPlan",
    "build_network_with_operations",
    "build_operation",
    "build_operations",
    "count_edge_operation_parameters",
    "describe_network",
    "gumbel_noise_like",
    "load_network",
    "most_probable_network",
    "most_probable_operations",
    "operation_probabilities",
    "plan_cell_stacks",
    "rebuild_network",
    "sample_operations",
]
