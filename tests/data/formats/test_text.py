"""Tokeniser and vocabulary."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyfed.core.errors import UserError
from polyfed.data.formats.text import PADDING, UNKNOWN, Vocabulary, build_vocabulary, load_vocabulary, tokenise


def test_tweets_become_words_with_people_and_links_masked():
    assert tokenise("RT @Bob: I'm SO happy!! http://t.co/xy &amp; www.x.org :)") == [
        *["rt", "@user", ":", "i'm", "so", "happy", "!", "!", "http", "&", "http", ":", ")"]
    ]
    assert tokenise("") == tokenise(" \n") == []
    assert tokenise("naïve 日本 @ 5") == ["naïve", "日本", "@", "5"]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(max_size=40), max_size=8), st.integers(3, 30), st.integers(1, 10))
def test_encoding_has_one_length_and_known_numbers(texts, size, length):
    vocabulary = build_vocabulary(texts, size)
    assert len(vocabulary) <= size
    codes = vocabulary.encode(texts, length)
    assert codes.shape == (len(texts), length)
    assert codes.dtype == torch.int64
    for text, row in zip(texts, codes.tolist(), strict=True):
        tokens = tokenise(text)[:length]
        assert row[len(tokens) :] == [0] * (length - len(tokens))
        assert [vocabulary.tokens[code] for code in row[: len(tokens)]] == [
            token if token in vocabulary.tokens else UNKNOWN for token in tokens
        ]


def test_vocabulary_counts_and_survives_a_file(tmp_path):
    vocabulary = build_vocabulary(["b é b", "c a é", "日"], 5)
    assert vocabulary.tokens == (PADDING, UNKNOWN, "b", "é", "a")
    vocabulary.save(tmp_path / "words.json")
    assert load_vocabulary(tmp_path / "words.json") == vocabulary


def test_bad_vocabularies_are_refused(tmp_path):
    file = tmp_path / "words.json"
    file.write_text("{}")
    with pytest.raises(UserError, match="it must hold a JSON list of strings"):
        load_vocabulary(file)
    file.write_text("[")
    with pytest.raises(UserError, match="cannot read a vocabulary"):
        load_vocabulary(file)
    file.write_text('["a", "b"]')
    with pytest.raises(UserError, match="must start with '<pad>' and '<unk>'"):
        load_vocabulary(file)
    with pytest.raises(UserError, match="1 repeated tokens"):
        Vocabulary((PADDING, UNKNOWN, "a", "a"))
    with pytest.raises(UserError, match="cannot write the vocabulary"):
        Vocabulary((PADDING, UNKNOWN)).save(tmp_path / "no" / "words.json")
