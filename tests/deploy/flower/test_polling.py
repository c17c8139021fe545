"""How often the other side is asked for what comes when it comes."""

import itertools

import pytest

from polyfed.deploy.flower.polling import PollingSchedule


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def asked_at(pace, clock, comes):
    """When it was asked, until it came."""
    found, began = [], clock.now
    while True:
        clock.now += pace.seconds_until_poll()
        found.append(clock.now - began)
        if clock.now - began >= comes:
            pace.record_arrival_time()
            return found
        pace.record_empty_poll()


def test_an_idle_site_asks_every_few_seconds_only():
    clock = Clock()
    pace = PollingSchedule(clock=clock)
    times = asked_at(pace, clock, 3600.0)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert max(gaps) == pytest.approx(3.0)
    assert len(times) < 1300
    assert all(gap <= max(0.2, 0.05 * at) + 1e-9 for at, gap in zip(times, gaps, strict=False))


@pytest.mark.parametrize("comes", [0.5, 2.0, 20.0, 600.0])
def test_a_message_waits_for_little_and_rounds_alike_for_few_questions(comes):
    clock = Clock()
    pace = PollingSchedule(clock=clock)
    for _ in range(5):
        pace.start_new_wait()
        times = asked_at(pace, clock, comes)
        assert times[-1] - comes <= max(0.2, min(3.0, 0.05 * comes)) + 1e-9
    early, late = 0.75 * comes / 3.0, 0.25 * comes / min(3.0, max(0.2, 0.05 * 0.75 * comes))
    assert len(times) <= 3 + early + late


def test_rounds_that_become_shorter_are_seen_soon():
    """The first within seconds; then waits are halved from round to round, since nobody knows when the answer was there."""
    clock = Clock()
    pace = PollingSchedule(clock=clock)
    waited = []
    for comes in (600.0, 600.0, 600.0, *[0.5] * 8):
        pace.start_new_wait()
        waited.append(asked_at(pace, clock, comes)[-1] - comes)
    assert waited[3] <= 2.5 + 1e-9
    assert all(later <= earlier + 0.2 for earlier, later in itertools.pairwise(waited[3:]))
    assert max(waited[-3:]) <= 0.2 + 1e-9


def test_time_without_a_run_is_no_time_of_a_round():
    """A site that has waited for an hour is not slow to see the second message."""
    clock = Clock()
    pace = PollingSchedule(clock=clock)
    asked_at(pace, clock, 3600.0)
    for comes in (0.5, 0.5, 0.5):
        pace.start_new_wait()
        assert asked_at(pace, clock, comes)[-1] - comes <= 0.2 + 1e-9
