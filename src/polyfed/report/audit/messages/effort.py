"""Says in words what was tried on the messages, with what effort, and what the numbers do not say."""

from collections.abc import Sequence

from polyfed.algorithms import registry_name
from polyfed.core.io.text.number_format import count_with_noun
from polyfed.report.audit.messages.attack_messages import MOST_IMAGES, MOST_STEPS
from polyfed.report.audit.messages.message_audit import MessageAudit
from polyfed.simulation.rounds.federation import Federation

_LAST = (
    "An attack that fails shows nothing: more runs, more effort, or attacks on the messages of all rounds, may succeed. "
    "No number here is called safe."
)


def describe_effort(
    federation: Federation, messages: Sequence[MessageAudit], iterations: int, restarts: int
) -> tuple[str, ...]:
    """Returns what was tried on the messages, as sentences."""
    name, senders = registry_name(federation.algorithm), max(entry.senders for entry in messages)
    receiver = f"the sum of {senders} clients" if federation.settings.secure else "each client's reply"
    whose = "" if len(messages) == len(federation.clients) else f" of {', '.join(entry.client for entry in messages)}"
    rounds = " and ".join(f"round {number}" for number in sorted({entry.round for entry in messages}))
    sentences = [
        f"Messages of {rounds}{whose}, in which the server sees {receiver}; those of later rounds were not attacked."
    ]
    if any(entry.candidates for entry in messages):
        effort = f"{count_with_noun(iterations, 'iteration')}, {count_with_noun(restarts, 'restart')}"
        sentences.append(
            "Tried on images: those computed from a first linear layer's weights and bias, if there is one, and a search "
            f"for images whose training would give this update (cosine distance and total variation, Geiping et al. 2020; "
            f"{effort}, up to {MOST_IMAGES} images, up to {MOST_STEPS} steps imitated, labels known). "
            "PSNR: the image that came out best, and the mean over all, each with the closest reconstruction; above about "
            "20 dB one recognises an image. Others: the same reconstructions against images that the client did not train "
            "on; what is not above them may be chance."
        )
    elif any(entry.images for entry in messages) and iterations:
        sentences.append(
            f"Images were not attacked: both attacks need the change of weights, and {name} sends none that the server "
            "knew before, or none of a network that could be built. Other attacks were not tried."
        )
    sentences.append(
        "Labels: the share of the client's examples that is counted rightly from its message, by numbers in it or the "
        "change of the last layer's bias; guess: all classes equally frequent."
    )
    return (*sentences, _LAST)
