"""A federation of four sites and a server, each on a machine of its own, as docs/deploy.md says: `polyfed flower init`,
certificates and keys made with openssl and ssh-keygen, and the commands of the systemd units that come with the project."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch

import polyfed as pf
from polyfed.algorithms import FedRep
from polyfed.simulation.storage.directory import read_manifest, read_metrics
from polyfed.testing import without_durations

from . import netns_code as here
from .network import BAD, Machine, Network, Quality

_BIN = Path(sys.executable).parent
_CODE = Path(here.__file__).parent
_NUMBERS = ("num_examples", "train_loss", *(f"{a}{b}" for a in ("", "trained_") for b in ("accuracy", "loss")))
METHOD = {"lr": 0.05, "local_epochs": 1, "body_epochs": 1, "batch_size": 20}
ROUNDS = 3
PORT = 8000


def simulated(rounds: int = ROUNDS) -> pf.Run:
    """The same federation without a network."""
    code = shared_code()
    words = {"rounds": rounds, "evaluate_every": rounds, "seed": 3, "workers": 0}
    return pf.federate([code.client(name) for name in here.NAMES], FedRep(**METHOD), **words)


def shared_code():
    """`netns_code` by the name that sites and server give it, from which a network's first weights derive."""
    sys.path.insert(0, str(_CODE))
    try:
        import netns_code
    finally:
        sys.path.remove(str(_CODE))
    return netns_code


class Host:
    """A machine with folders of its own, and one service that is started again whenever it ends, as systemd would."""

    def __init__(self, machine: Machine, folder: Path, clock: Path) -> None:
        self.machine, self.folder, self._clock = machine, folder, clock
        self.etc, self.var, self.log = folder / "etc", folder / "var", folder / "log"
        self.command: list[str] = []
        self.more: dict[str, str] = {}  # of the environment
        for each in (self.etc, self.var):
            each.mkdir(parents=True)
        self.set_clock(0)

    @property
    def environment(self) -> dict[str, str]:
        """Of every process here."""
        own = {
            "PATH": f"{_BIN}:{os.environ['PATH']}",
            "PYTHONPATH": f"{Path(pf.__file__).parents[1]}:{_CODE}",
            "FLWR_HOME": str(self.var / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
            "HOLD": str(self.folder / "hold"),
            "CLOCK_FILE": str(self.folder / "clock"),
            "LD_PRELOAD": str(self._clock),
        }
        return {**os.environ, **own, **self.more}

    def set_clock(self, ahead: int) -> None:
        """Sets the clock so many seconds ahead of the others, now."""
        new = self.folder / "clock.new"
        new.write_text(str(ahead))
        new.replace(self.folder / "clock")

    def serve(self, unit: Path, changes: Mapping[str, str]) -> None:
        """Takes a service over from a systemd unit: its command with other words, and its restarts."""
        lines = unit.read_text().replace("\\\n", " ").splitlines()
        entries = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
        text = entries["ExecStart"]
        for old, new in {"/opt/polyfed/bin": str(_BIN), "/etc/polyfed": str(self.etc), "/var/lib/polyfed": str(self.var),
                         **changes}.items():  # fmt: skip
            text = text.replace(old, new)
        again = 'while :; do %s; echo "(it has ended with status $?)"; sleep %s; done'
        self.command = ["sh", "-c", again % (shlex.join(shlex.split(text)), entries["RestartSec"])]

    def start(self) -> None:
        """Starts the service."""
        (self.var / "flwr").mkdir(exist_ok=True)
        self.machine.start(self.command, self.log, self.environment)

    def lose_power(self) -> None:
        """Ends everything at once."""
        self.machine.lose_power()

    def boot(self) -> None:
        """After that: the machine is there again, and its service."""
        self.machine.boot()
        self.start()

    def hold(self) -> None:
        """Whoever trains here waits from now on."""
        self._held.unlink(missing_ok=True)
        (self.folder / "hold").touch()

    def release(self) -> None:
        """Ends that."""
        (self.folder / "hold").unlink(missing_ok=True)

    @property
    def _held(self) -> Path:
        return self.folder / "hold.held"

    @property
    def held(self) -> bool:
        """Whether somebody waits."""
        return self._held.exists()

    def words(self) -> str:
        """The log of the service."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def wait(until: Callable[[], object], seconds: float, what: str) -> None:
    """Waits until something is so.

    Raises:
        AssertionError: it is not, after that time.
    """
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


class Federation:
    """Server and sites, their services running.

    Args:
        network: which gets the machines.
        folder: for everything.
        clock: the library that sets clocks (`clock.c`).
        quality: of the sites' links; the server's is perfect.
        made: how many seconds ago the certificates were made.
    """

    def __init__(self, network: Network, folder: Path, clock: Path, quality: Quality = BAD, made: int = 86400) -> None:
        self.folder = folder
        self.server = Host(network.add("server", Quality()), folder / "server", clock)
        self.sites = {name: Host(network.add(name, quality), folder / name, clock) for name in here.NAMES}
        self.address = f"{self.server.machine.address}:{PORT}"
        self.project, self.out = folder / "federation", folder / "server" / "runs" / "run"
        self._at_server("polyfed", "flower", "init", str(self.project), "--sites", ",".join(here.NAMES))
        (self.project / "server" / "server.py").write_text("from netns_code import Net as model\n")
        app = self.project / "app" / "pyproject.toml"
        app.write_text(app.read_text().replace("secure = true", "secure = false"))
        self._certificates(made)
        self._start_server()
        for name in self.sites:
            self._start_site(name)

    def _at_server(self, *words: str) -> str:
        done = self.server.machine.run(words, self.server.environment)
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def _certificates(self, made: int) -> None:
        """With the commands of docs/deploy/network.md."""
        self.server.set_clock(-made)
        etc, where = self.server.etc, self.server.machine.address
        new = "openssl req -newkey ec -pkeyopt ec_paramgen_curve:secp384r1 -nodes"
        script = f"""
        {new} -x509 -days 365 -subj "/CN=our authority" -keyout ca.key -out ca.crt
        {new} -subj "/CN={where}" -keyout server.key -out server.csr
        openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -days 365 -out server.pem \
          -extfile <(printf "subjectAltName=IP:{where}")
        umask 077; openssl rand -hex 32 > control.token
        """
        self._at_server("bash", "-ec", f"cd {etc}; {script}")
        self.server.set_clock(0)

    def _start_server(self) -> None:
        self.server.serve(self.project / "server" / "superlink.service", {"127.0.0.1": self.server.machine.address})
        self.server.start()
        home = self.server.var / "flwr"
        lines = ["[superlink]", 'default = "fed"', "[superlink.fed]", f'address = "{self.address}"']
        (home / "config.toml").write_text(
            "\n".join([*lines, f'root-certificates = "{self.server.etc / "ca.crt"}"']) + "\n"
        )
        token = str(self.server.etc / "control.token")
        self._at_server(
            sys.executable,
            "-m",
            "polyfed.deploy.link",
            "--control-token-file",
            token,
            "--login",
            self.address,
        )
        wait(lambda: "nodes" in self._flwr("supernode", "list", "fed", "--format", "json"), 90, "the SuperLink answers")

    def _flwr(self, *words: str) -> str:
        return self.server.machine.run(["flwr", *words], self.server.environment).stdout

    def _start_site(self, name: str) -> None:
        site = self.sites[name]
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", site.etc / "site.key"], check=True
        )
        self._at_server("flwr", "supernode", "register", f"{site.etc}/site.key.pub", "fed", "--name", name)
        (site.etc / "site.py").write_text(
            f'import netns_code\n\n\ndef client():\n    return netns_code.client("{name}")\n'
        )
        (site.etc / "ca.crt").write_bytes((self.server.etc / "ca.crt").read_bytes())
        more = f'disclose="{",".join(_NUMBERS)}" allow-disclosure=true'
        changes = {
            "federation.example.org:443": self.address,
            'client-id="north"': f'client-id="{name}"',
            f'secure=true key="{site.etc}/site.key" peers="{site.etc}/keys"': more,
        }
        site.serve(self.project / "site" / "supernode.service", changes)
        site.start()

    @property
    def online(self) -> list[str]:
        """Names of the nodes that the SuperLink calls online."""
        told = self._flwr("supernode", "list", "fed", "--format", "json")
        try:
            return sorted(node.get("name", "") for node in json.loads(told)["nodes"] if node["status"] == "online")
        except (ValueError, KeyError):  # it does not answer
            return []

    @property
    def records(self) -> list:
        """What is recorded of the rounds that have ended."""
        return list(read_metrics(self.out / "metrics.jsonl")) if (self.out / "metrics.jsonl").exists() else []

    def begin(self, *more: str, **words: object) -> "Submitted":
        """Starts a run in the background."""
        given = {
            "file": str(self.project / "server" / "server.py"),
            "rounds": ROUNDS,
            "evaluate-every": ROUNDS,
            "seed": 3,
            "on-error": "raise",
            **words,
        }
        given |= {"algorithm.name": "fedrep", **{f"algorithm.{name}": value for name, value in METHOD.items()}}
        changes = [f"--set={name}={json.dumps(value)}" for name, value in given.items()]
        return self._submit("--out", str(self.out), *changes, *more)

    def resume(self) -> "Submitted":
        """Goes on with the run."""
        return self._submit("--resume", str(self.out))

    def _submit(self, *words: str) -> "Submitted":
        command = ["polyfed", "flower", "run", str(self.project), "--connection", "fed", "--allow-disclosure", *words]
        return Submitted(self, command)

    def finish(self, run: "Submitted", tries: int = 4) -> list[str]:
        """Waits for the end of a run, which is resumed whenever it has ended before; the last lines of each that did.

        Raises:
            AssertionError: a run ended without saying why, or does not come to its end.
        """
        told = []
        while (status := run.wait()) != 0:
            last = [line for line in run.text.splitlines() if line.strip()][-40:]
            told.append("\n".join(last))
            assert "go on with `polyfed flower run" in told[-1], run.text[-4000:]
            assert len(told) < tries, f"it was resumed {tries - 1} times; status {status}: {told}"
            run = self.resume()
        return told

    def check_models(self, whole: pf.Run) -> None:
        """Checks that history and all personal models are those of a simulation, bit for bit.

        Raises:
            AssertionError: they are not.
        """
        assert without_durations(self.records) == without_durations(whole.history)
        run = read_manifest(self.out)["deployment"]
        for name, site in self.sites.items():
            (file,) = (site.var / "state" / run / "models").glob("*.safetensors")
            ours, theirs = safetensors.torch.load_file(file), whole.model(name).state_dict()
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name

    def tell(self, *, most: int = 1500) -> str:
        """The ends of all logs, for a test that fails."""
        hosts: Sequence[tuple[str, Host]] = [("server", self.server), *self.sites.items()]
        return "\n".join(f"== {name}: {host.words()[-most:]}" for name, host in hosts)


class Submitted:
    """A run of `polyfed flower run` on the server's machine."""

    def __init__(self, federation: Federation, command: Sequence[str]) -> None:
        server = federation.server
        self._log = server.folder / f"run-{time.monotonic_ns()}.log"
        self._log.touch()
        self._process = server.machine.start(command, self._log, server.environment)

    def wait(self, seconds: float = 1200.0) -> int:
        """Its exit status at its end."""
        return self._process.wait(seconds)

    @property
    def text(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")
