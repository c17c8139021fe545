"""Defines a method's card: its name, summary, paper and settings, from which polyfed makes lists, documents, recipes
and tests.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

_SUMMARY_LENGTH = 60
"""The most characters of a summary: with the longest name it is one line of a terminal."""


@final
@dataclass(frozen=True, kw_only=True)
class MethodCard:
    """Describes a method for the lists, documents, recipes and tests that polyfed makes.

    `python tools/update_lists.py` makes the registry, the lists in README and `docs/`, and the recipe `leaderboard` from
    the cards; `polyfed list` and the tests read them. The family is the folder of `algorithms` in which the
    method's file lies.

    Args:
        name: the method's name in the registry, in files and on the command line, such as "fedavg".
        summary: what the method does, in at most 60 characters, without a full stop.
        paper: authors and year of the paper, such as "Li et al. 2020"; empty if there is none.
        evaluated: which network is evaluated, in a few words.
        small: hyper-parameters with which a test trains the method in a moment.
        published: groups (top-level keys) of the client state that the method sends by its nature, as FedFomo does the
            client's own model. Nothing else of the client state may be in a reply.
        leaderboard: by variant of the recipe `leaderboard` the hyper-parameters that differ from the defaults; "*" holds
            for all other variants. A variant that is not listed leaves the method out. None is {"*": {}}. A variant with
            several architectures leaves out a method that needs one.
        stacked: True if `--engine cohort` trains the clients of a round as one stacked network.

    Raises:
        ValueError: a name or summary of another form.

    >>> card = MethodCard(name="median", summary="The median of the clients' models", evaluated="the median")
    >>> card.fields_of_leaderboard_variant("digits-0.1")
    {}
    """

    name: str
    summary: str
    paper: str = ""
    evaluated: str
    small: Mapping[str, Any] = field(default_factory=dict)
    published: frozenset[str] = frozenset()
    leaderboard: Mapping[str, Mapping[str, Any]] | None = None
    stacked: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise ValueError(
                f"name must be of small letters, digits and underscores, such as 'fedavg', got {self.name!r}"
            )
        if not 0 < len(self.summary) <= _SUMMARY_LENGTH or self.summary.endswith(".") or "\n" in self.summary:
            raise ValueError(f"{self.name}: summary must be one line of 1 to {_SUMMARY_LENGTH} characters without a full "
                             f"stop, got {len(self.summary)}: {self.summary!r}")  # fmt: skip

    def fields_of_leaderboard_variant(self, variant: str) -> Mapping[str, Any] | None:
        """Returns the fields that a leaderboard variant changes; None if the variant leaves this method out."""
        by_variant = {"*": {}} if self.leaderboard is None else self.leaderboard
        return by_variant.get(variant, by_variant.get("*"))


def card_of_method(method: Any) -> MethodCard | None:
    """Returns the card of a method or its class; None for one that appears in no list of polyfed.

    >>> from polyfed.algorithms import FedAvg
    >>> card_of_method(FedAvg).summary
    "The average of the clients' models, weighted by examples"
    """
    card: MethodCard | None = getattr(method, "card", None)
    return card
