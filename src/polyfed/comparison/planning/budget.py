"""Defines the rule that selects the round at which each run is compared (the budget), and the mean score that a run
should reach (the target)."""

import math
from dataclasses import dataclass
from typing import final

from polyfed.core.errors import UserError, did_you_mean

BUDGET_KINDS = ("best", "steps", "bytes", "seconds")


@final
@dataclass(frozen=True)
class Budget:
    """Holds the rule for the round at which runs are compared: best, last, or last within a limit.

    Args:
        kind: "best", each at its best round by validation loss; "steps", after all rounds with the same local training;
            "bytes", down and up, or "seconds", of clients and server: where no more than `limit` is spent.
        limit: how many bytes or seconds; None takes what the cheapest run spends in all its rounds.

    Raises:
        UserError: an unknown kind, or a limit that is not positive.
    """

    kind: str = "best"
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in BUDGET_KINDS:
            raise UserError(f"unknown budget {self.kind!r}; {did_you_mean(self.kind, BUDGET_KINDS)}")
        if self.limit is not None and (self.kind in ("best", "steps") or not 0 < self.limit < math.inf):
            raise UserError(f"a budget is 'best', 'steps', or bytes or seconds with a positive limit, got {self}")

    def __str__(self) -> str:
        return self.kind if self.limit is None else f"{self.kind}={self.limit:g}"

    @property
    def determines_compared_round(self) -> bool:
        """Returns whether the budget alone says the round; "best" needs validation losses.

        With a fixed round, a method whose loss still falls is compared all the same.
        """
        return self.kind != "best"

    @classmethod
    def from_text(cls, text: str) -> "Budget":
        """Parses "best", "steps", "bytes", "seconds", "bytes=5e6" or "seconds=30".

        Raises:
            UserError: for any other text.

        >>> Budget.from_text("bytes=5e6")
        Budget(kind='bytes', limit=5000000.0)
        """
        kind, equals, limit = str(text).partition("=")
        try:
            return cls(kind, float(limit) if equals else None)
        except UserError:
            raise
        except ValueError:
            raise UserError(
                f"the limit of a budget must be a number, as in {kind}=1000000, got {str(text)!r}"
            ) from None


@final
@dataclass(frozen=True)
class ResultCriteria:
    """Holds the budget, which selects each run's round, and the target, a mean score to reach.

    Args:
        budget: the round at which each run is compared.
        target: the mean score to be reached; None takes what the reference method reaches with the same seed.

    Raises:
        UserError: a target that is not a score.
    """

    budget: Budget = Budget()
    target: float | None = None

    def __post_init__(self) -> None:
        if self.target is not None and not (isinstance(self.target, int | float) and math.isfinite(self.target)):
            raise UserError(f"a target is a mean score, a number such as 0.8, got {self.target!r}")

    def check_target(self, score_unit: str) -> None:
        """Raises a `UserError` if the target is no score in this unit, such as 80 for shares up to 1."""
        if self.target is not None and score_unit == "%" and self.target > 1:
            raise UserError(f"a target is a mean score, a share such as 0.8 and not 80, got {self.target!r}")
