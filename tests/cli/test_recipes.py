"""Recipes: what variants and scales change, what is refused, and that those which polyfed ships are whole."""

import re
from pathlib import Path

import pytest
import yaml

from polyfed.algorithms import REGISTRY
from polyfed.cli.commands.options import configuration_parser
from polyfed.cli.commands.options.recipes import (
    SCALES,
    load_recipe_configuration,
    merge_configurations,
    read_recipe,
    shipped_recipe_files,
)
from polyfed.cli.main import main
from polyfed.core.errors import UserError
from polyfed.simulation.experiment import build_experiment, build_method_like
from polyfed.simulation.storage.directory import read_config, read_metrics
from polyfed.testing import without_durations

MINE = """
description: mine
data: {clients: 3, test_fraction: 0.3, partition: {name: classes_per_client, k: 4}}
model: mlp
algorithm: {name: fedprox, mu: 0.5, lr: 0.1}
rounds: 9
variants:
  few: {data: {name: digits}}
  many: {data: {name: digits, clients: 6}, model: {hidden: [5]}}
scales:
  paper:
  cpu: {reduced: "fewer\\n  rounds", rounds: 2}
  smoke:
    reduced: all of it
    algorithm: {name: fedavg, lr: 0.2}
    rounds: 1
    variants:
      many: {data: {clients: 2, partition: {name: iid}}, baselines: [local]}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "mine.yaml").write_text(MINE)
    return tmp_path


@pytest.fixture
def polyfed(here, capsys):
    """Runs a command and returns its status, standard output and error."""

    def polyfed(*arguments):
        capsys.readouterr()
        status = main(arguments)
        return status, *capsys.readouterr()

    return polyfed


def printed(polyfed, *arguments):
    status, out, err = polyfed("run", *arguments, "--print_config")
    assert (status, err) == (0, "")
    return yaml.safe_load(out)


def test_options_of_a_run_alone_change_the_quickstart_and_not_what_is_run(polyfed):
    config = printed(polyfed, "--rounds", "3", "--seed=2")
    assert (config["data"]["name"], config["algorithm"]["name"]) == ("heart", "fml")
    assert (config["rounds"], config["seed"]) == (3, 2)
    assert printed(polyfed, "--algorithm.lr", "0.5")["data"]["name"] == "digits"


@pytest.mark.parametrize(
    ("below", "above", "expected"),
    [
        ({"rounds": 1, "seed": 2}, {"rounds": 3}, {"rounds": 3, "seed": 2}),
        ({"data": {"a": 1, "b": 2}}, {"data": {"b": 3}}, {"data": {"a": 1, "b": 3}}),
        ({"data": {"a": 1}}, {"data": {"name": "digits"}}, {"data": {"a": 1, "name": "digits"}}),
        ({"data": {"name": "mnist", "a": 1}}, {"data": {"name": "digits"}}, {"data": {"name": "digits"}}),
        ({"data": {"name": "mnist", "a": 1}}, {"data": {"name": "mnist"}}, {"data": {"name": "mnist", "a": 1}}),
        ({"model": "mlp"}, {"model": {"hidden": [3]}}, {"model": {"name": "mlp", "hidden": [3]}}),
        ({"model": {"name": "mlp", "hidden": [3]}}, {"model": "cnn_small"}, {"model": {"name": "cnn_small"}}),
        ({"model": ["mlp", "mlp"]}, {"model": "cnn_small"}, {"model": "cnn_small"}),
        ({"baselines": ["local", "fedavg"]}, {"baselines": ["fedprox"]}, {"baselines": ["fedprox"]}),
        (
            {"data": {"name": "x", "partition": {"name": "iid", "q": 1}, "clients": 2}},
            {"data": {"partition": {"name": "shards", "k": 2}}},
            {"data": {"name": "x", "partition": {"name": "shards", "k": 2}, "clients": 2}},
        ),
    ],
)
def test_merging(below, above, expected):
    assert merge_configurations(below, above) == expected


def test_base_then_variant_then_scale_then_the_scales_variant(here):
    recipe = read_recipe("mine.yaml")
    assert (recipe.description, recipe.chosen_or_first_variant(), recipe.resolve_scale_name()) == (
        "mine",
        "few",
        "cpu",
    )
    assert recipe.configuration() == {
        "data": {"clients": 3, "test_fraction": 0.3, "partition": {"name": "classes_per_client", "k": 4}, "name": "digits"},
        "model": "mlp", "algorithm": {"name": "fedprox", "mu": 0.5, "lr": 0.1}, "rounds": 2,
    }  # fmt: skip
    assert recipe.configuration("paper", "many") == {
        "data": {"clients": 6, "test_fraction": 0.3, "partition": {"name": "classes_per_client", "k": 4}, "name": "digits"},
        "model": {"name": "mlp", "hidden": [5]}, "algorithm": {"name": "fedprox", "mu": 0.5, "lr": 0.1}, "rounds": 9,
    }  # fmt: skip
    assert recipe.configuration("smoke", "many") == {
        "data": {"clients": 2, "test_fraction": 0.3, "partition": {"name": "iid"}, "name": "digits"},
        "model": {"name": "mlp", "hidden": [5]}, "algorithm": {"name": "fedavg", "lr": 0.2}, "rounds": 1,
        "baselines": ["local"],
    }  # fmt: skip
    assert "baselines" not in recipe.configuration("smoke")
    assert [recipe.reduction_note(scale) for scale in (None, *SCALES)] == [
        "fewer rounds",
        "",
        "fewer rounds",
        "all of it",
    ]
    assert recipe.title("smoke") == "mine.yaml, variant few, scale smoke"


def test_a_recipe_without_the_default_scale(here):
    (here / "mine.yaml").write_text("scales: {smoke: {rounds: 1}, paper: }")
    recipe = read_recipe("mine.yaml")
    assert (recipe.resolve_scale_name(), recipe.chosen_or_first_variant(), recipe.configuration()) == (
        "smoke",
        None,
        {"rounds": 1},
    )


def test_scale_and_variant_on_the_command_line(polyfed):
    for words in (
        ["mine.yaml", "--scale", "smoke", "--variant", "many"],
        ["--variant=many", "--scale=smoke", "mine.yaml"],
    ):
        config = printed(polyfed, *words, "--data.clients", "4")
        assert (config["rounds"], config["model"]["hidden"], config["data"]["clients"]) == (1, [5], 4)
        assert config["algorithm"]["name"] == "fedavg"
        assert config["baselines"] == ["local"]
        assert not {"variants", "scales", "description"} & config.keys()
    assert printed(polyfed, "mine.yaml")["rounds"] == 2
    assert printed(polyfed, "mine.yaml", "--scale", "paper")["rounds"] == 9


def test_the_configuration_of_a_run_is_complete_and_repeats_it(polyfed, here):
    status, out, err = polyfed("run", "mine.yaml", "--variant", "many", "--workers", "0", "--out", "run")
    assert status == 0, err
    assert err.splitlines()[0] == "mine.yaml, variant many, scale cpu; against the paper: fewer rounds"
    config = read_config("run")
    assert not {"variants", "scales", "reduced", "description"} & config.keys()
    assert (config["rounds"], config["data"]["clients"], config["model"]["hidden"]) == (2, 6, [5])
    assert polyfed("run", "run", "--quiet", "--workers", "0", "--out", "again")[0] == 0
    one, two = (without_durations(read_metrics(here / name / "metrics.jsonl")) for name in ("run", "again"))
    assert len(one) == 2
    assert one == two
    status, again, err = polyfed("resume", "run", "--quiet")
    assert (status, again, err) == (0, out, "")
    assert re.search(r"fedprox: .* in 2 rounds; a round took \d+\.\d\d s on clients, \d+\.\d\d s on the server\n", out)


@pytest.mark.thorough
def test_a_table_that_is_too_wide_has_a_row_for_each_method(polyfed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    methods = "[local, fedprox, fedavg_ft, per_fedavg, fedrep]"
    words = ["--rounds", "1", "--workers", "0", "--quiet", "--data.clients", "2", "--baselines", methods]
    status, out, err = polyfed("run", "fedavg_digits", *words, "--out", "run")
    assert (status, err) == (0, "")
    assert "…" not in out
    assert re.search(r"method\W+mean\W+worst client\W+best client\W+gain over local", out)
    (last,) = read_metrics(Path("run/metrics.jsonl"))
    scores = [row["accuracy"] for row in last["clients"].values()]
    rows = {
        row[0]: row[1:] for line in out.splitlines() if len(row := re.findall(r"[\w.+-]+", line)) == 5 and "│" in line
    }
    assert list(rows) == ["local", "fedprox", "fedavg_ft", "per_fedavg", "fedrep", "fedavg"]
    mean = sum(scores) / len(scores)
    assert rows["fedavg"][:3] == [f"{100 * value:.1f}" for value in (mean, min(scores), max(scores))]
    assert rows["local"][3] == "+0.0"
    assert polyfed("resume", "run", "--quiet") == (0, out, "")


def test_a_quiet_run_says_nothing_on_stderr(polyfed):
    assert polyfed("run", "mine.yaml", "--scale", "smoke", "--workers", "0", "--quiet", "--out", "run")[::2] == (0, "")


def test_data_takes_scale_and_variant(polyfed, here):
    status, out, err = polyfed("data", "pfedla_fig5", "--scale", "smoke", "--plot", "data.png")
    assert (status, err) == (0, "")
    numbers = [
        re.findall(r"[·\d]+", line.split("client-00")[1])[1:11] for line in out.splitlines() if "client-00" in line
    ]
    assert [[k for k, n in enumerate(row) if n != "·"] for row in numbers][:3] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [0, 1, 2, 4],
    ]
    assert (here / "data.png").exists()


@pytest.mark.parametrize(
    ("command", "sentence"),
    {
        "run mine.yaml --scale smok": "mine.yaml has no scale 'smok'; did you mean smoke? Choices: cpu, paper, smoke",
        "run mine.yaml --variant fw": "mine.yaml has no variant 'fw'; did you mean few?",
        "data mine.yaml --variant fw": "mine.yaml has no variant 'fw'; did you mean few?",
        "run fedavg_digits --scale smoke": "fedavg_digits has no scales; leave --scale smoke out",
        "run fedavg_digits --variant few": "fedavg_digits has no variants; leave --variant few out",
        "run --scale smoke": "--scale needs a recipe before it; `polyfed list recipes` shows which have one",
        "data --variant few --rounds 3": "--variant needs a recipe before it",
        "run mine.yaml --scale": "--scale needs a value",
    }.items(),
)
def test_refused(polyfed, command, sentence):
    status, out, err = polyfed(*command.split())
    assert (status, out) == (2, "")
    assert sentence in err


@pytest.mark.parametrize(
    ("content", "sentence"),
    {
        "variants: [few]": r"bad\.yaml: variants must be a mapping from names to settings, got \['few'\]",
        "variants: {few: 3}": r"bad\.yaml: variants\.few must be a mapping of settings, got 3",
        "scales: {small: {rounds: 1}}": "unknown scale 'small'; choices: cpu, paper, smoke",
        "variants: {few: }\nscales: {cpu: {variants: {fw: }}}": "scale cpu speaks of a variant 'fw'; did you mean few",
        "scales: {cpu: {variants: 3}}": r"scales\.cpu\.variants must be a mapping",
    }.items(),
)  # fmt: skip
def test_bad_sections(here, content, sentence):
    (here / "bad.yaml").write_text(content)
    with pytest.raises(UserError, match=sentence):
        load_recipe_configuration("bad.yaml")


# -- baselines as mappings --------------------------------------------------------------------------------------------


def baselines_of(entries, *words):
    return build_experiment(
        configuration_parser.parse_configuration([*words], {"baselines": entries}, "polyfed run")
    ).baselines


def test_fields_of_a_baseline_win_over_the_shared_local_training():
    found = baselines_of(["local", {"name": "fedprox", "mu": 1, "lr": "1e-3"}], "--algorithm.lr", "0.5")
    assert (found["local"].lr, found["fedprox"].lr, found["fedprox"].mu) == (0.5, 0.001, 1.0)
    assert baselines_of([], "--baselines", "[{name: fedprox, mu: 1}]")["fedprox"].mu == 1.0
    assert build_method_like("fedprox", REGISTRY["local"](lr=0.5), {"mu": 0.25}) == REGISTRY["fedprox"](lr=0.5, mu=0.25)


def test_the_configuration_says_only_what_was_given_and_gives_it_again(polyfed):
    entries = "[local, {name: fedprox, mu: 1}]"
    config = printed(polyfed, "fedavg_digits", "--baselines", entries)
    assert config["baselines"] == ["local", {"name": "fedprox", "mu": 1.0}]
    words = ["--data.clients", "2", "--rounds", "1", "--quiet", "--out", "run"]
    assert polyfed("run", "fedavg_digits", "--baselines", entries, *words)[0] == 0
    assert read_config("run")["baselines"] == config["baselines"]
    assert read_config("run/baselines/fedprox")["algorithm"]["mu"] == 1.0
    assert polyfed("resume", "run", "--quiet")[0] == 0


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        (
            "[fedprox, {name: fedprox, mu: 1}]",
            "baselines has 'fedprox' twice, and both would go to the folder baselines/f",
        ),
        ("[{name: fedavg, lr: 3}]", "baselines has 'fedavg', which is also the method of the run, with other fields"),
        ("[{name: fedprx}]", "unknown algorithm 'fedprx'; did you mean fedprox"),
        ("[{mu: 3}]", "each entry of `baselines` is a name or a mapping with a name, got {'mu': 3}"),
        (
            "[{name: fedprox, muu: 3}]",
            "baseline fedprox: unknown key algorithm.muu; fedprox has no 'muu': did you mean mu?",
        ),
        ("[{name: fedprox, mu: x}]", "baseline fedprox: --algorithm.mu must be a number, got 'x'"),
        ("[{name: fedprox, mu: -1}]", "FedProx: mu must be at least 0, got -1.0"),
        ("[3]", "unknown algorithm '[3]'; the nearest are"),
        ("local", "--baselines must be a list such as [local, {name: fedprox, mu: 0.1}], got 'local'"),
    ],
)
def test_baselines_that_are_refused(polyfed, here, entries, sentence):
    before = sorted(here.iterdir())
    status, _, err = polyfed("run", "--baselines", entries, "--out", "run")
    assert status == 2
    assert sentence in err
    assert sorted(here.iterdir()) == before


def test_a_baseline_that_is_the_method_itself_is_run_once():
    assert list(baselines_of(["local", "fedavg"], "--algorithm", "local")) == ["fedavg"]


# -- the recipes that polyfed ships -----------------------------------------------------------------------------------


def choices():
    """Those of FLHA-GHN, FedHeNN and FedPNAS are in test_flha_recipes.py, test_fedhenn_recipes.py and so on."""
    found = [
        read_recipe(name) for name in shipped_recipe_files() if not name.startswith(("flha_", "fedhenn_", "fedpnas_"))
    ]
    return [
        (r.name, scale, variant) for r in found for scale in (r.scales or [None]) for variant in (r.variants or [None])
    ]


PFEDLA = [name for name in shipped_recipe_files() if name.startswith("pfedla_")]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "scale", "variant"), choices())
def test_every_choice_is_a_whole_configuration(name, scale, variant):
    parsed = configuration_parser.parse_configuration(
        [], read_recipe(name).configuration(scale, variant), "polyfed run"
    )
    experiment = build_experiment(parsed)
    if scale == "smoke":
        assert parsed["data"]["name"] == "digits"
    if scale == "paper":
        assert (experiment.algorithm.batch_size, experiment.split.test_fraction) == (32, 0.3)
        many = experiment.split.clients == 100
        assert (parsed["rounds"], parsed["clients_per_round"], experiment.algorithm.local_epochs) == (
            (2500, 0.1, 20) if many else (600, 1.0, 10)
        )
        cifar = parsed["data"]["name"].startswith("cifar")
        assert experiment.algorithm.lr == (0.01 if cifar else 0.005)
        assert parsed["model"] == {
            "name": "cnn_pfedla", "channels": [16, 32], "hidden": [120, 84], "batch_norm": cifar
        } | {key: parsed["model"][key] for key in ("channels", "hidden")}  # fmt: skip
        assert ("fedbn" in experiment.baselines) == (cifar and name in ("pfedla_table1", "pfedla_table2"))
        assert {method.local_epochs for method in experiment.baselines.values()} <= {experiment.algorithm.local_epochs}


@pytest.mark.parametrize("name", PFEDLA)
def test_scales_say_what_they_reduce(name):
    recipe = read_recipe(name)
    assert tuple(recipe.scales) == SCALES
    assert recipe.reduction_note("paper").startswith("nothing that the paper states; the rest is polyfed's choice: ")
    assert recipe.reduction_note("cpu")
    assert recipe.reduction_note("smoke")


def test_list_shows_scales_variants_and_what_is_reduced(polyfed):
    status, out, err = polyfed("list", "recipes")
    assert (status, err) == (0, "")
    text = " ".join(out.split())
    for name in PFEDLA:
        assert re.search(rf"^{name} +\S", out, re.MULTILINE)
    assert "layer-wise, model-wise, layer-wise-learned" in text
    assert "what the scales reduce against the paper" in text
    assert re.search(r"pfedla_fig1 +cpu +six clients of 40 training images", out)


@pytest.mark.slow
@pytest.mark.parametrize("name", PFEDLA)
def test_a_smoke_run_with_all_baselines(polyfed, here, name):
    """The first and the last variant: the last has BatchNorm, many clients, the largest k, or the other granularity."""
    variants = list(read_recipe(name).variants)
    for variant in dict.fromkeys((variants[0], variants[-1])):
        status, out, err = polyfed("run", name, "--scale", "smoke", "--variant", variant, "--quiet", "--out", variant)
        assert status == 0, err
        config = read_config(variant)
        assert len(read_metrics(here / variant / "metrics.jsonl")) == config["rounds"]
        methods = {config["algorithm"]["name"], *(b if isinstance(b, str) else b["name"] for b in config["baselines"])}
        assert {line.split(":")[0] for line in out.splitlines() if "B down, " in line} == methods
