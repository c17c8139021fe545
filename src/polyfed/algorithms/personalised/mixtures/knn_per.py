"""kNN-Per: mixes the global model's output with the labels of a client's nearest training examples (Marfoq, Neglia,
Kameni and Vidal, ICML 2022).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from polyfed.algorithms.base.averaging import AveragedOver, ClientState, GlobalModelMethod
from polyfed.alignment.representations import (
    check_has_representation,
    compute_representations,
    representation_module_name,
)
from polyfed.core.algorithm import Client, Message
from polyfed.core.examples.examples import Examples, split_into_batches
from polyfed.core.examples.pytree import call_network, first_leaf, logits_of
from polyfed.core.methods.capabilities import ValidatesNetworks, WrapsNetwork
from polyfed.core.methods.method_card import MethodCard
from polyfed.core.nn.memory_format import to_preferred_memory_format
from polyfed.core.nn.module_cache import restore_all_but_weights_and_set_eval
from polyfed.core.state_dict import StateDict

_BATCH_SIZE = 128  # examples for which probabilities are computed at once, as in `predict`
_NUM_GRID_STEPS = 10  # λ is chosen among 0, 1/10, ..., 1


@final
@dataclass(frozen=True, kw_only=True)
class KNNPer(GlobalModelMethod, WrapsNetwork, ValidatesNetworks):
    """Mixes the global model's class probabilities with the labels of those training examples of the client whose
    representations are nearest.

    h(x) = λ·h_kNN(x) + (1 − λ)·h_global(x). The neighbours are the k training examples of the client whose
    representations by the global model are nearest, each with the weight exp(−distance). Training is FedAvg, bit for
    bit. All clients have one architecture; the task is classification. Evaluated model: h, whose outputs are the
    logarithms of its probabilities; next to it the global model alone, as `server_...`.

    Args:
        k: number of neighbours (10, paper); all training examples if there are fewer.
        lam: λ from 0 to 1, the weight of the neighbours. None chooses it for each client among 0, 0.1, ..., 1 by the least
            loss on its validation examples (paper), and takes 0.5 for a client without them (polyfed's choice). Scores on
            validation examples are then out of fold: λ is chosen on the other half.
        module: name of the module whose input is the representation; None finds the last linear layer (paper).
        weighted: weighs clients by their number of training examples (paper); False counts every client the same.
        averaged_over: the clients over which the result is averaged: "cohort", those of the last round (paper), or
            "all", with their latest models, which the server then stores (see `GlobalModelMethod`).

    The other fields are those of `LocalTraining`. The weights of a personal model hold the representations and labels
    of the client's training examples; they are not sent.

    >>> KNNPer(k=5, lam=0.3).weighted
    True
    """

    card: ClassVar[MethodCard] = MethodCard(
        name="knn_per",
        summary="FedAvg mixed with votes of the client's nearest examples",
        paper="Marfoq et al. 2022",
        evaluated="the mixture; also the average",
        stacked=True,
    )

    requires: ClassVar[frozenset[str]] = frozenset({"one_architecture", "classification"})
    k: int = 10
    lam: float | None = None
    module: str | None = None
    weighted: bool = True
    averaged_over: AveragedOver = "cohort"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "k")
        self._require(self.lam is None or 0 <= self.lam <= 1, "lam", "from 0 to 1, or none")
        object.__setattr__(self, "traits", self.traits | ({"fits_validation"} if self.lam is None else set()))

    def validate_network(self, client: Client) -> None:
        """Raises a `UserError` unless a module's input can serve as an example's representation."""
        check_has_representation(client, self.module)

    def personal_model(self, message: Message, client_state: ClientState, client: Client, seed: int) -> nn.Module:
        """Returns the global model mixed with nearest neighbours' labels by the weight that suits best."""
        network = restore_all_but_weights_and_set_eval(super().personal_model(message, client_state, client, seed))
        data = client.train
        name = representation_module_name(network, data) if self.module is None else self.module
        features = compute_representations(network, data, module=name).to(data.device)
        neighbours = NearestNeighbourMixture(network, features, data.labels, self.k, name)
        neighbours.lam.fill_(0.5 if self.lam is None else self.lam)
        if self.lam is None and client.val is not None:
            neighbours.lam.fill_(_lam_of_lowest_loss(neighbours.eval(), client.val))
        return neighbours.eval()

    def wrap_network(self, network: nn.Module, weights: StateDict) -> nn.Module:
        """Wraps a client's network in the mixture with nearest neighbours, still without its weights."""
        name = self.module if self.module is not None else _decode_name(weights["name"])
        return NearestNeighbourMixture(network, weights["features"], weights["labels"], self.k, name)

    def other_models(
        self, message: Message, client_state: ClientState, client: Client, seed: int
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the global model, and the last round's mean if that differs, by name."""
        yield "server", super().personal_model(message, client_state, client, seed)
        yield from super().other_models(message, client_state, client, seed)


@final
class NearestNeighbourMixture(nn.Module):
    """Mixes a classifier's class probabilities with labels of nearest stored examples.

    Outputs are the logarithms of λ·h_kNN + (1 − λ)·softmax, bounded below by that of the smallest positive float.
    `features` has the representations, shape (n, width).
    """

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
        self.register_buffer("name", torch.tensor(list(name.encode()), dtype=torch.uint8))  # the module with input φ(x)

    def forward(self, *parts: Any, **kwargs: Any) -> Tensor:
        """Returns the logarithms of the mixed class probabilities for a batch of inputs, shape (batch, classes)."""
        return self.mix(*self.class_probabilities(*parts, **kwargs))

    def mix(self, global_probabilities: Tensor, knn_probabilities: Tensor) -> Tensor:
        """Returns the logarithms of both class probabilities, mixed by the present weight."""
        probabilities: Tensor = self.lam * knn_probabilities + (1 - self.lam) * global_probabilities
        return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()

    def class_probabilities(self, *parts: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Returns class probabilities (batch, classes) of the network, and of the nearest neighbours."""
        captured_inputs: list[Tensor] = []
        module = self.network.get_submodule(_decode_name(self.name))

        def capture_input(_: nn.Module, args: tuple[Any, ...], hook_kwargs: dict[str, Any]) -> None:
            captured_inputs.append(args[0] if args else first_leaf(hook_kwargs))

        hook = module.register_forward_pre_hook(capture_input, with_kwargs=True)
        try:
            global_probabilities = logits_of(self.network(*parts, **kwargs)).float().softmax(1)
        finally:
            hook.remove()
        distances = torch.cdist(captured_inputs[-1].float().flatten(1), self.features)
        nearest = distances.topk(self.k, largest=False)
        votes = (-nearest.values).softmax(1)  # exp(−d), divided by their sum
        knn_probabilities = torch.zeros_like(global_probabilities).scatter_add(1, self.labels[nearest.indices], votes)
        return global_probabilities, knn_probabilities


def _lam_of_lowest_loss(neighbours: NearestNeighbourMixture, examples: Examples) -> float:
    """Returns the weight λ of a grid with the lowest loss on the examples. Probabilities are computed once for all."""
    rows, labels = torch.arange(len(examples), device=examples.device), examples.labels.cpu()
    with torch.no_grad():
        batches = [
            call_network(
                neighbours.class_probabilities, to_preferred_memory_format(neighbours, examples.batch(batch)[0])
            )
            for batch in split_into_batches(rows, _BATCH_SIZE)
        ]

        def loss_with(lam: float) -> float:
            neighbours.lam.fill_(lam)
            outputs = torch.cat([neighbours.mix(*probabilities).float().cpu() for probabilities in batches])
            return float(nn.functional.nll_loss(outputs, labels))

        return min((i / _NUM_GRID_STEPS for i in range(_NUM_GRID_STEPS + 1)), key=loss_with)


def _decode_name(name: Tensor) -> str:
    return bytes(name.tolist()).decode()
