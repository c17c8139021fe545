"""Settings of a run that no method changes."""

from dataclasses import dataclass
from typing import Literal, final

from polyfed.errors import UserError, nearest


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a federation is run.

    Args:
        rounds: communication rounds.
        seed: every random choice of the run derives from it.
        sample: clients that take part in a round: a fraction in (0, 1] (at least one client), or a whole number of
            clients. Note that 1.0 is everyone and 1 is one client.
        engine: "auto", "inprocess" or "pool".
        workers: processes of the pool, or "auto" for one per core; 0 runs in this process. Results do not depend on it.
        device: "auto", "cpu", "cuda", "cuda:N" or "mps".
        evaluate_every: rounds between evaluations of all clients' personal models; the last round is always evaluated.
        checkpoint_every: rounds between checkpoints; the last round always has one.
        on_error: "raise" ends the run at a client's failure, "skip" goes on without that client and records it.
        min_replies: a round with fewer valid replies ends the run.

    Raises:
        UserError: a value outside its range, with the value.

    >>> Settings(rounds=2, sample=0.25).cohort_size(10)
    3
    """

    rounds: int = 10
    seed: int = 0
    sample: int | float = 1.0
    engine: Literal["auto", "inprocess", "pool"] = "auto"
    workers: int | Literal["auto"] = "auto"
    device: str = "auto"
    evaluate_every: int = 1
    checkpoint_every: int = 1
    on_error: Literal["raise", "skip"] = "raise"
    min_replies: int = 1

    def __post_init__(self) -> None:
        for name in ("rounds", "evaluate_every", "checkpoint_every", "min_replies"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise UserError(f"seed must be a whole number, got {self.seed!r}")
        whole = isinstance(self.sample, int) and not isinstance(self.sample, bool)
        if not (self.sample >= 1 if whole else isinstance(self.sample, float) and 0 < self.sample <= 1):
            raise UserError(
                f"sample must be a fraction above 0 and at most 1.0, or a number of clients from 1, got {self.sample!r}"
            )
        for name, choices in {"engine": ("auto", "inprocess", "pool"), "on_error": ("raise", "skip")}.items():
            if (value := getattr(self, name)) not in choices:
                raise UserError(f"unknown {name} {value!r}; {nearest(str(value), choices)}")
        counted = isinstance(self.workers, int) and not isinstance(self.workers, bool)
        if self.workers != "auto" and not (counted and int(self.workers) >= 0):
            raise UserError(f"workers must be 'auto' or a number of processes from 0, got {self.workers!r}")
        if self.engine == "pool" and self.workers == 0:
            raise UserError("engine='pool' needs at least one worker, got workers=0; use engine='inprocess'")

    def cohort_size(self, num_clients: int) -> int:
        """Clients that take part in a round.

        Raises:
            UserError: `sample` or `min_replies` asks for more clients than there are.
        """
        if isinstance(self.sample, int):
            if self.sample > num_clients:
                raise UserError(f"sample={self.sample} asks for more clients than the {num_clients} there are")
            size = self.sample
        else:
            size = max(1, round(self.sample * num_clients + 1e-9))
        if self.min_replies > size:
            raise UserError(f"min_replies={self.min_replies} is more than the {size} clients of a round")
        return size
