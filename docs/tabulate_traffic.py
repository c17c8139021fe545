"""Writes what each method's replies reveal, and to whom, into docs/deploy.md; the table is recorded, not typed.

python docs/tabulate_traffic.py
"""

import inspect
import sys
from pathlib import Path

import torch

from polyfed.algorithms import REGISTRY
from polyfed.core.examples.examples import as_examples
from polyfed.core.seeds import torch_generator
from polyfed.simulation.traffic import find_reply_reach, find_revealed_facts

PAGE = Path(__file__).with_name("deploy.md")
START, END = "<!-- traffic: written by docs/tabulate_traffic.py -->", "<!-- end of traffic -->"
SMALL = {
    "lr": 0.05, "batch_size": 8, "local_epochs": 1, "server_steps": 2, "rad_size": 20, "rad_batch": 8, "channels": 4,
    "base_cells": 1, "personal_cells": 1, "base_nodes": 2, "personal_nodes": 2, "hidden": 8,
}  # fmt: skip


def small(name):
    """A method of the registry that trains for a moment."""
    fields = inspect.signature(REGISTRY[name]).parameters
    return REGISTRY[name](**{key: value for key, value in SMALL.items() if key in fields})


def public():
    """Public examples of the form of the sites' inputs."""
    return as_examples((torch.randn(40, 6, generator=torch_generator(8)), torch.zeros(40, dtype=torch.int64)))


def table():
    """The rows of the page."""
    lines = [
        "| method | declared | facts that show in forms and numbers of a reply | what a site sends reaches other sites |",
        "|---|---|---|---|",
    ]
    for name in REGISTRY:
        method = small(name)
        shown = ", ".join(sorted(find_revealed_facts(method, public()))) or "none"
        declared = ", ".join(sorted(method.discloses)) or "nothing"
        lines.append(f"| `{name}` | {declared} | {shown} | {find_reply_reach(method, public())} |")
    return "\n".join(lines)


def written(text, made):
    """The page with this table between its marks."""
    before, rest = text.split(START)
    return f"{before}{START}\n\n{made}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), table()), encoding="utf-8")
    sys.exit(0)
