"""The recipes of FLHA-GHN (Litany et al. 2022): each is a whole configuration, and has the paper's numbers, which are
written here from the paper by hand."""

import functools
import re

import numpy as np
import pytest

from polyfed.algorithms import FLHAGHN, FedAvg, Local, PFedHN
from polyfed.cli.commands.options import configuration_parser
from polyfed.cli.commands.options import recipes as shipped
from polyfed.cli.commands.options.recipes import SCALES, shipped_recipe_files
from polyfed.data import IID, Dirichlet
from polyfed.simulation.experiment import load_participants

read = functools.cache(shipped.read_recipe)
FLHA = [name for name in shipped_recipe_files() if name.startswith("flha_")]
CHOICES = [(name, scale, variant) for name in FLHA for scale in SCALES for variant in (read(name).variants or [None])]
SWEEP = "flha_appendix_d"  # of the published form
GHN = [name for name in FLHA if name not in ("flha_upper_bound", SWEEP)]
ARCHITECTURES = ["resnet18", "flha_arch1", "flha_arch2", "flha_arch3"]  # Arch 0-3
CLIENTS = {"25": 4, "12.5": 8, "6.25": 16}  # "data %" of Tables 1-3
SOURCES = {
    "mosaics": "fashion_mosaics",
    "cifar10": "cifar10",
    "cifar100": "cifar100",
    "fashion_mnist": "fashion_mnist",
    "xray": "chest_xray14",
}
IMAGES = {"flha_table2": 2000, "flha_table3": 1024, "flha_table6_fig3": 2000, "flha_fig7": 2500}  # of all; else 512
UNSEEN = ["flha_table6_fig3", "flha_fig7"]
PUBLISHED = {"graph": "layers", "normalise": False, "initialisation": "paper", "momentum": 0, "clip_norm": None}


def variants(name):
    return list(read(name).variants) or [None]


def plain(name):
    """The variants in polyfed's form, and those of other methods."""
    return [v for v in variants(name) if not v.endswith(("-published", "-unnormalised"))]


def names(experiment):
    return [model["name"] for model in experiment.models]


def widths(experiment):
    return {model["width"] for model in experiment.models}


# -- what there is ----------------------------------------------------------------------------------------------------


def test_every_table_and_figure_has_a_recipe():
    wanted = [*(f"table{k}" for k in (1, 2, 3, 5, 6, 7)), *(f"fig{k}" for k in (3, 4, 7)), "appendix_b", "appendix_d",
              "upper_bound"]  # fmt: skip
    assert {
        w for w in wanted if any(w in name.removeprefix("flha_").split("_") or name == f"flha_{w}" for name in FLHA)
    } == set(wanted)


def test_they_are_listed_with_their_variants(polyfed):
    text = polyfed("list", "recipes")
    for name in FLHA:
        assert re.search(rf"^{name} +FLHA-GHN, ", text, re.MULTILINE)
    for words in ("without-arch0, without-arch1", "alpha0.1-standard", "l1, l2, l5, l10, l20"):
        assert words in text


@pytest.mark.parametrize("name", FLHA)
@pytest.mark.one_case
def test_scales_say_what_they_reduce(name, experiment):
    recipe = read(name)
    assert tuple(recipe.scales) == SCALES
    assert recipe.resolve_scale_name() == "cpu"
    own_test = {0.02: "2 % of each client's training images are", 0.1: "a tenth of each client's training images is"}
    ours = (
        "; not of the paper: normalise and Kaiming's variance at the start (its rate of "
        "0.009 was found without), momentum 0.9 and gradients clipped at 5 (the variants *-published have none of these)"
    )
    assert recipe.reduction_note("paper") == (
        f"{own_test[experiment(name).split.test_fraction]} its own test set, and not trained on"
        + (ours if name in GHN else "")
    )
    images = re.escape(f"{IMAGES.get(name, 512):,} instead of") if name != "flha_table5" else "128 training images"
    graph = ["norm layers as nodes of the graph"] if name in GHN else []
    for words in ("width 8 instead of 64", "40", "rate", images, *graph):
        assert re.search(words, recipe.reduction_note("cpu"))
    assert "digits of scikit-learn instead of" in recipe.reduction_note("smoke")


# -- what they hold ---------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "scale", "variant"), CHOICES)
def test_every_choice_is_a_whole_configuration(name, scale, variant, experiment):
    found = experiment(name, scale, variant)
    split, config = found.split, found.config
    assert config["data"]["name"] == ("digits" if scale == "smoke" else config["data"]["name"])
    assert split.global_test == {"paper": -1, "cpu": 1000, "smoke": 100}[scale]
    assert widths(found) == {{"paper": 64, "cpu": 8, "smoke": 4}[scale]}
    assert split.unseen == (name in UNSEEN)
    assert split.clients % len(found.models) == 0  # "an even distribution of the different architectures"
    assert isinstance(found.partition, Dirichlet if name == "flha_table5" else IID)
    assert (found.settings.clients_per_round, found.settings.seed) == (1.0, 0)
    if scale == "paper":
        assert split.examples_per_client is None
        assert found.augment == (config["data"]["name"] not in ("chest_xray14", "fashion_mosaics"))
        assert not re.search("instead", read(name).reduction_note("paper"))
    if scale == "cpu":
        bound = name == "flha_upper_bound" and str(variant).startswith(("xray", "mosaics"))
        assert split.clients * split.examples_per_client == (1024 if bound else IMAGES.get(name, 512))
        assert not found.augment
        epochs = {16: 3, 8: 2} if split.clients * split.examples_per_client == 512 else {}
        if name == "flha_fig4":
            assert found.settings.rounds * found.algorithm.local_epochs == 40
        else:
            assert (found.settings.rounds, found.algorithm.local_epochs) == (40, epochs.get(split.clients, 1))
        assert {method.local_epochs for method in found.baselines.values()} <= {found.algorithm.local_epochs}
    if scale == "smoke":
        assert split.clients * split.examples_per_client <= 200
        assert found.settings.rounds * found.algorithm.local_epochs <= 20
    if scale != "paper":
        large = scale == "cpu" and IMAGES.get(name, 512) >= 2000
        assert found.algorithm.batch_size == (32 if large else 16)
        published = str(variant).endswith("-published") or (name, scale) == (SWEEP, "cpu")
        assert found.algorithm.clip_norm == (None if published else 5)
        averages = isinstance(found.algorithm, FedAvg)
        assert found.algorithm.buffers == ("average" if averages else "recompute")
        lrs = {method.lr for method in (found.algorithm, *found.baselines.values())} if name != SWEEP else ()
        assert all(re.search(rf"\b{lr:g}\b", read(name).reduction_note(scale)) for lr in lrs), (
            f"`reduced` does not name all of {lrs}"
        )


@pytest.mark.thorough
@pytest.mark.parametrize("name", GHN)
def test_at_paper_scale_the_method_has_the_papers_settings(name, experiment):
    for variant in variants(name):
        method = experiment(name, "paper", variant).algorithm
        if variant is not None and variant.endswith("-standard"):
            continue
        assert isinstance(method, FLHAGHN)
        assert (method.latent, method.hidden, method.lr, method.schedule) == (51, 16, 0.009, "cosine")  # section 4.3
        assert (method.optimizer, method.refine_epochs, method.weighted, method.head) == ("sgd", 1, False, "mlp")
        assert method.depth == (0 if "no-gnn" in str(variant) else 6)
        fields = {"depth": method.depth, "local_epochs": method.local_epochs, "head": "mlp"}
        if str(variant).endswith("-published"):
            fields |= PUBLISHED
        if str(variant).endswith("-unnormalised"):
            fields |= {"normalise": False}
        assert method == FLHAGHN(**fields)


OTHER = ("flha_table2", "flha_table3", "flha_appendix_b", "flha_upper_bound")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["flha_table1", *(pytest.param(n, marks=pytest.mark.slow) for n in OTHER)])
def test_a_variant_names_the_data_set_and_the_share_of_a_client(name, experiment):
    for variant in variants(name):
        source, share = variant.split("-")[:2]
        for scale in ("paper", "cpu"):
            found = experiment(name, scale, variant)
            assert (found.config["data"]["name"], found.split.clients) == (SOURCES[source], CLIENTS[share])
            assert 100 / found.split.clients == float(share)
        assert experiment(name, "smoke", variant).split.clients == min(8, CLIENTS[share])


@pytest.mark.thorough
def test_table_1_and_3_are_the_papers(experiment):
    rows = [f"{source}-{share}" for source in ("cifar10", "cifar100", "fashion_mnist") for share in CLIENTS]
    assert plain("flha_table1") == rows
    assert [v for v in variants("flha_table1") if v.endswith("-unnormalised")] == [
        f"{source}-12.5-unnormalised" for source in ("cifar10", "fashion_mnist")
    ]
    assert plain("flha_table3") == [f"{source}-{share}" for source in ("xray", "mosaics") for share in CLIENTS]
    forms = set(variants("flha_table1")) - set(rows)
    assert all(not experiment("flha_table1", scale, form).baselines for scale in SCALES for form in forms)
    for name in ("flha_table1", "flha_table3"):
        for variant in plain(name):
            stem = "xray" if variant.startswith("xray") else "cifar"
            found = experiment(name, "paper", variant)
            assert names(found) == ARCHITECTURES
            assert {model["stem"] for model in found.models} == {stem}
            assert found.settings.rounds == 500
            assert list(found.baselines) == ["local", "pfedhn", "fedavg_kd"]
            assert [list(experiment(name, s, variant).baselines) for s in SCALES] == [list(found.baselines)] * 3
    assert experiment("flha_table3").config["data"]["image_size"] == 224  # appendix A


@pytest.mark.parametrize("name", ["flha_table1", "flha_table3"])
def test_fedavg_kd_is_that_of_appendix_e_and_the_others_have_their_defaults(name, experiment):
    found = experiment(name)
    local, pfedhn, distillation = found.baselines.values()
    assert (distillation.temperature, distillation.alpha, distillation.teacher_lr, distillation.lr) == (
        20,
        0.7,
        0.1,
        0.01,
    )
    assert distillation.teacher_rounds == 200
    assert local == Local(lr=0.009, schedule="cosine", momentum=0.9, batch_size=64, clip_norm=FLHAGHN().clip_norm)
    # What the paper says that it tuned, and does not tell, are the defaults of the method, in the epochs of the others.
    assert pfedhn == PFedHN(heads="client", local_steps=None, schedule="cosine")
    stem = {"stem": "xray"} if name == "flha_table3" else {}
    for scale, width in (("paper", {}), ("cpu", {"width": 8}), ("smoke", {"width": 4})):
        teacher = experiment(name, scale).baselines["fedavg_kd"].teacher
        assert dict(teacher) == {"name": "resnet18", **stem, **width}
    for scale in ("cpu", "smoke"):
        assert experiment(name, scale).baselines["fedavg_kd"].teacher_rounds is None  # half of the rounds


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["flha_table1", "flha_table3"])
def test_pfedhn_has_heads_by_client_everywhere(name, experiment):
    """ "The individual client heads were changed": they "do not benefit from federation" (sections 5.1 and 5.2)."""
    for variant in plain(name):
        assert {experiment(name, scale, variant).baselines["pfedhn"].heads for scale in SCALES} == {"client"}


@pytest.mark.thorough
def test_the_upper_bound_is_of_the_same_data(experiment):
    columns = {"flha_table1": "cifar", "flha_table3": "xray"}
    bound = variants("flha_upper_bound")
    assert sorted(bound) == sorted(variant for name in columns for variant in plain(name))
    for name in columns:
        for variant in plain(name):
            for scale in SCALES:
                found, table = experiment("flha_upper_bound", scale, variant), experiment(name, scale, variant)
                assert found.source == table.source
                assert (found.split, found.partition, found.augment) == (table.split, table.partition, table.augment)
                assert list(found.models) == [table.models[0]]  # Arch 0, as in that table
            found = experiment("flha_upper_bound", "paper", variant)
            # "set to 0.1 with cosine scheduling", "200 epochs" (appendix E)
            assert found.algorithm == FedAvg(lr=0.1, schedule="cosine", momentum=0.9, batch_size=64)
            assert found.settings.rounds * found.algorithm.local_epochs == 200


@pytest.mark.thorough
def test_table_2_has_four_depths_with_and_without_gnn(experiment):
    rows = [f"{source}-{share}" for source in ("cifar10", "cifar100", "fashion_mnist") for share in ("25", "12.5")]
    assert plain("flha_table2") == [f"{row}-{gnn}" for row in rows for gnn in ("gnn", "no-gnn")]
    for variant in variants("flha_table2"):
        for scale in SCALES:
            found = experiment("flha_table2", scale, variant)
            assert names(found) == ["flha_chain"] * 4
            assert [model["num_layers"] for model in found.models] == [4, 7, 10, 13]
            assert found.algorithm.depth == (0 if "no-gnn" in variant else 6)
    pairs = zip(variants("flha_table2")[::2], variants("flha_table2")[1::2], strict=True)
    for one, other in pairs:
        assert experiment("flha_table2", "cpu", one).split == experiment("flha_table2", "cpu", other).split


@pytest.mark.thorough
def test_table_5_deals_training_and_test_images_alike(experiment):
    alphas = {"alpha100": 100, "alpha1": 1, "alpha0.1": 0.1}
    assert plain("flha_table5") == [*alphas, *(f"{alpha}-standard" for alpha in alphas)]
    for variant in plain("flha_table5"):
        for scale in SCALES:
            found = experiment("flha_table5", scale, variant)
            assert found.partition == Dirichlet(alpha=alphas[variant.removesuffix("-standard")])
            assert found.split.clients == 4
            if variant.endswith("-standard"):
                assert (names(found), type(found.algorithm), found.baselines) == (["resnet18"], FedAvg, {})
            else:
                assert (names(found), list(found.baselines)) == (ARCHITECTURES, ["local"])
    standard, bound = experiment("flha_table5", "paper", "alpha1-standard"), experiment("flha_upper_bound")
    assert (standard.algorithm, standard.settings.rounds) == (bound.algorithm, bound.settings.rounds)
    assert experiment("flha_table5").config["data"]["name"] == "cifar10"
    # Own test images of a skewed client are as skewed as its training images; the common ones have every class.
    clients = load_participants(experiment("flha_table5", "smoke", "alpha0.1")).clients
    for client in clients:
        train, test = (
            np.bincount(part.labels.numpy(), minlength=10) / len(part) for part in (client.train, client.test)
        )
        assert abs(train - test).max() < 0.1
        assert (client.global_test.labels.bincount(minlength=10) > 5).all()
    assert max(np.bincount(c.train.labels.numpy()).max() / len(c.train) for c in clients) > 0.4


@pytest.mark.thorough
def test_table_6_leaves_out_each_architecture_in_turn(experiment):
    assert plain("flha_table6_fig3") == [f"without-arch{i}" for i in range(4)]
    for scale in SCALES:
        for i, variant in enumerate(plain("flha_table6_fig3")):
            found = experiment("flha_table6_fig3", scale, variant)
            assert names(found) == [*ARCHITECTURES[:i], *ARCHITECTURES[i + 1 :], ARCHITECTURES[i]]
            assert (found.split.clients, found.split.unseen) == (4, 1)
    there = load_participants(experiment("flha_table6_fig3", "smoke", "without-arch2"))
    assert [client.model.name for client in there.clients] == ["resnet18", "flha_arch1", "flha_arch3"]
    assert [client.model.name for client in there.unseen] == ["flha_arch2"]


def test_figure_7s_newcomer_is_the_small_network(experiment):
    for scale in SCALES:
        found = experiment("flha_fig7", scale)
        assert names(found) == [*ARCHITECTURES, "flha_small"]
        assert (found.split.clients, found.split.unseen) == (5, 1)
    there = load_participants(experiment("flha_fig7", "smoke"))
    assert [client.model.name for client in there.clients] == ARCHITECTURES
    assert [client.model.name for client in there.unseen] == ["flha_small"]


@pytest.mark.thorough
def test_table_7_replaces_each_architecture_in_turn(experiment):
    assert plain("flha_table7") == ["none", "arch3", "arch2", "arch1", "arch0"]  # the order of the rows
    for scale in SCALES:
        for variant in plain("flha_table7"):
            found = experiment("flha_table7", scale, variant)
            wanted = list(ARCHITECTURES)
            if variant != "none":
                wanted[int(variant[-1])] = "flha_small"
            assert (names(found), found.split.clients) == (wanted, 4)
            assert list(found.baselines) == ["local"]
    none, table1 = experiment("flha_table7", "paper", "none"), experiment("flha_table1", "paper", "cifar10-25")
    assert (none.source, none.split, none.models) == (table1.source, table1.split, table1.models)
    assert (none.algorithm, none.settings) == (table1.algorithm, table1.settings)


@pytest.mark.thorough
def test_figure_4_keeps_epochs_times_communications(experiment):
    for scale, product in (("paper", 1000), ("cpu", 40), ("smoke", 20)):
        for variant, epochs in {"l1": 1, "l2": 2, "l5": 5, "l10": 10, "l20": 20}.items():
            found = experiment("flha_fig4", scale, variant)
            assert found.algorithm.local_epochs == epochs
            assert found.settings.rounds == product / epochs
            assert (names(found), found.split.clients) == (ARCHITECTURES, 4)
            if scale != "smoke":
                assert found.config["data"]["name"] == "cifar10"


@pytest.mark.thorough
def test_appendix_b_has_resnet18_and_its_three_hybrids(experiment):
    assert plain("flha_appendix_b") == [f"{source}-{s}" for source in ("cifar10", "cifar100") for s in ("25", "12.5")]
    for scale in SCALES:
        for variant in plain("flha_appendix_b"):
            found = experiment("flha_appendix_b", scale, variant)
            assert names(found) == ["resnet18", *["resnet18_hybrid"] * 3]
            assert [model.get("variant") for model in found.models] == [None, 1, 2, 3]
            assert list(found.baselines) == ["local", "fedavg_kd"]
            width = found.models[0]["width"]
            assert {"width": 64, **found.baselines["fedavg_kd"].teacher} == {"name": "resnet18", "width": width}
    assert experiment("flha_appendix_b").baselines == {
        name: experiment("flha_table1").baselines[name] for name in ("local", "fedavg_kd")
    }


@pytest.mark.parametrize("name", ["flha_table1", "flha_table3"])
def test_client_k_has_architecture_k_mod_4(name, experiment):
    there = load_participants(experiment(name, "smoke", "xray-6.25" if name == "flha_table3" else "cifar10-6.25"))
    assert [client.model.name for client in there.clients] == ARCHITECTURES * 2
    assert {client.model.arguments.get("stem") for client in there.clients} == {
        "xray" if name == "flha_table3" else "cifar"
    }
    assert {(len(client.train), len(client.global_test)) for client in there.clients} == {(20, 100)}


@pytest.mark.parametrize("name", [*GHN, SWEEP])
@pytest.mark.one_case
def test_without_cifar_fashion_mnist_takes_its_place(name):
    """As the comments say; the split stays."""
    config = read(name).configuration("cpu")
    parsed = configuration_parser.parse_configuration(
        ["--data", "fashion_mnist", "--data.path", "F"], config, "polyfed run"
    )["data"]
    kept = ("clients", "examples_per_client", "test_fraction", "global_test", "unseen")
    given = {**configuration_parser.parse_configuration([], config, "polyfed run")["data"]}
    assert {key: parsed[key] for key in kept} == {key: given[key] for key in kept}
    assert (parsed["name"], parsed["path"], parsed["partition"]) == ("fashion_mnist", "F", given["partition"])
