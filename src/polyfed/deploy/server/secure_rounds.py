"""Runs rounds with secure aggregation at the server; each needs one more exchange of messages than other rounds.

The sites exchange the keys for a round during the round before:

    messages of round r    server sends: the model, the others' encrypted shares    sites send: masked numbers, keys for
                                                                                    round r + 1, metrics of round r - 1
    one more exchange      server sends: the survivors, keys for round r + 1        sites send: unmasking shares, encrypted
                                                                                    shares for round r + 1

Before the first round, and after a run is resumed, keys and encrypted shares take two exchanges of their own.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from polyfed.algorithms.base.averaging import Averaging
from polyfed.core.algorithm import Message
from polyfed.core.errors import ClientError, RoundError, UserError
from polyfed.core.io.values.number_checks import is_number
from polyfed.core.messages.fixed_point import FixedPointWords, SumLayout, build_sum_message, parse_sum_message
from polyfed.deploy.protocol.piggyback import add_evaluations_to_envelopes
from polyfed.deploy.protocol.wire import Envelope, PackedEnvelope, parse_head
from polyfed.deploy.secure_aggregation.client import BUNDLE_GROUP, SHARES_GROUP, parse_key_advertisement
from polyfed.deploy.secure_aggregation.protocol import (
    KeyAdvertisement,
    SumId,
    UnmaskingShares,
    bytes_of_shares_from_one_site_to_another,
)
from polyfed.deploy.secure_aggregation.shamir import PRIME
from polyfed.deploy.secure_aggregation.unmask import unmask_sum
from polyfed.deploy.server.reply_validation import (
    parse_evaluation_result_or_failure,
    sanitize_line,
    validate_answer_head,
)
from polyfed.deploy.server.server import MAX_EXAMPLES, DeploymentServer
from polyfed.simulation.engines.base import ClientTask, TaskResult
from polyfed.simulation.rounds.federation import Federation
from polyfed.simulation.rounds.replies.secure_aggregation import find_secure_reply_error

_NO_WORDS: FixedPointWords = np.zeros(1, dtype=np.uint64)
_LOG = logging.getLogger("polyfed.server")
Exchange = Callable[[Mapping[str, Envelope], int], Iterator[tuple[str, PackedEnvelope | str]]]
"""Sends envelopes to sites for a round, and yields each answer as it arrives, or a text that says why there is none."""


@final
class SecureRoundServer:
    """Runs the training rounds of a run with secure aggregation at the server.

    Args:
        server: the deployment.
        federation: samples the clients of each round.
        exchange: sends envelopes and yields the answers.
    """

    def __init__(self, server: DeploymentServer, federation: Federation, exchange: Exchange) -> None:
        self._server, self._federation, self._exchange = server, federation, exchange
        self._adverts: dict[int, dict[str, KeyAdvertisement]] = {}  # round -> site -> its keys
        # round -> site -> other site -> encrypted shares
        self._encrypted_shares: dict[int, dict[str, dict[str, Tensor]]] = {}

    def run_secure_round(self, tasks: Sequence[ClientTask], server_state: Any) -> Iterator[TaskResult]:
        """Executes a secure round, and yields a result per task; together they are the sum.

        The replies of the sites in the sum add up to it; a single one has no meaning.

        Args:
            tasks: training tasks of one round, and the evaluations that travel with them.
            server_state: the server state from which they are sent.
        """
        by_client = {task.client: task for task in tasks if task.phase == "local"}
        evaluations = {task.client: task for task in tasks if task.phase != "local"}
        round_number = next(iter(by_client.values())).round
        round_clients = self._federation.sample_round_clients(round_number)
        if len(self._encrypted_shares.get(round_number, {})) < self._server.secure_sum_threshold:
            self._exchange_keys(round_number, round_clients)
        results: dict[str, TaskResult] = {}
        sum_by_layout: dict[SumLayout, tuple[FixedPointWords, list[str]]] = {}  # sum so far, and the sites in it
        envelopes = self._task_envelopes(by_client, evaluations, round_number, round_clients)
        for client, answer in self._exchange(envelopes, round_number):
            sent_head, task = envelopes[client].head, by_client.get(client)
            trains = sent_head.get("phase") == "local"
            if client in evaluations:
                yield parse_evaluation_result_or_failure(evaluations[client], answer, self._server, piggybacked=trains)
            if task is None or not trains:
                if "advertise" in sent_head:
                    self._store_advert(client, _head_or_empty(answer), round_number + 1)
                continue
            try:
                head = _validated_head(task, answer, self._server, with_evaluation=client in evaluations)
                if "advertise" in sent_head:  # a site that was not asked has no part in the next sum
                    self._store_advert(client, head, round_number + 1)
                seconds = head.get("seconds", 0.0)
                results[client] = TaskResult(
                    task, client_state={"round": round_number}, seconds=_number_or_zero(seconds), masked=True
                )
                if client in round_clients:
                    assert isinstance(answer, PackedEnvelope)
                    words, layout = self._read_masked_words(task, answer, server_state)
                    partial_sum, members = sum_by_layout.get(layout, (np.zeros_like(words), []))
                    sum_by_layout[layout] = partial_sum + words, [*members, client]
            except UserError as error:
                results[client] = _failed_result(task, str(error))
        layout, (total, survivors) = max(
            sum_by_layout.items(), key=lambda part: len(part[1][1]), default=(SumLayout(()), (_NO_WORDS, []))
        )
        for client in (
            client for _, members in sum_by_layout.values() for client in members if members is not survivors
        ):
            reason = f"its tensors have other names or shapes than those of {len(survivors)} sites"
            results[client] = _failed_result(by_client[client], reason)
        yield from self._unmask_round(by_client, results, sorted(survivors), (total, layout), round_number)

    # -- before a round -----------------------------------------------------------------------------------------------

    def _exchange_keys(self, round_number: int, round_clients: Sequence[str]) -> None:
        """Collects from the sites a round's public keys, then their encrypted secret shares."""
        self._adverts[round_number], self._encrypted_shares[round_number] = {}, {}
        envelopes = {client: self._sum_envelope(client, advertise=round_number) for client in round_clients}
        for client, answer in self._exchange(envelopes, round_number):
            self._store_advert(client, _head_or_empty(answer), round_number)
        for client, answer in self._exchange(self._share_requests(round_number), round_number):
            self._store_encrypted_shares(client, answer, round_number)

    def _share_requests(self, round_number: int) -> dict[str, Envelope]:
        """Asks the sites for a round's encrypted secret shares; empty if too few have sent keys."""
        adverts = self._adverts.get(round_number, {})
        threshold = self._server.secure_sum_threshold
        if len(adverts) < threshold:
            return {}
        advert_fields = [
            {
                "name": a.name,
                "cipher": a.cipher_public.hex(),
                "mask": a.mask_public.hex(),
                "signature": a.signature.hex(),
            }
            for _, a in sorted(adverts.items())
        ]
        request = {"round": round_number, "threshold": threshold, "adverts": advert_fields}
        return {client: self._sum_envelope(client, share=request) for client in adverts}

    def _sum_envelope(self, client: str, **parts: Any) -> Envelope:
        return Envelope({**self._server.build_secure_sum_head(), "client": client, **parts})

    def _store_advert(self, client: str, head: Mapping[str, Any], round_number: int) -> None:
        """Stores the public keys in a site's reply; their signature is checked by the other sites, not by the server."""
        self._log_refusals(client, head)
        try:
            advert = parse_key_advertisement(head["advert"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return
        if advert.name == client and round_number <= self._server.settings.rounds:
            self._adverts.setdefault(round_number, {})[client] = advert

    def _store_encrypted_shares(self, client: str, answer: PackedEnvelope | str, round_number: int) -> None:
        """Stores a site's encrypted secret shares if there is one of the right length for each other site."""
        head, adverts = _head_or_empty(answer), self._adverts[round_number]
        self._log_refusals(client, head)
        if client not in adverts:
            return
        receivers, size = set(adverts) - {client}, bytes_of_shares_from_one_site_to_another(len(adverts))
        try:
            shares = answer.unpack_body().tensors.get(SHARES_GROUP, {}) if isinstance(answer, PackedEnvelope) else {}
        except UserError:
            return
        is_well_formed = all(share.dtype == torch.uint8 and share.shape == (size,) for share in shares.values())
        if set(shares) == receivers and receivers and is_well_formed:
            self._encrypted_shares.setdefault(round_number, {})[client] = dict(shares)

    def _log_refusals(self, client: str, head: Mapping[str, Any]) -> None:
        refusals = head.get("refusals")
        sentences = list(refusals.values()) if isinstance(refusals, dict) else []
        for sentence in [*sentences[:3], *([head["refused"]] if head.get("refused") else [])]:
            _LOG.warning("site %r refuses a step of the secure sum: %s", client, sanitize_line(sentence))

    # -- a round ------------------------------------------------------------------------------------------------------

    def _task_envelopes(
        self,
        tasks: Mapping[str, ClientTask],
        evaluations: Mapping[str, ClientTask],
        round_number: int,
        round_clients: Sequence[str],
    ) -> dict[str, Envelope]:
        """Returns a round's tasks, and requests for keys to sites that take part only in the next."""
        shares_by_sender = self._encrypted_shares.get(round_number, {})
        is_last_round = round_number >= self._server.settings.rounds
        next_round_clients = set() if is_last_round else set(self._federation.sample_round_clients(round_number + 1))
        self._adverts.pop(round_number - 1, None), self._encrypted_shares.pop(round_number - 1, None)

        def advertise_field(client: str) -> dict[str, int]:
            return {"advertise": round_number + 1} if client in next_round_clients else {}

        def build_head(task: ClientTask) -> dict[str, Any]:
            return {**self._server.build_task_head(task), **advertise_field(task.client)}

        envelopes = {}
        for client, task in tasks.items():
            if client in round_clients and client not in shares_by_sender:
                continue
            head = {**build_head(task), "part": client in round_clients}
            tensors = dict(task.transmitted_message.tensors)
            if client in round_clients:
                tensors[SHARES_GROUP] = {
                    sender: shares[client] for sender, shares in sorted(shares_by_sender.items()) if sender != client
                }
            envelopes[client] = Envelope(head, Message(tensors, task.transmitted_message.scalars))
        envelopes = add_evaluations_to_envelopes(envelopes, list(evaluations.values()), build_head)
        return envelopes | {
            client: self._sum_envelope(client, **advertise_field(client))
            for client in next_round_clients - envelopes.keys()
        }

    def _read_masked_words(
        self, task: ClientTask, answer: PackedEnvelope, server_state: Any
    ) -> tuple[FixedPointWords, SumLayout]:
        """Reads the masked numbers in a site's reply, and checks that they fit the sum.

        Raises:
            UserError: the words are not a valid part of this sum.
        """
        names_by_group = {group: sorted(tensors) for group, tensors in answer.tensor_specs_by_group().items()}
        if names_by_group != {"sum": ["layout", "words"]}:  # before tensors are read
            raise UserError(
                sanitize_line(f"a part of a secure sum is expected, and the reply holds {sorted(names_by_group)[:9]}")
            )
        body = answer.unpack_body()
        if error_text := find_secure_reply_error(body, self._server.algorithm, server_state, task.message):
            raise UserError(sanitize_line(error_text))
        return parse_sum_message(body)

    def _unmask_round(
        self,
        tasks: Mapping[str, ClientTask],
        results: dict[str, TaskResult],
        survivors: list[str],
        total: tuple[FixedPointWords, SumLayout],
        round_number: int,
    ) -> Iterator[TaskResult]:
        """Unmasks a round's sum and yields the results; collects the next round's shares on the way."""
        envelopes = self._share_requests(round_number + 1)
        has_enough = len(survivors) >= self._server.secure_sum_threshold
        for client in survivors if has_enough else ():
            parts = dict(envelopes[client].head) if client in envelopes else {}
            request = {"round": round_number, "survivors": survivors}
            envelopes[client] = self._sum_envelope(client, share=parts.get("share"), hand_out=request)
        shares_by_site: dict[str, UnmaskingShares] = {}
        for client, answer in self._exchange(envelopes, round_number):
            if round_number + 1 in self._adverts:
                self._store_encrypted_shares(client, answer, round_number + 1)
            if (shares := _read_unmasking_shares(answer)) is not None and client in survivors:
                shares_by_site[client] = shares
        sum_words: FixedPointWords | None = None
        reason = (
            f"its reply is in no sum: {len(survivors)} sites have replied, and {self._server.secure_sum_threshold} "
            "are needed"
        )
        if has_enough:
            try:
                sum_id = SumId(self._server.run, round_number)
                shared, adverts = self._encrypted_shares[round_number], list(self._adverts[round_number].values())
                sum_words = unmask_sum(
                    sum_id, adverts, self._server.secure_sum_threshold, shared, survivors, total[0], shares_by_site
                )
                self._check_weight(int(sum_words[0]), len(survivors))
            except RoundError as error:
                sum_words, reason = None, str(error)
        for client, task in tasks.items():
            result = results.get(client)
            if result is None:
                yield _failed_result(
                    task, "has no part in the secure sum: it was not there when its keys were exchanged"
                )
            elif client not in survivors or result.failure is not None:
                yield result
            elif sum_words is None:
                yield _failed_result(task, reason)
            else:
                yield TaskResult(
                    task, _sum_or_zeros(sum_words, total[1], client == survivors[0]), result.client_state,
                    seconds=result.seconds, masked=True,
                )  # fmt: skip

    def _check_weight(self, weight: int, sites: int) -> None:
        """Raises a `RoundError` for an impossible total weight: masks are left in the sum.

        A site that releases wrong shares can cause this, and the remaining masks would enter the model.
        """
        weighted = isinstance(self._server.algorithm, Averaging) and self._server.algorithm.weighted
        if not sites <= weight <= sites * (MAX_EXAMPLES if weighted else 1):
            raise RoundError(
                f"the sum of {sites} sites has the weight {weight}, which is impossible: one of them has not masked its "
                "numbers as agreed, or has released wrong shares"
            )


def _sum_or_zeros(words: FixedPointWords, layout: SumLayout, gets_sum: bool) -> Message:
    """Returns the secure sum as one site's reply, or zeros for every other site, so that all replies add up to the sum.

    The zeros take no memory.
    """
    if gets_sum:
        return build_sum_message(words, layout)
    zeros = torch.zeros(1, dtype=torch.int64).expand(layout.num_words)
    return Message({"sum": {"layout": layout.to_byte_tensor(), "words": zeros}})


def _validated_head(
    task: ClientTask, answer: PackedEnvelope | str, server: DeploymentServer, *, with_evaluation: bool
) -> Mapping[str, Any]:
    if isinstance(answer, str):
        raise UserError(answer)
    return validate_answer_head(task, parse_head(answer.head), server, with_evaluation=with_evaluation)


def _head_or_empty(answer: PackedEnvelope | str) -> dict[str, Any]:
    """Returns the header of a site's reply; empty if there is no reply or its header cannot be read."""
    try:
        return {} if isinstance(answer, str) else parse_head(answer.head)
    except UserError:
        return {}


def _read_unmasking_shares(answer: PackedEnvelope | str) -> UnmaskingShares | None:
    """Reads the unmasking shares in a site's reply; returns None if the reply has none, or damaged ones."""
    try:
        tokens = _head_or_empty(answer)["tokens"]
        assert isinstance(answer, PackedEnvelope)
        bundle = answer.unpack_body().tensors[BUNDLE_GROUP]["bundle"]
        if bundle.dtype != torch.uint8 or bundle.dim() != 1:
            return None
        numbers = {str(v): int(token, 16) % PRIME for v, token in tokens.items()}
        return UnmaskingShares(numbers, bundle.numpy().tobytes())
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _number_or_zero(value: Any) -> float:
    return float(value) if is_number(value) and abs(value) < 1e12 else 0.0


def _failed_result(task: ClientTask, reason: str) -> TaskResult:
    return TaskResult(task, failure=ClientError(task.round, task.client, task.phase, reason))
