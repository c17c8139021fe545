"""Provides the cryptographic functions of secure aggregation, by the package `cryptography`.

These are X25519, HKDF with SHA-256, ChaCha20 as a stream, ChaCha20-Poly1305, and signatures by the sites' registered keys.
Every key is derived with a context that names its purpose, in length-prefixed parts, so that keys of different purposes,
rounds or runs always differ.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from polyfed.core.errors import UserError
from polyfed.core.io.atomic_files import read_file
from polyfed.deploy.protocol.errors import RefusalError

Words = np.ndarray[tuple[int], np.dtype[np.uint64]]
PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey
PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
SignFunction = Callable[[bytes], bytes]
_VERSION = "polyfed secure sum 1"
TAG_BYTES = 16  # bytes that encryption adds
_NONCE = bytes(12)  # constant, since each key encrypts one message only


def encode_length_prefixed(*parts: str | bytes) -> bytes:
    """Joins texts and bytes, each after its length, so that different lists give different bytes.

    >>> encode_length_prefixed("ab", "c") == encode_length_prefixed("a", "bc")
    False
    """
    raw = [part.encode() if isinstance(part, str) else part for part in (_VERSION, *parts)]
    return b"".join(len(part).to_bytes(4, "big") + part for part in raw)


def derive_key(key: bytes, *context: str | bytes) -> bytes:
    """Derives a 32-byte key by HKDF-SHA256; each `context` (such as a purpose) gives another."""
    return HKDF(hashes.SHA256(), length=32, salt=None, info=encode_length_prefixed(*context)).derive(key)


def generate_private_key() -> bytes:
    """Returns a new random X25519 private key of 32 bytes."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_key_of(private_key: bytes) -> bytes:
    """Returns the 32-byte public key that belongs to an X25519 private key."""
    return X25519PrivateKey.from_private_bytes(private_key).public_key().public_bytes_raw()


def compute_shared_secret(own_private_key: bytes, peer_public_key: bytes) -> bytes:
    """Returns the secret of two sites from one's private and the other's public key (X25519).

    Raises:
        RefusalError: the public key is invalid: it would give the same secret with every private key.
    """
    try:
        return X25519PrivateKey.from_private_bytes(own_private_key).exchange(
            X25519PublicKey.from_public_bytes(peer_public_key)
        )
    except ValueError as error:
        raise RefusalError("a public key of this sum is not valid") from error


def generate_key_stream(key: bytes, count: int) -> Words:
    """Returns `count` pseudo-random 64-bit integers (ChaCha20) of a key that is used for nothing else."""
    encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * count)), dtype="<u8").astype(np.uint64, copy=False)


def encrypt(key: bytes, content: bytes, context: bytes) -> bytes:
    """Encrypts and authenticates bytes with a key that may be used only once (ChaCha20-Poly1305)."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, content, context)


def decrypt(key: bytes, encrypted: bytes, context: bytes) -> bytes:
    """Returns the bytes that `encrypt` encrypted.

    Raises:
        ValueError: the data were changed, or were encrypted with another key or context.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, encrypted, context)
    except InvalidTag as error:
        raise ValueError("it was changed, or is not meant for this") from error


def make_signing_function(private_key: PrivateKey) -> SignFunction:
    """Returns a function that signs bytes with a site's registered private key."""
    if isinstance(private_key, ed25519.Ed25519PrivateKey):
        return private_key.sign
    return lambda content: private_key.sign(content, ec.ECDSA(hashes.SHA384()))


def is_signature_valid(public_key: PublicKey, signature: bytes, content: bytes) -> bool:
    """Returns True if the signature of `content` was made with the private key that belongs to the given public key."""
    try:
        if isinstance(public_key, ed25519.Ed25519PublicKey):
            public_key.verify(signature, content)
        else:
            public_key.verify(signature, content, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        return False
    return True


def read_registered_private_key(file: Path) -> PrivateKey:
    """Reads a site's registered private key from a file in OpenSSH's format.

    Raises:
        UserError: the key cannot be read, has a passphrase, or is of another kind than ecdsa and ed25519.
    """
    try:
        key = serialization.load_ssh_private_key(read_file(file), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"the key of this site, {file}, cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey):
        raise UserError(f"the key of this site, {file}, must be one of ecdsa or ed25519: ssh-keygen -t ecdsa -b 384")
    return key


def read_public_keys_of_all_sites(folder: Path) -> dict[str, PublicKey]:
    """Reads {site: public key} of all sites from `NAME.pub` or `NAME.key.pub` in a folder.

    Raises:
        UserError: there are none, one cannot be read, or two sites have the same key.
    """
    key_by_site: dict[str, PublicKey] = {}
    for file in sorted(folder.glob("*.pub")):
        try:
            key = serialization.load_ssh_public_key(read_file(file))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"the public key {file} cannot be read: {error}") from error
        if not isinstance(key, ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey):
            raise UserError(f"the public key {file} must be one of ecdsa or ed25519")
        name = file.name.removesuffix(".pub").removesuffix(".key")
        if (holder := next((n for n, k in key_by_site.items() if k == key), None)) or name in key_by_site:
            raise UserError(f"{file}: two sites cannot have one key, nor one site two ({holder or name})")
        key_by_site[name] = key
    if not key_by_site:
        raise UserError(f"{folder} holds no public keys of sites; put NAME.pub of every site there")
    return key_by_site
