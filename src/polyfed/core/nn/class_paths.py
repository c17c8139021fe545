"""Keeps the fingerprint of an architecture (a hash of its layers) unchanged when one of polyfed's layer classes moves
or is renamed.

An architecture's fingerprint contains the path and name of each layer's class, and initial weights derive from the
fingerprint. So a class keeps the path and name under which runs first used it, wherever it is defined today.
"""

import re

from torch import nn

_PATHS = {
    "polyfed.algorithms.fedala": "_Mixing",
    "polyfed.algorithms.fedtgp": "TrainablePrototypes",
    "polyfed.algorithms.knn_per": "Neighbours",
    "polyfed.algorithms.mutual": "Pair",
    "polyfed.core.stacked": "Stacked",
    "polyfed.graphs.export": "_Tensors",
    "polyfed.graphs.flow": "Root",
    "polyfed.hypernetworks.generated": "GeneratedNetwork",
    "polyfed.hypernetworks.ghn": "GHN",
    "polyfed.hypernetworks.ghn_layers": "GatedGraphConv GraphConv",
    "polyfed.hypernetworks.heads": "Factored TypeHead",
    "polyfed.models.flha": "ResidualBlock",
    "polyfed.models.parts": "SideBySide",
    "polyfed.models.text": "LSTMClassifier",
    "polyfed.models.unet": "ConvPair UNet",
    "polyfed.models.vit": "TransformerBlock VisionTransformer",
    "polyfed.search.cells": "Cell",
    "polyfed.search.depthwise": "Depthwise",
    "polyfed.search.network": "Network Sampled",
    "polyfed.search.operations": "GroupedNorm _Halve",
    "polyfed.search.sampling": "ContextAware ContextFree Sampler _Shrink",
    "polyfed.simulation.traffic": "Counts",
    "polyfed.testing": "SmallNet",
}
_FORMER_NAMES = {
    "ContextAwareSampler": "ContextAware",
    "ContextFreeSampler": "ContextFree",
    "DepthwiseConv2d": "Depthwise",
    "IdentityWithCounters": "Counts",
    "NearestNeighbourMixture": "Neighbours",
    "NetworkPair": "Pair",
    "NetworkWithAddedHead": "AddedHead",
    "NetworkWithConditionedRepresentation": "ConditionedRepresentation",
    "NetworkWithShiftedRepresentation": "ShiftedRepresentation",
    "OperationSampler": "Sampler",
    "SampledNetwork": "Sampled",
    "StackedNetworks": "Stacked",
}
_RENAMED_IN_PRINT = (
    "ContextAwareSampler", "ContextFreeSampler", "DepthwiseConv2d", "NetworkWithAddedHead",
    "NetworkWithConditionedRepresentation", "NetworkWithShiftedRepresentation", "SampledNetwork", "StackedNetworks",
)  # fmt: skip
"""Classes that stand in fingerprints as they were printed under their former names."""
_PATH_OF = {name: path for path, names in _PATHS.items() for name in names.split()}


def module_path_in_fingerprint(layer_class: type[nn.Module]) -> str:
    """Returns a layer class's module path in fingerprints, which stays when the class moves.

    A class of polyfed that is not in the table has the path "polyfed"; any other class has the path of its module.

    >>> module_path_in_fingerprint(nn.Linear)
    'torch.nn.modules.linear'
    """
    if layer_class.__module__.partition(".")[0] != "polyfed":
        return layer_class.__module__
    return _PATH_OF.get(class_name_in_fingerprint(layer_class), "polyfed")


def class_name_in_fingerprint(layer_class: type[nn.Module]) -> str:
    """Returns a layer class's name in fingerprints; for a renamed class its former name.

    >>> class_name_in_fingerprint(nn.Linear)
    'Linear'
    """
    name = layer_class.__qualname__
    return _FORMER_NAMES.get(name, name) if layer_class.__module__.startswith("polyfed.") else name


def print_for_fingerprint(module: nn.Module) -> str:
    """Prints a network as torch does, but each renamed layer class of polyfed under its former name.

    >>> print_for_fingerprint(nn.Sequential(nn.ReLU()))
    'Sequential(\\n  (0): ReLU()\\n)'
    """
    printed = str(module)
    for layer_class in {type(layer) for layer in module.modules()}:
        if layer_class.__module__.startswith("polyfed.") and layer_class.__name__ in _RENAMED_IN_PRINT:
            printed = re.sub(rf"\b{layer_class.__name__}\(", f"{class_name_in_fingerprint(layer_class)}(", printed)
    return printed
