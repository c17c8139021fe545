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

import torch
from torch import Tensor

from polyfed.core.machine.memory_limit import build_after_memory_check
from polyfed.core.seeds import derive_seed, torch_generator
from polyfed.core.state_dict import StateDict


def init_weight_hypernetwork(
    seed: int,
    num_clients: int,
    embedding_dim: int,
    hidden: int,
    depth: int,
    architectures: Mapping[str, StateDict],
    offsets: Mapping[str, StateDict],
) -> dict[str, Tensor]:
    """Returns the hypernetwork's random initial tensors, drawn as torch initialises `nn.Linear`, and for the clients'
    embeddings `nn.Embedding`, from N(0, 1).

    Args:
        seed: seed of the draw.
        num_clients, embedding_dim, hidden, depth: N, E, H, and the number of layers H→H after the first.
        architectures: key of an architecture -> the tensors to generate, by name; only their shapes and dtypes are used.
        offsets: key of an architecture -> initial biases of its heads: generated tensors start near these instead of near 0.

    Returns:
        "embeddings" (N, E); "trunk.K.weight" (H, E or H), "trunk.K.bias" (H); "heads.KEY.NAME.weight" (*shape, H),
        "heads.KEY.NAME.bias" (*shape), in the dtype of the tensor that they generate.

    >>> network = init_weight_hypernetwork(0, 5, 2, 8, 1, {"mlp": {"w": torch.zeros(4, 3)}}, {})
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
        generator = torch_generator(derive_seed(seed, "weight hypernetwork", "embeddings"))
        params = {"embeddings": torch.randn(num_clients, embedding_dim, generator=generator, dtype=trunk_dtype)}
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


def generated_tensor_names(network: StateDict, architecture: str) -> list[str]:
    """Returns the names of those tensors of a client's network that the hypernetwork generates for this architecture."""
    start, end = f"heads.{architecture}.", ".bias"
    return [name[len(start) : -len(end)] for name in network if name.startswith(start) and name.endswith(end)]


def trunk_activations(network: StateDict, rows: Tensor) -> list[Tensor]:
    """Returns the activations of the hypernetwork's shared layers for B clients: their embeddings, the input of each
    further layer, and the last output, (B, H).

    `rows` has the positions of the B clients among all N.
    """
    layer_inputs, k = [network["embeddings"][rows]], 0
    while True:
        z = layer_inputs[-1] @ network[f"trunk.{k}.weight"].T + network[f"trunk.{k}.bias"]
        k += 1
        if f"trunk.{k}.weight" not in network:
            return [*layer_inputs, z]
        layer_inputs.append(z.relu())


def generate_client_weights(network: StateDict, architecture: str, rows: Tensor) -> dict[str, Tensor]:
    """Returns `{tensor's name: generated weights}` for B clients of one architecture, each of shape (B, *shape).

    θ̄_i = h(v_i; φ).

    >>> network = init_weight_hypernetwork(0, 5, 2, 8, 1, {"mlp": {"w": torch.zeros(4, 3)}}, {})
    >>> generate_client_weights(network, "mlp", torch.tensor([4, 1]))["w"].shape
    torch.Size([2, 4, 3])
    """
    features, generated = trunk_activations(network, rows)[-1], {}
    for name in generated_tensor_names(network, architecture):
        weight, bias = (network[f"heads.{architecture}.{name}.{part}"] for part in ("weight", "bias"))
        flat = features.to(weight.dtype) @ weight.reshape(-1, weight.shape[-1]).T
        generated[name] = flat.reshape(len(rows), *bias.shape) + bias
    return generated


def backpropagate_deltas(
    network: StateDict, architecture: str, rows: Tensor, deltas: StateDict, clip: float | None = None
) -> dict[str, Tensor]:
    """Returns the hypernetwork's gradient, summed over the clients, from `deltas`, the changes to the weights that it
    generated.

    It is Σ_i c_i·g_i with g_i = J_iᵀ δ_i, where J_i is the Jacobian of θ̄_i in all tensors of the network (v_i
    included). The factor c_i = min(1, clip/(‖g_i‖ + 10⁻⁶)) clips as `clip_grad_norm_` does.

    Args:
        network: the tensors, as from `init_weight_hypernetwork`.
        architecture: key of these clients' architecture.
        rows: positions of the clients among the N, int64 (B,), each once.
        deltas: name -> δ_i, (B, *shape), for every generated tensor.
        clip: largest norm of a client's gradient; None does not clip.

    Returns:
        The gradient of every tensor on which these clients' weights depend; that of "embeddings" has zeros for other
        clients.
    """
    *layer_inputs, features = trunk_activations(network, rows)
    energy = 1 + features.square().sum(1)  # ‖(x, 1)‖² of the input of all heads
    squares, slope = torch.zeros_like(energy), torch.zeros_like(features)
    heads, flat = generated_tensor_names(network, architecture), {}
    for name in heads:
        weight = network[f"heads.{architecture}.{name}.weight"]
        flat[name] = deltas[name].reshape(len(rows), -1).to(weight.dtype)
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

    gradients = {"embeddings": torch.zeros_like(network["embeddings"]).index_add(0, rows, factors[:, None] * slope)}
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
    return gradients


def sgd_step(
    network: StateDict, velocity: StateDict, gradients: StateDict, *, lr: float, momentum: float, weight_decay: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the hypernetwork's tensors and the velocity after one step of SGD with momentum and weight decay, as in
    torch.

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
