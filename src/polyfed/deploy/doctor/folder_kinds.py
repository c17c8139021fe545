"""Detects whether a folder belongs to a project, a trial, a server or a site, and reads its systemd unit file."""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import read_text_file

FolderKind = Literal["project", "trial", "server", "site"]
SERVER_UNIT, SITE_UNIT = "superlink.service", "supernode.service"
_START = re.compile(r"^ExecStart=[-@:+!]*(.*)$", re.MULTILINE)


@final
@dataclass(frozen=True)
class SystemdUnit:
    """Holds a systemd unit's program, the program's options, and environment variables.

    Args:
        file: the unit's file.
        program: the program that it starts; None without a unit.
        options: the program's options; those without a value have an empty one.
        environment: the variables that `Environment=` sets.
    """

    file: Path
    program: Path | None
    options: dict[str, str]
    environment: dict[str, str]

    def find_file_of_option(self, option: str, default_name: str) -> Path:
        """Returns the path that an option names or a default, or the file of that name beside the unit.

        This allows a folder to be checked before it is copied to its final place.
        """
        target = Path(self.options.get(option) or self.file.parent / default_name)
        local_copy = self.file.parent / target.name
        return local_copy if not target.exists() and local_copy.exists() else target


def read_systemd_unit_if_exists(file: Path) -> SystemdUnit:
    """Reads program, options and environment of a systemd unit; none of them without the file.

    Raises:
        UserError: the file cannot be read, or has no `ExecStart`.
    """
    if not file.exists():
        return SystemdUnit(file, None, {}, {name: os.environ[name] for name in ("FLWR_HOME",) if name in os.environ})
    try:
        text = re.sub(r"\\\n\s*", " ", read_text_file(file))
        match = _START.search(text)
        words = shlex.split(match.group(1)) if match else []
        environment = dict(
            word.split("=", 1)
            for line in re.findall(r"^Environment=(.*)$", text, re.MULTILINE)
            for word in shlex.split(line)
            if "=" in word
        )
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if not words:
        raise UserError(f"{file} has no line ExecStart=; copy it from the project that polyfed flower init writes")
    return SystemdUnit(file, Path(words[0]), _parse_options(words[1:]), environment)


def _parse_options(words: Sequence[str]) -> dict[str, str]:
    """Parses command-line words into a mapping from option to value; an option without a value gets the value "".

    >>> _parse_options(["-m", "x", "--port", "8000", "--enable-supernode-auth", "--host=a"])
    {'--port': '8000', '--enable-supernode-auth': '', '--host': 'a'}
    """
    options: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            options[name] = value if equals else "" if following.startswith("--") else following
    return options


def detect_folder_kinds(folder: Path) -> tuple[FolderKind, ...]:
    """Returns a folder's roles: ("project",), ("trial",), ("server",), ("site",) or ("server", "site").

    Raises:
        UserError: the folder is none of these.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a folder; polyfed flower doctor takes that of a project, of a server or of a site"
        )
    if (folder / "app" / "pyproject.toml").is_file():
        return ("project",)
    if folder.name == "trial" and (folder.parent / "app" / "pyproject.toml").is_file():
        return ("trial",)
    marks: dict[FolderKind, tuple[str, ...]] = {
        "server": (SERVER_UNIT, "server.pem", "control.token"),
        "site": (SITE_UNIT, "site.key", "site.py"),
    }
    if kinds := tuple(kind for kind, names in marks.items() if any((folder / name).exists() for name in names)):
        return kinds
    raise UserError(
        f"{folder} is none of a project (app/pyproject.toml), a server ({SERVER_UNIT} or server.pem) or a site "
        f"({SITE_UNIT}, site.key or site.py); name one of these folders, or write a project: polyfed flower init DIR"
    )
