"""Builds the LSTM text classifier of FedHeNN's Sentiment140 experiments."""

from typing import final

from torch import Tensor, nn

from polyfed.core.errors import UserError
from polyfed.models.building.shapes import check_input_shape, check_sizes


@final
class LSTMClassifier(nn.Module):
    """Classifies token sequences by an embedding, an LSTM, and two fully connected layers on the LSTM's output at the
    last token that is not padding.

    `lstm` explains the layers and their sizes.

    Shapes: (batch, length) int64 or int32 tokens to (batch, num_classes) logits.
    """

    def __init__(
        self, num_classes: int, vocabulary: int, embedding: int, hidden: int, num_layers: int, fc: int, padding: int
    ) -> None:
        super().__init__()
        self.padding = padding
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=padding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers, batch_first=True)
        self.fc1 = nn.Linear(hidden, fc)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(fc, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of a batch of token sequences, shape (batch, classes)."""
        outputs, _ = self.lstm(self.embedding(tokens))
        # A text ends at its last token that is not padding, on whichever side the padding is; an empty one ends at the
        # first.
        real = (tokens != self.padding).long()
        position = (real * 0 + 1).cumsum(1)
        end = (real * position).amax(1, keepdim=True).clamp(min=1)
        last = (outputs * (position == end).unsqueeze(-1)).sum(1)
        return self.fc2(self.relu(self.fc1(last)))  # type: ignore[no-any-return]


def lstm(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    vocabulary: int = 10_000,
    embedding: int = 64,
    hidden: int = 128,
    num_layers: int = 1,
    fc: int = 64,
    padding: int = 0,
) -> LSTMClassifier:
    """Builds a text classifier: an embedding, an LSTM of one or two layers, and two fully connected layers (FedHeNN,
    Makhija et al. 2022, section 4.1).

    Args:
        input_shape: (length,) of the token sequences, (25,) in the paper; any length works.
        num_classes: number of outputs.
        vocabulary: number of different tokens in the data, padding included (10,000: polyfed's choice).
        embedding: width of the learnt embedding (64: polyfed's choice; the released code has fixed 300-wide GloVe vectors).
        hidden: width of the LSTM (128: polyfed's choice).
        num_layers: number of LSTM layers (1 or 2: paper).
        fc: width of the first fully connected layer, and so of the representation (64: polyfed's choice).
        padding: token that fills up short texts.

    Shapes: (batch, length) int64 or int32 tokens to (batch, num_classes) logits.

    Raises:
        UserError: a size is not a positive whole number, the shape is not (length,), or padding is outside the
            vocabulary.

    >>> import torch
    >>> lstm((25,), 2, vocabulary=100, num_layers=2)(torch.zeros(4, 25, dtype=torch.int64)).shape
    torch.Size([4, 2])
    """
    shape = check_input_shape("lstm", input_shape, num_classes)
    if len(shape) != 1:
        raise UserError(f"lstm takes token sequences: input_shape must be (length,), got {shape}; for images use a CNN")
    sizes = {"vocabulary": vocabulary, "embedding": embedding, "hidden": hidden, "num_layers": num_layers, "fc": fc}
    for name, size in sizes.items():
        check_sizes("lstm", name, [size])
    if not 0 <= padding < vocabulary:
        raise UserError(f"lstm: padding={padding} is not a token of a vocabulary of {vocabulary}; give one from 0")
    return LSTMClassifier(num_classes, vocabulary, embedding, hidden, num_layers, fc, padding)
