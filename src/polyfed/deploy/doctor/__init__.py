"""Checks the folder of a server, a site or a local trial for mistakes in its set-up; the command `polyfed flower
doctor` runs this.

`folders` detects the kind of a folder and reads its unit, `examine` selects the checks, and the others carry them out:
`certificates`, `machine` (files, disk, versions), `network` (ports, TLS, clocks), `site_config` (a site's configuration).
Nothing here imports torch or executes the files that it reads, so that the answer comes at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, final

from polyfed.core.io.text.terminal_text import sanitise_for_terminal


@final
@dataclass(frozen=True)
class DoctorFinding:
    """Holds a check's result: level ("ok", "note" or "wrong"), part of the deployment, and sentence.

    Args:
        level: "ok", "note" (worth knowing, or not possible to check from here) or "wrong" (must be fixed).
        component: the part that was checked, such as "certificates".
        text: a sentence, which says what to do if something is wrong.
    """

    level: Literal["ok", "note", "wrong"]
    component: str
    text: str

    def __str__(self) -> str:
        return sanitise_for_terminal(f"{self.level:5}  {self.component}: {' '.join(self.text.split())}")


Findings = Iterator[DoctorFinding]
"""The findings that a check yields."""


def ok_finding(component: str, text: str) -> DoctorFinding:
    """Returns a `DoctorFinding` of a check that detected no mistake."""
    return DoctorFinding("ok", component, text)


def note_finding(component: str, text: str) -> DoctorFinding:
    """Returns a `DoctorFinding` that the user should know about, although it is not a mistake."""
    return DoctorFinding("note", component, text)


def problem_finding(component: str, text: str) -> DoctorFinding:
    """Returns a `DoctorFinding` of a mistake that the user must correct."""
    return DoctorFinding("wrong", component, text)
