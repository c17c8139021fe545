"""Counts named entities in sequences of tags ("O", "B-kind", "I-kind"), and scores predicted entities by F1."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyfed.core.errors import UserError

Integers = NDArray[np.int64]


@final
class EntityCounts(NamedTuple):
    """Holds for each document its correctly predicted, predicted, and true entities, each (n,)."""

    correct: Integers
    predicted: Integers
    true: Integers


@final
@dataclass(frozen=True)
class BioTags:
    """Reads entities from tags of the form "O", "B-kind" and "I-kind", which mark tokens outside, at the beginning and
    inside of an entity.

    An "I-kind" that follows no tag of its kind begins an entity, as in the evaluation of CoNLL 2003.

    Args:
        names: the tag of each class.

    Raises:
        UserError: a name has another form.

    >>> BioTags(("O", "B-place", "I-place")).count(np.array([1, 2, 0, 1]), np.array([1, 0, 0, 1]), np.array([0, 0, 1, 1]), 2)
    EntityCounts(correct=array([0, 1]), predicted=array([1, 1]), true=array([1, 1]))
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in self.names:
            if name != "O" and (name[:2] not in ("B-", "I-") or len(name) < 3):
                raise UserError(
                    f"tags: {name!r} is not a BIO tag; give 'O', 'B-kind' and 'I-kind', or names of which none begins with "
                    "'B-' for classes that are not parts of entities"
                )

    def count(self, predicted: Integers, true: Integers, documents: Integers, num_documents: int) -> EntityCounts:
        """Counts documents' correct (kind and both ends), predicted and true entities.

        Args:
            predicted, true: classes of all tokens, one document after the other, shape (tokens,).
            documents: the document of each token, ascending.
            num_documents: number of documents.
        """
        found_starts, found_ends, found_kinds = self._find_entities(predicted, documents)
        true_starts, true_ends, true_kinds = self._find_entities(true, documents)
        _, i, j = np.intersect1d(found_starts, true_starts, assume_unique=True, return_indices=True)
        is_right = (found_ends[i] == true_ends[j]) & (found_kinds[i] == true_kinds[j])
        starts = (found_starts[i][is_right], found_starts, true_starts)
        return EntityCounts(*(np.bincount(documents[some], minlength=num_documents) for some in starts))

    def _find_entities(self, classes: Integers, documents: Integers) -> tuple[Integers, Integers, Integers]:
        """Returns the first and last token and the kind of each entity."""
        kinds = sorted({name[2:] for name in self.names} - {""})
        kind = np.array([kinds.index(name[2:]) if name[2:] else -1 for name in self.names])[classes]
        is_first_tag = np.array([name.startswith("B-") for name in self.names])[classes]
        continues = np.zeros(len(classes), dtype=np.bool_)
        continues[1:] = ~is_first_tag[1:] & (kind[1:] == kind[:-1]) & (documents[1:] == documents[:-1])
        is_inside = kind >= 0
        starts = np.flatnonzero(is_inside & ~continues)
        is_last = is_inside.copy()
        is_last[:-1] &= ~continues[1:]
        return starts, np.flatnonzero(is_last), kind[starts]


@final
@dataclass(frozen=True)
class EntityF1:
    """Scores predicted tags by the F1 of entities over all documents: 2·correct / (predicted + true), each a number of
    entities.

    It is NaN if there are no entities. Objects are equal if their tags are, so that a resumed run finds the same metric.

    Args:
        names: the tag of each class; empty for a task that was given none, which has no entities to score.
    """

    names: tuple[str, ...]

    def __call__(self, outputs: Tensor, targets: Tensor) -> float:
        """Returns F1 for logits (n, T, V) and targets (n, T); NaN if a logit that counts is."""
        is_nan = (outputs if outputs.dim() == 3 else outputs.unsqueeze(1)).isnan().any(2).expand_as(targets)
        if bool(is_nan[targets >= 0].any()):
            return float("nan")
        counts = self.count(outputs, targets)
        total = int(counts.predicted.sum() + counts.true.sum())
        return 2 * int(counts.correct.sum()) / total if total else float("nan")

    def count(self, outputs: Tensor, targets: Tensor) -> EntityCounts:
        """Counts documents' correct, predicted and true entities, without ignored tokens.

        Raises:
            UserError: the task names no BIO tags.
        """
        if not has_entities(self.names):
            raise UserError(
                "entity_f1 needs the names of the tags, such as pf.tasks.Tokens(tags=('O', 'B-place', 'I-place'))"
            )
        is_counted = targets >= 0
        predicted = (outputs if outputs.dim() == 3 else outputs.unsqueeze(1)).argmax(2).expand_as(targets)
        documents, _ = is_counted.nonzero(as_tuple=True)
        predicted_tags, true_tags = (
            np.asarray(tags[is_counted].numpy(), dtype=np.int64) for tags in (predicted, targets)
        )
        return BioTags(self.names).count(predicted_tags, true_tags, np.asarray(documents.numpy()), len(targets))


def has_entities(names: Sequence[str]) -> bool:
    """Returns whether tags of these names mark entities ("B-kind", "I-kind")."""
    return any(name.startswith("B-") for name in names)
