"""Handles buffers, such as BatchNorm's running statistics, by a method's policy: clients send them ("average"), keep
them ("local") or recompute them ("recompute").

- `average`: clients send them with the weights, and the server averages them; whole numbers (counters) are rounded.
- `local`: they stay with the client, as part of its private state.
- `recompute`: clients neither send nor keep them; before evaluation they are computed again from the client's training data.

A counter of the batches that a client has trained on reveals how many examples it has. So a client returns counters as it
received them, unless the method needs the number of examples anyhow.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple, Protocol, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from polyfed.core.algorithm import Client
from polyfed.core.examples.examples import Examples, split_into_batches
from polyfed.core.examples.pytree import call_network
from polyfed.core.nn.memory_format import to_preferred_memory_format
from polyfed.core.nn.module_cache import CachedModule, cached_module, copy_trained_weights_and_buffers, fill_module
from polyfed.core.seeds import torch_generator
from polyfed.core.state_dict import StateDict

BufferPolicy = Literal["average", "local", "recompute"]


class HasBufferPolicy(Protocol):
    """Describes a method by the two members that decide which buffers a client sends: `buffers` and `scalars_needed`."""

    @property
    def buffers(self) -> BufferPolicy:
        """Returns "average" (clients send buffers), "local" (keep them) or "recompute" (from training data)."""
        ...

    @property
    def scalars_needed(self) -> frozenset[str]:
        """Returns the names of the scalars that the server reads from each client's reply."""
        ...


def tensors_to_send(state: StateDict, buffers: Mapping[str, Tensor], policy: BufferPolicy) -> dict[str, Tensor]:
    """Returns the tensors that a client sends of its state dict: parameters, and buffers under "average"."""
    return {name: tensor for name, tensor in state.items() if policy == "average" or name not in buffers}


def load_client_model(
    client: Client, weights: StateDict, client_state: Mapping[str, StateDict], policy: BufferPolicy
) -> CachedModule:
    """Fills the client's cached network with the server's weights, and buffers as `policy` says.

    Under "local" the buffers are the client's own; before its first round, those of the network as built.
    """
    assert client.model is not None  # `federate` has checked that the method's clients have one
    return fill_client_model(cached_module(client.model, client.train.device), weights, client_state, policy)


def fill_client_model(
    net: CachedModule, weights: StateDict, client_state: Mapping[str, StateDict], policy: BufferPolicy
) -> CachedModule:
    """Fills a cached network with the server's weights, and with buffers from server or client as `policy` says."""
    local_buffers = net.buffers if policy == "recompute" or not client_state.get("buffers") else client_state["buffers"]
    fill_module(net.module, weights, {} if policy == "average" else local_buffers)
    if policy != "average":
        return net
    return replace(net, counters={n: weights[n] for n in net.buffers if not weights[n].is_floating_point()})


class SentTensorsAndClientState(NamedTuple):
    """Holds the tensors that a client sends after training, and the private state that the client keeps."""

    tensors: dict[str, Tensor]
    client_state: dict[str, StateDict]


def extract_sent_tensors_and_client_state(net: CachedModule, method: HasBufferPolicy) -> SentTensorsAndClientState:
    """Copies the tensors that a client sends, and its private state: its buffers under "local".

    Buffers of whole numbers are returned as the client received them, unless the method needs the number of examples.
    """
    state, policy = copy_trained_weights_and_buffers(net.module), method.buffers
    local_buffers = {name: state[name] for name in net.buffers} if policy == "local" else {}
    tensors = tensors_to_send(state, net.buffers, policy)
    if "num_examples" not in method.scalars_needed:
        tensors |= {name: buffer.clone() for name, buffer in net.counters.items()}
    return SentTensorsAndClientState(tensors, {"buffers": local_buffers} if local_buffers else {})


def recompute_norm_statistics_if_needed(
    net: CachedModule, client: Client, client_state: Mapping[str, StateDict], policy: BufferPolicy
) -> nn.Module:
    """Returns the network, with norm statistics recomputed from training data if the policy says so.

    Under "recompute" the BatchNorm statistics are computed from the client's training data; under "local" only for a client
    that has no buffers of its own because it has not taken part in a round.
    """
    if policy == "recompute" or (policy == "local" and not client_state.get("buffers")):
        recompute_norm_statistics(net.module, client.train)
    return net.module


def load_model_for_eval(
    client: Client, weights: StateDict, client_state: Mapping[str, StateDict], policy: BufferPolicy
) -> nn.Module:
    """Returns the client's cached network for evaluation, filled with weights, and buffers as `policy` says.

    See `load_client_model` and `recompute_norm_statistics_if_needed`.
    """
    return recompute_norm_statistics_if_needed(
        load_client_model(client, weights, client_state, policy), client, client_state, policy
    )


def recompute_norm_statistics(module: nn.Module, examples: Examples) -> None:
    """Sets the running mean and variance of each norm layer to those of its inputs over all examples.

    Inside the network each layer normalises by its batch, as in training. Batches are drawn in a fixed shuffled order, so
    that sorted data do not bias them. A network without running statistics is left alone.
    """
    norms = [m for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]
    if not norms:
        return
    all_moments = [_InputMoments() for _ in norms]
    hooks = [norm.register_forward_pre_hook(moments) for norm, moments in zip(norms, all_moments, strict=True)]
    module.eval()
    for norm in norms:
        norm.train()
    rows = torch.randperm(len(examples), generator=torch_generator(0)).to(examples.device)
    try:
        with torch.no_grad():
            for batch in split_into_batches(rows, 128, at_least_two=True):
                call_network(module, to_preferred_memory_format(module, examples.batch(batch)[0]))
    finally:
        module.eval()
        for hook in hooks:
            hook.remove()
    for norm, moments in zip(norms, all_moments, strict=True):
        moments.write_statistics(norm)


@final
class _InputMoments:
    """Sums up a normalisation layer's inputs and their squares, in float64 on the CPU."""

    def __init__(self) -> None:
        self.number = 0
        self.total: Tensor = torch.zeros(())
        self.squares: Tensor = torch.zeros(())

    def __call__(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach().to("cpu", torch.float64)
        if isinstance(norm, _InstanceNorm):  # its running statistics are the mean of each example's statistics
            self.number += len(x)
            self.total = self.total + x.flatten(2).mean(2).sum(0)
            self.squares = self.squares + x.flatten(2).var(2).sum(0)
        else:
            x = x.transpose(0, 1).flatten(1)
            self.number += x.shape[1]
            self.total = self.total + x.sum(1)
            self.squares = self.squares + x.square().sum(1)

    def write_statistics(self, norm: _NormBase) -> None:
        """Writes the mean and unbiased variance of the inputs seen so far into the layer.

        A layer that saw no input, or a single value a channel, which has no variance, keeps its statistics.
        """
        if (
            self.number < (1 if isinstance(norm, _InstanceNorm) else 2)
            or norm.running_mean is None
            or norm.running_var is None
        ):
            return
        mean = self.total / self.number
        variance = self.squares / self.number
        if not isinstance(norm, _InstanceNorm):
            variance = (variance - mean.square()).clamp_(min=0) * self.number / max(self.number - 1, 1)
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)
