"""The weights of a pFedLA run: what is read is what was written."""

import numpy as np
import pytest

import polyfed as pf
from polyfed.algorithms import HeurPFedLA, PFedLA
from polyfed.core.errors import UserError
from polyfed.report.figures.aggregation import AggregationWeights, read_aggregation_weights, split_rounds_into_thirds
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
def test_a_run_is_read(tmp_path, method):
    pf.federate(small_clients(), method, rounds=3, clients_per_round=2, workers=0, out=tmp_path / "run")
    found = read_aggregation_weights(tmp_path / "run")
    assert found.rounds.tolist() == [0, 1, 2, 3]
    assert found.clients == ("client-0", "client-1", "client-2")
    assert len(found.layers) == 3  # two linear layers and BatchNorm
    assert found.alpha.sum(axis=3) == pytest.approx(1, abs=1e-5)
    assert (found.alpha[0] != found.alpha[-1]).any()


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
        ({"alpha": np.full((1, 2, 3), np.nan), "rows": ["a"], "layers": LAYERS, "clients": CLIENTS}, "are not numbers"),
        ({"alpha": np.zeros((1, 1, 3)), "rows": ["a"], "layers": ["x"], "clients": CLIENTS}, "of different runs"),
    ):
        np.savez(file, **arrays)
        with pytest.raises(UserError, match=sentence):
            read_aggregation_weights(folder)
    file.unlink()
    (folder / "analysis/round-000000.npz").unlink()
    with pytest.raises(UserError, match="no weights of client 'a': the file of round 0, which has all, is missing"):
        read_aggregation_weights(folder)


@pytest.mark.parametrize(
    ("rounds", "thirds"),
    [(range(7), [[1, 2], [3, 4], [5, 6]]), (range(3), [[1], [2]]), (range(2), [[1]]), ([0], [[0]])],
)
def test_few_rounds_have_fewer_periods(rounds, thirds):
    weights = AggregationWeights(np.array(rounds), ("a",), ("fc",), np.ones((len(rounds), 1, 1, 1), np.float32))
    assert [positions.tolist() for positions in split_rounds_into_thirds(weights)] == thirds
