"""Limits what a site discloses: counts each message in the privacy ledger, and clips, adds noise to, masks or
compresses replies.

Each message is recorded before the site looks at its data: one that is recorded and then not sent wastes some budget, but
one that is sent without a record would break the guarantee. For a message that the budget refuses nothing is computed.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from polyfed.core.algorithm import Algorithm, Message
from polyfed.core.errors import UserError, describe_exception
from polyfed.core.messages.compressors import Compressor
from polyfed.core.messages.message_compression import compress_message
from polyfed.core.robust.clip import euclidean_norm, update_changes
from polyfed.deploy.privacy.accountant import (
    check_budget_for_next_message,
    read_spent_epsilon,
    record_message_and_get_epsilon,
)
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection, clip_and_add_noise
from polyfed.deploy.protocol.wire import first_non_finite_tensor
from polyfed.deploy.site.private_training import PrivateTrainingGuard, private_training_options
from polyfed.simulation.rounds.replies.secure_aggregation import (
    effective_disclosures,
    encode_reply_in_fixed_point,
    secure_bound,
    uses_default_mean,
)

if TYPE_CHECKING:
    from polyfed.deploy.secure_aggregation.client import SumParticipation

_NON_METRICS = frozenset(
    {"num_examples", "train_loss", "seconds", "columns", "look", "errors"}
)  # entries of `disclose`
_NON_NUMERIC = frozenset({"seconds", "columns", "look", "errors"})
_MAX_ERROR_LENGTH = 4000  # characters of an exception's text; a longer one could exceed the limit of the header
_LOG = logging.getLogger("polyfed.site")


def check_disclose_suits_protection(disclose: frozenset[str], protection: ReplyProtection) -> None:
    """Raises a `UserError` if the owner lets numbers or texts out that the owner's noise, or privacy, does not cover."""
    if protection.noise_multiplier and disclose:
        raise UserError(
            f"noise-multiplier protects tensors only, and disclose={','.join(sorted(disclose))!r} lets numbers out "
            "beside them; leave disclose empty"
        )
    if protection.protects_units and (uncovered := disclose & {"look", "errors", "seconds"}):
        raise UserError(
            f"max-epsilon limits what can be learnt of an example, and disclose={','.join(sorted(uncovered))!r} lets out "
            "what no noise covers; take it out of disclose"
        )


@final
@dataclass(frozen=True)
class DisclosureGuard:
    """Applies the privacy settings of a site's owner to the replies that leave the site.

    Args:
        ledger: the file that counts the messages.
        data_set: the owner's name of the data set.
        protection: clipping and noise.
        disclose: scalars that the site may send in addition to those that a method needs.
    """

    ledger: Path
    data_set: str
    protection: ReplyProtection
    disclose: frozenset[str]

    @property
    def of_units(self) -> PrivateTrainingGuard:
        """Returns the guard that keeps the privacy budget of each example or patient in runs with `privacy`."""
        return PrivateTrainingGuard(self.ledger, self.data_set, self.protection)

    def check_budget_for_next_message(self) -> None:
        """Raises a `UserError` if one more message would exceed the owner's privacy budget; does not record a message."""
        if self.protection.max_epsilon is not None and not self.protection.protects_units:
            check_budget_for_next_message(self.ledger, self.data_set, self.protection)

    def record_message_and_get_cost(self, *, already_recorded: bool = False) -> dict[str, float | None]:
        """Records a message, and returns {"epsilon": ε, "delta": δ} spent so far, or {} without noise.

        Args:
            already_recorded: whether the ledger has this message already.

        Returns:
            "epsilon" (None if infinite) and "delta"; empty without noise.

        Raises:
            UserError: the budget does not allow the message, so that nothing may be sent.
        """
        get_epsilon = read_spent_epsilon if already_recorded else record_message_and_get_epsilon
        delta = self.protection.delta
        epsilon = get_epsilon(self.ledger, self.data_set, self.protection)
        if not self.protection.noise_multiplier:
            return {}
        _LOG.info("(epsilon, delta) spent on the data set %r: (%.3g, %g)", self.data_set, epsilon, delta)
        try:
            self.check_budget_for_next_message()
        except UserError:
            _LOG.warning(
                "the budget of the data set %r is spent with this message: this site neither trains nor is evaluated any "
                "more, and saves no further personal model",
                self.data_set,
            )
        return {"epsilon": epsilon if math.isfinite(epsilon) else None, "delta": delta}

    def describe_error(self, error: BaseException | str) -> str:
        """Returns what the server may read of an error: its type or, if allowed, its message."""
        if "errors" in self.disclose:
            return (error if isinstance(error, str) else describe_exception(error))[:_MAX_ERROR_LENGTH]
        kind = str(error).partition(":")[0] if isinstance(error, str) else type(error).__name__
        return f"{kind if kind.isidentifier() else 'an error'} (its text is in the log of the site)"

    def must_record_reply(self, head: Mapping[str, Any], algorithm: Algorithm[Any, Any]) -> bool:
        """Returns whether an answer depends on data in a way that training has not recorded.

        Args:
            head: header of the task.
            algorithm: the method.
        """
        if private_training_options(algorithm) is not None:
            return False
        secure = bool(head.get("secure"))
        if head["phase"] == "local":
            if secure:
                return bool(head.get("part"))
            return bool(
                effective_disclosures(algorithm, secure) or algorithm.scalars_needed or self.disclose - _NON_NUMERIC
            )
        return head["phase"] == "evaluate" and bool(self.disclose - _NON_METRICS)

    def clip_noise_and_compress_reply(
        self,
        reply: Message,
        received_message: Message,
        algorithm: Algorithm[Any, Any],
        compression: Compressor | None,
        seed: int,
    ) -> Message:
        """Prepares a reply to leave: drops private scalars, clips, adds noise, and compresses.

        Args:
            reply: the client's reply.
            received_message: the server's message that it answers.
            algorithm: the method, whose needed scalars are kept.
            compression: the compressor; None sends the reply uncompressed.
            seed: seed of the compressor.

        Raises:
            UserError: see `clip_and_add_noise`.
        """
        allowed = self.disclose | algorithm.scalars_needed
        scalars = {name: value for name, value in reply.scalars.items() if name in allowed}
        body = clip_and_add_noise(Message(reply.tensors, scalars), received_message, self.protection)
        return body if compression is None else compress_message(body, received_message, compression, seed)

    def clip_noise_and_mask_reply(
        self,
        reply: Message,
        received_message: Message,
        algorithm: Algorithm[Any, Any],
        participation: "SumParticipation",
    ) -> Message:
        """Prepares a reply to enter a secure sum: clips the update, adds noise and masks; returns the result.

        Args:
            reply: the client's reply.
            received_message: the server's message that it answers.
            algorithm: the method.
            participation: the site's place in the sum.

        Raises:
            UserError: a number is not finite or too large for the sum, or see `clip_and_add_noise`.
        """
        body = clip_and_add_noise(
            reply, received_message, self.protection, num_noisy_sites=participation.unmasking_threshold - 1
        )
        if nonfinite_name := first_non_finite_tensor(body):
            raise UserError(f"{nonfinite_name} of its reply has NaN or infinite values, which a sum cannot take")
        encoded = encode_reply_in_fixed_point(body, algorithm, participation.max_sites, received_message)
        _log_norm_and_bound(body, received_message, algorithm)
        return participation.mask_encoded_reply(encoded)


def _log_norm_and_bound(reply: Message, received_message: Message, algorithm: Algorithm[Any, Any]) -> None:
    """Writes into the site's own log how large its update is, which nobody else can see, if it must keep a bound."""
    bound = secure_bound(algorithm, received_message)
    if bound is None or not uses_default_mean(algorithm):
        return
    norm = euclidean_norm(update_changes(reply, received_message, algorithm.groups, algorithm._differences))
    if norm <= bound.max_norm:
        _LOG.info("the update of this site has a norm of %.4g, within the bound of %.4g", norm, bound.max_norm)
    else:
        _LOG.warning(
            "the update of this site has a norm of %.4g and was scaled down to the bound of %.4g; if this goes on beyond "
            "the first rounds, compare its data, preprocessing and learning rate with what all agreed on",
            norm,
            bound.max_norm,
        )
