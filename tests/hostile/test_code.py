"""No file opens the door through which a name becomes code."""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

import polyfed as pf
from polyfed.cli.main import main
from polyfed.core.io.trusted_code import (
    add_trusted_names,
    is_code_trusted,
    restore_trusted_names_afterwards,
    trust_code,
    trusted_names,
)
from polyfed.core.nn.module_cache import forget_cached_networks
from polyfed.simulation.storage.directory import read_config
from polyfed.simulation.storage.integrity import hash_settings_that_affect_results
from tests.few_cases import few

SOURCE = Path(pf.__file__).parent
SMALL = ["--data.clients", "2", "--rounds", "1", "--workers", "0", "--quiet"]
ARGUMENTS = ["--algorithm", "flha_ghn", "--data.unseen", "1", *SMALL]


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    out = tmp_path_factory.mktemp("honest") / "run"
    assert main(["run", *ARGUMENTS, "--out", str(out)]) == 0
    return out


@pytest.fixture
def sent(honest, tmp_path, monkeypatch):
    """A run directory that somebody sent: its network is a command."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(honest, "run")
    config = read_config("run")
    config["model"] = {"name": "subprocess:getoutput", "cmd": f"touch {tmp_path}/pwned"}
    bound(Path("run"), config)
    return Path("run")


def bound(folder, config):
    """Writes a configuration with the hash that goes with it: who makes a directory can make that too."""
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(
        json.dumps({**manifest, "config_sha256": hash_settings_that_affect_results(config)})
    )


ATTACKED = {
    "report": ["report", "run"],
    "resume": ["resume", "run"],
    "compare": ["compare", "run", "--seeds", "0", "--quiet"],
    "compare the file": ["compare", "run/config.yaml", "--seeds", "0", "--quiet"],
    "run again": ["run", "run", "--quiet", "--out", "again"],
    "warmstart": ["warmstart", "run"],
    "warmstart with another network": ["warmstart", "run", "--model.depth", "3"],
    "data": ["data", "run"],
    "data with another word": ["data", "run", "--data.clients", "3"],
}


@pytest.mark.parametrize("words", few(list(ATTACKED.values()), [*ATTACKED.values()][::3]), ids=ATTACKED)
def test_a_directory_that_names_a_command_runs_none(sent, words, capsys):
    status = main(words)
    told = capsys.readouterr()
    assert not Path("pwned").exists()
    if words[0] != "report":  # which shows what needs no network
        assert status == 2, told.err
        # A checkpoint names its configuration too, which is compared first.
        other = "another configuration than run/config.yaml|" if words[0] == "warmstart" else ""
        sentence = rf"{other}asks to import 'subprocess:getoutput' .*--trust-code"
        assert re.search(sentence, " ".join(told.err.split()))


@pytest.mark.slow
def test_the_same_of_one_network_among_several_of_a_teacher_and_of_a_comparison(sent, tmp_path, capsys):
    config = read_config(sent)
    evil = config["model"]
    texts = {
        "several": {**config, "model": [{"name": "mlp"}, evil]},
        "teacher": {**config, "model": "mlp", "algorithm": {"name": "fedavg_kd", "teacher": evil}},
        "baseline": {**config, "model": "mlp", "baselines": [{"name": "fedavg_kd", "teacher": evil}]},
    }
    for name, content in texts.items():
        Path(f"{name}.yaml").write_text(yaml.safe_dump(content))
        small = [*SMALL, "--seeds", "0", "--tune", "none", "--no-references"]
        for command in (["run", f"{name}.yaml", "--quiet", "--out", name], ["compare", f"{name}.yaml", *small]):
            # A comparison leaves the one method out and says so.
            assert main(command) == (0 if command[0] == "compare" and name != "several" else 2)
            assert "--trust-code" in "".join(capsys.readouterr())
            assert not Path("pwned").exists(), command
    folder = Path("comparison")
    assert main(["compare", "--algorithms", "local", *small, "--out", str(folder)]) == 0
    content = yaml.safe_load((folder / "comparison.yaml").read_text())
    content["experiment"]["config"]["model"] = evil
    (folder / "comparison.yaml").write_text(yaml.safe_dump(content))
    for part in folder.glob("*/seed-*"):
        shutil.rmtree(part)
    assert main(["compare", str(folder), "--quiet"]) == 2
    (folder / "comparison.json").unlink()
    assert main(["resume", str(folder), "--quiet"]) == 2
    assert not Path("pwned").exists()


def test_report_shows_the_scores_nevertheless(sent, capsys):
    assert main(["report", "run"]) == 0
    page = Path("run/report.html").read_text()
    assert "asks to import" in page
    assert "flha_ghn" in capsys.readouterr().out


def test_trust_code_opens_the_door_for_one_command(sent, capsys):
    assert main(["run", "run", "--out", "x", "--trust-code"]) == 2  # getoutput gives no network, but it ran
    assert Path("pwned").exists()
    Path("pwned").unlink()
    assert main(["run", "run", "--out", "x"]) == 2
    assert not Path("pwned").exists()
    assert trusted_names() == ()


def test_what_the_user_types_is_allowed_and_only_that(sent, capsys):
    plain = [*SMALL, "--out", "typed"]
    nets = "from torch import nn\nNet = lambda num_classes: nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
    Path("typed_nets.py").write_text(nets)
    assert main(["run", "--algorithm", "local", "--model", "typed_nets:Net", *plain]) == 0
    capsys.readouterr()
    # The directory names it now: going on needs the word of the user again. (Built networks are kept for a while.)
    forget_cached_networks()
    assert main(["resume", "typed", "--quiet"]) == 2
    assert "--trust-code" in capsys.readouterr().err
    assert main(["resume", "typed", "--quiet", "--trust-code"]) == 0
    # A word that allows one name allows no other.
    assert (
        main(
            ["run", "run", "--algorithm.teacher", "typed_nets:Net", "--algorithm", "fedavg_kd", "--out", "x", "--quiet"]
        )
        == 2
    )
    assert not Path("pwned").exists()


def test_a_cluster_that_a_directory_names_is_not_joined(sent, capsys):
    config = read_config(sent)
    config |= {"model": {"name": "mlp"}, "engine": "ray", "workers": 1, "ray_address": "203.0.113.7:6379"}
    bound(sent, config)
    for words in (["resume", "run"], ["run", "run", "--out", "x"], ["compare", "run", "--seeds", "0"]):
        assert main([*words, "--quiet"]) == 2
        assert "join the Ray cluster at '203.0.113.7:6379'" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(pf.UserError, match="join the Ray cluster"):
        pf.resume("run")


def test_workers_inherit_what_the_process_allows_and_nothing_from_nothing():
    with restore_trusted_names_afterwards():
        add_trusted_names(())
        assert trusted_names() == ()
        trust_code("a:b")
        add_trusted_names(trusted_names())
        assert (is_code_trusted("a:b"), is_code_trusted("a:c")) == (True, False)
    assert trusted_names() == ()


# -- who imports by name ------------------------------------------------------------------------------------------------

ALLOWED = {
    ("simulation/storage/page_file.py", "import_module"): "a constant: the room above, which writes pages",
    (
        "comparison/references/fit_references.py",
        "import_module",
    ): "names of scikit-learn's modules, written in this file",
    (
        "core/tasks/task_registry.py",
        "import_module",
    ): "a constant: the room of polyfed's own tasks, which imports this file",
    ("core/io/trusted_code.py", "import_module"): "the door",
    ("simulation/results/display/frames.py", "import_module"): "a constant",
    ("core/io/trusted_code.py", "spec_from_file_location"): "the door",
    ("core/io/trusted_code.py", "exec_module"): "the door",
    ("deploy/flower/superlink.py", "import_module"): "a constant",
    ("deploy/flower/private_api.py", "import_module"): "names of Flower, from a table of its own",
    ("__init__.py", "import_module"): "polyfed's own names, from a table and from its own folder",
    ("__init__.py", "literal_eval"): "a list of names in polyfed's own source",
    ("cli/static_registry.py", "import_module"): "names in polyfed's own source, of the standard library",
    ("cli/static_registry.py", "literal_eval"): "polyfed's own source; literals only",
    ("data/formats/images.py", "import_module"): "one constant",
    ("report/export/formats.py", "import_module"): "constants: packages of an extra",
    ("report/export/mlflow_models.py", "import_module"): "constants: mlflow and parts of it",
    ("simulation/monitoring/trackers.py", "import_module"): "constants",
}
BY_NAME = {
    "import_module", "__import__", "spec_from_file_location", "exec_module", "load_module", "run_path", "run_module", "exec",
    "eval", "compile", "literal_eval", "unsafe_load", "full_load", "get_class", "resolve_name", "find_class",
}  # fmt: skip


def uses(file):
    """Calls that make code of names or of bytes, by what is called."""
    found, text = set(), file.read_text(encoding="utf-8")
    if not any(f"{name}(" in text for name in (*BY_NAME, "load", "loads", "load_all")):
        return found
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called not in BY_NAME and called not in ("load", "loads", "load_all"):
            continue
        owner = ast.unparse(of) if of is not None else ""
        words = {word.arg: word.value for word in node.keywords}
        if called == "eval" and of is not None:
            continue  # Module.eval()
        if called == "compile" and owner in ("re", "torch"):
            continue
        if called in BY_NAME:
            found.add(called)
        elif called in ("load", "loads") and owner.rpartition(".")[2] in (
            "pickle",
            "cloudpickle",
            "dill",
            "joblib",
            "marshal",
        ):
            found.add(f"{owner}.{called}")
        elif owner == "torch" and called == "load":
            safe = words.get("weights_only")
            if not (isinstance(safe, ast.Constant) and safe.value is True):
                found.add("torch.load")
        elif called == "load" and owner in ("np", "numpy"):
            safe = words.get("allow_pickle")
            if not (isinstance(safe, ast.Constant) and safe.value is False):
                found.add("numpy.load")
        elif (
            owner == "yaml" and called in ("load", "load_all") and "Safe" not in ast.unparse(words.get("Loader", node))
        ):
            found.add("yaml.load")
    return found


def test_every_place_that_makes_code_of_a_name_is_listed():
    there = {(str(file.relative_to(SOURCE)), use) for file in SOURCE.rglob("*.py") for use in uses(file)}
    assert there == set(ALLOWED), (
        "a new place goes through polyfed.core.io.trusted_code, or is listed here with its reason"
    )


def test_the_list_would_find_a_new_one(tmp_path):
    lines = ["importlib.import_module(n)", "__import__(n)", "exec(s)", "eval(s)", "pickle.load(f)", "pickle.loads(b)",
             "torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f)", "np.load(f, allow_pickle=True)",
             "yaml.load(s, Loader=yaml.Loader)", "importlib.util.spec_from_file_location(n, f)"]  # fmt: skip
    for line in lines:
        (tmp_path / "x.py").write_text(line)
        assert uses(tmp_path / "x.py"), line
    for line in ["model.eval()", "torch.load(f, weights_only=True)", "re.compile(s)", "np.load(f, allow_pickle=False)"]:
        (tmp_path / "x.py").write_text(line)
        assert not uses(tmp_path / "x.py"), line


def test_the_constants_are_constants():
    for (name, use), why in ALLOWED.items():
        if "constant" in why:
            tree = ast.parse((SOURCE / name).read_text(encoding="utf-8"))
            calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith(use)]
            assert calls
            assert all(isinstance(call.args[0], ast.Constant) for call in calls)


@pytest.mark.parametrize("key", few(["baselines", "algorithm", "data", "model", "metrics"], ["algorithm", "model"]))
def test_no_value_of_a_configuration_is_taken_for_a_class(key, tmp_path, monkeypatch, capsys):
    """jsonargparse can import what `class_path` names; no option has a type for which it does."""
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("open('pwned', 'w')\nclass C: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    evil = {"class_path": "evil.C", "init_args": {}}
    mapped = {"name": evil}, {"name": "mlp", "hidden": evil}, {"name": "fedavg_kd", "teacher": evil}
    for value in (evil, [evil], *mapped):
        Path("c.yaml").write_text(yaml.safe_dump({key: value}))
        assert main(["data", "c.yaml"]) == 2, value
        assert not Path("pwned").exists()
        capsys.readouterr()
