"""The Python code of docs/asynchronous.md runs, and its list of methods is that of the code."""

import json
import re
from pathlib import Path

import pytest

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.simulation.checks.settings.scheduling import supports_asynchronous

PAGE = (Path(__file__).parents[4] / "docs" / "asynchronous.md").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_the_code_of_the_page_runs(capsys):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(block, names)  # noqa: S102  # the page's own code
    waiting, buffered = map(json.loads, capsys.readouterr().out.splitlines())
    assert buffered[0] < waiting[0]  # three of eight replies come before the last
    assert len(names["run"].history) == 2


def test_the_page_lists_the_methods():
    row = next(line for line in PAGE.splitlines() if line.startswith("| methods |"))
    listed = re.findall(r"`(\w+)`", row.partition("With `averaged_over")[0])
    able = []
    for name, method in REGISTRY.items():
        try:
            able += [name] if supports_asynchronous(method(), pf.FedBuff()) else []
        except pf.UserError:  # it needs a field
            continue
    assert listed == able
