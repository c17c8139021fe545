"""Alignment of representations across networks (FedHeNN): kernels, CKA and the Procrustes distance, the mean kernel K̄, and
the public examples on which networks are compared."""

from polyfed.alignment.cka import cka, hsic, linear_cka, linear_kernel, rbf_cka, rbf_kernel
from polyfed.alignment.procrustes import procrustes
from polyfed.alignment.rad import noise_like, rad_rows
from polyfed.alignment.representations import representations
from polyfed.alignment.target import Distance, Target, mean_features, mean_rbf_kernel, reduced

__all__ = [
    "Distance",
    "Target",
    "cka",
    "hsic",
    "linear_cka",
    "linear_kernel",
    "mean_features",
    "mean_rbf_kernel",
    "noise_like",
    "procrustes",
    "rad_rows",
    "rbf_cka",
    "rbf_kernel",
    "reduced",
    "representations",
]
