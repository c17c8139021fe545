"""Fingerprints and first weights of the built-in networks, which no move or renaming of files may change."""

import importlib
import pkgutil
from functools import partial

import pytest
import torch
from torch import nn

import polyfed
from polyfed.algorithms.base.heads.last_layer import NetworkWithAddedHead
from polyfed.algorithms.distillation.base.mutual_learning import NetworkPair
from polyfed.cli.commands.options import recipes
from polyfed.core.nn.class_paths import class_name_in_fingerprint, module_path_in_fingerprint
from polyfed.core.nn.module_cache import architecture_hash, cached_module, initial_state
from polyfed.models import MODELS, build
from polyfed.models.vit import VisionTransformer
from polyfed.nas.supernet import SampledNetwork, SupernetPlan, plan_cell_stacks
from polyfed.simulation.experiment import build_experiment, load_participants

# name -> (fingerprint, sum of absolute values of the first weights with seed 0), before any file moved
NETWORKS = {
    "mlp": ("764aefb5f52ab162", 140.354),
    "cnn_small": ("8b7c2d7fa461954b", 1728.909),
    "cnn_582k": ("2752e360612fa648", 11404.905),
    "cnn_pfedla": ("44a162807c21769f", 2595.386),
    "cnn_fedhenn": ("7d4bf8a9fdda7fb9", 835.964),
    "cnn_fedhenn_homo": ("ec7fa39fd48d623e", 4356.703),
    "cnn_fedpnas": ("6f8d95053c4bfc72", 11126.694),
    "resnet18": ("96aea2c5bb68c304", 114235.059),
    "resnet18_hybrid": ("ec2124782a32e465", 116057.228),
    "flha_arch0": ("96aea2c5bb68c304", 114235.059),
    "flha_arch1": ("9c54238ba387b875", 49633.466),
    "flha_arch2": ("bdf6a3404bdcd914", 32003.806),
    "flha_arch3": ("bdc89cbd121ede44", 103535.85),
    "flha_small": ("a5342259bb3f6275", 7032.372),
    "flha_chain": ("8e283c80c83b8867", 4822.817),
    "lstm": ("0c57606e53c53d19", 514957.209),
    "lstm_tagger": ("6b5c45ad87fd6a49", 256511.682),
    "tiny_transformer": ("6d97c6b0aab5a791", 256759.981),
    "vit": ("5dda8e7e90665657", 4511.449),
    "unet": ("061d1b6670909bc3", 1234.585),
    "unet3d": ("2bdd9304e5879a7b", 1952.377),
}
DIGITS = {
    ("05611137159301a1", 5273.22),
    ("2f4d2a226de9de8e", 2559.45),
    ("e85d80344a5eeae8", 1730.04),
    ("5ad3164a27e7196c", 5868.24),
}
SHAPES = {"lstm": (12,), "lstm_tagger": (12,), "tiny_transformer": (12,), "mlp": (8,), "unet3d": (1, 8, 8, 8)}


def size_of_first_weights(factory):
    weights = initial_state(factory, seed=0).values()
    return sum(w.double().abs().sum().item() for w in weights if w.is_floating_point())


def test_every_built_in_network_is_fixed():
    assert MODELS.keys() == NETWORKS.keys()


@pytest.mark.parametrize("name", NETWORKS)
def test_fingerprint_and_first_weights_stay(name):
    factory = partial(build, name, SHAPES.get(name, (3, 32, 32)), 10)
    fingerprint, size = NETWORKS[name]
    assert cached_module(factory).architecture == fingerprint
    assert size_of_first_weights(factory) == pytest.approx(size, rel=1e-5)


@pytest.mark.parametrize(
    ("context", "fingerprint", "size"),
    [
        pytest.param("free", "3600d3cd71f09835", 3657.979, marks=pytest.mark.thorough),
        ("aware", "bbbf0d5d379993a8", 4730.907),
    ],
)
def test_a_supernet_whose_layer_classes_were_renamed_starts_as_it_did(context, fingerprint, size):
    plan = SupernetPlan(1, 3, 4, *plan_cell_stacks(), context=context)
    assert cached_module(plan).architecture == fingerprint
    assert size_of_first_weights(plan) == pytest.approx(size, rel=1e-5)


def test_networks_printed_under_former_names_keep_their_fingerprints():
    plan = SupernetPlan(1, 3, 4, *plan_cell_stacks())
    assert architecture_hash(SampledNetwork(plan(), {})) == "2bf9fba4de342aa6"
    with_head = NetworkWithAddedHead(nn.Linear(2, 3), "", torch.zeros(3, 2), torch.zeros(3))
    assert architecture_hash(with_head) == "a8295dea3fa2629d"


def test_the_clients_of_the_recipe_digits_start_as_they_did():
    experiment = build_experiment(recipes.read_recipe("digits").configuration(None, None))
    starts = {
        (cached_module(c.model).architecture, round(size_of_first_weights(c.model), 2))
        for c in load_participants(experiment).clients
    }
    assert starts == DIGITS


def classes_of_layers():
    for module in pkgutil.walk_packages(polyfed.__path__, "polyfed."):
        if ".deploy." in module.name or module.name.endswith("__main__"):
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.name:
                yield value


def test_a_class_keeps_the_path_and_name_at_which_runs_first_used_it():
    assert module_path_in_fingerprint(VisionTransformer) == "polyfed.models.vit"
    assert module_path_in_fingerprint(NetworkPair) == "polyfed.algorithms.mutual"
    assert class_name_in_fingerprint(NetworkPair) == "Pair"
    names = [class_name_in_fingerprint(kind) for kind in classes_of_layers()]
    assert len(names) == len(set(names)), "two layer classes of one name would have one path"
