"""Computes mean and spread of a column of numbers from counts and sums, if need be without numbers that mean "not
measured".
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

FAR = 3.0
"""Sets the standard deviations from which a number is far from the other values."""
GRADES = 5.0
"""Sets the distance within which whole numbers may be grades of one scale."""


@final
@dataclass(frozen=True)
class NumberStatistics:
    """Holds the counts and sums of one column of numbers, at one site or over all sites.

    Args:
        count: values.
        total: their sum.
        center: a number near the mean of all sites.
        squares: sum of the squared differences from `center`.
        codes: how many values are equal to each number that often stands for "not measured"; -1 for too few to be shown.
        is_whole: whether all values are whole numbers.

    >>> NumberStatistics(3.0, 6.0, 0.0, 14.0).mean, round(NumberStatistics(3.0, 6.0, 0.0, 14.0).sd, 3)
    (2.0, 0.816)
    """

    count: float
    total: float
    center: float
    squares: float
    codes: Mapping[float, float] = field(default_factory=dict)
    is_whole: bool = False

    @property
    def mean(self) -> float:
        """Returns the mean of the values; NaN if there are none."""
        return self.total / self.count if self.count > 0 else math.nan

    @property
    def sd(self) -> float:
        """Returns the standard deviation; 0 if the values are equal up to rounding, NaN if there are none."""
        if self.count <= 0:
            return math.nan
        variance = max(self.squares / self.count - (self.mean - self.center) ** 2, 0.0)
        is_rounding = variance <= 1e-12 * max(self.squares / self.count, (self.mean - self.center) ** 2, 1e-300)
        return 0.0 if is_rounding else math.sqrt(variance)

    def code_share(self, code: float) -> float:
        """Returns the share of the values, from 0 to 1, that are equal to `code`."""
        return max(self.codes.get(code, 0.0), 0.0) / self.count if self.count > 0 else 0.0

    def without(self, codes: Iterable[float]) -> "NumberStatistics":
        """Returns the statistics of the remaining values after leaving out those equal to one of `codes`."""
        removed = {code: max(self.codes.get(code, 0.0), 0.0) for code in codes}
        return NumberStatistics(
            max(self.count - sum(removed.values()), 0.0),
            self.total - sum(code * count for code, count in removed.items()),
            self.center,
            max(self.squares - sum((code - self.center) ** 2 * count for code, count in removed.items()), 0.0),
            {code: 0.0 if code in removed else count for code, count in self.codes.items()},
            self.is_whole,
        )

    def codes_far_from_other_values(self, min_share: float) -> list[float]:
        """Returns the `codes` far from all other values that a share `min_share` of values are.

        >>> NumberStatistics(5.0, 300.0, 75.0, 5629.0, {0.0: 1.0}).codes_far_from_other_values(0.1)
        [0.0]
        """
        return [
            code
            for code, count in self.codes.items()
            if count > 0 and self.code_share(code) >= min_share and self.without([code]).is_far_from_mean(code)
        ]

    def is_far_from_mean(self, code: float) -> bool:
        """Returns whether `code` is far enough from other values to stand for a missing one.

        That is more than `FAR` standard deviations from the mean and, among whole numbers, at least `GRADES` away.
        """
        distance = abs(code - self.mean)
        return self.count > 1 and distance > FAR * self.sd > 0 and not (self.is_whole and distance < GRADES)
