"""Renders the panels that some methods add to the page: aggregation weights, similarity of representations, searched
cells, share of generated parameters, and warm starts.

Each reads a run directory and changes nothing.
"""

import base64
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from markupsafe import Markup

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.examples.pytree import tree_map
from polyfed.core.io.atomic_files import read_file
from polyfed.core.io.text.number_format import format_number
from polyfed.core.io.values.validation import parse_json, validation_error
from polyfed.graphs.contraction import ContractionOptions
from polyfed.models import ModelSpec
from polyfed.report.figures.aggregation import read_aggregation_weights
from polyfed.report.figures.alignment import RepresentationAlignment
from polyfed.report.figures.architectures import ArchitectureSearchResult, draw_client_cells
from polyfed.report.page import sentences
from polyfed.report.page.charts.svg_charts import ChartBar, ChartLine, svg_bar_chart, svg_heat_map, svg_line_chart
from polyfed.report.page.elements import (
    html_div,
    html_dropdown_panels,
    html_figure,
    html_legend,
    html_paragraph,
    html_side_by_side,
    html_table,
    render_template,
)
from polyfed.simulation.results.unseen_clients import UnseenClientCurves

WARM_START_FILE = "unseen/curves.json"  # in the run directory: {id: {"score": name, "warm": [...], "scratch": [...]}}
MAX_PANELS = 12  # panels of one kind, so that a page stays below 3 MB


def html_aggregation_weights(folder: Path, key: str, max_layers: int = MAX_PANELS) -> Markup:
    """Renders pFedLA's weights α of clients in others' layers as heat maps and curves.

    A heat map for each of the first `max_layers` layers shows the weights after the last round; curves show the weight
    of each client's own layer by round.

    Raises:
        UserError: the directory has none.
    """
    aggregation_weights = read_aggregation_weights(folder)
    last = int(aggregation_weights.rounds[-1])
    panels = {}
    for k, layer in enumerate(aggregation_weights.layers[:max_layers]):
        alpha = aggregation_weights.alpha[-1, :, k, :].astype(np.float64)
        chart = svg_heat_map(
            alpha, aggregation_weights.clients, aggregation_weights.clients, key=f"{key}-w{k}", sqrt_colours=True,
            title=f"Weights of layer {layer} after round {last}, site by site",
            x_label="site whose layer is weighed", y_label="site that gets the mixture",
        )  # fmt: skip
        own_mean = float(np.diag(alpha).mean())
        caption = (
            f"Layer {layer} after round {last}: row i is what site i mixes its layer of; colours follow the square root. "
            f"On average a site's own has the weight {own_mean:.2f}."
        )
        panels[layer] = html_figure(chart, caption)
    own_weights = aggregation_weights.alpha[
        :, range(len(aggregation_weights.clients)), :, range(len(aggregation_weights.clients))
    ].mean(axis=0)  # (R, L)
    rounds = aggregation_weights.rounds.astype(float).tolist()
    curves = [
        ChartLine(layer, rounds, own_weights[:, k].tolist(), own_weights[:, k].tolist(), own_weights[:, k].tolist(), k)
        for k, layer in enumerate(aggregation_weights.layers[:MAX_PANELS])
    ]
    title = "Weight of a site's own layer, mean over sites, by round"
    chart = svg_line_chart(
        curves, key=f"{key}-own", title=title, x_label="rounds", y_label="own weight α", integer_x=True
    )
    rows = [
        [layer, *(f"{value:.3f}" for value in own_weights[[0, -1], k])]
        for k, layer in enumerate(aggregation_weights.layers)
    ]
    behind = html_table(title, ["layer", f"round {aggregation_weights.rounds[0]}", f"round {last}"], rows)
    more = (
        f" The first {MAX_PANELS} of {len(aggregation_weights.layers)} layers."
        if len(aggregation_weights.layers) > MAX_PANELS
        else ""
    )
    own_figure = html_figure(chart + html_legend([c.label for c in curves]), f"{title}.{more}", behind)
    layers_html = html_dropdown_panels(f"{key}-layer", "Layer", panels)
    if len(aggregation_weights.layers) > max_layers:
        layers_html += html_paragraph(f"The first {max_layers} of {len(aggregation_weights.layers)} layers.")
    return html_side_by_side([html_div(layers_html), html_div(own_figure)])


def html_alignment(alignment: RepresentationAlignment, key: str) -> Markup:
    """Renders heat maps of the linear CKA of any two clients' representations, before and after training."""
    parts = []
    for when, values, mean in (
        ("before", alignment.cka_before, alignment.mean_cka_of_initial_networks),
        ("after", alignment.cka_after, alignment.mean_cka_of_trained_networks),
    ):
        title = f"CKA of two sites' representations {when} training"
        chart = svg_heat_map(values, alignment.clients, alignment.clients, key=f"{key}-{when}", title=title, high=1.0,
                         x_label="site", y_label="site")  # fmt: skip
        parts.append(html_figure(chart, f"{title}; mean over pairs {mean:.2f} (1: alike up to rotation and scale)."))
    return html_side_by_side(parts)


def html_searched_cells(search_result: ArchitectureSearchResult, key: str, max_clients: int = MAX_PANELS) -> Markup:
    """Renders the selected cells of the first clients: drawings, and heat maps of operations' probabilities."""
    from matplotlib import rc_context

    panels = {}
    for k, client in enumerate(search_result.clients[:max_clients]):
        with tempfile.TemporaryDirectory() as folder_name:
            file = Path(folder_name) / "cells.svg"
            with rc_context({"svg.fonttype": "none"}):  # letters as text, a fraction of their outlines
                draw_client_cells(search_result, client, file)
            svg_base64 = base64.b64encode(read_file(file)).decode()
        alt = f"The cells of {client}: nodes and the most probable operation of each edge"
        rows = []
        maps = []
        for c, (cell, name) in enumerate(zip(search_result.cells_of(client), search_result.cell_titles, strict=True)):
            edges = [cell.edge_label(edge) for edge in cell.edges]
            title = f"{name} of {client}: probability of each operation at each edge"
            maps.append(
                html_figure(
                    svg_heat_map(
                        cell.probabilities,
                        edges,
                        cell.candidates,
                        key=f"{key}-{k}-{c}",
                        title=title,
                        high=1.0,
                        x_label="operation",
                        y_label="edge",
                    ),
                    f"{title}.",
                )
            )
            rows += [
                [name, edge, operation, f"{row.max():.2f}"]
                for edge, operation, row in zip(edges, cell.chosen_operations, cell.probabilities, strict=True)
            ]
        numbers_html = html_table(
            f"Most probable operations of {client}", ["cell", "edge", "operation", "probability"], rows
        )
        image = render_template("client_picture", alt=alt, address=f"data:image/svg+xml;base64,{svg_base64}")
        picture = html_figure(image, f"{client}: its cells.", numbers_html)
        panels[client] = html_side_by_side([html_div(picture), html_div(Markup().join(maps))])
    more = (
        html_paragraph(f"The first {max_clients} of {len(search_result.clients)} sites.")
        if len(search_result.clients) > max_clients
        else Markup()
    )
    return html_dropdown_panels(f"{key}-cells", "Site", panels) + more


def html_generatable_parameter_share(clients: Sequence[Client], key: str, contraction: ContractionOptions) -> Markup:
    """Renders the share of parameters that a hypernetwork can generate, and why others stay.

    Args:
        clients: of the run, with their networks.
        key: for ids on the page.
        contraction: which operations are nodes of the method's graphs.

    Raises:
        UserError: a network cannot be followed.
    """
    from polyfed.core.nn.module_cache import build_module
    from polyfed.graphs import extract

    networks: dict[str, list[Client]] = {}
    for client in clients:
        spec = client.model
        network_key = (
            f"{spec.name} {json.dumps(dict(spec.arguments), default=str)}"
            if isinstance(spec, ModelSpec)
            else repr(spec)
        )
        networks.setdefault(network_key, []).append(client)
    bars: list[ChartBar] = []
    rows = []
    for owners in list(networks.values())[:MAX_PANELS]:
        spec = owners[0].model
        if spec is None:
            raise UserError(f"site {owners[0].id!r} has no network of its own")
        name = spec.name if isinstance(spec, ModelSpec) else type(spec).__name__
        name = f"{name} ({len(bars) + 1})" if any(bar.label == name for bar in bars) else name
        rows_of = torch.arange(min(2, len(owners[0].train)), device=owners[0].train.device)
        x = tree_map(torch.Tensor.cpu, owners[0].train.batch(rows_of)[0])
        graph = contraction.apply(extract(build_module(spec, seed=0), x))
        bars.append(ChartBar(name, graph.coverage, graph.coverage, graph.coverage))
        reasons: dict[str, int] = {}
        for parameter, reason in graph.local_reasons.items():
            reasons[reason] = reasons.get(reason, 0) + graph.parameter_sizes[parameter]
        reasons_text = "; ".join(f"{size} {reason}" for reason, size in reasons.items()) or "nothing"
        rows.append([name, str(len(owners)), f"{sum(graph.parameter_sizes.values())}", str(len(graph.generated_weights)),
                     format_number(graph.coverage, "%"), reasons_text])  # fmt: skip
    chart = svg_bar_chart(bars, key=f"{key}-coverage", title="Share of a network's parameters that can be generated",
                      x_label="per cent of the parameters", unit="%")  # fmt: skip
    columns = ["network", "sites", "parameters", "layers generated", "share", "stays local"]
    caption = "Coverage of the graph: the share of each network's parameters that the hypernetwork can generate."
    return html_figure(chart, caption, html_table("Coverage of each network", columns, rows))


class WarmStartCurves(TypedDict):
    """Holds an unseen client's scores by epoch, from generated weights and from scratch."""

    score: str
    warm: list[float | None]
    scratch: list[float | None]


def html_warm_starts(folder: Path, key: str) -> Markup:
    """Renders unseen clients' learning curves from generated weights and from scratch.

    Empty if the run directory has no such curves.

    Raises:
        UserError: the file of the curves is damaged.
    """
    file = folder / WARM_START_FILE
    if not file.is_file():
        return Markup()
    try:
        content: Mapping[str, Any] = parse_json(read_file(file))
        if error_text := validation_error(content, dict[str, WarmStartCurves]):
            raise ValueError(error_text)
        unequal_clients = [
            i for i, entry in content.items() if not entry["warm"] or len(entry["warm"]) != len(entry["scratch"])
        ]
        if unequal_clients:
            raise ValueError(f"the two curves of {unequal_clients[0][:60]!r} are not of one length")
        curves = {
            name: UnseenClientCurves(str(entry["score"]), tuple(entry["warm"]), tuple(entry["scratch"]))
            for name, entry in content.items()
        }
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}); run polyfed warmstart again") from error
    panels = {}
    for n, (name, client_curves) in enumerate(sorted(curves.items())[:MAX_PANELS]):
        epochs = [float(epoch) for epoch in range(client_curves.epochs + 1)]
        chart_lines = []
        for style, (label, values) in enumerate(
            (("generated weights", client_curves.warm), ("from scratch", client_curves.scratch))
        ):
            scores = [np.nan if value is None else value for value in values]
            chart_lines.append(ChartLine(label, epochs, scores, scores, scores, style))
        title = f"{name}: {client_curves.score} while the whole network is trained"
        chart = svg_line_chart(
            chart_lines,
            key=f"{key}-warm{n}",
            title=title,
            x_label="epochs of training the whole network",
            y_label=client_curves.score,
            unit=sentences.unit_of_score(client_curves.score),
            integer_x=True,
        )
        unit = sentences.unit_of_score(client_curves.score)
        rows = [[f"{x:.0f}", *(format_number(curve.y[k], unit) for curve in chart_lines)] for k, x in enumerate(epochs)]
        numbers_html = html_table(title, ["epoch", "generated weights", "from scratch"], rows)
        panels[name] = html_figure(chart + html_legend([c.label for c in chart_lines]), f"{title}.", numbers_html)
    return html_dropdown_panels(f"{key}-warm", "Unseen site", panels)
