"""Settings: values outside their range are refused with the value, and cohort sizes are as documented."""

import re

import pytest

from polyfed.core.errors import UserError
from polyfed.simulation.settings import Settings


@pytest.mark.parametrize("field", ["rounds", "evaluate_every", "checkpoint_every", "min_replies"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_counts(field, value):
    with pytest.raises(UserError, match=rf"{field} must be a whole number of at least 1, got {value!r}"):
        Settings(**{field: value})


@pytest.mark.parametrize("value", [0, 0.0, -1, -0.5, 1.5, True, float("nan"), "0.5", None])
def test_sample(value):
    with pytest.raises(UserError, match=rf"clients_per_round must be a fraction above 0 .*, got {value!r}"):
        Settings(clients_per_round=value)


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
    with pytest.raises(UserError, match="unknown on_error 'ignore'; choices: raise, skip"):
        Settings(on_error="ignore")
    with pytest.raises(UserError, match="engine='pool' needs at least one worker"):
        Settings(engine="pool", workers=0)
    with pytest.raises(UserError, match="engine='ray' needs at least one worker"):
        Settings(engine="ray", workers=0)


@pytest.mark.parametrize(
    "value", ["", "cluster", "10.0.0.1", "host:port", "ray://host:10001", "host:123456", None, 6379]
)
def test_ray_address(value):
    with pytest.raises(UserError, match=re.escape(f"ray_address must be 'local', 'auto' or HOST:PORT, got {value!r}")):
        Settings(ray_address=value)


@pytest.mark.parametrize("value", ["local", "auto", "10.0.0.1:6379", "head.cluster-1:6379", "[fd00::1]:6379"])
def test_ray_addresses(value):
    assert Settings(engine="ray", ray_address=value).ray_address == value


@pytest.mark.parametrize("value", [-0.5, 1.5, True, "1", None, float("nan"), float("inf")])
def test_gpus_per_worker(value):
    sentence = f"gpus_per_worker must be a fraction from 0 to 1 or a number of GPUs, got {value!r}"
    with pytest.raises(UserError, match=re.escape(sentence)):
        Settings(gpus_per_worker=value)


def test_devices_of_ray():
    with pytest.raises(UserError, match="engine='ray' takes no device, got 'cuda'; gpus_per_worker says"):
        Settings(engine="ray", device="cuda")
    with pytest.raises(UserError, match=r"device='cpu' and gpus_per_worker=0.5 contradict one another"):
        Settings(engine="ray", device="cpu", gpus_per_worker=0.5)
    assert Settings(engine="ray", gpus_per_worker=2).gpus_per_worker == 2


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
    assert Settings(clients_per_round=sample).count_round_clients(clients) == size


def test_cohorts_that_cannot_be():
    with pytest.raises(UserError, match="clients_per_round=8 asks for more clients than the 7 there are"):
        Settings(clients_per_round=8).count_round_clients(7)
    with pytest.raises(UserError, match="min_replies=3 is more than the 2 clients of a round"):
        Settings(clients_per_round=2, min_replies=3).count_round_clients(7)
