"""Lets clients with low-rank adapters (LoRA) of different ranks train in one federation: converts adapters between a
client's rank and the server's.

A LoRA layer computes W₀x + s·BAx with a frozen W₀, A of shape (r, n), B of shape (m, r) and a scale s = α/r (Hu et al.
2022). Adapters are found by `peft`'s names: `NAME.lora_A...` and `NAME.lora_B...` (or `lora_embedding_A`), with `scaling` in
the module `NAME`. Where all clients have one rank they are parameters like others, and nothing of this is needed.

The server has the largest rank R of the federation. Adapters travel with their scale in B, so that clients may differ in
it. A client takes the first r of R components. The server averages replies in one of
three ways:

- "zero_pad": A_i and B_i are filled with zeros up to R and averaged (HetLoRA; Cho et al. 2024, without its pruning and its
  weights by norm).
- "svd": the products B_i·A_i are averaged, and their mean is divided into R components by its singular value decomposition,
  the largest first, each singular value's root in either factor (FlexLoRA; Bai et al. 2024). So the first r are the mean's
  best approximation of rank r.
- "stack": the mean of the products, which is the product of the stacked factors, is added to W₀ exactly, and each round
  begins with fresh adapters, A as drawn and B zero (FLoRA; Wang et al. 2024). It goes down as one matrix a layer, so that a
  client that missed rounds catches up.

No method sees any of this: the engine fits a message before the client half gets it, and a reply is opened before the server
half does, as with compressed messages.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from polyfed.core.algorithm import Algorithm, Architecture, Client, Message
from polyfed.core.errors import UserError
from polyfed.core.messages.contiguous import message_error
from polyfed.core.nn.module_cache import CachedModule, cached_module
from polyfed.core.nn.tied_weights import first_name_by_alias, first_name_by_name
from polyfed.core.state_dict import StateDict, StateDictSpec

AdapterMode = Literal["zero_pad", "stack", "svd"]
_LORA_A_NAME = re.compile(r"(.*\.)?lora_(embedding_)?A(\..*)?")


@final
@dataclass(frozen=True)
class LoraTensorNames:
    """Holds the names that belong to one LoRA adapter: its tensors A and B, their product, the layer, and the adapter.

    Only "svd" and "stack" use the product.
    """

    a: str
    b: str
    product: str
    layer: str
    adapter: str


def find_adapters(names: Iterator[str] | Mapping[str, Any]) -> list[LoraTensorNames]:
    """Returns the LoRA adapters among the tensor names of a network, one `LoraTensorNames` each.

    >>> find_adapters({"up.lora_A.default.weight": 0, "up.lora_B.default.weight": 0, "up.bias": 0})[0].product
    'up.lora_AB.default.weight'
    """
    adapters, all_names = [], set(names)
    for name in sorted(all_names):
        match = _LORA_A_NAME.fullmatch(name)
        if match is None:
            continue
        before, kind, after = match[1] or "", match[2] or "", match[3] or ""
        if (b := f"{before}lora_{kind}B{after}") in all_names:
            adapter = after.removesuffix(".weight").lstrip(".")
            adapters.append(LoraTensorNames(name, b, f"{before}lora_{kind}AB{after}", before.rstrip("."), adapter))
    return adapters


def adapter_averaging_mode(algorithm: Algorithm[Any, Any]) -> AdapterMode | None:
    """Returns how a method averages adapters of different ranks ("svd", say); None if like other parameters."""
    mode: AdapterMode | None = getattr(algorithm, "adapters", None)
    return mode


def architecture_key_without_averaged_lora_ranks(algorithm: Algorithm[Any, Any], net: CachedModule) -> str:
    """Returns the key of a network's architecture, without adapters' ranks if the method averages over them."""
    if adapter_averaging_mode(algorithm) is None:
        return net.architecture
    ranked = {pair.a: 0 for pair in find_adapters(net.module.state_dict())}
    ranked |= {pair.b: 1 for pair in find_adapters(net.module.state_dict())}
    shapes = []
    for name, tensor in net.module.state_dict().items():
        shape = list(tensor.shape)
        if name in ranked:
            shape[ranked[name]] = -1
        shapes.append((name, shape, str(tensor.dtype)))
    layer_types = [(name, type(part).__module__, type(part).__qualname__) for name, part in net.module.named_modules()]
    digest = hashlib.sha256(f"{shapes}\n{layer_types}{first_name_by_alias(net.module) or ''}".encode()).hexdigest()[:16]
    frozen = net.architecture.partition("-")[2]
    return f"{digest}-{frozen}" if frozen else digest


def lora_rank_by_matrix_a_name(net: CachedModule) -> dict[str, int]:
    """Returns `{name of matrix A: rank}` for the LoRA adapters of a network."""
    state = net.module.state_dict()
    return {pair.a: state[pair.a].shape[0] for pair in find_adapters(state)}


def network_with_largest_ranks(networks: Mapping[str, Architecture], mode: AdapterMode) -> Architecture:
    """Returns the client's network that has the largest adapter rank in every layer, for the server to use.

    Args:
        networks: by the client's id.
        mode: what becomes of adapters.

    Raises:
        UserError: a network has no adapters, or none has all of the largest ranks; or it has such as "svd" or "stack" does
            not take, or one factor of an adapter in two layers.
    """
    cached_modules = {i: cached_module(factory) for i, factory in sorted(networks.items())}
    largest: dict[str, int] = {}
    for i, net in cached_modules.items():
        if not (client_ranks := lora_rank_by_matrix_a_name(net)):
            raise UserError(
                f"adapters={mode!r} is for networks with low-rank adapters, and that of client {i!r} has no parameters "
                "called lora_A and lora_B; leave it out"
            )
        state, first = net.module.state_dict(), first_name_by_name(net.module)
        of_layers = {(pair.a, pair.b) for pair in find_adapters(state)}
        for pair in find_adapters(state):
            if (first[pair.a], first[pair.b]) not in of_layers:
                raise UserError(
                    f"adapters={mode!r} is of adapters that layers have by themselves, and {pair.layer!r} of client {i!r} "
                    "shares one of its two factors with another layer; share both, or neither"
                )
            if mode != "zero_pad" and state[pair.a].dim() != 2:
                raise UserError(f"adapters={mode!r} is of matrices, and {pair.a!r} of client {i!r} has the shape "
                                f"{tuple(state[pair.a].shape)}; take 'zero_pad'")  # fmt: skip
            if mode == "stack":
                _frozen_weight(net.module, pair)
        largest = {name: max(rank, largest.get(name, 0)) for name, rank in client_ranks.items()}
    for i, net in cached_modules.items():
        if lora_rank_by_matrix_a_name(net) == largest:
            return networks[i]
    raise UserError(
        f"adapters={mode!r}: no client has the largest rank in all layers, and the server's adapters are those of one "
        "network; give one of them the largest rank everywhere"
    )


# -- the client half -------------------------------------------------------------------------------------------------------


@contextmanager
def cut_message_to_client_rank_within_block(
    algorithm: Algorithm[Any, Any], client: Client, message: Message
) -> Iterator[Message]:
    """Yields the message with adapters cut to the client's rank; frozen weights may differ in the block.

    With "stack" the client's frozen weights W₀ include the server's additions inside the block.
    """
    mode = adapter_averaging_mode(algorithm)
    if mode is None or client.model is None:
        yield message
        return
    net = cached_module(client.model, client.train.device)
    state, groups, added = net.module.state_dict(), dict[str, StateDict](), dict[str, Tensor]()
    for group, state_dict in message.tensors.items():
        tensors = dict(state_dict)
        for pair in find_adapters(state_dict):
            rank, scale = state[pair.a].shape[0], _adapter_scale(net.module, pair)
            if rank > state_dict[pair.a].shape[0]:
                raise UserError(
                    f"client {client.id!r}: the adapter {pair.a!r} has rank {rank}, more than the server's "
                    f"{state_dict[pair.a].shape[0]}; give the server's network the largest rank"
                )
            tensors[pair.a], tensors[pair.b] = state_dict[pair.a][:rank], state_dict[pair.b][:, :rank] / scale
            if (product := tensors.pop(pair.product, None)) is not None:
                added[pair.product] = product
        groups[group] = tensors
    originals: list[tuple[nn.Parameter, Tensor]] = []
    try:
        for pair in find_adapters(state):
            if pair.product in added:
                base, transposed = _frozen_weight(net.module, pair)
                originals.append((base, base.detach().clone()))
                product = added[pair.product].to(base.device, base.dtype)
                base.data.add_(product.t() if transposed else product)  # .data: the frozen part counts its changes
        yield Message(groups, message.scalars)
    finally:
        for base, value in originals:
            base.data.copy_(value)


def fold_adapter_scales_into_reply(algorithm: Algorithm[Any, Any], client: Client, reply: Message) -> Message:
    """Returns a client's reply with each adapter's scale α/r multiplied into the adapter's matrix B, before it is sent."""
    if adapter_averaging_mode(algorithm) is None or client.model is None or message_error(reply):
        return reply
    module, groups = cached_module(client.model, client.train.device).module, dict[str, StateDict]()
    for group, tensors in reply.tensors.items():
        groups[group] = {
            **tensors,
            **{pair.b: tensors[pair.b] * _adapter_scale(module, pair) for pair in find_adapters(tensors)},
        }
    return Message(groups, reply.scalars)


def _adapter_scale(module: nn.Module, pair: LoraTensorNames) -> float:
    """Returns the scale s = α/r of a layer's adapter, as `peft` stores it."""
    layer = module.get_submodule(pair.layer)
    scale = getattr(layer, "scaling", 1.0)
    return float(scale[pair.adapter] if isinstance(scale, Mapping) else scale)


def _frozen_weight(module: nn.Module, pair: LoraTensorNames) -> tuple[nn.Parameter, bool]:
    """Returns the frozen weights W₀ of a layer, and whether they are stored as the transpose of what B·A is added to.

    Raises:
        UserError: the base weight is not there, is trained, or is not what B·A is simply added to.
    """
    layer = module.get_submodule(pair.layer)
    base = getattr(getattr(layer, "base_layer", layer), "weight", None)
    transposed = bool(getattr(layer, "fan_in_fan_out", False)) or "lora_embedding" in pair.a
    state = module.state_dict()
    shape = (state[pair.b].shape[0], *state[pair.a].shape[1:])
    scaled = any("lora_magnitude" in name for name, _ in layer.named_parameters())
    frozen = isinstance(base, nn.Parameter) and not base.requires_grad and base.dim() == 2
    if isinstance(base, nn.Parameter) and frozen and not scaled and (base.t() if transposed else base).shape == shape:
        return base, transposed
    raise UserError(
        f"adapters='stack' adds adapters to frozen weights, and {pair.layer!r} has no frozen matrix of shape {shape} as "
        "`base_layer.weight` or `weight`, or scales it; take 'svd' or 'zero_pad'"
    )


# -- the server half -------------------------------------------------------------------------------------------------------


def scale_initial_server_adapters(algorithm: Algorithm[Any, Any], server_state: Any, model: Architecture | None) -> Any:
    """Returns the server's first state with each adapter's scale α/r multiplied into the adapter's matrix B.

    With "stack" B is zero, and so is what is added to W₀.
    """
    mode = adapter_averaging_mode(algorithm)
    if mode is None or model is None:
        return server_state
    module = cached_module(model).module

    def init_group(state_dict: StateDict) -> dict[str, Tensor]:
        tensors = dict(state_dict)
        for pair in find_adapters(state_dict):
            tensors[pair.b] = state_dict[pair.b] * _adapter_scale(module, pair)
            if mode == "stack":
                tensors[pair.b] = torch.zeros_like(state_dict[pair.b])
                tensors[pair.product] = _product_of_factors(state_dict[pair.a], tensors[pair.b])
        return tensors

    return {group: init_group(part) if isinstance(part, Mapping) else part for group, part in server_state.items()}


def reply_at_server_rank(algorithm: Algorithm[Any, Any], reply: Message, message: Message) -> Message:
    """Returns a reply with adapters at the server's rank instead of the client's, to be averaged.

    With "svd" and "stack" the client's adapters are in the result as their products B·A.

    Raises:
        ValueError: the adapters do not fit; the message is half a sentence.
    """
    mode = adapter_averaging_mode(algorithm)
    if mode is None:
        return reply
    sent_tensors = {name: tensor for state_dict in message.tensors.values() for name, tensor in state_dict.items()}
    groups: dict[str, StateDict] = {}
    for group, state_dict in reply.tensors.items():
        tensors = dict(state_dict)
        for pair in find_adapters(state_dict):
            if pair.a not in sent_tensors or pair.b not in sent_tensors:
                continue  # refused with the names of what is unexpected
            a, b, server_a, server_b = (
                state_dict[pair.a],
                state_dict[pair.b],
                sent_tensors[pair.a],
                sent_tensors[pair.b],
            )
            rank, server_rank = a.shape[0] if a.dim() else 0, server_a.shape[0]
            fits = a.shape[1:] == server_a.shape[1:] and b.shape == (server_b.shape[0], rank, *server_b.shape[2:])
            if not fits or not 1 <= rank <= server_rank or {a.dtype, b.dtype} != {server_a.dtype}:
                raise ValueError(
                    f"the adapter {pair.a!r} is {tuple(a.shape)} and {tuple(b.shape)}; the server's is "
                    f"{tuple(server_a.shape)} and {tuple(server_b.shape)}, of which it may have the rank or less"
                )
            if mode == "zero_pad":
                tensors[pair.a] = torch.cat([a, a.new_zeros(server_rank - rank, *a.shape[1:])])
                tensors[pair.b] = torch.cat([b, b.new_zeros(b.shape[0], server_rank - rank, *b.shape[2:])], dim=1)
                continue
            tensors[pair.a], tensors[pair.b] = server_a, server_b
            product = _product_of_factors(a, b)
            tensors[pair.product] = product if mode == "svd" else sent_tensors[pair.product] + product
        groups[group] = tensors
    return Message(groups, reply.scalars)


def reply_spec_at_server_rank(
    algorithm: Algorithm[Any, Any], reply_spec: Mapping[str, StateDictSpec]
) -> Mapping[str, StateDictSpec]:
    """Returns `{group: {name: shape and dtype}}` for the tensors of a reply after `reply_at_server_rank`."""
    if adapter_averaging_mode(algorithm) != "svd":
        return reply_spec
    groups: dict[str, StateDictSpec] = {}
    for group, packed in reply_spec.items():
        unpacked = dict(packed)
        for pair in find_adapters(packed):
            (_, *columns), dtype = packed[pair.a]
            unpacked[pair.product] = ((packed[pair.b][0][0], *columns), dtype)
        groups[group] = unpacked
    return groups


def factorise_mean_adapters(algorithm: Algorithm[Any, Any], mean: Mapping[str, StateDict]) -> Mapping[str, StateDict]:
    """Converts the mean reply to the server's state; "svd" factorises each mean product B·A into A and B."""
    if adapter_averaging_mode(algorithm) != "svd":
        return mean
    groups: dict[str, StateDict] = {}
    for group, state_dict in mean.items():
        tensors = dict(state_dict)
        for pair in find_adapters(state_dict):
            if pair.product in tensors:
                tensors[pair.a], tensors[pair.b] = factorise_into_a_and_b(tensors.pop(pair.product), state_dict[pair.a])
        groups[group] = tensors
    return groups


class LowRankFactors(NamedTuple):
    """Holds the factors A, shape (R, n), and B, shape (m, R), of a low-rank matrix B·A."""

    a: Tensor
    b: Tensor


def factorise_into_a_and_b(product: Tensor, present_a: Tensor) -> LowRankFactors:
    """Factorises a matrix into B·A, its best approximation of the rank of `present_a`, largest first.

    Args:
        product: shape (m, n).
        present_a: the present A, shape (R, n): components without a part in `product` keep its rows, with zeros in B, since
            adapters that are zero in both factors would never learn.

    >>> a, b = factorise_into_a_and_b(torch.diag(torch.tensor([1.0, 4.0, 2.0])), torch.zeros(2, 3))
    >>> (b @ a).diag().round(decimals=3)
    tensor([0., 4., 2.])
    """
    u, s, v = torch.linalg.svd(product.to(torch.float64), full_matrices=False)
    sign = torch.where(u.gather(0, u.abs().argmax(0, keepdim=True)) < 0, -1.0, 1.0)  # else it is the library's choice
    rank = int((s > s.amax() * max(product.shape) * torch.finfo(product.dtype).eps).sum()) if s.numel() else 0
    rank = min(rank, len(present_a))
    root = s[:rank].sqrt()
    new_a = present_a.to(torch.float64, copy=True)
    new_b = torch.zeros(product.shape[0], len(present_a), dtype=torch.float64)
    new_a[:rank] = root[:, None] * (v * sign.t())[:rank]
    new_b[:, :rank] = (u * sign)[:, :rank] * root
    return LowRankFactors(new_a.to(present_a.dtype), new_b.to(present_a.dtype))


def _product_of_factors(a: Tensor, b: Tensor) -> Tensor:
    """Computes the product B·A of an adapter, shape (m, n)."""
    return (b.to(torch.float64) @ a.to(torch.float64)).to(a.dtype)
