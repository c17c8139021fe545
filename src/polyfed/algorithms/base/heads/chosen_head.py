"""Provides the base class of methods whose clients keep the last layers of the network, or modules that the user names,
such as FedPer and FedRep.
"""

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyfed.algorithms.base.averaging import ServerState
from polyfed.algorithms.base.heads.body_and_head import (
    BodyAndHeadMethod,
    build_empty_body_warning,
    emit_runtime_warning,
)
from polyfed.core.algorithm import ServerContext
from polyfed.core.nn.module_cache import cached_module
from polyfed.models.structure import find_head_modules, split_body_and_head


@dataclass(frozen=True, kw_only=True)
class ChosenHeadMethod(BodyAndHeadMethod, ABC):
    """Averages the body of a network over all clients, while each client keeps the head, which the user chooses by a
    number of layers or by the names of its modules.

    Args:
        head_layers: how many of the last parametric layers are the head (1, polyfed's choice). 0 leaves nothing local.
        head: names of the head's modules, instead of a search (polyfed's choice). Then the server knows the body before
            round 1, and sends no more than that.
    """

    name_with_empty_head: ClassVar[str] = "FedAvg"
    """Names the method that this one is if the head is empty, for the warning."""
    head_layers: int = 1
    head: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "head_layers")
        if self.head is not None:
            listed = isinstance(self.head, tuple | list) and all(isinstance(name, str) for name in self.head)
            self._require(listed, "head", "a list of module names, or none")
            object.__setattr__(self, "head", tuple(self.head))  # a list, where it comes from a file

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the initial body φ, or the whole network if only clients know which part is the head."""
        state = super().server_init(server)
        if self.head is None and self.head_layers > 0:
            return state
        assert server.model is not None
        module = cached_module(server.model).module
        body, head = split_body_and_head(module, self._find_head_modules(module, torch.empty(0)))
        model = {name: state["draw"][name] for name in body if name in state["draw"]}
        if not head:
            emit_runtime_warning(
                f"{type(self).__name__}: the head is empty, so nothing stays local: this is {self.name_with_empty_head}"
            )
        elif not model:
            emit_runtime_warning(build_empty_body_warning(self))
        return {"model": model}

    def _find_head_modules(self, module: nn.Module, example: Tensor) -> tuple[str, ...]:
        return find_head_modules(module, example, num_layers=self.head_layers, names=self.head)
