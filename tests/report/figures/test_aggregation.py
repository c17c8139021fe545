"""The weights of a pFedLA run: what is read is what was written, what is drawn is what was read."""

import numpy as np
import pytest
from matplotlib.image import AxesImage

import polyfed as pf
from polyfed.algorithms import HeurPFedLA, PFedLA
from polyfed.core.errors import UserError
from polyfed.report.figures.aggregation import (
    AggregationWeights,
    draw_layer_heat_map,
    draw_layer_weights,
    draw_weight_evolution,
    read_aggregation_weights,
    save_aggregation_figure,
)
from polyfed.testing import small_clients

CLIENTS, LAYERS = ["a", "b", "c"], ["body.0", "head"]


def write(folder, number, rows, alpha, clients=CLIENTS, layers=LAYERS, **more):
    (folder / "analysis").mkdir(exist_ok=True, parents=True)
    arrays = {"alpha": np.asarray(alpha, np.float32), "rows": rows, "layers": layers, "clients": clients, **more}
    np.savez_compressed(folder / f"analysis/round-{number:06d}.npz", **arrays)


def rows_of(*weights):
    """alpha (rows, layers, clients) with the same weights in both layers, of the second layer in reverse order."""
    return [[row, row[::-1]] for row in weights]


@pytest.fixture
def folder(tmp_path):
    """Three clients; b takes part in round 1 only, c in round 2 only."""
    start = [0.25, 0.25, 0.5]
    write(tmp_path, 0, CLIENTS, rows_of(start, start, start))
    write(tmp_path, 1, ["b", "a"], rows_of([0.0, 0.75, 0.25], [1.0, 0.0, 0.0]), zero_rows=np.float64(0))
    write(tmp_path, 2, ["c"], rows_of([0.0, 0.125, 0.875]))
    return tmp_path


def made(rounds=7, clients=6, layers=4, seed=0):
    alpha = np.random.default_rng(seed).random((rounds, clients, layers, clients)).astype(np.float32) ** 3
    alpha += np.eye(clients, dtype=np.float32)[None, :, None, :]
    alpha /= alpha.sum(axis=3, keepdims=True)
    names = tuple(f"client-{i:03d}" for i in range(clients)), tuple(f"body.{i}" for i in range(layers))
    return AggregationWeights(np.arange(rounds), *names, alpha)


def images(figure):
    return [image.get_array() for axes in figure.axes for image in axes.get_images() if isinstance(image, AxesImage)]


def lines(axes):
    return {line.get_label(): line.get_ydata() for line in axes.get_lines()}


def test_read_carries_on_the_weights_of_clients_that_were_not_in_a_round(folder):
    found = read_aggregation_weights(folder)
    assert (found.clients, found.layers, found.rounds.tolist()) == (tuple(CLIENTS), tuple(LAYERS), [0, 1, 2])
    assert (found.alpha.shape, found.alpha.dtype) == ((3, 3, 2, 3), np.float32)
    start = [0.25, 0.25, 0.5]
    assert found.alpha[0, :, 0].tolist() == [start, start, start]
    assert found.alpha[1, :, 0].tolist() == [[1.0, 0.0, 0.0], [0.0, 0.75, 0.25], start]
    assert found.alpha[2, :, 0].tolist() == [[1.0, 0.0, 0.0], [0.0, 0.75, 0.25], [0.0, 0.125, 0.875]]
    assert (found.alpha[:, :, 1] == found.alpha[:, :, 0, ::-1]).all()


@pytest.mark.slow
@pytest.mark.parametrize("method", [PFedLA(lr=0.05, hn_lr=1.0), HeurPFedLA(k=1, lr=0.05)])
def test_a_run_is_read_and_drawn(tmp_path, method):
    pf.federate(small_clients(), method, rounds=3, clients_per_round=2, workers=0, out=tmp_path / "run")
    found = read_aggregation_weights(tmp_path / "run")
    assert found.rounds.tolist() == [0, 1, 2, 3]
    assert found.clients == ("client-0", "client-1", "client-2")
    assert len(found.layers) == 3  # two linear layers and BatchNorm
    assert found.alpha.sum(axis=3) == pytest.approx(1, abs=1e-5)
    assert (found.alpha[0] != found.alpha[-1]).any()
    for number, figure in enumerate(
        (
            draw_weight_evolution(found, "client-1"),
            draw_layer_heat_map(found, found.layers[0]),
            draw_layer_weights(found, "client-2"),
        )
    ):
        save_aggregation_figure(figure, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").read_bytes().startswith(b"\x89PNG")


def test_a_directory_without_weights(tmp_path):
    with pytest.raises(UserError, match=r"has no aggregation weights .*give the run directory of a pfedla"):
        read_aggregation_weights(tmp_path)
    pf.federate(small_clients(), "local", rounds=1, workers=0, out=tmp_path / "local")
    with pytest.raises(UserError, match="has no aggregation weights"):
        read_aggregation_weights(tmp_path / "local")


def test_a_file_that_is_damaged_is_named(folder):
    file = folder / "analysis/round-000001.npz"
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"no archive", whole[:80] + bytes(40) + whole[120:]):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"round-000001\.npz is damaged \(.*\); restore it, or run again"):
            read_aggregation_weights(folder)


def test_files_that_do_not_fit(folder):
    file = folder / "analysis/round-000001.npz"
    for arrays, sentence in (
        ({"alpha": np.zeros((2, 2, 3))}, r"round-000001\.npz has no 'rows'; it is not of a pfedla"),
        ({"alpha": np.zeros((1, 2, 3)), "rows": ["a", "b"], "layers": LAYERS, "clients": CLIENTS}, "do not fit: alpha"),
        ({"alpha": np.zeros((1, 2, 3)), "rows": "a", "layers": LAYERS, "clients": CLIENTS}, "do not fit: alpha"),
        ({"alpha": np.zeros((1, 2, 3)), "rows": ["d"], "layers": LAYERS, "clients": CLIENTS}, "rows of unknown"),
        ({"alpha": np.full((1, 2, 3), np.nan), "rows": ["a"], "layers": LAYERS, "clients": CLIENTS}, "are no numbers"),
        ({"alpha": np.zeros((1, 1, 3)), "rows": ["a"], "layers": ["x"], "clients": CLIENTS}, "of different runs"),
    ):
        np.savez(file, **arrays)
        with pytest.raises(UserError, match=sentence):
            read_aggregation_weights(folder)
    file.unlink()
    (folder / "analysis/round-000000.npz").unlink()
    with pytest.raises(UserError, match="no weights of client 'a': the file of round 0, which has all, is missing"):
        read_aggregation_weights(folder)


def test_clients_layers_and_rounds_are_found_by_name(folder):
    found = read_aggregation_weights(folder)
    assert (
        found.client_index("b"),
        found.layer_index("head"),
        found.round_index(1),
        found.round_index(-1),
        found.round_index(-3),
    ) == (1, 1, 1, 2, 0)
    with pytest.raises(UserError, match="no client 'd'; Choices: a, b, c"):
        draw_weight_evolution(found, "d")
    with pytest.raises(UserError, match="no layer 'heads'; did you mean head"):
        draw_layer_heat_map(found, "heads")
    for number in (7, -4):
        with pytest.raises(UserError, match=f"no weights of round {number}; it has rounds 0 to 2"):
            draw_layer_weights(found, "a", round=number)
    with pytest.raises(UserError, match="choose one of its 30, client-000 to client-029"):
        made(clients=30).client_index("x")
    with pytest.raises(UserError, match="others names 'a', the target client itself"):
        draw_weight_evolution(found, "a", highlighted_clients=["b", "a"])
    with pytest.raises(UserError, match="is the only client of the run"):
        draw_weight_evolution(made(clients=1), "client-000")


def test_the_heat_map_is_the_weights_of_the_layer():
    found = made()
    (shown,) = images(draw_layer_heat_map(found, "body.2"))
    assert (shown == found.alpha[-1, :, 2]).all()
    (shown,) = images(draw_layer_heat_map(found, "body.2", round=3))
    assert (shown == found.alpha[3, :, 2]).all()


def test_layer_weights_are_stacked_to_one_with_the_clients_own_first():
    found = made(clients=12)
    (axes,) = draw_layer_weights(found, "client-003", round=2).axes
    own, *rest = axes.containers
    assert [bar.get_height() for bar in own] == pytest.approx(found.alpha[2, 3, :, 3].tolist())
    assert own.get_label() == "client-003 (own)"
    assert len(rest) == 9  # eight clients, and all the others
    assert rest[-1].get_label() == "3 more clients"
    totals = [sum(container[k].get_height() for container in axes.containers) for k in range(4)]
    assert totals == pytest.approx([1] * 4)
    named = {container.get_label(): container for container in rest[:-1]}
    for name, bars in named.items():
        assert bars[0].get_height() == pytest.approx(float(found.alpha[2, 3, 0, found.client_index(name)]), abs=1e-6)


def test_weight_evolution_shows_the_means_of_the_periods_and_the_weights_of_all_rounds():
    found = made(rounds=10, clients=5, layers=3)
    figure = draw_weight_evolution(found, "client-001")
    others = [0, 2, 3, 4]
    for shown, rounds in zip(images(figure), (slice(1, 4), slice(4, 7), slice(7, 10)), strict=True):
        assert np.allclose(shown, found.alpha[rounds, 1][:, :, others].mean(axis=0))
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:3] == ["prior period: rounds 1 to 3", "middle period: rounds 4 to 6", "last period: rounds 7 to 9"]
    panels = {axes.get_title(): lines(axes) for axes in figure.axes}
    for k, layer in enumerate(found.layers):
        assert {name: values.tolist() for name, values in panels[layer].items()} == {
            f"client-{j:03d}": found.alpha[:, 1, k, j].tolist() for j in others
        }
    assert (panels["its own weight, by layer"]["body.2"] == found.alpha[:, 1, 2, 1]).all()


def test_weight_evolution_draws_the_rest_together():
    found = made(clients=20)
    panels = {
        axes.get_title(): lines(axes)
        for axes in draw_weight_evolution(found, "client-000", highlighted_clients=["client-007"]).axes
    }
    rest = [j for j in range(1, 20) if j != 7]
    assert np.allclose(panels["body.1"]["18 more (mean, range)"], found.alpha[:, 0, 1, rest].mean(axis=1))
    assert (panels["body.1"]["client-007"] == found.alpha[:, 0, 1, 7]).all()
    largest = {axes.get_title(): lines(axes) for axes in draw_weight_evolution(found, "client-000").axes}["body.0"]
    assert len(largest) == 9
    last = found.alpha[5:, 0, :, 1:].mean(axis=(0, 1))
    assert {name for name in largest if "more" not in name} == {f"client-{j + 1:03d}" for j in np.argsort(-last)[:8]}


@pytest.mark.parametrize(("rounds", "names"), [(1, ["only"]), (2, ["only"]), (3, ["prior", "last"])])
def test_few_rounds_have_fewer_periods(rounds, names):
    figure = draw_weight_evolution(made(rounds=rounds), "client-000")
    titles = [axes.get_title() for axes in figure.axes]
    assert [title.split()[0] for title in titles if " period: round" in title] == names


def test_500_clients_have_few_labels():
    found = made(rounds=3, clients=500, layers=2)
    axes = draw_layer_heat_map(found, "body.0").axes[0]
    assert 20 <= len(axes.get_xticklabels()) <= 40
    assert len(axes.texts) == 0
    above = draw_weight_evolution(found, "client-499").axes[0]
    assert 10 <= len(above.get_xticklabels()) <= 20


@pytest.mark.slow
@pytest.mark.parametrize("ending", [pytest.param("png", marks=pytest.mark.slow), "svg"])
def test_the_same_run_gives_the_same_file(folder, tmp_path, ending):
    for draw in (
        lambda: draw_weight_evolution(read_aggregation_weights(folder), "a"),
        lambda: draw_layer_heat_map(read_aggregation_weights(folder), "head"),
    ):
        for name in ("one", "two"):
            save_aggregation_figure(draw(), tmp_path / f"{name}.{ending}")
        assert (tmp_path / f"one.{ending}").read_bytes() == (tmp_path / f"two.{ending}").read_bytes()


def test_a_picture_that_cannot_be_written(folder):
    figure = draw_layer_weights(read_aggregation_weights(folder), "a")
    with pytest.raises(UserError, match=r"must end in \.png or \.svg, got 'x\.pdf'"):
        save_aggregation_figure(figure, "x.pdf")
    with pytest.raises(UserError, match="cannot write the picture"):
        save_aggregation_figure(figure, folder / "no/such/x.png")
