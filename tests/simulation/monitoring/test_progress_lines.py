"""The lines of a log about a run."""

import io

import pytest

from polyfed.simulation.monitoring.progress import LineProgress


@pytest.mark.parametrize(
    ("rounds", "norms", "lines"), [(3, False, 3), (100, False, 100), (3000, False, 101), (150, True, 150)]
)
def test_many_rounds_have_a_hundred_lines_and_a_monitor_has_all(rounds, norms, lines):
    progress = LineProgress(stream := io.StringIO(), norms=norms)
    progress.start("fedavg", rounds, 0)
    for number in range(1, rounds + 1):
        progress.finish_round(
            {
                "round": number,
                "train_loss": 0.5,
                "seconds": 0.1,
                "bytes_down_total": 0,
                "bytes_up_total": 0,
                "clients": {},
            }
        )
    printed = stream.getvalue().splitlines()
    assert len(printed) == lines
    assert printed[0].startswith(f"fedavg: round 1/{rounds}, ")
    assert printed[-1].startswith(f"fedavg: round {rounds}/{rounds}, ")
    assert printed[-1].endswith("0 s left")
