"""Search spaces, samplers and supernets of FedPNAS, and the networks that were found.

`operations`: what an edge may do. `sampling`: choosing one operation an edge. `cells`, `network`: the supernet. `found`: the
architecture of a client as a network of its own.
"""

from polyfed.search.cells import Cell, CellPlan
from polyfed.search.found import describe, fixed, load, most_probable_network, probabilities, rebuild
from polyfed.search.network import Network, Plan, Sampled, edge_parameters, stacks
from polyfed.search.operations import NAMES, SMALL, operation, operations
from polyfed.search.sampling import Choice, ContextAware, ContextFree, draw, gumbel, most_probable

__all__ = [
    "NAMES",
    "SMALL",
    "Cell",
    "CellPlan",
    "Choice",
    "ContextAware",
    "ContextFree",
    "Network",
    "Plan",
    "Sampled",
    "describe",
    "draw",
    "edge_parameters",
    "fixed",
    "gumbel",
    "load",
    "most_probable",
    "most_probable_network",
    "operation",
    "operations",
    "probabilities",
    "rebuild",
    "stacks",
]
