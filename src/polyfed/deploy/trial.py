"""A deployment on one machine for a trial: SuperLink and SuperNodes as processes on loopback, with TLS and keys."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, TypedDict, final

from polyfed.core.errors import RoundError, UserError
from polyfed.core.files import read_file
from polyfed.core.typed import conforms, from_json
from polyfed.deploy.project import Project, closed, write_key
from polyfed.simulation.runs.directory import replace_file

_LINK, _NODE = "polyfed.deploy.link", "polyfed.deploy.supernode"
_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
_AGAIN_SECONDS = 10.0  # before a SuperNode that ended is started again; the SuperLink refuses it for about a minute


@final
@dataclass
class Process:
    """A process of the trial; `log` is where its output goes."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    running: subprocess.Popen[bytes]
    ended: float | None = None


@final
@dataclass
class Trial:
    """Running processes: the SuperLink first, then the SuperNodes in the order of their sites."""

    project: Project
    port: int
    sites: tuple[str, ...]
    processes: list[Process] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Logs, databases and the sites' own folders."""
        return folder_of(self.project)

    def watch(self) -> None:
        """Starts SuperNodes again that have ended.

        Raises:
            RoundError: the SuperLink has ended.
        """
        link, *nodes = self.processes
        if link.running.poll() is not None:
            raise RoundError(f"the SuperLink has ended with status {link.running.returncode}; see {link.log}")
        now = time.monotonic()
        for node in nodes:
            if node.running.poll() is not None and node.ended is None:
                node.ended = now
            if node.ended is not None and now - node.ended > _AGAIN_SECONDS:
                node.running, node.ended = _popen(node.command, node.log, node.environment), None
                self.note()

    def note(self) -> None:
        """Writes which processes there are, for people and tests."""
        known = {process.name: process.running.pid for process in self.processes}
        content = {"port": self.port, "sites": list(self.sites), "processes": known}
        replace_file(self.folder / "trial.json", json.dumps(content, indent=1).encode())

    def stop(self) -> None:
        """Ends all processes, SuperNodes first; those that do not obey are killed. A further Ctrl-C does not keep it from
        that."""
        main = threading.current_thread() is threading.main_thread()
        before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)} if main else {}
        for group in (self.processes[1:], self.processes[:1]):
            for process in group:
                if process.running.poll() is None:
                    process.running.terminate()
            deadline = time.monotonic() + _STOP_SECONDS
            for process in group:
                try:
                    process.running.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.running.kill()
                    process.running.wait()
        (self.folder / "trial.json").unlink(missing_ok=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def folder_of(project: Project) -> Path:
    """Where the trial of a project keeps its own."""
    return project.path / "trial"


class _Noted(TypedDict):
    """What `Trial.note` writes."""

    port: int
    sites: list[str]
    processes: dict[str, int]


def read_trial(project: Project) -> dict[str, Any] | None:
    """What `Trial.note` wrote: port, sites and process ids; None if no trial runs, or the file is damaged."""
    try:
        noted = from_json(read_file(folder_of(project) / "trial.json"))
    except (OSError, ValueError):
        return None
    return None if conforms(noted, _Noted) else dict(noted)


@contextmanager
def trial(
    project: Project, sites: Sequence[str], port: int = 8000, node_config: str = "", through: int | None = None
) -> Iterator[Trial]:
    """Inside the block SuperLink and SuperNodes run; after it they have ended.

    Args:
        project: whose certificates, keys and `site/site.py` are used.
        sites: ids of the sites; each process of one is told its id as POLYFED_SITE, and all of them
            as POLYFED_SITES.
        port: of the SuperLink; the SuperNodes take the next free ones.
        node_config: added to the node configuration of all, as 'disclose="accuracy"'.
        through: the port of a proxy before the SuperLink to which SuperNodes connect; None is the SuperLink itself.

    Raises:
        UserError: the port is taken, a trial is running already, or files are missing.
        RoundError: a process does not start; the sentence names its log.
    """
    if read_trial(project) is not None:
        raise UserError(
            f"a trial of {project.path} is running, or was killed; end it, or delete {folder_of(project)}/trial.json"
        )
    if not project.site.is_file():
        raise UserError(f"{project.site} is missing; it must define client()")
    if _open(port):
        raise UserError(f"port {port} is taken; choose another --port")
    folder, certificates = folder_of(project), project.certificates
    for private in (folder, folder / "sites", folder / "homes", certificates):
        closed(private)
    running = Trial(project, port, tuple(sites))
    with ExitStack() as stack:
        stack.callback(running.stop)
        authority = str(certificates / "ca.crt")
        token = _token(folder)
        files = ["--ssl-certfile", str(certificates / "server.pem"), "--ssl-keyfile", str(certificates / "server.key")]
        link = [
            sys.executable, "-m", _LINK, "--control-token-file", str(token), "--host", "127.0.0.1", "--port", str(port),
            "--ssl-ca-certfile", authority, *files, "--enable-supernode-auth", "--database", str(folder / "state.db"),
            "--disable-runtime-dependency-installation",
        ]  # fmt: skip
        running.processes.append(_start("superlink", link, folder, {}))
        keys = {site: certificates / f"{site}.key" for site in sites}
        ready, free = folder / "ready", port
        ready.unlink(missing_ok=True)
        for site, key in keys.items():
            if not key.exists():
                write_key(key)
            free = next(number for number in range(free + 1, 65536) if not _open(number))
            state = folder / "sites" / site
            closed(state)
            known = f'key="{key}" peers="{certificates}"'  # for secure sums
            words = f'client-id="{site}" site="{project.site}" state-dir="{state}" {known} {node_config}'
            link_of_node = ["--superlink", f"127.0.0.1:{through or port}", "--root-certificates", authority]
            node = [
                sys.executable, "-P", "-m", _NODE, *link_of_node, "--port", str(free),
                "--auth-supernode-private-key", str(key), "--node-config", words.strip(),
            ]  # fmt: skip
            # They import what they need while the SuperLink starts, and connect when their keys are registered.
            own = {"POLYFED_SITE": site, "POLYFED_SITES": ",".join(sites), "POLYFED_AFTER": str(ready)}
            running.processes.append(_start(site, node, folder, own))
        _wait(lambda: _open(port), running.processes[0])
        write_connection(folder / "home", f"127.0.0.1:{port}", authority)
        _login(folder / "home", f"127.0.0.1:{port}", token, keys)
        ready.touch(mode=0o600)
        running.note()
        yield running


def _token(folder: Path) -> Path:
    """The file with the token of the trial's control interface."""
    file = folder / "control.token"
    if not file.exists():
        file.touch(mode=0o600)
        file.write_text(secrets.token_hex(32) + "\n", encoding="utf-8")
    return file


def _login(home: Path, address: str, token: Path, keys: Mapping[str, Path] = MappingProxyType({})) -> None:
    """Lets Flower's commands with this FLWR_HOME reach the SuperLink, and registers the keys of sites."""
    command = [sys.executable, "-m", _LINK, "--control-token-file", str(token), "--login", address]
    command += [word for site, key in keys.items() for word in ("--register", f"{site}={key}.pub")]
    done = subprocess.run(command, env=environment(home), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RoundError(f"the SuperLink does not let the trial in: {' '.join(done.stderr.split())[-300:]}")


def program(name: str) -> str:
    """The path of a program that was installed with Flower.

    Raises:
        UserError: it is not installed.
    """
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise UserError(f"{name} is missing; pip install 'polyfed[flower]'")
    return str(path)


def write_connection(home: Path, address: str, authority: str | None) -> None:
    """Flower's own configuration below `home` (FLWR_HOME), with the connection "fed" to a SuperLink."""
    closed(home)
    lines = ["[superlink]", 'default = "fed"', "[superlink.fed]", f"address = {json.dumps(address)}"]
    lines += [f"root-certificates = {json.dumps(authority)}"] if authority else []
    (home / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def flwr(home: Path | None, words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs Flower's command `flwr`."""
    command = [program("flwr"), *words]
    return subprocess.run(command, env=environment(home), capture_output=True, text=True, check=False, **options)


def environment(home: Path | None, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process of Flower's: nothing is reported to anybody, and its programs are found. Without `home`
    Flower's own configuration is the user's."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
    own = {} if home is None else {"FLWR_HOME": str(home)}
    return {**os.environ, **quiet, **own, "PATH": path, **(more or {})}


def _start(name: str, command: Sequence[str], folder: Path, more: Mapping[str, str]) -> Process:
    log, own = folder / f"{name}.log", environment(folder / "homes" / name, more)
    closed(folder / "homes" / name)
    return Process(name, command, log, own, _popen(command, log, own))


def _popen(command: Sequence[str], log: Path, own: Mapping[str, str]) -> subprocess.Popen[bytes]:
    output: IO[bytes]
    log.touch(mode=0o600)
    with log.open("ab") as output:
        # A session of its own: Ctrl-C is for us, who end them in order.
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(own),
            start_new_session=True,
            umask=0o077,
        )


def _open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait(ready: Any, process: Process) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not ready():
        if process.running.poll() is not None or time.monotonic() > deadline:
            raise RoundError(f"{process.name} did not start; see {process.log}")
        time.sleep(0.2)


def stop_on_signals() -> None:
    """SIGTERM ends the trial as Ctrl-C does, and Ctrl-C also where a shell started us in the background."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
