"""What happens to a network's buffers (BatchNorm's running statistics): one explicit policy per method.

`average`: they travel with the weights; running mean and variance are averaged, counters take the maximum.
`local`: they stay with the client, as part of its private state.
`recompute`: they neither travel nor stay; before evaluation they are estimated anew on the client's training data.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from polyfed.algorithm import Client
from polyfed.data.examples import Examples, split_rows
from polyfed.scratch import Scratch, fill, scratch
from polyfed.tree import Tree

Policy = Literal["average", "local", "recompute"]


def travelling(state: Tree, buffer_names: Mapping[str, Tensor], policy: Policy) -> dict[str, Tensor]:
    """The tensors of a state dict that are sent under `policy`: the parameters, and with "average" the buffers."""
    return {name: tensor for name, tensor in state.items() if policy == "average" or name not in buffer_names}


def receive(client: Client, model: Tree, mine: Mapping[str, Tree], policy: Policy) -> Scratch:
    """The client's scratch module filled with what came down and, under "local", with its own buffers (as built, before
    its first round)."""
    assert client.model is not None  # `federate` has checked that the method's clients have one
    own = scratch(client.model, client.train.x.device)
    kept = own.buffers if policy == "recompute" or not mine.get("buffers") else mine["buffers"]
    fill(own.module, model, {} if policy == "average" else kept)
    return own


def give_back(own: Scratch, policy: Policy) -> tuple[dict[str, Tensor], dict[str, Tree]]:
    """After training: copies of the tensors to send and, under "local", the private state that keeps the buffers."""
    state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in own.module.state_dict().items()}
    kept = {name: state[name] for name in own.buffers} if policy == "local" else {}
    return travelling(state, own.buffers, policy), ({"buffers": kept} if kept else {})


def ready(own: Scratch, client: Client, mine: Mapping[str, Tree], policy: Policy) -> nn.Module:
    """The filled module, ready to be evaluated: BatchNorm statistics are estimated on the client's training data under
    "recompute", and under "local" for a client that has none of its own yet because it never took part."""
    if policy == "recompute" or (policy == "local" and not mine.get("buffers")):
        recompute(own.module, client.train)
    return own.module


def recompute(module: nn.Module, examples: Examples, batch_size: int = 128) -> None:
    """Sets every BatchNorm's running statistics to their average over `examples`, in place; other modules run as in
    evaluation. Does nothing to a network without BatchNorm."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    module.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # PyTorch's sign for a cumulative average
        norm.train()
    rows = torch.arange(len(examples), device=examples.x.device)
    try:
        with torch.no_grad():
            for batch in split_rows(rows, batch_size, at_least_two=True):
                module(examples.batch(batch)[0])
    finally:
        module.eval()
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
