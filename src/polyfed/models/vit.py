"""Builds a small vision transformer."""

from typing import Literal, final, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import UserError, did_you_mean
from polyfed.models.building.shapes import check_image_shape, check_sizes

Pool = Literal["mean", "cls"]


@final
class TransformerBlock(nn.Module):
    """Applies one pre-norm transformer layer: self-attention and a two-layer MLP, each added to its input.

    It does not use nn.TransformerEncoderLayer: here every weight belongs to a Linear or LayerNorm that is called, so that it
    can be traced, aggregated and generated, and evaluation takes the same path as training.

    Shapes: (batch, tokens, dim) to (batch, tokens, dim).
    """

    def __init__(self, dim: int, num_heads: int, mlp_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, mlp_dim)
        self.fc2 = nn.Linear(mlp_dim, dim)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns outputs in the shape of `x`; adds `bias` to attention's logits (−1e9 masks a token)."""
        query, key, value = (
            self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        )
        # Plain products rather than scaled_dot_product_attention, whose kernels have no second derivative and no vmap.
        logits = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        weights = (logits if bias is None else logits + bias).softmax(-1)
        x = x + self.proj((weights @ value).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))  # type: ignore[no-any-return]


@final
class VisionTransformer(nn.Module):
    """Classifies images by patch embedding, learnt positions, transformer blocks, a LayerNorm, the mean of the patches
    or a class token, and a linear layer.

    `vit` explains the layers and their sizes.

    Shapes: (batch, channels, height, width) floats to (batch, num_classes) logits.
    """

    def __init__(
        self,
        image: tuple[int, int, int],
        num_classes: int,
        *,
        patch: int,
        dim: int,
        depth: int,
        num_heads: int,
        mlp_dim: int,
        pool: Pool,
    ) -> None:
        super().__init__()
        num_patches = (image[1] // patch) * (image[2] // patch)
        self.pool = pool
        self.patches = nn.Conv2d(image[0], dim, patch, stride=patch)
        if pool == "cls":
            self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        num_tokens = num_patches + (pool == "cls")
        self.positions = nn.Parameter(0.02 * torch.randn(1, num_tokens, dim))
        self.blocks = nn.Sequential(*(TransformerBlock(dim, num_heads, mlp_dim) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of a batch of images, shape (batch, classes)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        if self.pool == "cls":
            tokens = torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        tokens = self.norm(self.blocks(tokens + self.positions))
        return self.head(tokens[:, 0] if self.pool == "cls" else tokens.mean(1))  # type: ignore[no-any-return]


def vit(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    patch: int = 4,
    dim: int = 64,
    depth: int = 2,
    num_heads: int = 4,
    mlp_dim: int = 128,
    pool: Pool = "mean",
) -> VisionTransformer:
    """Builds a vision transformer (Dosovitskiy et al. 2021) small enough to train on a CPU; all default sizes are
    polyfed's choice.

    FedHeNN names transformers as future work; this network is for federations of CNNs and transformers.

    Args:
        input_shape: (channels, height, width); height and width must be multiples of `patch`.
        num_classes: number of outputs.
        patch: side of the square patches (4 divides 8, 28 and 32).
        dim: width of the tokens.
        depth: number of transformer blocks.
        num_heads: number of attention heads; must divide `dim`.
        mlp_dim: hidden width of each block's MLP.
        pool: input of the linear layer: the mean over tokens, or a class token.

    Shapes: (batch, channels, height, width) floats to (batch, num_classes) logits.

    Raises:
        UserError: the image's sides are not multiples of `patch`, `num_heads` does not divide `dim`, `pool` is unknown, or
            a size is not a positive whole number.

    >>> vit((1, 8, 8), 10, dim=16)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    image = check_image_shape("vit", input_shape, num_classes)
    sizes = {"patch": patch, "dim": dim, "depth": depth, "num_heads": num_heads, "mlp_dim": mlp_dim}
    for name, size in sizes.items():
        check_sizes("vit", name, [size])
    if image[1] % patch or image[2] % patch:
        raise UserError(f"vit: patch={patch} does not divide images of {image[1]}x{image[2]}; choose a patch that does")
    if dim % num_heads:
        raise UserError(f"vit: num_heads={num_heads} does not divide dim={dim}; choose numbers that fit")
    if pool not in get_args(Pool):
        raise UserError(f"vit: pool={pool!r} is unknown; {did_you_mean(str(pool), get_args(Pool))}")
    return VisionTransformer(
        image, num_classes, patch=patch, dim=dim, depth=depth, num_heads=num_heads, mlp_dim=mlp_dim, pool=pool
    )
