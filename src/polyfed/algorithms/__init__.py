"""The federated methods, one file each, both halves together. `REGISTRY` is the list of what there is.

It is a literal dict, since the command line reads it, and each method's fields and docstring, from the source files: an
import would take seconds (`polyfed.cli.outlines`).
"""

from typing import Any

from polyfed.algorithms.apfl import APFL
from polyfed.algorithms.ditto import Ditto
from polyfed.algorithms.fd import FD
from polyfed.algorithms.fedala import FedALA
from polyfed.algorithms.fedamp import FedAMP
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fedavg_ft import FedAvgFT
from polyfed.algorithms.fedavg_kd import FedAvgKD
from polyfed.algorithms.fedbn import FedBN
from polyfed.algorithms.feddf import FedDF
from polyfed.algorithms.feddsnas import CAFedDSNAS, FedDSNAS
from polyfed.algorithms.feddyn import FedDyn
from polyfed.algorithms.fedfomo import FedFomo
from polyfed.algorithms.fedgh import FedGH
from polyfed.algorithms.fedhenn import FedHeNN
from polyfed.algorithms.fedhenn_homo import FedHeNNHomo
from polyfed.algorithms.fedkd import FedKD
from polyfed.algorithms.fedmd import FedMD
from polyfed.algorithms.fedopt import FedOpt
from polyfed.algorithms.fedpac import FedPAC
from polyfed.algorithms.fedpnas import CAFedPNAS, FedPNAS
from polyfed.algorithms.fedproto import FedProto
from polyfed.algorithms.fedprox import FedProx
from polyfed.algorithms.fedrep import FedRep
from polyfed.algorithms.fedtgp import FedTGP
from polyfed.algorithms.flha_ghn import FLHAGHN
from polyfed.algorithms.fml import FML
from polyfed.algorithms.heterofl import HeteroFL
from polyfed.algorithms.heur_pfedla import HeurPFedLA
from polyfed.algorithms.ifca import IFCA
from polyfed.algorithms.knn_per import KNNPer
from polyfed.algorithms.lg_fedavg import LGFedAvg
from polyfed.algorithms.local import Local
from polyfed.algorithms.moon import Moon
from polyfed.algorithms.per_fedavg import PerFedAvg
from polyfed.algorithms.pfedhn import PFedHN
from polyfed.algorithms.pfedla import PFedLA
from polyfed.algorithms.pfedme import PFedMe
from polyfed.algorithms.scaffold import Scaffold
from polyfed.core.algorithm import Algorithm
from polyfed.core.errors import UserError, did_you_mean

REGISTRY: dict[str, type[Algorithm[Any, Any]]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedavg_ft": FedAvgFT,
    "fedprox": FedProx,
    "fedrep": FedRep,
    "fedbn": FedBN,
    "per_fedavg": PerFedAvg,
    "pfedme": PFedMe,
    "pfedhn": PFedHN,
    "fedfomo": FedFomo,
    "fedavg_kd": FedAvgKD,
    "flha_ghn": FLHAGHN,
    "fedhenn": FedHeNN,
    "fedhenn_homo": FedHeNNHomo,
    "pfedla": PFedLA,
    "heur_pfedla": HeurPFedLA,
    "fedpnas": FedPNAS,
    "ca_fedpnas": CAFedPNAS,
    "feddsnas": FedDSNAS,
    "ca_feddsnas": CAFedDSNAS,
    "lg_fedavg": LGFedAvg,
    "fedproto": FedProto,
    "fedgh": FedGH,
    "fedtgp": FedTGP,
    "fd": FD,
    "fml": FML,
    "fedkd": FedKD,
    "fedopt": FedOpt,
    "ditto": Ditto,
    "scaffold": Scaffold,
    "feddyn": FedDyn,
    "moon": Moon,
    "apfl": APFL,
    "fedamp": FedAMP,
    "ifca": IFCA,
    "fedala": FedALA,
    "knn_per": KNNPer,
    "fedmd": FedMD,
    "feddf": FedDF,
    "heterofl": HeteroFL,
    "fedpac": FedPAC,
}


def get(name: str) -> type[Algorithm[Any, Any]]:
    """The class of a method by its name in the registry.

    Raises:
        UserError: an unknown name, with the nearest choices.

    >>> get("fedprox")(mu=0.1).mu
    0.1
    """
    if name not in REGISTRY:
        raise UserError(f"unknown algorithm {name!r}; {did_you_mean(name, REGISTRY)}")
    return REGISTRY[name]


def registry_name(algorithm: Algorithm[Any, Any]) -> str:
    """The name of a method: that of the registry, or the class's for one that is not registered.

    >>> registry_name(FedAvg())
    'fedavg'
    """
    names = {method: name for name, method in REGISTRY.items()}
    return names.get(type(algorithm), type(algorithm).__name__)


__all__ = [
    "APFL",
    "FD",
    "FLHAGHN",
    "FML",
    "IFCA",
    "REGISTRY",
    "CAFedDSNAS",
    "CAFedPNAS",
    "Ditto",
    "FedALA",
    "FedAMP",
    "FedAvg",
    "FedAvgFT",
    "FedAvgKD",
    "FedBN",
    "FedDF",
    "FedDSNAS",
    "FedDyn",
    "FedFomo",
    "FedGH",
    "FedHeNN",
    "FedHeNNHomo",
    "FedKD",
    "FedMD",
    "FedOpt",
    "FedPAC",
    "FedPNAS",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedTGP",
    "HeteroFL",
    "HeurPFedLA",
    "KNNPer",
    "LGFedAvg",
    "Local",
    "Moon",
    "PFedHN",
    "PFedLA",
    "PFedMe",
    "PerFedAvg",
    "Scaffold",
    "get",
    "registry_name",
]
