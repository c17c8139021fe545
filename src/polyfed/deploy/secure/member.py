"""A site's part in secure sums between messages: its registered key, those of the others, and its secrets on its own disk.

Each message may be a process of its own, so that the state of each step (`masking`) is a file, `secure/round-N.json` below
the folder of the run. A step is taken once: numbers masked twice with the same masks would tell their difference, and shares
dealt twice, or handed out for two lists, more than the sum. `secure/opened.json` keeps for good for which sites the site
has opened which round.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.files import make_folder, read_file, replace_file
from polyfed.core.fixed import as_message, from_message
from polyfed.deploy.secure import RefusalError
from polyfed.deploy.secure.keys import read_peers, read_private, signer
from polyfed.deploy.secure.masking import (
    Advert,
    Advertised,
    Masked,
    Shared,
    Sum,
    advertise,
    hand_out,
    mask,
    share,
    unseal_boxes,
)

BOXES = "boxes of the secure sum"
"""The group in which sealed shares travel, as bytes: site -> box."""
BUNDLE = "bundle of the secure sum"
_NO_KEYS = (
    "this site has no keys for secure sums; give its registered key and those of the others in its node-config: "
    'key="/path/site.key" peers="/path/of/public/keys"'
)


@final
@dataclass(frozen=True)
class Member:
    """A site in the secure sums of a run.

    Args:
        name: the site.
        folder: of the run, at the site.
        key: the file of its registered private key.
        peers: the folder of the registered public keys of all sites.
        threshold: the smallest that its owner accepts; None is above two thirds of a round's sites.
    """

    name: str
    folder: Path
    key: Path | None
    peers: Path | None
    threshold: int | None = None

    def answer(self, run: str, head: Mapping[str, Any]) -> tuple[dict[str, Any], Message]:
        """Does what a letter of the kind "sum" asks for, in parts that do not depend on each other: "hand_out", "share" and
        "advertise". What the site refuses is told by part.

        Returns:
            what the head of the answer says, and its body.
        """
        told: dict[str, Any] = {"refusals": {}}
        body: dict[str, dict[str, Tensor]] = {}
        parts = {"hand_out": self._hand_out, "share": self._share, "advertise": self._advertise}
        for part, take in parts.items():
            if (asked := head.get(part)) is None:
                continue
            try:
                take(run, asked, told, body)
            except RefusalError as refusal:
                told["refusals"][part] = str(refusal)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
                if isinstance(error, UserError):
                    raise
                told["refusals"][part] = "this part of the letter is damaged"
        return told, Message(body)

    def _advertise(self, run: str, number: Any, told: dict[str, Any], body: dict[str, dict[str, Tensor]]) -> None:
        told["advert"] = self.advert(Sum(run, number))

    def _share(self, run: str, asked: Any, told: dict[str, Any], body: dict[str, dict[str, Tensor]]) -> None:
        if self.peers is None:
            raise RefusalError(_NO_KEYS)
        which = Sum(run, asked["round"])
        state = self._read(which)
        if not isinstance(state, Advertised):
            raise RefusalError("this site has dealt its shares for this sum already")
        adverts = [advert_of(advert) for advert in asked["adverts"]]
        after, boxes = share(state, adverts, int(asked["threshold"]), read_peers(self.peers), self.threshold)
        self._write(which, after)
        body[BOXES] = {other: as_bytes(box) for other, box in boxes.items()}

    def _hand_out(self, run: str, asked: Any, told: dict[str, Any], body: dict[str, dict[str, Tensor]]) -> None:
        which = Sum(run, asked["round"])
        state = self._read(which)
        if not isinstance(state, Masked):
            raise RefusalError("this site has sent no numbers for this sum")
        opened = self._opened()
        handed = hand_out(state, asked["survivors"], opened.get(str(which.round)))
        replace_file(
            self._folder / "opened.json", json.dumps({**opened, str(which.round): asked["survivors"]}).encode()
        )
        self._file(which).unlink()
        told["tokens"] = {v: format(token, "x") for v, token in handed.tokens.items()}
        body[BUNDLE] = {"bundle": as_bytes(handed.bundle)}

    def advert(self, which: Sum) -> dict[str, str]:
        """New keys for a sum, in place of any that it had; for the head of a letter."""
        if self.key is None:
            raise RefusalError(_NO_KEYS)
        state, advert = advertise(which, self.name, signer(read_private(self.key)))
        make_folder(self._folder, parents=True)
        for file in self._folder.glob("round-*.json"):
            if int(file.stem.removeprefix("round-")) not in (which.round - 1, which.round):
                file.unlink()
        self._write(which, state)
        return {"name": advert.name, **{n: getattr(advert, n).hex() for n in ("cipher", "mask", "signature")}}

    def place(self, which: Sum, boxes: Mapping[str, Tensor]) -> "Place":
        """The site's place in a sum for which it has dealt shares; `Place.take` uses it up.

        Args:
            which: the sum.
            boxes: sealed shares from the other sites.

        Raises:
            RefusalError: the site has taken its place before, or does not take part like this.
        """
        if self.peers is None:
            raise RefusalError(_NO_KEYS)
        opened = unseal_boxes(self._shared(which), {other: box.numpy().tobytes() for other, box in boxes.items()})
        return Place(opened, len(read_peers(self.peers)), lambda: self._write(which, opened))

    def _shared(self, which: Sum) -> Shared:
        state = self._read(which)
        if not isinstance(state, Shared):
            raise RefusalError("this site has not dealt shares for this sum, or has sent numbers for it before")
        return state

    @property
    def _folder(self) -> Path:
        return self.folder / "secure"

    def _file(self, which: Sum) -> Path:
        return self._folder / f"round-{which.round:06d}.json"

    def _opened(self) -> dict[str, list[str]]:
        file = self._folder / "opened.json"
        return dict(json.loads(read_file(file))) if file.exists() else {}

    def _write(self, which: Sum, state: Advertised | Shared | Masked) -> None:
        replace_file(self._file(which), json.dumps(_plain(state)).encode())

    def _read(self, which: Sum) -> Advertised | Shared | Masked:
        file = self._file(which)
        if not file.exists():
            raise RefusalError(f"this site has no keys for the secure sum of round {which.round}, or has used them")
        return _restored(which, self.name, json.loads(read_file(file)))


@final
@dataclass(frozen=True)
class Place:
    """A site's place in one sum: with which keys it masks. It is taken once, before the site looks at its data, and is used
    up then, whether or not numbers go up.

    Args:
        state: which shares it holds of the sites in the sum.
        parties: sites that may add to a sum at most: those whose registered keys the site has. Each may take as much of the
            room. It is the same for every sum of a round, whichever sites a server lists for it, since whether numbers
            fit, once for few and then for more sites, would be more than one answer.
        take: writes down that the place is taken.
    """

    state: Masked
    parties: int
    take: Callable[[], None]

    @property
    def threshold(self) -> int:
        """t: the site hands out no shares for fewer survivors."""
        return self.state.before.threshold

    def masked(self, part: Message) -> Message:
        """A part, as `polyfed.simulation.secure.part_of` makes it, with its words masked."""
        words, layout = from_message(part)
        return as_message(mask(self.state, words), layout)


def as_bytes(data: bytes) -> Tensor:
    """Bytes as a tensor."""
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def advert_of(told: Mapping[str, Any]) -> Advert:
    """An advert from the head of a letter.

    Raises:
        ValueError, TypeError, KeyError: it is none.
    """
    cipher, key, signature = (bytes.fromhex(told[name]) for name in ("cipher", "mask", "signature"))
    if not isinstance(told["name"], str) or len(cipher) != 32 or len(key) != 32 or len(signature) > 256:
        raise ValueError("it is no advert")
    return Advert(told["name"], cipher, key, signature)


def _plain(state: Advertised | Shared | Masked) -> dict[str, Any]:
    if isinstance(state, Advertised):
        return {"cipher": state.cipher.hex(), "mask": state.mask.hex()}
    if isinstance(state, Shared):
        adverts = [
            {"name": a.name, "cipher": a.cipher.hex(), "mask": a.mask.hex(), "signature": a.signature.hex()}
            for a in state.adverts
        ]
        numbers = {"agreement": _hex(state.agreement), "own": _hex(state.own), "seed": state.seed.hex()}
        return {**_plain(state.before), "adverts": adverts, "threshold": state.threshold, **numbers}
    return {**_plain(state.before), "held": {name: _hex(shares) for name, shares in state.held.items()}}


def _restored(which: Sum, name: str, kept: Mapping[str, Any]) -> Advertised | Shared | Masked:
    first = Advertised(which, name, bytes.fromhex(kept["cipher"]), bytes.fromhex(kept["mask"]))
    if "adverts" not in kept:
        return first
    adverts = tuple(advert_of(advert) for advert in kept["adverts"])
    agreement, own = (_numbers(kept[part]) for part in ("agreement", "own"))
    second = Shared(first, adverts, kept["threshold"], bytes.fromhex(kept["seed"]), agreement, own)
    if "held" not in kept:
        return second
    return Masked(second, {other: _numbers(shares) for other, shares in kept["held"].items()})


def _hex(numbers: tuple[int, ...]) -> list[str]:
    return [format(number, "x") for number in numbers]


def _numbers(texts: list[str]) -> tuple[int, ...]:
    return tuple(int(text, 16) for text in texts)
