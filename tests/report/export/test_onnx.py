"""Networks as ONNX, run by onnxruntime, against the networks themselves, for other numbers of examples than they were
traced on."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.cli.main import main
from polyfed.core.errors import UserError
from polyfed.core.examples.examples import Normalise
from polyfed.models import MODELS, ModelSpec
from polyfed.report.export.folder import export_model
from polyfed.report.export.standalone_module import StandaloneModule, draw_random_inputs
from polyfed.report.export.trained_model import trained_model_of_run
from tests.few_cases import few

Y = torch.arange(12) % 3


def rows_of(x, rows):
    if isinstance(x, dict):
        return {name: rows_of(part, rows) for name, part in x.items()}
    return tuple(rows_of(part, rows) for part in x) if isinstance(x, tuple) else x[rows]


def trained(model, x, transform=None):
    """A run of one client."""
    tags = getattr(model, "name", "") in ("lstm_tagger", "tiny_transformer")  # a class for each token
    y = x % 3 if tags else Y
    parts = [pf.Examples(rows_of(x, rows), y[rows], transform=transform) for rows in torch.arange(12).split(6)]
    return pf.federate(
        [pf.Client("a", model, *parts, task="tokens" if tags else "classification")], "local", rounds=1, workers=0
    )


def assert_same(folder, run, client="a"):
    """The file gives what the network gives, for one example and for seven."""
    session = onnxruntime.InferenceSession(folder / "network.onnx")
    found = trained_model_of_run(run, client)
    for number in (1, 7):
        inputs = draw_random_inputs(found, number, seed=number + 10)
        names = [one.name for one in session.get_inputs()]
        (given,) = session.run(None, dict(zip(names, (x.numpy() for x in inputs), strict=True)))
        with torch.no_grad():
            wanted = StandaloneModule(found).eval()(*inputs)
        assert given.shape == wanted.shape
        np.testing.assert_allclose(given, wanted.numpy(), rtol=1e-4, atol=1e-5)
    return [one.name for one in session.get_inputs()]


class Tokens(nn.Module):
    """Tokens and their mask, through attention; answers as the networks of Hugging Face do."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(20, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, input_ids, attention_mask):
        seen = self.layer(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        return {"logits": self.last(seen.mean(1)), "loss": None}


class Added(nn.Module):
    """Two tensors, of a tuple."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, one, two):
        return self.one(one) + self.two(two)


class Nested(nn.Module):
    """A picture, and a list in which rows of a table are."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(16 + 4, 3)

    def forward(self, image, more):
        return self.last(torch.cat([image.flatten(1), more[0]], 1))


def image(*shape):
    return torch.randint(256, (12, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def draw(*shape):
    return torch.randn(12, *shape, generator=torch.Generator().manual_seed(0))


CASES = {
    "cnn": (ModelSpec("cnn_small", {"norm": "batch"}, (1, 8, 8), 3), image(1, 8, 8), Normalise((0.3,), (0.2,)), ["images"]),
    "lstm": (ModelSpec("lstm", {"vocabulary": 20}, (9,), 3), torch.arange(108).view(12, 9) % 20, None, ["x"]),
    "tagger": (ModelSpec("lstm_tagger", {"vocabulary": 20}, (9,), 3), torch.arange(108).view(12, 9) % 20, None, ["x"]),
    "tiny transformer": (
        ModelSpec("tiny_transformer", {"vocabulary": 20}, (9,), 3), torch.arange(108).view(12, 9) % 20, None, ["x"],
    ),
    "attention": (
        Tokens, {"input_ids": torch.arange(108).view(12, 9) % 20, "attention_mask": torch.ones(12, 9, dtype=torch.int64)},
        None, ["attention_mask", "input_ids"],
    ),
    "tuple": (Added, (draw(4), draw(5)), None, ["input_0", "input_1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", few(CASES, [*CASES][::2]))
@pytest.mark.one_case
def test_a_network_gives_the_same_in_onnxruntime(tmp_path, name, monkeypatch, capfd):
    model, x, transform, names = CASES[name]
    run = trained(model, x, transform)
    folder = export_model(run, "a", tmp_path / "a", format="onnx")
    assert assert_same(folder, run) == names
    card = (folder / "README.md").read_text()
    assert "It was read back and gave the outputs of the network." in card
    monkeypatch.chdir(folder)
    exec(card.split("```python\n")[1].split("```")[0], {})  # noqa: S102, the lines that it shows
    shown = capfd.readouterr().out.splitlines()  # an array, a line or more an example, and nothing of the exporter's
    assert len(shown) >= 8
    assert shown[0].startswith("[[")
    assert shown[-1].endswith("]]")


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"lstm", "lstm_tagger", "tiny_transformer", "unet", "unet3d"}))
def test_so_does_every_built_in_network(tmp_path, name):
    run = trained(ModelSpec(name, {}, (1, 28, 28), 3), draw(1, 28, 28))
    assert assert_same(export_model(run, "a", tmp_path / "a", format="onnx"), run) == ["x"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["Bert", "DistilBert"])
def test_so_do_transformers_of_hugging_face(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "max_position_embeddings": 16, "num_labels": 3}
    own = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
    if kind == "Bert":
        own = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = getattr(transformers, f"{kind}Config")(**sizes, **own)
    run = trained(lambda: getattr(transformers, f"{kind}ForSequenceClassification")(config), CASES["attention"][1])
    assert_same(export_model(run, "a", tmp_path / "a", format="onnx"), run)


@pytest.mark.parametrize("format", ["torchscript", "onnx"])
def test_what_normalises_and_prepares_parts_is_in_the_file(tmp_path, format):
    """Constants of one part of structured inputs: pixels of pictures of any dimensions, and rows of a table."""
    table = pf.data.split_table(
        {"age": [40.0, 50, None, 70] * 3, "sex": list("fmfm") * 3, "ill": [0, 1] * 6}, "ill", None
    )
    ready = table.client_data[0].train.transform
    transform = pf.data.PartwiseTransform({"image": Normalise((0.3, 0.5), (0.2, 0.1)), "more/0": ready})
    x = {"image": image(2, 8), "more": (table.dataset.train.x,)}
    run = trained(Nested, x, transform)
    signature = trained_model_of_run(run, "a").signature
    assert signature["transform"] is None
    folder = export_model(run, "a", tmp_path / "a", format=format)
    stored = rows_of(x, torch.tensor([0, 1, 3, 4, 5]))  # of which none lacks a value
    wanted = run.predict("a", stored).numpy()
    given = [stored["image"].numpy(), stored["more"][0].double().numpy()]
    if format == "onnx":
        assert assert_same(folder, run) == ["image", "more/0"]
        session = onnxruntime.InferenceSession(folder / "network.onnx")
        (found,) = session.run(None, {"image": given[0], "more/0": given[1]})
    else:
        found = torch.jit.load(folder / "network.ts")(*map(torch.from_numpy, given)).detach().numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert "`more/0` are rows of a table, in this order: age, sex" in (folder / "README.md").read_text()


def halved(x):
    return x / 2


def test_a_function_of_a_part_is_named_and_the_others_are_in_the_file(tmp_path):
    transform = pf.data.PartwiseTransform({"image": Normalise((0.3,), (0.2,)), "more/0": halved})
    x = {"image": image(1, 4, 4), "more": (draw(4),)}
    run = trained(Nested, x, transform)
    signature = trained_model_of_run(run, "a").signature
    assert signature["transform"].startswith("more/0: ")
    assert signature["transform"].endswith(".halved")
    assert [one["normalise"] is None for one in signature["inputs"]] == [False, True]
    folder = export_model(run, "a", tmp_path / "a", format="onnx")
    session = onnxruntime.InferenceSession(folder / "network.onnx")
    given = {"image": x["image"].numpy(), "more/0": halved(x["more"][0]).numpy()}
    np.testing.assert_allclose(session.run(None, given)[0], run.predict("a", x).numpy(), rtol=1e-4, atol=1e-5)
    assert ".halved`, which is not part of this folder" in (folder / "README.md").read_text()


class Sorts(nn.Module):
    """What ONNX has no operation for."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(torch.special.bessel_j0(x))


def test_what_cannot_be_written_is_refused_in_a_sentence(tmp_path):
    run = trained(Sorts, draw(4))
    with pytest.raises(UserError, match=r"cannot be written as onnx \(.*bessel_j0.*give format='weights'"):
        export_model(run, "a", tmp_path / "a", format="onnx")
    assert not (tmp_path / "a").exists()


def test_a_table_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [f"{40 + 7 * k % 31},{'fm'[k % 2]},{'ab'[k // 12]},{1000.5 + 13 * k}" for k in range(24)]
    (tmp_path / "t.csv").write_text("age,sex,town,cost\n" + "\n".join(lines) + "\n")
    words = (
        "run --data table --data.path t.csv --data.target cost --data.site town --rounds 1 --quiet --workers 0 --out r"
    )
    assert main(words.split()) == 0
    assert main(["export", "r", "--client", "a", "--format", "onnx", "--to", "out"]) == 0
    assert main(["predict", "out", "t.csv", "--out", "found.csv"]) == 0
    capsys.readouterr()
    monkeypatch.chdir(tmp_path / "out")
    monkeypatch.syspath_prepend(str(tmp_path / "out"))
    code = (
        (tmp_path / "out/README.md").read_text().split("```python\n")[1].split("```")[0].replace("new.csv", "../t.csv")
    )
    exec(code, {})  # noqa: S102
    shown = np.array([float(line.strip("[] ")) for line in capsys.readouterr().out.strip().splitlines()])
    known = [float(line.split(",")[-1]) for line in (tmp_path / "found.csv").read_text().splitlines()[1:]]
    np.testing.assert_allclose(shown, known, rtol=1e-4)
