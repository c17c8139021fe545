"""What sites say of themselves is compared before round 1, as a simulation compares its clients."""

from functools import partial

import pytest
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedDF, FedGH, FedHeNN, FedMD, FedProto, FedTGP, LGFedAvg
from polyfed.core.errors import UserError
from polyfed.deploy.claims import check_widths
from polyfed.deploy.flower import from_record
from polyfed.testing import small_clients

from .conftest import MemoryGrid


def network(layers):
    return nn.Sequential(nn.Flatten(), *(nn.Linear(*sizes) for sizes in layers))


@pytest.mark.parametrize("method", [FedProto, FedTGP, FedGH, LGFedAvg])
def test_representations_of_other_widths_are_refused_before_round_1(nodes, run, method):
    one, two, *_ = small_clients()
    features = one.train.one_input[0].numel()

    def clients(width):
        for client, hidden in ((one, 4), (two, width)):
            layers = (features, hidden), (hidden, 3)
            yield pf.Client(client.id, partial(network, layers), client.train, client.test)

    sites = f"{one.id},{two.id}"
    with pytest.raises(UserError, match=rf"the last layer of '{two.id}' takes 5 numbers, that of '{one.id}' 4"):
        run(grid=MemoryGrid(nodes(clients(5))), method=method(lr=0.05), sites=sites)
    assert run(grid=MemoryGrid(nodes(clients(4))), method=method(lr=0.05), sites=sites, rounds=1).last.round == 1


@pytest.mark.parametrize("width", [None, True, 0, "4", [4]])
def test_a_site_that_tells_no_width_is_refused(width):
    with pytest.raises(UserError, match="site 'b' does not tell how many numbers"):
        check_widths({"a": {"width": 4}, "b": {"width": width}}, "fedproto")


OF_PUBLIC = {
    "shape": ("torch.zeros(8, 5)", r"\['float32', \[5\]\]"),
    "type": ("torch.zeros(8, 6, dtype=torch.float64)", r"\['float64', \[6\]\]"),
    "parts": ("{'a': torch.zeros(8, 6)}", r"\{'x/a': \['float32', \[6\]\]\}"),
}


@pytest.fixture
def server_file(tmp_path):
    """Writes the server's file, whose public() gives these examples; its path."""

    def write(examples):
        text = "import torch\nfrom polyfed.testing import SmallNet as model\n"
        text += f"def architectures(): return [model]\ndef public(): return {examples}\n"
        (tmp_path / "public.py").write_text(text)
        return str(tmp_path / "public.py")

    return write


@pytest.mark.parametrize("case", OF_PUBLIC)
@pytest.mark.parametrize("method", [FedMD(lr=0.05), FedHeNN(lr=0.05, rad_size=4), FedDF(lr=0.05)])
def test_public_examples_of_another_form_are_refused_before_round_1(tmp_path, nodes, run, server_file, method, case):
    examples, form = OF_PUBLIC[case]
    grid = MemoryGrid(nodes(small_clients(), disclose="num_examples"))
    with pytest.raises(
        UserError, match=f"'client-0' does not take part: the server's public examples are .*{form}"
    ) as told:
        run(grid=grid, method=method, file=server_file(examples))
    assert not (tmp_path / "run").exists()
    if case == "shape":
        assert "6" not in str(told.value), "the site's own form"


@pytest.mark.parametrize("method", [FedMD(lr=0.05), FedHeNN(lr=0.05, rad_size=4), FedDF(lr=0.05)])
def test_public_examples_of_the_form_of_the_inputs_are_taken_and_a_run_goes_on(nodes, run, server_file, method):
    grid, file = MemoryGrid(nodes(small_clients())), server_file("torch.zeros(8, 6)")
    assert run(grid=grid, method=method, file=file, rounds=1).last.round == 1
    grid.seen.clear()
    assert run(grid=grid, method=method, file=file, resume=True).last.round == 1
    heads = [from_record(record).head for _, kind, record in grid.seen if kind == "query"]
    assert len(heads) == 3
    assert not any("public" in head for head in heads), "its checkpoint has the public examples"


def test_a_server_without_public_examples_is_refused_before_anything_is_sent(nodes, run, server_file):
    grid = MemoryGrid(nodes(small_clients()))
    with pytest.raises(UserError, match="gives no examples, and fedmd needs some"):
        run(grid=grid, method=FedMD(lr=0.05), file=server_file("torch.zeros(0, 6)"))
    assert not grid.seen
