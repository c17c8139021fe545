"""Splits text into tokens, and encodes tokens as integers with a vocabulary, at a fixed length."""

import html
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import read_file
from polyfed.core.io.values.validation import parse_json, validation_error

PADDING, UNKNOWN = "<pad>", "<unk>"
_TOKEN = re.compile(r"https?://\S+|www\.\S+|@\w+|\w+(?:['’]\w+)*|[^\w\s]")


def tokenise(text: str) -> list[str]:
    """Splits text into lower-case words, numbers and marks; links become "http", mentions "@user".

    >>> tokenise("@anna Don't miss https://x.org/y, OK?")
    ['@user', "don't", 'miss', 'http', 'ok', '?']
    """
    return [_mask_token(token) for token in _TOKEN.findall(_clean_text(text))]


@final
@dataclass(frozen=True)
class Vocabulary:
    """Maps tokens to integers; 0 is padding, and 1 stands for every unknown token.

    >>> vocabulary = Vocabulary((PADDING, UNKNOWN, "good", "day"))
    >>> vocabulary.encode(["Good evening", "day day day day"], length=3)
    tensor([[2, 1, 0],
            [3, 3, 3]])
    """

    tokens: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.tokens[:2] != (PADDING, UNKNOWN) or len(set(self.tokens)) != len(self.tokens):
            start = "so" if self.tokens[:2] == (PADDING, UNKNOWN) else "with others"
            raise UserError(
                f"a vocabulary must start with {PADDING!r} and {UNKNOWN!r} and have no token twice; this one starts {start} "
                f"and has {len(self.tokens) - len(set(self.tokens))} repeated tokens"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def _number_of_token(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    def encode(self, texts: Sequence[str], length: int) -> Tensor:
        """Encodes the first `length` tokens of each text, padded with 0: int64, (num_texts, length)."""
        numbers, unknown = self._number_of_token, 1
        out = np.zeros((len(texts), length), np.int64)
        for row, text in zip(out, texts, strict=True):
            matches = islice(_TOKEN.finditer(_clean_text(text)), length)
            codes = [numbers.get(_mask_token(match.group()), unknown) for match in matches]
            row[: len(codes)] = codes
        return torch.from_numpy(out)

    def save(self, file: Path) -> None:
        """Writes the tokens to a file as a JSON list.

        Raises:
            UserError: the file cannot be written.
        """
        try:
            file.write_text(json.dumps(self.tokens, ensure_ascii=False, indent=0), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write the vocabulary to {str(file)!r} ({error.strerror})") from error


def build_vocabulary(texts: Iterable[str], size: int) -> Vocabulary:
    """Builds a vocabulary of padding, unknown token, and the `size` − 2 most frequent tokens.

    >>> build_vocabulary(["b a", "a c"], size=4).tokens
    ('<pad>', '<unk>', 'a', 'b')
    """
    counts = Counter(token for text in texts for token in tokenise(text))
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return Vocabulary((PADDING, UNKNOWN, *ranked[: size - 2]))


def load_vocabulary(file: Path) -> Vocabulary:
    """Reads a vocabulary from a file that `Vocabulary.save` wrote.

    Raises:
        UserError: the file is not a JSON list of strings, or not a vocabulary.
    """
    try:
        tokens = parse_json(read_file(file))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read a vocabulary from {str(file)!r} ({error})") from error
    if validation_error(tokens, list[str]):
        raise UserError(f"{str(file)!r} is not a vocabulary: it must hold a JSON list of strings")
    return Vocabulary(tuple(tokens))


def _clean_text(text: str) -> str:
    return html.unescape(text).lower()  # the published tweets have &amp; for &


def _mask_token(token: str) -> str:
    """Replaces a mention or link, which may identify a person, by a common token; returns other tokens unchanged."""
    if token[0] == "@" and len(token) > 1:
        return "@user"
    if token == "http" or token.startswith(("http://", "https://", "www.")):
        return "http"
    return token
