"""Holds the federated methods: `names()` lists them, `get(name)` returns the class of one, whose fields are its
hyper-parameters.

`polyfed.federate` and `polyfed.compare` take a name, for the defaults, or an object. Methods of your own begin with
`polyfed.algorithms.base`.

>>> FedProx(mu=0.1, lr=0.05)
FedProx(lr=0.05, mu=0.1)
>>> "fedprox" in names(), get("fedprox") is FedProx
(True, True)
"""

# `python tools/update_lists.py` writes this file from the methods' cards. `REGISTRY` is a literal dict, since the command
# line reads it, and each method's fields and docstring, from the source files: an import would take seconds
# (`polyfed.cli.static_registry`).

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from polyfed.algorithms import base
from polyfed.algorithms.adapters.fedsa_lora import FedSALoRA
from polyfed.algorithms.adapters.ffa_lora import FFALoRA
from polyfed.algorithms.adapters.rolora import RoLoRA
from polyfed.algorithms.alignment.fedhenn import FedHeNN
from polyfed.algorithms.alignment.fedhenn_homo import FedHeNNHomo
from polyfed.algorithms.distillation.fd import FD
from polyfed.algorithms.distillation.fedavg_kd import FedAvgKD
from polyfed.algorithms.distillation.feddf import FedDF
from polyfed.algorithms.distillation.fedgen import FedGen
from polyfed.algorithms.distillation.fedkd import FedKD
from polyfed.algorithms.distillation.fedmd import FedMD
from polyfed.algorithms.distillation.fedmrl import FedMRL
from polyfed.algorithms.distillation.fml import FML
from polyfed.algorithms.distillation.takfl import TAKFL
from polyfed.algorithms.global_model.afl import AFL
from polyfed.algorithms.global_model.fedavg import FedAvg
from polyfed.algorithms.global_model.feddyn import FedDyn
from polyfed.algorithms.global_model.fednova import FedNova
from polyfed.algorithms.global_model.fedopt import FedOpt
from polyfed.algorithms.global_model.fedprox import FedProx
from polyfed.algorithms.global_model.moon import Moon
from polyfed.algorithms.global_model.qfedavg import QFedAvg
from polyfed.algorithms.global_model.scaffold import Scaffold
from polyfed.algorithms.hypernetworks.flha_ghn import FLHAGHN
from polyfed.algorithms.hypernetworks.heur_pfedla import HeurPFedLA
from polyfed.algorithms.hypernetworks.pfedhn import PFedHN
from polyfed.algorithms.hypernetworks.pfedla import PFedLA
from polyfed.algorithms.nas.feddsnas import CAFedDSNAS, FedDSNAS
from polyfed.algorithms.nas.fedpnas import CAFedPNAS, FedPNAS
from polyfed.algorithms.partial_sharing.fedbabu import FedBABU
from polyfed.algorithms.partial_sharing.fedbn import FedBN
from polyfed.algorithms.partial_sharing.fedpac import FedPAC
from polyfed.algorithms.partial_sharing.fedper import FedPer
from polyfed.algorithms.partial_sharing.fedrep import FedRep
from polyfed.algorithms.partial_sharing.gpfl import GPFL
from polyfed.algorithms.partial_sharing.lg_fedavg import LGFedAvg
from polyfed.algorithms.personalised.ditto import Ditto
from polyfed.algorithms.personalised.fedavg_ft import FedAvgFT
from polyfed.algorithms.personalised.feddbe import FedDBE
from polyfed.algorithms.personalised.fedrod import FedRoD
from polyfed.algorithms.personalised.ifca import IFCA
from polyfed.algorithms.personalised.local import Local
from polyfed.algorithms.personalised.mixtures.apfl import APFL
from polyfed.algorithms.personalised.mixtures.fedala import FedALA
from polyfed.algorithms.personalised.mixtures.fedamp import FedAMP
from polyfed.algorithms.personalised.mixtures.fedfomo import FedFomo
from polyfed.algorithms.personalised.mixtures.knn_per import KNNPer
from polyfed.algorithms.personalised.per_fedavg import PerFedAvg
from polyfed.algorithms.personalised.pfedme import PFedMe
from polyfed.algorithms.prototypes.fedgh import FedGH
from polyfed.algorithms.prototypes.fedl2g import FedL2G
from polyfed.algorithms.prototypes.fedproto import FedProto
from polyfed.algorithms.prototypes.fedtgp import FedTGP
from polyfed.algorithms.submodels.depthfl import DepthFL
from polyfed.algorithms.submodels.fedrolex import FedRolex
from polyfed.algorithms.submodels.heterofl import HeteroFL
from polyfed.core.algorithm import Algorithm
from polyfed.core.errors import UserError, did_you_mean

REGISTRY: dict[str, type[Algorithm[Any, Any]]] = {
    "fedsa_lora": FedSALoRA,
    "ffa_lora": FFALoRA,
    "rolora": RoLoRA,
    "fedhenn": FedHeNN,
    "fedhenn_homo": FedHeNNHomo,
    "fd": FD,
    "fedavg_kd": FedAvgKD,
    "feddf": FedDF,
    "fedgen": FedGen,
    "fedkd": FedKD,
    "fedmd": FedMD,
    "fedmrl": FedMRL,
    "fml": FML,
    "takfl": TAKFL,
    "afl": AFL,
    "fedavg": FedAvg,
    "feddyn": FedDyn,
    "fednova": FedNova,
    "fedopt": FedOpt,
    "fedprox": FedProx,
    "moon": Moon,
    "qfedavg": QFedAvg,
    "scaffold": Scaffold,
    "flha_ghn": FLHAGHN,
    "heur_pfedla": HeurPFedLA,
    "pfedhn": PFedHN,
    "pfedla": PFedLA,
    "ca_feddsnas": CAFedDSNAS,
    "ca_fedpnas": CAFedPNAS,
    "feddsnas": FedDSNAS,
    "fedpnas": FedPNAS,
    "fedbabu": FedBABU,
    "fedbn": FedBN,
    "fedpac": FedPAC,
    "fedper": FedPer,
    "fedrep": FedRep,
    "gpfl": GPFL,
    "lg_fedavg": LGFedAvg,
    "apfl": APFL,
    "ditto": Ditto,
    "fedala": FedALA,
    "fedamp": FedAMP,
    "fedavg_ft": FedAvgFT,
    "feddbe": FedDBE,
    "fedfomo": FedFomo,
    "fedrod": FedRoD,
    "ifca": IFCA,
    "knn_per": KNNPer,
    "local": Local,
    "per_fedavg": PerFedAvg,
    "pfedme": PFedMe,
    "fedgh": FedGH,
    "fedl2g": FedL2G,
    "fedproto": FedProto,
    "fedtgp": FedTGP,
    "depthfl": DepthFL,
    "fedrolex": FedRolex,
    "heterofl": HeteroFL,
}


_LISTING = "polyfed.algorithms.names() (polyfed list algorithms)"


def names() -> list[str]:
    """Returns the names of all methods, sorted; `get`, `polyfed.federate` and `polyfed.compare` take them."""
    return sorted(REGISTRY)


def get(name: str) -> type[Algorithm[Any, Any]]:
    """Returns the class of a method by its name in the registry, such as "fedavg".

    Raises:
        UserError: an unknown name, with the nearest choices.

    >>> get("fedprox")(mu=0.1).mu
    0.1
    """
    if name not in REGISTRY:
        raise UserError(f"unknown algorithm {name!r}; {did_you_mean(name, REGISTRY, _LISTING)}")
    return REGISTRY[name]


def registry_name(algorithm: Algorithm[Any, Any]) -> str:
    """Returns the name of a method in the registry, such as "fedavg", or the name of its class if it is not registered.

    >>> registry_name(FedAvg())
    'fedavg'
    """
    names = {method: name for name, method in REGISTRY.items()}
    return names.get(type(algorithm), type(algorithm).__name__)


if not TYPE_CHECKING:  # a type checker shall find misspelt names itself

    def __getattr__(name: str) -> Any:
        classes = {method.__name__.lower(): method.__name__ for method in REGISTRY.values()}
        near = (
            [] if name.startswith("_") else get_close_matches(name.lower().replace("_", ""), classes, n=1, cutoff=0.7)
        )
        place = classes[near[0]] if near else f"base.{name}" if name in base.__all__ else ""
        hint = f"; did you mean polyfed.algorithms.{place}?" if place else ""
        raise AttributeError(f"module 'polyfed.algorithms' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted([*__all__, "base"])


__all__ = [
    "AFL", "APFL", "FD", "FLHAGHN", "FML", "GPFL", "IFCA", "REGISTRY", "TAKFL", "CAFedDSNAS", "CAFedPNAS", "DepthFL",
    "Ditto", "FFALoRA", "FedALA", "FedAMP", "FedAvg", "FedAvgFT", "FedAvgKD", "FedBABU", "FedBN", "FedDBE", "FedDF",
    "FedDSNAS", "FedDyn", "FedFomo", "FedGH", "FedGen", "FedHeNN", "FedHeNNHomo", "FedKD", "FedL2G", "FedMD", "FedMRL",
    "FedNova", "FedOpt", "FedPAC", "FedPNAS", "FedPer", "FedProto", "FedProx", "FedRep", "FedRoD", "FedRolex",
    "FedSALoRA", "FedTGP", "HeteroFL", "HeurPFedLA", "KNNPer", "LGFedAvg", "Local", "Moon", "PFedHN", "PFedLA",
    "PFedMe", "PerFedAvg", "QFedAvg", "RoLoRA", "Scaffold", "get", "names", "registry_name",
]  # fmt: skip
