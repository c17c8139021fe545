"""What happens to a network's buffers (BatchNorm's running statistics): one explicit policy per method.

`average`: they travel with the weights and are averaged as these are; whole numbers (counters) are rounded.
`local`: they stay with the client, as part of its private state.
`recompute_norm_statistics`: they neither travel nor stay; before evaluation they are estimated anew on the client's
training data.

How many batches a client has trained on tells how many examples it has. So whole numbers go up as they came down, unless the
method needs the number of examples anyhow.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Protocol, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from polyfed.core.algorithm import Client
from polyfed.core.examples.examples import Examples, split_into_batches
from polyfed.core.examples.pytree import call_network
from polyfed.core.nn.memory_format import to_preferred_memory_format
from polyfed.core.nn.module_cache import CachedModule, cached_module, fill_module, trainable_state
from polyfed.core.seeds import torch_generator
from polyfed.core.state_dict import StateDict

BufferPolicy = Literal["average", "local", "recompute"]


class HasBufferPolicy(Protocol):
    """What decides which buffers a client sends: the policy of a method, and the scalars that its server half needs."""

    @property
    def buffers(self) -> BufferPolicy:
        """The policy."""
        ...

    @property
    def scalars_needed(self) -> frozenset[str]:
        """Scalars of a reply that the server half uses."""
        ...


def shared_tensors(state: StateDict, buffer_names: Mapping[str, Tensor], policy: BufferPolicy) -> dict[str, Tensor]:
    """The tensors of a state dict that are sent under `policy`: the parameters, and with "average" the buffers."""
    return {name: tensor for name, tensor in state.items() if policy == "average" or name not in buffer_names}


def load_client_model(
    client: Client, model: StateDict, client_state: Mapping[str, StateDict], policy: BufferPolicy
) -> CachedModule:
    """The client's scratch module filled with what came down and, under "local", with its own buffers (as built, before
    its first round)."""
    assert client.model is not None  # `federate` has checked that the method's clients have one
    return fill_client_model(cached_module(client.model, client.train.device), model, client_state, policy)


def fill_client_model(
    net: CachedModule, model: StateDict, client_state: Mapping[str, StateDict], policy: BufferPolicy
) -> CachedModule:
    """The same for a scratch module that the caller already has."""
    local_buffers = net.buffers if policy == "recompute" or not client_state.get("buffers") else client_state["buffers"]
    fill_module(net.module, model, {} if policy == "average" else local_buffers)
    if policy != "average":
        return net
    return replace(net, counters={n: model[n] for n in net.buffers if not model[n].is_floating_point()})


def extract_update(net: CachedModule, method: HasBufferPolicy) -> tuple[dict[str, Tensor], dict[str, StateDict]]:
    """After training: copies of the tensors to send and, under "local", the private state that keeps the buffers. Buffers of
    whole numbers are sent as they came, unless the method needs the number of examples."""
    state, policy = trainable_state(net.module), method.buffers
    local_buffers = {name: state[name] for name in net.buffers} if policy == "local" else {}
    tensors = shared_tensors(state, net.buffers, policy)
    if "num_examples" not in method.scalars_needed:
        tensors |= {name: buffer.clone() for name, buffer in net.counters.items()}
    return tensors, ({"buffers": local_buffers} if local_buffers else {})


def prepare_for_eval(
    net: CachedModule, client: Client, client_state: Mapping[str, StateDict], policy: BufferPolicy
) -> nn.Module:
    """The filled module, ready to be evaluated: BatchNorm statistics are estimated on the client's training data under
    "recompute", and under "local" for a client that has none of its own yet because it never took part."""
    if policy == "recompute" or (policy == "local" and not client_state.get("buffers")):
        recompute_norm_statistics(net.module, client.train)
    return net.module


def load_model_for_eval(
    client: Client, model: StateDict, client_state: Mapping[str, StateDict], policy: BufferPolicy
) -> nn.Module:
    """Fill the client's scratch module with `model`, as `load_client_model`, and return it as `prepare_for_eval` does."""
    return prepare_for_eval(load_client_model(client, model, client_state, policy), client, client_state, policy)


def recompute_norm_statistics(module: nn.Module, examples: Examples, batch_size: int = 128) -> None:
    """Sets the running statistics of every norm layer that keeps them to mean and variance of its inputs over all
    `examples`, in place. Inside the network each layer normalises by its batch, as in training; batches are drawn in a
    fixed shuffled order, so that sorted data do not bias them. Does nothing to a network without such layers."""
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
            for batch in split_into_batches(rows, batch_size, at_least_two=True):
                call_network(module, to_preferred_memory_format(module, examples.batch(batch)[0]))
    finally:
        module.eval()
        for hook in hooks:
            hook.remove()
    for norm, moments in zip(norms, all_moments, strict=True):
        moments.write_statistics(norm)


@final
class _InputMoments:
    """Sums over the inputs of one norm layer, in float64 on the CPU."""

    def __init__(self) -> None:
        self.number = 0
        self.total: Tensor = torch.zeros(())
        self.squares: Tensor = torch.zeros(())

    def __call__(self, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach().to("cpu", torch.float64)
        if isinstance(norm, _InstanceNorm):  # its statistics are means over examples of each example's own
            self.number += len(x)
            self.total = self.total + x.flatten(2).mean(2).sum(0)
            self.squares = self.squares + x.flatten(2).var(2).sum(0)
        else:
            x = x.transpose(0, 1).flatten(1)
            self.number += x.shape[1]
            self.total = self.total + x.sum(1)
            self.squares = self.squares + x.square().sum(1)

    def write_statistics(self, norm: _NormBase) -> None:
        """Puts mean and unbiased variance into the layer; one that was never reached, or by a single value a channel, which
        has no variance, keeps what it has."""
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
