"""Lists the words with which a method declares what it requires of clients and what it discloses to the server, each
with its meaning.
"""

from collections.abc import Iterable
from typing import Any, final

from polyfed.core.errors import did_you_mean

REQUIREMENTS = {
    "model": "each client brings a network",
    "one_architecture": "each client brings a network, all of one architecture",
    "architectures": "each client brings a network; the server knows its architecture",
    "layer_catalogue": "each client brings a network; the server knows which types of layers there are",
    "norms_in_layers": "a norm layer is part of the layer before it, and of its type",
    "public_data": "there are public examples, of the form of the clients' inputs",
    "one_input_spec": "the clients' inputs have one shape and type",
    "one_data_spec": "inputs, as networks get them, and outputs have one form, which the server knows",
    "images": "inputs are images (channels, height, width)",
    "classification": "every example has one class",
    "one_representation": "the inputs of the networks' last layers have one width",
    "one_family": "the networks have the same layers, and differ in width alone",
    "adapters": "the networks have low-rank adapters (LoRA)",
}
"""The words of `Algorithm.requires`: what a method may require of the clients."""

ONE_CLASS = "classification"
"""The word of `Algorithm.requires` that asks for one class per example, which some tasks have."""

NEEDS_ONE_ARCHITECTURE = "needs one architecture"
"""The reason for refusing a method when clients have several architectures."""

MODEL_REQUIREMENTS = frozenset({"model", "one_architecture", "architectures", "layer_catalogue"})
"""The words of `Algorithm.requires` that each imply that the clients bring networks."""

DISCLOSURES = {
    "weights": "a network's weights after training on the client's data",
    "hypernetwork": "weights of a network that generates weights, after training on the client's data",
    "architecture": "the client's architecture",
    "representations": "what the client's network makes of public examples",
    "class_means": "means over the client's examples of each class",
    "mean_representation": "the mean over the client's examples of what its network makes of them",
    "class_counts": "how many examples of each class the client has, or the classes' shares",
    "moments": "of a client's table, how many rows have each column of numbers, their means and variances",
    "summaries": "names and categories of the columns of a client's data, and counts, means, spreads and histograms of them",
    "ranks": "in how few numbers the client's update can be written, which depends on its data and network",
    "guidance": "how a vector for each class should change for the loss on held-out examples of the client to fall",
    "received_loss": "how well the model that the client received fits its training examples",
    "choice": "which of several models suits the client's data best",
    "form": "names, shapes or whole numbers of its tensors that depend on its data",
    "vocabulary": "which rows of tables its data choose: which words or categories it has",
    "sum": "the sum of what the clients of a round send, and nothing of one alone",
}
"""The words of `Algorithm.discloses`: what the server may learn of a client. A method may bring more (`NewDisclosure`)."""

CONSENT = frozenset({
    "weights", "architecture", "class_means", "mean_representation", "class_counts", "moments", "summaries", "vocabulary",
    "received_loss", "guidance",
})  # fmt: skip
"""The words of `DISCLOSURES` that a site must have allowed before the method runs there (`disclosures_needing_consent`)."""

TRAITS = {
    "everyone_trains": "all clients run `local_update` in each round, and only those drawn for it are aggregated (pFedMe)",
    "one_version": "all replies of a round answer one version of the server's state, which first replies may complete; so "
    "rounds wait for all their clients",
    "plans_all_rounds": "the number of all rounds decides what a round does (a schedule): no run can get more later",
    "fits_validation": "`personal_model` depends on the client's validation examples, whose scores are then out of fold",
}
"""The words of `Algorithm.traits`: how a method is run and scored. Nothing but `personal_model` may depend on validation
examples: they choose between methods, rates and rounds. `AlgorithmContract` finds out what does."""


@final
class NewDisclosure(str):
    """Declares a new word for a method's `discloses`, with its meaning: what the server learns of a client.

    A site is asked for its consent to it, and refuses the method if it adds noise.

    >>> sorted({"weights", NewDisclosure("gaze", "where the client's people look")})
    ['gaze', 'weights']
    """

    meaning: str

    def __new__(cls, word: str, meaning: str) -> "NewDisclosure":
        """Returns the word with its meaning.

        Args:
            word: the new word.
            meaning: what the server learns of a client, in a few words.

        Raises:
            TypeError: the word is not a name, or polyfed has it already, or the meaning is empty.
        """
        if not word.isidentifier() or word in DISCLOSURES:
            reason = "polyfed has this word already" if word in DISCLOSURES else "a word such as 'gaze' is needed"
            raise TypeError(f"NewDisclosure({word!r}, ...): {reason}")
        if not meaning.strip():
            raise TypeError(
                f"NewDisclosure({word!r}, {meaning!r}): say in a few words what the server learns of a client"
            )
        new_word = super().__new__(cls, word)
        new_word.meaning = meaning
        return new_word

    def __reduce__(self) -> tuple[type["NewDisclosure"], tuple[str, str]]:
        """Returns what pickle and `copy` need to build the word with its meaning again, in another process, say."""
        return NewDisclosure, (str(self), self.meaning)


def disclosures_needing_consent(disclosures: Iterable[str]) -> frozenset[str]:
    """Returns the disclosures that a site's owner must allow: those of `CONSENT`, and all `NewDisclosure`s.

    >>> sorted(disclosures_needing_consent({"weights", "choice", NewDisclosure("gaze", "where the client's people look")}))
    ['gaze', 'weights']
    """
    return frozenset(word for word in disclosures if word in CONSENT or word not in DISCLOSURES)


def meaning_of_disclosure(word: str) -> str:
    """Returns, for a word of `Algorithm.discloses`, a text on what the server learns of a client.

    >>> meaning_of_disclosure("choice")
    "which of several models suits the client's data best"
    """
    if isinstance(word, NewDisclosure):
        return word.meaning
    return DISCLOSURES.get(word, "see the documentation of the method, which is not part of polyfed")


def check_declared_words_are_known(method: Any, name: str) -> None:
    """Raises a `TypeError` if a method declares a requirement, disclosure or trait that polyfed does not know.

    Args:
        method: an `Algorithm`, or its class.
        name: its name in the error.
    """
    for words, allowed in (("requires", REQUIREMENTS), ("discloses", DISCLOSURES), ("traits", TRAITS)):
        if isinstance(declared := getattr(method, words), str):
            raise TypeError(
                f"{name}.{words} must be a set of words, got {declared!r}; write frozenset({{{declared!r}}})"
            )
        for word in sorted(declared - allowed.keys()):
            if words == "discloses" and isinstance(word, NewDisclosure):
                continue
            cure = f"; or, for a new one, write NewDisclosure({word!r}, ...) with what the server learns"
            raise TypeError(f"{name}.{words} has the unknown word {word!r}; {did_you_mean(word, allowed)}"
                            f"{cure if words == 'discloses' else ''}")  # fmt: skip
