"""Calls a user's model factory, and brings the network that it builds to the CPU."""

import torch
from torch import nn

from polyfed.core.algorithm import Architecture
from polyfed.core.errors import UserError
from polyfed.core.nn.tied_weights import first_name_by_alias, retie_buffers
from polyfed.core.nn.unwrap import unwrap_module_and_its_layers
from polyfed.core.seeds import temporary_rng_seed


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
            raise UserError(f"the model factory {name} failed: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"the model factory {name} must return a torch.nn.Module, got {type(module).__name__}")
    return unwrap_module_and_its_layers(module)
