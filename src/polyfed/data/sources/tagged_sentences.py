"""Builds sentences with tagged names of persons and places, without a download: from a small grammar, in which each
site has words that others lack.
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.seeds import derive_seed
from polyfed.data.pooled_dataset import PooledDataset, Source
from polyfed.tasks import Tokens

TAGS = ("O", "B-person", "I-person", "B-place", "I-place")
_FIRST = "ada ben carla david elena felix greta hugo ines jonas katrin liam maria nils olga pablo"
_LAST = "adler berg costa dubois ek fischer garcia holm ivanov jansen keller lopez moreau novak olsen"
_BOTH = "lincoln jordan florence austin sydney victoria"  # persons or places: the context decides
_PLACES = "athens bern cairo dublin essen geneva hanoi izmir jena kyoto lima malmo"
_TWO_WORDS = ("new york", "los angeles", "san diego", "cape town")
_TEMPLATES = (
    "patient P was brought from L by P",
    "doctor P works in L",
    "P lives in L and was born in L",
    "call P or P before the visit",
    "the clinic in L sent a letter to P",
    "P was moved to L today",
    "no beds in L until monday",
    "seen by doctor P and nurse P",
    "P travelled from L to L",
    "results for P are in",
)
_COMMON = tuple(sorted({word for text in _TEMPLATES for word in text.split()} - {"P", "L"}))
_NAMES = " ".join((_FIRST, _LAST, _BOTH, _PLACES, *_TWO_WORDS)).split()
VOCABULARY = ("[PAD]", *_COMMON, *dict.fromkeys(_NAMES))

_TRIES = 100  # draws for each sentence


@final
@dataclass(frozen=True)
class TaggedSentences(Source):
    """Builds sentences in which names of persons and places are tagged ("O", "B-kind", "I-kind"), from a grammar that
    differs between sites.

    Each site uses six of ten sentences and two thirds of the names; some names are a person or a place by the context
    alone. The column "site" is for the partition `Natural`. The set is a stand-in, made by polyfed, for notes that cannot be
    shared.

    Inputs are token numbers, int64, shape (num, length), filled up with 0; targets are the tags of the tokens.

    Args:
        sites: number of sites.
        sentences: of each site.
        seed: of the draws.

    Raises:
        UserError: a number is below 1, or there are not so many different sentences.

    >>> pool = TaggedSentences(sites=2, sentences=5).load()
    >>> pool.task.tags, len(pool.train), pool.columns["site"].tolist()[4:6]
    (('O', 'B-person', 'I-person', 'B-place', 'I-place'), 10, ['site-0', 'site-1'])
    """

    sites: int = 4
    sentences: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sites < 1 or self.sentences < 1:
            raise UserError(f"sites and sentences must be at least 1, got {self.sites} and {self.sentences}")

    def load(self) -> PooledDataset:
        """Builds the sentences and tags of all sites, one site after the other."""
        pairs: dict[tuple[int, ...], tuple[int, ...]] = {}
        names = []
        for site in range(self.sites):
            rng = np.random.default_rng(derive_seed(self.seed, "tagged sentences", str(site)))
            words = {kind: _draw_some_words(rng, all_words, 2 / 3) for kind, all_words in _words_by_kind().items()}
            templates = _draw_some_words(rng, _TEMPLATES, 0.6)
            end = len(pairs) + self.sentences
            for _ in range(_TRIES * self.sentences):
                if len(pairs) == end:
                    break
                tokens, tags = _draw_sentence(rng, templates, words)
                pairs.setdefault(tokens, tags)  # no sentence twice, so that none is trained on and tested
            if len(pairs) < end:
                raise UserError(f"sites={self.sites}, sentences={self.sentences}: the grammar has too few; give less")
            names += [f"site-{site}"] * self.sentences
        length = max(map(len, pairs))
        x, y = (
            torch.zeros(len(pairs), length, dtype=torch.int64),
            torch.full((len(pairs), length), Tokens().ignore_index),
        )
        for row, (tokens, tags) in enumerate(pairs.items()):
            x[row, : len(tokens)], y[row, : len(tags)] = torch.tensor(tokens), torch.tensor(tags)
        columns = {"site": np.array(names)}
        return PooledDataset(Examples(x, y), None, TAGS, Tokens(tags=TAGS), columns, VOCABULARY)


def _words_by_kind() -> dict[str, tuple[str, ...]]:
    first, last, place = (text.split() for text in (f"{_FIRST} {_BOTH}", _LAST, f"{_PLACES} {_BOTH}"))
    return {"first": tuple(first), "last": tuple(last), "place": (*place, *_TWO_WORDS)}


def _draw_some_words(rng: np.random.Generator, words: tuple[str, ...], share: float) -> tuple[str, ...]:
    return tuple(words[i] for i in sorted(rng.permutation(len(words))[: round(share * len(words))]))


def _draw_sentence(
    rng: np.random.Generator, templates: tuple[str, ...], words: dict[str, tuple[str, ...]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the tokens of one sentence and their tags."""
    tokens: list[int] = []
    tags: list[int] = []
    for slot in templates[rng.integers(len(templates))].split():
        if slot == "P":
            names = [words["first"][rng.integers(len(words["first"]))]]
            names += [words["last"][rng.integers(len(words["last"]))]] * int(rng.random() < 0.6)
        else:
            names = words["place"][rng.integers(len(words["place"]))].split() if slot == "L" else [slot]
        first = {"P": 1, "L": 3}.get(slot, 0)
        tokens += [VOCABULARY.index(name) for name in names]
        tags += [first + (place > 0) for place in range(len(names))]
    return tuple(tokens), tuple(tags)
