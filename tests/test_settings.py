"""Settings: values outside their range are refused with the value, and cohort sizes are as documented."""

import pytest

from polyfed.errors import UserError
from polyfed.settings import Settings


@pytest.mark.parametrize("field", ["rounds", "evaluate_every", "checkpoint_every", "min_replies"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_counts(field, value):
    with pytest.raises(UserError, match=rf"{field} must be a whole number of at least 1, got {value!r}"):
        Settings(**{field: value})


@pytest.mark.parametrize("value", [0, 0.0, -1, -0.5, 1.5, True, float("nan"), "0.5", None])
def test_sample(value):
    with pytest.raises(UserError, match=rf"sample must be a fraction above 0 .*, got {value!r}"):
        Settings(sample=value)


@pytest.mark.parametrize("value", [1.0, True, "0", None])
def test_seed(value):
    with pytest.raises(UserError, match=f"seed must be a whole number, got {value!r}"):
        Settings(seed=value)


@pytest.mark.parametrize("value", [-1, 1.5, True, "two", None])
def test_workers(value):
    with pytest.raises(UserError, match=f"workers must be 'auto' or a number of processes from 0, got {value!r}"):
        Settings(workers=value)


def test_names():
    with pytest.raises(UserError, match="unknown engine 'pol'; did you mean pool"):
        Settings(engine="pol")
    with pytest.raises(UserError, match="unknown on_error 'ignore'; Choices: raise, skip"):
        Settings(on_error="ignore")
    with pytest.raises(UserError, match="engine='pool' needs at least one worker"):
        Settings(engine="pool", workers=0)


@pytest.mark.parametrize(
    ("sample", "clients", "size"),
    [
        (1.0, 7, 7),
        (1, 7, 1),
        (7, 7, 7),
        (0.5, 7, 4),
        (0.1, 7, 1),
        (0.01, 7, 1),
        (0.25, 10, 3),
        (0.1, 100, 10),
        (0.29, 100, 29),
    ],
)
def test_cohort_size(sample, clients, size):
    assert Settings(sample=sample).cohort_size(clients) == size


def test_cohorts_that_cannot_be():
    with pytest.raises(UserError, match="sample=8 asks for more clients than the 7 there are"):
        Settings(sample=8).cohort_size(7)
    with pytest.raises(UserError, match="min_replies=3 is more than the 2 clients of a round"):
        Settings(sample=2, min_replies=3).cohort_size(7)
