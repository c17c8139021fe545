"""Defines pFedHN's hypernetwork, which generates clients' weights, as functions of its tensors (Shamsian et al., ICML
2021; layers as in the authors' code).

A trunk of linear layers with ReLU between them maps the embedding v_i of client i to features h_i, and one linear head per
tensor maps these to that tensor of the client's network. Each architecture has its own heads on the common trunk.

Gradients are computed by hand: a client's gradient for a linear layer is an outer product s xᵀ, whose norm is ‖s‖·‖x‖, and
the sum over clients is one matrix product. So each client's gradient is clipped separately, without ever being computed.

Dimensions: N clients, B of them in a call, E entries of an embedding, H features, P entries of a tensor.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from polyfed.core.machine.memory_limit import build_after_memory_check
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.core.state_dict import StateDict


def init_weight_hypernetwork(
    seed: int,
    embedding_dim: int,
    hidden: int,
    depth: int,
    architectures: Mapping[str, StateDict],
    offsets: Mapping[str, StateDict],
) -> dict[str, Tensor]:
    """Returns the hypernetwork's random initial tensors, drawn as torch initialises `nn.Linear`.

    Args:
        seed: seed of the draw.
        embedding_dim, hidden, depth: E, H, and the number of layers H→H after the first.
        architectures: key of an architecture -> the tensors to generate, by name; only their shapes and dtypes are used.
        offsets: key of an architecture -> initial biases of its heads: generated tensors start near these instead of near 0.

    Returns:
        "trunk.K.weight" (H, E or H), "trunk.K.bias" (H); "heads.KEY.NAME.weight" (*shape, H), "heads.KEY.NAME.bias"
        (*shape), in the dtype of the tensor that they generate.

    >>> network = init_weight_hypernetwork(0, 2, 8, 1, {"mlp": {"w": torch.zeros(4, 3)}}, {})
    >>> {name: tuple(tensor.shape) for name, tensor in network.items() if "weight" in name}
    {'trunk.0.weight': (8, 2), 'trunk.1.weight': (8, 8), 'heads.mlp.w.weight': (4, 3, 8)}
    """
    types = {tensor.dtype for tensors in architectures.values() for tensor in tensors.values()}
    trunk_dtype = torch.float64 if torch.float64 in types else torch.float32

    def linear(name: str, outputs: Sequence[int], inputs: int, dtype: torch.dtype) -> dict[str, Tensor]:
        generator, bound = torch_generator(derive_seed(seed, "weight hypernetwork", name)), 1 / math.sqrt(inputs)
        return {
            f"{name}.weight": torch.empty([*outputs, inputs], dtype=dtype).uniform_(-bound, bound, generator=generator),
            f"{name}.bias": torch.empty([*outputs], dtype=dtype).uniform_(-bound, bound, generator=generator),
        }

    def init_tensors() -> dict[str, Tensor]:
        params: dict[str, Tensor] = {}
        for k in range(depth + 1):
            params |= linear(f"trunk.{k}", [hidden], hidden if k else embedding_dim, trunk_dtype)
        for key, tensors in architectures.items():
            for name, tensor in tensors.items():
                params |= linear(f"heads.{key}.{name}", tensor.shape, hidden, tensor.dtype)
            params |= {f"heads.{key}.{name}.bias": offset.clone() for name, offset in offsets.get(key, {}).items()}
        return params

    return build_after_memory_check(
        f"a hypernetwork with embedding_dim={embedding_dim}, hidden={hidden} and hn_depth={depth}", init_tensors
    )


@lru_cache(maxsize=1)  # drawn again where a run resumes: a row that no client has changed is in no checkpoint
def draw_embeddings(seed: int, num_clients: int, embedding_dim: int, dtype: torch.dtype) -> Tensor:
    """Returns the initial embeddings of all clients, (N, E), from N(0, 1) as in `nn.Embedding`; they must not be changed.

    >>> draw_embeddings(0, 5, 2, torch.float32).shape
    torch.Size([5, 2])
    """
    generator = torch_generator(derive_seed(seed, "weight hypernetwork", "embeddings"))
    return build_after_memory_check(
        f"embeddings of {num_clients} clients with embedding_dim={embedding_dim}",
        lambda: torch.randn(num_clients, embedding_dim, generator=generator, dtype=dtype),
    )


def generated_tensor_names(network: StateDict, architecture: str) -> list[str]:
    """Returns the names of those tensors of a client's network that the hypernetwork generates for this architecture."""
    start, end = f"heads.{architecture}.", ".bias"
    return [name[len(start) : -len(end)] for name in network if name.startswith(start) and name.endswith(end)]


def trunk_activations(network: StateDict, embeddings: Tensor) -> list[Tensor]:
    """Returns the shared layers' inputs, first embeddings (B, E), and the last output, (B, H)."""
    layer_inputs, k = [embeddings], 0
    while True:
        z = layer_inputs[-1] @ network[f"trunk.{k}.weight"].T + network[f"trunk.{k}.bias"]
        k += 1
        if f"trunk.{k}.weight" not in network:
            return [*layer_inputs, z]
        layer_inputs.append(z.relu())


def generate_client_weights(network: StateDict, architecture: str, embeddings: Tensor) -> dict[str, Tensor]:
    """Returns `{tensor: weights}` of B clients, each (B, *shape), from embeddings, (B, E).

    θ̄_i = h(v_i; φ).

    >>> network = init_weight_hypernetwork(0, 2, 8, 1, {"mlp": {"w": torch.zeros(4, 3)}}, {})
    >>> generate_client_weights(network, "mlp", torch.zeros(5, 2))["w"].shape
    torch.Size([5, 4, 3])
    """
    features, generated = trunk_activations(network, embeddings)[-1], {}
    for name in generated_tensor_names(network, architecture):
        weight, bias = (network[f"heads.{architecture}.{name}.{part}"] for part in ("weight", "bias"))
        flat = features.to(weight.dtype) @ weight.reshape(-1, weight.shape[-1]).T
        generated[name] = flat.reshape(len(embeddings), *bias.shape) + bias
    return generated


def backpropagate_deltas(
    network: StateDict, architecture: str, embeddings: Tensor, deltas: StateDict, clip: float | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the summed gradient and each embedding's, from changes `deltas` to generated weights.

    It is Σ_i c_i·g_i with g_i = J_iᵀ δ_i, where J_i is the Jacobian of θ̄_i in all tensors of the network and in
    v_i. The factor c_i = min(1, clip/(‖g_i‖ + 10⁻⁶)) clips as `clip_grad_norm_` does.

    Args:
        network: the tensors, as from `init_weight_hypernetwork`.
        architecture: key of these clients' architecture.
        embeddings: v_i of the clients, (B, E).
        deltas: name -> δ_i, (B, *shape), for every generated tensor.
        clip: largest norm of a client's gradient; None does not clip.

    Returns:
        The gradient of every tensor on which these clients' weights depend; that of their embeddings, (B, E).
    """
    *layer_inputs, features = trunk_activations(network, embeddings)
    energy = 1 + features.square().sum(1)  # ‖(x, 1)‖² of the input of all heads
    squares, slope = torch.zeros_like(energy), torch.zeros_like(features)
    heads, flat = generated_tensor_names(network, architecture), {}
    for name in heads:
        weight = network[f"heads.{architecture}.{name}.weight"]
        flat[name] = deltas[name].reshape(len(embeddings), -1).to(weight.dtype)
        slope += (flat[name] @ weight.reshape(-1, weight.shape[-1])).to(slope.dtype)
        squares += flat[name].square().sum(1).to(squares.dtype) * energy
    slopes = []  # ∂/∂z_k of the trunk's layers, last first; then ∂/∂v
    for k in reversed(range(len(layer_inputs))):
        slopes.append(slope)
        squares += slope.square().sum(1) * (1 + layer_inputs[k].square().sum(1))
        slope = slope @ network[f"trunk.{k}.weight"]
        slope = slope * (layer_inputs[k] > 0) if k else slope  # the derivative of ReLU
    squares += slope.square().sum(1)
    factors = torch.ones_like(squares) if clip is None else (clip / (squares.sqrt() + 1e-6)).clamp(max=1)

    gradients: dict[str, Tensor] = {}
    for k, its_slope in enumerate(reversed(slopes)):
        scaled = factors[:, None] * its_slope
        gradients |= {f"trunk.{k}.weight": scaled.T @ layer_inputs[k], f"trunk.{k}.bias": scaled.sum(0)}
    for name in heads:
        weight = network[f"heads.{architecture}.{name}.weight"]
        scaled = factors[:, None].to(weight.dtype) * flat[name]
        gradients |= {
            f"heads.{architecture}.{name}.weight": (scaled.T @ features.to(weight.dtype)).reshape(weight.shape),
            f"heads.{architecture}.{name}.bias": scaled.sum(0).reshape(weight.shape[:-1]),
        }
    return gradients, factors[:, None] * slope


def sgd_step(
    network: StateDict, velocity: StateDict, gradients: StateDict, *, lr: float, momentum: float, weight_decay: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns tensors and velocity after a step of SGD with momentum and decay, as in torch.

    u ← momentum·u + g + weight_decay·φ, φ ← φ − lr·u.

    Args:
        network: φ; a tensor without a gradient counts as one with gradient 0, so that momentum and decay act on it.
        velocity: u; empty before the first step.
        gradients: g.
        lr, momentum, weight_decay: hyper-parameters of this step.

    Returns:
        φ and u after the step; u is empty if momentum is 0.

    >>> network, velocity = sgd_step({"w": torch.ones(1)}, {}, {"w": torch.ones(1)}, lr=0.5, momentum=0.9, weight_decay=0)
    >>> network["w"], velocity["w"]
    (tensor([0.5000]), tensor([1.]))
    """
    stepped, velocities = {}, {}
    for name, phi in network.items():
        u = phi * weight_decay
        if name in gradients:
            u += gradients[name]
        if name in velocity:
            u.add_(velocity[name], alpha=momentum)
        stepped[name] = phi.sub(u, alpha=lr)
        if momentum:
            velocities[name] = u
    return stepped, velocities


def repeat_steps_without_gradient(
    embeddings: Tensor,
    velocity: Tensor,
    steps: Sequence[int],
    now: int,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor]:
    """Returns embeddings and their velocity, (B, E) each, as `sgd_step` makes them in the steps that were left out.

    Momentum and decay move an embedding in every step, also where its client has not replied. Made up for when the row is
    next read, with the same operations, this gives the bits of a step on all rows.

    Args:
        embeddings, velocity: v and u.
        steps: how many steps each row has had.
        now: how many it is to have.
        lr, momentum, weight_decay: hyper-parameters of the steps.

    >>> rows, velocity = torch.ones(2, 1), torch.ones(2, 1)
    >>> rows, velocity = repeat_steps_without_gradient(rows, velocity, [1, 3], 3, lr=0.5, momentum=0.5, weight_decay=0)
    >>> rows.tolist(), velocity.tolist()
    ([[0.625], [1.0]], [[0.25], [1.0]])
    """
    order = sorted(range(len(steps)), key=steps.__getitem__)
    waiting_v, waiting_u = embeddings[order], velocity[order]
    v, u = waiting_v[:0], waiting_u[:0]
    # Rows that have had fewer steps come first, the others join them.
    for start, end in pairwise([*sorted(set(steps)), now]):
        number = sum(step_count <= start for step_count in steps)
        v, u = (torch.cat([moved, rows[len(v) : number]]) for moved, rows in ((v, waiting_v), (u, waiting_u)))
        for _ in range(start, end):
            stepped, velocities = sgd_step({"v": v}, {"v": u}, {}, lr=lr, momentum=momentum, weight_decay=weight_decay)
            v, u = stepped["v"], velocities.get("v", u)
    back = torch.tensor(order).argsort()
    return v[back], u[back]
