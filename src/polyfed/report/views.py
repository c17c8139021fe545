"""What methods have to show beside their scores, as HTML: who aggregates from whom, how alike representations are, which
operations were found, what a hypernetwork can generate, and warm starts. Each reads a run directory and changes nothing.
"""

import base64
import json
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.core.files import read_file
from polyfed.core.inputs import mapped
from polyfed.core.typed import conforms, from_json
from polyfed.graphs.contraction import Contraction
from polyfed.models import ModelSpec
from polyfed.report import words
from polyfed.report.charts import Bar, Curve, bar_chart, heat_map, line_chart, number
from polyfed.report.html import choice, figure, legend, table
from polyfed.simulation.unseen import Curves

WARM_STARTS = "unseen/curves.json"  # in the run directory: {id: {"score": name, "warm": [...], "scratch": [...]}}
MOST = 12  # panels of one kind, so that a page stays below 3 MB


def weights(folder: Path, key: str, most: int = MOST) -> str:
    """pFedLA's weights α: each layer's matrix after the last round (the first `most`), and how much of its own each client
    keeps.

    Raises:
        UserError: the directory has none.
    """
    from polyfed.report import aggregation

    found = aggregation.read(folder)
    last = int(found.rounds[-1])
    panels = {}
    for k, layer in enumerate(found.layers[:most]):
        alpha = found.alpha[-1, :, k, :].astype(np.float64)
        chart = heat_map(
            alpha, found.clients, found.clients, key=f"{key}-w{k}", root=True,
            title=f"Weights of layer {layer} after round {last}, client by client",
            x_label="client whose layer is weighed", y_label="client that gets the mixture",
        )  # fmt: skip
        own = float(np.diag(alpha).mean())
        caption = (
            f"Layer {layer} after round {last}: row i is what client i mixes its layer of; colours follow the square root. "
            f"On average a client's own has the weight {own:.2f}."
        )
        panels[layer] = figure(chart, caption)
    own = found.alpha[:, range(len(found.clients)), :, range(len(found.clients))].mean(axis=0)  # (R, L)
    rounds = found.rounds.astype(float).tolist()
    curves = [
        Curve(layer, rounds, own[:, k].tolist(), own[:, k].tolist(), own[:, k].tolist(), k)
        for k, layer in enumerate(found.layers[:MOST])
    ]
    title = "Weight of a client's own layer, mean over clients, by round"
    chart = line_chart(curves, key=f"{key}-own", title=title, x_label="rounds", y_label="own weight α", whole=True)
    rows = [[layer, *(f"{value:.3f}" for value in own[[0, -1], k])] for k, layer in enumerate(found.layers)]
    behind = table(title, ["layer", f"round {found.rounds[0]}", f"round {last}"], rows)
    more = f" The first {MOST} of {len(found.layers)} layers." if len(found.layers) > MOST else ""
    own_figure = figure(chart + legend([c.label for c in curves]), f"{title}.{more}", behind)
    left = choice(f"{key}-layer", "Layer", panels)
    if len(found.layers) > most:
        left += f"<p>The first {most} of {len(found.layers)} layers.</p>"
    return f'<div class="grid2"><div>{left}</div><div>{own_figure}</div></div>'


def alignments(folder: Path, clients: Sequence[Client], key: str) -> str:
    """CKA between the representations of any two clients, before and after training.

    Raises:
        UserError: the run is not finished, has one client, or its networks cannot be compared.
    """
    from polyfed.report.alignment import read_alignment

    found = read_alignment(folder, clients=clients)
    parts = []
    for when, values, mean in (
        ("before", found.before, found.mean_before),
        ("after", found.after, found.mean_after),
    ):
        title = f"CKA of two clients' representations {when} training"
        chart = heat_map(values, found.clients, found.clients, key=f"{key}-{when}", title=title, high=1.0,
                         x_label="client", y_label="client")  # fmt: skip
        parts.append(figure(chart, f"{title}; mean over pairs {mean:.2f} (1: alike up to rotation and scale)."))
    return f'<div class="grid2">{"".join(parts)}</div>'


def operations(folder: Path, key: str, most: int = MOST) -> str:
    """What a search has found: of the first `most` clients their cells, drawn, and the probability of each operation at each
    edge.

    Raises:
        UserError: the run is not finished, or a file of it is damaged.
    """
    from matplotlib import rc_context

    from polyfed.report.search import draw_cell, read_search

    found = read_search(folder)
    panels = {}
    for k, client in enumerate(found.clients[:most]):
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / "cells.svg"
            with rc_context({"svg.fonttype": "none"}):  # letters as text, a fraction of their outlines
                draw_cell(found, client, file)
            drawn = base64.b64encode(read_file(file)).decode()
        alt = escape(f"The cells of {client}: nodes and the most probable operation of each edge")
        rows = []
        maps = []
        for c, (cell, name) in enumerate(zip(found.of(client), found.titles, strict=True)):
            edges = [cell.label(edge) for edge in cell.edges]
            title = f"{name} of {client}: probability of each operation at each edge"
            maps.append(figure(heat_map(cell.probabilities, edges, cell.candidates, key=f"{key}-{k}-{c}", title=title,
                                        high=1.0, x_label="operation", y_label="edge"), f"{title}."))  # fmt: skip
            rows += [[name, edge, chosen, f"{row.max():.2f}"]
                     for edge, chosen, row in zip(edges, cell.chosen, cell.probabilities, strict=True)]  # fmt: skip
        behind = table(f"Most probable operations of {client}", ["cell", "edge", "operation", "probability"], rows)
        picture = figure(f'<img alt="{alt}" src="data:image/svg+xml;base64,{drawn}">', f"{client}: its cells.", behind)
        panels[client] = f'<div class="grid2"><div>{picture}</div><div>{"".join(maps)}</div></div>'
    more = f"<p>The first {most} of {len(found.clients)} clients.</p>" if len(found.clients) > most else ""
    return choice(f"{key}-cells", "Client", panels) + more


def coverage(clients: Sequence[Client], key: str, contraction: Contraction) -> str:
    """The share of each network's parameters that a graph hypernetwork can generate, and why the rest stays local.

    Args:
        clients: of the run, with their networks.
        key: for ids on the page.
        contraction: which operations are nodes of the method's graphs.

    Raises:
        UserError: a network cannot be followed.
    """
    from polyfed.core.scratch import new_module
    from polyfed.graphs import extract

    networks: dict[str, list[Client]] = {}
    for client in clients:
        spec = client.model
        told = (
            f"{spec.name} {json.dumps(dict(spec.arguments), default=str)}"
            if isinstance(spec, ModelSpec)
            else repr(spec)
        )
        networks.setdefault(told, []).append(client)
    bars: list[Bar] = []
    rows = []
    for owners in list(networks.values())[:MOST]:
        spec = owners[0].model
        if spec is None:
            raise UserError(f"client {owners[0].id!r} has no network of its own")
        name = spec.name if isinstance(spec, ModelSpec) else type(spec).__name__
        name = f"{name} ({len(bars) + 1})" if any(bar.label == name for bar in bars) else name
        rows_of = torch.arange(min(2, len(owners[0].train)), device=owners[0].train.device)
        x = mapped(torch.Tensor.cpu, owners[0].train.batch(rows_of)[0])
        graph = contraction.of(extract(new_module(spec, seed=0), x))
        bars.append(Bar(name, graph.coverage, graph.coverage, graph.coverage))
        reasons: dict[str, int] = {}
        for parameter, reason in graph.local.items():
            reasons[reason] = reasons.get(reason, 0) + graph.sizes[parameter]
        why = "; ".join(f"{size} {reason}" for reason, size in reasons.items()) or "nothing"
        rows.append([name, str(len(owners)), f"{sum(graph.sizes.values())}", str(len(graph.generated)),
                     number(graph.coverage, "%"), why])  # fmt: skip
    chart = bar_chart(bars, key=f"{key}-coverage", title="Share of a network's parameters that can be generated",
                      x_label="per cent of the parameters", unit="%")  # fmt: skip
    columns = ["network", "clients", "parameters", "layers generated", "share", "stays local"]
    caption = "Coverage of the graph: the share of each network's parameters that the hypernetwork can generate."
    return figure(chart, caption, table("Coverage of each network", columns, rows))


class WarmCurves(TypedDict):
    """What `polyfed warmstart` keeps of a client."""

    score: str
    warm: list[float | None]
    scratch: list[float | None]


def warm_starts(folder: Path, key: str) -> str:
    """Curves of unseen clients that `polyfed warmstart` trained from generated weights and from scratch; empty without any.

    Raises:
        UserError: the file of the curves is damaged.
    """
    file = folder / WARM_STARTS
    if not file.is_file():
        return ""
    try:
        content: Mapping[str, Any] = from_json(read_file(file))
        if wrong := conforms(content, dict[str, WarmCurves]):
            raise ValueError(wrong)
        odd = [i for i, one in content.items() if not one["warm"] or len(one["warm"]) != len(one["scratch"])]
        if odd:
            raise ValueError(f"the two curves of {odd[0][:60]!r} are not of one length")
        curves = {
            name: Curves(str(one["score"]), tuple(one["warm"]), tuple(one["scratch"])) for name, one in content.items()
        }
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}); run polyfed warmstart again") from error
    panels = {}
    for n, (name, found) in enumerate(sorted(curves.items())[:MOST]):
        epochs = [float(epoch) for epoch in range(found.epochs + 1)]
        drawn = []
        for style, (label, values) in enumerate((("generated weights", found.warm), ("from scratch", found.scratch))):
            scores = [np.nan if value is None else value for value in values]
            drawn.append(Curve(label, epochs, scores, scores, scores, style))
        title = f"{name}: {found.score} while the whole network is trained"
        chart = line_chart(drawn, key=f"{key}-warm{n}", title=title, x_label="epochs of training the whole network",
                           y_label=found.score, unit=words.unit_of(found.score), whole=True)  # fmt: skip
        unit = words.unit_of(found.score)
        rows = [[f"{x:.0f}", *(number(curve.y[k], unit) for curve in drawn)] for k, x in enumerate(epochs)]
        behind = table(title, ["epoch", "generated weights", "from scratch"], rows)
        panels[name] = figure(chart + legend([c.label for c in drawn]), f"{title}.", behind)
    return choice(f"{key}-warm", "Unseen client", panels)
