"""Writes what each method's replies reveal, and to whom, into docs/deploy/who_learns_what.md: recorded, not typed.

python docs/tabulate_traffic.py              all methods, which takes minutes
python docs/tabulate_traffic.py fedgen ...   these, and those without a row
"""

import re
import sys
from collections.abc import Collection
from pathlib import Path

from polyfed.algorithms import REGISTRY
from polyfed.testing import example_of
from polyfed.testing.disclosure_audit import find_how_reply_reaches_other_clients, find_revealed_facts

PAGE = Path(__file__).parent / "deploy" / "who_learns_what.md"
START, END = "<!-- traffic: written by docs/tabulate_traffic.py -->", "<!-- end of traffic -->"
HEAD = [
    "| method | declared | facts that show in forms and numbers of a reply | what a site sends reaches other sites |",
    "|---|---|---|---|",
]


def recorded_row(name: str) -> str:
    """Runs a small federation, and returns the method's row."""
    example = example_of(name)
    method, public = example.build(local_epochs=1), example.public(40)
    shown = ", ".join(sorted(find_revealed_facts(method, public))) or "none"
    declared = ", ".join(sorted(method.discloses)) or "nothing"
    return f"| `{name}` | {declared} | {shown} | {find_how_reply_reaches_other_clients(method, public)} |"


def rows_of(text: str) -> dict[str, str]:
    """Returns the rows of the table in a page, by method."""
    table = text.partition(START)[2].partition(END)[0]
    return {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)` .*$", table, flags=re.MULTILINE)}


def updated(text: str, names: Collection[str] = ()) -> str:
    """Returns the page with a row for each method. The rows of `names`, and those that are missing, are recorded."""
    rows = rows_of(text)
    lines = [rows[name] if name in rows and name not in names else recorded_row(name) for name in REGISTRY]
    before, rest = text.split(START)
    return f"{before}{START}\n\n" + "\n".join([*HEAD, *lines]) + f"\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), sys.argv[1:] or list(REGISTRY)), encoding="utf-8")
