"""Defines the server of a deployment, which sets up the federation from what the sites report, and runs its rounds.

The rounds are those of the simulator (`simulation.rounds.round_loop`), on an engine that sends tasks to sites. A
site's private state stays there. In its place the server stores the number of the round that the state belongs to, so
that a run that is resumed from a checkpoint asks for the right state.
"""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from polyfed.algorithms import registry_name
from polyfed.core.algorithm import Algorithm, Architecture
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Examples
from polyfed.core.io.values.number_checks import is_positive_number, is_whole_number
from polyfed.core.io.values.plain_values import to_plain_values
from polyfed.core.machine.threads import exclusive_single_torch_thread_with_grad
from polyfed.core.methods.capabilities import manifest_entry_of_resolved_fields
from polyfed.core.tasks.task import Task
from polyfed.core.tasks.task_lookup import get_task
from polyfed.deploy.protocol.handshake import (
    CLAIM_KEYS,
    check_same_input_specs,
    check_same_representation_width,
    check_same_target_count,
    check_width_family,
    input_spec_by_part,
    merge_data_specs,
)
from polyfed.deploy.protocol.table_summary import describe_table_difference, sites_without_column_names
from polyfed.deploy.protocol.wire import (
    COUNTING_PROTOCOL,
    DATA_SPEC_REQUIREMENTS,
    PROTOCOL,
    build_compressor_head_fields,
)
from polyfed.deploy.server.update_bound import MaxUpdateNorm, parse_max_update_norm
from polyfed.simulation.engines.base import ClientTask, Engine
from polyfed.simulation.monitoring.progress import Progress
from polyfed.simulation.results.run import Run
from polyfed.simulation.rounds.client_registry import ClientRegistry
from polyfed.simulation.rounds.federation import Federation, deciding_metric_manifest_entry
from polyfed.simulation.rounds.replies.secure_aggregation import sums_count_norms
from polyfed.simulation.rounds.round_loop import run_remaining_rounds
from polyfed.simulation.rounds.start.resume import rewind_to_newest_checkpoint
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.configuration import describe_method_and_settings
from polyfed.simulation.storage.directory import RunDirectory

_LOG = logging.getLogger("polyfed.server")
MAX_EXAMPLES = 10**12  # the largest number of examples that a site may report


@final
@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Holds a deployment's settings, such as sites, time limits and folders; not those of method and rounds.

    Args:
        sites: ids of the sites that take part; no others may.
        out: run directory on the server's machine.
        resume: whether to continue the run in `out`, with its method and settings.
        allow_disclosure: whether a method may run that discloses weights or architectures to the server. (Each site must
            allow it as well.)
        join_seconds: seconds that the server waits at the start until all sites are connected.
        round_seconds: seconds that it waits for the replies of an exchange; later ones are discarded. In this time a site
            evaluates the previous round and trains.
        max_megabytes: the largest reply that the server accepts.
        max_update_norm: the bound on the norm of a site's update, above which it is scaled down: a number; "auto", a
            multiple of the running median of the norms (`polyfed.deploy.server.update_bound`); or "off".
        file: a Python file on the server, with `model()` (the common network, for methods that need one architecture),
            `architectures()` (a list of factories, for methods that need them all) and `public()` (unlabelled examples);
            None if the method needs none of these.
        look: whether to look at the data of the sites before round 1, with their consent (`disclose=look`).
        secure_threshold: t of the secure sums: the smallest number of a round's sites that a sum needs, and that can unmask
            it; None requires more than two thirds of them.

    Raises:
        UserError: a value is outside its range.
    """

    sites: tuple[str, ...]
    out: Path
    resume: bool = False
    allow_disclosure: bool = False
    join_seconds: float = 300.0
    round_seconds: float = 3600.0
    max_megabytes: float = 1024.0
    max_update_norm: MaxUpdateNorm = "auto"
    file: Path | None = None
    secure_threshold: int | None = None
    look: bool = False

    def __post_init__(self) -> None:
        if not self.sites or len(set(self.sites)) < len(self.sites):
            raise UserError(f"sites must name at least one site, each once, got {', '.join(self.sites) or 'none'!r}")
        if not isinstance(self.look, bool):
            raise UserError(f"look must be true or false, got {self.look!r}")
        object.__setattr__(self, "max_update_norm", parse_max_update_norm(self.max_update_norm))
        for name in ("join_seconds", "round_seconds", "max_megabytes"):
            value = getattr(self, name)
            if not is_positive_number(value):
                raise UserError(f"{name.replace('_', '-')} must be positive, got {value!r}")
        if (t := self.secure_threshold) is not None and not is_whole_number(t, 2):
            raise UserError(f"secure-threshold must be a whole number from 2, got {t!r}")


@final
@dataclass(frozen=True)
class DeploymentServer:
    """Holds what the server needs to run a deployment; `build_or_restore_server` builds it.

    Args:
        deployment: its settings.
        algorithm: the method.
        settings: the settings of the rounds.
        run: identifier of the run.
        models: the server's networks, by architecture.
        public: the server's public examples.
        first_introductions: in a resumed run, header of each site's introduction when the run began.
        preprocessing: the preprocessing that sites with tables have agreed on (`polyfed.deploy.site.preprocessing`).
        preprocessing_facts: costs of that agreement.
    """

    deployment: Deployment
    algorithm: Algorithm[Any, Any]
    settings: Settings
    run: str
    models: Mapping[str, Architecture] = field(default_factory=dict)
    public: Examples | None = None
    first_introductions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    preprocessing: Mapping[str, Any] | None = None
    preprocessing_facts: Mapping[str, int] = field(default_factory=dict)

    def build_introduction_request_header(self) -> dict[str, Any]:
        """Returns the header that announces the run to a site and asks it to describe itself."""
        needs = self.algorithm.requires
        common_architecture = next(iter(self.models)) if "one_architecture" in needs else None
        preprocessing_field = {} if self.preprocessing is None else {"prepared": self.preprocessing}
        is_resumed = self.deployment.resume  # then the public examples are in the checkpoint
        public = {} if self.public is None or is_resumed else {"public": input_spec_by_part(self.public.x)}
        return {
            "kind": "introduce", **self._common_head(), "architecture": common_architecture, **preprocessing_field,
            **public,
        }  # fmt: skip

    def build_task_head(self, task: ClientTask) -> dict[str, Any]:
        """Returns the header of the message that sends a training or evaluation task to a site."""
        return {
            "kind": "task", **self._common_head(), "phase": task.phase, "round": task.round, "client": task.client,
            "seed": task.seed, "run_seed": task.run_seed,
            "state": None if task.client_state is None else task.client_state["round"],
            "keep": self._oldest_state_to_keep(task), "metrics": list(self.settings.metrics),
            **build_compressor_head_fields(self.settings),
        }  # fmt: skip

    def _oldest_state_to_keep(self, task: ClientTask) -> int:
        """Returns the round of the oldest private state that a site must keep, since the run may be resumed from it."""
        if self.settings.asynchronous is None:
            return max(0, task.round - self._max_rounds_to_go_back)
        earlier = (task.client_state or {}).get("earlier", [])  # a slow site's last state may be of any round
        return int(earlier[0]) if len(earlier) == self._max_rounds_to_go_back else 0

    def describe_stored_state(self, task: ClientTask) -> dict[str, Any]:
        """Returns what the server stores in place of a site's state: its round.

        In asynchronous runs also the rounds of earlier states to which the run may go back.
        """
        if self.settings.asynchronous is None:
            return {"round": task.round}
        before = task.client_state or {}
        earlier = [*before.get("earlier", []), *([before["round"]] if before else [])]
        return {"round": task.round, "earlier": earlier[-self._max_rounds_to_go_back :]}

    @property
    def _max_rounds_to_go_back(self) -> int:
        """Returns how many rounds a resumed run may go back: two checkpoints are kept, and the last round may have none."""
        return 2 * self.settings.checkpoint_every + 1

    def _common_head(self) -> dict[str, Any]:
        algorithm = describe_method_and_settings(self.algorithm, self.settings)["algorithm"]
        secure = {"secure": True} if self.settings.secure else {}
        counts = self.settings.secure and sums_count_norms(self.algorithm)
        return {
            "protocol": COUNTING_PROTOCOL if counts else PROTOCOL,
            "run": self.run,
            "algorithm": algorithm,
            **secure,
        }

    def build_secure_sum_head(self) -> dict[str, Any]:
        """Returns the header of a message that carries only steps of secure aggregation, and no task."""
        return {"kind": "sum", **self._common_head()}

    @property
    def sites_per_round(self) -> int:
        """Returns the number of sites that take part in each round."""
        return self.settings.count_round_clients(len(self.deployment.sites))

    @property
    def secure_sum_threshold(self) -> int:
        """Returns how many sites can unmask a sum; by default over two thirds of the round's."""
        return self.deployment.secure_threshold or 2 * self.sites_per_round // 3 + 1

    def build_checked_federation(self, introductions: Mapping[str, Mapping[str, Any]]) -> Federation:
        """Builds the federation from what the sites report about themselves.

        Args:
            introductions: header of each site's answer to its introduction.

        Raises:
            UserError: the sites do not suit the method or each other.
        """
        ids = tuple(sorted(self.deployment.sites))
        needs, name = self.algorithm.requires, registry_name(self.algorithm)
        task = _common_task({i: introductions[i].get("task") for i in ids})
        if table_difference := describe_table_difference(introductions):
            raise UserError(table_difference)
        if without_names := sites_without_column_names(introductions):
            _LOG.warning(
                "%s: the columns of their inputs are not compared with those of the other sites, whose frames have names; "
                "give every site's client() a frame, and all sites this version of polyfed",
                ", ".join(map(repr, without_names)),
            )
        is_new_run = not self.deployment.resume  # a resumed run may be older than these checks
        if is_new_run and "one_representation" in needs:
            check_same_representation_width(introductions, name)
        if is_new_run and "one_input_spec" in needs:
            check_same_input_specs(introductions, name)
        if is_new_run and "one_data_spec" in needs:
            check_same_target_count(introductions, name)
        for i in ids:
            needed_scalars = () if self.settings.secure else self.algorithm.scalars_needed  # a secure sum holds them
            if "num_examples" in needed_scalars and "num_examples" not in introductions[i]:
                raise UserError(f"site {i!r} does not report its number of examples, which {name} needs")
            number = introductions[i].get("num_examples", 1)
            if not is_whole_number(number, 1) or number > MAX_EXAMPLES:
                raise UserError(f"site {i!r} reports {str(number)[:40]} examples, which is not a count")
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
            task=task,
            num_examples={i: introductions[i]["num_examples"] for i in ids if "num_examples" in introductions[i]},
            architectures=architecture_by_site,
            models=self.models,
            data_spec=data_spec,
        )
        return Federation({}, self.algorithm, self.settings, self.public, roster)

    @exclusive_single_torch_thread_with_grad()
    def run_or_resume_federation(
        self, federation: Federation, engine: Engine, progress: Progress, introductions: Mapping[str, Mapping[str, Any]]
    ) -> Run:
        """Runs all rounds, or those after the newest checkpoint, and returns the run.

        Args:
            federation: the federation, from `build_checked_federation`.
            engine: sends the tasks.
            progress: displays the rounds.
            introductions: headers of the sites' introductions, which a new run's manifest keeps.
        """
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
                        "score": deciding_metric_manifest_entry(federation),
                        **manifest_entry_of_resolved_fields(self.algorithm, start.state),
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
            return run_remaining_rounds(federation, start, [], directory, progress, engine)
        directory = RunDirectory.open(out)
        try:
            checkpoint, history = rewind_to_newest_checkpoint(directory, federation)
        except BaseException:
            directory.close()
            raise
        return run_remaining_rounds(federation, checkpoint, history, directory, progress, engine)

    def _configuration_fields(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self.deployment)
        fields = {n: str(v) if isinstance(v, Path) else v for n, v in fields.items() if n not in ("out", "resume")}
        return dict(to_plain_values(fields, "deployment"))


def _common_task(spec_by_site: Mapping[str, Any]) -> Task:
    """Builds the task that all sites report; raises a `UserError` if they differ, or this server cannot build it."""
    specs = list(spec_by_site.values())
    printed_specs = {site: str(spec)[:200] for site, spec in spec_by_site.items()}
    if any(spec != specs[0] for spec in specs):
        raise UserError(f"sites of one federation must have one task, got {printed_specs}")
    try:
        return get_task(specs[0])
    except UserError as error:
        raise UserError(f"sites of one federation must have one task, got {printed_specs}, and {error}") from error
