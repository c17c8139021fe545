"""The server's half of a deployment: its configuration, the roster it makes of what sites tell, and the run.

The rounds are those of the simulator (`federation.run_federation`), on an engine that sends tasks to sites. The private
state of a site stays there; in its place the server keeps the round after which it was, so that a run that is resumed
from a checkpoint asks for the state that belongs to it.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final, get_args

from polyfed.algorithms import registry_name
from polyfed.core.algorithm import Algorithm, Architecture
from polyfed.core.algorithm import Task as TaskKind
from polyfed.core.capabilities import resolved_fields_for_manifest
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.machine.threads import single_torch_thread
from polyfed.deploy.protocol.handshake import (
    CLAIM_KEYS,
    check_same_input_specs,
    check_same_representation_width,
    check_same_target_count,
    check_width_family,
    input_spec_by_part,
    merge_data_specs,
)
from polyfed.deploy.protocol.table_summary import describe_table_difference
from polyfed.deploy.protocol.wire import DATA_SPEC_REQUIREMENTS, PROTOCOL, compression_fields
from polyfed.simulation.engines.base import ClientTask, Engine
from polyfed.simulation.federate import run_rounds
from polyfed.simulation.monitoring.progress import Progress
from polyfed.simulation.results.run import Run
from polyfed.simulation.rounds.client_registry import ClientRegistry
from polyfed.simulation.rounds.federation import Federation, describe_deciding_metric
from polyfed.simulation.rounds.resume import rewind_to_checkpoint
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.configuration import describe_method_and_settings
from polyfed.simulation.storage.directory import RunDirectory, to_plain_values

MAX_EXAMPLES = 10**12  # that a site can have


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
class DeploymentServer:
    """A deployment that can begin: what sites are told, what the server brings itself, and, for a run that goes on, what
    sites said of themselves when it began; `preprocessing`, the preprocessing that sites of tables have agreed on, and
    `preprocessing_facts`, what that has cost (`polyfed.deploy.site.preprocessing`). See `configure_server`."""

    deployment: Deployment
    algorithm: Algorithm[Any, Any]
    settings: Settings
    run: str
    models: Mapping[str, Architecture] = field(default_factory=dict)
    public: Examples | None = None
    first_introductions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    preprocessing: Mapping[str, Any] | None = None
    preprocessing_facts: Mapping[str, int] = field(default_factory=dict)

    def introduction_head(self) -> dict[str, Any]:
        """The head of the first letter to a site."""
        needs = self.algorithm.requires
        common_architecture = next(iter(self.models)) if "one_architecture" in needs else None
        preprocessing_field = {} if self.preprocessing is None else {"prepared": self.preprocessing}
        is_resumed = self.deployment.resume  # and has its public examples in the checkpoint
        public = {} if self.public is None or is_resumed else {"public": input_spec_by_part(self.public.x)}
        return {
            "kind": "introduce", **self._common_head(), "architecture": common_architecture, **preprocessing_field,
            **public,
        }  # fmt: skip

    def task_head(self, task: ClientTask) -> dict[str, Any]:
        """The head of the letter with a task."""
        span = 2 * self.settings.checkpoint_every + 1  # two checkpoints are kept, and the last round may not have one
        return {
            "kind": "task", **self._common_head(), "phase": task.phase, "round": task.round, "client": task.client,
            "seed": task.seed, "run_seed": task.run_seed,
            "state": None if task.client_state is None else task.client_state["round"],
            "keep": max(0, task.round - span), "metrics": list(self.settings.metrics),
            **compression_fields(self.settings),
        }  # fmt: skip

    def _common_head(self) -> dict[str, Any]:
        algorithm = describe_method_and_settings(self.algorithm, self.settings)["algorithm"]
        secure = {"secure": True} if self.settings.secure else {}
        return {"protocol": PROTOCOL, "run": self.run, "algorithm": algorithm, **secure}

    def secure_sum_head(self) -> dict[str, Any]:
        """The head of a letter that is about secure sums alone."""
        return {"kind": "sum", **self._common_head()}

    @property
    def sites_per_round(self) -> int:
        """Sites of a round."""
        return self.settings.cohort_size(len(self.deployment.sites))

    @property
    def secure_sum_threshold(self) -> int:
        """t of the secure sums: how many of a round's sites open their sum; by default above two thirds of them."""
        return self.deployment.secure_threshold or 2 * self.sites_per_round // 3 + 1

    def build_federation(self, introductions: Mapping[str, Mapping[str, Any]]) -> Federation:
        """The federation of what the sites have told.

        Raises:
            UserError: it does not suit the method.
        """
        ids = tuple(sorted(self.deployment.sites))
        needs, name = self.algorithm.requires, registry_name(self.algorithm)
        tasks = {i: str(introductions[i].get("task")) for i in ids}
        if len(set(tasks.values())) > 1 or tasks[ids[0]] not in get_args(TaskKind):
            raise UserError(f"sites of one federation must have one task, got {tasks}")
        if table_difference := describe_table_difference(introductions):
            raise UserError(table_difference)
        is_new_run = not self.deployment.resume  # a run that began before these were compared goes on
        if is_new_run and "one_representation" in needs:
            check_same_representation_width(introductions, name)
        if is_new_run and "one_input_spec" in needs:
            check_same_input_specs(introductions, name)
        if is_new_run and "one_data_spec" in needs:
            check_same_target_count(introductions, name)
        for i in ids:
            needed_scalars = (
                self.algorithm.scalars_needed if not self.settings.secure else ()
            )  # there they are in the sum
            if "num_examples" in needed_scalars and "num_examples" not in introductions[i]:
                raise UserError(f"site {i!r} does not tell its number of examples, which {name} needs")
            number = introductions[i].get("num_examples", 1)
            if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MAX_EXAMPLES:
                raise UserError(f"site {i!r} tells that it has {str(number)[:40]} examples, which is no count")
        architecture_by_site = dict.fromkeys(ids, next(iter(self.models))) if "one_architecture" in needs else {}
        if "architectures" in needs:
            architecture_by_site = {i: str(introductions[i].get("architecture")) for i in ids}
            if unknown_site := next((i for i in ids if architecture_by_site[i] not in self.models), None):
                raise UserError(
                    f"{name} needs the server to know all architectures, but that of {unknown_site!r}, "
                    f"{architecture_by_site[unknown_site]}, is none of architectures() in {self.deployment.file}: "
                    f"{', '.join(self.models)}"
                )
        data_spec = merge_data_specs(introductions, name) if needs & DATA_SPEC_REQUIREMENTS else None
        if is_new_run and "one_family" in needs and data_spec is not None:
            check_width_family(self.models, architecture_by_site, data_spec.inputs, name)
        roster = ClientRegistry(
            ids=ids,
            task=tasks[ids[0]],  # type: ignore[arg-type]
            num_examples={i: introductions[i]["num_examples"] for i in ids if "num_examples" in introductions[i]},
            architectures=architecture_by_site,
            models=self.models,
            data_spec=data_spec,
        )
        return Federation({}, self.algorithm, self.settings, self.public, roster)

    @single_torch_thread()
    def run_federation(
        self, federation: Federation, engine: Engine, progress: Progress, introductions: Mapping[str, Mapping[str, Any]]
    ) -> Run:
        """Plays the run of sites that have `introductions` what they are, from the start or from its newest checkpoint."""
        out = self.deployment.out
        if not self.deployment.resume:
            start = federation.initial_checkpoint()
            directory = RunDirectory.create(out)
            try:
                directory.write_manifest(
                    {
                        "seed": self.settings.seed,
                        "deployment": self.run,
                        "sites": list(federation.client_registry.ids),
                        "score": describe_deciding_metric(federation),
                        **resolved_fields_for_manifest(self.algorithm, start.state),
                        **(
                            {"prepared": self.preprocessing, "preparation": dict(self.preprocessing_facts)}
                            if self.preprocessing
                            else {}
                        ),
                        "told": {
                            i: {n: head[n] for n in CLAIM_KEYS if n in head}
                            for i, head in sorted(introductions.items())
                        },
                    }
                )
                directory.write_config(
                    {
                        **describe_method_and_settings(self.algorithm, self.settings),
                        "deployment": self._configuration_fields(),
                    }
                )
            except BaseException:
                directory.close()
                raise
            return run_rounds(federation, start, [], directory, progress, engine)
        directory = RunDirectory.open(out)
        try:
            checkpoint, history = rewind_to_checkpoint(directory, federation)
        except BaseException:
            directory.close()
            raise
        return run_rounds(federation, checkpoint, history, directory, progress, engine)

    def _configuration_fields(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self.deployment)
        fields = {n: str(v) if isinstance(v, Path) else v for n, v in fields.items() if n not in ("out", "resume")}
        return dict(to_plain_values(fields, "deployment"))
