"""What a run of FedPNAS has found: read from runs in memory and from directories, and drawn."""

import copy
import json
import re

import numpy as np
import pytest
import torch
import yaml
from matplotlib.image import imread
from matplotlib.patches import Circle, FancyArrowPatch

import polyfed as pf
from polyfed.algorithms import CAFedPNAS, FedPNAS, Local
from polyfed.core.errors import UserError
from polyfed.nas.derived import load_network
from polyfed.report.figures.architectures import draw_client_cells, read_search_result
from polyfed.report.page.panels.method_views import html_searched_cells
from polyfed.simulation.storage.paths import safe_file_name
from polyfed.testing import small_clients

NORTH = "St. Mary's/north"  # its files are called otherwise
BASE, PERSONAL = ("skip", "max_pool_3", "sep_conv_5"), ("skip", "avg_pool_3")


def description(shift=0.0):
    """Two cells by hand: a base cell with two nodes, of a network that was found, and a personal one of a supernet."""
    shares = [[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0, 0, 1], [0.25, 0.25, 0.5], [1, 0, 0]]
    ends = [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]
    base = [
        {"from": i, "to": j, "operations": [BASE[int(np.argmax(row))]], "candidates": list(BASE), "probabilities": row}
        for (i, j), row in zip(ends, shares, strict=True)
    ]
    names = list(PERSONAL)
    row = [0.375 + shift, 0.625 - shift]
    personal = [{"from": 0, "to": 1, "operations": names, "candidates": names, "probabilities": row}]
    cells = [{"stack": "base", "inputs": 2, "edges": base}, {"stack": "personal", "inputs": 1, "edges": personal}]
    return {"format": "polyfed.search 1", "plan": {}, "cells": cells}


def write(folder, told, **config):
    """A run directory with these descriptions by client."""
    (folder / "models").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"algorithm": {"name": "fedpnas"}, **config}))
    (folder / "metrics.jsonl").write_text(json.dumps({"round": 1, "clients": {client: {} for client in told}}) + "\n")
    for client, content in told.items():
        (folder / "models" / f"{safe_file_name(client)}.json").write_text(json.dumps(content))
        (folder / "models" / f"{safe_file_name(client)}.safetensors").write_bytes(b"not read")
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "run", {"south": description(), NORTH: description(0.25)})


def test_values(folder):
    found = read_search_result(folder)
    assert found.clients == (NORTH, "south")
    assert found.cell_titles == ("base cell 1", "personal cell 1")
    base, personal = found.cells_of("south")
    assert (base.stack, base.input_count, base.candidates) == ("base", 2, BASE)
    assert base.edges == ((0, 2), (1, 2), (0, 3), (1, 3), (2, 3))
    wanted = [[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0, 0, 1], [0.25, 0.25, 0.5], [1, 0, 0]]
    assert base.probabilities.dtype == np.float64
    assert np.array_equal(base.probabilities, wanted)
    assert base.chosen_operations == ("skip", "max_pool_3", "sep_conv_5", "sep_conv_5", "skip")
    assert [base.edge_label(edge) for edge in base.edges] == [
        "c(k-1) → 0", "c(k-2) → 0", "c(k-1) → 1", "c(k-2) → 1", "0 → 1"
    ]  # fmt: skip
    assert (personal.stack, personal.input_count, personal.candidates) == ("personal", 1, PERSONAL)
    assert np.array_equal(personal.probabilities, [[0.375, 0.625]])
    assert (personal.chosen_operations, personal.edge_label((0, 1))) == (("avg_pool_3",), "c(k-1) → 0")
    assert found.cells_of(NORTH)[1].chosen_operations == ("skip",)
    with pytest.raises(UserError, match="no client 'sooth'; did you mean south"):
        found.cells_of("sooth")


def test_an_operation_without_alternatives_is_certain(tmp_path):
    told = description()
    told["cells"][1]["edges"] = [{"from": 0, "to": 1, "operations": ["skip"]}]
    told["cells"][0]["edges"][0] |= {"operations": ["sep_conv_5"], "probabilities": [0, 0.5, 0.5]}
    base, personal = read_search_result(write(tmp_path / "run", {"a": told})).cells_of("a")
    assert (personal.candidates, personal.chosen_operations, personal.probabilities.tolist()) == (
        ("skip",),
        ("skip",),
        [[1.0]],
    )
    assert base.chosen_operations[0] == "sep_conv_5", "of two equally probable ones that which the network has"


def test_edges_may_choose_from_different_operations(tmp_path):
    told = description()
    told["cells"][0]["edges"][0] |= {"candidates": ["dil_conv_3", "skip"], "probabilities": [0.25, 0.75]}
    base, _ = read_search_result(write(tmp_path / "run", {"a": told})).cells_of("a")
    assert base.candidates == ("dil_conv_3", "skip", "max_pool_3", "sep_conv_5")
    assert base.probabilities[:2].tolist() == [[0.25, 0.75, 0, 0], [0, 0.125, 0.75, 0.125]]


def test_a_client_whose_model_could_not_be_made(folder):
    for ending in ("json", "safetensors"):
        (folder / "models" / f"south.{ending}").unlink()
    with pytest.raises(UserError, match=r"has no models/south.json, the cells of client 'south'"):
        read_search_result(folder)
    (folder / "config.yaml").write_text("on_error: skip")
    assert read_search_result(folder).clients == (NORTH,)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_no_run_and_runs_of_other_methods(tmp_path, folder):
    with pytest.raises(UserError, match=r"is not a run directory: it has no config.yaml"):
        read_search_result(tmp_path)
    run = pf.federate(small_clients(2), Local(local_epochs=1), rounds=1, workers=0, out=tmp_path / "local")
    with pytest.raises(
        UserError, match=r"no descriptions .* its method is 'local'. Give a finished run of fedpnas, ca_"
    ):
        read_search_result(tmp_path / "local")
    with pytest.raises(UserError, match="Local searches for no architecture; give a run of fedpnas"):
        read_search_result(run)
    (folder / "models" / "south.json").write_text('{"format": "other 2"}')
    with pytest.raises(UserError, match=r"south.json has the format 'other 2', expected 'polyfed.search 1'"):
        read_search_result(folder)
    (folder / "models" / "south.json").write_text("[]")
    with pytest.raises(UserError, match=r"south.json has the format 'list'"):
        read_search_result(folder)


def test_missing_and_damaged_files(folder):
    file = folder / "models" / "south.json"
    for content in (b"{", b"\xff\xfe\xfa"):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"south.json is damaged \(.*\); restore it, or run again"):
            read_search_result(folder)
    file.unlink()
    with pytest.raises(UserError, match=r"has no models/south.json, the cells of client 'south'; restore it"):
        read_search_result(folder)


def _set(**fields):
    return lambda told: told["cells"][1]["edges"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda told: told.pop("cells"), "it has no cells"),
        (lambda told: told.update(cells=[]), "no cells"),
        (lambda told: told.update(cells=[3]), "must be a mapping, got 3"),
        (lambda told: told["cells"][1].update(edges=[]), "a cell of 1 inputs with the edges"),
        (lambda told: told["cells"][1].update(inputs=3), "a cell of 3 inputs"),
        (_set(to=0), r"the edges \(\(0, 0\),\)"),
        (_set(probabilities=[0.5, 0.25]), "whose sum is not 1"),
        (_set(probabilities=[1.5, -0.5]), "whose sum is not 1"),
        (_set(probabilities=[float("nan"), 1]), "NaN, which is not a number"),
        (_set(probabilities=[0.5, 0.25, 0.25]), "3 probabilities of the operations"),
        (_set(candidates=["skip", "skip"]), "2 probabilities of the operations"),
        (_set(operations=["dil_conv_3"]), "the operation 'dil_conv_3' is none of the candidates"),
    ],
)
def test_files_that_describe_no_cells(folder, change, says):
    told = description()
    change(told)
    (folder / "models" / "south.json").write_text(json.dumps(told))
    with pytest.raises(UserError, match=rf"south.json (does not describe cells|is damaged) \(.*{says}"):
        read_search_result(folder)


def test_files_of_different_runs(folder):
    told = description()
    del told["cells"][1]
    (folder / "models" / "south.json").write_text(json.dumps(told))
    with pytest.raises(
        UserError, match=r"south.json has other cells than .*north.*.json: the files are of different runs"
    ):
        read_search_result(folder)


# -- the pictures -----------------------------------------------------------------------------------------------------


def assert_drawn(path):
    """A picture with something in it."""
    if path.suffix == ".png":
        assert imread(path)[..., :3].std() > 0.05
    else:
        assert path.read_text().count("<path") > 20


def test_heat_maps_of_the_page(folder):
    html = html_searched_cells(read_search_result(folder), "k")
    cells = re.findall(r'data-t="([^"]+)"', html)
    shares = [[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0, 0, 1], [0.25, 0.25, 0.5], [1, 0, 0]]
    edges = ["c(k-1) → 0", "c(k-2) → 0", "c(k-1) → 1", "c(k-2) → 1", "0 → 1"]
    base = [f"{e}, {n}: {v:.3f}" for e, row in zip(edges, shares, strict=True) for n, v in zip(BASE, row, strict=True)]
    personal = [[f"c(k-1) → 0, {n}: {v:.3f}" for n, v in zip(PERSONAL, row, strict=True)] for row in
                ([0.625, 0.375], [0.375, 0.625])]  # fmt: skip
    assert cells == [*base, *personal[0], *base, *personal[1]], "two cells of a client, then two of the other"
    assert "St. Mary&#x27;s/north" in html
    assert html.count("data:image/svg+xml;base64,") == 2


@pytest.mark.slow
def test_many_clients_and_cells_on_the_page(tmp_path):
    told = description()
    told["cells"] = told["cells"][:1] * 4 + told["cells"][1:]
    found = read_search_result(write(tmp_path / "run", {f"$a of {k}_$": copy.deepcopy(told) for k in range(40)}))
    html = html_searched_cells(found, "k")
    for name in (*(f"base cell {k}" for k in range(1, 5)), "personal cell 1"):
        assert html.count(f"{name} of $a of 0_$: probability of each operation at each edge.") == 1
    assert "The first 12 of 40 sites." in html
    assert html.count("<img ") == 12


@pytest.mark.parametrize("ending", ["png", "svg"])
@pytest.mark.one_case
def test_graphs(folder, tmp_path, ending):
    figure = draw_client_cells(read_search_result(folder), "south", tmp_path / f"cell.{ending}")
    base, personal = figure.axes
    assert [axes.get_title() for axes in (base, personal)] == ["base cell 1", "personal cell 1"]
    assert [text.get_text() for text in base.texts] == [
        "c(k-1)", "c(k-2)", "0", "1", "skip 0.50", "max_pool_3 0.75", "sep_conv_5 1.00", "sep_conv_5 0.50", "skip 1.00"
    ]  # fmt: skip
    assert [text.get_text() for text in personal.texts] == ["c(k-1)", "0", "avg_pool_3 0.62"]
    circles = [patch for patch in base.patches if isinstance(patch, Circle)]
    assert [circle.center[0] for circle in circles] == sorted(circle.center[0] for circle in circles), "left to right"
    assert sum(isinstance(patch, FancyArrowPatch) for patch in base.patches) == 5
    assert_drawn(tmp_path / f"cell.{ending}")


@pytest.mark.thorough
def test_no_label_of_a_graph_covers_another_or_leaves_the_picture(tmp_path):
    """Four nodes, all edges: as many as the authors' code has."""
    told = description()
    edge = {"operations": ["conv_7x1_1x7"], "candidates": ["skip", "conv_7x1_1x7"], "probabilities": [0.25, 0.75]}
    for cell in told["cells"]:
        n = cell["inputs"]
        cell["edges"] = [{"from": i, "to": j, **edge} for j in range(n, n + 4) for i in range(j)]
    figure = draw_client_cells(read_search_result(write(tmp_path / "run", {"a": told})), "a", tmp_path / "cell.png")
    whole = figure.bbox
    for axes, edges in zip(figure.axes, (14, 10), strict=True):
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) == edges + 4 + (2 if edges == 14 else 1)
        assert all(whole.x0 <= box.x0 and box.x1 <= whole.x1 and box.y0 >= 0 and box.y1 <= whole.y1 for box in boxes)
        assert not [(k, other) for k, box in enumerate(boxes) for other in boxes[:k] if box.overlaps(other)]


def test_pictures_that_cannot_be_drawn(folder, tmp_path):
    found = read_search_result(folder)
    with pytest.raises(UserError, match=r"must end in .png or .svg"):
        draw_client_cells(found, "south", tmp_path / "a.pdf")
    with pytest.raises(UserError, match="cannot write the picture"):
        draw_client_cells(found, "south", tmp_path / "nowhere" / "a.png")
    with pytest.raises(UserError, match="no client 'west'"):
        draw_client_cells(found, "west", tmp_path / "a.png")


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", [FedPNAS, CAFedPNAS])
def test_a_run(method, tmp_path):
    clients = []
    for k, name in enumerate(("c0", NORTH)):
        x, y = torch.randn(12, 1, 12, 12, generator=torch.Generator().manual_seed(k)), torch.arange(12) % 3
        clients.append(pf.Client(name, None, (x[:8], y[:8]), (x[8:], y[8:])))
    small = method(channels=4, base_cells=1, base_nodes=1, personal_nodes=1, lr=0.05)
    run = pf.federate(clients, small, rounds=1, workers=0, out=tmp_path / "run")
    files = {path: path.read_bytes() for path in run.out.rglob("*") if path.is_file()}
    found = read_search_result(run.out)
    assert found.clients == (NORTH, "c0")
    for client in found.clients:
        base, personal = found.cells_of(client)
        assert (base.candidates, personal.candidates) == (small.operations, small.personal_operations)
        assert (base.edges, personal.edges) == (((0, 2), (1, 2)), ((0, 1),))
        network = load_network(run.out / "models" / f"{safe_file_name(client)}.json")
        for cell, (wanted, _) in zip((base, personal), network.cells_with_samplers(), strict=True):
            assert cell.probabilities.sum(1) == pytest.approx(1)
            best = cell.probabilities.max(1)
            assert (best > 1.001 / len(cell.candidates)).all(), "the samplers have learnt something"
            taken = [
                cell.probabilities[e, cell.candidates.index(name)] for e, name in enumerate(cell.chosen_operations)
            ]
            assert taken == best.tolist()
            if method is FedPNAS:
                assert [(name,) for name in cell.chosen_operations] == list(wanted.plan.candidates)
    for own, other in zip(found.cells, read_search_result(run).cells, strict=True):
        for cell, same in zip(own, other, strict=True):
            assert (cell.edges, cell.candidates, cell.chosen_operations) == (
                same.edges,
                same.candidates,
                same.chosen_operations,
            )
            assert np.array_equal(cell.probabilities, same.probabilities)
    draw_client_cells(found, NORTH, tmp_path / "cell.svg")
    assert_drawn(tmp_path / "cell.svg")
    assert {path: path.read_bytes() for path in run.out.rglob("*") if path.is_file()} == files, "a report only reads"
