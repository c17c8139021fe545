"""Machines on a bad network: network namespaces of this machine, behind `relay.py`."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "pfnet-"
_NET = "10.77.0."


@dataclass(frozen=True)
class Quality:
    """Of the link of a machine, in each direction: seconds, a share of packets, bits per second (0: without limit)."""

    delay: float = 0.0
    loss: float = 0.0
    rate: float = 0.0


BAD = Quality(delay=0.05, loss=0.01, rate=10e6)


def ip(*words: str) -> str:
    """What `ip` prints."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def why_not() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun, from which the network is made"
    try:
        ip("netns", "add", f"{PREFIX}probe")
        ip("netns", "del", f"{PREFIX}probe")
    except FileNotFoundError:
        return "the program ip (iproute2) is missing"
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    return None


def _mine() -> list[str]:
    names = [line.split()[0] for line in ip("netns", "list").splitlines() if line]
    return [name for name in names if name.startswith(PREFIX)]


def _end(namespace: str) -> None:
    """Kills all that runs in a namespace, and removes it."""
    for _ in range(50):
        pids = [int(word) for word in ip("netns", "pids", namespace).split()]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            break
        time.sleep(0.1)
    ip("netns", "del", namespace)


class Machine:
    """A namespace with an address, as a computer of its own would be in the network's eyes. (Files and clock are this
    machine's.)"""

    def __init__(self, network: "Network", name: str, address: str, quality: Quality) -> None:
        self.network, self.name, self.address, self.quality = network, name, address, quality
        self.namespace = f"{PREFIX}{name}"
        self._started: list[subprocess.Popen[bytes]] = []
        self._boot()

    def _boot(self) -> None:
        ip("netns", "add", self.namespace)
        ip("-n", self.namespace, "link", "set", "lo", "up")
        words = {"delay": self.quality.delay, "loss": self.quality.loss, "rate": self.quality.rate}
        self.network.tell(do="attach", namespace=self.namespace, address=self.address, **words)
        ip("-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "net0")
        ip("-n", self.namespace, "link", "set", "net0", "up")

    def command(self, words: Sequence[str]) -> list[str]:
        """The words that run a command here."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def start(self, words: Sequence[str], log: str | Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts a process, whose output goes to a file."""
        with Path(log).open("ab") as output:
            process = subprocess.Popen(
                self.command(words), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=dict(environment), start_new_session=True,
            )  # fmt: skip
        self._started.append(process)
        return process

    def run(
        self, words: Sequence[str], environment: Mapping[str, str], seconds: float = 900.0
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        return subprocess.run(
            self.command(words), capture_output=True, text=True, env=dict(environment), timeout=seconds, check=False
        )

    def cut(self) -> None:
        """Nothing comes through any more, in either direction; no side is told."""
        self.network.tell(do="cut", namespace=self.namespace)

    def fix(self) -> None:
        """Ends that."""
        self.network.tell(do="fix", namespace=self.namespace)

    def lose_power(self) -> None:
        """Ends all its processes at once, without a word to anybody, and its network with them."""
        self.cut()
        self.end()

    def end(self) -> None:
        """Kills all that runs here, and removes the namespace."""
        _end(self.namespace)
        for process in self._started:
            process.wait()

    def boot(self) -> None:
        """Makes it again after `lose_power`, without processes."""
        self._boot()
        self.fix()

    @property
    def traffic(self) -> Mapping[str, Mapping[str, int]]:
        """What came to its link: "up" and "down", each with "packets", "bytes", and those that were "lost", too "late" for
        the queue, or came while it was "cut"."""
        found: Mapping[str, Mapping[str, int]] = self.network.tell(do="tell")[self.namespace]
        return found


class Network:
    """The relay, and the machines behind it."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("relay.py")
        self._relay = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.machines: dict[str, Machine] = {}

    def add(self, name: str, quality: Quality = BAD) -> Machine:
        """A new machine."""
        address = f"{_NET}{len(self.machines) + 1}"
        self.machines[name] = Machine(self, name, address, quality)
        return self.machines[name]

    def tell(self, **command: Any) -> Any:
        """Gives the relay a command; its answer."""
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write(json.dumps(command) + "\n")
        self._relay.stdin.flush()
        answer = self._relay.stdout.readline()
        if not answer:
            raise RuntimeError("the relay has ended; its message is above")
        return json.loads(answer)

    def close(self) -> None:
        """Ends every process in the namespaces, and removes them."""
        there = _mine()
        for machine in self.machines.values():
            if machine.namespace in there:
                machine.end()
        self._relay.kill()
        self._relay.wait()
        for pipe in (self._relay.stdin, self._relay.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def network() -> Iterator[Network]:
    """A network without machines; at the end nothing of it is left. What a killed test has left is removed first. There is
    one at a time on a computer: another waits."""
    with Path("/run/polyfed-netns.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for namespace in _mine():
            _end(namespace)
        made = Network()
        try:
            yield made
        finally:
            made.close()
