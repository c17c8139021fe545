"""Extracts the graph of layers from any `nn.Module` (FLHA-GHN, section 4.2), and defines the public catalogue of layer
types.
"""

from polyfed.graphs.architecture import ArchitectureGraph, GeneratedWeights, LayerType, Node
from polyfed.graphs.catalogue import LayerCatalogue
from polyfed.graphs.extract import extract

__all__ = ["ArchitectureGraph", "GeneratedWeights", "LayerCatalogue", "LayerType", "Node", "extract"]
