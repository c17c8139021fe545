"""Draws the public examples on which all clients compare their representations in a round: rows of a public pool, or
noise (FedHeNN, section 3.3)."""

import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.examples.pytree import input_spec_of
from polyfed.core.seeds import derive_seed, torch_generator


def draw_public_rows(seed: int, round_number: int, pool_size: int, num_rows: int) -> Tensor:
    """Draws a round's public rows without replacement: int32, (num_rows,), or (pool_size,) if fewer.

    Args:
        seed: seed of the run.
        round_number: number of the round, counted from 1.
        pool_size: number of examples in the pool.
        num_rows: L, the number of rows to draw; all if the pool has fewer.

    >>> draw_public_rows(0, 1, pool_size=10, num_rows=10).sort().values.tolist() == list(range(10))
    True
    """
    generator = torch_generator(derive_seed(seed, round_number, "rad"))
    return torch.randperm(pool_size, generator=generator)[:num_rows].to(torch.int32)


def noise_like(examples: Examples, num_examples: int, seed: int) -> Examples:
    """Returns random examples of the shapes and types of a client's inputs, equal for equal ones.

    Args:
        examples: the client's examples; their transform is applied to the noise, too.
        num_examples: number of noise examples.
        seed: seed of the noise.

    Returns:
        Examples with uniform bytes for images stored as bytes, standard normal numbers for floats, and labels 0.

    Raises:
        UserError: inputs are integers, such as the tokens of a text, for which noise makes no sense.

    >>> noise_like(Examples(torch.zeros(2, 3), torch.zeros(2)), 5, seed=0).x.shape
    torch.Size([5, 3])
    """
    generator, device = torch_generator(seed), examples.device

    def noise(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype == torch.uint8:
            return torch.randint(256, (num_examples, *shape), generator=generator, dtype=torch.uint8).to(device)
        if dtype.is_floating_point:
            return torch.randn((num_examples, *shape), generator=generator).to(device, dtype)
        raise UserError(
            f"rad='noise' generates images or floats, but these inputs are {dtype} (text?); use rad='public' with public "
            "examples (public=..., or --data.public_fraction)"
        )

    return Examples(
        input_spec_of(examples.x).build_inputs(noise),
        torch.zeros(num_examples, device=device),
        transform=examples.transform,
    )
