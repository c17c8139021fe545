"""Says whether sites reach their server, and whether a server answers; the command `polyfed flower health` runs this.

A site's answer comes from what its SuperNode records (`polyfed.deploy.contact`), so that it costs the server nothing. Only
while a site trains, and its SuperNode therefore asks for no message, the server is probed by TLS.
"""

import time
from collections.abc import Callable
from pathlib import Path

from polyfed.core.errors import UserError
from polyfed.deploy.contact import ContactRecord, read_contacts
from polyfed.deploy.doctor import DoctorFinding, Findings, note_finding, ok_finding, problem_finding
from polyfed.deploy.doctor.folder_kinds import SERVER_UNIT, SITE_UNIT, detect_folder_kinds, read_systemd_unit_if_exists
from polyfed.deploy.doctor.machine import is_process_alive
from polyfed.deploy.doctor.network import check_tls_server_and_clock, split_host_and_port
from polyfed.deploy.doctor.site_config import parse_node_config
from polyfed.deploy.trial.local_trial import read_running_trial, trial_folder_of
from polyfed.deploy.trial.project import DeploymentProject

MAX_SILENT_SECONDS = 60.0
"""The longest time since a server's last answer to a site that waits for a task."""


def check_health(folder: Path, clock: Callable[[], float] = time.time) -> Findings:
    """Yields a finding for each site, and for the server, of a folder; the first words name it.

    Args:
        folder: a site's state folder, the folder of a site or a server with its unit, a project, or its trial.
        clock: returns the time in seconds since 1970.

    Raises:
        UserError: the folder is none of these, or cannot be read.
    """
    folder = folder.resolve()
    if contacts := read_contacts(folder):
        yield from (judge_contact(contact, clock()) for contact in contacts)
        return
    kinds = detect_folder_kinds(folder)
    if kinds[0] in ("project", "trial"):
        yield from _check_trial(DeploymentProject(folder if kinds[0] == "project" else folder.parent), clock)
    if "server" in kinds:
        unit = read_systemd_unit_if_exists(folder / SERVER_UNIT)
        host, port = unit.options.get("--host") or "127.0.0.1", unit.options.get("--port") or "8000"
        authority = unit.find_file_of_option("--ssl-ca-certfile", "ca.crt")
        try:
            address = split_host_and_port(f"[{'127.0.0.1' if host in ('0.0.0.0', '::') else host}]:{port}")
        except ValueError as error:
            raise UserError(f"{unit.file}: {error}") from error
        yield from check_tls_server_and_clock("server", *address, authority)
    if "site" in kinds:
        unit = read_systemd_unit_if_exists(folder / SITE_UNIT)
        try:
            state = parse_node_config(unit.options.get("--node-config", "")).get("state-dir")
        except ValueError as error:
            raise UserError(f"{unit.file}: --node-config cannot be read ({error}); texts need double quotes") from error
        if state is None:
            raise UserError(f"{folder} does not say where the site's states are; polyfed flower health STATE-DIR")
        yield from _check_contacts(Path(str(state)).expanduser(), clock)


def _check_trial(project: DeploymentProject, clock: Callable[[], float]) -> Findings:
    running = read_running_trial(project)
    if running is None:
        yield problem_finding("trial", f"none runs; start it with polyfed flower up {project.path}")
        return
    yield from check_tls_server_and_clock(
        "server", "127.0.0.1", running["port"], project.certificates_folder / "ca.crt"
    )
    for site in running["sites"]:
        yield from _check_contacts(trial_folder_of(project) / "sites" / site, clock)


def _check_contacts(folder: Path, clock: Callable[[], float]) -> Findings:
    contacts = read_contacts(folder)
    yield from (judge_contact(contact, clock()) for contact in contacts)
    if not contacts:
        yield problem_finding(
            "site",
            f"{folder} has no contact-SITE.json: polyfed's SuperNode has not run with this state-dir (of Flower's own "
            "SuperNode only the server knows: polyfed flower status)",
        )


def judge_contact(contact: ContactRecord, now: float) -> DoctorFinding:
    """Returns whether a SuperNode heard of the server in the last minute, or works while it is reachable.

    Args:
        contact: what the SuperNode has recorded.
        now: the time in seconds since 1970.

    >>> contact = {"site": "north", "superlink": "fed.example.org:443", "authority": "", "process": 1, "started": 0.0,
    ...            "reached": 95.0, "busy_since": None}
    >>> print(judge_contact(contact, 100.0))
    ok     north: waits for a task; fed.example.org:443 answered 5 s ago
    >>> print(judge_contact(contact, 1000.0))
    wrong  north: fed.example.org:443 answered 905 s ago; see the log of the SuperNode, and polyfed flower doctor
    """
    site, superlink, reached = contact["site"] or "site", contact["superlink"], contact["reached"]
    if reached is None:
        return problem_finding(
            site,
            f"{superlink} has not answered in the {max(0.0, now - contact['started']):.0f} s since the SuperNode started; "
            "see its log, and polyfed flower doctor",
        )
    if (busy_since := contact["busy_since"]) is not None:
        return _judge_busy_site(contact, f"is at a task since {max(0.0, now - busy_since):.0f} s")
    silent = now - reached
    if silent < -MAX_SILENT_SECONDS:
        return problem_finding(
            site,
            f"this machine's clock was set back by {-silent:.0f} s or more, and {superlink} has not answered since; see the "
            "log of the SuperNode, and polyfed flower doctor",
        )
    if silent > MAX_SILENT_SECONDS:
        return problem_finding(
            site, f"{superlink} answered {silent:.0f} s ago; see the log of the SuperNode, and polyfed flower doctor"
        )
    return ok_finding(site, f"waits for a task; {superlink} answered {max(0.0, silent):.0f} s ago")


def _judge_busy_site(contact: ContactRecord, text: str) -> DoctorFinding:
    site, superlink = contact["site"] or "site", contact["superlink"]
    if not is_process_alive(contact["process"]):
        return problem_finding(site, f"{text}, but its SuperNode has ended; start it again")
    if not contact["authority"]:
        return note_finding(site, f"{text}; without a file of trusted certificates {superlink} is not asked")
    try:
        host, port = split_host_and_port(superlink)
    except ValueError as error:
        return problem_finding(site, f"{text}, and {error}")
    problems = [
        finding.text
        for finding in check_tls_server_and_clock(site, host, port, Path(contact["authority"]))
        if finding.level == "wrong"
    ]
    if problems:
        return problem_finding(site, f"{text}; {problems[0]}")
    return ok_finding(site, f"{text}; {superlink} answers")
