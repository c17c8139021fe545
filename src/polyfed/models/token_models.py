"""Builds networks that return logits for each token of a sequence: a bidirectional LSTM, and a small transformer."""

from typing import final

import torch
from torch import Tensor, nn

from polyfed.core.errors import UserError
from polyfed.models.building.shapes import check_input_shape, check_sizes
from polyfed.models.vit import TransformerBlock

_NEVER = -1e9  # added to the logits of attention; finite, so that a text of padding alone gives numbers


@final
class LSTMTagger(nn.Module):
    """Classifies each token by an embedding, two LSTMs (one from each end of the text), and a linear layer on both
    outputs.

    Padding at the end changes no output of a real token. `lstm_tagger` explains the layers and their sizes.

    Shapes: (batch, length) int64 or int32 tokens to (batch, length, num_classes) logits.
    """

    def __init__(self, num_classes: int, vocabulary: int, embedding: int, hidden: int, padding: int) -> None:
        super().__init__()
        self.padding = padding
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=padding)
        self.forwards = nn.LSTM(embedding, hidden, batch_first=True)
        self.backwards = nn.LSTM(embedding, hidden, batch_first=True)
        self.fc = nn.Linear(2 * hidden, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of each token, for a batch of token sequences."""
        # The real tokens in reverse, and padding where it is: position k of a text of n tokens is n − 1 − k.
        real = (tokens != self.padding).long()
        position = (real * 0 + 1).cumsum(1) - 1
        end = (real * (position + 1)).amax(1, keepdim=True)
        reverse = torch.where(position < end, end - 1 - position, position)
        ahead, _ = self.forwards(self.embedding(tokens))
        back, _ = self.backwards(self.embedding(tokens.gather(1, reverse)))
        back = back.gather(1, reverse.unsqueeze(-1).expand_as(back))
        return self.fc(torch.cat([ahead, back], dim=-1))  # type: ignore[no-any-return]


@final
class TinyTransformer(nn.Module):
    """Classifies each token by an embedding, learnt positions, transformer blocks, a LayerNorm and a linear layer.

    Nobody attends to padding. `tiny_transformer` explains the layers and their sizes.

    Shapes: (batch, length) int64 or int32 tokens to (batch, length, num_classes) logits; also shorter ones.
    """

    def __init__(
        self, length: int, num_classes: int, *, vocabulary: int, dim: int, depth: int, num_heads: int, mlp_dim: int,
        causal: bool, padding: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.causal, self.padding = causal, padding
        self.embedding = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(TransformerBlock(dim, num_heads, mlp_dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of each token, for a batch of token sequences."""
        is_padding = tokens == self.padding
        place = (is_padding.long() * 0 + 1).cumsum(1) - 1
        hidden = self.embedding(tokens) + self.positions(place)
        is_forbidden = is_padding[:, None, None, :]
        if self.causal:
            is_forbidden = is_forbidden | (place[:, None, None, :] > place[:, None, :, None])
        bias = is_forbidden.to(hidden.dtype) * _NEVER
        for block in self.blocks:
            hidden = block(hidden, bias)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


def lstm_tagger(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    vocabulary: int = 10_000,
    embedding: int = 32,
    hidden: int = 32,
    padding: int = 0,
) -> LSTMTagger:
    """Builds a network of two LSTMs, one from each end of the text, that classifies each token; all default sizes are
    polyfed's choice.

    Args:
        input_shape: (length,) of the token sequences; any length works.
        num_classes: number of outputs for each token.
        vocabulary: number of different tokens in the data, padding included.
        embedding: width of the learnt embedding.
        hidden: width of each LSTM.
        padding: token that fills up short texts at their end.

    Shapes: (batch, length) int64 or int32 tokens to (batch, length, num_classes) logits.

    Raises:
        UserError: a size is not a positive whole number, the shape is not (length,), or padding is outside the vocabulary.

    >>> lstm_tagger((7,), 5, vocabulary=9)(torch.zeros(2, 7, dtype=torch.int64)).shape
    torch.Size([2, 7, 5])
    """
    sizes = {"vocabulary": vocabulary, "embedding": embedding, "hidden": hidden}
    _check_arguments("lstm_tagger", input_shape, num_classes, sizes, padding)
    return LSTMTagger(num_classes, vocabulary, embedding, hidden, padding)


def tiny_transformer(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    vocabulary: int = 10_000,
    dim: int = 32,
    depth: int = 2,
    num_heads: int = 4,
    mlp_dim: int = 64,
    causal: bool = False,
    padding: int = 0,
) -> TinyTransformer:
    """Builds a transformer that classifies each token, small enough to train on a CPU; all default sizes are polyfed's
    choice.

    Args:
        input_shape: (length,) of the token sequences; shorter ones work too.
        num_classes: number of outputs for each token.
        vocabulary: number of different tokens in the data, padding included.
        dim: width of the tokens.
        depth: number of transformer blocks.
        num_heads: number of attention heads; must divide `dim`.
        mlp_dim: hidden width of each block's MLP.
        causal: a token attends only to those before it and itself, as the prediction of the next token needs.
        padding: token that fills up short texts.

    Shapes: (batch, length) int64 or int32 tokens to (batch, length, num_classes) logits.

    Raises:
        UserError: a size is not a positive whole number, the shape is not (length,), `num_heads` does not divide `dim`, or
            padding is outside the vocabulary.

    >>> tiny_transformer((7,), 9, vocabulary=9, causal=True)(torch.zeros(2, 7, dtype=torch.int64)).shape
    torch.Size([2, 7, 9])
    """
    sizes = {"vocabulary": vocabulary, "dim": dim, "depth": depth, "num_heads": num_heads, "mlp_dim": mlp_dim}
    length = _check_arguments("tiny_transformer", input_shape, num_classes, sizes, padding)
    if dim % num_heads:
        raise UserError(f"tiny_transformer: num_heads={num_heads} does not divide dim={dim}; choose numbers that fit")
    return TinyTransformer(
        length, num_classes, vocabulary=vocabulary, dim=dim, depth=depth, num_heads=num_heads, mlp_dim=mlp_dim,
        causal=causal, padding=padding,
    )  # fmt: skip


def _check_arguments(
    model: str, input_shape: tuple[int, ...], num_classes: int, sizes: dict[str, int], padding: int
) -> int:
    """Checks the arguments of a network for tokens, and returns the length of its sequences."""
    shape = check_input_shape(model, input_shape, num_classes)
    if len(shape) != 1:
        raise UserError(
            f"{model} takes token sequences: input_shape must be (length,), got {shape}; for images use a CNN"
        )
    for name, size in sizes.items():
        check_sizes(model, name, [size])
    if not 0 <= padding < sizes["vocabulary"]:
        raise UserError(
            f"{model}: padding={padding} is not a token of a vocabulary of {sizes['vocabulary']}; give one from 0"
        )
    return shape[0]
