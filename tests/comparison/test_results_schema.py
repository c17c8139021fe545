"""`comparison.json` is described once, by the types of `results_schema`: what is written and what the docs name is there."""

import re
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

import polyfed as pf
from polyfed.comparison.storage.results_schema import ComparisonResults
from polyfed.testing import small_clients


def undescribed(value: Any, kind: Any, place: str) -> list[str]:
    """The places of keys that a type does not have."""
    for option in get_args(kind) if type(None) in get_args(kind) else ():
        if option is not type(None):
            return [] if value is None else undescribed(value, option, place)
    if is_typeddict(kind):
        fields = get_type_hints(kind)
        return [
            found
            for key, item in value.items()
            for found in ([f"{place}.{key}"] if key not in fields else undescribed(item, fields[key], f"{place}.{key}"))
        ]
    if get_origin(kind) in (dict, list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [found for key, item in items for found in undescribed(item, get_args(kind)[-1], f"{place}.{key}")]
    return []


def test_every_key_that_is_written_is_described():
    found = pf.compare(small_clients(), ["local", "fedavg"], rounds=2, seeds=[0, 1], tune=None, quiet=True, workers=0)
    assert undescribed(found.results, ComparisonResults, "results") == []
    assert undescribed({"notes": [], "note": 1}, ComparisonResults, "results") == ["results.note"]


def test_the_docs_name_fields_that_there_are():
    text = (Path(__file__).parents[2] / "docs" / "compare" / "results.md").read_text(encoding="utf-8")
    table = text[text.index("## The results") : text.index("## Predictions")]
    names = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert len(names) > 15
    assert set(names) <= get_type_hints(ComparisonResults).keys()
