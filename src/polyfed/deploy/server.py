"""The server's half of a deployment: its configuration, the roster it makes of what sites tell, and the run.

The rounds are those of the simulator (`federation.play`), on an engine that sends tasks to sites. The private state of a
site stays there; in its place the server keeps the round after which it was, so that a run that is resumed from a
checkpoint asks for the state that belongs to it.
"""

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final, get_args

from polyfed.algorithms import get, name_of
from polyfed.core.adapters import form_of
from polyfed.core.algorithm import CONSENT, Algorithm, Architecture
from polyfed.core.algorithm import Task as Kind
from polyfed.core.code import function_of, trust_code, trusted
from polyfed.core.decided import decisions
from polyfed.core.errors import UserError, nearest
from polyfed.core.examples import Examples, as_examples
from polyfed.core.files import user_path
from polyfed.core.metrics import METRICS, is_built_in
from polyfed.core.scratch import scratch
from polyfed.core.threads import one_thread
from polyfed.core.typed import from_yaml
from polyfed.deploy.claims import (
    CLAIMS,
    check_family,
    check_inputs,
    check_targets,
    check_widths,
    common_form,
    form_of_parts,
)
from polyfed.deploy.tables import difference_of_tables
from polyfed.deploy.wire import FORM_WORDS, PROTOCOL, compressing
from polyfed.simulation.engines.work import Engine, Task
from polyfed.simulation.federation import play
from polyfed.simulation.resuming import go_back
from polyfed.simulation.roster import Roster
from polyfed.simulation.rounds import Federation, score_of
from polyfed.simulation.runs.configuration import described, restored
from polyfed.simulation.runs.directory import RunDirectory, plain, read_config
from polyfed.simulation.runs.progress import Progress
from polyfed.simulation.runs.results import Run
from polyfed.simulation.secure import check_secure, disclosed
from polyfed.simulation.settings import Settings

MOST_EXAMPLES = 10**12  # that a site can have


@final
@dataclass(frozen=True, kw_only=True)
class Deployment:
    """How a deployment is run.

    Args:
        sites: ids of the sites that take part; nobody else does.
        out: run directory, on the server's machine.
        resume: go on with the run in `out`; method and settings are then the run's.
        allow_disclosure: whether a method may run by which the server learns weights or architectures. (Each site has its
            own say as well.)
        join_seconds: how long the server waits at the start until all sites are there.
        round_seconds: how long it waits for the replies of an exchange; later ones are discarded. A site trains and makes
            the evaluation of the round before in that time.
        max_megabytes: replies above that are refused.
        file: a Python file of the server's, with `model()` (the common network, for methods that need one architecture),
            `architectures()` (a list of factories, for methods that need them all) and `public()` (unlabelled examples);
            None where the method needs none of these.
        secure_threshold: with `secure`, t: how many sites of a round open their sum, and are in it at least; None is above
            two thirds of them.

    Raises:
        UserError: a value outside its range.
    """

    sites: tuple[str, ...]
    out: Path
    resume: bool = False
    allow_disclosure: bool = False
    join_seconds: float = 300.0
    round_seconds: float = 3600.0
    max_megabytes: float = 1024.0
    file: Path | None = None
    secure_threshold: int | None = None

    def __post_init__(self) -> None:
        if not self.sites or len(set(self.sites)) < len(self.sites):
            raise UserError(f"sites must name at least one site, each once, got {', '.join(self.sites) or 'none'!r}")
        for name in ("join_seconds", "round_seconds", "max_megabytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise UserError(f"{name.replace('_', '-')} must be positive, got {value!r}")
        if (t := self.secure_threshold) is not None and (isinstance(t, bool) or not isinstance(t, int) or t < 2):
            raise UserError(f"secure-threshold must be a whole number from 2, got {t!r}")


@final
@dataclass(frozen=True)
class Server:
    """A deployment that can begin: what sites are told, what the server brings itself, and, for a run that goes on, what
    sites said of themselves when it began; `prepared`, the preprocessing that sites of tables have agreed on, and
    `preparation`, what that has cost (`polyfed.deploy.agreeing`). See `prepare`."""

    deployment: Deployment
    algorithm: Algorithm[Any, Any]
    settings: Settings
    run: str
    models: Mapping[str, Architecture] = field(default_factory=dict)
    public: Examples | None = None
    began: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prepared: Mapping[str, Any] | None = None
    preparation: Mapping[str, int] = field(default_factory=dict)

    def introduction(self) -> dict[str, Any]:
        """The head of the first letter to a site."""
        needs = self.algorithm.requires
        common = next(iter(self.models)) if "one_architecture" in needs else None
        agreed = {} if self.prepared is None else {"prepared": self.prepared}
        goes_on = self.deployment.resume  # and has its public examples in the checkpoint
        public = {} if self.public is None or goes_on else {"public": form_of_parts(self.public.x)}
        return {"kind": "introduce", **self._common(), "architecture": common, **agreed, **public}

    def order(self, task: Task) -> dict[str, Any]:
        """The head of the letter with a task."""
        span = 2 * self.settings.checkpoint_every + 1  # two checkpoints are kept, and the last round may not have one
        return {
            "kind": "task", **self._common(), "phase": task.phase, "round": task.round, "client": task.client,
            "seed": task.seed, "run_seed": task.run_seed, "state": None if task.own is None else task.own["round"],
            "keep": max(0, task.round - span), "metrics": list(self.settings.metrics),
            **compressing(self.settings),
        }  # fmt: skip

    def _common(self) -> dict[str, Any]:
        algorithm = described(self.algorithm, self.settings)["algorithm"]
        secure = {"secure": True} if self.settings.secure else {}
        return {"protocol": PROTOCOL, "run": self.run, "algorithm": algorithm, **secure}

    def sum_order(self) -> dict[str, Any]:
        """The head of a letter that is about secure sums alone."""
        return {"kind": "sum", **self._common()}

    @property
    def parties(self) -> int:
        """Sites of a round."""
        return self.settings.cohort_size(len(self.deployment.sites))

    @property
    def threshold(self) -> int:
        """t of the secure sums: how many of a round's sites open their sum; by default above two thirds of them."""
        return self.deployment.secure_threshold or 2 * self.parties // 3 + 1

    def federation(self, told: Mapping[str, Mapping[str, Any]]) -> Federation:
        """The federation of what the sites have told.

        Raises:
            UserError: it does not suit the method.
        """
        ids = tuple(sorted(self.deployment.sites))
        needs, name = self.algorithm.requires, name_of(self.algorithm)
        tasks = {i: str(told[i].get("task")) for i in ids}
        if len(set(tasks.values())) > 1 or tasks[ids[0]] not in get_args(Kind):
            raise UserError(f"sites of one federation must have one task, got {tasks}")
        if flaw := difference_of_tables(told):
            raise UserError(flaw)
        new = not self.deployment.resume  # a run that began before these were compared goes on
        if new and "one_representation" in needs:
            check_widths(told, name)
        if new and "one_input_spec" in needs:
            check_inputs(told, name)
        if new and "one_data_spec" in needs:
            check_targets(told, name)
        for i in ids:
            needed = self.algorithm.scalars_needed if not self.settings.secure else ()  # there they are in the sum
            if "num_examples" in needed and "num_examples" not in told[i]:
                raise UserError(f"site {i!r} does not tell its number of examples, which {name} needs")
            number = told[i].get("num_examples", 1)
            if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MOST_EXAMPLES:
                raise UserError(f"site {i!r} tells that it has {str(number)[:40]} examples, which is no count")
        kinds = dict.fromkeys(ids, next(iter(self.models))) if "one_architecture" in needs else {}
        if "architectures" in needs:
            kinds = {i: str(told[i].get("architecture")) for i in ids}
            if other := next((i for i in ids if kinds[i] not in self.models), None):
                raise UserError(
                    f"{name} needs the server to know all architectures, but that of {other!r}, {kinds[other]}, is none of "
                    f"architectures() in {self.deployment.file}: {', '.join(self.models)}"
                )
        form = common_form(told, name) if needs & FORM_WORDS else None
        if new and "one_family" in needs and form is not None:
            check_family(self.models, kinds, form.inputs, name)
        roster = Roster(
            ids=ids,
            task=tasks[ids[0]],  # type: ignore[arg-type]
            num_examples={i: told[i]["num_examples"] for i in ids if "num_examples" in told[i]},
            architectures=kinds,
            models=self.models,
            data_spec=form,
        )
        return Federation({}, self.algorithm, self.settings, self.public, roster)

    @one_thread()
    def play(
        self, federation: Federation, engine: Engine, progress: Progress, told: Mapping[str, Mapping[str, Any]]
    ) -> Run:
        """Plays the run of sites that have `told` what they are, from the start or from its newest checkpoint."""
        out = self.deployment.out
        if not self.deployment.resume:
            start = federation.begin()
            directory = RunDirectory.create(out)
            try:
                directory.write_manifest(
                    {
                        "seed": self.settings.seed,
                        "deployment": self.run,
                        "sites": list(federation.roster.ids),
                        "score": score_of(federation),
                        **decisions(self.algorithm, start.state),
                        **({"prepared": self.prepared, "preparation": dict(self.preparation)} if self.prepared else {}),
                        "told": {i: {n: head[n] for n in CLAIMS if n in head} for i, head in sorted(told.items())},
                    }
                )
                directory.write_config({**described(self.algorithm, self.settings), "deployment": self._described()})
            except BaseException:
                directory.close()
                raise
            return play(federation, start, [], directory, progress, engine)
        directory = RunDirectory.open(out)
        try:
            found, history = go_back(directory, federation)
        except BaseException:
            directory.close()
            raise
        return play(federation, found, history, directory, progress, engine)

    def _described(self) -> dict[str, Any]:
        told = dataclasses.asdict(self.deployment)
        told = {n: str(v) if isinstance(v, Path) else v for n, v in told.items() if n not in ("out", "resume")}
        return dict(plain(told, "deployment"))


def prepare(config: Mapping[str, Any]) -> Server:
    """The server of a flat configuration, as Flower gives it: fields of `Deployment` and `Settings` with hyphens (`sites`
    separated by commas; `file` for the server's Python file), `algorithm.name` and the method's fields.

    Raises:
        UserError: a word is missing or unknown, a value does not fit, or consent is missing.

    >>> server = prepare({"sites": "north,south", "out": "run", "rounds": 3, "algorithm.name": "local", "algorithm.lr": 0.1})
    >>> server.algorithm.lr, server.settings.rounds, server.deployment.sites
    (0.1, 3, ('north', 'south'))
    """
    given = {str(key): value for key, value in config.items() if value != ""}
    words = {f.name.replace("_", "-"): f.name for f in dataclasses.fields(Deployment)}
    of_settings = (
        "rounds",
        "seed",
        "clients-per-round",
        "evaluate-every",
        "checkpoint-every",
        "on-error",
        "min-replies",
        "metrics",
        "compress",
        "compress-down",
        "secure",
    )
    if given.pop("keep", "last") != "last":
        raise UserError(
            f"keep = {config['keep']!r} is not possible between sites, which keep only their newest states; leave it out"
        )
    method = {key.partition(".")[2]: value for key, value in given.items() if key.startswith("algorithm.")}
    choices = [*words, *of_settings, "algorithm.name"]
    if unknown := [key for key in given if key not in choices and not key.startswith("algorithm.")]:
        raise UserError(f"the configuration has no {unknown[0]!r}; {nearest(unknown[0], choices)}")
    for key in ("sites", "out"):
        if key not in given:
            raise UserError(f"the configuration lacks {key}")
    values = {words[key]: value for key, value in given.items() if key in words}
    values["sites"] = tuple(name.strip() for name in str(values["sites"]).split(",") if name.strip())
    values["out"] = user_path(str(values["out"]), "out")
    values["file"] = None if "file" not in values else user_path(str(values["file"]), "file")
    deployment = Deployment(**values)
    if deployment.file is not None:  # the operator's own word; what the directory of a run names is not
        trust_code(str(deployment.file))
    if deployment.resume:
        return _resumed(deployment)
    if "name" not in method:
        raise UserError('the configuration lacks algorithm.name; for example algorithm.name = "flha_ghn"')
    chosen = get(str(method.pop("name")))
    fields = {f.name for f in dataclasses.fields(chosen)}  # type: ignore[arg-type]
    if strange := sorted(set(method) - fields):
        raise UserError(f"algorithm.{strange[0]} is no field of the method; {nearest(strange[0], fields)}")
    algorithm = chosen(**{name: _value(value) for name, value in method.items()})
    fixed = {k.replace("-", "_"): given[k] for k in of_settings if k in given}
    names = tuple(name.strip() for name in str(fixed.get("metrics", "")).split(",") if name.strip())
    if unknown := [name for name in names if not is_built_in(name)]:
        raise UserError(f"metrics has {unknown[0]!r}, which sites do not know; {nearest(unknown[0], METRICS)}")
    settings = Settings(**{"on_error": "skip", **fixed, "metrics": names})
    return _complete(deployment, algorithm, settings, secrets.token_hex(8))


def _value(value: Any) -> Any:
    """A field of a method: Flower's configuration has no lists and no null, so that text may hold them as YAML does."""
    if isinstance(value, str) and (value[:1] in "[{" or value in ("null", "none")):
        try:
            return None if value == "none" else from_yaml(value)
        except ValueError as error:
            raise UserError(f"{value[:60]!r} in the configuration is no list, mapping or null: {error}") from error
    return value


def _resumed(given: Deployment) -> Server:
    """The server of a run that goes on, as it was configured; sites and consent must be given again, and a file may be."""
    config = read_config(given.out)
    if "deployment" not in config:
        raise UserError(f"{given.out} is the directory of a simulation: polyfed resume {given.out}")
    settings, algorithm = restored(config, None)
    directory = RunDirectory.open(given.out)
    try:
        manifest = directory.manifest()
    finally:
        directory.close()
    before = dict(config["deployment"])
    if set(before["sites"]) != set(given.sites):
        raise UserError(
            f"the run in {given.out} is of {', '.join(before['sites'])}, not of {', '.join(given.sites)}; give the same "
            "sites"
        )
    file = given.file or (Path(before["file"]) if before.get("file") else None)
    times = {name: before[name] for name in ("join_seconds", "round_seconds", "max_megabytes")}
    times["secure_threshold"] = before.get("secure_threshold")
    server = _complete(
        dataclasses.replace(given, file=file, **times), algorithm, settings, str(manifest.get("deployment", ""))
    )
    return dataclasses.replace(server, began=manifest.get("told", {}), prepared=manifest.get("prepared"))


def _complete(deployment: Deployment, algorithm: Algorithm[Any, Any], settings: Settings, run: str) -> Server:
    """Consent, and what the server brings itself."""
    needs, name = algorithm.requires, name_of(algorithm)
    parties = settings.cohort_size(len(deployment.sites))
    if settings.secure:
        check_secure(algorithm, parties)
    if settings.secure and not parties // 2 < (deployment.secure_threshold or parties) <= parties:
        raise UserError(
            f"secure-threshold must be above half of the {parties} sites of a round, and at most {parties}, got "
            f"{deployment.secure_threshold}"
        )
    if not deployment.allow_disclosure and (shown := sorted(disclosed(algorithm, settings.secure) & CONSENT)):
        raise UserError(
            f"{name} discloses {' and '.join(shown)} of the sites to the server; if they agree, allow it: "
            "polyfed flower run DIR --allow-disclosure, and allow-disclosure=true at each site"
        )
    if "layer_catalogue" in needs and getattr(algorithm, "catalogue", None) is None:
        raise UserError(
            f"{name} needs a layer catalogue that the sites have agreed on, so that none has to list its layers: "
            'algorithm.catalogue = "/path/catalogue.yaml"; each site adds to it with `polyfed graph MODEL --catalogue FILE`'
        )
    models: dict[str, Architecture] = {}
    if "one_architecture" in needs:
        model: Architecture = _function(deployment, "model", f"{name} needs one architecture")
        models = {form_of(algorithm, scratch(model)): model}
    if "architectures" in needs:
        found: Sequence[Architecture] = _function(deployment, "architectures", f"{name} needs all architectures")()
        models = {scratch(factory).architecture: factory for factory in found}
    public: Examples | None = None
    if "public_data" in needs:
        source = _function(deployment, "public", f"{name} needs public examples")()
        public = as_examples(source, "public()", labelled=False)
        if not len(public):
            raise UserError(f"public() in {deployment.file} gives no examples, and {name} needs some")
    return Server(deployment, algorithm, settings, run, models, public)


def _function(deployment: Deployment, name: Literal["model", "architectures", "public"], why: str) -> Any:
    """A function of the server's Python file."""
    file = deployment.file
    if file is None:
        raise UserError(
            f'{why}: name a Python file with a function {name}() in the configuration, file = "/path/server.py"'
        )
    if not trusted(str(file)):
        raise UserError(
            f"{why}: the directory of the run names the Python file {str(file)!r}, whose code would run; if it is yours, "
            f'name it in the configuration, file = "{file}"'
        )
    return function_of(file, name, f"{why}, file")
