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
from polyfed.core.io.atomic_files import create_private_folder, read_file, write_file_atomically
from polyfed.core.messages.fixed_point import build_sum_message, parse_sum_message
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.secure_aggregation.crypto import read_peer_keys, read_registered_key, signing_function
from polyfed.deploy.secure_aggregation.protocol import (
    AdvertisedState,
    KeyAdvertisement,
    MaskingState,
    SharedState,
    SumId,
    advertise_keys,
    decrypt_share_boxes,
    mask_words,
    release_unmasking_shares,
    share_secrets,
)

BOXES_GROUP = "boxes of the secure sum"
"""The group in which sealed shares travel, as bytes: site -> box."""
BUNDLE_GROUP = "bundle of the secure sum"
_NO_KEYS = (
    "this site has no keys for secure sums; give its registered key and those of the others in its node-config: "
    'key="/path/site.key" peers="/path/of/public/keys"'
)


@final
@dataclass(frozen=True)
class SecureSumClient:
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

    def answer_sum_steps(self, run: str, head: Mapping[str, Any]) -> tuple[dict[str, Any], Message]:
        """Does what a letter of the kind "sum" asks for, in parts that do not depend on each other: "hand_out", "share" and
        "advertise". What the site refuses is told by part.

        Returns:
            what the head of the answer says, and its body.
        """
        head_fields: dict[str, Any] = {"refusals": {}}
        body: dict[str, dict[str, Tensor]] = {}
        parts = {"hand_out": self._release_shares, "share": self._share, "advertise": self._advertise}
        for part, run_step in parts.items():
            if (request := head.get(part)) is None:
                continue
            try:
                run_step(run, request, head_fields, body)
            except RefusalError as refusal:
                head_fields["refusals"][part] = str(refusal)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
                if isinstance(error, UserError):
                    raise
                head_fields["refusals"][part] = "this part of the letter is damaged"
        return head_fields, Message(body)

    def _advertise(
        self, run: str, round_number: Any, head_fields: dict[str, Any], body: dict[str, dict[str, Tensor]]
    ) -> None:
        head_fields["advert"] = self.create_key_advertisement(SumId(run, round_number))

    def _share(self, run: str, request: Any, head_fields: dict[str, Any], body: dict[str, dict[str, Tensor]]) -> None:
        if self.peers is None:
            raise RefusalError(_NO_KEYS)
        sum_id = SumId(run, request["round"])
        state = self._read_state(sum_id)
        if not isinstance(state, AdvertisedState):
            raise RefusalError("this site has dealt its shares for this sum already")
        adverts = [parse_advert(advert) for advert in request["adverts"]]
        shared_state, boxes = share_secrets(
            state, adverts, int(request["threshold"]), read_peer_keys(self.peers), self.threshold
        )
        self._write_state(sum_id, shared_state)
        body[BOXES_GROUP] = {receiver: bytes_to_tensor(box) for receiver, box in boxes.items()}

    def _release_shares(
        self, run: str, request: Any, head_fields: dict[str, Any], body: dict[str, dict[str, Tensor]]
    ) -> None:
        sum_id = SumId(run, request["round"])
        state = self._read_state(sum_id)
        if not isinstance(state, MaskingState):
            raise RefusalError("this site has sent no numbers for this sum")
        survivors_by_round = self._read_opened_rounds()
        shares = release_unmasking_shares(state, request["survivors"], survivors_by_round.get(str(sum_id.round)))
        write_file_atomically(
            self._folder / "opened.json",
            json.dumps({**survivors_by_round, str(sum_id.round): request["survivors"]}).encode(),
        )
        self._state_file(sum_id).unlink()
        head_fields["tokens"] = {v: format(token, "x") for v, token in shares.tokens.items()}
        body[BUNDLE_GROUP] = {"bundle": bytes_to_tensor(shares.bundle)}

    def create_key_advertisement(self, sum_id: SumId) -> dict[str, str]:
        """New keys for a sum, in place of any that it had; for the head of a letter."""
        if self.key is None:
            raise RefusalError(_NO_KEYS)
        state, advert = advertise_keys(sum_id, self.name, signing_function(read_registered_key(self.key)))
        create_private_folder(self._folder, parents=True)
        for file in self._folder.glob("round-*.json"):
            if int(file.stem.removeprefix("round-")) not in (sum_id.round - 1, sum_id.round):
                file.unlink()
        self._write_state(sum_id, state)
        return {"name": advert.name, **{n: getattr(advert, n).hex() for n in ("cipher", "mask", "signature")}}

    def join_sum(self, sum_id: SumId, boxes: Mapping[str, Tensor]) -> "SumParticipation":
        """The site's place in a sum for which it has dealt shares; `Place.mark_used` uses it up.

        Args:
            sum_id: the sum.
            boxes: sealed shares from the other sites.

        Raises:
            RefusalError: the site has taken its place before, or does not take part like this.
        """
        if self.peers is None:
            raise RefusalError(_NO_KEYS)
        masking_state = decrypt_share_boxes(
            self._read_shared_state(sum_id), {sender: box.numpy().tobytes() for sender, box in boxes.items()}
        )
        return SumParticipation(
            masking_state, len(read_peer_keys(self.peers)), lambda: self._write_state(sum_id, masking_state)
        )

    def _read_shared_state(self, sum_id: SumId) -> SharedState:
        state = self._read_state(sum_id)
        if not isinstance(state, SharedState):
            raise RefusalError("this site has not dealt shares for this sum, or has sent numbers for it before")
        return state

    @property
    def _folder(self) -> Path:
        return self.folder / "secure"

    def _state_file(self, sum_id: SumId) -> Path:
        return self._folder / f"round-{sum_id.round:06d}.json"

    def _read_opened_rounds(self) -> dict[str, list[str]]:
        file = self._folder / "opened.json"
        return dict(json.loads(read_file(file))) if file.exists() else {}

    def _write_state(self, sum_id: SumId, state: AdvertisedState | SharedState | MaskingState) -> None:
        write_file_atomically(self._state_file(sum_id), json.dumps(_state_to_json(state)).encode())

    def _read_state(self, sum_id: SumId) -> AdvertisedState | SharedState | MaskingState:
        file = self._state_file(sum_id)
        if not file.exists():
            raise RefusalError(f"this site has no keys for the secure sum of round {sum_id.round}, or has used them")
        return _state_from_json(sum_id, self.name, json.loads(read_file(file)))


@final
@dataclass(frozen=True)
class SumParticipation:
    """A site's place in one sum: with which keys it masks. It is taken once, before the site looks at its data, and is used
    up then, whether or not numbers go up.

    Args:
        state: which shares it holds of the sites in the sum.
        max_sites: sites that may add to a sum at most: those whose registered keys the site has. Each may take as
            much of the
            room. It is the same for every sum of a round, whichever sites a server lists for it, since whether numbers
            fit, once for few and then for more sites, would be more than one answer.
        mark_used: writes down that the place is taken.
    """

    state: MaskingState
    max_sites: int
    mark_used: Callable[[], None]

    @property
    def threshold(self) -> int:
        """t: the site hands out no shares for fewer survivors."""
        return self.state.shared.threshold

    def mask_part(self, part: Message) -> Message:
        """A part, as `polyfed.simulation.rounds.secure_aggregation.encode_sum_part` makes it, with its words masked."""
        words, layout = parse_sum_message(part)
        return build_sum_message(mask_words(self.state, words), layout)


def bytes_to_tensor(data: bytes) -> Tensor:
    """Bytes as a tensor."""
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def parse_advert(fields: Mapping[str, Any]) -> KeyAdvertisement:
    """An advert from the head of a letter.

    Raises:
        ValueError, TypeError, KeyError: it is none.
    """
    cipher, mask_key, signature = (bytes.fromhex(fields[name]) for name in ("cipher", "mask", "signature"))
    if not isinstance(fields["name"], str) or len(cipher) != 32 or len(mask_key) != 32 or len(signature) > 256:
        raise ValueError("it is no advert")
    return KeyAdvertisement(fields["name"], cipher, mask_key, signature)


def _state_to_json(state: AdvertisedState | SharedState | MaskingState) -> dict[str, Any]:
    if isinstance(state, AdvertisedState):
        return {"cipher": state.cipher.hex(), "mask": state.mask.hex()}
    if isinstance(state, SharedState):
        adverts = [
            {"name": a.name, "cipher": a.cipher.hex(), "mask": a.mask.hex(), "signature": a.signature.hex()}
            for a in state.adverts
        ]
        numbers = {
            "agreement": _numbers_to_hex(state.agreement),
            "own": _numbers_to_hex(state.own_shares),
            "seed": state.seed.hex(),
        }
        return {**_state_to_json(state.advertised), "adverts": adverts, "threshold": state.threshold, **numbers}
    return {
        **_state_to_json(state.shared),
        "held": {name: _numbers_to_hex(shares) for name, shares in state.held_shares.items()},
    }


def _state_from_json(
    sum_id: SumId, name: str, content: Mapping[str, Any]
) -> AdvertisedState | SharedState | MaskingState:
    advertised = AdvertisedState(sum_id, name, bytes.fromhex(content["cipher"]), bytes.fromhex(content["mask"]))
    if "adverts" not in content:
        return advertised
    adverts = tuple(parse_advert(advert) for advert in content["adverts"])
    agreement, own_shares = (_numbers_from_hex(content[part]) for part in ("agreement", "own"))
    shared = SharedState(
        advertised, adverts, content["threshold"], bytes.fromhex(content["seed"]), agreement, own_shares
    )
    if "held" not in content:
        return shared
    return MaskingState(shared, {sender: _numbers_from_hex(shares) for sender, shares in content["held"].items()})


def _numbers_to_hex(numbers: tuple[int, ...]) -> list[str]:
    return [format(number, "x") for number in numbers]


def _numbers_from_hex(texts: list[str]) -> tuple[int, ...]:
    return tuple(int(text, 16) for text in texts)
