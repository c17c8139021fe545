"""Defines `ClientTimes`: how long each client's local update takes in simulated time, and when it ends."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from polyfed.core.algorithm import Algorithm
from polyfed.core.training.config import LocalTraining
from polyfed.simulation.scheduling.timing.availability import AvailabilityTrace
from polyfed.simulation.scheduling.timing.rates import ClientRates


@final
@dataclass(frozen=True)
class ClientTimes:
    """Computes when clients finish their local updates, in simulated seconds.

    An update takes (examples that the client goes through)/speed + (bytes of message and reply)/bandwidth seconds in
    which the client is available.

    Args:
        algorithm: the method, which decides how many examples a client goes through in an update.
        num_examples: numbers of training examples by client; 1 where it is not known.
        speeds: examples in a second.
        bandwidths: bytes in a second; None: messages take no time.
        traces: when each client is available; None: always.
        files_digest: a hash of the files that were read; "" if there are none.
    """

    algorithm: Algorithm[Any, Any]
    num_examples: Mapping[str, int]
    speeds: ClientRates
    bandwidths: ClientRates | None = None
    traces: Mapping[str, AvailabilityTrace] | None = None
    files_digest: str = ""

    def seconds_of_update(self, client: str, num_bytes: int = 0) -> float:
        """Returns how long a client's update takes while it is available, with `num_bytes` of message and reply."""
        seconds = count_examples_of_update(self.algorithm, self.num_examples.get(client, 1)) / self.speeds.rate_of(
            client
        )
        return seconds if self.bandwidths is None else seconds + num_bytes / self.bandwidths.rate_of(client)

    def finish_time(self, client: str, start: float, num_bytes: int = 0) -> float:
        """Returns the time at which a client that is called at `start` has sent its reply."""
        seconds = self.seconds_of_update(client, num_bytes)
        return start + seconds if self.traces is None else self.traces[client].finish_time(start, seconds)

    def is_available(self, client: str, time: float) -> bool:
        """Returns True if a client is available at this time."""
        return self.traces is None or self.traces[client].is_available(time)

    def next_available(self, client: str, time: float) -> float:
        """Returns the first time from `time` on at which a client is available."""
        return time if self.traces is None else self.traces[client].next_available(time)


def count_examples_of_update(algorithm: Algorithm[Any, Any], num_examples: int) -> int:
    """Returns how many examples a client with so many training examples goes through in one local update.

    With `local_epochs`, that is each example once an epoch; with `local_steps`, the minibatches of so many steps. Methods
    that train in several parts, such as FedRep's head and body, go through all parts' epochs.

    >>> from polyfed.algorithms import FedAvg, FedRep
    >>> [count_examples_of_update(method, 100) for method in (FedAvg(local_epochs=2), FedAvg(local_steps=5, batch_size=8))]
    [200, 40]
    >>> count_examples_of_update(FedRep(local_epochs=10, body_epochs=1), 100)
    1100
    """
    if not isinstance(algorithm, LocalTraining):
        return num_examples
    if algorithm.local_steps is not None:
        return algorithm.local_steps * (min(algorithm.batch_size, num_examples) or num_examples)
    fits = [getattr(algorithm, name, None) for name in algorithm.private_fits or ("local_epochs",)]
    epochs = sum(algorithm.local_epochs if count is None else count for count in fits)
    return num_examples * epochs
