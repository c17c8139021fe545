"""Executes a site's steps of secure aggregation, and stores its keys and secrets on disk between the server's messages.

Each message may be a process of its own, so the state of each step (`protocol`) is a file, `secure/round-N.json` below the
run's folder. Each step runs once: numbers masked twice with the same masks would reveal their difference, and shares dealt
twice, or released for two lists, would reveal more than the sum. `secure/opened.json` keeps for good the survivors for which
the site has opened each round.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from polyfed.core.algorithm import Message
from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import create_private_folder_if_missing, read_file, write_file_atomically
from polyfed.core.messages.fixed_point import build_sum_message, parse_sum_message
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.secure_aggregation.crypto import (
    make_signing_function,
    read_public_keys_of_all_sites,
    read_registered_private_key,
)
from polyfed.deploy.secure_aggregation.protocol import (
    KeyAdvertisement,
    KeysAdvertisedState,
    MaskingState,
    SecretsSharedState,
    SumId,
    check_and_share_secrets,
    create_signed_keys,
    decrypt_received_shares,
    mask_words,
    release_unmasking_shares,
)

T = TypeVar("T")
_LOG = logging.getLogger("polyfed.site")
SHARES_GROUP = "boxes of the secure sum"
"""The group in which encrypted shares travel, as bytes: site -> share."""
BUNDLE_GROUP = "bundle of the secure sum"
_NO_KEYS = (
    "this site has no keys for secure sums; give its registered key and those of the others in its node-config: "
    'key="/path/site.key" peers="/path/of/public/keys"'
)


@final
@dataclass(frozen=True)
class SecureSumClient:
    """Executes one site's steps of secure aggregation in a run, and stores its keys and secrets on disk.

    Args:
        name: the site's name.
        folder: the run's folder at the site.
        private_key_file: file of the site's registered private key.
        public_keys_folder: folder of the registered public keys of all sites.
        owner_threshold: the smallest threshold that the owner accepts; None requires more than two thirds of a
            round's sites.
    """

    name: str
    folder: Path
    private_key_file: Path | None
    public_keys_folder: Path | None
    owner_threshold: int | None = None

    def answer_sum_steps(self, run: str, head: Mapping[str, Any]) -> "SecureSumAnswer":
        """Executes the steps that a header requests, and returns header fields and tensors to answer.

        They are "hand_out" (release shares for unmasking), "share" (share secrets) and "advertise" (create and send keys).

        The steps do not depend on each other; the answer lists the refused ones with their reasons.

        Args:
            run: identifier of the run.
            head: header of the envelope.

        Returns:
            Header fields and payload of the answer.
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
                head_fields["refusals"][part] = "this part of the message is damaged"
        return SecureSumAnswer(head_fields, Message(body))

    def _advertise(
        self, run: str, round_number: Any, head_fields: dict[str, Any], body: dict[str, dict[str, Tensor]]
    ) -> None:
        head_fields["advert"] = self.replace_keys_and_build_advertisement(SumId(run, round_number))

    def _share(self, run: str, request: Any, head_fields: dict[str, Any], body: dict[str, dict[str, Tensor]]) -> None:
        if self.public_keys_folder is None:
            raise RefusalError(_NO_KEYS)
        sum_id = SumId(run, request["round"])
        state = self._read_state(sum_id)
        if not isinstance(state, KeysAdvertisedState):
            raise RefusalError("this site has dealt its shares for this sum already")
        adverts = [parse_key_advertisement(advert) for advert in request["adverts"]]
        shared_state, encrypted_shares = check_and_share_secrets(
            state,
            adverts,
            int(request["threshold"]),
            read_public_keys_of_all_sites(self.public_keys_folder),
            self.owner_threshold,
        )
        self._write_state(sum_id, shared_state)
        body[SHARES_GROUP] = {receiver: bytes_to_tensor(share) for receiver, share in encrypted_shares.items()}

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
        self._state_file(sum_id.round).unlink()
        head_fields["tokens"] = {v: format(token, "x") for v, token in shares.tokens.items()}
        body[BUNDLE_GROUP] = {"bundle": bytes_to_tensor(shares.bundle)}

    def replace_keys_and_build_advertisement(self, sum_id: SumId) -> dict[str, str]:
        """Creates new keys for a secure sum, and returns the signed public keys as header fields."""
        if self.private_key_file is None:
            raise RefusalError(_NO_KEYS)
        state, advert = create_signed_keys(
            sum_id, self.name, make_signing_function(read_registered_private_key(self.private_key_file))
        )
        create_private_folder_if_missing(self._folder, parents=True)
        for file in self._folder.glob("round-*.json"):
            if file not in (self._state_file(number) for number in (sum_id.round - 1, sum_id.round)):
                file.unlink()
        self._write_state(sum_id, state)
        return _advertisement_to_json(advert)

    def decrypt_shares_and_join_sum(self, sum_id: SumId, encrypted_shares: Mapping[str, Tensor]) -> "SumParticipation":
        """Decrypts the other sites' shares, and returns what can mask one reply for the sum.

        Args:
            sum_id: the sum.
            encrypted_shares: encrypted shares from the other sites.

        Raises:
            RefusalError: the site has used its place before, or does not accept these shares.
        """
        if self.public_keys_folder is None:
            raise RefusalError(_NO_KEYS)
        masking_state = decrypt_received_shares(
            self._read_shared_state(sum_id),
            {sender: share.numpy().tobytes() for sender, share in encrypted_shares.items()},
        )
        return SumParticipation(
            masking_state,
            len(read_public_keys_of_all_sites(self.public_keys_folder)),
            lambda: self._write_state(sum_id, masking_state),
        )

    def _read_shared_state(self, sum_id: SumId) -> SecretsSharedState:
        state = self._read_state(sum_id)
        if not isinstance(state, SecretsSharedState):
            raise RefusalError("this site has not dealt shares for this sum, or has sent numbers for it before")
        return state

    @property
    def _folder(self) -> Path:
        return self.folder / "secure"

    def _state_file(self, round_number: int) -> Path:
        return self._folder / f"round-{round_number:06d}.json"

    def _read_opened_rounds(self) -> dict[str, list[str]]:
        file = self._folder / "opened.json"
        return self._read_json(file, dict) if file.exists() else {}

    def _write_state(self, sum_id: SumId, state: KeysAdvertisedState | SecretsSharedState | MaskingState) -> None:
        write_file_atomically(self._state_file(sum_id.round), json.dumps(_state_to_json(state)).encode())

    def _read_state(self, sum_id: SumId) -> KeysAdvertisedState | SecretsSharedState | MaskingState:
        file = self._state_file(sum_id.round)
        if not file.exists():
            raise RefusalError(f"this site has no keys for the secure sum of round {sum_id.round}, or has used them")
        return self._read_json(file, lambda content: _state_from_json(sum_id, self.name, content))

    def _read_json(self, file: Path, build: Callable[[Any], T]) -> T:
        """Returns what `build` makes of the JSON in one of the site's own files.

        Raises:
            RefusalError: the file is damaged; the error names it.
        """
        try:
            return build(json.loads(read_file(file)))
        except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            _LOG.error("%s is damaged; this site takes no part in the secure sum", file)
            raise RefusalError(
                f"its own file {self.folder.name}/{self._folder.name}/{file.name} is damaged; put back a copy, or start "
                "another run"
            ) from error


@final
class SecureSumAnswer(NamedTuple):
    """Holds a site's answer to the steps of secure aggregation that the server requested: header fields and tensors."""

    head_fields: dict[str, Any]
    body: Message


@final
@dataclass(frozen=True)
class SumParticipation:
    """Masks one site's reply for one secure sum, so that the server can read only the sum of all replies.

    A site uses its place once, before it looks at its data; it is used up even if no numbers are sent.

    Args:
        state: the site's keys, and the shares that it holds of the sites in the sum.
        max_sites: largest number of sites in a sum, namely those whose registered keys the site has; each gets an equal part
            of the number range. It does not depend on the sites that a server lists: otherwise whether numbers fit, first
            for few sites and then for more, would be more than one answer.
        mark_used: records that the place is used up.
    """

    state: MaskingState
    max_sites: int
    mark_used: Callable[[], None]

    @property
    def unmasking_threshold(self) -> int:
        """Returns the smallest number of sites whose sum this site allows the server to unmask."""
        return self.state.shared.threshold

    def mask_encoded_reply(self, encoded_reply: Message) -> Message:
        """Masks an encoded reply, so that the server can read only the sum over all sites.

        The reply is encoded by `polyfed.simulation.rounds.replies.secure_aggregation.encode_reply_in_fixed_point`.
        """
        words, layout = parse_sum_message(encoded_reply)
        return build_sum_message(mask_words(self.state, words), layout)


def bytes_to_tensor(data: bytes) -> Tensor:
    """Copies bytes into a tensor of type uint8 and shape (len(data),)."""
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def parse_key_advertisement(fields: Mapping[str, Any]) -> KeyAdvertisement:
    """Reads a site's public keys and their signature from header fields.

    Raises:
        ValueError, TypeError, KeyError: the fields are not a key advertisement.
    """
    cipher, mask_key, signature = (bytes.fromhex(fields[name]) for name in ("cipher", "mask", "signature"))
    if not isinstance(fields["name"], str) or len(cipher) != 32 or len(mask_key) != 32 or len(signature) > 256:
        raise ValueError("the fields are not a key advertisement")
    return KeyAdvertisement(fields["name"], cipher, mask_key, signature)


def _advertisement_to_json(advert: KeyAdvertisement) -> dict[str, str]:
    keys = {"cipher": advert.cipher_public.hex(), "mask": advert.mask_public.hex()}
    return {"name": advert.name, **keys, "signature": advert.signature.hex()}


def _state_to_json(state: KeysAdvertisedState | SecretsSharedState | MaskingState) -> dict[str, Any]:
    if isinstance(state, KeysAdvertisedState):
        return {"cipher": state.cipher_private.hex(), "mask": state.mask_private.hex()}
    if isinstance(state, SecretsSharedState):
        adverts = [_advertisement_to_json(advert) for advert in state.adverts]
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
) -> KeysAdvertisedState | SecretsSharedState | MaskingState:
    advertised = KeysAdvertisedState(sum_id, name, bytes.fromhex(content["cipher"]), bytes.fromhex(content["mask"]))
    if "adverts" not in content:
        return advertised
    adverts = tuple(parse_key_advertisement(advert) for advert in content["adverts"])
    agreement, own_shares = (_numbers_from_hex(content[part]) for part in ("agreement", "own"))
    shared = SecretsSharedState(
        advertised, adverts, content["threshold"], bytes.fromhex(content["seed"]), agreement, own_shares
    )
    if "held" not in content:
        return shared
    return MaskingState(shared, {sender: _numbers_from_hex(shares) for sender, shares in content["held"].items()})


def _numbers_to_hex(numbers: tuple[int, ...]) -> list[str]:
    return [format(number, "x") for number in numbers]


def _numbers_from_hex(texts: list[str]) -> tuple[int, ...]:
    return tuple(int(text, 16) for text in texts)
