"""The aggregation weights α of a pFedLA or HeurpFedLA run, read from its directory and drawn as in the paper's Figs. 5 to 7.

Dimensions: R rounds, N clients, L layers. α[r, i, l, j] is the weight that client i gives to layer l of client j.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from polyfed.core.errors import UserError, did_you_mean
from polyfed.core.io.array_files import read_npz
from polyfed.core.io.atomic_files import MAX_TEXT_BYTES, expand_user_path
from polyfed.data.plot import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KEYS = ("alpha", "rows", "layers", "clients")
_PERIODS = ("prior", "middle", "last")
_SHOWN = 8  # clients with a colour of their own; the rest is drawn together
_TICKS = 40  # labels on an axis, at most
_CELLS = 160  # cells of a heat map that can still hold their number
_OWN = "#222222"
_REST = "#b8b8b8"


@final
@dataclass(frozen=True, eq=False)
class AggregationWeights:
    """All weights of a run.

    Attributes:
        rounds: numbers of the rounds, (R,), ascending; 0 is before training.
        clients: ids, N of them, in the order of dimensions 1 and 3 of `alpha`.
        layers: names, L of them.
        alpha: float32, (R, N, L, N), after each round; a client that was not in a round carries on its last weights.
    """

    rounds: NDArray[np.int64]
    clients: tuple[str, ...]
    layers: tuple[str, ...]
    alpha: NDArray[np.float32]

    def client_index(self, name: str) -> int:
        """The position of a client.

        Raises:
            UserError: there is none of this id.
        """
        if name not in self.clients:
            raise UserError(f"the run has no client {name!r}; {_name_hint(name, self.clients)}")
        return self.clients.index(name)

    def layer_index(self, name: str) -> int:
        """The position of a layer.

        Raises:
            UserError: there is none of this name.
        """
        if name not in self.layers:
            raise UserError(f"the run has no layer {name!r}; {_name_hint(name, self.layers)}")
        return self.layers.index(name)

    def round_index(self, round: int) -> int:
        """The position of a round by its number; negative numbers count from the end, −1 is the last.

        Raises:
            UserError: the run has no such round.
        """
        if -len(self.rounds) <= round < 0:
            return len(self.rounds) + round
        positions = np.flatnonzero(self.rounds == round)
        if not len(positions):
            raise UserError(
                f"the run has no weights of round {round}; it has rounds {self.rounds[0]} to {self.rounds[-1]}"
            )
        return int(positions[0])


def read_aggregation_weights(run_directory: str | Path) -> AggregationWeights:
    """The weights of a run from its files `analysis/round-N.npz`.

    Raises:
        UserError: there are none, or one of them is damaged or does not fit the others.
    """
    folder = expand_user_path(run_directory, "the run directory") / "analysis"
    files = sorted(folder.glob("round-*.npz"))
    if not files:
        raise UserError(
            f"{run_directory} has no aggregation weights (analysis/round-*.npz); give the run directory of a pfedla or "
            "heur_pfedla run, or the folder baselines/NAME in which one is kept"
        )
    first = _read_weights_file(files[0])
    clients, layers = first["clients"].tolist(), first["layers"].tolist()
    if missing := sorted(set(clients) - set(first["rows"].tolist())):
        raise UserError(
            f"{files[0]} has no weights of client {missing[0]!r}: the file of round 0, which has all, is missing"
        )
    position = {client: i for i, client in enumerate(clients)}
    alpha = np.zeros((len(files), len(clients), len(layers), len(clients)), np.float32)
    for r, file in enumerate(files):
        arrays = first if r == 0 else _read_weights_file(file)
        if arrays["clients"].tolist() != clients or arrays["layers"].tolist() != layers:
            raise UserError(f"{file} has other clients or layers than {files[0].name}; the files are of different runs")
        alpha[r] = alpha[max(r - 1, 0)]
        alpha[r, [position[row] for row in arrays["rows"].tolist()]] = arrays["alpha"]
    rounds = np.array([int(file.stem.removeprefix("round-")) for file in files], np.int64)
    return AggregationWeights(rounds, tuple(clients), tuple(layers), alpha)


def _read_weights_file(file: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file, checked."""
    if not file.stem.removeprefix("round-").isdecimal():
        raise UserError(f"{file} is not named after a round; take it out of the folder")
    try:
        arrays = read_npz(file, _KEYS, MAX_TEXT_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}); restore it, or run again") from error
    if missing := [key for key in _KEYS if key not in arrays]:
        raise UserError(f"{file} has no {missing[0]!r}; it is not of a pfedla or heur_pfedla run")
    rows, layers, clients = arrays["rows"], arrays["layers"], arrays["clients"]
    shape = (len(rows), len(layers), len(clients)) if rows.ndim == layers.ndim == clients.ndim == 1 else None
    if arrays["alpha"].shape != shape or not shape or shape[1] == 0:
        names = " and ".join(f"{key} {arrays[key].shape}" for key in _KEYS)
        raise UserError(f"{file} holds shapes that do not fit: {names}; alpha must be (rows, layers, clients)")
    if not set(rows.tolist()) <= set(clients.tolist()) or not np.isfinite(arrays["alpha"]).all():
        raise UserError(f"{file} is damaged (rows of unknown clients, or weights that are no numbers); run again")
    return arrays


def draw_weight_evolution(
    weights: AggregationWeights, client: str, *, highlighted_clients: Sequence[str] | None = None
) -> "Figure":
    """How the weights of one client change during training (Fig. 5).

    Above, the mean weights it gives to each of the others, by layer, in the prior, middle and last third of the rounds.
    Below, the same round by round, one panel a layer; and its own weights, beside which a heat map would show nothing else.

    Args:
        weights: the run.
        client: the target client.
        highlighted_clients: clients to show in colours, e.g. the contrastive and the similar one; None for the eight
            with the largest
            mean weight in the last third. The rest is drawn as its mean and its range.

    Raises:
        UserError: an unknown client, `client_index` among `highlighted_clients`, or a run of one client.
    """
    from matplotlib.ticker import MaxNLocator

    target = weights.client_index(client)
    other_clients = [j for j in range(len(weights.clients)) if j != target]
    if not other_clients:
        raise UserError(f"{client!r} is the only client of the run, so that there are no weights for others to draw")
    thirds = round_positions_by_third(weights)
    client_alpha = weights.alpha[:, target]  # (R, L, N)
    if highlighted_clients is None:
        weight = client_alpha[thirds[-1]].mean(axis=(0, 1))
        coloured = sorted(sorted(other_clients, key=lambda j: (-weight[j], j))[:_SHOWN])
    else:
        coloured = [weights.client_index(name) for name in highlighted_clients]
    if target in coloured:
        raise UserError(f"others names {client!r}, the target client itself; leave it out")
    layers = weights.layers
    columns = 4
    lines = -(-(len(layers) + 1) // columns)
    height = 1.2 + 0.35 * min(len(layers), _TICKS)
    figure = _new_figure(15, height + 2.4 * lines + 1.2)
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[height, 2.4 * lines])[:, 0]
    figure.suptitle(f"Weights that {client} gives to the layers of other clients")

    maps = above.subplots(1, len(thirds), sharey=True, squeeze=False)[0]
    means = [client_alpha[p][:, :, other_clients].mean(axis=0) for p in thirds]
    largest = max(float(np.max(means)), 1e-12)
    for axes, rows, mean, name in zip(maps, thirds, means, _period_names(thirds), strict=True):
        picture = axes.imshow(mean, aspect="auto", cmap="viridis", vmin=0, vmax=largest, interpolation="nearest")
        axes.set_title(f"{name} period: {_round_range_text(weights.rounds[rows])}", fontsize=10)
        _label_axis(axes, "x", [weights.clients[j] for j in other_clients], limit=_TICKS // len(thirds))
        _write_cell_values(axes, mean, largest)
    _label_axis(maps[0], "y", layers)
    above.colorbar(picture, ax=list(maps), label="mean weight α", pad=0.01, fraction=0.03)

    panels = below.subplots(lines, columns, sharex=True, squeeze=False).ravel()
    colours = _distinct_colours(len(coloured))
    uncoloured = [j for j in other_clients if j not in coloured]
    top = float(client_alpha[:, :, other_clients].max()) * 1.05 or 1.0
    for k, name in enumerate(layers):
        axes = panels[k]
        if uncoloured:
            low, high = client_alpha[:, k, uncoloured].min(axis=1), client_alpha[:, k, uncoloured].max(axis=1)
            axes.fill_between(weights.rounds, low, high, color=_REST, alpha=0.5, linewidth=0)
            label = f"{len(uncoloured)} more (mean, range)"
            axes.plot(
                weights.rounds, client_alpha[:, k, uncoloured].mean(axis=1), color="grey", linewidth=1, label=label
            )
        for j, colour in zip(coloured, colours, strict=True):
            axes.plot(weights.rounds, client_alpha[:, k, j], color=colour, linewidth=1.3, label=weights.clients[j])
        axes.set_title(name, fontsize=10)
        axes.set_ylim(0, top)
    axes = panels[len(layers)]
    for k, colour in zip(range(len(layers)), _layer_colours(len(layers)), strict=True):
        axes.plot(weights.rounds, client_alpha[:, k, target], color=colour, linewidth=1.3, label=layers[k])
    axes.set_title("its own weight, by layer", fontsize=10)
    axes.set_ylim(0, 1.05)
    if len(layers) <= 12:
        axes.legend(fontsize=7, ncols=2)
    for spare in panels[len(layers) + 1 :]:
        spare.set_visible(False)
    for k, axes in enumerate(panels[: len(layers) + 1]):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if k + columns > len(layers):  # nothing below it
            axes.set_xlabel("round")
            axes.tick_params(labelbottom=True)
        if k % columns == 0:
            axes.set_ylabel("weight α")
    handles, names = panels[0].get_legend_handles_labels()
    below.legend(handles, names, loc="outside lower center", ncols=min(len(names), 6), fontsize=8, frameon=False)
    return figure


def draw_layer_heat_map(aggregation: AggregationWeights, layer: str, round: int = -1) -> "Figure":
    """The weights of one layer, client by client (Fig. 6): row i is what client i makes its layer of.

    Colours follow the square root of the weight, since the diagonal is often many times the rest.

    Args:
        aggregation: the run.
        layer: name of the layer.
        round: after which round, by its number; −1 for the last.

    Raises:
        UserError: an unknown layer or round.
    """
    from matplotlib.colors import PowerNorm

    round_position, layer_position = aggregation.round_index(round), aggregation.layer_index(layer)
    weights = aggregation.alpha[round_position, :, layer_position, :]
    clients = len(aggregation.clients)
    side = 2.2 + 0.5 * min(clients, 14)
    figure = _new_figure(side + 1.4, side)
    axes = figure.add_subplot()
    largest = max(float(weights.max()), 1e-12)
    norm = PowerNorm(0.5, vmin=0, vmax=largest)
    picture = axes.imshow(weights, cmap="viridis", norm=norm, interpolation="nearest")
    _label_axis(axes, "x", aggregation.clients)
    _label_axis(axes, "y", aggregation.clients)
    _write_cell_values(axes, weights, largest, norm)
    axes.set_xlabel("client whose layer is weighed")
    axes.set_ylabel("client that gets the mixture")
    axes.set_title(f"Weights of layer {layer} after round {aggregation.rounds[round_position]}", fontsize=11)
    figure.colorbar(picture, label="weight α", shrink=0.85)
    return figure


def draw_layer_weights(aggregation: AggregationWeights, client: str, round: int = -1) -> "Figure":
    """The weights of all layers of one client (Fig. 7): its own at the bottom of each bar, the others' on top.

    Args:
        aggregation: the run.
        client: the target client.
        round: after which round, by its number; −1 for the last.

    Raises:
        UserError: an unknown client or round.
    """
    target, round_position = aggregation.client_index(client), aggregation.round_index(round)
    weights = aggregation.alpha[round_position, target]  # (L, N)
    other_clients = [j for j in range(len(aggregation.clients)) if j != target]
    mean = weights.mean(axis=0)
    coloured = sorted(sorted(other_clients, key=lambda j: (-mean[j], j))[:_SHOWN])
    parts = [(f"{client} (own)", weights[:, target], _OWN)]
    for j, colour in zip(coloured, _distinct_colours(len(coloured)), strict=True):
        parts.append((aggregation.clients[j], weights[:, j], colour))
    if uncoloured := [j for j in other_clients if j not in coloured]:
        parts.append((f"{len(uncoloured)} more clients", weights[:, uncoloured].sum(axis=1), _REST))
    layers = np.arange(len(aggregation.layers))
    figure = _new_figure(4.2 + 0.75 * min(len(layers), 24), 4.8)
    axes = figure.add_subplot()
    bottom = np.zeros(len(layers), np.float32)
    for label, values, colour in parts:
        axes.bar(layers, values, bottom=bottom, color=colour, label=label, width=0.75)
        bottom = bottom + values
    if len(layers) <= 24:
        for x, value in enumerate(weights[:, target].tolist()):
            inside = value > 0.08  # room for the number
            axes.text(x, value / 2 if inside else value + 0.01, f"{value:.2f}", ha="center", fontsize=8,
                      va="center" if inside else "bottom", color="white" if inside else _OWN,
                      bbox=None if inside else {"facecolor": "white", "alpha": 0.7, "pad": 0.6, "linewidth": 0})  # fmt: skip
    _label_axis(axes, "x", aggregation.layers, max_letters=9 * len(layers))
    axes.set_xlim(-0.6, len(layers) - 0.4)
    axes.set_xlabel("layer")
    axes.set_ylabel("weight α")
    axes.set_ylim(0, max(1.0, float(bottom.max())) * 1.02)
    axes.set_title(f"What {client} makes its layers of, after round {aggregation.rounds[round_position]}", fontsize=11)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=8, frameon=False)
    return figure


def save_aggregation_figure(figure: "Figure", path: str | Path) -> None:
    """Writes a figure of this module; the same run gives the same bytes.

    Args:
        figure: as made by this module.
        path: the picture; its ending, .png or .svg, is the format.

    Raises:
        UserError: another ending, or a place that cannot be written.
    """
    save_figure(figure, path)


def _new_figure(width: float, height: float) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def round_positions_by_third(aggregation: AggregationWeights) -> list[NDArray[np.int64]]:
    """Positions of the rounds of each third; fewer than three if there are fewer rounds. Round 0 has seen no training."""
    trained = np.flatnonzero(aggregation.rounds > 0)
    rounds = trained if len(trained) else np.arange(len(aggregation.rounds))
    return [part.astype(np.int64) for part in np.array_split(rounds, 3) if len(part)]


def _period_names(periods: Sequence[object]) -> tuple[str, ...]:
    return {1: ("only",), 2: (_PERIODS[0], _PERIODS[-1])}.get(len(periods), _PERIODS)


def _round_range_text(rounds: NDArray[np.int64]) -> str:
    return f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"


def _label_axis(axes: "Axes", axis: str, names: Sequence[str], limit: int = _TICKS, max_letters: int = 40) -> None:
    """Names along an axis, at most `limit` of them, upright where together they are longer than `max_letters` letters."""
    positions = range(0, len(names), -(-len(names) // limit))
    labels = [_shorten_name(names[i]) for i in positions]
    if axis == "y":
        axes.set_yticks(positions, labels, fontsize=8)
    else:
        upright = len(labels) * (max(map(len, labels)) + 1) > max_letters
        axes.set_xticks(positions, labels, fontsize=8, rotation=90 if upright else 0)


def _shorten_name(name: str, most: int = 16) -> str:
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-most // 2 + 1 :]}"


def _write_cell_values(axes: "Axes", values: NDArray[Any], largest: float, norm: Any = None) -> None:
    """The number of each cell, where there is room."""
    if values.size > _CELLS or values.shape[1] > 14:
        return
    for (row, column), value in np.ndenumerate(values):
        shade = value / largest if norm is None else float(norm(value))
        text = f"{value:.2f}".removeprefix("0") if value >= 0.005 else "0"
        axes.text(column, row, text, ha="center", va="center", fontsize=7, color="black" if shade > 0.6 else "white")


def _distinct_colours(number: int) -> list[Any]:
    """Colours that can be told apart, by people who do not see red and green, too, as far as there are enough."""
    from matplotlib import colormaps

    safe = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#661100", "#8C6BB1"]
    return safe[:number] if number <= len(safe) else list(colormaps["turbo"](np.linspace(0.05, 0.95, number)))


def _layer_colours(number: int) -> list[Any]:
    from matplotlib import colormaps

    return list(colormaps["plasma"](np.linspace(0, 0.88, number)))


def _name_hint(name: str, names: Sequence[str]) -> str:
    """`nearest`, but of many names the first and the last only."""
    if len(names) <= 20:
        return did_you_mean(name, names)
    return f"choose one of its {len(names)}, {names[0]} to {names[-1]}"
