"""Which checks a folder gets, before anything is started and while it runs."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyfed.core.errors import UserError
from polyfed.deploy.doctor import Findings, note, ok, wrong
from polyfed.deploy.doctor.certificates import (
    check_authority,
    check_certificate,
    check_peers,
    check_site_key,
    first_name,
    public_of,
)
from polyfed.deploy.doctor.machine import check_program, check_state, check_token, check_versions, readable
from polyfed.deploy.doctor.network import address_of, check_free, check_server, listens
from polyfed.deploy.doctor.nodes import check_site_file, check_words, words_of
from polyfed.deploy.doctor.places import SERVER_UNIT, SITE_UNIT, Unit, kinds_of, read_unit
from polyfed.deploy.project import Project
from polyfed.deploy.trial import folder_of, read_trial

Configuration = Callable[[Mapping[str, Any], Path], Findings]
"""Checks the words of a server's configuration, without torch; given by the command, which knows the outlines of methods."""


def examine(
    folder: Path, protocol: int, configuration: Configuration, port: int = 8000, address: str | None = None
) -> Findings:
    """What is found in a folder.

    Args:
        folder: of a project, a server or a site.
        protocol: of the messages.
        configuration: checks that of a project.
        port: of a trial that is to be started.
        address: HOST:PORT by which sites reach the server, where the folder does not tell.

    Raises:
        UserError: the folder is none of these, or cannot be read.
    """
    folder = folder.resolve()
    kinds = kinds_of(folder)
    if kinds[0] in ("project", "trial"):
        yield from _project(Project(folder if kinds[0] == "project" else folder.parent), configuration, port)
    if "server" in kinds:
        yield from _server(read_unit(folder / SERVER_UNIT), address)
    if "site" in kinds:
        yield from _site(read_unit(folder / SITE_UNIT), address)
    yield from check_versions("versions", protocol)


# -- a project, and its trial ------------------------------------------------------------------------------------------


def _project(project: Project, configuration: Configuration, port: int) -> Findings:
    names: list[str] = []
    try:
        words = project.configuration()
        names = project.sites()
        yield ok("sites", ", ".join(names))
        yield from configuration(words, project.app / "pyproject.toml")
    except UserError as error:
        yield wrong("configuration", str(error))
    certificates = project.certificates
    if certificates.is_dir() and (mode := certificates.stat().st_mode) & 0o077:
        yield wrong(
            "certificates", f"others can enter {certificates} (mode {mode & 0o777:o}); chmod 700 {certificates}"
        )
    yield from check_authority("certificates", certificates / "ca.crt")
    pair = certificates / "server.pem", certificates / "server.key"
    yield from check_certificate("certificates", *pair, certificates / "ca.crt", "127.0.0.1")
    yield from _keys(certificates, names)
    yield from check_site_file("site.py", project.site)
    running = read_trial(project)
    folder = folder_of(project)
    if running is not None:
        yield from _running(folder, certificates / "ca.crt", running, names)
    else:
        yield from check_free("port", "127.0.0.1", port, "end that program, or choose another --port")
        if (folder / "trial.json").exists():
            yield wrong("trial", f"{folder / 'trial.json'} is damaged; end the trial's processes, and delete it")
    yield from check_state("disk", folder)


def _keys(folder: Path, names: list[str]) -> Findings:
    found: dict[bytes, str] = {}
    for name in names:
        key = folder / f"{name}.key"
        if not key.exists():
            yield note("keys", f"{key} is not there yet; polyfed flower up makes it, or the site brings its own")
            continue
        yield from check_site_key("keys", key)
        if (public := public_of(folder / f"{name}.key.pub")) is not None and found.setdefault(public, name) != name:
            yield wrong(
                "keys", f"{name} and {found[public]} have one key; each site needs its own, which pins its name"
            )


def _running(folder: Path, authority: Path, running: Mapping[str, Any], names: list[str]) -> Findings:
    """A trial that runs, or was killed."""
    dead = sorted(name for name, number in running["processes"].items() if not _alive(number))
    if dead == sorted(running["processes"]):
        yield wrong("trial", f"it was killed: none of its processes runs; delete {folder / 'trial.json'}")
        return
    for name in dead:
        yield wrong(
            "trial",
            f"the process of {name} has ended; see {folder / name}.log (polyfed flower up starts a site again "
            "after some seconds)",
        )
    if not dead:
        yield ok("trial", f"it runs, with {', '.join(running['sites'])}")
    if sorted(running["sites"]) != sorted(names):
        yield note(
            "trial",
            f"it has the sites {', '.join(running['sites'])}, and the configuration {', '.join(names)}; runs "
            "have those of the trial",
        )
    yield from check_server("server", "127.0.0.1", running["port"], authority)
    yield from check_token("token", folder / "control.token")


def _alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


# -- a server ------------------------------------------------------------------------------------------------------------


def _server(unit: Unit, address: str | None) -> Findings:
    given = unit.options
    if unit.program is None:
        yield note(
            "unit", f"{unit.file} is not there; files are looked for beside it, under the names that it would have"
        )
    else:
        yield from check_program("unit", unit.program)
    host, at = given.get("--host") or "127.0.0.1", given.get("--port") or "8000"
    public = None
    if address is not None:
        public = _address("address", address)
    if "--insecure" in given:
        yield wrong(
            "TLS", f"{unit.file} has --insecure: whoever is on the way reads and changes what travels; take it out"
        )
    authority = unit.path("--ssl-ca-certfile", "ca.crt")
    pair = unit.path("--ssl-certfile", "server.pem"), unit.path("--ssl-keyfile", "server.key")
    yield from check_authority("certificates", authority)
    yield from check_certificate("certificates", *pair, authority, public[0] if public else None)
    if (stray := unit.file.parent / "ca.key").exists():
        yield note("certificates", f"{stray} signs certificates for anybody who has it; keep it off this machine")
    if unit.program is not None and "--control-token-file" not in given:
        yield wrong(
            "token",
            f"{unit.file} names no --control-token-file: whoever reaches the port can start runs; see "
            "docs/deploy.md, ports and proxies",
        )
    else:
        yield from check_token("token", unit.path("--control-token-file", "control.token"))
    if unit.program is not None and "--enable-supernode-auth" not in given:
        yield wrong(
            "keys", f"{unit.file} lacks --enable-supernode-auth: anybody could take part under any name; add it"
        )
    yield from _registered(unit.file.parent)
    if host in ("0.0.0.0", "::"):
        yield note(
            "port",
            "the SuperLink listens on all networks; let it listen on 127.0.0.1 behind a proxy that passes the "
            "sites' path alone (docs/deploy.md)",
        )
    if (place := _address("port", f"{host}:{at}" if ":" not in host else f"[{host}]:{at}")) is None:
        yield wrong("port", f"{unit.file}: --host {host} --port {at} is no address")
    elif listens("127.0.0.1" if host in ("0.0.0.0", "::") else host, place[1]):
        name = public[0] if public else None
        yield from _own(place, authority, name, pair[0])
    else:
        yield from check_free("port", *place, "end that program, or choose another --port")
    if address is not None and public is None:
        yield wrong("address", f"{address!r} is no address; HOST:PORT, such as federation.example.org:443")
    elif public is not None and listens(*public):
        yield from check_server("address", *public, authority)
    elif public is not None:
        yield note("address", f"{address} takes no connection yet; look again when the server runs, best from a site")
    for folder in {
        Path(given.get("--database") or "state.db").parent,
        Path(unit.environment.get("FLWR_HOME", ".")).parent,
    }:
        if folder != Path():
            yield from check_state("disk", folder)


def _own(place: tuple[str, int], authority: Path, name: str | None, certificate: Path) -> Findings:
    """A port that is taken, which is well if it is by this server."""
    host = "127.0.0.1" if place[0] in ("0.0.0.0", "::") else place[0]
    found = list(check_server("port", host, place[1], authority, name or first_name(certificate)))
    if found and found[0].level == "ok":
        yield from found
    else:
        yield wrong(
            "port",
            f"port {place[1]} of {place[0]} is taken, but not by this server "
            f"({found[0].text if found else 'its certificate cannot be checked'}); end that program, or choose "
            "another --port",
        )


def _registered(folder: Path) -> Findings:
    """Public keys that lie beside the unit, to be registered."""
    for file in sorted(folder.glob("*.pub")):
        if public_of(file) is None:
            yield wrong("keys", f"{file} is no public key in OpenSSH's form; ask the site for it again")
    for file in sorted(folder.glob("*.key")):
        if file.name not in ("server.key", "ca.key", "site.key"):
            yield note(
                "keys",
                f"{file} is a private key; a site's never leaves the site, the server needs {file.name}.pub alone",
            )


# -- a site ----------------------------------------------------------------------------------------------------------------


def _site(unit: Unit, address: str | None) -> Findings:
    given, here = unit.options, unit.file.parent
    if unit.program is None:
        yield note(
            "unit", f"{unit.file} is not there; files are looked for beside it, under the names that it would have"
        )
    else:
        yield from check_program("unit", unit.program)
    if "--insecure" in given:
        yield wrong(
            "TLS", f"{unit.file} has --insecure: whoever is on the way reads and changes what travels; take it out"
        )
    authority, key = unit.path("--root-certificates", "ca.crt"), unit.path("--auth-supernode-private-key", "site.key")
    yield from check_authority("certificates", authority)
    yield from check_site_key("keys", key)
    words: dict[str, Any] = {}
    if unit.program is not None:
        try:
            words = words_of(given.get("--node-config", ""))
            yield from check_words("configuration", words)
        except ValueError as error:
            yield wrong(
                "configuration", f"{unit.file}: --node-config cannot be read ({error}); texts need double quotes"
            )
    named = Path(str(words.get("site") or here / "site.py")).expanduser()
    yield from check_site_file("site.py", here / named.name if not named.exists() else named)
    if words.get("secure") and words.get("key") and words.get("peers"):
        key, peers = (Path(str(words[name])).expanduser() for name in ("key", "peers"))
        yield from check_peers("keys", peers, str(words.get("client-id")), key)
        if (own := readable("keys", key)) is not None:
            yield own
    if words.get("state-dir"):
        yield from check_state("disk", Path(str(words["state-dir"])).expanduser())
    else:
        yield note("disk", "the folder for states (state-dir) is not known")
    target = address or given.get("--superlink")
    if target is None:
        yield note("server", "its address is not known; --address HOST:PORT looks for it")
    elif (place := _address("server", target)) is None:
        yield wrong("server", f"{target!r} is no address; HOST:PORT, such as federation.example.org:443")
    else:
        yield from check_server("server", *place, authority)


def _address(part: str, text: str) -> tuple[str, int] | None:
    try:
        return address_of(text)
    except ValueError:
        return None
