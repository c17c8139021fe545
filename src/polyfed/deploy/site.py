"""The site's half of a deployment: its own client, its private state on its own disk, and what it lets out.

A site is asked by letters and answers each; it keeps nothing in memory between them, since Flower starts a process for each
message. Its folder has one folder a run: private state after each round the server may still go back to, metrics of its own,
predictions of the newest evaluated round, and the personal network at the end. None of that is sent.
"""

import json
import logging
import math
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final, get_args

from polyfed.algorithms import get
from polyfed.core.adapters import form_of, mode_of
from polyfed.core.algorithm import CONSENT, Algorithm, BringsNetwork, Client, Message
from polyfed.core.compressed import compress, decompress
from polyfed.core.errors import UserError, nearest
from polyfed.core.files import append_line, make_folder
from polyfed.core.metrics import Metric, is_built_in, metrics_of
from polyfed.core.scratch import same_but_for_frozen, scratch
from polyfed.core.threads import one_thread
from polyfed.core.tree import Tree
from polyfed.deploy.agreeing import MOMENTS, as_agreed, asks_for_sums, check_sums, described, keep_agreed
from polyfed.deploy.budget import spend
from polyfed.deploy.privacy import Protection, obstacle, protect
from polyfed.deploy.private import NotItsOwnError, alone, check_marks, read_state, write_state
from polyfed.deploy.riding import RIDES, take_off
from polyfed.deploy.secure import RefusalError
from polyfed.deploy.tables import COLUMNS, table_of
from polyfed.deploy.wire import FORM_WORDS, PROTOCOL, Letter, broken, code_in, compressed_by
from polyfed.simulation import checks
from polyfed.simulation.beginnings import check_beginnings
from polyfed.simulation.engines.inprocess import InProcessEngine
from polyfed.simulation.engines.machine import choose_device
from polyfed.simulation.engines.work import Phase, Task
from polyfed.simulation.fingerprints import fingerprint
from polyfed.simulation.preparing import Moments
from polyfed.simulation.runs import parquet
from polyfed.simulation.runs.paths import file_name
from polyfed.simulation.runs.signature import write_model
from polyfed.simulation.secure import can_be_secure, disclosed, part_of

if TYPE_CHECKING:
    from polyfed.deploy.secure.member import Member

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
            raise _RefusalError(
                f"the server speaks protocol {letter.head.get('protocol')!r}, this site {PROTOCOL}; both need "
                "versions of polyfed that fit"
            )
        algorithm = self._method(letter.head)
        self._run_folder(letter.head)
        with alone(self.folder):
            if letter.head["kind"] == "introduce":
                table: dict[str, Any] = {}  # told by a site that does not take part, too, since it may be why
                answer = self._guarded(lambda: self._introduce(letter.head, algorithm, table))
                return Letter({**answer.head, **table})
            if letter.head["kind"] == "sum":
                told, body = self._member(letter.head).answer(letter.head["run"], letter.head)
                return Letter({"client": self.name, "run": letter.head["run"], **told}, body)
            return self._described(letter.head) if letter.head["kind"] == "prepare" else self._work(letter, algorithm)

    def _guarded(self, act: Callable[[], Letter]) -> Letter:
        """The answer of `act`, or a refusal."""
        try:
            return act()
        except (_RefusalError, NotItsOwnError, RefusalError) as refusal:
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
            raise _RefusalError("this site takes part in secure sums only (secure=true in its node-config)")
        if secure and not can_be_secure(algorithm):
            raise _RefusalError(f"{name} needs each site's message by itself, and has no secure sums")
        if not self.allow_disclosure and (shown := sorted(disclosed(algorithm, secure) & CONSENT)):
            raise _RefusalError(
                f"{name} discloses {' and '.join(shown)} to the server, which this site does not allow (allow-disclosure)"
            )
        if self.protection.noise_multiplier and (why := obstacle(algorithm, secure)):
            raise _RefusalError(f"this site adds noise, and {why}")
        return algorithm

    def _registered(self, name: str, fields: Mapping[str, Any]) -> Algorithm[Any, Any]:
        if self.methods is not None and name not in self.methods:
            raise _RefusalError(f"this site runs {', '.join(sorted(self.methods))} only, not {name}")
        if code := code_in(fields):
            raise _RefusalError(f"{name} would load {code!r} at this site, which runs no code that the server names")
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
        client = self._own()
        check_sums(client, self.protection, secure=bool(head.get("secure")))
        self._entered("table")
        table = described(client, head["run"], named=self.allow_disclosure or COLUMNS in self.disclose)
        return Letter({"client": self.name, "run": head["run"], "task": client.task, "table": table})

    def _run_folder(self, head: Mapping[str, Any]) -> Path:
        if not (isinstance(head["run"], str) and _RUN.fullmatch(head["run"])):
            raise _RefusalError(f"{head['run']!r} is no identifier of a run")
        return self.folder / head["run"]

    def _introduce(self, head: Mapping[str, Any], algorithm: Algorithm[Any, Any], table: dict[str, Any]) -> Letter:
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
        checks.check_suited([client], algorithm)
        brought = None
        if isinstance(algorithm, BringsNetwork):
            brought = algorithm.network_for(checks.data_spec_of(client))
        checks.check_models([client], factory=brought)
        check_beginnings([client], algorithm)
        architecture = form_of(algorithm, scratch(client.model)) if client.model is not None else None
        if mode_of(algorithm) is not None and self.protection.clip_norm is not None:
            raise _RefusalError("it clips what it sends, which adapters of its own rank are not compared with")
        # What is answered follows from the method, whatever the letter asks for: else a server could ask any method's site
        # whether its architecture is this one or that one.
        if "one_architecture" in needs and same_but_for_frozen(architecture or "", str(head["architecture"])):
            raise _RefusalError("its network's frozen parameters are not the federation's; this method needs the same")
        if "one_architecture" in needs and architecture != head["architecture"]:
            raise _RefusalError("its network is not that of the federation, and this method needs one architecture")
        check_marks(folder, client.id, fingerprint([client]))
        told: dict[str, Any] = {"client": client.id, "task": client.task}
        if "num_examples" in self.disclose | (set() if head.get("secure") else algorithm.scalars_needed):
            self._entered("num_examples")
            told["num_examples"] = len(client.train)
        if "architectures" in needs:
            told["architecture"] = architecture
        if needs & FORM_WORDS:
            form = checks.data_spec_of(client)
            told["form"] = [
                list(form.inputs),
                form.outputs if "one_data_spec" in needs else 1,
            ]  # the largest label is data
        return Letter(told)

    def _work(self, letter: Letter, algorithm: Algorithm[Any, Any]) -> Letter:
        """Carries out a task, and before it the evaluation of the round before that rides on it: what goes wrong with one of
        the two costs that one only. The data are loaded once."""
        head, folder = letter.head, self._run_folder(letter.head)
        if head["client"] != self.name:
            raise _RefusalError(f"this site is {self.name!r}, and was asked for {head['client']!r}")
        if (phase := head["phase"]) not in get_args(Phase):
            raise _RefusalError(f"{phase!r} is no phase of a round; {nearest(str(phase), get_args(Phase))}")
        both = take_off(letter) if phase == "local" else None
        client = self._own(None if (fits := isinstance(algorithm, Moments)) else folder)
        if fits:
            check_sums(client, self.protection, secure=bool(head.get("secure")))
        metrics = _metrics(head.get("metrics", []), client.task)
        check_marks(folder, client.id, fingerprint([client]))
        engine = InProcessEngine(algorithm, [client], choose_device(self.device), metrics)
        if both is None:
            return self._carried_out(letter, algorithm, client, engine)
        evaluated, nbytes = both.evaluation, both.nbytes
        first = self._guarded(lambda: self._carried_out(evaluated, algorithm, client, engine, nbytes))
        answer = self._guarded(lambda: self._carried_out(both.training, algorithm, client, engine))
        return Letter({**answer.head, RIDES: dict(first.head)}, answer.body)

    def _carried_out(
        self,
        letter: Letter,
        algorithm: Algorithm[Any, Any],
        client: Client,
        engine: InProcessEngine,
        bytes_down: int | None = None,
    ) -> Letter:
        """The answer to one task. The private state is on the disk before it goes. `bytes_down` came for this task, if not
        all of the letter's."""
        head, folder = letter.head, self._run_folder(letter.head)
        phase, number = head["phase"], int(head["round"])
        up, down = compressed_by(head)
        arrived, boxes = _without_boxes(letter.body) if head.get("secure") else (letter.body, {})
        received = arrived if down is None else decompress(arrived, Message(), down)
        if self.protection.clip_norm is not None and (wrong := broken(received)):
            raise _RefusalError(
                f"{wrong} of what came down has NaN or infinite values, with which clipping protects nothing"
            )
        own = read_state(folder, self.name, head["state"], head["algorithm"])
        task = Task(phase, number, self.name, received, own, int(head["seed"]), int(head["run_seed"]))
        with one_thread():
            result = next(engine.run([task]))
        answer: dict[str, Any] = {
            "client": self.name,
            "run": head["run"],
            "round": number,
            "phase": phase,
            "failure": None,
        }
        answer["seconds"] = result.seconds if "seconds" in self.disclose else 0.0
        answer["metrics"] = {n: value for n, value in result.metrics.items() if n in self.disclose}
        if phase != "local":
            answer |= self._advert(head)
        if result.failure is not None:
            _LOG.error("%s\n%s", result.failure, result.failure.trace)
            return Letter({**answer, "failure": self._told(result.failure.reason)})
        record: dict[str, Any] = {
            "round": number,
            "phase": phase,
            "seconds": round(result.seconds, 4),
            **result.metrics,
            "bytes_down": arrived.nbytes if bytes_down is None else bytes_down,
        }
        body = Message()
        if phase == "local":
            assert result.reply is not None
            write_state(folder, self.name, number, head["algorithm"], result.own, keep=int(head["keep"]))
            record |= result.reply.scalars
            if head.get("secure"):
                body = self._summed(result.reply, received, head, boxes, algorithm)
                answer |= self._advert(head)
            else:
                body = self._sent(result.reply, received, algorithm)
                body = body if up is None else compress(body, received, up, task.reply_seed)  # after the noise
            record["bytes_up"] = body.nbytes
            record |= self._entered(body.tensors or body.scalars)
        elif phase == "export":
            path = folder / "models" / f"{file_name(self.name)}.safetensors"
            make_folder(path.parent)
            write_model(path, result.weights or {}, result.description, client)
            record["model"] = str(path)
        elif result.predictions:
            path = folder / "predictions" / f"{file_name(self.name)}.parquet"
            parquet.write(path, client, {number: result.predictions})
            record["predictions"] = str(path)
        if phase == "evaluate":
            self._entered(answer["metrics"])
        append_line(folder / "metrics.jsonl", json.dumps(record))
        return Letter(answer, body)

    def _entered(self, leaving: object) -> dict[str, float | None]:
        """Enters a message into the book of the data set, if anything leaves with it, and what all have cost, for the site's
        own metrics. Before it goes: what is sent and not entered would be given away."""
        if not leaving:
            return {}
        spent, delta = spend(self.folder / "privacy.json", self.data_set, self.protection), self.protection.delta
        if not self.protection.noise_multiplier:
            return {}
        _LOG.info("(epsilon, delta) spent on the data set %r: (%.3g, %g)", self.data_set, spent, delta)
        return {"epsilon": spent if math.isfinite(spent) else None, "delta": delta}

    def _sent(self, reply: Message, down: Message, algorithm: Algorithm[Any, Any]) -> Message:
        """The reply as it may leave the site."""
        allowed = self.disclose | algorithm.scalars_needed
        scalars = {name: value for name, value in reply.scalars.items() if name in allowed}
        return protect(Message(reply.tensors, scalars), down, self.protection)

    def _summed(
        self, reply: Message, down: Message, head: Mapping[str, Any], boxes: Tree, algorithm: Algorithm[Any, Any]
    ) -> Message:
        """The reply as masked numbers, nothing where the site is not in the round's sum."""
        from polyfed.deploy.secure.masking import Sum

        if not head.get("part"):
            return Message()
        member, which = self._member(head), Sum(head["run"], int(head["round"]))
        sent = protect(reply, down, self.protection, among=member.threshold_of(which) - 1)
        if wrong := broken(sent):
            raise _RefusalError(f"{wrong} of its reply has NaN or infinite values, which a sum cannot take")
        return member.masked(which, boxes, part_of(sent, algorithm, int(head["parties"])))

    def _advert(self, head: Mapping[str, Any]) -> dict[str, Any]:
        """Keys for the next round's secure sum, where a letter asks for them beside its task."""
        if not (head.get("secure") and head.get("advertise")):
            return {}
        from polyfed.deploy.secure.masking import Sum

        try:
            return {"advert": self._member(head).advert(Sum(head["run"], int(head["advertise"])))}
        except RefusalError as refusal:
            return {"refusals": {"advertise": str(refusal)}}


@final
class _RefusalError(Exception):
    """What the site does not do; its sentence holds nothing of data or network, and is told to the server."""


def _without_boxes(body: Message) -> tuple[Message, Tree]:
    """What a method sent, and the sealed shares beside it."""
    from polyfed.deploy.secure.member import BOXES

    tensors = {group: tree for group, tree in body.tensors.items() if group != BOXES}
    return Message(tensors, body.scalars), body.tensors.get(BOXES, {})


def _metrics(names: Any, task: str) -> tuple[Metric, ...]:
    """The metrics that a letter names, which must be built in: a site computes nothing else of its examples.

    Raises:
        _RefusalError: they are not.
    """
    if not (isinstance(names, list) and all(isinstance(name, str) and is_built_in(name) for name in names)):
        raise _RefusalError("the server asks for metrics that are not built into polyfed at this site")
    try:
        return metrics_of(names, task)
    except UserError as error:
        raise _RefusalError(str(error)) from error
