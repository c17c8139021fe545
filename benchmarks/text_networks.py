"""Small networks that read the characters of tweets, in any width: recurrent, convolutional, transformer."""

import torch
from pyarrow import parquet
from torch import Tensor, nn

LENGTH, LETTERS = 80, 64


class Recurrent(nn.Module):
    """Reads characters by a recurrent layer."""

    def __init__(self, kind: type[nn.RNNBase], width: int = 32) -> None:
        super().__init__()
        self.letters, self.layer = nn.Embedding(LETTERS, width), kind(width, width, batch_first=True)
        self.out = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layer(self.letters(x))[0].mean(1))
        return out


class Convolutional(nn.Module):
    """Reads characters by convolutions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.letters, self.first = nn.Embedding(LETTERS, width), nn.Conv1d(width, width, 5, padding=2)
        self.second, self.out = nn.Conv1d(width, width, 5, padding=2), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.letters(x).transpose(1, 2)
        out: Tensor = self.out(self.second(self.first(x).relu()).relu().mean(2))
        return out


class Transformer(nn.Module):
    """Reads characters by torch's transformer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.letters, self.positions = nn.Embedding(LETTERS, width), nn.Parameter(0.02 * torch.randn(1, LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.encoder(self.letters(x) + self.positions).mean(1))
        return out


def encode(text: str) -> list[int]:
    """The first characters of a tweet as numbers, 0 after its end."""
    alphabet = "\x00abcdefghijklmnopqrstuvwxyz0123456789 .,!?'\"@#:;()-_/&*$%+="
    return [max(0, alphabet.find(c)) for c in text.lower()[:LENGTH].ljust(LENGTH, "\x00")]


def load_tweets(path: str) -> tuple[Tensor, Tensor]:
    table = parquet.read_table(path).to_pydict()
    return torch.tensor([encode(text) for text in table["text"]]), (torch.tensor(table["label"]) > 0).long()
