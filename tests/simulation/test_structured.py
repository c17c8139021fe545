"""Inputs of several tensors on their way through a federation: engines, files, splits, graphs and yardsticks."""

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import FLHAGHN, FedAvg, Local
from polyfed.comparison.references.reference_models import fit_client_references, train_pooled_reference
from polyfed.core.examples.examples import Examples, PartwiseTransform
from polyfed.core.examples.pytree import input_spec_of, named_leaves
from polyfed.core.seeds import torch_generator
from polyfed.data import IID, Shift, Split, make_clients
from polyfed.data.formats.lazy_images import build_image_keys_and_decoder, open_image_files_lazily
from polyfed.data.partitioning.resplit import resplit_clients
from polyfed.data.partitioning.validation_split import hold_out_missing_validation_sets
from polyfed.data.pooled_dataset import PooledDataset
from polyfed.graphs import extract
from polyfed.models.structure import compute_batch_representation, find_head_modules
from polyfed.report.export.folder import export_model
from polyfed.simulation.checks.fingerprints import data_fingerprint
from polyfed.simulation.engines.ray.object_store import store_clients, unflatten_tensor
from polyfed.testing import assert_runs_equal

OPTIONS = {"lr": 0.05, "batch_size": 8}


class ImageAndAge(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.age, self.last = (
            nn.Conv2d(1, 4, 3),
            nn.GroupNorm(2, 4),
            nn.Linear(1, 4),
            nn.Linear(8, 3),
        )

    def forward(self, image, age):
        seen = torch.relu(self.norm(self.conv(image))).mean((2, 3))
        return {"logits": self.last(torch.cat([seen, torch.relu(self.age(age))], 1)), "seen": seen}


def inputs(number, seed=0):
    generator = torch_generator(seed)
    y = torch.arange(number) % 3
    age = torch.randn(number, 1, generator=generator) + y[:, None]
    return {"image": torch.randn(number, 1, 6, 6, generator=generator), "age": age}, y


def clients(number=2):
    return [pf.Client(f"c{k}", ImageAndAge, inputs(20 + k, k), inputs(9, 10 + k)) for k in range(number)]


def run_with(engine, **more):
    return pf.federate(clients(), FedAvg(**OPTIONS), rounds=2, seed=3, engine=engine, **more)


def test_cohorts_leave_them_one_by_one():
    assert_runs_equal(run_with("inprocess", workers=0), run_with("cohort", workers=0))


@pytest.mark.slow
def test_a_pool_gives_the_same():
    assert_runs_equal(run_with("inprocess", workers=0), run_with("pool", workers=2))


def test_a_fingerprint_counts_every_part():
    one, other, third = clients(1), clients(1), clients(1)
    other[0].train.x["age"][3] += 1
    assert data_fingerprint(one) == data_fingerprint(clients(1)) != data_fingerprint(other)
    object.__setattr__(third[0].train, "x", (third[0].train.x["age"], third[0].train.x["image"]))
    assert data_fingerprint(third) != data_fingerprint(one)


def test_object_stores_keep_each_part_once():
    train = clients(1)[0].train
    shared = [pf.Client(name, None, train.select(torch.arange(k + 2)), train) for k, name in enumerate("ab")]
    put = []
    placed = store_clients(shared, lambda kept: put.append(kept) or kept)
    assert placed[0].sets[0][0].parts[0] is placed[1].sets[1][0].parts[0]
    back = placed[1].restore(unflatten_tensor)
    for (name, mine), (_, theirs) in zip(named_leaves(back.train.x), named_leaves(train.x), strict=True):
        assert torch.equal(mine, theirs), name
    assert len(back.train) == 3


def test_a_run_predicts_from_such_inputs():
    run = run_with("inprocess", workers=0)
    x, _ = inputs(4, 5)
    outputs = run.predict("c1", {"age": x["age"].numpy(), "image": x["image"]})
    torch.testing.assert_close(outputs, run.model("c1")(**x)["logits"].detach())
    with pytest.raises(
        pf.UserError, match=r"client 'c1' have the parts \['0', '1'\], the client's have the parts \['age', 'image'\]"
    ):
        run.predict("c1", (x["age"], x["image"]))


def test_a_run_is_kept_and_exported(tmp_path):
    run = run_with("inprocess", workers=0, out=tmp_path / "run")
    folder = export_model(run, "c1", tmp_path / "c1")
    x, _ = inputs(4, 5)
    script = torch.jit.load(str(folder / "network.ts"))
    torch.testing.assert_close(script(x["age"], x["image"]), run.predict("c1", x))


@pytest.mark.parametrize("leaky", ["both", "one part"])
def test_test_examples_among_training_examples_are_found(recwarn, leaky):
    (x, y), (other, _) = inputs(20), inputs(20, 1)
    test = {**x, "age": other["age"]} if leaky == "one part" else {name: part.clone() for name, part in x.items()}
    federation = [pf.Client("c0", ImageAndAge, (x, y), (test, y))]
    pf.federate(federation, Local(**OPTIONS), rounds=1, workers=0)
    told = [str(w.message) for w in recwarn if "also training examples" in str(w.message)]
    assert len(told) == (leaky == "both")


def test_splits_keep_groups_and_parts_together():
    x, y = inputs(40)
    x["patient"] = torch.arange(40).view(40, 1) // 4
    store = Examples(x, y, columns={"patient": [i // 4 for i in range(40)]}, group="patient")
    (client,) = hold_out_missing_validation_sets([pf.Client("c", None, store, inputs_of(9))], seed=0)
    sets = [
        set(data.batch(torch.arange(len(data)))[0]["patient"].flatten().tolist()) for data in (client.train, client.val)
    ]
    assert not sets[0] & sets[1]
    assert len(sets[0]) + len(sets[1]) == 10
    given = pf.Client("c", None, store.select(torch.arange(28)), store.select(torch.arange(28, 40)))
    ((divided,),) = resplit_clients([given], splits=2, seed=1)[1:]
    assert divided.train.x["image"] is store.x["image"]
    assert not set(divided.train.column("patient")) & set(divided.test.column("patient"))


def inputs_of(number):
    x, y = inputs(number, 4)
    return Examples({**x, "patient": torch.zeros(number, 1, dtype=torch.int64)}, y)


def test_a_pool_of_a_source_of_your_own():
    x, y = inputs(60)
    pool = PooledDataset(Examples(x, y), None, ("a", "b", "c"))
    divided, _ = make_clients(pool, Split(clients=3), IID(), seed=0)
    assert sum(len(one.train) + len(one.test) for one in divided) == 60
    assert pool.input_shape == ()
    assert (
        pool.fingerprint != PooledDataset(Examples({**x, "age": x["age"] + 1}, y), None, pool.class_names).fingerprint
    )
    with pytest.raises(pf.UserError, match=r"a shift transforms uint8 images .* these inputs are age: torch.float32"):
        make_clients(pool, Split(clients=3), IID(), seed=0, shifts=[Shift(rotation=90)])
    with pytest.raises(pf.UserError, match="inputs of several parts need a network of your own"):
        pf.models.build("mlp", pool.input_shape, 3)


def test_one_part_may_be_images_that_stay_encoded(tmp_path):
    from PIL import Image

    (x, y), files = inputs(20), []
    pixels = (x["image"][:, 0] * 40 + 128).clamp(0, 255).to(torch.uint8)
    for k, picture in enumerate(pixels):
        files.append(tmp_path / f"{k}.png")
        Image.fromarray(picture.numpy()).save(files[-1])
    keys, decoded = build_image_keys_and_decoder(open_image_files_lazily(files), "L", 6, len(files))
    lazy = Examples({"image": keys, "age": x["age"]}, y, transform=PartwiseTransform({"image": decoded}))
    eager = Examples(
        {"image": pixels[:, None], "age": x["age"]}, y, transform=PartwiseTransform({"image": decoded.normalise})
    )
    runs = []
    for data in (lazy, eager):
        one = pf.Client("c", ImageAndAge, data.select(torch.arange(14)), data.select(torch.arange(14, 20)))
        runs.append(pf.federate([one], FedAvg(**OPTIONS), rounds=1, workers=0))
    assert_runs_equal(*runs)
    new = {"image": pixels[:3], "age": x["age"][:3]}
    assert torch.equal(*(run.predict("c", new) for run in runs))


def test_a_network_of_two_inputs_has_a_graph_a_head_and_a_representation():
    x, _ = inputs(5)
    net = ImageAndAge()
    graph = extract(net, x)
    joined = next(i for i, node in enumerate(graph.nodes) if node.type == "concat")
    into = {graph.nodes[a].name for a, b in graph.edges if b == joined}
    assert (into, graph.coverage) == ({"norm", "age"}, 1.0)
    assert find_head_modules(net, x) == ("last",)
    assert compute_batch_representation(net, x).shape == (5, 8)
    with pytest.raises(pf.UserError, match=r"ImageAndAge.forward cannot be called with the inputs age \(missing"):
        extract(net, {"age": x["age"]})
    unseen = FLHAGHN(**OPTIONS, head="factored")
    run = pf.federate(clients(), unseen, rounds=1, workers=0)
    start = run.warmstart(ImageAndAge, inputs(20, 6), test=inputs(9, 7))
    assert start.coverage == 1.0


@pytest.mark.slow
def test_yardsticks_of_a_comparison():
    some = clients()
    assert [one.name for one in fit_client_references(some)[0]] == ["majority"]  # tables alone have more
    found = train_pooled_reference(some, Local(**OPTIONS), rounds=1, seed=0)
    assert {name: tuple(out.shape) for name, out in found.outputs.items()} == {"c0": (9, 3), "c1": (9, 3)}
    assert input_spec_of(some[0].train.x) == input_spec_of(some[1].train.x)
