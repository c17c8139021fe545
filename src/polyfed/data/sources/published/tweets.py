"""Reads Sentiment140: tweets with positive or negative sentiment, and the users who wrote them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import check_regular_file, expand_user_path
from polyfed.core.io.text.number_format import format_row_numbers
from polyfed.data.formats.files import (
    Table,
    column_to_numpy,
    first_existing_column_name,
    read_parquet_splits,
    resolve_existing_path,
    select_discrete_columns_without_missing,
)
from polyfed.data.formats.hub import load_hub_tables
from polyfed.data.formats.text import Vocabulary, build_vocabulary, load_vocabulary
from polyfed.data.pooled_dataset import PooledDataset, Source, build_pooled_dataset, move_test_set_to_train

_ADVICE = (
    "give path=... (--data.path) with the folder of training.1600000.processed.noemoticon.csv (the published file) or of "
    "Parquet files train-*.parquet and test-*.parquet"
)
_FIELDS = ("sentiment", "id", "date", "query", "user", "text")


@final
@dataclass(frozen=True)
class Sentiment140(Source):
    """Reads 1.6 million tweets, labelled positive or negative by their emoticons (Go et al. 2009).

    The column "user" is for the partition `Natural`, if the files contain it.

    Inputs are token numbers, int64, shape (num, length); classes are negative (0) and positive (1). Neutral tweets (the
    published test set has some) are left out.

    Args:
        path: the published CSV file or its folder, or a Parquet file or folder with columns text and label (or sentiment);
            None for the Hugging Face hub.
        vocabulary: JSON file of the vocabulary: read if it exists, else built from the training texts and written.
        vocabulary_size: number of most frequent tokens that get a number, with padding and unknown.
        length: tokens of a tweet; longer ones are cut, shorter ones padded. 25 as in LEAF and FedHeNN.
        deal_test: the published test tweets go to clients too; there is then no common test set. The vocabulary is still
            built from the training texts alone.
    """

    path: str | None = None
    vocabulary: str | None = None
    vocabulary_size: int = 10_000
    length: int = 25
    deal_test: bool = False

    def __post_init__(self) -> None:
        if self.vocabulary_size < 3:
            raise UserError(f"vocabulary_size must be at least 3, got {self.vocabulary_size}")
        if self.length < 1:
            raise UserError(f"length must be at least 1 token, got {self.length}")

    def load(self) -> PooledDataset:
        """Reads the tweets, and encodes their tokens as integers; raises a `UserError` if they cannot be read."""
        tables = self._load_tables()
        texts, labels, columns = _read_tweets(tables["train"])
        vocabulary = self._load_or_build_vocabulary(texts)
        test, test_columns = None, dict[str, NDArray[Any]]()
        if "test" in tables:
            test_texts, test_labels, test_columns = _read_tweets(tables["test"])
            test = vocabulary.encode(test_texts, self.length), test_labels
        train = vocabulary.encode(texts, self.length), labels
        pool = build_pooled_dataset(
            train, test, ("negative", "positive"), columns=columns, vocabulary=vocabulary.tokens
        )
        return move_test_set_to_train(pool, test_columns) if self.deal_test else pool

    def _load_tables(self) -> dict[str, Table]:
        if self.path is None:
            # The main branch holds a loading script, which `datasets` no longer runs; this revision holds Parquet.
            return load_hub_tables("stanfordnlp/sentiment140", _ADVICE, revision="refs/pr/6")
        path = resolve_existing_path(self.path, _ADVICE)
        tables = _read_csv_splits(path) or ({} if path.suffix == ".csv" else read_parquet_splits(path))
        if "train" not in tables:
            raise UserError(f"{self.path!r} holds no training tweets; {_ADVICE}")
        return tables

    def _load_or_build_vocabulary(self, texts: list[str]) -> Vocabulary:
        file = None if self.vocabulary is None else expand_user_path(self.vocabulary, "--data.vocabulary")
        if file is not None and file.exists():
            return load_vocabulary(file)
        vocabulary = build_vocabulary(texts, self.vocabulary_size)
        if file is not None:
            vocabulary.save(file)
        return vocabulary


def _read_csv_splits(path: Path) -> dict[str, Table]:
    import pyarrow
    import pyarrow.csv

    files = {"train": [path], "test": []} if path.is_file() and path.suffix == ".csv" else {}
    if path.is_dir():
        files = {"train": sorted(path.glob("train*.csv")), "test": sorted(path.glob("test*.csv"))}
    # The published files have no header and are in Latin-1.
    options = pyarrow.csv.ReadOptions(column_names=_FIELDS, encoding="latin1")
    try:
        return {
            split: pyarrow.csv.read_csv(check_regular_file(split_files[0]), read_options=options)
            for split, split_files in files.items()
            if split_files
        }
    except pyarrow.ArrowException as error:
        raise UserError(
            f"{str(path)!r} is not the published CSV with the columns {', '.join(_FIELDS)} and no header ({error})"
        ) from error


def _read_tweets(table: Table) -> tuple[list[str], Tensor, dict[str, NDArray[Any]]]:
    """Returns text, label (0 or 1), and columns that may identify users, of all tweets except neutral ones."""
    text, label = (
        first_existing_column_name(table, ("text",), "text"),
        first_existing_column_name(table, ("label", "sentiment"), "label"),
    )
    values = column_to_numpy(table, label)
    # Published labels are 0 negative, 2 neutral, 4 positive; other copies have 0 and 1.
    positive = 4 if (values > 1).any() else 1
    if len(odd := np.flatnonzero(~np.isin(values, (0, 2, positive)))):
        raise UserError(
            f"column {label!r} must hold 0 and 4 (2 is neutral) or 0 and 1, and does not in {format_row_numbers(odd)}"
        )
    rows = np.flatnonzero(values != 2)
    columns = {
        name: column[rows]
        for name, column in select_discrete_columns_without_missing(table, (text, label, "id", "date", "query")).items()
    }
    texts = table.column(text).to_pylist()
    return [str(texts[row]) for row in rows], torch.from_numpy((values[rows] == positive).astype(np.int64)), columns
