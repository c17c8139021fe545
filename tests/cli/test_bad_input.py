"""What a user can get wrong: exit status 2, one sentence on stderr that says what to do, and nothing left on disk."""

import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.cli.main import main
from polyfed.simulation.storage.checkpoints import checkpoint as checkpoints
from polyfed.testing import small_clients

NETS = """
from torch import nn
def outputs(number): return nn.Sequential(nn.Flatten(), nn.Linear(64, number))
def broken(): return nn.Linear(3, 10)
def raises(): raise RuntimeError("no weights at hand")
def no_module(): return 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory; `load_factory` puts it on the path, so that is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.fixture
def refused(here, capsys):
    """Runs a command that must be refused and returns its sentence."""

    def refused(*arguments):
        before = sorted(here.rglob("*"))
        capsys.readouterr()
        status = main(arguments)
        out, err = capsys.readouterr()
        assert status == 2, err
        assert out == ""
        assert re.fullmatch(r"polyfed: [^\n]+\n", err), err
        assert "Traceback" not in err
        assert sorted(here.rglob("*")) == before, "something was left on disk"
        return err.removeprefix("polyfed: ").rstrip("\n")

    return refused


UNKNOWN = {
    "bogus": "unknown command 'bogus'; choices: audit, compare, completion, data, export, flower, graph, help, list, look, "
    "predict, report, reproduce, resume, run, show, version, warmstart",
    "rn": "unknown command 'rn'; did you mean run?",
    "run quickstrt": "there is no recipe or file 'quickstrt'; did you mean quickstart?",
    "data quickstrt": "there is no recipe or file 'quickstrt'; did you mean quickstart?",
    "run --algorithm fedprx": "unknown algorithm 'fedprx'; did you mean fedprox",
    "run --data digitz": "unknown data 'digitz'; did you mean digits?",
    "run --data.partition dirichlett": "unknown data.partition 'dirichlett'; did you mean dirichlet?",
    "run --model cnn_smal": "unknown model 'cnn_smal'; did you mean cnn_small",
    "run --model mlp,cnn_smal": "unknown model 'cnn_smal'; did you mean cnn_small",
    "run --baselines [fedprx]": "unknown algorithm 'fedprx'; did you mean fedprox",
    "run --algorithm.lrr 1": "unknown option --algorithm.lrr; fedavg has no 'lrr': did you mean lr?",
    "run --model.hiddn [3]": "unknown option --model.hiddn; mlp has no 'hiddn': did you mean hidden?",
    "run --algorithm.mu 1": "fedavg has no 'mu', but fedprox, moon, gpfl have: give --algorithm fedprox",
    "run --data.path x": "digits has no 'path', but fashion_mnist, ",
    "run --rund 3": "unknown option --rund; did you mean --rounds?",
    "compare --sedes 3": "unknown option --sedes; did you mean --seeds",
    "data --plt a.png": "unknown option --plt; did you mean --plot?",
    "look digits --between-site": "unknown option --between-site; did you mean --between-sites?",
    "run --nothing.like 3": "unknown option --nothing.like; the nearest are --",
    "run --model mlp,cnn_small --model.hidden [3]": "a mixture of networks takes its fields from a YAML file",
    "run --data.shifts [{rotatoin:\t3}]": "a shift has no 'rotatoin'; did you mean rotation?",
    "run north.csv south.csv --data.target ill": "one table holds the rows of all sites, got north.csv and south.csv; put",
    "list modles": "cannot list 'modles'; did you mean models?",
    "resume --quik x": "unknown option --quik",
}

WRONG_TYPE = {
    "run --rounds abc": "--rounds must be a whole number, got 'abc'",
    "run --rounds 1.5": "--rounds must be a whole number, got '1.5'",
    "run --seed x": "--seed must be a whole number, got 'x'",
    "run --clients_per_round x": "--clients-per-round must be a number, got 'x'",
    "run --workers two": "--workers must be a whole number or auto, got 'two'",
    "run --engine rayy": "--engine must be auto, inprocess, pool, cohort or ray, got 'rayy'",
    "run --algorithm.lr x": "--algorithm.lr must be a number, got 'x'",
    "run --algorithm.lr nan": "--algorithm.lr must be a number, got 'nan'",
    "run --algorithm.clip_norm x": "--algorithm.clip-norm must be a number or null, got 'x'",
    "run --algorithm.nesterov perhaps": "--algorithm.nesterov must be true or false, got 'perhaps'",
    "run --model.hidden x": "--model.hidden must be a list such as [1, 2], got 'x'",
    "run --data.partition.min_examples x": "--data.partition.min-examples must be a whole number, got 'x'",
    "run --baselines local": "--baselines must be a list such as [local, {name: fedprox, mu: 0.1}], got 'local'",
    "run --rounds": "--rounds needs a value",
    "run --algorithm": "--algorithm.name needs a value",
    "run --out": "--out needs a value",
    "run --quiet=yes": "--quiet takes no value, got '--quiet=yes'",
    "run --print_config=x": "--print-config takes no value",
    "run quickstart stray": "unexpected argument 'stray'; options begin with --",
    "run -x": "unknown option -x; --help lists those there are",
    "data --plot": "--plot needs a value",
    "resume": "takes one run directory, got none",
    "resume a b": "takes one run directory, got a and b",
}

OUT_OF_RANGE = {
    "run --algorithm.optimizer sgdd": "FedAvg: unknown optimizer 'sgdd'; did you mean sgd",
    "run --rounds 0": "rounds must be a whole number of at least 1, got 0",
    "run --rounds -3": "rounds must be a whole number of at least 1, got -3",
    "run --clients_per_round 0": "must be a fraction above 0 and at most 1.0, or a number of clients from 1, got 0",
    "run --clients_per_round 1.5": "--clients-per-round must be a fraction above 0",
    "run --clients_per_round 50": "clients_per_round=50 asks for more clients than the 4 there are",
    "run --min_replies 11": "min_replies=11 is more than the 4 clients of a round",
    "run --compress zip": "unknown compression 'zip'",
    "run --compress topk": "topk needs the share of entries that travel, got ''; for example topk:0.1",
    "run --compress-down topk:0.1": "compress_down must be 'none' or 'int8', got 'topk:0.1'",
    "run --workers -1": "workers must be 'auto' or a number of processes from 0, got -1",
    "run --engine pool --workers 0": "engine='pool' needs at least one worker",
    "run --engine ray --ray-address head": "--ray-address must be 'local', 'auto' or HOST:PORT, got 'head'",
    "run --evaluate_every 0": "--evaluate-every must be a whole number of at least 1, got 0",
    "run --device gpu": "unknown device 'gpu'; use auto, cpu,",
    "run --algorithm.lr 0": "FedAvg: lr must be positive, got 0.0",
    "run --algorithm.momentum 1": "FedAvg: momentum must be at least 0 and below 1, got 1.0",
    "run --algorithm.local_epochs 0": "FedAvg: local_epochs must be at least 1, got 0",
    "run --algorithm.batch_size -1": "FedAvg: batch_size must be at least 1, or 0 for the full batch, got -1",
    "run --algorithm fedprox --algorithm.mu -1": "FedProx: mu must be at least 0, got -1.0",
    "run --algorithm fedavg_ft --algorithm.finetune_epochs 0": "must be at least 1 (0 would be FedAvg), got 0",
    "run --algorithm local --algorithm.buffers average": "Local: buffers must be 'local'",
    "run --data.clients 0": "clients must be at least 1, got 0",
    "run --data.clients 5000": "5000 clients cannot share 1797 examples; use at most 1797",
    "run --data.clients 1700 --data.partition iid": "1593 more have at most 1 example each, too few to test on; use fewer",
    "run --data.examples_per_client 5000": "examples_per_client=5000 takes 7143 examples",
    "run --data.test_fraction 0": "clients without test examples cannot be evaluated",
    "run --data.test_fraction 1": "test_fraction must be at least 0 and below 1, got 1.0",
    "run --data.partition.alpha -1": "Dirichlet: alpha must be a positive number, got -1.0",
    "run --data.partition classes_per_client --data.partition.k 11": "k=11 classes per client is too many",
    "run --data.partition natural": "use another partition",
    "run --data.shifts [{hue:\t0.3}]": "hue=0.3 needs RGB images",
    "run --metrics auc,acuracy": "unknown metric 'acuracy'; did you mean accuracy",
    "run --metrics r2": "r2 is not a metric of a task of classification",
    "run --data digits --keep best": "keep='best' needs validation examples",
    "run --keep 4 --rounds 3": "keep must be 'last', 'best', 'loss' or a round from 1 to 3, got 4",
    "run --keep first": "--keep must be last, best or loss or a whole number, got 'first'",
    "run --data.global_test 10": "global_test=10 needs a common test set",
    "run --model lstm": "lstm takes token sequences",
    "data --plot x.pdf": "a picture must end in .png or .svg, got 'x.pdf'",
    "data --plot no/such/folder/x.png": "cannot write the picture 'no/such/folder/x.png'",
}
CHECKED_ELSEWHERE = (
    "run --algorithm.local_epochs",
    "run --algorithm.batch_size",
    "run --algorithm.momentum",
    "run --data.",
)
"""Fields of a method and of data, whose own tests have them too."""


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        pytest.param(*case, marks=pytest.mark.thorough if case[0].startswith(CHECKED_ELSEWHERE) else ())
        for case in [*UNKNOWN.items(), *WRONG_TYPE.items(), *OUT_OF_RANGE.items()]
    ],
)
def test_refused(refused, command, sentence):
    assert sentence in refused(*(word.replace("\t", " ") for word in command.split(" ")))


YAML = {
    "seed: 1\nalgoritm: fedavg": "bad.yaml, line 2: unknown key algoritm; did you mean algorithm?",
    "algorithm: {name: fedavg, lrr: 1}": "unknown key algorithm.lrr; fedavg has no 'lrr': did you mean lr?",
    "algorithm: {name: fedavg, mu: 1}": "fedavg has no 'mu', but fedprox, moon, gpfl have: give algorithm: {name: fedprox}",
    "rounds: two": "bad.yaml, line 1: rounds must be a whole number, got 'two'",
    "data: 3": "data must be a name, or a mapping with a name, got 3",
    "data: {name: digitz}": "unknown data 'digitz'; did you mean digits?",
    "model: [mlp, {hidden: [3]}]": "each entry of `model` is a name or a mapping with a name",
    "model: [mlp, {name: mlp, hiddn: [3]}]": "unknown key model.hiddn; mlp has no 'hiddn': did you mean hidden?",
    "rounds: [": "bad.yaml is not valid YAML, line 2, column 1",
    "- rounds": "bad.yaml must hold a mapping of settings, found list",
    "\xff\xfe": "bad.yaml is not valid YAML",
    "rounds: 1\nalgorithm:\n  lr: 1\n  lr: 2": "not valid YAML, line 4, column 3: the key 'lr' stands twice; leave one out",
}


@pytest.mark.parametrize(("content", "sentence"), YAML.items())
@pytest.mark.parametrize("command", ["run", "data"])
def test_bad_yaml(here, refused, command, content, sentence):
    (here / "bad.yaml").write_bytes(content.encode("latin-1"))
    assert sentence in refused(command, "bad.yaml")


def test_missing_yaml(refused, here):
    assert refused("run", "missing.yaml") == "cannot read missing.yaml: No such file or directory"
    assert "there is no recipe or file ''" in refused("run", "")
    (here / "empty").mkdir()
    (here / "empty/notes.txt").touch()
    assert "such as --data imagefolder --data.path empty" in refused("run", "empty")


@pytest.mark.parametrize("command", ["run", "data", "compare", "look"])
def test_a_file_of_data_stands_for_the_options_that_name_it(refused, here, command):
    (here / "own.csv").write_text("age,sick,site\n40,1,north\n")
    assert "give --data.site with the column" in refused(command, "own.csv", "--data.target", "sick")
    assert "'scans.NPZ' does not exist" in refused(command, "scans.NPZ")
    assert "--variant needs a recipe before it" in refused(command, "own.csv", "--variant", "a")


@pytest.fixture
def nets(here, monkeypatch):
    monkeypatch.delitem(sys.modules, "nets_bad_input", raising=False)
    (here / "nets_bad_input.py").write_text(NETS)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # else importing leaves a file


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize("number", [7, 12])
def test_a_network_with_another_number_of_outputs_than_classes(refused, number):
    sentence = refused("run", "--model", "nets_bad_input:outputs", "--model.number", str(number))
    assert f"client 'client-000': its network has {number} outputs, but the data have 10 classes" in sentence


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize(
    ("model", "sentence"),
    {
        "nets_bad_input:broken": r"its network fails on a batch of shape \(2, 1, 8, 8\)",
        "nets_bad_input:raises": "nets_bad_input:raises.* failed: RuntimeError: no weights at hand",
        "nets_bad_input:no_module": "nets_bad_input:no_module: it gave int instead of a torch.nn.Module",
        "nets_bad_input:raise": "has no 'raise'; did you mean raises",
        "no_such_module:f": "there is no module 'no_such_module'",
        "nets_bad_input:": "does not name a model factory; write it as module:factory",
        "nets_bad_input:outputs": "--model.number is missing: give it a value",
    }.items(),
)
def test_a_network_of_the_users_that_cannot_be_used(refused, model, sentence):
    assert re.search(sentence, refused("run", "--model", model))


def test_a_mixed_federation_and_a_method_for_one_architecture(refused):
    sentence = refused("run", "--model", "mlp,cnn_small", "--algorithm", "fedavg")
    assert (
        "fedavg needs one architecture, but the 10 clients have 2: 'client-001' differs from 'client-000'" in sentence
    )
    assert "Methods for different architectures: " in sentence
    assert " fd, fedavg_kd, " in sentence


def test_a_baseline_that_does_not_suit_is_found_before_the_first_round(refused):
    mixed = ["run", "--model", "mlp,cnn_small", "--algorithm", "local", "--baselines", "[fedavg]"]
    assert "fedavg needs one architecture" in refused(*mixed, "--out", "run")


def test_data_that_are_missing_or_malformed(here, refused):
    assert "'/no/such' does not exist" in refused("run", "--data", "fashion_mnist", "--data.path", "/no/such")
    (here / "folder").mkdir()
    assert "'folder' holds no training images" in refused("run", "--data", "mnist", "--data.path", "folder")
    for kind in ("images-idx3", "labels-idx1"):
        (here / f"folder/train-{kind}-ubyte.gz").write_bytes(b"no IDX file")
    assert "is not a complete IDX file" in refused("run", "--data", "mnist", "--data.path", "folder")
    (here / "no.npz").write_text("1,2")
    assert "cannot read 'no.npz' (it is not an .npz file" in refused("run", "--data", "npz", "--data.path", "no.npz")
    assert "give --data.path with an .npz file" in refused("run", "--data", "npz")
    assert "x.xlsx is a spreadsheet; save its sheet as CSV" in refused("run", "x.xlsx")
    (here / "no.parquet").write_text("1,2")
    assert "cannot be read as Parquet" in refused("run", "--data", "parquet", "--data.path", "no.parquet")
    assert "'folder' holds no pictures" in refused("run", "--data", "imagefolder", "--data.path", "folder")


def test_labels_out_of_range(here, refused):
    x = np.zeros((40, 1, 8, 8), np.uint8)
    np.savez("negative.npz", x_train=x, y_train=np.arange(40) % 4 - 1)
    sentence = refused("run", "--data", "npz", "--data.path", "negative.npz")
    assert sentence == "training labels run from -1 to 2; with 3 classes they must run from 0 to 2"
    x, y = torch.zeros(4, 3), torch.tensor([0, 1, 2, 3])
    clients = [pf.Client("a", lambda: torch.nn.Linear(3, 3), train=(x, y), test=(x + 1, y))]
    with pytest.raises(pf.UserError, match=r"client 'a': train has label 3, but the network has 3 outputs"):
        pf.federate(clients, "local", rounds=1)
    with pytest.raises(pf.UserError, match=r"client 'a': train labels must count from 0, found -1"):
        pf.Client("a", None, train=(x, y - 1), test=(x, y))


def test_an_empty_client():
    x, y = torch.zeros(4, 3), torch.tensor([0, 1, 2, 3])
    with pytest.raises(
        pf.UserError, match=r"client 'a': train has no examples; give at least one, or leave this client out"
    ):
        pf.Client("a", None, train=(x[:0], y[:0]), test=(x, y))
    with pytest.raises(pf.UserError, match=r"client 'a': test has no examples"):
        pf.Client("a", None, train=(x, y), test=(x[:0], y[:0]))
    with pytest.raises(pf.UserError, match="needs at least one client"):
        pf.federate([], "local", rounds=1)


@pytest.mark.thorough
def test_an_output_directory_that_cannot_be_used(here, refused):
    (here / "full").mkdir()
    (here / "full/file").write_text("precious")
    assert refused("run", "--out", "full").endswith("full is not empty; choose another --out, or remove it")
    assert refused("run", "--out", "full/file") == "the run directory full/file is a file; choose another --out"
    assert "full/file/below: Not a directory; choose another --out" in refused("run", "--out", "full/file/below")
    assert "cannot write to the run directory /proc/nothing" in refused("run", "--out", "/proc/nothing")
    assert "cannot write to the run directory" in refused("run", "--out", "n" * 300)
    (here / "full/config.yaml").write_text("rounds: 1\ndata: {name: digits}\n")
    assert "continue it with `polyfed resume full` or choose another --out" in refused("run", "--out", "full")
    assert (here / "full/file").read_text() == "precious"


def test_resume_of_what_is_no_run(here, refused):
    assert refused("resume", "nowhere") == "nowhere does not exist"
    (here / "folder").mkdir()
    assert refused("resume", "folder") == "folder is not a run directory: it has no config.yaml"
    config = here / "folder/config.yaml"
    config.write_text("data: {name: digits}")
    assert "the configuration lacks 'partition'" in refused("resume", "folder")
    config.write_text("rounds: [")
    assert "is not valid YAML" in refused("resume", "folder")


RUN = ["run", "--data.clients", "2", "--rounds", "2", "--out", "run", "--quiet", "--workers", "0"]


@pytest.fixture
def finished(here, capsys):
    assert main(RUN) == 0
    return here / "run"


def damage(folder, *rounds):
    for number in rounds:
        file = folder / f"checkpoint/round-{number:06d}/server.safetensors"
        file.write_bytes(file.read_bytes()[:-1])


def test_all_checkpoints_damaged_is_told_and_nothing_restarts_by_itself(finished, refused, capsys):
    metrics = (finished / "metrics.jsonl").read_bytes()
    damage(finished, 1, 2)
    sentence = refused("resume", "run")
    for number in (1, 2):
        reason = "server.safetensors does not match its checksum"
        assert f"checkpoint run/checkpoint/round-00000{number} is damaged ({reason})" in sentence
    assert "no checkpoint of the run in run is whole" in sentence
    assert "delete the folder run/checkpoint: then the run starts again from round 1" in sentence
    assert (finished / "metrics.jsonl").read_bytes() == metrics
    shutil.rmtree(finished / "checkpoint")
    assert main(["resume", "run", "--quiet"]) == 0, capsys.readouterr().err
    assert checkpoints.load_newest_checkpoint(finished / "checkpoint")[0].round == 2


def test_one_checkpoint_damaged_is_a_warning(finished, capsys):
    damage(finished, 2)
    with pytest.warns(RuntimeWarning, match=r"round-000002 is damaged .*; the one before it is used"):
        assert main(["resume", "run", "--quiet"]) == 0


def test_a_run_directory_that_was_changed(finished, refused):
    lines = (finished / "metrics.jsonl").read_text()
    (finished / "metrics.jsonl").write_text("")
    assert "run/metrics.jsonl does not hold rounds 1 to 2" in refused("resume", "run")
    (finished / "metrics.jsonl").write_text(lines)
    config = (finished / "config.yaml").read_text()
    (finished / "config.yaml").write_text(config.replace("clients: 2", "clients: 3"))
    assert "run/config.yaml was changed since the run began; put it back" in refused("resume", "run")
    (finished / "config.yaml").write_text(config.replace("lr: 0.01", "lr: -1"))
    assert "lr must be positive" in refused("resume", "run")
    (finished / "config.yaml").write_text(config)
    (finished / ".lock").unlink()
    (finished / ".lock").mkdir()
    assert "directory run: Is a directory; make it writable" in refused("resume", "run")


def test_resume_of_a_run_made_in_python(refused):
    pf.federate(small_clients(), "local", rounds=1, workers=0, out="made")
    said = refused("resume", "made")
    assert "the clients of made were made in Python; go on with it there: polyfed.resume('made'" in said


@pytest.mark.parametrize("command", ["run", "data", "compare"])
@pytest.mark.parametrize("path", ["made", "made/config.yaml"])
def test_a_file_of_a_run_that_does_not_say_its_data_is_not_run_on_the_default_data(refused, command, path):
    pf.federate(small_clients(), "local", rounds=1, workers=0, out="made")
    told = refused(command, path)
    assert told.startswith(f"{path} belongs to a run and does not say which data its clients had")
    assert "add a section `data`" in told


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--algorithm", "fedprx"],
        *(pytest.param(words, marks=pytest.mark.slow) for words in (["run", "--rounds", "0"], ["resume", "nowhere"])),
    ],
)
def test_the_process_ends_with_status_2(tmp_path, arguments):
    command = [sys.executable, "-W", "error", "-m", "polyfed", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"polyfed: [^\n]+\n", done.stderr)
    assert list(tmp_path.iterdir()) == []
