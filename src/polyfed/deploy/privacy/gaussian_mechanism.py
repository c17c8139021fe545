"""Clips a site's update and adds Gaussian noise to it before it is sent; `polyfed.deploy.privacy.accountant` computes
the privacy guarantee.

The update of a site is U = reply − received, over all tensors together (a group that the server did not send counts as a
change from zero). A tensor that a reply holds under several names, such as tied weights in a `state_dict()`, counts once in
‖U‖ and gets one draw of noise: all its names are sent with the same values.

The site sends received + U·min(1, C/‖U‖) + N(0, (zC)²) instead of the reply. (McMahan et al. 2018,
"Learning Differentially Private Recurrent Language Models", with the noise added at the site, so that the server need not
be trusted.)

The noise comes from ChaCha20, keyed for each message with 256 bits from the operating system. torch's own generator uses 32
bits of its seed, which a server could try one by one, and numpy's generators can be predicted from their output.

Floating-point noise is not the noise of the proof. Which doubles a sum can take depends on its terms, so that the last
bits of a sent value could reveal the change (Mironov 2012, for Laplace noise). So the sum of change and noise is rounded
to a grid of about 2⁻²⁴ standard deviations, a power of two. Each point of the grid stands for very many values of the noise.
The guarantee then holds up to a small, unproven difference; an exact one needs a discrete noise distribution
(Canonne, Kamath and Steinke 2020).

In a secure sum each site adds a part of the noise, with variance (zC)²/(t−1). At least t sites are in the sum, so a site
that subtracts its own part sees the noise of t − 1 others, which is what one site alone would add. If k sites reveal their
noise to the server, that of t − k others is left, and z counts as z·√((t−k)/(t−1)).
"""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from polyfed.algorithms import REGISTRY, registry_name
from polyfed.core.algorithm import Algorithm, Message
from polyfed.core.errors import UserError, check_extra_installed
from polyfed.core.io.values.number_checks import is_number, is_positive_number
from polyfed.core.methods.declared_words import DISCLOSURES
from polyfed.simulation.rounds.replies.secure_aggregation import supports_secure_sum

_GRID_BITS = 24  # the precision of float32, so that sending float32 loses nothing
_CHUNK = 2**20  # numbers drawn together
_UNCOVERED_DISCLOSURES = {
    "choice": "which models it sends or asks for",
    "ranks": "the shapes of what it sends",
    "form": "the names, shapes or whole numbers of what it sends",
}
"""Entries of `Algorithm.discloses` that depend on a site's data and that noise on floating-point numbers does not cover."""


@final
@dataclass(frozen=True)
class ReplyProtection:
    """Holds a site's settings for differential privacy: clipping norm, noise multiplier, δ and budget.

    Args:
        clip_norm: C, the largest Euclidean norm of the update that the site sends; None does not clip.
        noise_multiplier: z, the standard deviation of the noise on each number, in units of C; 0 adds none.
        delta: δ at which the site reports its ε.
        max_epsilon: the privacy budget: the site sends nothing that would raise the total ε of its data set
            (`Site.data_set`) above it; None sets no limit. With noise ε is that of the whole data set; without, that of
            each example or patient, and the site takes part in runs with `privacy` only.

    Raises:
        UserError: a value is outside its range, or there is noise without clipping, which guarantees nothing.
    """

    clip_norm: float | None = None
    noise_multiplier: float = 0.0
    delta: float = 1e-5
    max_epsilon: float | None = None

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not is_positive_number(self.clip_norm):
            raise UserError(f"clip-norm must be positive, got {self.clip_norm!r}")
        if not (is_number(self.noise_multiplier) and 0 <= self.noise_multiplier < math.inf):
            raise UserError(f"noise-multiplier must be at least 0, got {self.noise_multiplier!r}")
        if not (is_number(self.delta) and 0 < self.delta < 1):
            raise UserError(f"delta must be between 0 and 1, got {self.delta!r}")
        if self.noise_multiplier and self.clip_norm is None:
            raise UserError("noise-multiplier needs clip-norm, without which noise guarantees nothing")
        if not math.isfinite((self.clip_norm or 1.0) * self.noise_multiplier):
            raise UserError(
                f"clip-norm * noise-multiplier must be finite, got {self.clip_norm!r} * {self.noise_multiplier!r}"
            )
        if self.max_epsilon is not None and not is_positive_number(self.max_epsilon):
            raise UserError(f"max-epsilon must be positive, got {self.max_epsilon!r}")

    @property
    def protects_units(self) -> bool:
        """Returns True if the budget is that of each example or patient, which only training with `privacy` keeps."""
        return self.max_epsilon is not None and not self.noise_multiplier

    @property
    def keeps_guarantee(self) -> bool:
        """Returns whether noise covers all that the site sends, of each message or of private training."""
        return bool(self.noise_multiplier) or self.protects_units


def noise_incompatibility_error(algorithm: Algorithm[Any, Any], secure_sums: bool) -> str | None:
    """Returns why a site that adds noise to its messages cannot run a method, as the end of a sentence; None if it can.

    Noise changes only the values of floating-point tensors, so nothing else in a message may depend on the site's data.

    >>> from polyfed.algorithms import FedKD
    >>> noise_incompatibility_error(FedKD(), secure_sums=False).partition(";")[0]
    'fedkd shows the shapes of what it sends, which depend on the data and which noise does not hide'
    """
    name, reason = registry_name(algorithm), _uncovered_disclosure(algorithm, secure_sums)
    if secure_sums and (rule := getattr(algorithm, "robust", None)) is not None:
        return (
            f"robust={rule!r} would limit its noise too, and count norms that no noise covers; run without robust, and with "
            'max-update-norm = "off" in the server\'s configuration, since this site limits its update by clip-norm'
        )
    if reason is not None:
        return f"{name} {reason}; methods that can run with noise: {', '.join(_methods_compatible_with_noise(secure_sums))}"
    if algorithm.scalars_needed:
        needed = ", ".join(sorted(algorithm.scalars_needed))
        return f"{name} needs {needed} without; for num_examples set algorithm.weighted = false"
    return None


def _uncovered_disclosure(algorithm: Algorithm[Any, Any], secure: bool) -> str | None:
    if descriptions := [
        description for word, description in _UNCOVERED_DISCLOSURES.items() if word in algorithm.discloses
    ]:
        return f"shows {' and '.join(descriptions)}, which depend on the data and which noise does not hide"
    if new_words := sorted(algorithm.discloses - DISCLOSURES.keys()):
        return f"discloses {' and '.join(new_words)}, of which it is not known that noise hides it"
    if "one_data_spec" in algorithm.requires:
        return "needs the number of classes in the site's labels, which no noise covers"
    if "class_means" in algorithm.discloses and not secure:
        return "sends weights of classes, which the server takes from 0 to 1 only, and with noise they are not"
    return None


def _methods_compatible_with_noise(secure: bool) -> list[str]:
    """Names the methods that a site with noise can run, if no example counts weigh clients."""
    unweighted: dict[str, Any] = {"weighted": False}
    methods = {
        n: method(**unweighted) if getattr(method, "weighted", False) else method() for n, method in REGISTRY.items()
    }
    return [
        name
        for name, method in methods.items()
        if not method.scalars_needed
        and _uncovered_disclosure(method, secure) is None
        and (supports_secure_sum(method) or not secure)
    ]


def clip_and_add_noise(
    reply: Message, received_message: Message, protection: ReplyProtection, num_noisy_sites: int = 1
) -> Message:
    """Returns the reply with its update (reply minus message) clipped and Gaussian noise added.

    Args:
        reply: the site's reply.
        received_message: the server's message that it answers.
        protection: the clipping norm and the noise multiplier.
        num_noisy_sites: number of sites whose noise the server sees added up; each adds 1/num_noisy_sites of the variance.

    Raises:
        UserError: the change is not finite; or, with noise, the reply has a complex tensor, or an integer tensor that the
            server did not send, which noise does not cover.

    >>> message, reply = Message({"model": {"w": torch.zeros(2)}}), Message({"model": {"w": torch.tensor([3.0, 4.0])}})
    >>> clip_and_add_noise(reply, message, ReplyProtection(clip_norm=1.0)).tensors["model"]["w"]
    tensor([0.6000, 0.8000])
    """
    if protection.clip_norm is None:
        return reply
    received = {(g, n): t for g, tensors in received_message.tensors.items() for n, t in tensors.items()}
    changes: dict[tuple[str, str], Tensor] = {}
    for group, tensors in reply.tensors.items():
        for name, tensor in tensors.items():
            if tensor.is_complex() and protection.noise_multiplier:
                raise UserError(f"group {group!r}: tensor {name!r} is complex, which noise does not cover here")
            if tensor.is_floating_point():
                changes[group, name] = (
                    tensor.double() - _received_or_zeros(received.get((group, name)), tensor).double()
                )
            elif protection.noise_multiplier and (group, name) not in received:
                raise UserError(
                    f"group {group!r}: tensor {name!r} holds whole numbers, which noise cannot cover; this method cannot "
                    "run with noise-multiplier above 0 here"
                )
    first_key = _first_occurrences(reply, changes)
    norm = math.sqrt(sum(float((change**2).sum()) for key, change in changes.items() if first_key[key] == key))
    if not math.isfinite(norm):
        raise UserError("the change is not finite, so that it cannot be clipped, and nothing is sent")
    scale = min(1.0, protection.clip_norm / norm) if norm else 1.0
    deviation = protection.noise_multiplier * protection.clip_norm / math.sqrt(num_noisy_sites)
    generator = GaussianNoise() if deviation else None
    arrays: dict[str, dict[str, Tensor]] = {}
    for group, tensors in reply.tensors.items():
        arrays[group] = sent_tensors = dict(tensors)
        for name, tensor in tensors.items():
            key = (group, name)
            if (
                key not in changes
            ):  # such as BatchNorm's counters: sent back unchanged, since noise would not cover them
                sent_tensors[name] = received[key] if protection.noise_multiplier else tensor
                continue
            if first_key[key] != key:
                sent_tensors[name] = arrays[first_key[key][0]][first_key[key][1]].clone()
                continue
            change = changes[key] * scale
            if generator is not None:
                change = generator.add_to(change, deviation)
            sent_tensors[name] = (_received_or_zeros(received.get(key), tensor).double() + change).to(tensor.dtype)
    return Message(arrays, reply.scalars)


_TensorKey = tuple[str, str]  # group and name


def _first_occurrences(reply: Message, changes: Mapping[_TensorKey, Tensor]) -> dict[_TensorKey, _TensorKey]:
    """Maps each tensor of a reply to the first with its memory and values: tied weights get noise once."""
    key_by_memory: dict[tuple[object, ...], _TensorKey] = {}
    first_keys: dict[_TensorKey, _TensorKey] = {}
    for key, change in changes.items():
        tensor = reply.tensors[key[0]][key[1]]
        memory = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device
        first = key_by_memory.setdefault(memory, key)
        first_keys[key] = first if torch.equal(changes[first], change) else key
    return first_keys


def _received_or_zeros(received: Tensor | None, tensor: Tensor) -> Tensor:
    same_form = received is not None and received.shape == tensor.shape and received.dtype == tensor.dtype
    return received if received is not None and same_form else torch.zeros_like(tensor)


@final
class GaussianNoise:
    """Generates normally distributed noise from a cryptographic random stream.

    Args:
        key: 32 bytes, used only once; None takes them from the operating system.

    >>> (len(GaussianNoise().draw_standard_normal(5)),
    ...  bool(np.array_equal(GaussianNoise().draw_standard_normal(5), GaussianNoise().draw_standard_normal(5))))
    (5, False)
    """

    def __init__(self, key: bytes | None = None) -> None:
        check_extra_installed("cryptography", "flower", "noise at a site")
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

        # The nonce may be constant, since each stream has a key of its own.
        cipher = Cipher(algorithms.ChaCha20(secrets.token_bytes(32) if key is None else key, bytes(16)), mode=None)
        self._stream = cipher.encryptor()

    def draw_uniform_uint64(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Returns the next `count` random 64-bit integers of the stream, uniformly distributed; shape (count,)."""
        return np.frombuffer(self._stream.update(bytes(8 * count)), dtype="<u8").astype(np.uint64)

    def add_to(self, values: Tensor, deviation: float) -> Tensor:
        """Returns `values` (float64, CPU) plus noise, rounded to a grid of about 2⁻²⁴ deviations."""
        grid = 2.0 ** (math.floor(math.log2(deviation)) - _GRID_BITS)
        noise = torch.from_numpy(self.draw_standard_normal(values.numel())).reshape(values.shape)
        return ((values + deviation * noise) / grid).round() * grid

    def draw_standard_normal(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Returns `count` independent draws from the normal distribution N(0, 1); shape (count,).

        The Box-Muller transform rejects no draws, so its running time reveals nothing about the values. Uniform numbers have
        64 bits, so that the largest draw is 9.5, beyond which 2e-21 of the probability lies.
        """
        pairs = -(-count // 2)
        draws = np.empty(2 * pairs)
        for start in range(0, pairs, _CHUNK):
            size = min(_CHUNK, pairs - start)
            words = self.draw_uniform_uint64(2 * size)
            uniform = (words[:size].astype(np.float64) + 0.5) * 2.0**-64
            radius = np.sqrt(np.maximum(-2 * np.log(uniform), 0.0))
            angle = (2 * math.pi * 2.0**-53) * (words[size:] >> np.uint64(11)).astype(np.float64)
            draws[2 * start : 2 * (start + size) : 2] = radius * np.cos(angle)
            draws[2 * start + 1 : 2 * (start + size) : 2] = radius * np.sin(angle)
        return draws[:count]
