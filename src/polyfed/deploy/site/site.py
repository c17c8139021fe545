"""The site's half of a deployment: its own client, its private state on its own disk, and what it lets out.

A site is asked by letters and answers each; it keeps nothing in memory between them, since Flower starts a process for each
message. Its folder has one folder a run: private state after each round the server may still go back to, metrics of its own,
predictions of the newest evaluated round, and the personal network at the end. None of that is sent.
"""

import logging
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

from polyfed.algorithms import get
from polyfed.core.algorithm import Algorithm, Client, Message
from polyfed.core.capabilities import BringsNetwork
from polyfed.core.errors import UserError
from polyfed.core.machine.threads import single_torch_thread
from polyfed.core.messages.lora import adapter_mode, architecture_without_ranks
from polyfed.core.nn.module_cache import cached_module, differ_only_in_frozen
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection, noise_incompatibility
from polyfed.deploy.protocol.handshake import check_public_inputs, input_spec_by_part
from polyfed.deploy.protocol.piggyback import EVALUATION_KEY, split_evaluation
from polyfed.deploy.protocol.table_summary import COLUMNS, summarize_table
from polyfed.deploy.protocol.wire import DATA_SPEC_REQUIREMENTS, PROTOCOL, Envelope, find_code_reference
from polyfed.deploy.secure_aggregation import RefusalError
from polyfed.deploy.site.disclosure_guard import DisclosureGuard
from polyfed.deploy.site.preprocessing import (
    MOMENTS_NAME,
    apply_common_preprocessing,
    check_table_sums_allowed,
    save_common_preprocessing,
    summarize_schema,
    uses_federated_preprocessing,
)
from polyfed.deploy.site.private_state import (
    InvalidSiteStateError,
    check_client_identity,
    lock_folder,
    write_private_state,
    write_task_results,
)
from polyfed.deploy.site.request_log import FAILURE_TEXT, MAX_REFUSALS, RequestLog, TaskRequest, hash_task_inputs
from polyfed.deploy.site.site_task import SiteTask, StartedTask, check_phase, parse_site_task, resolve_requested_metrics
from polyfed.simulation.checks import requirements
from polyfed.simulation.checks.client_init import check_client_init
from polyfed.simulation.checks.fingerprints import data_fingerprint
from polyfed.simulation.engines.devices import choose_device
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.rounds.federated_preprocessing import Moments
from polyfed.simulation.rounds.secure_aggregation import disclosures_to_allow, supports_secure_sum

if TYPE_CHECKING:
    from polyfed.deploy.secure_aggregation.client import SecureSumClient
    from polyfed.deploy.secure_aggregation.protocol import SumId

ActResult = TypeVar("ActResult")
_LOG = logging.getLogger("polyfed.site")
_RUN_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_MAX_ERROR_LENGTH = (
    4000  # characters of an exception that go up: a longer text would make the whole answer too large to be read
)


@final
@dataclass(frozen=True)
class Site:
    """A site.

    Args:
        name: its id in the federation.
        client: makes its network and data; the function `client` of its `site.py`.
        folder: where it keeps its own (`state-dir`).
        disclose: scalars that may go up beside those that the method needs: "num_examples", "train_loss", "seconds", names
            of metrics such as "accuracy", "columns" for the names of a table's columns (`polyfed.deploy.protocol.table_summary`), and
            "errors" for the text of exceptions.
        allow_disclosure: whether methods may run here by which the server learns weights or architecture.
        methods: names of the methods that may run here; None is all.
        protection: clipping and noise on what goes up.
        device: where it computes.
        data_set: the owner's name of the data set. What leaves the site is booked under it, in all runs; another name is
            another budget, for data of other people.
        secure: whether it takes part in secure sums only.
        key, peers: for secure sums, the file of its registered key, and the folder of those of all sites (`NAME.pub`).
        secure_threshold: the smallest threshold of a secure sum that its owner accepts; None is above two thirds of a
            round's sites. Never is it half of them or less.
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
        if self.protection.noise_multiplier and self.disclose:
            raise UserError(
                f"noise-multiplier protects tensors only, and disclose={','.join(sorted(self.disclose))!r} lets numbers out "
                "beside them; leave disclose empty"
            )

    def answer_envelope(self, envelope: Envelope) -> Envelope:
        """Does what a letter asks for. Whatever goes wrong is told in the answer, in full only in the site's log."""
        return self._refuse_on_error(lambda: self._dispatch(envelope))

    def _dispatch(self, envelope: Envelope) -> Envelope:
        if envelope.head.get("protocol") != PROTOCOL:
            raise RefusalError(
                f"the server speaks protocol {envelope.head.get('protocol')!r}, this site {PROTOCOL}; both need "
                "versions of polyfed that fit"
            )
        algorithm = self._allowed_algorithm(envelope.head)
        self._run_folder(envelope.head)
        with lock_folder(self.folder):
            if envelope.head["kind"] == "sum":
                head_fields, body = self._secure_sum_client(envelope.head).answer_sum_steps(
                    envelope.head["run"], envelope.head
                )
                return Envelope({"client": self.name, "run": envelope.head["run"], **head_fields}, body)
            self._disclosure_guard.check_budget()  # before anything is done with the data; the same for all that needs them
            if envelope.head["kind"] == "introduce":
                return self._answer_introduction(envelope.head, algorithm)
            return (
                self._answer_prepare(envelope.head)
                if envelope.head["kind"] == "prepare"
                else self._answer_task(envelope, algorithm)
            )

    def _refuse_on_error(self, action: Callable[[], ActResult]) -> ActResult | Envelope:
        """The result of `action`, or a refusal."""
        try:
            return action()
        except (RefusalError, InvalidSiteStateError) as refusal:
            _LOG.warning("refused: %s", refusal)
            return Envelope({"client": self.name, "refused": str(refusal)})
        except Exception as error:  # whatever the site's own code raises: it is reported, never swallowed
            _LOG.error("%s", traceback.format_exc())
            return Envelope({"client": self.name, "refused": self._error_for_server(error)})

    def _error_for_server(self, error: BaseException | str) -> str:
        """What the server is told of an error, whose text may show data."""
        if "errors" in self.disclose:
            return (error if isinstance(error, str) else f"{type(error).__name__}: {error}")[:_MAX_ERROR_LENGTH]
        kind = str(error).partition(":")[0] if isinstance(error, str) else type(error).__name__
        return f"{kind if kind.isidentifier() else 'an error'} (its text is in the log of the site)"

    def _allowed_algorithm(self, head: Mapping[str, Any]) -> Algorithm[Any, Any]:
        """The method, if its owner lets it run here."""
        fields = dict(head["algorithm"])
        name = str(fields.pop("name"))
        # Whether `Moments` runs here is said by the site's own table.
        algorithm = Moments() if name == MOMENTS_NAME else self._build_registered(name, fields)
        secure = bool(head.get("secure"))
        if self.secure and not secure:
            raise RefusalError("this site takes part in secure sums only (secure=true in its node-config)")
        if secure and not supports_secure_sum(algorithm):
            raise RefusalError(f"{name} needs each site's message by itself, and has no secure sums")
        if not self.allow_disclosure and (disclosures := disclosures_to_allow(algorithm, secure)):
            raise RefusalError(
                f"{name} discloses {' and '.join(disclosures)} to the server, which this site does not allow "
                "(allow-disclosure)"
            )
        if self.protection.noise_multiplier and (incompatibility := noise_incompatibility(algorithm, secure)):
            raise RefusalError(f"this site adds noise, and {incompatibility}")
        return algorithm

    def _build_registered(self, name: str, fields: Mapping[str, Any]) -> Algorithm[Any, Any]:
        if self.methods is not None and name not in self.methods:
            raise RefusalError(f"this site runs {', '.join(sorted(self.methods))} only, not {name}")
        if code := find_code_reference(fields):
            raise RefusalError(f"{name} would load {code!r} at this site, which runs no code that the server names")
        algorithm: Algorithm[Any, Any] = get(name)(**fields)
        return algorithm

    def _secure_sum_client(self, head: Mapping[str, Any]) -> "SecureSumClient":
        from polyfed.deploy.secure_aggregation.client import SecureSumClient  # takes the package cryptography

        return SecureSumClient(self.name, self._run_folder(head), self.key, self.peers, self.secure_threshold)

    def _load_client(self, preprocessing_folder: Path | None = None) -> Client:
        """The client; its table as sites have `preprocessing_folder` in this run's folder, if it is of those that do."""
        client = self.client()
        if not isinstance(client, Client):
            raise UserError(f"client() of site.py must return a polyfed.Client, got {type(client).__name__}")
        if client.id != self.name:
            raise UserError(f"client() of site.py returns the client {client.id!r}, but this site is {self.name!r}")
        return (
            client
            if preprocessing_folder is None or not uses_federated_preprocessing(client)
            else apply_common_preprocessing(client, preprocessing_folder)
        )

    def _answer_prepare(self, head: Mapping[str, Any]) -> Envelope:
        """What is told of the table, before sites agree on its preprocessing."""
        self._disclosure_guard.record_message()
        client = self._load_client()
        check_table_sums_allowed(client, self.protection, secure=bool(head.get("secure")))
        table = summarize_schema(client, head["run"], with_names=self.allow_disclosure or COLUMNS in self.disclose)
        return Envelope({"client": self.name, "run": head["run"], "task": client.task, "table": table})

    def _run_folder(self, head: Mapping[str, Any]) -> Path:
        if not (isinstance(head["run"], str) and _RUN_PATTERN.fullmatch(head["run"])):
            raise RefusalError(f"{head['run']!r} is no identifier of a run")
        return self.folder / head["run"]

    @property
    def _disclosure_guard(self) -> DisclosureGuard:
        return DisclosureGuard(self.folder / "privacy.json", self.data_set, self.protection, self.disclose)

    def _hides_replies(self, head: Mapping[str, Any]) -> bool:
        """Whether what goes up is masked or has noise, so that a refusal must not tell what these hide."""
        return bool(head.get("secure") or self.protection.noise_multiplier)

    def _answer_introduction(self, head: Mapping[str, Any], algorithm: Algorithm[Any, Any]) -> Envelope:
        """What a site that is introduced to a run answers. Whether it suits the method depends on its data and network."""
        requests = RequestLog(self._run_folder(head))
        request = TaskRequest("introduce", hash_task_inputs(head, Message()), MAX_REFUSALS)
        requests.check_allowed(request, same_inputs_only=self._hides_replies(head))
        tells_number = "num_examples" in self.disclose | (set() if head.get("secure") else algorithm.scalars_needed)
        if tells_number:
            self._disclosure_guard.record_message()
        if self._hides_replies(head):
            requests.record_start(request, in_ledger=False)
        table: dict[str, Any] = {}  # told by a site that does not take part, too, since it may be why
        answer = self._refuse_on_error(
            lambda: self._check_and_introduce(head, algorithm, table, tells_number=tells_number)
        )
        if answer.head.get("refused"):
            requests.count_refusal(request)
        return Envelope({**answer.head, **table})

    def _check_and_introduce(
        self, head: Mapping[str, Any], algorithm: Algorithm[Any, Any], table: dict[str, Any], *, tells_number: bool
    ) -> Envelope:
        """Checks that this client suits the method and is the one that began the run; tells what the server must know."""
        client, folder = self._load_client(), self._run_folder(head)
        needs = algorithm.requires
        if uses_federated_preprocessing(client):
            check_table_sums_allowed(client, self.protection, secure=bool(head.get("secure")))
            if "prepared" not in head:
                return Envelope({"client": client.id, "task": client.task, "prepares": True})
            save_common_preprocessing(folder, head["prepared"], client)
            client = apply_common_preprocessing(client, folder)
        with_names = self.allow_disclosure or COLUMNS in self.disclose
        adds_noise = bool(self.protection.noise_multiplier)
        table |= summarize_table(
            client, needs, head["run"], with_names=with_names, adds_noise=adds_noise, discloses=algorithm.discloses
        )
        if isinstance(algorithm, BringsNetwork):
            requirements.check_clients_suit_method([client], algorithm)
            requirements.check_networks_run(
                [client], factory=algorithm.network_for(requirements.client_data_spec(client))
            )
        else:
            requirements.check_networks_run([client])
            requirements.check_clients_suit_method([client], algorithm)
        check_client_init([client], algorithm)
        if "public_data" in needs and "public" in head:
            check_public_inputs(head["public"], client)
        architecture = (
            architecture_without_ranks(algorithm, cached_module(client.model)) if client.model is not None else None
        )
        if adapter_mode(algorithm) is not None and self.protection.clip_norm is not None:
            raise RefusalError("it clips what it sends, which adapters of its own rank are not compared with")
        # What is answered follows from the method, whatever the letter asks for: else a server could ask any method's site
        # whether its architecture is this one or that one.
        if "one_architecture" in needs and differ_only_in_frozen(architecture or "", str(head["architecture"])):
            raise RefusalError("its network's frozen parameters are not the federation's; this method needs the same")
        if "one_architecture" in needs and architecture != head["architecture"]:
            raise RefusalError("its network is not that of the federation, and this method needs one architecture")
        check_client_identity(folder, client.id, data_fingerprint([client]))
        head_fields: dict[str, Any] = {"client": client.id, "task": client.task}
        if tells_number:
            head_fields["num_examples"] = len(client.train)
        if "architectures" in needs:
            head_fields["architecture"] = architecture
        if "one_representation" in needs:
            head_fields["width"] = requirements.representation_width(client)
        if "one_input_spec" in needs:
            head_fields["inputs"] = input_spec_by_part(client.train.x)
        if needs & DATA_SPEC_REQUIREMENTS:
            spec = requirements.client_data_spec(client)
            # the largest label is data
            head_fields["form"] = [list(spec.inputs), spec.outputs if "one_data_spec" in needs else 1]
        return Envelope(head_fields)

    def _answer_task(self, envelope: Envelope, algorithm: Algorithm[Any, Any]) -> Envelope:
        """Carries out a task, and before it the evaluation of the round before that rides on it: what goes wrong with one of
        the two costs that one only. The data are loaded once, after all that can be refused without them."""
        head, folder = envelope.head, self._run_folder(envelope.head)
        if head["client"] != self.name:
            raise RefusalError(f"this site is {self.name!r}, and was asked for {head['client']!r}")
        check_phase(head)
        split = split_evaluation(envelope) if head["phase"] == "local" else None
        training = self._refuse_on_error(
            lambda: self._start_task(envelope if split is None else split.training, algorithm)
        )
        evaluation = (
            None
            if split is None
            else self._refuse_on_error(lambda: self._start_task(split.evaluation, algorithm, split.nbytes))
        )
        if not (isinstance(evaluation, StartedTask) or isinstance(training, StartedTask)):
            return (
                training if evaluation is None else Envelope({**training.head, EVALUATION_KEY: dict(evaluation.head)})
            )
        client = self._load_client(None if (is_preprocessing := isinstance(algorithm, Moments)) else folder)
        if is_preprocessing:
            check_table_sums_allowed(client, self.protection, secure=bool(head.get("secure")))
        metrics = resolve_requested_metrics(head.get("metrics", []), client.task)
        check_client_identity(folder, client.id, data_fingerprint([client]))
        engine = InProcessEngine(algorithm, [client], choose_device(self.device), metrics)

        def run_started_task(started: StartedTask | Envelope) -> Envelope:
            if isinstance(started, Envelope):
                return started
            return self._refuse_on_error(lambda: self._run_task_or_report_failure(started, algorithm, client, engine))

        evaluation_field = {} if evaluation is None else {EVALUATION_KEY: dict(run_started_task(evaluation).head)}
        answer = run_started_task(training)
        return Envelope({**answer.head, **evaluation_field}, answer.body)

    def _start_task(self, envelope: Envelope, algorithm: Algorithm[Any, Any], nbytes: int | None = None) -> StartedTask:
        """A task, once it is checked, in the book, written down, and in its sum, in this order: a task that the book refuses
        changes nothing, and one that is begun is used up, whatever becomes of it. `nbytes` came for it, if not all did."""
        head, folder = envelope.head, self._run_folder(envelope.head)
        site_task = parse_site_task(
            envelope, self.name, folder, clips_updates=self.protection.clip_norm is not None, nbytes=nbytes
        )
        hides_reply, secure = self._hides_replies(head), bool(head.get("secure"))
        inputs_hash = hash_task_inputs(head, site_task.task.message) if hides_reply else ""
        participation = (
            self._secure_sum_client(head).join_sum(self._sum_id(head, site_task.task.round), site_task.boxes)
            if site_task.is_in_sum
            else None
        )
        max_refusals = 1 if hides_reply else MAX_REFUSALS
        request = TaskRequest(f"{site_task.task.phase} {site_task.task.round}", inputs_hash, max_refusals)
        requests = RequestLog(folder)
        already_recorded, discloses = (
            requests.check_allowed(request, same_inputs_only=secure),
            self._disclosure_guard.discloses_data(head, algorithm),
        )
        privacy_cost = self._disclosure_guard.record_message(already_recorded=already_recorded) if discloses else {}
        if hides_reply:
            requests.record_start(request, in_ledger=discloses and site_task.task.phase == "local")
        if participation is not None:
            participation.mark_used()
        return StartedTask(site_task, request, participation, privacy_cost)

    def _run_task_or_report_failure(
        self, started: StartedTask, algorithm: Algorithm[Any, Any], client: Client, engine: InProcessEngine
    ) -> Envelope:
        """The answer to one task, or to its failure, which is counted."""
        try:
            return self._run_task(started, algorithm, client, engine)
        except OSError:  # of the site's disk, and no answer about its data
            raise
        except Exception as error:  # whatever it is: whether it comes may depend on data
            if not self._hides_replies(started.site_task.head):
                RequestLog(self._run_folder(started.site_task.head)).count_refusal(started.request)
                raise
            _LOG.error("%s", traceback.format_exc())
            return self._failure_envelope(started, error, self._answer_head(started.site_task))

    def _run_task(
        self, started: StartedTask, algorithm: Algorithm[Any, Any], client: Client, engine: InProcessEngine
    ) -> Envelope:
        """The answer to one task. The private state is on the disk before it goes."""
        site_task, head, task = started.site_task, started.site_task.head, started.site_task.task
        folder = self._run_folder(head)
        with single_torch_thread():
            result = next(engine.run([task]))
        answer = self._answer_head(site_task)
        answer["seconds"] = result.seconds if "seconds" in self.disclose else 0.0
        answer["metrics"] = {name: value for name, value in result.metrics.items() if name in self.disclose}
        if task.phase != "local":
            answer |= self._next_sum_keys(site_task)
        if result.failure is not None:
            _LOG.error("%s\n%s", result.failure, result.failure.trace)
            return self._failure_envelope(started, result.failure.reason, answer)
        record: dict[str, Any] = {
            "round": task.round, "phase": task.phase, "seconds": round(result.seconds, 4), **result.metrics,
            "bytes_down": site_task.nbytes,
        }  # fmt: skip
        body = Message()
        if task.phase == "local":
            assert result.reply is not None
            write_private_state(
                folder, self.name, task.round, head["algorithm"], result.client_state,
                rollback_round=site_task.rollback_round,
            )  # fmt: skip
            record |= result.reply.scalars
            if self._hides_replies(head):
                RequestLog(folder).record_start(started.request, in_ledger=False)  # what follows may draw noise
            body = self._protect_reply(started, result.reply, algorithm)
            answer |= self._next_sum_keys(site_task) if head.get("secure") else {}
            record["bytes_up"] = body.nbytes
            record |= started.privacy_cost
        write_task_results(folder, client, result, record)
        return Envelope(answer, body)

    def _answer_head(self, site_task: SiteTask) -> dict[str, Any]:
        """The head of an answer that tells nothing yet."""
        fields = {
            "run": site_task.head["run"], "round": site_task.task.round, "phase": site_task.task.phase, "failure": None,
        }  # fmt: skip
        return {"client": self.name, **fields, "seconds": 0.0, "metrics": {}}

    def _protect_reply(self, started: StartedTask, reply: Message, algorithm: Algorithm[Any, Any]) -> Message:
        """What goes up of a reply; nothing where the site trains outside the round's sum."""
        site_task, message = started.site_task, started.site_task.task.message
        if started.participation is not None:
            return self._disclosure_guard.mask_reply(reply, message, algorithm, started.participation)
        if site_task.head.get("secure"):
            return Message()
        return self._disclosure_guard.protect_reply(
            reply, message, algorithm, site_task.compression, site_task.task.reply_seed
        )

    def _failure_envelope(
        self, started: StartedTask, error: BaseException | str, answer: Mapping[str, Any]
    ) -> Envelope:
        """The answer to a task that failed for a reason that may depend on data; the server learns no more than that where
        masks or noise hide what goes up. A part of a sum that fails is refused like one that is not begun again."""
        RequestLog(self._run_folder(started.site_task.head)).count_refusal(started.request)
        if not self._hides_replies(started.site_task.head):
            return Envelope({**answer, "failure": self._error_for_server(error)})
        reason = self._error_for_server(error) if "errors" in self.disclose else FAILURE_TEXT
        if started.site_task.task.phase == "local":
            return Envelope({"client": self.name, "refused": reason})
        return Envelope({**answer, "failure": reason})

    def _sum_id(self, head: Mapping[str, Any], round_number: int) -> "SumId":
        from polyfed.deploy.secure_aggregation.protocol import SumId

        return SumId(head["run"], round_number)

    def _next_sum_keys(self, site_task: SiteTask) -> dict[str, Any]:
        """Keys for the next round's secure sum, where a letter asks for them beside its task."""
        if site_task.next_sum_round is None:
            return {}
        try:
            return {
                "advert": self._secure_sum_client(site_task.head).create_key_advertisement(
                    self._sum_id(site_task.head, site_task.next_sum_round)
                )
            }
        except RefusalError as refusal:
            return {"refusals": {"advertise": str(refusal)}}
