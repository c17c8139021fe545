"""What sites say of themselves is compared before round 1, as a simulation compares its clients."""

from functools import partial

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FedDF, FedGH, FedHeNN, FedMD, FedPNAS, FedProto, FedTGP, HeteroFL, LGFedAvg
from polyfed.core.errors import UserError
from polyfed.deploy.flower.engine import envelope_from_record
from polyfed.deploy.protocol.handshake import (
    check_same_input_specs,
    check_same_representation_width,
    check_width_family,
)
from polyfed.testing import small_clients
from tests.few_cases import few

from ..conftest import MemoryGrid


def network(layers):
    return nn.Sequential(nn.Flatten(), *(nn.Linear(*sizes) for sizes in layers))


@pytest.mark.parametrize("method", few([FedProto, FedTGP, FedGH, LGFedAvg], [FedProto]))
def test_representations_of_other_widths_are_refused_before_round_1(nodes, run, method):
    one, two, *_ = small_clients()
    features = one.train.first_input[0].numel()

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
    with pytest.raises(UserError, match="site 'b' does not report how many numbers"):
        check_same_representation_width({"a": {"width": 4}, "b": {"width": width}}, "fedproto")


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
@pytest.mark.parametrize(
    "method", few([FedMD(lr=0.05), FedHeNN(lr=0.05, rad_size=4), FedDF(lr=0.05)], [FedDF(lr=0.05)])
)
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


@pytest.mark.thorough
@pytest.mark.parametrize("method", [FedMD(lr=0.05), FedHeNN(lr=0.05, rad_size=4), FedDF(lr=0.05)])
def test_public_examples_of_the_form_of_the_inputs_are_taken_and_a_run_goes_on(nodes, run, server_file, method):
    grid, file = MemoryGrid(nodes(small_clients())), server_file("torch.zeros(8, 6)")
    assert run(grid=grid, method=method, file=file, rounds=1).last.round == 1
    grid.seen.clear()
    assert run(grid=grid, method=method, file=file, resume=True).last.round == 1
    heads = [envelope_from_record(record).head for _, kind, record in grid.seen if kind == "query"]
    assert len(heads) == 3
    assert not any("public" in head for head in heads), "its checkpoint has the public examples"


def test_a_server_without_public_examples_is_refused_before_anything_is_sent(nodes, run, server_file):
    grid = MemoryGrid(nodes(small_clients()))
    with pytest.raises(UserError, match="gives no examples, and fedmd needs some"):
        run(grid=grid, method=FedMD(lr=0.05), file=server_file("torch.zeros(0, 6)"))
    assert not grid.seen


def test_other_numbers_of_targets_are_refused_outside_classification(nodes, run):
    def clients(other):
        for number, columns in enumerate((2, other)):
            x = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(number))
            y = x.flatten(1)[:, :columns]
            yield pf.Client(f"client-{number}", None, (x, y), (x, y), task="regression")

    method = FedPNAS(channels=4, base_cells=1, base_nodes=1, batch_size=8, operations=["skip"])
    with pytest.raises(UserError, match="needs labels of one form, but 'client-1' has 3 a row, 'client-0' 2"):
        run(grid=MemoryGrid(nodes(clients(3))), method=method, sites="client-0,client-1")


FAMILY = """
from functools import partial
from torch import nn
def network(outputs): return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(4, outputs))
def architectures(): return [partial(network, 3)]
"""


@pytest.fixture
def family(tmp_path):
    """The words of a run of two sites, whose networks have 3 outputs."""
    (tmp_path / "family.py").write_text(FAMILY)
    return {"sites": "client-0,client-1", "file": str(tmp_path / "family.py")}


def image_clients(types=(torch.float32, torch.float32), outputs=(3, 3)):
    """Two clients whose images are stored as these types, and whose networks have so many outputs."""
    for number in (0, 1):
        x, y = (torch.arange(12 * 64).view(12, 1, 8, 8) % 250).to(types[number]), torch.arange(12) % 3
        yield pf.Client(
            f"client-{number}", partial(network, ((64, 4), (4, outputs[number]))), (x, y), (x[:3].clone(), y[:3])
        )


@pytest.mark.parametrize("method", [HeteroFL(lr=1e-5), FedHeNN(lr=1e-5, rad="noise", rad_size=4)])
def test_inputs_of_another_type_are_refused_before_round_1(tmp_path, nodes, run, family, method):
    """Images of bytes and of numbers reach networks alike, but noise made like them is not the same."""
    with pytest.raises(UserError, match=r"those of 'client-1' are .*'float32'.*, those of 'client-0' .*'uint8'"):
        run(grid=MemoryGrid(nodes(image_clients((torch.uint8, torch.float32)))), method=method, **family)
    assert not (tmp_path / "run").exists()
    assert run(grid=MemoryGrid(nodes(image_clients())), method=method, rounds=1, **family).last.round == 1


def test_a_run_that_began_before_inputs_were_compared_goes_on(nodes, run, family, monkeypatch):
    grid, method = MemoryGrid(nodes(image_clients((torch.uint8, torch.float32)))), HeteroFL(lr=1e-5)
    with monkeypatch.context() as older:
        older.setattr("polyfed.deploy.server.server.check_same_input_specs", lambda told, name: None)
        assert run(grid=grid, method=method, rounds=1, **family).last.round == 1
    assert run(grid=grid, method=method, resume=True, **family).last.round == 1


@pytest.mark.parametrize("form", [None, {}, [], "float32", 4])
def test_a_site_that_tells_no_form_of_its_inputs_is_refused(form):
    with pytest.raises(UserError, match="site 'b' does not report the types and shapes of its inputs"):
        check_same_input_specs({"a": {"inputs": {"x": ["float32", [4]]}}, "b": {"inputs": form}}, "heterofl")


@pytest.mark.parametrize(("outputs", "odd"), [((3, 4), "'client-1'"), ((3, 3), r"'[0-9a-f]+ of architectures\(\)'")])
def test_other_numbers_of_outputs_are_refused_before_round_1(tmp_path, nodes, run, family, outputs, odd):
    """Those of sites, and those that the server's file lists and no site has, since the common network holds them all."""
    (tmp_path / "family.py").write_text(FAMILY.replace("network, 3)]", "network, 3), partial(network, 4)]"))
    with pytest.raises(UserError, match=f"that of {odd} has 4, that of 'client-0' 3; give all networks one output"):
        run(grid=MemoryGrid(nodes(image_clients(outputs=outputs))), method=HeteroFL(lr=1e-5), **family)
    assert not (tmp_path / "run").exists()


def test_networks_that_are_no_family_are_refused_with_the_names_of_their_sites():
    kinds = {"north": "a", "south": "b"}
    with pytest.raises(UserError, match="the networks of 'north' and 'south' do not differ in width alone"):
        check_width_family(
            {"a": partial(nn.Linear, 2, 3), "b": partial(nn.Linear, 2, 3, bias=False)}, kinds, (2,), "heterofl"
        )


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda n: nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(8, n)), (4,)),
        (lambda n: nn.Linear(4, n, dtype=torch.float64), (4,)),
    ],
)
def test_outputs_of_networks_for_tokens_and_of_double_precision_are_compared(make, inputs):
    kinds = {"north": "a", "south": "b"}
    with pytest.raises(UserError, match="that of 'south' has 4, that of 'north' 3"):
        check_width_family({"a": partial(make, 3), "b": partial(make, 4)}, kinds, inputs, "heterofl")


@pytest.mark.parametrize("inputs", [(5,), (10**12,)])
def test_networks_that_only_their_sites_can_try_are_left_to_them(inputs):
    """A site may lie about its form: the server makes no example of terabytes."""
    models = {"a": partial(nn.Linear, 4, 3), "b": partial(nn.Linear, 4, 4)}
    check_width_family(models, {"north": "a", "south": "b"}, inputs, "heterofl")
