"""kNN-Per: the global model, and the votes of a client's own examples that it sees alike (Marfoq, Neglia, Kameni and
Vidal, ICML 2022)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from polyfed.algorithms.averaging import ClientState, Final, OneModel
from polyfed.alignment.representations import check_representation, representation_name, representations
from polyfed.core.algorithm import Client, Message
from polyfed.core.evaluation import predict
from polyfed.core.examples import Examples
from polyfed.core.inputs import first, logits_of
from polyfed.core.network_needs import LooksInside
from polyfed.core.scratch import settled
from polyfed.core.tree import Tree
from polyfed.core.wrapping import WrapsNetwork

_GRID = 10  # λ is chosen among 0, 1/10, ..., 1


@final
@dataclass(frozen=True, kw_only=True)
class KNNPer(OneModel, WrapsNetwork, LooksInside):
    """h(x) = λ·h_kNN(x) + (1 − λ)·h_global(x): FedAvg's probabilities, mixed with those of the k training examples of the
    client whose representations by the global model are nearest, each with the weight exp(−distance). Training is FedAvg,
    bit for bit. One architecture, classification. Evaluated model: h, whose outputs are the logarithms of its
    probabilities; next to it the global model alone, as `server_...`.

    Args:
        k: number of neighbours (10, paper); all training examples if there are fewer.
        lam: λ from 0 to 1, the share of the neighbours. None chooses it for each client, by the least loss on its
            validation examples, among 0, 0.1, ..., 1 (paper), and is 0.5 for a client without them (polyfed's choice).
            Scores on validation examples are then out of fold: λ is chosen on the other half.
        module: name of the module whose input is the representation; None finds the last linear layer (paper).
        weighted: by the number of training examples (paper); False counts every client the same.
        final: which mean is the result: "cohort", that of the last round's clients (paper), or "all", that of all
            clients' latest models, for which the server keeps each of them (see `OneModel`).

    The other fields are those of `LocalTraining`. The weights of a personal model hold the representations and labels
    of the client's training examples; they are not sent.

    >>> KNNPer(k=5, lam=0.3).weighted
    True
    """

    requires: ClassVar[frozenset[str]] = frozenset({"one_architecture", "classification"})
    k: int = 10
    lam: float | None = None
    module: str | None = None
    weighted: bool = True
    final: Final = "cohort"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "k")
        self._require(self.lam is None or 0 <= self.lam <= 1, "lam", "from 0 to 1, or none")
        object.__setattr__(self, "traits", self.traits | ({"fits_validation"} if self.lam is None else set()))

    def look_inside(self, client: Client) -> None:
        """For the module whose input is φ(x)."""
        check_representation(client, self.module)

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """h, with λ of the client."""
        network, data = settled(super().personal_model(message, client_state, client, seed)), client.train
        name = representation_name(network, data) if self.module is None else self.module
        features = representations(network, data, module=name).to(data.device)
        found = Neighbours(network, features, data.labels, self.k, name)
        found.lam.fill_(0.5 if self.lam is None else self.lam)
        if self.lam is None and (val := client.val) is not None:
            found.lam.fill_(min((i / _GRID for i in range(_GRID + 1)), key=lambda lam: _loss(found, lam, val)))
        return found.eval()

    def wrap_network(self, network: nn.Module, weights: Tree) -> nn.Module:
        """The same around a client's network, to be filled."""
        name = self.module if self.module is not None else _read(weights["name"])
        return Neighbours(network, weights["features"], weights["labels"], self.k, name)

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """The global model alone, and the last cohort's mean where that is another."""
        yield "server", super().personal_model(message, client_state, client, seed)
        yield from super().other_models(message, client_state, client, seed)


@final
class Neighbours(nn.Module):
    """A network and the representations of a client's examples, shape (n, width), with their labels. Outputs are the
    logarithms of λ·h_kNN + (1 − λ)·softmax, at least that of the smallest number."""

    def __init__(self, network: nn.Module, features: Tensor, labels: Tensor, k: int, name: str) -> None:
        super().__init__()
        self.network, self.k = network, min(k, len(features))
        self.features: Tensor
        self.labels: Tensor
        self.lam: Tensor
        self.name: Tensor
        self.register_buffer("features", features)
        self.register_buffer("labels", labels)
        self.register_buffer("lam", features.new_zeros(()))
        self.register_buffer("name", torch.tensor(list(name.encode()), dtype=torch.uint8))  # whose input is φ(x)

    def forward(self, *parts: Any, **named: Any) -> Tensor:
        """Of inputs as the network takes them: (batch, classes)."""
        seen: list[Tensor] = []
        module = self.network.get_submodule(_read(self.name))

        def keep(_: nn.Module, args: tuple[Any, ...], known: dict[str, Any]) -> None:
            seen.append(args[0] if args else first(known))

        hook = module.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            shared = logits_of(self.network(*parts, **named)).float().softmax(1)
        finally:
            hook.remove()
        distances = torch.cdist(seen[-1].float().flatten(1), self.features)
        near = distances.topk(self.k, largest=False)
        votes = (-near.values).softmax(1)  # exp(−d), divided by their sum
        own = torch.zeros_like(shared).scatter_add(1, self.labels[near.indices], votes)
        mixed: Tensor = self.lam * own + (1 - self.lam) * shared
        return mixed.clamp_min(torch.finfo(mixed.dtype).tiny).log()


def _loss(found: Neighbours, lam: float, examples: Examples) -> float:
    found.lam.fill_(lam)
    return float(nn.functional.nll_loss(predict(found, examples), examples.labels.cpu()))


def _read(name: Tensor) -> str:
    return bytes(name.tolist()).decode()
