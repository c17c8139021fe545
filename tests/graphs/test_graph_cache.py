"""Graphs that took long to extract are kept on disk."""

import pytest
import torch
from torch import nn

from polyfed.core.seeds import temporary_rng_seed
from polyfed.graphs import extract, graph_cache
from polyfed.models import build

TOKENS = torch.ones(2, 5, dtype=torch.int64)


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """The kinds with which a graph was extracted, however fast, one entry a time."""
    made = []

    def counted(model, x, kinds):
        made.append(kinds)
        return extract(model, x, kinds)

    monkeypatch.setattr(graph_cache, "extract", counted)
    monkeypatch.setattr(graph_cache, "_SLOW_SECONDS", 0)
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    return made


def net(**options):
    with temporary_rng_seed(0):
        return build("lstm", (5,), 3, vocabulary=9, **options)


def test_a_graph_is_extracted_once_for_a_machine(calls, tmp_path):
    first = graph_cache.extract_with_disk_cache(net(), TOKENS)
    again = graph_cache.extract_with_disk_cache(net(), TOKENS)
    assert first == again == extract(net(), TOKENS)
    assert [node.type.start for node in again.nodes] == [node.type.start for node in first.nodes]
    assert calls == ["all"]
    graph_cache.extract_with_disk_cache(net(), TOKENS, "paper")
    graph_cache.extract_with_disk_cache(net(num_layers=2), TOKENS)
    graph_cache.extract_with_disk_cache(net(), TOKENS[:, :4])
    assert calls == ["all", "paper", "all", "all"]
    assert len(list((tmp_path / "cache/graphs").iterdir())) == 4


@pytest.mark.parametrize(
    "damage", [lambda data: data[:50], lambda data: b"", lambda data: data.replace(b"lstm", b"gru ")]
)
def test_a_damaged_file_is_written_again(calls, tmp_path, damage):
    first = graph_cache.extract_with_disk_cache(net(), TOKENS)
    (file,) = (tmp_path / "cache/graphs").iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert graph_cache.extract_with_disk_cache(net(), TOKENS) == first
    assert (len(calls), file.read_bytes()) == (2, whole)


def test_what_cannot_be_known_is_not_kept(calls, tmp_path):
    class Local(nn.Sequential):
        pass

    with_function = nn.Sequential(nn.Linear(5, 2))
    with_function.act = torch.relu
    hooked = nn.Sequential(nn.Linear(5, 2))
    hooked.register_forward_hook(lambda *_: None)
    for module in (with_function, hooked):
        graph_cache.extract_with_disk_cache(module, torch.ones(2, 5))
    assert not (tmp_path / "cache").exists()
    graph_cache.extract_with_disk_cache(Local(nn.Linear(5, 2)), torch.ones(2, 5))
    assert len(list((tmp_path / "cache/graphs").iterdir())) == 1  # its source is this file


def test_a_folder_that_cannot_be_written_is_no_error(calls, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "file"))
    assert graph_cache.extract_with_disk_cache(net(), TOKENS).coverage == 1.0


def classes_of_one_name(twice):
    class Net(nn.Sequential):
        def forward(self, x):
            return super().forward(super().forward(x) if twice else x)

    return Net


if len(__name__) > 0:

    class Twin(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x))


FIRST_TWIN = Twin
if len(__name__) > 0:

    class Twin(nn.Sequential):
        def forward(self, x):
            return self[0](x) + self[1](x)


@pytest.mark.parametrize("pair", [(classes_of_one_name(True), classes_of_one_name(False)), (FIRST_TWIN, Twin)])
def test_classes_of_one_name_and_other_code_have_graphs_of_their_own(calls, pair):
    networks = [kind(nn.Linear(5, 5), nn.Linear(5, 5)) for kind in pair]
    graphs = [graph_cache.extract_with_disk_cache(network, torch.ones(2, 5)) for network in networks]
    assert graphs == [extract(network, torch.ones(2, 5)) for network in networks]
    assert graphs[0].edges != graphs[1].edges
    assert graph_cache.extract_with_disk_cache(networks[0], torch.ones(2, 5)) == graphs[0]
    assert calls == ["all"] * 2
