"""Converts the arguments of `federate` about sampling, simulated time and asynchronous rounds to settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.core.errors import UserError
from polyfed.core.io.trusted_code import check_code_trusted, trust_code
from polyfed.core.io.values.plain_values import to_plain_values
from polyfed.simulation.scheduling.asynchronous.rules import FedAsync, FedBuff, describe_asynchronous
from polyfed.simulation.scheduling.sampling.registry import SAMPLERS, describe_sampler
from polyfed.simulation.scheduling.sampling.sampler import Sampler
from polyfed.simulation.settings import Settings


def describe_scheduling(
    sampler: str | Mapping[str, Any] | Sampler,
    speeds: str | float | Mapping[str, float] | None,
    bandwidth: str | float | Mapping[str, float] | None,
    availability: str | Path | Mapping[str, Any] | None,
    asynchronous: FedBuff | FedAsync | str | Mapping[str, Any] | None,
    *,
    trusts_sampler_class: bool = False,
) -> dict[str, Any]:
    """Returns the arguments as the fields of `Settings` hold them: objects as mappings, paths as texts.

    Args:
        sampler, speeds, bandwidth, availability, asynchronous: as for `federate`.
        trusts_sampler_class: whether the class of the caller's own sampler may be imported again by its path.

    >>> describe_scheduling("oort", 2.0, None, Path("traces.csv"), FedAsync(mixing=0.5, concurrency=4))["asynchronous"]
    {'rule': 'fedasync', 'mixing': 0.5, 'concurrency': 4, 'staleness': 'polynomial:0.5'}
    """
    if isinstance(sampler, Sampler):
        sampler = describe_sampler(sampler)
        if trusts_sampler_class:
            trust_code(sampler if isinstance(sampler, str) else sampler["name"])
    return {
        "sampler": sampler,
        **{
            name: str(value) if isinstance(value, Path) else value
            for name, value in (("speeds", speeds), ("bandwidth", bandwidth), ("availability", availability))
        },
        "asynchronous": describe_asynchronous(asynchronous)
        if isinstance(asynchronous, FedBuff | FedAsync)
        else asynchronous,
    }


def check_sampler_is_that_of_run(sampler: Sampler | None, settings: Settings) -> None:
    """Raises a `UserError` if a resumed run has another sampler than the one that is given, or one that must be given.

    Args:
        sampler: the object that the caller gives; None builds the one that the settings name.
        settings: of the run.

    Raises:
        UserError: the sampler is another one; or none is given, and the run has one of the user's own class.
    """
    saved = settings.sampler
    if sampler is not None:
        current = to_plain_values(describe_sampler(sampler), "sampler")
        if current != saved:
            raise UserError(f"sampler is not that of the run: it was {saved!r} and is now {current!r}; give the same")
        return
    name = saved if isinstance(saved, str) else str(saved.get("name"))
    if ":" in name and name.partition(":")[0] not in SAMPLERS:
        check_code_trusted(
            name, f"import {name!r} as a sampler (in Python give it again: polyfed.resume(..., sampler=...))"
        )
