"""On a GPU: every method, task and engine trains, resumes and is saved as on a CPU, up to rounding.

python -m pytest -q tests/test_gpu.py            # skipped without CUDA; POLYFED_TEST_DEVICE names another device
"""

import math
import os
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.algorithms import REGISTRY
from polyfed.core.io.trusted_code import restore_trusted_names_afterwards, trust_code
from polyfed.data.sources.blobs import Blobs
from polyfed.data.sources.tagged_sentences import TAGS, TaggedSentences
from polyfed.models import ModelSpec
from polyfed.testing import example_of, small_clients

DEVICE = os.environ.get("POLYFED_TEST_DEVICE", "cuda")
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

DRAWN_ON_DEVICE = {"fedpnas", "ca_fedpnas", "feddsnas", "ca_feddsnas"}  # their searches draw operations
TOLERANCE = 0.05


@pytest.fixture(autouse=True)
def _exact_products():
    """Convolutions of float32 round as on a CPU: by default cuDNN may use TF32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "allow_tf32", False)
        yield


@pytest.fixture(autouse=True)
def _own_networks_are_trusted():
    with restore_trusted_names_afterwards(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trust_code("polyfed.testing:SmallNet")
        trust_code("tests.test_gpu:plain")
        yield


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def clients_without_dropout(name):
    """A GPU draws dropout otherwise than a CPU."""
    return [replace(c, model=c.model and plain) for c in example_of(name).clients()]


def train(clients, algorithm, device, rounds=2, **settings):
    settings = {"engine": "inprocess", "workers": 0, "quiet": True, **settings}
    return pf.federate(clients, algorithm, rounds=rounds, seed=3, device=device, **settings)


def test_clients_compute_on_the_device():
    seen = []

    class Watched(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)

        def forward(self, x):
            seen.append((x.device.type, self.weight.device.type))
            return super().forward(x)

    clients = [pf.Client(c.id, Watched, c.train, c.test) for c in small_clients(2)]
    run = train(clients, pf.algorithms.FedAvg(lr=0.05), DEVICE, cross_site=True)
    run.predict("client-0", torch.zeros(3, 6))
    assert (DEVICE, DEVICE) in seen
    assert all(one == other for one, other in seen)
    assert seen[-1] == (DEVICE, DEVICE)


def scores_of(run, at=-1):
    """Training loss and test loss of each client."""
    return [[row.get("train_loss", 0.0), row["loss"]] for row in run.history[at]["clients"].values()]


def assert_close(run, other, tolerance=TOLERANCE):
    for ours, theirs in zip(scores_of(run), scores_of(other), strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("name", list(REGISTRY))
def test_every_method_trains_as_on_a_cpu(name):
    example = example_of(name)
    on_device, on_cpu = (
        train(clients_without_dropout(name), example.build(), device, public=example.public())
        for device in (DEVICE, "cpu")
    )
    for key in ("bytes_up", "bytes_down"):
        assert on_device.history[0][key] == pytest.approx(on_cpu.history[0][key], rel=0.02)
    assert all(math.isfinite(number) for row in scores_of(on_device) for number in row)
    if name not in DRAWN_ON_DEVICE:
        assert_close(on_device, on_cpu)


@pytest.mark.parametrize("name", list(REGISTRY))
def test_every_method_resumes_where_it_was_on_the_gpu_and_on_a_cpu(name, tmp_path):
    example = example_of(name)

    class StopAfterTwo(pf.Callback):
        def on_round(self, record):
            return record["round"] < 2

    whole = train(clients_without_dropout(name), example.build(), DEVICE, 3, public=example.public())
    for k, device in enumerate((DEVICE, "cpu")):
        out = tmp_path / str(k)
        train(
            clients_without_dropout(name),
            example.build(),
            DEVICE,
            3,
            public=example.public(),
            out=out,
            callbacks=[StopAfterTwo()],
        )
        resumed = pf.resume(
            out, clients=clients_without_dropout(name), public=example.public(), device=device, quiet=True
        )
        assert len(resumed.history) == 3
        if name not in DRAWN_ON_DEVICE:
            assert_close(resumed, whole)


def images(number, seed, shape=(1, 28, 28), classes=10):
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(number) % classes
    return torch.rand(number, *shape, generator=draw) + y.view(-1, *(1 for _ in shape)) / classes, y


SPECS = {
    "mlp": ModelSpec("mlp", {}, (1, 28, 28), 10),
    "cnn_small": ModelSpec("cnn_small", {}, (1, 28, 28), 10),
    "cnn_582k": ModelSpec("cnn_582k", {}, (1, 28, 28), 10),
    "resnet18": ModelSpec("resnet18", {}, (3, 32, 32), 10),
    "vit": ModelSpec("vit", {}, (3, 32, 32), 10),
    "flha_arch1": ModelSpec("flha_arch1", {}, (3, 32, 32), 10),
    "cnn_fedpnas": ModelSpec("cnn_fedpnas", {}, (3, 32, 32), 10),
}


@pytest.mark.parametrize("method", ["fedavg", "flha_ghn", "fedhenn"])
@pytest.mark.parametrize("name", list(SPECS))
def test_networks_of_the_zoo_train(name, method):
    spec = SPECS[name]
    clients = [
        pf.Client(f"site-{k}", spec, images(32, k, spec.input_shape), images(16, k + 9, spec.input_shape))
        for k in range(2)
    ]
    more, public = {}, None
    if method == "fedhenn":
        more, public = {"rad_size": 16, "rad_batch": 8}, images(32, 99, spec.input_shape)[0]
    run = train(clients, REGISTRY[method](lr=0.01, batch_size=16, local_epochs=1, **more), DEVICE, public=public)
    assert all(math.isfinite(number) for row in scores_of(run) for number in row)


def test_a_networks_logits_are_those_of_a_cpu():
    spec = SPECS["resnet18"]
    clients = [pf.Client("a", spec, images(16, 1, (3, 32, 32)), images(16, 2, (3, 32, 32)))]
    runs = [train(clients, pf.algorithms.FedAvg(lr=1e-8), device, 1) for device in (DEVICE, "cpu")]
    assert_close(*runs, tolerance=1e-3)


def survival_clients():
    draw = torch.Generator().manual_seed(0)
    clients = []
    for k in range(2):
        x = torch.randn(48, 5, generator=draw)
        time = torch.empty(48).exponential_(1.0, generator=draw) * torch.exp(-x[:, 0]) + 0.01
        y = torch.stack([time, (torch.arange(48) % 3 > 0).float()], 1)
        clients.append(pf.Client(f"s{k}", lambda: nn.Linear(5, 1), (x[:32], y[:32]), (x[32:], y[32:]), task="survival"))
    return clients


def regression_clients(task, outputs):
    draw = torch.Generator().manual_seed(0)
    clients = []
    for k in range(2):
        x = torch.randn(48, 5, generator=draw)
        y = x[:, :outputs] if task == "regression" else (x[:, :outputs] > 0).float()
        model = lambda: nn.Linear(5, outputs)  # noqa: E731
        clients.append(pf.Client(f"s{k}", model, (x[:32], y[:32]), (x[32:], y[32:]), task=task))
    return clients


def segmentation_clients():
    pool = Blobs(images=(8, 8, 8, 8), image_size=16).load()
    x, y = pool.train.batch(torch.arange(len(pool.train)))
    spec = ModelSpec("unet", {"width": 2, "depth": 1}, (1, 16, 16), 2)
    rows = [range(8 * k, 8 * k + 8) for k in range(2)]
    return [
        pf.Client(f"s{k}", spec, (x[own[:6]], y[own[:6]]), (x[own[6:]], y[own[6:]]), task="segmentation")
        for k, own in enumerate(map(list, rows))
    ]


def token_clients():
    pool = TaggedSentences(sites=2, sentences=24).load()
    clients = []
    for k in range(2):
        rows = torch.from_numpy((pool.columns["site"] == f"site-{k}").nonzero()[0])
        spec = ModelSpec("lstm_tagger", {"vocabulary": 128, "embedding": 12, "hidden": 12}, pool.input_shape, 5)
        train_rows, test_rows = pool.train.select(rows[:12]), pool.train.select(rows[12:])
        clients.append(pf.Client(f"s{k}", spec, train_rows, test_rows, task=pf.tasks.Tokens(tags=TAGS)))
    return clients


TASKS = {
    "survival": survival_clients,
    "regression": lambda: regression_clients("regression", 2),
    "multilabel": lambda: regression_clients("multilabel", 3),
    "segmentation": segmentation_clients,
    "tokens": token_clients,
}


@pytest.mark.parametrize("method", ["fedavg", "fedavg_ft", "pfedla", "ditto", "local"])
@pytest.mark.parametrize("task", list(TASKS))
def test_every_task_trains_as_on_a_cpu(task, method):
    runs = [
        train(TASKS[task](), REGISTRY[method](lr=0.05, batch_size=8, local_epochs=1), device)
        for device in (DEVICE, "cpu")
    ]
    assert_close(*runs)
    for ours, theirs in zip(*(run.table() for run in runs), strict=True):
        numbers = {key: value for key, value in ours.items() if isinstance(value, float) and key != "seconds"}
        assert numbers == pytest.approx({key: theirs[key] for key in numbers}, rel=0.2, abs=0.2, nan_ok=True)


@pytest.mark.parametrize("engine", ["cohort", "pool", "auto"])
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "fedrep"])
def test_engines_give_the_same_result(engine, name):
    clients = [pf.Client(c.id, plain, c.train, c.test) for c in small_clients(4)]
    algorithm, workers = REGISTRY[name](lr=0.05, batch_size=8), 2 if engine == "pool" else 0
    runs = [
        train(clients, algorithm, DEVICE, engine=chosen, workers=number)
        for chosen, number in ((engine, workers), ("inprocess", 0))
    ]
    assert_close(*runs, tolerance=1e-3)


def test_bf16_trains_nearly_as_float32():
    spec = SPECS["cnn_582k"]
    clients = [pf.Client("a", spec, images(64, 1), images(32, 2))]
    runs = [train(clients, pf.algorithms.FedAvg(lr=0.01, precision=p), DEVICE) for p in ("bf16", "fp32")]
    assert_close(*runs, tolerance=0.1)


def test_dropout_is_drawn_from_the_seed():
    def dropout():
        return nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 3))

    clients = [pf.Client(c.id, dropout, c.train, c.test) for c in small_clients(2)]
    first, again = (train(clients, pf.algorithms.FedAvg(lr=0.05), DEVICE) for _ in range(2))
    assert_close(first, again, tolerance=1e-5)


def test_a_comparison_answers_and_its_folds_and_matrix_are_there(tmp_path):
    found = pf.compare(
        small_clients(3), ["fedavg", "local"], rounds=2, seeds=2, tune="none", device=DEVICE, cross_site=True,
        out=tmp_path / "c", quiet=True,
    )  # fmt: skip
    assert found.verdicts
    found.report()


def test_a_saved_model_serves_on_a_cpu(tmp_path):
    run = train(small_clients(2), pf.algorithms.FedAvg(lr=0.05), DEVICE, out=tmp_path / "r")
    client = small_clients(2)[0]
    model = run.model("client-0")
    assert next(model.parameters()).device.type == "cpu"
    x, _ = client.test.batch(torch.arange(len(client.test)))
    assert torch.isfinite(model(x)).all()
    assert len(run.predict("client-0", x)) == len(x)


@pytest.mark.skipif(DEVICE != "cuda", reason="counts the memory of a GPU")
def test_memory_does_not_grow_with_rounds_or_clients():
    spec = SPECS["cnn_582k"]

    def peak(number, rounds):
        clients = [pf.Client(f"s{k}", spec, images(64, k), images(16, k)) for k in range(number)]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train(clients, pf.algorithms.FedAvg(lr=0.01, batch_size=16, local_epochs=1), DEVICE, rounds)
        return torch.cuda.max_memory_allocated() - before

    peak(2, 1)
    network, examples = 582_026 * 4, 80 * 28 * 28 * 4
    assert peak(2, 6) <= peak(2, 2) + network
    assert peak(16, 2) <= peak(4, 2) + 12 * (examples + network)


def test_networks_and_data_may_be_made_on_the_gpu():
    def network():
        return nn.DataParallel(nn.Linear(6, 3, device=DEVICE)) if DEVICE == "cuda" else nn.Linear(6, 3)

    for device in (DEVICE, "cpu"):
        clients = []
        for client in small_clients(2):
            x, y = client.train.batch(torch.arange(len(client.train)))
            clients.append(pf.Client(client.id, network, (x.to(DEVICE), y.to(DEVICE)), client.test))
        runs = [train(clients, REGISTRY[name](lr=0.05), device) for name in ("fedavg", "pfedla")]
        again = train(clients, pf.algorithms.FedAvg(lr=0.05), device)
        assert_close(runs[0], again, 1e-4)


def test_a_pool_on_the_cpu_follows_a_run_on_the_gpu():
    clients = [replace(c, model=plain) for c in small_clients(3)]
    train(clients, pf.algorithms.FedAvg(lr=0.05), DEVICE)
    pooled = train(clients, pf.algorithms.FedAvg(lr=0.05), "cpu", engine="pool", workers=2)
    assert_close(pooled, train(clients, pf.algorithms.FedAvg(lr=0.05), "cpu"), 1e-6)


@pytest.mark.parametrize("name", list(REGISTRY))
def test_global_random_state_of_the_gpu_stays(name):
    if DEVICE != "cuda":
        pytest.skip("of a GPU")
    torch.cuda.manual_seed(11)
    before = torch.cuda.get_rng_state()
    example = example_of(name)
    train(example.clients(), example.build(), DEVICE, 1, public=example.public())
    assert torch.equal(before, torch.cuda.get_rng_state())
