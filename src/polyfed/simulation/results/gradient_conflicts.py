"""Measures for which clients of a FedPNAS run the gradient averaged over clients conflicts with their own gradient, at
the server's parameters after the last round.
"""

from dataclasses import replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from polyfed.algorithms.nas.fedpnas import MetaSupernetMethod
from polyfed.algorithms.nas.supernet_method import supernet_of
from polyfed.core.algorithm import Client, Message
from polyfed.core.errors import UserError
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.nn.grad_mode import grad_enabled
from polyfed.core.nn.memory_format import to_preferred_memory_format
from polyfed.core.seeds import derive_seed, temporary_rng_seed
from polyfed.nas.step_weights import StepWeights, compute_lookahead_step_weights
from polyfed.simulation.results.run import Run

_ROWS = 256


@final
class ClientStepWeights(NamedTuple):
    """Holds sorted client ids, their weights α_i in FedPNAS's step, and both sides of Proposition 1."""

    client_ids: tuple[str, ...]
    step_weights: StepWeights


@exclusive_single_torch_thread_with_grad()
def measure_gradient_conflicts(run: Run, *, rows: int = _ROWS, draws: int = 1, seed: int = 0) -> ClientStepWeights:
    """Measures how far the mean gradient agrees with each client's in a FedPNAS run.

    g_i is the gradient on the client's own training examples at the server's θ, g̃_i that after one inner step of the
    method (`eta`, `inner`). All clients draw the same operations, in both passes; BatchNorm uses batch statistics.

    Args:
        run: of `fedpnas` or `ca_fedpnas`.
        rows: training examples of each client, evenly spaced if it has more.
        draws: number of draws of operations, over which gradients are averaged.
        seed: of the draws.

    Raises:
        UserError: a run of another method, or a number below 1.

    >>> from polyfed import federate
    >>> from polyfed.algorithms import FedPNAS
    >>> train, test = ((torch.full((4, 1, 8, 8), value), torch.tensor([0, 1, 0, 1])) for value in (0.0, 1.0))
    >>> method = FedPNAS(channels=4, base_cells=1, base_nodes=1, personal_nodes=1, operations=("skip", "avg_pool_3"))
    >>> run = federate([Client(name, None, train, test) for name in ("north", "south")], method, rounds=1, workers=0)
    >>> clients, weights = measure_gradient_conflicts(run)
    >>> clients, bool(weights.cosine_gap.max() < 1e-6)  # equal clients do not conflict
    (('north', 'south'), True)
    """
    method = run.federation.algorithm
    if not isinstance(method, MetaSupernetMethod):
        raise UserError(
            f"{type(method).__name__} takes no step ahead, so that there is no α; give a run of fedpnas or ca_fedpnas"
        )
    if rows < 1 or draws < 1:
        raise UserError(f"rows and draws must be at least 1, got {rows} and {draws}")
    ids = tuple(sorted(run.federation.clients))
    pairs = []
    for client in ids:
        message = run.federation.build_single_task("export", client, run.kept_checkpoint).message
        pairs.append(
            _ClientGradients(method, run.federation.clients[client], rows, seed).mean_gradients(message, draws)
        )
    stacked = (torch.stack(gradients_of_clients) for gradients_of_clients in zip(*pairs, strict=True))
    return ClientStepWeights(ids, compute_lookahead_step_weights(*stacked))


@final
class _ClientGradients:
    """Computes two gradients of a client: g_i at the server's parameters, and g̃_i after one inner step."""

    def __init__(self, method: MetaSupernetMethod, client: Client, rows: int, seed: int) -> None:
        # Without second-order terms the second pass leaves g̃ itself.
        self.method, self.client, self.seed = replace(method, second_order="none"), client, seed
        number = len(client.train)
        positions = torch.linspace(0, number - 1, min(rows, number)).round().long()
        self.x, self.y = client.train.batch(positions.to(client.train.device))

    @grad_enabled()
    def mean_gradients(self, message: Message, draws: int) -> tuple[Tensor, Tensor]:
        """Returns the flat gradients (g_i, g̃_i), averaged over random draws of operations."""
        gradients_by_draw = [
            self.gradients_of_draw(message, derive_seed(self.seed, "conflicts", draw)) for draw in range(draws)
        ]
        local, ahead = (torch.stack(stacked).mean(0) for stacked in zip(*gradients_by_draw, strict=True))
        return local, ahead

    def gradients_of_draw(self, message: Message, seed: int) -> tuple[Tensor, Tensor]:
        """Returns a client's two gradients (g_i, g̃_i) for one random draw of the architecture's operations."""
        supernet = supernet_of(self.method.load_supernet(message, {}, self.client)).train()
        personal = [p for n, p in supernet.named_parameters() if n.startswith("personal.")]
        criterion, passes = self.method.criterion(self.client), list[Tensor]()

        def loss_of(_: int) -> Tensor:
            supernet.zero_grad()
            with temporary_rng_seed(seed, self.x.device):
                loss = criterion(supernet(to_preferred_memory_format(supernet, self.x)), self.y)
            torch.autograd.backward(loss)
            slopes = [torch.zeros_like(p) if p.grad is None else p.grad for p in personal]
            passes.append(torch.cat([slope.flatten().double().cpu() for slope in slopes]))
            return loss.detach()

        self.method.build_meta_gradient_function(supernet)(loss_of)
        supernet.zero_grad()
        return passes[0], passes[1]
