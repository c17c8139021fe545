"""Alignment of representations across networks (FedHeNN): kernels, CKA, the mean kernel K̄, and the public examples on which
networks are compared."""

from polyfed.alignment.cka import cka, hsic, linear_cka, linear_kernel, rbf_cka, rbf_kernel
from polyfed.alignment.rad import noise_like, rad_rows
from polyfed.alignment.representations import representations
from polyfed.alignment.target import Target, mean_features, mean_rbf_kernel, reduced

__all__ = [
    "Target",
    "cka",
    "hsic",
    "linear_cka",
    "linear_kernel",
    "mean_features",
    "mean_rbf_kernel",
    "noise_like",
    "rad_rows",
    "rbf_cka",
    "rbf_kernel",
    "reduced",
    "representations",
]
