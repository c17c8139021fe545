"""How often to ask for what comes when it comes: Flower tells nobody that a message is there."""

import time
from collections import deque
from collections.abc import Callable
from typing import final

_EARLY_SHARE, _HISTORY_LENGTH = 0.75, 3  # of the time that it took before, so many times


@final
class PollingSchedule:
    """When to ask next. The first question waits for three quarters of the shortest of the last three times; then a wait is
    a twentieth of the time that has passed, so that waiting costs little of a long round, and an idle site asks every few
    seconds. Of what was there at the first question nobody knows for how long: it counts half.

    Args:
        shortest, longest: seconds between two questions.
        share: of the time that has passed.
        clock: seconds that pass.

    >>> now = iter([0.0, 0.0, 0.0, 0.0, 10.0, 10.0, 10.0, 10.0]).__next__
    >>> pace = PollingSchedule(clock=now)
    >>> pace.seconds_until_poll(), pace.record_miss(), pace.seconds_until_poll()
    (0.0, None, 0.2)
    >>> pace.record_miss(), pace.seconds_until_poll(), pace.record_arrival()
    (None, 0.5, None)
    """

    def __init__(
        self,
        shortest: float = 0.2,
        longest: float = 3.0,
        share: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shortest, self._longest, self._share, self._clock = shortest, longest, share, clock
        self._durations: deque[float] = deque(maxlen=_HISTORY_LENGTH)
        self.restart()

    def restart(self) -> None:
        """What is asked for will come some time from now."""
        self._since = self._clock()
        self._misses = 0
        self._next_poll = self._since + self._expected_idle_seconds(0.0)

    def record_miss(self) -> None:
        """It had not come."""
        now = self._clock()
        passed = now - self._since
        self._misses += 1
        self._next_poll = now + max(
            self._expected_idle_seconds(passed), min(self._longest, max(self._shortest, self._share * passed))
        )

    def record_arrival(self) -> None:
        """It has come."""
        self._durations.append((self._clock() - self._since) / (1 if self._misses else 2))

    def seconds_until_poll(self) -> float:
        """Seconds until the next question."""
        return max(0.0, self._next_poll - self._clock())

    def _expected_idle_seconds(self, passed: float) -> float:
        """Seconds in which it will not come, as things went before; never more than the longest wait."""
        if len(self._durations) < _HISTORY_LENGTH:
            return 0.0
        return max(0.0, min(self._longest, _EARLY_SHARE * min(self._durations) - passed))
