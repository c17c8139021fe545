"""What leaves a site: in the book before the site looks at its data, then clipped, with noise, masked or compressed.

A message that is entered and not sent costs too much; one that is sent and not entered would be given away. So a message is
entered first, whatever becomes of it, and nothing is computed for one that the book refuses.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from polyfed.core.algorithm import Algorithm, Message
from polyfed.core.errors import UserError
from polyfed.core.messages.compressors import Compressor
from polyfed.core.messages.message_compression import compress_message
from polyfed.deploy.privacy.accountant import check_budget, spend_budget, spent_epsilon
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection, clip_and_add_noise
from polyfed.deploy.protocol.wire import first_non_finite_tensor
from polyfed.simulation.rounds.secure_aggregation import effective_disclosures, encode_sum_part

if TYPE_CHECKING:
    from polyfed.deploy.secure_aggregation.client import SumParticipation

_NON_METRICS = frozenset({"num_examples", "train_loss", "seconds", "columns", "errors"})  # of `disclose`
_NON_NUMERIC = frozenset({"seconds", "columns", "errors"})
_LOG = logging.getLogger("polyfed.site")


@final
@dataclass(frozen=True)
class DisclosureGuard:
    """What may leave a site, and how.

    Args:
        ledger: the file in which messages are counted.
        data_set: the owner's name of the data set.
        protection: clipping and noise.
        disclose: scalars that may go up beside those that a method needs.
    """

    ledger: Path
    data_set: str
    protection: ReplyProtection
    disclose: frozenset[str]

    def check_budget(self) -> None:
        """Raises a `UserError` if the owner has set an end, and another message would be beyond it: then nothing is done
        with the data any more, whatever a letter asks for."""
        if self.protection.max_epsilon is not None:
            check_budget(self.ledger, self.data_set, self.protection)

    def record_message(self, *, already_recorded: bool = False) -> dict[str, float | None]:
        """Enters a message into the book; what all have cost, for the site's own metrics.

        Args:
            already_recorded: whether the book has this message already.

        Raises:
            UserError: the book does not take it; nothing may be sent.
        """
        get_epsilon, delta = spent_epsilon if already_recorded else spend_budget, self.protection.delta
        epsilon = get_epsilon(self.ledger, self.data_set, self.protection)
        if not self.protection.noise_multiplier:
            return {}
        _LOG.info("(epsilon, delta) spent on the data set %r: (%.3g, %g)", self.data_set, epsilon, delta)
        try:
            self.check_budget()
        except UserError:
            _LOG.warning(
                "the budget of the data set %r is spent with this message: this site neither trains nor is evaluated any "
                "more, and saves no further personal model",
                self.data_set,
            )
        return {"epsilon": epsilon if math.isfinite(epsilon) else None, "delta": delta}

    def discloses_data(self, head: Mapping[str, Any], algorithm: Algorithm[Any, Any]) -> bool:
        """Whether something that depends on data may leave with the answer to a task: known before it is carried out."""
        secure = bool(head.get("secure"))
        if head["phase"] == "local":
            if secure:
                return bool(head.get("part"))
            return bool(
                effective_disclosures(algorithm, secure) or algorithm.scalars_needed or self.disclose - _NON_NUMERIC
            )
        return head["phase"] == "evaluate" and bool(self.disclose - _NON_METRICS)

    def protect_reply(
        self,
        reply: Message,
        message: Message,
        algorithm: Algorithm[Any, Any],
        compression: Compressor | None,
        seed: int,
    ) -> Message:
        """The reply as it may leave the site; compressed after the noise.

        Raises:
            UserError: see `protect`.
        """
        allowed = self.disclose | algorithm.scalars_needed
        scalars = {name: value for name, value in reply.scalars.items() if name in allowed}
        body = clip_and_add_noise(Message(reply.tensors, scalars), message, self.protection)
        return body if compression is None else compress_message(body, message, compression, seed)

    def mask_reply(
        self, reply: Message, message: Message, algorithm: Algorithm[Any, Any], participation: "SumParticipation"
    ) -> Message:
        """The reply as masked numbers of a secure sum.

        Raises:
            UserError: a number is not finite, or does not fit; or see `protect`.
        """
        body = clip_and_add_noise(reply, message, self.protection, noise_sources=participation.threshold - 1)
        if wrong := first_non_finite_tensor(body):
            raise UserError(f"{wrong} of its reply has NaN or infinite values, which a sum cannot take")
        return participation.mask_part(encode_sum_part(body, algorithm, participation.max_sites))
