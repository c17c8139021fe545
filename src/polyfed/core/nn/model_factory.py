"""Calls a user's model factory, and brings the network that it builds to the CPU, without wrappers such as those of
torch.compile and DataParallel.
"""

from types import MethodType

import torch
from torch import nn

from polyfed.core.algorithm import Architecture
from polyfed.core.errors import UserError, describe_exception
from polyfed.core.nn.tied_weights import first_name_by_alias, retie_buffers
from polyfed.core.seeds import temporary_rng_seed

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def call_model_factory(factory: Architecture, name: str, seed: int) -> nn.Module:
    """Calls a model factory and returns its network on the CPU, without wrappers; random weights depend on `seed` only.

    Raises:
        UserError: the factory fails, or does not return an `nn.Module`.
    """
    module = _call_with_seed(factory, name, seed, torch.device("cpu"))
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    elsewhere = [device for device in devices if device.type not in ("cpu", "meta")]
    if elsewhere:  # engines move networks; and weights may have been drawn there, without the seed
        module = _call_with_seed(factory, name, seed, elsewhere[0])
        aliases = first_name_by_alias(module)
        retie_buffers(module.to("cpu"), aliases)
    return module


def _call_with_seed(factory: Architecture, name: str, seed: int, device: torch.device) -> nn.Module:
    with temporary_rng_seed(seed, device):
        try:
            module = factory()
        except UserError:
            raise
        except Exception as error:
            if isinstance(factory, nn.Module):
                raise UserError(f"model must be a callable that builds a network, got the network {type(factory).__name__}; "
                                "write model=lambda: MyNet() instead of model=MyNet()") from error  # fmt: skip
            raise UserError(f"the model factory {name} failed: {describe_exception(error)}; "
                            "it is called without arguments, as lambda: MyNet(...)") from error  # fmt: skip
    if not isinstance(module, nn.Module):
        raise UserError(f"the model factory {name} must return a torch.nn.Module, got {type(module).__name__}")
    return unwrap_module_and_its_layers(module)


def unwrap_module_and_its_layers(module: nn.Module) -> nn.Module:
    """Returns the network inside a wrapper such as `DataParallel`, with its layers unwrapped in place.

    A wrapper computes what the network in it computes. But it adds a prefix to the names of tensors, so that the network
    would have another architecture than without it, and it hides the layers from hooks, with which methods look for a head
    or a representation. So networks run without wrappers, even if the user compiles them.


    >>> list(unwrap_module_and_its_layers(nn.Sequential(nn.DataParallel(nn.Linear(1, 1, bias=False)))).state_dict())
    ['0.weight']
    """
    module = _inner_module(module)
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue
        for mark in ("_compiled_call_impl", "_is_torch_compile"):  # of `part.compile()` and torch.compile(part)
            part.__dict__.pop(mark, None)
        if (original := getattr(part.forward, "_torchdynamo_orig_callable", None)) is not None:
            part.__dict__.pop("forward", None)
            if getattr(original, "__func__", None) is not type(part).forward:
                part.forward = original if hasattr(original, "__self__") else MethodType(original, part)
        for name, child in part._modules.items():
            if child is not None:
                part._modules[name] = _inner_module(child)
    return module


def _inner_module(module: nn.Module) -> nn.Module:
    while True:
        inner = module._modules.get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None
        inner = module.module if isinstance(module, _PARALLEL) else inner
        if inner is None:
            return module
        module = inner
