"""The machine: files that can be read and by whom, room on the disk, and versions of what is installed."""

import os
import re
import sys
from importlib import metadata
from pathlib import Path

from polyfed.core.errors import UserError
from polyfed.core.files import MOST_TEXT, check_file, read_file
from polyfed.deploy.doctor import Finding, Findings, note, ok, wrong

LEAST_ROOM = 2**30
"""Bytes that a folder with checkpoints or private states should have left at least."""
_STATES = (
    "*/private/*.state",
    "*/checkpoint/*/*.safetensors",
    "runs/*/checkpoint/*/*.safetensors",
    "sites/*/*/private/*.state",
)
PACKAGES = ("torch", "numpy", "safetensors", "flwr", "cryptography", "tomli-w")
"""What is compared with the versions that polyfed asks for."""


def readable(part: str, file: Path) -> Finding | None:
    """What keeps a file from being read; None if nothing does."""
    if not file.exists():
        return wrong(part, f"{file} does not exist; put it there, or name another file")
    if not file.is_file():
        return wrong(part, f"{file} is no file")
    if not os.access(file, os.R_OK):
        return wrong(
            part,
            f"{file} cannot be read by {_me()}; run this as the user of the service (sudo -u polyfed ...), or "
            "give the file to it (chown)",
        )
    try:
        check_file(file, MOST_TEXT)
    except UserError as error:  # of no such size, say
        return wrong(part, str(error))
    return None


def closed_file(part: str, file: Path) -> Findings:
    """Whether others can read or write a file that is secret."""
    if (mode := file.stat().st_mode) & 0o077:
        yield wrong(part, f"others can read or write {file} (mode {mode & 0o777:o}); chmod 600 {file}")


def check_token(part: str, file: Path) -> Findings:
    """Whether the token of the control interface is there, long enough, and closed."""
    if unreadable := readable(part, file):
        yield unreadable
        return
    yield from closed_file(part, file)
    token = read_file(file).strip()
    if len(token) < 32 or not token.isascii() or b" " in token:
        yield wrong(
            part, f"{file} must hold at least 32 letters and digits; (umask 077; openssl rand -hex 32 > {file})"
        )
    else:
        yield ok(part, f"{file} holds a token")


def check_state(part: str, folder: Path) -> Findings:
    """Whether a folder for states can be written to, by nobody else, and has room."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if folder.exists() and not folder.is_dir():
        yield wrong(part, f"{folder} is no folder; name another one")
        return
    if not os.access(there, os.W_OK | os.X_OK):
        yield wrong(
            part, f"{_me()} cannot write to {there}; run this as the user of the service, or give it the folder (chown)"
        )
    if folder.exists() and (mode := folder.stat().st_mode) & 0o077:
        yield wrong(part, f"others can enter {folder} (mode {mode & 0o777:o}), where states are; chmod 700 {folder}")
    found = os.statvfs(there)
    free, needed = found.f_bavail * found.f_frsize, max(LEAST_ROOM, 3 * _newest(folder))
    if free < needed:
        yield wrong(
            part,
            f"{folder} has {_size(free)} left on its disk, and should have {_size(needed)} for checkpoints and "
            "states; make room, or name a folder on another disk",
        )
    elif found.f_files and not found.f_favail:
        yield wrong(part, f"the disk of {folder} can hold no more files (inodes); delete some")
    else:
        yield ok(part, f"{folder} has {_size(free)} left on its disk")


def _newest(folder: Path) -> int:
    """Bytes of the largest state or checkpoint that is there."""
    sizes = [file.stat().st_size for pattern in _STATES for file in folder.glob(pattern) if file.is_file()]
    return max(sizes, default=0)


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"


def _me() -> str:
    try:
        import pwd

        return f"the user {pwd.getpwuid(os.getuid()).pw_name!r}"
    except (ImportError, KeyError):
        return "this user"


def check_program(part: str, program: Path) -> Findings:
    """Whether the program that a unit starts is there; it may belong to another installation than this one."""
    if not program.exists():
        yield wrong(
            part,
            f"the unit starts {program}, which does not exist; install polyfed[flower] there, or mend its ExecStart",
        )
    elif not os.access(program, os.X_OK):
        yield wrong(part, f"the unit starts {program}, which {_me()} cannot execute; chmod a+rx it and its folders")
    elif program.parent != Path(sys.executable).parent:
        yield note(
            part,
            f"the unit starts {program}; the versions below are those of {sys.executable}, so run that one's "
            "polyfed flower doctor",
        )


def check_versions(part: str, protocol: int) -> Findings:
    """Whether what is installed is what polyfed asks for."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.specifiers import SpecifierSet

    own, told = metadata.metadata("polyfed"), []
    python = ".".join(map(str, sys.version_info[:3]))
    if not SpecifierSet(own["Requires-Python"] or "").contains(python, prereleases=True):
        yield wrong(part, f"Python is {python}, and polyfed needs {own['Requires-Python']}; make another environment")
    for line in metadata.requires("polyfed") or []:
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue
        of_flower = wanted.marker is None or wanted.marker.evaluate({"extra": "flower"})
        if wanted.name not in PACKAGES or not of_flower or (wanted.name in told):
            continue
        told.append(wanted.name)
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            yield wrong(part, f"{wanted.name} is not installed; pip install 'polyfed[flower]'")
            continue
        if not wanted.specifier.contains(re.sub(r"\+.*", "", found), prereleases=True):
            yield wrong(
                part,
                f"{wanted.name} is {found}, and polyfed needs {wanted.specifier}; pip install "
                f"'{wanted.name}{wanted.specifier}'",
            )
    shown = ", ".join(f"{name} {_version(name)}" for name in ("polyfed", "flwr", "torch"))
    yield note(
        part,
        f"{shown}, Python {python}, protocol {protocol}; server and sites need the same protocol, and best the "
        "same versions",
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(missing)"
