"""Answers the server's messages at a site: trains and evaluates its client, within the limits set by its owner.

A site keeps nothing in memory between two envelopes, since Flower may start a process for each message. Its folder has one
folder per run: the private state after each round that the server may still return to, the site's own metrics, predictions
of the newest evaluated round, and at the end the personal network. None of these are sent.
"""

import logging
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

from polyfed.core.algorithm import Algorithm, Client, Message
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection
from polyfed.deploy.protocol.errors import RefusalError
from polyfed.deploy.protocol.piggyback import EVALUATION_KEY, split_training_and_evaluation
from polyfed.deploy.protocol.table_summary import COLUMNS, build_table_hashes_for_header
from polyfed.deploy.protocol.wire import Envelope
from polyfed.deploy.site.admission import (
    build_allowed_algorithm,
    build_introduction_fields,
    call_client_factory,
    check_client_and_get_architecture,
    check_protocol,
)
from polyfed.deploy.site.disclosure_guard import DisclosureGuard, check_disclose_suits_protection
from polyfed.deploy.site.look import LOOK, answer_look, check_and_record_rows_of_look
from polyfed.deploy.site.preprocessing import (
    apply_common_preprocessing,
    check_and_save_common_preprocessing,
    check_table_sums_allowed,
    summarize_schema,
    uses_federated_preprocessing,
)
from polyfed.deploy.site.private_state import (
    InvalidSiteStateError,
    check_or_record_client_identity,
    lock_folder,
    write_private_state_and_delete_older,
    write_task_results,
)
from polyfed.deploy.site.private_training import PrivateTask, private_training_options
from polyfed.deploy.site.request_log import FAILURE_TEXT, MAX_REFUSALS, RequestLog, TaskRequest, hash_task_inputs
from polyfed.deploy.site.site_task import SiteTask, StartedTask, check_phase, parse_site_task, resolve_requested_metrics
from polyfed.simulation.checks.fingerprints import data_fingerprint
from polyfed.simulation.engines.devices import choose_device
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.rounds.columns.federated_look import FederatedLook
from polyfed.simulation.rounds.columns.federated_preprocessing import Moments

if TYPE_CHECKING:
    from polyfed.deploy.secure_aggregation.client import SecureSumClient
    from polyfed.deploy.secure_aggregation.protocol import SumId

ActionResult = TypeVar("ActionResult")
_LOG = logging.getLogger("polyfed.site")
_RUN_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


@final
@dataclass(frozen=True)
class Site:
    """Answers the server's messages for one site, within the limits that the site's owner has set.

    Args:
        name: the site's id in the federation.
        client: returns the site's client; the function `client` of its `site.py`.
        folder: the site's own folder (`state-dir`).
        disclose: values that the site may send in addition to those that the method needs: "num_examples", "train_loss",
            "seconds", names of metrics such as "accuracy", "columns" for the names of a table's columns
            (`polyfed.deploy.protocol.table_summary`), "look" for statistics of all columns (`polyfed.deploy.site.look`), and
            "errors" for the text of exceptions.
        allow_disclosure: whether methods may run that disclose weights or architecture to the server.
        methods: names of the methods that may run; None allows all.
        protection: clipping and noise of the site's replies.
        device: the device on which the site computes.
        data_set: the owner's name of the data set. Its privacy budget counts the messages of all runs; another name is
            another budget, for data of other people.
        secure: whether the site takes part in secure sums only.
        key: for secure sums, the file of the site's registered private key.
        peers: for secure sums, the folder of the public keys of all sites (`NAME.pub`).
        secure_threshold: the smallest threshold of a secure sum that the owner accepts, always above half of a round's
            sites; None requires more than two thirds of them.
    """

    name: str
    client: Callable[[], Client]
    folder: Path
    disclose: frozenset[str] = frozenset()
    allow_disclosure: bool = False
    methods: frozenset[str] | None = None
    protection: ReplyProtection = field(default_factory=ReplyProtection)
    device: str = "auto"
    data_set: str = "data"
    secure: bool = False
    key: Path | None = None
    peers: Path | None = None
    secure_threshold: int | None = None

    def __post_init__(self) -> None:
        check_disclose_suits_protection(self.disclose, self.protection)

    def answer_envelope(self, envelope: Envelope) -> Envelope:
        """Executes a server's request and returns the reply; logs an error and replies a refusal."""
        return self._refuse_on_error(lambda: self._dispatch(envelope))

    def _dispatch(self, envelope: Envelope) -> Envelope:
        check_protocol(envelope.head)
        algorithm = build_allowed_algorithm(
            envelope.head, methods=self.methods, secure_only=self.secure, allow_disclosure=self.allow_disclosure,
            protection=self.protection, allow_look=LOOK in self.disclose,
        )  # fmt: skip
        self._run_folder(envelope.head)
        with lock_folder(self.folder):
            if envelope.head["kind"] == "sum":
                head_fields, body = self._secure_sum_client(envelope.head).answer_sum_steps(
                    envelope.head["run"], envelope.head
                )
                return Envelope({"client": self.name, "run": envelope.head["run"], **head_fields}, body)
            self._disclosure_guard.check_budget_for_next_message()  # before anything reads the data
            self._disclosure_guard.of_units.check_budget_is_left(algorithm)
            if envelope.head["kind"] == "introduce":
                return self._answer_introduction(envelope.head, algorithm)
            if envelope.head["kind"] == "prepare":
                return self._answer_prepare(envelope.head)
            if envelope.head["kind"] == "look":
                self._disclosure_guard.record_message_and_get_cost()
                return answer_look(envelope.head, algorithm, self._load_client())
            return self._answer_task(envelope, algorithm)

    def _refuse_on_error(self, action: Callable[[], ActionResult]) -> ActionResult | Envelope:
        """Calls a function and returns its result; if it raises an error, returns a reply that refuses."""
        try:
            return action()
        except (RefusalError, InvalidSiteStateError) as refusal:
            _LOG.warning("refused: %s", refusal)
            return Envelope({"client": self.name, "refused": str(refusal)})
        except Exception as error:  # the site's own code may raise anything
            _LOG.error("%s", traceback.format_exc())
            return Envelope({"client": self.name, "refused": self._disclosure_guard.describe_error(error)})

    def _secure_sum_client(self, head: Mapping[str, Any]) -> "SecureSumClient":
        from polyfed.deploy.secure_aggregation.client import SecureSumClient  # needs the package cryptography

        return SecureSumClient(self.name, self._run_folder(head), self.key, self.peers, self.secure_threshold)

    def _load_client(self, preprocessing_folder: Path | None = None) -> Client:
        """Builds the site's client by `client()` of its `site.py`, and applies the preprocessing of all sites.

        Args:
            preprocessing_folder: the run's folder, with the preprocessing for a table that asks for it; None applies none.
        """
        client = call_client_factory(self.client, self.name)
        if preprocessing_folder is None or not uses_federated_preprocessing(client):
            return client
        return apply_common_preprocessing(client, preprocessing_folder)

    def _answer_prepare(self, head: Mapping[str, Any]) -> Envelope:
        """Returns a description of the site's table, from which the server computes the common preprocessing."""
        self._disclosure_guard.record_message_and_get_cost()
        client = self._load_client()
        check_table_sums_allowed(client, self.protection, secure_sums=bool(head.get("secure")))
        table = summarize_schema(client, head["run"], with_names=self._sends_column_names)
        return Envelope({"client": self.name, "run": head["run"], "task": client.task.spec, "table": table})

    def _run_folder(self, head: Mapping[str, Any]) -> Path:
        if not (isinstance(head["run"], str) and _RUN_PATTERN.fullmatch(head["run"])):
            raise RefusalError(f"{head['run']!r} is not an identifier of a run")
        return self.folder / head["run"]

    @property
    def _sends_column_names(self) -> bool:
        return self.allow_disclosure or COLUMNS in self.disclose

    @property
    def _disclosure_guard(self) -> DisclosureGuard:
        return DisclosureGuard(self.folder / "privacy.json", self.data_set, self.protection, self.disclose)

    def _hides_replies(self, head: Mapping[str, Any]) -> bool:
        """Returns whether replies are masked or noisy, so that a refusal must not reveal more than they do."""
        return bool(head.get("secure") or self.protection.noise_multiplier or head["algorithm"].get("privacy"))

    def _answer_introduction(self, head: Mapping[str, Any], algorithm: Algorithm[Any, Any]) -> Envelope:
        """Answers a run's first message: describes the client, or refuses if it does not suit the method.

        A refusal may depend on data and network, so the number of refusals is limited.
        """
        requests = RequestLog(self._run_folder(head))
        request = TaskRequest("introduce", hash_task_inputs(head, Message()), MAX_REFUSALS)
        requests.check_allowed_and_find_in_ledger(request, same_inputs_only=self._hides_replies(head))
        reveals_count = "num_examples" in self.disclose | (set() if head.get("secure") else algorithm.scalars_needed)
        if reveals_count and private_training_options(algorithm) is None:
            self._disclosure_guard.record_message_and_get_cost()
        if self._hides_replies(head):
            requests.record_start(request, is_in_ledger=False)
        table: dict[str, Any] = {}  # sent with a refusal too, since the table may be its reason
        answer = self._refuse_on_error(
            lambda: self._check_and_introduce(head, algorithm, table, reveals_count=reveals_count)
        )
        if answer.head.get("refused"):
            requests.count_refusal(request)
        return Envelope({**answer.head, **table})

    def _check_and_introduce(
        self, head: Mapping[str, Any], algorithm: Algorithm[Any, Any], table: dict[str, Any], *, reveals_count: bool
    ) -> Envelope:
        """Checks that the client suits the method and began this run, and returns a reply that describes it.

        `table` gets the summary of the client's table before a check can fail, since a refusal sends it too.
        """
        client, folder = self._load_client(), self._run_folder(head)
        if uses_federated_preprocessing(client):
            check_table_sums_allowed(client, self.protection, secure_sums=bool(head.get("secure")))
            if "prepared" not in head:
                return Envelope({"client": client.id, "task": client.task.spec, "prepares": True})
            check_and_save_common_preprocessing(folder, head["prepared"], client)
            client = apply_common_preprocessing(client, folder)
        table |= build_table_hashes_for_header(
            client, algorithm.requires, head["run"], with_names=self._sends_column_names,
            adds_noise=self.protection.keeps_guarantee, method_discloses=algorithm.discloses,
        )  # fmt: skip
        architecture = check_client_and_get_architecture(
            client, algorithm, head, clips_updates=self.protection.clip_norm is not None
        )
        self._disclosure_guard.of_units.check_run_if_new(client, algorithm, folder)
        check_or_record_client_identity(folder, client.id, data_fingerprint([client]))
        return Envelope(build_introduction_fields(client, algorithm, architecture, reveals_example_count=reveals_count))

    def _answer_task(self, envelope: Envelope, algorithm: Algorithm[Any, Any]) -> Envelope:
        """Executes the evaluation of the previous round, if there is one, and the training; returns the reply.

        A failure of one of the two does not affect the other. The data are loaded once, after all checks that do without.
        """
        head, folder = envelope.head, self._run_folder(envelope.head)
        if head["client"] != self.name:
            raise RefusalError(f"this site is {self.name!r}, and was asked for {head['client']!r}")
        check_phase(head)
        split = split_training_and_evaluation(envelope) if head["phase"] == "local" else None
        training_envelope, evaluation = envelope if split is None else split.training, None
        training = self._refuse_on_error(lambda: self._start_task(training_envelope, algorithm))
        if split is not None:
            evaluation = self._refuse_on_error(lambda: self._start_task(split.evaluation, algorithm, split.nbytes))
        if not (isinstance(evaluation, StartedTask) or isinstance(training, StartedTask)):
            if evaluation is None:
                return training
            return Envelope({**training.head, EVALUATION_KEY: dict(evaluation.head)})
        client = self._load_client(None if isinstance(algorithm, Moments | FederatedLook) else folder)
        if isinstance(algorithm, Moments):
            check_table_sums_allowed(client, self.protection, secure_sums=bool(head.get("secure_sums")))
        if isinstance(algorithm, FederatedLook):
            check_and_record_rows_of_look(self.folder / "earlier_looks", client)
        metrics = resolve_requested_metrics(head.get("metrics", []), client.task)
        check_or_record_client_identity(folder, client.id, data_fingerprint([client]))
        engine = InProcessEngine(algorithm, [client], choose_device(self.device), metrics)

        def run_started_task(started: StartedTask | Envelope) -> Envelope:
            if isinstance(started, Envelope):
                return started
            return self._refuse_on_error(lambda: self._run_task_or_report_failure(started, algorithm, client, engine))

        evaluation_field = {} if evaluation is None else {EVALUATION_KEY: dict(run_started_task(evaluation).head)}
        answer = run_started_task(training)
        return Envelope({**answer.head, **evaluation_field}, answer.body)

    def _start_task(self, envelope: Envelope, algorithm: Algorithm[Any, Any], nbytes: int | None = None) -> StartedTask:
        """Checks a task, records it in ledger and log and joins its secure sum, before the site uses its data.

        So a task that the budget refuses changes nothing, and one that has begun is used up, whatever becomes of it.

        Args:
            envelope: the task's envelope.
            algorithm: the method.
            nbytes: bytes received for this task; None means all of the envelope's tensors.
        """
        head, folder = envelope.head, self._run_folder(envelope.head)
        site_task = parse_site_task(
            envelope, self.name, folder, algorithm, clips_updates=self.protection.clip_norm is not None, nbytes=nbytes
        )
        hides_reply, secure = self._hides_replies(head), bool(head.get("secure"))
        inputs_hash = hash_task_inputs(head, site_task.task.message) if hides_reply else ""
        participation = None
        if site_task.is_in_sum:
            sum_id = self._sum_id(head, site_task.task.round)
            sum_client = self._secure_sum_client(head)
            participation = sum_client.decrypt_shares_and_join_sum(sum_id, site_task.encrypted_shares)
        max_refusals = 1 if hides_reply else MAX_REFUSALS
        request = TaskRequest(f"{site_task.task.phase} {site_task.task.round}", inputs_hash, max_refusals)
        requests = RequestLog(folder)
        in_ledger = requests.check_allowed_and_find_in_ledger(request, same_inputs_only=secure)
        discloses = self._disclosure_guard.must_record_reply(head, algorithm)
        cost = self._disclosure_guard.record_message_and_get_cost(already_recorded=in_ledger) if discloses else {}
        if hides_reply:
            requests.record_start(request, is_in_ledger=discloses and site_task.task.phase == "local")
        if participation is not None:
            participation.mark_used()
        return StartedTask(site_task, request, participation, cost)

    def _run_task_or_report_failure(
        self, started: StartedTask, algorithm: Algorithm[Any, Any], client: Client, engine: InProcessEngine
    ) -> Envelope:
        """Executes one task and returns the reply; counts and reports an error that may depend on the data."""
        try:
            return self._run_task(started, algorithm, client, engine)
        except (OSError, RefusalError):  # a fault of the site's disk, or a spent budget, which reveal no data
            raise
        except Exception as error:  # any other error may depend on the data
            if not self._hides_replies(started.site_task.head):
                RequestLog(self._run_folder(started.site_task.head)).count_refusal(started.request)
                raise
            _LOG.error("%s", traceback.format_exc())
            return self._failure_envelope(started, error, started.site_task.answer_head())

    def _run_task(
        self, started: StartedTask, algorithm: Algorithm[Any, Any], client: Client, engine: InProcessEngine
    ) -> Envelope:
        """Executes one task and returns the reply, after the client's new private state is stored on disk."""
        site_task, head, task = started.site_task, started.site_task.head, started.site_task.task
        folder = self._run_folder(head)
        private_task = PrivateTask(self._disclosure_guard.of_units, algorithm, site_task, folder)
        with exclusive_single_torch_thread_with_grad():
            result = private_task.run(engine)
        answer = site_task.answer_head()
        answer["seconds"] = result.seconds if "seconds" in self.disclose else 0.0
        answer["metrics"] = {name: value for name, value in result.metrics.items() if name in self.disclose}
        if task.phase != "local":
            answer |= self._next_sum_keys(site_task)
        if result.failure is not None:
            _LOG.error("%s\n%s", result.failure, result.failure.trace)
            return self._failure_envelope(started, result.failure.reason, answer)
        record: dict[str, Any] = {
            "round": task.round, "phase": task.phase, "seconds": round(result.seconds, 4), **result.metrics,
            "bytes_down": site_task.nbytes, **private_task.describe_cost(),
        }  # fmt: skip
        body = Message()
        if task.phase == "local":
            assert result.reply is not None
            write_private_state_and_delete_older(
                folder, self.name, task.round, head["algorithm"], result.client_state,
                rollback_round=site_task.rollback_round,
            )  # fmt: skip
            record |= result.reply.scalars
            if self._hides_replies(head):
                RequestLog(folder).record_start(started.request, is_in_ledger=False)  # the next step may draw noise
            body = self._protect_reply(started, result.reply, algorithm)
            answer |= self._next_sum_keys(site_task) if head.get("secure") else {}
            record["bytes_up"] = body.nbytes
            record |= started.privacy_cost
        write_task_results(folder, client, result, record)
        return Envelope(answer, body)

    def _protect_reply(self, started: StartedTask, reply: Message, algorithm: Algorithm[Any, Any]) -> Message:
        """Returns a reply as it may leave: masked for the secure sum, empty if the site is not in it, else noisy."""
        site_task, message = started.site_task, started.site_task.task.message
        if started.participation is not None:
            return self._disclosure_guard.clip_noise_and_mask_reply(reply, message, algorithm, started.participation)
        if site_task.head.get("secure"):
            return Message()
        return self._disclosure_guard.clip_noise_and_compress_reply(
            reply, message, algorithm, site_task.compression, site_task.task.reply_seed
        )

    def _failure_envelope(
        self, started: StartedTask, error: BaseException | str, answer: Mapping[str, Any]
    ) -> Envelope:
        """Counts a failure that may depend on the data, and returns the reply that reports it.

        Where masks or noise hide the replies, the server learns only that the task failed. In a secure sum the answer is the
        same as to a task that the site does not repeat.
        """
        RequestLog(self._run_folder(started.site_task.head)).count_refusal(started.request)
        if not self._hides_replies(started.site_task.head):
            return Envelope({**answer, "failure": self._disclosure_guard.describe_error(error)})
        reason = self._disclosure_guard.describe_error(error) if "errors" in self.disclose else FAILURE_TEXT
        if started.site_task.task.phase == "local":
            return Envelope({"client": self.name, "refused": reason})
        return Envelope({**answer, "failure": reason})

    def _sum_id(self, head: Mapping[str, Any], round_number: int) -> "SumId":
        from polyfed.deploy.secure_aggregation.protocol import SumId

        return SumId(head["run"], round_number)

    def _next_sum_keys(self, site_task: SiteTask) -> dict[str, Any]:
        """Returns new public keys for the next round's secure sum; empty if the server has not asked for keys."""
        if site_task.next_sum_round is None:
            return {}
        sum_id = self._sum_id(site_task.head, site_task.next_sum_round)
        try:
            return {"advert": self._secure_sum_client(site_task.head).replace_keys_and_build_advertisement(sum_id)}
        except RefusalError as refusal:
            return {"refusals": {"advertise": str(refusal)}}
