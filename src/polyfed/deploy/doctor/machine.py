"""Checks the machine: file permissions, free disk space and versions of installed packages."""

import os
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import MAX_TEXT_BYTES, check_regular_file, read_file
from polyfed.deploy.doctor import DoctorFinding, Findings, note_finding, ok_finding, problem_finding

MIN_FREE_BYTES = 2**30
"""Least free space for a folder with checkpoints or private states."""
_STATE_PATTERNS = (
    "*/private/*.state",
    "*/checkpoint/*/*.safetensors",
    "runs/*/checkpoint/*/*.safetensors",
    "sites/*/*/private/*.state",
)
CHECKED_PACKAGES = ("torch", "numpy", "safetensors", "flwr", "cryptography", "tomli-w")
"""Packages whose versions are compared with polyfed's requirements."""


def finding_if_unreadable(component: str, file: Path) -> DoctorFinding | None:
    """Tries to read a file, and returns a finding that says why it cannot be read; None if it can be read."""
    if not file.exists():
        return problem_finding(component, f"{file} does not exist; put it there, or name another file")
    if not file.is_file():
        return problem_finding(component, f"{file} is not a file")
    if not os.access(file, os.R_OK):
        return problem_finding(
            component,
            f"{file} cannot be read by {_describe_user()}; run this as the user of the service (sudo -u polyfed ...), or "
            "give the file to it (chown)",
        )
    try:
        check_regular_file(file, MAX_TEXT_BYTES)
    except UserError as error:  # the file is too large, for example
        return problem_finding(component, str(error))
    return None


def check_only_owner_can_access(component: str, file: Path) -> Findings:
    """Yields a problem finding if other users can read or write a secret file; yields nothing otherwise."""
    if (mode := file.stat().st_mode) & 0o077:
        yield problem_finding(component, f"others can read or write {file} (mode {mode & 0o777:o}); chmod 600 {file}")


def check_control_token_file(component: str, file: Path) -> Findings:
    """Yields findings on the control token's file: it exists, is closed to others, and is long enough."""
    if unreadable := finding_if_unreadable(component, file):
        yield unreadable
        return
    yield from check_only_owner_can_access(component, file)
    token = read_file(file).strip()
    if len(token) < 32 or not token.isascii() or b" " in token:
        yield problem_finding(
            component, f"{file} must hold at least 32 letters and digits; (umask 077; openssl rand -hex 32 > {file})"
        )
    else:
        yield ok_finding(component, f"{file} holds a token")


def check_state_folder(component: str, folder: Path) -> Findings:
    """Yields findings on a folder for states: writable, closed to others, and with free disk space."""
    existing_folder = folder
    while not existing_folder.exists() and existing_folder != existing_folder.parent:
        existing_folder = existing_folder.parent
    if folder.exists() and not folder.is_dir():
        yield problem_finding(component, f"{folder} is not a folder; name another one")
        return
    if not os.access(existing_folder, os.W_OK | os.X_OK):
        yield problem_finding(
            component,
            f"{_describe_user()} cannot write to {existing_folder}; run this as the user of the service, or give it "
            "the folder (chown)",
        )
    if sys.platform != "win32" and folder.exists() and (mode := folder.stat().st_mode) & 0o077:
        yield problem_finding(
            component, f"others can enter {folder} (mode {mode & 0o777:o}), where states are; chmod 700 {folder}"
        )
    free, needed = shutil.disk_usage(existing_folder).free, max(MIN_FREE_BYTES, 3 * _largest_state_bytes(folder))
    if free < needed:
        yield problem_finding(
            component,
            f"{folder} has {_format_gibibytes(free)} left on its disk, and should have {_format_gibibytes(needed)} for "
            "checkpoints and states; make room, or name a folder on another disk",
        )
    elif sys.platform != "win32" and (disk := os.statvfs(existing_folder)).f_files and not disk.f_favail:
        yield problem_finding(component, f"the disk of {folder} can hold no more files (inodes); delete some")
    else:
        yield ok_finding(component, f"{folder} has {_format_gibibytes(free)} left on its disk")


def _largest_state_bytes(folder: Path) -> int:
    """Returns the size in bytes of the largest state or checkpoint file in a folder; 0 if there is none."""
    sizes = [file.stat().st_size for pattern in _STATE_PATTERNS for file in folder.glob(pattern) if file.is_file()]
    return max(sizes, default=0)


def _format_gibibytes(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"


def _describe_user() -> str:
    try:
        import pwd

        return f"the user {pwd.getpwuid(os.getuid()).pw_name!r}"
    except (ImportError, KeyError):
        return "this user"


def is_process_alive(process_id: int) -> bool:
    """Returns whether a process with this id runs on this machine; True on Windows, where the question would end it."""
    if sys.platform == "win32":
        return True
    if process_id < 1:  # these mean groups of processes
        return False
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def check_systemd_program(component: str, program: Path) -> Findings:
    """Yields findings on a systemd unit's program: it exists, is executable, and of this installation."""
    if not program.exists():
        yield problem_finding(
            component,
            f"the unit starts {program}, which does not exist; install polyfed[flower] there, or fix its ExecStart",
        )
    elif not os.access(program, os.X_OK):
        yield problem_finding(
            component,
            f"the unit starts {program}, which {_describe_user()} cannot execute; chmod a+rx it and its folders",
        )
    elif program.parent != Path(sys.executable).parent:
        yield note_finding(
            component,
            f"the unit starts {program}; the versions below are those of {sys.executable}, so run that one's "
            "polyfed flower doctor",
        )


def check_package_versions(component: str, protocol_version: int) -> Findings:
    """Yields a problem for each unsuited version of Python or a package, and the main versions.

    Args:
        component: `DoctorFinding.component`.
        protocol_version: version of the protocol between server and sites.
    """
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.specifiers import SpecifierSet

    polyfed_metadata, checked_names = metadata.metadata("polyfed"), []
    python = ".".join(map(str, sys.version_info[:3]))
    if not SpecifierSet(polyfed_metadata["Requires-Python"] or "").contains(python, prereleases=True):
        yield problem_finding(
            component,
            f"Python is {python}, and polyfed needs {polyfed_metadata['Requires-Python']}; make another environment",
        )
    for line in metadata.requires("polyfed") or []:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        applies_to_flower = requirement.marker is None or requirement.marker.evaluate({"extra": "flower"})
        if requirement.name not in CHECKED_PACKAGES or not applies_to_flower or (requirement.name in checked_names):
            continue
        checked_names.append(requirement.name)
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield problem_finding(component, f"{requirement.name} is not installed; pip install 'polyfed[flower]'")
            continue
        if not requirement.specifier.contains(re.sub(r"\+.*", "", installed), prereleases=True):
            yield problem_finding(
                component,
                f"{requirement.name} is {installed}, and polyfed needs {requirement.specifier}; pip install "
                f"'{requirement.name}{requirement.specifier}'",
            )
    versions = ", ".join(f"{name} {_installed_version(name)}" for name in ("polyfed", "flwr", "torch"))
    yield note_finding(
        component,
        f"{versions}, Python {python}, protocol {protocol_version}; server and sites need the same protocol, and best the "
        "same versions",
    )


def _installed_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(missing)"
