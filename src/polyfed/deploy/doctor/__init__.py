"""What is wrong with the folder of a server, of a site or of a trial: `polyfed flower doctor`.

`places` reads from a folder what it is and what its unit says, `examining` decides what is checked there, and the other
modules check it: `certificates`, `machine` (files, disk, versions), `network` (ports, TLS, clocks), `nodes` (words of a
site). Nothing here imports torch or executes what it reads, so that it answers at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, final


@final
@dataclass(frozen=True)
class Finding:
    """One line of what was found.

    Attributes: `level` is "ok", "note" for what cannot be told from here or is worth knowing, or "wrong" for what must be
    mended; `part` is what was looked at; `text` is a sentence, which says what to do where something is wrong.
    """

    level: Literal["ok", "note", "wrong"]
    part: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:5}  {self.part}: {' '.join(self.text.split())}"


Findings = Iterator[Finding]
"""What a check yields."""


def ok_finding(part: str, text: str) -> Finding:
    """All is well."""
    return Finding("ok", part, text)


def note_finding(part: str, text: str) -> Finding:
    """Worth knowing."""
    return Finding("note", part, text)


def problem_finding(part: str, text: str) -> Finding:
    """To be mended."""
    return Finding("wrong", part, text)
