"""Decides how often to ask Flower for a message, since Flower does not notify the receiver when one arrives."""

import time
from collections import deque
from collections.abc import Callable
from typing import final

_LONGEST_SECONDS = 3.0  # between two polls
_SHARE_OF_PASSED_TIME = 0.05  # that a further wait takes
_EARLY_SHARE, _HISTORY_LENGTH = 0.75, 3  # first poll after this share of the shortest of so many durations


@final
class PollingSchedule:
    """Computes the wait before each request for a message from how long earlier ones took.

    The first poll waits for three quarters of the shortest of the last three waiting times. Each further wait is a twentieth
    of the time passed, so that polling adds little to a long round, and an idle site polls every few seconds. If the first
    poll finds the message, it may have arrived at any time before, so that half of the waiting time counts.

    Args:
        shortest_seconds: the shortest wait between two polls, in seconds.
        clock: returns the time in seconds.

    >>> now = iter([0.0, 0.0, 0.0, 0.0, 10.0, 10.0, 10.0, 10.0]).__next__
    >>> pace = PollingSchedule(clock=now)
    >>> pace.seconds_until_poll(), pace.record_empty_poll(), pace.seconds_until_poll()
    (0.0, None, 0.2)
    >>> pace.record_empty_poll(), pace.seconds_until_poll(), pace.record_arrival_time()
    (None, 0.5, None)
    """

    def __init__(self, shortest_seconds: float = 0.2, clock: Callable[[], float] = time.monotonic) -> None:
        self._shortest, self._clock = shortest_seconds, clock
        self._durations: deque[float] = deque(maxlen=_HISTORY_LENGTH)
        self.start_new_wait()

    def start_new_wait(self) -> None:
        """Begins the wait for the next message."""
        self._since = self._clock()
        self._misses = 0
        self._next_poll = self._since + self._expected_idle_seconds(0.0)

    def record_empty_poll(self) -> None:
        """Records that Flower had no message when it was asked for one."""
        now = self._clock()
        passed = now - self._since
        self._misses += 1
        self._next_poll = now + max(
            self._expected_idle_seconds(passed),
            min(_LONGEST_SECONDS, max(self._shortest, _SHARE_OF_PASSED_TIME * passed)),
        )

    def record_arrival_time(self) -> None:
        """Records that the awaited message has arrived, and how long it took to arrive."""
        self._durations.append((self._clock() - self._since) / (1 if self._misses else 2))

    def seconds_until_poll(self) -> float:
        """Returns how many seconds to wait before the next request for a message."""
        return max(0.0, self._next_poll - self._clock())

    def _expected_idle_seconds(self, passed: float) -> float:
        """Returns for how long no message is expected, judged by earlier waits; at most the longest wait."""
        if len(self._durations) < _HISTORY_LENGTH:
            return 0.0
        return max(0.0, min(_LONGEST_SECONDS, _EARLY_SHARE * min(self._durations) - passed))
