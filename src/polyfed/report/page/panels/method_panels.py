"""Builds the panels that some methods add to the page of `polyfed report`."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

from markupsafe import Markup

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.report.data.run_records import RunRecord
from polyfed.report.figures.alignment import RepresentationAlignment
from polyfed.report.figures.architectures import ArchitectureSearchResult
from polyfed.report.page.elements import html_bullet_list
from polyfed.report.page.panels import method_views
from polyfed.simulation.experiment import Participants, build_experiment, load_participants, rebuild_clients
from polyfed.simulation.storage.directory import read_manifest

MethodResult = RepresentationAlignment | ArchitectureSearchResult
"""The results from which a panel is drawn; a terminal can show them as text."""


@final
@dataclass(frozen=True, eq=False)
class PanelInputs:
    """Holds the inputs of the panels that a run's method adds to the report page.

    Attributes:
        run: the run; it has a directory.
        participants: the run's clients, loaded again; None where that would need a download or is not possible.
        key: prefix of ids on the page.
        max_panels: number of clients or layers to show at most.
        on_result: called with the run and each `MethodResult` that is computed, so that a command can print it.
    """

    run: RunRecord
    participants: Participants | None
    key: str
    max_panels: int
    on_result: Callable[[RunRecord, MethodResult], None]


def build_method_panels(inputs: PanelInputs) -> dict[str, Markup]:
    """Builds `{heading: HTML}` of a run's method; a panel that cannot be built says why."""
    panels: dict[str, Markup] = {}
    for heading, make_panel in _PANELS.get(inputs.run.method, {}).items():
        try:
            html = make_panel(inputs)
        except (UserError, OSError) as error:
            html = html_bullet_list([f"Not shown: {error}"])
        if html:
            panels[heading] = html
    return panels


def build_segmentation_panel(
    inputs: PanelInputs, all_clients: Sequence[Client], reason_missing: str
) -> dict[str, Markup]:
    """Builds the panel of test images, truth and prediction, or says why it is empty.

    Only a run whose data are at hand has images: a real site's never leave it.

    Args:
        inputs: the run.
        all_clients: its clients, with the test examples of this run; empty if they are not at hand.
        reason_missing: why they are not.
    """
    from polyfed.report.export.trained_model import read_trained_model
    from polyfed.report.page.predictions.segmentation_images import IMAGES_HEADING, SECTION, html_images_of_clients

    try:
        if not all_clients:
            raise UserError(reason_missing.rstrip("."))
        clients = all_clients[: inputs.max_panels]
        if SECTION not in clients[0].task.page_sections:
            return {}
        trained = [read_trained_model(_folder_of_run(inputs), client.id, client.model) for client in clients]
        stored_dice = [next((s.value for s in model.scores if s.label == "Dice"), None) for model in trained]
        return {IMAGES_HEADING: html_images_of_clients(clients, [model.network for model in trained], stored_dice)}
    except (UserError, OSError) as error:
        return {IMAGES_HEADING: html_bullet_list([f"Not shown: {error}"])}


def method_adds_panels(method_name: str) -> bool:
    """Returns True if the method with this name adds panels to the report page."""
    return method_name in _PANELS


@final
class ParticipantsOrReasonMissing(NamedTuple):
    """Holds the clients of a run, or None and the reason why they cannot be loaded offline."""

    participants: Participants | None
    reason_missing: str


def load_participants_offline(run: RunRecord) -> ParticipantsOrReasonMissing:
    """Loads a run's clients from its configuration without a download, or says why it cannot."""
    data = run.config.get("data")
    if not isinstance(data, Mapping):
        return ParticipantsOrReasonMissing(
            None, "The sites were made in Python, so that the run directory does not know their classes."
        )
    if _needs_download(run):
        return ParticipantsOrReasonMissing(
            None,
            f"The data ({data.get('name')}) come from the Hugging Face hub and are not loaded for a page; runs with "
            "--data.path FOLDER show who has which classes.",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the page has those that the run has recorded
            participants = load_participants(build_experiment(run.config))
    except UserError as error:
        return ParticipantsOrReasonMissing(None, f"The data of the run could not be read again: {error}.")
    before = read_manifest(run.folder or "").get("partition_fingerprint")
    if before not in (None, participants.partition_fingerprint):
        return ParticipantsOrReasonMissing(
            None, "The data are no longer divided as in the run, so that the classes of its sites are not known."
        )
    return ParticipantsOrReasonMissing(participants, "")


# Sources that ship with polyfed or are generated.
_WITHOUT_FILES = frozenset({"blobs", "digits", "heart", "tagged_sentences"})


def _needs_download(run: RunRecord) -> bool:
    data = run.config.get("data")
    return isinstance(data, Mapping) and data.get("name") not in _WITHOUT_FILES and not data.get("path")


def _aggregation_weights(inputs: PanelInputs) -> Markup:
    return method_views.html_aggregation_weights(_folder_of_run(inputs), inputs.key, inputs.max_panels)


def _alignment_panel(inputs: PanelInputs) -> Markup:
    from polyfed.report.figures.alignment import measure_alignment

    if inputs.participants is not None:
        clients = inputs.participants.clients
    elif _needs_download(inputs.run):  # the hub's cache may have the data
        clients, _ = rebuild_clients(inputs.run.config, _folder_of_run(inputs))
    else:
        raise UserError(
            "the sites and their test examples are not at hand; polyfed.report.figures.alignment takes them in Python"
        )
    alignment = measure_alignment(_folder_of_run(inputs), clients=clients)
    inputs.on_result(inputs.run, alignment)
    return method_views.html_alignment(alignment, inputs.key)


def _architecture_panel(inputs: PanelInputs) -> Markup:
    from polyfed.report.figures.architectures import read_search_result

    result = read_search_result(_folder_of_run(inputs))
    inputs.on_result(inputs.run, result)
    return method_views.html_searched_cells(result, inputs.key, inputs.max_panels)


def _gradient_agreement(inputs: PanelInputs) -> Markup:
    from polyfed.report.page.panels import gradient_agreement

    if inputs.participants is None:
        raise UserError(
            "the sites' training examples are not at hand; polyfed.simulation.results.gradient_conflicts takes a run "
            "in Python"
        )
    clients, public = inputs.participants.clients, inputs.participants.public
    return gradient_agreement.html_gradient_agreement(_folder_of_run(inputs), clients, public, inputs.key)


def _coverage_panel(inputs: PanelInputs) -> Markup:
    from polyfed.algorithms import FLHAGHN
    from polyfed.graphs.contraction import NO_CONTRACTION
    from polyfed.simulation.storage.configuration import build_method, read_section

    if inputs.participants is None:
        raise UserError("the sites' networks are not at hand; `polyfed graph MODEL --input SHAPE` shows one of them")
    method = build_method(read_section(inputs.run.config, "algorithm"))
    contraction = method.contraction if isinstance(method, FLHAGHN) else NO_CONTRACTION
    return method_views.html_generatable_parameter_share(inputs.participants.clients, inputs.key, contraction)


def _warm_starts(inputs: PanelInputs) -> Markup:
    return method_views.html_warm_starts(_folder_of_run(inputs), inputs.key)


def _folder_of_run(inputs: PanelInputs) -> Path:
    assert inputs.run.folder is not None
    return inputs.run.folder


_WEIGHTS = {"Aggregation weights: who aggregates from whom": _aggregation_weights}
_SIMILARITY = {"Similarity of representations (CKA)": _alignment_panel}
_CELLS = {"Architectures that the search found": _architecture_panel}
_CELLS_AND_GRADIENTS = {**_CELLS, "Conflicts with the federated gradient": _gradient_agreement}
_PANELS: Mapping[str, Mapping[str, Callable[[PanelInputs], Markup]]] = {
    "pfedla": _WEIGHTS,
    "heur_pfedla": _WEIGHTS,
    "fedhenn": _SIMILARITY,
    "fedhenn_homo": _SIMILARITY,
    "feddsnas": _CELLS,
    "ca_feddsnas": _CELLS,
    "fedpnas": _CELLS_AND_GRADIENTS,
    "ca_fedpnas": _CELLS_AND_GRADIENTS,
    "flha_ghn": {
        "Parameters that the hypernetwork generates": _coverage_panel,
        "Warm start of unseen sites": _warm_starts,
    },
}
