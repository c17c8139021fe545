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
from polyfed.core.adapters import form_of, mode_of
from polyfed.core.algorithm import CONSENT, Algorithm, BringsNetwork, Client, Message
from polyfed.core.errors import UserError
from polyfed.core.scratch import same_but_for_frozen, scratch
from polyfed.core.threads import one_thread
from polyfed.deploy.agreeing import MOMENTS, as_agreed, asks_for_sums, check_sums, described, keep_agreed
from polyfed.deploy.claims import check_public_form, form_of_parts
from polyfed.deploy.orders import Begun, Order, check_phase, order_of, requested_metrics
from polyfed.deploy.outgoing import Outgoing
from polyfed.deploy.privacy import Protection, obstacle
from polyfed.deploy.private import NotItsOwnError, alone, check_marks, write_results, write_state
from polyfed.deploy.requests import MOST_REFUSALS, UNABLE, Requested, Requests, hash_of_inputs
from polyfed.deploy.riding import RIDES, take_off
from polyfed.deploy.secure import RefusalError
from polyfed.deploy.tables import COLUMNS, table_of
from polyfed.deploy.wire import FORM_WORDS, PROTOCOL, Letter, code_in
from polyfed.simulation import checks
from polyfed.simulation.beginnings import check_beginnings
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.engines.machine import choose_device
from polyfed.simulation.fingerprints import fingerprint
from polyfed.simulation.preparing import Moments
from polyfed.simulation.secure import can_be_secure, disclosed

if TYPE_CHECKING:
    from polyfed.deploy.secure.masking import Sum
    from polyfed.deploy.secure.member import Member

Result = TypeVar("Result")
_LOG = logging.getLogger("polyfed.site")
_RUN = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_LONGEST = 4000  # characters of an exception that go up: a longer text would make the whole answer too large to be read


@final
@dataclass(frozen=True)
class Site:
    """A site.

    Args:
        name: its id in the federation.
        client: makes its network and data; the function `client` of its `site.py`.
        folder: where it keeps its own (`state-dir`).
        disclose: scalars that may go up beside those that the method needs: "num_examples", "train_loss", "seconds", names
            of metrics such as "accuracy", "columns" for the names of a table's columns (`polyfed.deploy.tables`), and
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
    protection: Protection = field(default_factory=Protection)
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

    def answer(self, letter: Letter) -> Letter:
        """Does what a letter asks for. Whatever goes wrong is told in the answer, in full only in the site's log."""
        return self._guarded(lambda: self._answer(letter))

    def _answer(self, letter: Letter) -> Letter:
        if letter.head.get("protocol") != PROTOCOL:
            raise RefusalError(
                f"the server speaks protocol {letter.head.get('protocol')!r}, this site {PROTOCOL}; both need "
                "versions of polyfed that fit"
            )
        algorithm = self._method(letter.head)
        self._run_folder(letter.head)
        with alone(self.folder):
            if letter.head["kind"] == "sum":
                told, body = self._member(letter.head).answer(letter.head["run"], letter.head)
                return Letter({"client": self.name, "run": letter.head["run"], **told}, body)
            self._outgoing.check_budget()  # before anything is done with the data, and the same for all that needs them
            if letter.head["kind"] == "introduce":
                return self._introduced(letter.head, algorithm)
            return self._described(letter.head) if letter.head["kind"] == "prepare" else self._work(letter, algorithm)

    def _guarded(self, act: Callable[[], Result]) -> Result | Letter:
        """The result of `act`, or a refusal."""
        try:
            return act()
        except (RefusalError, NotItsOwnError) as refusal:
            _LOG.warning("refused: %s", refusal)
            return Letter({"client": self.name, "refused": str(refusal)})
        except Exception as error:  # whatever the site's own code raises: it is reported, never swallowed
            _LOG.error("%s", traceback.format_exc())
            return Letter({"client": self.name, "refused": self._told(error)})

    def _told(self, error: BaseException | str) -> str:
        """What the server is told of an error, whose text may show data."""
        if "errors" in self.disclose:
            return (error if isinstance(error, str) else f"{type(error).__name__}: {error}")[:_LONGEST]
        kind = str(error).partition(":")[0] if isinstance(error, str) else type(error).__name__
        return f"{kind if kind.isidentifier() else 'an error'} (its text is in the log of the site)"

    def _method(self, head: Mapping[str, Any]) -> Algorithm[Any, Any]:
        """The method, if its owner lets it run here."""
        fields = dict(head["algorithm"])
        name = str(fields.pop("name"))
        # Whether `Moments` runs here is said by the site's own table.
        algorithm = Moments() if name == MOMENTS else self._registered(name, fields)
        secure = bool(head.get("secure"))
        if self.secure and not secure:
            raise RefusalError("this site takes part in secure sums only (secure=true in its node-config)")
        if secure and not can_be_secure(algorithm):
            raise RefusalError(f"{name} needs each site's message by itself, and has no secure sums")
        if not self.allow_disclosure and (shown := sorted(disclosed(algorithm, secure) & CONSENT)):
            raise RefusalError(
                f"{name} discloses {' and '.join(shown)} to the server, which this site does not allow (allow-disclosure)"
            )
        if self.protection.noise_multiplier and (why := obstacle(algorithm, secure)):
            raise RefusalError(f"this site adds noise, and {why}")
        return algorithm

    def _registered(self, name: str, fields: Mapping[str, Any]) -> Algorithm[Any, Any]:
        if self.methods is not None and name not in self.methods:
            raise RefusalError(f"this site runs {', '.join(sorted(self.methods))} only, not {name}")
        if code := code_in(fields):
            raise RefusalError(f"{name} would load {code!r} at this site, which runs no code that the server names")
        made: Algorithm[Any, Any] = get(name)(**fields)
        return made

    def _member(self, head: Mapping[str, Any]) -> "Member":
        from polyfed.deploy.secure.member import Member  # takes the package cryptography

        return Member(self.name, self._run_folder(head), self.key, self.peers, self.secure_threshold)

    def _own(self, agreed: Path | None = None) -> Client:
        """The client; its table as sites have `agreed` in this run's folder, if it is of those that do."""
        client = self.client()
        if not isinstance(client, Client):
            raise UserError(f"client() of site.py must return a polyfed.Client, got {type(client).__name__}")
        if client.id != self.name:
            raise UserError(f"client() of site.py returns the client {client.id!r}, but this site is {self.name!r}")
        return client if agreed is None or not asks_for_sums(client) else as_agreed(client, agreed)

    def _described(self, head: Mapping[str, Any]) -> Letter:
        """What is told of the table, before sites agree on its preprocessing."""
        self._outgoing.enter()
        client = self._own()
        check_sums(client, self.protection, secure=bool(head.get("secure")))
        table = described(client, head["run"], named=self.allow_disclosure or COLUMNS in self.disclose)
        return Letter({"client": self.name, "run": head["run"], "task": client.task, "table": table})

    def _run_folder(self, head: Mapping[str, Any]) -> Path:
        if not (isinstance(head["run"], str) and _RUN.fullmatch(head["run"])):
            raise RefusalError(f"{head['run']!r} is no identifier of a run")
        return self.folder / head["run"]

    @property
    def _outgoing(self) -> Outgoing:
        return Outgoing(self.folder / "privacy.json", self.data_set, self.protection, self.disclose)

    def _shielded(self, head: Mapping[str, Any]) -> bool:
        """Whether what goes up is masked or has noise, so that a refusal must not tell what these hide."""
        return bool(head.get("secure") or self.protection.noise_multiplier)

    def _introduced(self, head: Mapping[str, Any], algorithm: Algorithm[Any, Any]) -> Letter:
        """What a site that is introduced to a run answers. Whether it suits the method depends on its data and network."""
        requests = Requests(self._run_folder(head))
        task = Requested("introduce", hash_of_inputs(head, Message()), MOST_REFUSALS)
        requests.check(task, bound=self._shielded(head))
        tells_number = "num_examples" in self.disclose | (set() if head.get("secure") else algorithm.scalars_needed)
        if tells_number:
            self._outgoing.enter()
        if self._shielded(head):
            requests.begin(task, entered=False)
        table: dict[str, Any] = {}  # told by a site that does not take part, too, since it may be why
        answer = self._guarded(lambda: self._introduce(head, algorithm, table, tells_number=tells_number))
        if answer.head.get("refused"):
            requests.count_refusal(task)
        return Letter({**answer.head, **table})

    def _introduce(
        self, head: Mapping[str, Any], algorithm: Algorithm[Any, Any], table: dict[str, Any], *, tells_number: bool
    ) -> Letter:
        """Checks that this client suits the method and is the one that began the run; tells what the server must know."""
        client, folder = self._own(), self._run_folder(head)
        needs = algorithm.requires
        if asks_for_sums(client):
            check_sums(client, self.protection, secure=bool(head.get("secure")))
            if "prepared" not in head:
                return Letter({"client": client.id, "task": client.task, "prepares": True})
            keep_agreed(folder, head["prepared"], client)
            client = as_agreed(client, folder)
        named, noisy = self.allow_disclosure or COLUMNS in self.disclose, bool(self.protection.noise_multiplier)
        table |= table_of(client, needs, head["run"], named=named, noisy=noisy, discloses=algorithm.discloses)
        if isinstance(algorithm, BringsNetwork):
            checks.check_suited([client], algorithm)
            checks.check_models([client], factory=algorithm.network_for(checks.data_spec_of(client)))
        else:
            checks.check_models([client])
            checks.check_suited([client], algorithm)
        check_beginnings([client], algorithm)
        if "public_data" in needs and "public" in head:
            check_public_form(head["public"], client)
        architecture = form_of(algorithm, scratch(client.model)) if client.model is not None else None
        if mode_of(algorithm) is not None and self.protection.clip_norm is not None:
            raise RefusalError("it clips what it sends, which adapters of its own rank are not compared with")
        # What is answered follows from the method, whatever the letter asks for: else a server could ask any method's site
        # whether its architecture is this one or that one.
        if "one_architecture" in needs and same_but_for_frozen(architecture or "", str(head["architecture"])):
            raise RefusalError("its network's frozen parameters are not the federation's; this method needs the same")
        if "one_architecture" in needs and architecture != head["architecture"]:
            raise RefusalError("its network is not that of the federation, and this method needs one architecture")
        check_marks(folder, client.id, fingerprint([client]))
        told: dict[str, Any] = {"client": client.id, "task": client.task}
        if tells_number:
            told["num_examples"] = len(client.train)
        if "architectures" in needs:
            told["architecture"] = architecture
        if "one_representation" in needs:
            told["width"] = checks.representation_width(client)
        if "one_input_spec" in needs:
            told["inputs"] = form_of_parts(client.train.x)
        if needs & FORM_WORDS:
            form = checks.data_spec_of(client)
            # the largest label is data
            told["form"] = [list(form.inputs), form.outputs if "one_data_spec" in needs else 1]
        return Letter(told)

    def _work(self, letter: Letter, algorithm: Algorithm[Any, Any]) -> Letter:
        """Carries out a task, and before it the evaluation of the round before that rides on it: what goes wrong with one of
        the two costs that one only. The data are loaded once, after all that can be refused without them."""
        head, folder = letter.head, self._run_folder(letter.head)
        if head["client"] != self.name:
            raise RefusalError(f"this site is {self.name!r}, and was asked for {head['client']!r}")
        check_phase(head)
        both = take_off(letter) if head["phase"] == "local" else None
        last = self._guarded(lambda: self._begun(letter if both is None else both.training, algorithm))
        first = None if both is None else self._guarded(lambda: self._begun(both.evaluation, algorithm, both.nbytes))
        if not (isinstance(first, Begun) or isinstance(last, Begun)):
            return last if first is None else Letter({**last.head, RIDES: dict(first.head)})
        client = self._own(None if (fits := isinstance(algorithm, Moments)) else folder)
        if fits:
            check_sums(client, self.protection, secure=bool(head.get("secure")))
        metrics = requested_metrics(head.get("metrics", []), client.task)
        check_marks(folder, client.id, fingerprint([client]))
        engine = InProcessEngine(algorithm, [client], choose_device(self.device), metrics)

        def carried_out(begun: Begun | Letter) -> Letter:
            if isinstance(begun, Letter):
                return begun
            return self._guarded(lambda: self._attempted(begun, algorithm, client, engine))

        told = {} if first is None else {RIDES: dict(carried_out(first).head)}
        answer = carried_out(last)
        return Letter({**answer.head, **told}, answer.body)

    def _begun(self, letter: Letter, algorithm: Algorithm[Any, Any], nbytes: int | None = None) -> Begun:
        """A task, once it is checked, in the book, written down, and in its sum, in this order: a task that the book refuses
        changes nothing, and one that is begun is used up, whatever becomes of it. `nbytes` came for it, if not all did."""
        head, folder = letter.head, self._run_folder(letter.head)
        order = order_of(letter, self.name, folder, clips=self.protection.clip_norm is not None, nbytes=nbytes)
        shielded, secure = self._shielded(head), bool(head.get("secure"))
        inputs = hash_of_inputs(head, order.task.down) if shielded else ""
        place = self._member(head).place(self._sum(head, order.task.round), order.boxes) if order.in_sum else None
        most = 1 if shielded else MOST_REFUSALS
        task = Requested(f"{order.task.phase} {order.task.round}", inputs, most)
        requests = Requests(folder)
        in_book, leaves = requests.check(task, bound=secure), self._outgoing.leaves(head, algorithm)
        spent = self._outgoing.enter(again=in_book) if leaves else {}
        if shielded:
            requests.begin(task, entered=leaves and order.task.phase == "local")
        if place is not None:
            place.take()
        return Begun(order, task, place, spent)

    def _attempted(
        self, begun: Begun, algorithm: Algorithm[Any, Any], client: Client, engine: InProcessEngine
    ) -> Letter:
        """The answer to one task, or to its failure, which is counted."""
        try:
            return self._carried_out(begun, algorithm, client, engine)
        except OSError:  # of the site's disk, and no answer about its data
            raise
        except Exception as error:  # whatever it is: whether it comes may depend on data
            if not self._shielded(begun.order.head):
                Requests(self._run_folder(begun.order.head)).count_refusal(begun.requested)
                raise
            _LOG.error("%s", traceback.format_exc())
            return self._unable(begun, error, self._answer_to(begun.order))

    def _carried_out(
        self, begun: Begun, algorithm: Algorithm[Any, Any], client: Client, engine: InProcessEngine
    ) -> Letter:
        """The answer to one task. The private state is on the disk before it goes."""
        order, head, task = begun.order, begun.order.head, begun.order.task
        folder = self._run_folder(head)
        with one_thread():
            result = next(engine.run([task]))
        answer = self._answer_to(order)
        answer["seconds"] = result.seconds if "seconds" in self.disclose else 0.0
        answer["metrics"] = {n: value for n, value in result.metrics.items() if n in self.disclose}
        if task.phase != "local":
            answer |= self._advert(order)
        if result.failure is not None:
            _LOG.error("%s\n%s", result.failure, result.failure.trace)
            return self._unable(begun, result.failure.reason, answer)
        record: dict[str, Any] = {
            "round": task.round,
            "phase": task.phase,
            "seconds": round(result.seconds, 4),
            **result.metrics,
            "bytes_down": order.nbytes,
        }
        body = Message()
        if task.phase == "local":
            assert result.reply is not None
            write_state(folder, self.name, task.round, head["algorithm"], result.own, keep=order.keep)
            record |= result.reply.scalars
            if self._shielded(head):
                Requests(folder).begin(begun.requested, entered=False)  # what follows may draw noise
            body = self._leaving(begun, result.reply, algorithm)
            answer |= self._advert(order) if head.get("secure") else {}
            record["bytes_up"] = body.nbytes
            record |= begun.spent
        write_results(folder, client, result, record)
        return Letter(answer, body)

    def _answer_to(self, order: Order) -> dict[str, Any]:
        """The head of an answer that tells nothing yet."""
        told = {"run": order.head["run"], "round": order.task.round, "phase": order.task.phase, "failure": None}
        return {"client": self.name, **told, "seconds": 0.0, "metrics": {}}

    def _leaving(self, begun: Begun, reply: Message, algorithm: Algorithm[Any, Any]) -> Message:
        """What goes up of a reply; nothing where the site trains outside the round's sum."""
        order, down = begun.order, begun.order.task.down
        if begun.place is not None:
            return self._outgoing.part(reply, down, algorithm, begun.place)
        if order.head.get("secure"):
            return Message()
        return self._outgoing.reply(reply, down, algorithm, order.compression, order.task.reply_seed)

    def _unable(self, begun: Begun, error: BaseException | str, answer: Mapping[str, Any]) -> Letter:
        """The answer to a task that failed for a reason that may depend on data; the server learns no more than that where
        masks or noise hide what goes up. A part of a sum that fails is refused like one that is not begun again."""
        Requests(self._run_folder(begun.order.head)).count_refusal(begun.requested)
        if not self._shielded(begun.order.head):
            return Letter({**answer, "failure": self._told(error)})
        told = self._told(error) if "errors" in self.disclose else UNABLE
        if begun.order.task.phase == "local":
            return Letter({"client": self.name, "refused": told})
        return Letter({**answer, "failure": told})

    def _sum(self, head: Mapping[str, Any], number: int) -> "Sum":
        from polyfed.deploy.secure.masking import Sum

        return Sum(head["run"], number)

    def _advert(self, order: Order) -> dict[str, Any]:
        """Keys for the next round's secure sum, where a letter asks for them beside its task."""
        if order.following is None:
            return {}
        try:
            return {"advert": self._member(order.head).advert(self._sum(order.head, order.following))}
        except RefusalError as refusal:
            return {"refusals": {"advertise": str(refusal)}}
