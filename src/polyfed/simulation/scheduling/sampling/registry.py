"""Builds a `Sampler` from the setting `sampler`: a name, a name with its options, or the user's own class."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.trusted_code import find_trusted_import_path, import_trusted_dataclass
from polyfed.core.io.values.validation import build_dataclass
from polyfed.simulation.scheduling.sampling.oort import Oort
from polyfed.simulation.scheduling.sampling.power_of_choice import PowerOfChoice
from polyfed.simulation.scheduling.sampling.sampler import AvailableSampler, Sampler, UniformSampler

SAMPLERS: Mapping[str, type[Sampler]] = {
    "uniform": UniformSampler,
    "available": AvailableSampler,
    "power_of_choice": PowerOfChoice,
    "oort": Oort,
}


def build_sampler(description: str | Mapping[str, Any]) -> Sampler:
    """Builds the sampler that a setting describes.

    Args:
        description: a name of `SAMPLERS`, "power_of_choice:CANDIDATES", "module:Class", or a mapping with `name` and the
            fields of the class.

    Raises:
        UserError: an unknown name or option, or a class that is not trusted or no sampler.

    >>> build_sampler("power_of_choice:20"), build_sampler({"name": "oort", "alpha": 1.0}).alpha
    (PowerOfChoice(candidates=20), 1.0)
    """
    fields = {"name": description} if isinstance(description, str) else dict(description)
    name = str(fields.pop("name", ""))
    kind, _, number = name.partition(":")
    if kind == "power_of_choice" and number.isdecimal():
        name, fields = kind, {**fields, "candidates": int(number)}
    if name in SAMPLERS:
        return build_dataclass(SAMPLERS[name], fields, f"sampler {name}")
    if ":" in name and kind not in SAMPLERS:
        base: Any = Sampler
        own_class: type[Sampler] = import_trusted_dataclass(name, base, "sampler")
        return build_dataclass(own_class, fields, f"sampler {name}")
    raise UserError(
        f"unknown sampler {name!r}; {did_you_mean(name, SAMPLERS)}; power_of_choice:CANDIDATES and module:Class of your own "
        "are possible, too"
    )


def check_sampler(description: Any) -> None:
    """Raises a `UserError` unless a setting names a sampler; classes of the user's own are not imported.

    Raises:
        UserError: an unknown name, or a wrong option of a built-in sampler.
    """
    name: Any = description.get("name", "") if isinstance(description, Mapping) else description
    if not isinstance(name, str):
        raise UserError(f"sampler must be a name such as 'oort', or a mapping with a name, got {description!r}")
    if ":" not in name or name.partition(":")[0] in SAMPLERS:
        build_sampler(description)


def describe_sampler(sampler: Sampler) -> str | dict[str, Any]:
    """Returns a sampler as the setting `sampler` holds it: its name, or a mapping with its name and options.

    A class of the user's own is named module:Class.

    >>> describe_sampler(UniformSampler()), describe_sampler(PowerOfChoice(candidates=5))
    ('uniform', {'name': 'power_of_choice', 'candidates': 5})
    """
    name = next((name for name, kind in SAMPLERS.items() if kind is type(sampler)), None)
    name = name or find_trusted_import_path(type(sampler)) or f"{type(sampler).__module__}:{type(sampler).__qualname__}"
    declared: Any = sampler
    fields: Sequence[dataclasses.Field[Any]] = dataclasses.fields(declared) if dataclasses.is_dataclass(sampler) else ()
    values = {field.name: getattr(sampler, field.name) for field in fields}
    changed_fields = {field.name: values[field.name] for field in fields if values[field.name] != field.default}
    return {"name": name, **changed_fields} if changed_fields else name
