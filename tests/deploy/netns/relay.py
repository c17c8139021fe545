"""A bad network in userspace: a router between network namespaces, which delays, loses and slows down IP packets.

    python relay.py        reads commands as lines of JSON, and answers each with one

`tc qdisc ... netem` does the same in the kernel, but many kernels are built without it. Here each namespace has a TUN
device, through which its kernel hands over whole IP packets, and takes them. So TCP is the kernel's own, with its
retransmissions; nothing of a connection ends here. A packet passes the link of its sender and that of its receiver. On each
it may be lost, it waits until the packets before it are through (at the link's rate), and then takes the link's delay.
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import socket
import struct
import sys
import time

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_QUEUE_SECONDS = 1.0  # what does not get onto a link in that time is lost, as in a router whose buffer is full
_MTU = 1500


def open_tun(namespace: str, device: str) -> int:
    """A new TUN device in another namespace; it is gone when its file is closed."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as here, open(f"/run/netns/{namespace}") as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        try:
            file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
        finally:
            if libc.setns(here.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot come back")
    return file


class Link:
    """One way of a namespace's link.

    Args:
        delay: seconds.
        loss: share of packets.
        rate: bits per second; 0 is without limit.
    """

    def __init__(self, delay: float, loss: float, rate: float) -> None:
        self.delay, self.loss, self.rate = delay, loss, rate
        self.cut, self.free_at = False, 0.0
        self.told = {"packets": 0, "bytes": 0, "lost": 0, "late": 0, "cut": 0}

    def arrival(self, now: float, size: int, draw: random.Random) -> float | None:
        """When a packet that comes to the link now is at its end; None if never."""
        self.told["packets"] += 1
        self.told["bytes"] += size
        reason = "cut" if self.cut else "lost" if draw.random() < self.loss else None
        begins = max(now, self.free_at)
        if reason is None and self.rate and begins - now > _QUEUE_SECONDS:
            reason = "late"
        if reason is not None:
            self.told[reason] += 1
            return None
        self.free_at = begins + (8 * size / self.rate if self.rate else 0.0)
        return self.free_at + self.delay


class Router:
    """Namespaces by their addresses, and the packets on their way."""

    def __init__(self) -> None:
        self.selector, self.draw = selectors.DefaultSelector(), random.Random(1)
        self.files: dict[str, int] = {}  # namespace -> its device
        self.names: dict[bytes, str] = {}  # address -> namespace
        self.links: dict[str, tuple[Link, Link]] = {}  # namespace -> what it sends, what it receives
        self.travelling: list[tuple[float, int, str, bytes]] = []
        self.count = 0

    def attach(self, namespace: str, address: str, delay: float, loss: float, rate: float) -> None:
        """A namespace, new, or anew after it was made again; then its links go on as they were."""
        self.detach(namespace)
        self.files[namespace] = open_tun(namespace, "net0")
        self.names[socket.inet_aton(address)] = namespace
        self.links.setdefault(namespace, (Link(delay, loss, rate), Link(delay, loss, rate)))
        self.selector.register(self.files[namespace], selectors.EVENT_READ, namespace)

    def detach(self, namespace: str) -> None:
        """Closes its device, and with it removes it."""
        if (file := self.files.pop(namespace, None)) is not None:
            self.selector.unregister(file)
            os.close(file)

    def obey(self, command: dict) -> object:
        """Carries out a command: {"do": "attach" | "detach" | "cut" | "fix" | "tell", ...}."""
        words = {key: value for key, value in command.items() if key != "do"}
        if command["do"] in ("attach", "detach"):
            getattr(self, command["do"])(**words)
        elif command["do"] in ("cut", "fix"):
            for link in self.links[words["namespace"]]:
                link.cut = command["do"] == "cut"
        return {name: {"up": up.told, "down": down.told} for name, (up, down) in self.links.items()}

    def take(self, packet: bytes, sender: str) -> None:
        """A packet that a namespace has sent."""
        receiver = self.names.get(packet[16:20]) if packet[:1] and packet[0] >> 4 == 4 else None
        if receiver is None:
            return
        now = time.monotonic()
        due = self.links[sender][0].arrival(now, len(packet), self.draw)
        if due is not None:
            due = self.links[receiver][1].arrival(due, len(packet), self.draw)
        if due is not None:
            self.count += 1
            heapq.heappush(self.travelling, (due, self.count, receiver, packet))

    def deliver(self) -> float | None:
        """Hands over what has arrived; seconds until the next."""
        while self.travelling:
            if (wait := self.travelling[0][0] - time.monotonic()) > 0:
                return wait
            _, _, receiver, packet = heapq.heappop(self.travelling)
            try:
                os.write(self.files[receiver], packet)
            except (OSError, KeyError):  # its device is not up, or gone
                self.links[receiver][1].told["cut"] += 1
        return None

    def serve(self) -> None:
        """Until standard input ends."""
        self.selector.register(sys.stdin.buffer.fileno(), selectors.EVENT_READ)
        while True:
            wait = self.deliver()
            for key, _ in self.selector.select(wait):
                if key.data is None:
                    if not (line := sys.stdin.buffer.readline()):
                        return
                    print(json.dumps(self.obey(json.loads(line))), flush=True)
                    continue
                for _ in range(64):
                    try:
                        self.take(os.read(key.fd, _MTU + 100), key.data)
                    except BlockingIOError:
                        break
                    except OSError:  # its namespace is going
                        break


if __name__ == "__main__":
    Router().serve()
