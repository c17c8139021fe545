"""Secure sums played in one process, for tests: sites that drop out at any step, and what the server saw."""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from polyfed.deploy.secure_aggregation.crypto import make_signing_function
from polyfed.deploy.secure_aggregation.protocol import (
    SumId,
    check_and_share_secrets,
    create_signed_keys,
    decrypt_received_shares,
    mask_words,
    release_unmasking_shares,
)
from polyfed.deploy.secure_aggregation.unmask import unmask_sum

STEPS = ("advertise", "share", "mask", "hand out")
WHICH = SumId("run-a", 1)


@cache
def registered(name):
    return Ed25519PrivateKey.generate()


def peers(names):
    return {name: registered(name).public_key() for name in names}


@dataclass
class Server:
    """What the server has seen of one sum."""

    names: tuple[str, ...]
    threshold: int
    which: SumId = WHICH
    states: dict = field(default_factory=dict)
    adverts: list = field(default_factory=list)
    encrypted_shares: dict = field(default_factory=dict)
    masked: dict = field(default_factory=dict)
    handed: dict = field(default_factory=dict)

    def advertise(self, names):
        for name in names:
            self.states[name], advert = create_signed_keys(self.which, name, make_signing_function(registered(name)))
            self.adverts.append(advert)
        return self

    def share(self, names):
        for name in names:
            self.states[name], self.encrypted_shares[name] = check_and_share_secrets(
                self.states[name], self.adverts, self.threshold, peers(self.names), owner_threshold=self.threshold
            )
        return self

    def boxes_for(self, name):
        return {other: boxes[name] for other, boxes in self.encrypted_shares.items() if other != name}

    def mask(self, words):
        for name, x in words.items():
            self.states[name] = decrypt_received_shares(self.states[name], self.boxes_for(name))
            self.masked[name] = mask_words(self.states[name], x)
        return self

    def hand_out(self, names, survivors=None):
        listed = sorted(self.masked) if survivors is None else survivors
        for name in names:
            self.handed[name] = release_unmasking_shares(self.states[name], listed)
        return self

    def sum(self, survivors=None):
        listed = sorted(self.masked) if survivors is None else survivors
        total = sum((self.masked[name] for name in listed), np.zeros(5, np.uint64))
        return unmask_sum(self.which, self.adverts, self.threshold, self.encrypted_shares, listed, total, self.handed)


def names(number):
    return tuple(f"site-{k}" for k in range(number))


def inputs(who, size=5, seed=0):
    generator = np.random.default_rng(seed)
    return {name: generator.integers(0, 2**64, size, dtype=np.uint64) for name in who}


def play(number, threshold, last=None, size=5):
    """A sum; `last` says after how many steps each site is gone (4: never)."""
    who, last = names(number), last or {}
    words = inputs(who, size)

    def there(step):
        return [name for name in who if last.get(name, 4) > step]

    server = Server(who, threshold)
    server.advertise(there(0)).share(there(1)).mask({n: words[n] for n in there(2)}).hand_out(there(3))
    return server, words


__all__ = ["STEPS", "WHICH", "Server", "inputs", "names", "peers", "play", "registered"]
