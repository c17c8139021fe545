"""Implements `polyfed flower health`: says whether sites reach their server, and whether a server answers."""

from pathlib import Path

from polyfed.core.errors import RoundError, check_extra_installed
from polyfed.core.io.text.terminal_text import sanitise_for_terminal


def check_health_and_print_findings(folder: Path) -> None:
    """Prints a line for each site, and for the server, of a folder.

    Raises:
        UserError: the folder is none of a state folder, a site, a server, or a project.
        RoundError: a site does not reach its server, or the server does not answer.
    """
    check_extra_installed("cryptography", "flower", "polyfed flower health")
    from polyfed.deploy.doctor.health import check_health

    count = 0
    for finding in check_health(folder):
        print(sanitise_for_terminal(finding), flush=True)
        count += finding.level == "wrong"
    if count:
        raise RoundError(f"{count} {'thing is' if count == 1 else 'things are'} wrong in {folder}")
