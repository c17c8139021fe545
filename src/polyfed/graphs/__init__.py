"""From any `nn.Module` to the graph of its layers (FLHA-GHN, section 4.2), and the public catalogue of layer types."""

from polyfed.graphs.architecture import ArchitectureGraph, GeneratedWeights, LayerType, Node
from polyfed.graphs.catalogue import LayerCatalogue
from polyfed.graphs.extract import extract

__all__ = ["ArchitectureGraph", "GeneratedWeights", "LayerCatalogue", "LayerType", "Node", "extract"]
