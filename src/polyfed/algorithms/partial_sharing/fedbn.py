"""FedBN: averages models as FedAvg does, but normalisation layers stay with the client (Li et al., ICLR 2021, algorithm
1).
"""

import warnings
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor, nn

from polyfed.algorithms.base.averaging import ServerState
from polyfed.algorithms.base.local_parts import LocalPartMethod
from polyfed.core.algorithm import ServerContext
from polyfed.core.errors import UserError
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.buffers import BufferPolicy
from polyfed.core.nn.module_cache import cached_module
from polyfed.models.structure import norm_layer_tensor_names, split_body_and_head


@final
@dataclass(frozen=True, kw_only=True)
class FedBN(LocalPartMethod):
    """Averages the clients' models except for their normalisation layers, whose parameters and statistics stay with
    each client.

    Norm layers are found by type (batch, instance, layer, group and RMS norms), wherever they are. One architecture.
    Evaluated model: the average with the client's own norm layers; a client that never took part has the initial norm
    parameters, and statistics estimated on its training data.

    A network without norm layers gets a warning: then this is FedAvg with `buffers="local"`.

    Args:
        weighted: weighs clients by their number of training examples (polyfed's choice, as in FedAvg; the paper's
            algorithm 1 has the plain mean).
        norms: names of the modules that are norm layers, instead of a search by type (polyfed's choice); those of a
            user's own class, say.
        buffers: "local" only (paper), since statistics of norm layers stay with the client.

    The other fields are those of `LocalTraining`.

    >>> FedBN(lr=0.05).buffers
    'local'
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="fedbn",
        summary="FedAvg; norm layers stay with the client",
        paper="Li et al. 2021",
        evaluated="the average with the client's norm layers",
        leaderboard={"cifar10": {}},
        stacked=True,
    )

    local_group: ClassVar[str] = "norms"
    weighted: bool = True
    norms: tuple[str, ...] | None = None
    buffers: BufferPolicy = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffers != "local":
            raise UserError(f"FedBN: buffers must be 'local', since norm layers stay local, got {self.buffers!r}; "
                            "to average them, take fedavg")  # fmt: skip
        if self.norms is not None:
            listed = isinstance(self.norms, tuple | list) and all(isinstance(name, str) for name in self.norms)
            self._require(listed, "norms", "a list of module names, or none")
            object.__setattr__(self, "norms", tuple(self.norms))  # a list, where it comes from a file

    def server_init(self, server: ServerContext) -> ServerState:
        """Returns the server state before round 1: the initial global model θ, without its normalisation layers."""
        assert server.model is not None  # `requires` names "one_architecture"
        if not self._find_local_tensors(cached_module(server.model).module, None):
            warnings.warn("FedBN: the network has no norm layer, so only buffers stay local: this is FedAvg with "
                          "buffers='local'", RuntimeWarning, stacklevel=2)  # fmt: skip
        return super().server_init(server)

    def _find_local_tensors(self, module: nn.Module, example: Tensor | None) -> tuple[str, ...]:
        return norm_layer_tensor_names(module) if self.norms is None else split_body_and_head(module, self.norms)[1]
